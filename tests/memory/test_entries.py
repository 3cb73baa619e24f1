"""Every setting of what a step does changes the memory estimate, or is named with a reason.

A setting without a line here fails: a feature comes with its entry in the estimator.
"""

from __future__ import annotations

from dataclasses import fields, is_dataclass, make_dataclass, replace
from typing import get_type_hints

import pytest

from megacpp.config.arguments import parse_run
from megacpp.config.policy import CheckpointingPolicy
from megacpp.config.schema import Config
from megacpp.memory.estimate import estimate

# Settings of these say how a run goes on and where it writes.
NOT_MEMORY = ("run", "checkpoint", "speed")


def sections(kind: type, name: str = "") -> dict[str, type]:
    """Return the classes of settings by section."""
    found = {name: kind}
    for key, of in get_type_hints(kind).items():
        if is_dataclass(of) and key not in NOT_MEMORY:
            assert isinstance(of, type)
            found |= sections(of, f"{name}.{key}".lstrip(".").replace("_", "-"))
    return found


SECTIONS = {name: kind for name, kind in sections(Config).items() if name}
SMALL = (
    "dense_110m --model.dim 64 --model.vocab-size 256 --model.mlp.hidden-dim 128 --data.seq-len 64 "
    "--model.attention.num-heads 4 --model.attention.num-kv-heads 2 --model.attention.head-dim 16 "
    "--train.tokens-per-step 0 --train.grad-accum 2 --model.depth 3 --recompute.ablock none "
    "--recompute.eblock none --recompute.mblock none --recompute.rblock none"
)
GPU = "--train.device cuda --model.pattern"
MLA = "--model.attention.kind mla --model.attention.no-qk-norm --model.attention.q-lora-rank 32"
MLA += " --model.pattern AFF"
SPARSE = "--model.pattern AAF --model.attention.sparse"
CHOICE = f"{SPARSE}.layers all {SPARSE.split()[-1]}.top-k 8"
# More than what is on its way at a time, which stays counted.
MANY = "--train.device-batch-size 32768"
OFFLOAD = (
    f"{MANY} --train.device cuda --recompute.offload saved_tensors --recompute.offload-min-mib"
)
FP8 = "--precision.fp8 torchao --precision.fp8-ends 0 --model.pattern FFF"
# By setting: ranks, flags around it, and two of its values.
ENTRIES: dict[str, tuple[int, str, str, str]] = {
    "recompute.ablock": (1, "--model.pattern AFF", "none", "full"),
    "recompute.eblock": (1, "--model.pattern EFF", "none", "expert_gemm_only"),
    "recompute.mblock": (1, "--model.pattern MFF", "none", "conv_bc_only"),
    "recompute.rblock": (1, "--model.pattern RFF", "none", "recurrence"),
    "recompute.gblock": (1, "--model.pattern GFF", "none", "full"),
    "recompute.fblock": (1, "--model.pattern FFF", "none", "full"),
    "recompute.norms": (1, "--model.pattern FFF", "False", "True"),
    "recompute.regather": (2, "--mesh.tp 2 --model.pattern FFF", "off", "on"),
    "recompute.core-attn": (1, "--model.pattern AFF", "False", "True"),
    "recompute.mlp": (1, "--model.pattern FFF", "False", "True"),
    "recompute.mla-q-upproj": (1, MLA, "False", "True"),
    "recompute.mla-kv": (1, MLA, "False", "True"),
    "recompute.mtp": (1, "--model.pattern FFF --model.mtp.depths 2", "False", "True"),
    "recompute.mhc-group-size": (1, "--model.pattern FFF --model.mhc.streams 2", "-1", "2"),
    "recompute.offload": (1, f"{MANY} {GPU} FFF", "none", "saved_tensors"),
    "recompute.offload-min-mib": (1, f"{OFFLOAD.rsplit(' ', 1)[0]} --model.pattern FFF", "0", "9"),
    "recompute.offload-host-gib": (1, f"{OFFLOAD} 0 --model.pattern FFF", "0.0001", "64"),
    "recompute.compress": (1, "--model.pattern FFF", "0", "0.25"),
    "recompute.activation-memory-budget": (
        1,
        "--train.compile inductor --model.pattern FFF",
        "1",
        "0",
    ),
    "train.device-batch-size": (1, "--model.pattern FFF", "4", "8"),
    "train.grad-accum": (1, "--model.pattern FFF", "1", "2"),
    "train.gradient-sync": (2, "--model.pattern FFF", "defer", "each"),
    "train.device": (1, "--model.pattern FFF", "cpu", "cuda"),
    "train.compile": (1, "--model.pattern AFF", "off", "inductor"),
    "precision.dtype": (1, "--model.pattern FFF", "bf16", "fp32"),
    "precision.fp8": (1, "--precision.fp8-ends 0 --model.pattern FFF", "off", "torchao"),
    "precision.fp8-layers": (1, FP8.replace("FFF", "AFF"), "F", "AF"),
    "kernels.attention": (1, f"{GPU} AFF", "varlen", "torch"),
    "kernels.mamba3": (1, f"{GPU} MFF --data.seq-len 256", "mamba_ssm", "torch"),
    "kernels.m2rnn": (1, f"{GPU} RFF", "triton", "torch"),
    "kernels.gated-delta-rule": (1, f"{GPU} GFF", "triton", "torch"),
    "kernels.short-conv": (1, f"{GPU} MFF --model.mamba3.conv-kernel 64", "triton", "torch"),
    "kernels.gates": (1, f"{GPU} RFF", "triton", "torch"),
    "kernels.experts": (1, f"{GPU} EFF", "triton", "torch"),
    "kernels.cross-entropy": (1, f"{GPU} FFF", "triton", "torch"),
    "kernels.rms-norm": (1, f"{GPU} FFF", "triton", "torch"),
    "model.attention.sparse.layers": (1, "--model.pattern AAF", "0", "all"),
    "model.attention.sparse.top-k": (1, f"{SPARSE}.layers all", "8", "16"),
    "model.attention.sparse.num-heads": (1, CHOICE, "2", "4"),
    "model.attention.sparse.head-dim": (1, CHOICE, "16", "32"),
    "model.attention.sparse.share": (1, CHOICE, "1", "2"),
    "model.attention.sparse.own": (1, f"{CHOICE} {SPARSE.split()[-1]}.share 2", "0", "1"),
    "model.attention.sparse.stage": (1, f"{CHOICE} --data.seq-len 512", "sparse", "dense"),
}
IGNORED = {
    "recompute.last-layer": "has one value",
    "recompute.fp8-wrapper": "is which function runs again, not what",
    "recompute.compress-redraw": "is when projections are drawn",
    "train.tokens-per-step": "becomes grad_accum",
    "train.batch-warmup-steps": "starts with fewer microbatches; the last steps decide",
    "train.num-chunks": "is of a pipeline, whose forms tests/memory/test_accumulation.py holds",
    "train.static-shapes": "forbids a warmup",
    "train.divisor": "is a number",
    "train.nonfinite": "is a decision behind the step",
    "train.max-skips": "counts steps",
    "train.rewinds": "counts steps",
    "train.max-spikes": "counts steps",
    "precision.loss-scale": "is a number",
    "precision.loss-scale-growth": "counts steps",
    "precision.fp8-local-scales": "is a permission",
    "precision.fp8-ends": "leaves kinds out; layers of a kind are estimated alike",
    "precision.fp8-recipe": "is what has a scale; tensors in FP8 are as many",
    "precision.fp8-all-gather": "is estimated as without it, which is more",
    "model.attention.sparse.loss": "is a weight",
}
# Ranks, pattern and flags, then settings of a section, each with two of its values.
GROUPS = (
    (
        "model",
        1,
        "FFF",
        "dim 256 128; depth 12 6; vocab-size 4096 2048; tie-embeddings false true; pattern AFF MFF",
    ),
    (
        "model.attention",
        1,
        "AFF",
        "num-heads 8 4; num-kv-heads 2 1; head-dim 64 32; qk-norm false true; "
        "qk-norm-wide false true; qkv-bias false true; output-gate false true",
    ),
    (
        "model.mamba3",
        1,
        "MFF",
        "d-state 64 32; expand 2 1; headdim 64 32; ngroups 1 2; mimo-rank 1 2; "
        "a-activation heavy_tail softplus; out-norm false true; conv-kernel 0 1; "
        "chunk-size 64 32",
    ),
    (
        "model.m2rnn",
        1,
        "RFF",
        "num-heads 0 2; key-dim 64 32; value-dim 16 8; conv-kernel 4 2; chunk-size 64 32",
    ),
    (
        "model.gated-deltanet",
        1,
        "GFF",
        "num-key-heads 2 1; num-value-heads 4 2; key-dim 64 32; value-dim 64 32; "
        "conv-kernel 4 2; allow-neg-eigval false true; gate false true; chunk-size 64 32",
    ),
    (
        "model.moe",
        1,
        "EFF --model.moe.num-experts 8 --model.moe.top-k 2 --model.moe.hidden-dim 64",
        "num-experts 8 4; top-k 2 1; hidden-dim 256 128; activation swiglu relu2; "
        "num-shared 1 2; shared-hidden-dim 256 128; shared-gate false true; "
        "score sigmoid softmax; null-rho 1.0 0.5; capacity-factor 0.1 0.5; "
        "balance-loss 0.0 0.1; sequence-loss 0.0 0.1; z-loss 0.0 0.1",
    ),
    ("model.mlp", 1, "FFF", "hidden-dim 1024 512; activation swiglu relu2"),
    (
        "model.mtp",
        1,
        "FFF --model.mtp.depths 2",
        "depths 0 1; shared false true; hidden pre_norm post_norm; hidden-dim 0 1; "
        "detach-trunk false true; detach-head false true",
    ),
    ("model.top", 1, "FFF --model.top.window 8", "loss 0.0 0.1"),
    ("model.mhc", 1, "FFF --model.mhc.streams 2", "streams 1 2; collapse mean sum"),
    ("data", 1, "FFF", "seq-len 256 128"),
    ("mesh", 4, "FFF", "pp 1 2; dp-replicate 1 2; cp 1 2; tp 1 2; reshard auto always"),
    (
        "optim",
        1,
        "FFF",
        "name muon_adamw adamw; adamw-state fp32 8bit; muon-momentum-dtype auto fp32; "
        "muon-dtype auto fp32",
    ),
    ("model.attention", 1, "AFF --model.attention.no-qk-norm", "kind gqa mla"),
    (
        "model.attention",
        1,
        "AFF --model.attention.kind mla --model.attention.no-qk-norm",
        "q-lora-rank 16 32; kv-lora-rank 32 64; qk-nope-head-dim 32 64; "
        "qk-rope-head-dim 32 64; v-head-dim 32 64",
    ),
    ("model.attention", 1, "AFF --model.attention.window 8", "full-layers 0 every:2"),
    ("model.m2rnn", 1, "RFF --model.m2rnn.num-heads 4", "num-q-heads 1 2; num-k-heads 1 2"),
    ("model.top", 1, "FFF --model.top.loss 0.1", "window 8 32"),
    (
        "model.ngram",
        1,
        "FFF --model.ngram.heads 2",
        "heads 2 4; max-order 2 3; table-size 1000 5000; dim 16 32",
    ),
    (
        "model.engram",
        1,
        "AFF --model.engram.layers 0",
        "heads 4 8; max-order 2 3; table-size 1000 5000; dim 64 128; conv-kernel 2 4",
    ),
    ("model.engram", 1, "AAF", "layers 0 0,1"),
    ("mesh", 2, "EFF --mesh.ep 2", "ep-dispatch per_rank per_expert"),
    ("mesh", 2, "EFF", "ep 1 2"),
    ("mesh", 2, "AFF --mesh.cp 2", "cp-attention all_gather heads"),
    ("mesh", 2, "MFF --mesh.cp 2 --mesh.cp-order contiguous", "cp-mamba3 state heads"),
    (
        "mesh",
        2,
        "RFF --mesh.cp 2 --mesh.cp-order contiguous --model.m2rnn.num-heads 4",
        "cp-m2rnn serial heads",
    ),
    ("mesh", 2, "GFF --mesh.cp 2 --mesh.cp-order contiguous", "cp-gated-deltanet state heads"),
    ("mesh", 2, "FFF --mesh.pp 2 --model.depth 8 --train.grad-accum 4", "pp-schedule 1f1b gpipe"),
    ("optim", 1, "FFF --optim.name muon_adamw", "adamw-layers w2 w1,w2"),
    ("optim", 1, "FFF --optim.name adamw", "cautious-weight-decay False True"),
    (
        "optim",
        2,
        "FFF --optim.name muon_adamw --model.dim 1024 --model.mlp.hidden-dim 4096",
        "muon-bucket-mib 1 64",
    ),
)
ENTRIES |= {
    f"{section}.{name}": (ranks, f"--model.pattern {around}", before, after)
    for section, ranks, around, settings in GROUPS
    for name, before, after in map(str.split, settings.split("; "))
}
# By section and reason.
NO_BYTES = (
    ("model", "numbers", "norm-eps logit-softcap z-loss init-std"),
    ("model", "where a norm is, not how many", "post-norm"),
    ("model.attention", "numbers", "rope-theta rope-fraction softcap"),
    ("model.attention", "which keys are seen; kernels keep none of the scores", "window"),
    ("model.attention", "YaRN's figures are numbers", "yarn"),
    ("model.attention", "a limit", "max-seq-len"),
    ("model.mamba3", "numbers", "a-floor dt-min dt-max dt-init-floor"),
    ("model.mamba3", "how many dims turn; the rotated tensor is as wide", "rope-fraction"),
    ("model.m2rnn", "a number, and what it is of", "gradient-clip clip-mode"),
    ("model.moe", "numbers", "route-scale load-warning bias-update-rate"),
    ("model.moe", "which experts are chosen", "softmax-order num-groups top-k-groups"),
    ("model.mtp", "numbers", "loss loss-final switch beta"),
    ("model.mtp", "an order", "order"),
    ("model.ngram", "a number", "lr-factor"),
    ("model.engram", "numbers", "seed lr-factor"),
    ("model.mhc", "the order of operations, rounds on a small table, first values",
     "ordering iterations init"),
    ("data", "which rows are read", "path mix"),
    ("mesh", "what the other axes leave", "dp-shard"),
    ("mesh", "which tokens a rank has, not how many", "cp-order"),
    ("optim", "numbers", "lr embed-lr head-lr vector-lr beta1 beta2 eps weight-decay muon-lr"
     " muon-momentum muon-weight-decay clip-norm"),
    ("optim", "numbers of a schedule", "schedule warmup-steps warmup-ratio decay-ratio"
     " final-lr-ratio"),
    ("optim", "a norm of each head's queries and keys", "qk-clip"),
    ("optim", "how often one product is repeated, and its factors",
     "muon-steps muon-coefficients muon-scale muon-nesterov"),
    ("memory", "what is made of an estimate, or measured", "gate device-gib headroom fit"
     " fit-candidates calibration snapshot-every snapshot-gap"),
    ("memory", "how the allocator finds room; the estimate has one share for both",
     "expandable-segments"),
)  # fmt: skip
IGNORED |= {
    f"{section}.{name}": reason for section, reason, names in NO_BYTES for name in names.split()
}


