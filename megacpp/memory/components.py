"""Names of the components of a step's memory, shared by estimates, traces and snapshots."""

from __future__ import annotations

# In the order of a table: what rests first, then what comes and goes, then what no tensor is.
COMPONENTS: dict[str, str] = {
    "parameters": "this rank's shards, in the dtype they are stored in",
    "gradients": "of parameters: shards, and whole ones that wait to be reduced",
    "optimizer_state": "moments of AdamW, momentum of Muon",
    "activations": "what forwards keep for their backwards, by kind of block",
    "moe_routing": "what routing keeps: scores, places, rows that arrived, outputs of experts",
    "head_loss": "embedding, last norm, head and loss",
    "feature_activations": "what optional features keep",
    "communication": "gathered parameters, buffers of collectives",
    "workspace": "temporaries of the block that runs",
    "muon_transient": "temporaries of the optimizer step: whole matrices of Muon, AdamW's",
    "batch": "token ids, labels, documents",
    "runtime_reserved": "context, kernels and library workspaces, outside of any tensor",
    "allocator_overhead": "reserved by the allocator beyond what tensors hold",
}
RESTING = ("parameters", "optimizer_state")  # there before a step begins, and after it