def moments(name: str, value: str, size: int, around: str) -> dict[str, int]:
    """Return moments of an estimate; kernels don't have to be installed."""
    given = [] if name.startswith("kernels.") else [f"--{name}", value]
    config = parse_run([*SMALL.split(), *around.split(), *given], size).config
    if not given:
        kernel = {name.partition(".")[2].replace("-", "_"): value}
        config = replace(config, kernels=replace(config.kernels, **kernel))
    return estimate(config, size, detail=False).moments


@pytest.mark.parametrize("name", ENTRIES)
def test_a_setting_changes_the_estimate(name: str) -> None:
    size, around, *values = ENTRIES[name]
    before, after = (moments(name, value, size, around) for value in values)
    assert before != after


def missing(kinds: dict[str, type]) -> set[str]:
    """Return the settings of some sections that have no line."""
    names = {
        f"{section}.{field.name.replace('_', '-')}"
        for section, kind in kinds.items()
        for field in fields(kind)
    }
    return names - ENTRIES.keys() - IGNORED.keys() - SECTIONS.keys()


def test_no_setting_is_without_an_entry() -> None:
    assert missing(SECTIONS) == set()
    assert not ENTRIES.keys() & IGNORED.keys()
    known = {
        f"{n}.{f.name.replace('_', '-')}" for n, kind in SECTIONS.items() for f in fields(kind)
    }
    assert ENTRIES.keys() | IGNORED.keys() <= known


def test_a_new_setting_needs_an_entry() -> None:
    new = make_dataclass("New", [("twice", bool, False)], bases=(CheckpointingPolicy,), frozen=True)
    assert missing({"recompute": new}) == {"recompute.twice"}
