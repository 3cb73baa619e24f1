"""Training step on random rows: accumulate, clip, step; and its memory on a device.

Legend: B rows, T tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

import torch

from bench.gpu.clock import settle
from bench.step import BuiltRun
from megacpp.config.schema import Config
from megacpp.data.batches import Batch
from megacpp.errors import config_error
from megacpp.kernels.experts.grouped_mm import grouped_backend
from megacpp.launch.gate import Estimator
from megacpp.memory.estimate import MemoryEstimate
from megacpp.model.documents import Documents
from megacpp.model.pattern import block_letters
from megacpp.model.precision import compute_dtype
from megacpp.run.kernel_check import packed_documents
from optim.clip import clip_gradients
from optim.muon_adamw import MuonAdamW
from optim.newton_schulz import newton_schulz_flops
from parallel.mesh import World

GIB = 2**30
DOCUMENTS = 4  # documents in a packed row


class Steps(BuiltRun):
    """Training step of one process; rows come from the host, as from a loader.

    Args:
        config: configuration of the model.
        device: device of the run.
        packed: rows of several documents, as in training; else one document a row.
    """

    def __init__(self, config: Config, device: torch.device, packed: bool) -> None:
        super().__init__(config, World(0, 1, device))
        number = config.train.grad_accum
        self.batches = [made_up(config, packed, seed) for seed in range(number)]
        self.parameters = sum(p.numel() for p in self.model.parameters())

    def one_pass(self) -> None:
        """Run forward and backward of one microbatch."""
        self.boundary.accumulate(self.batches[:1])

    def step(self) -> None:
        """Run a whole step of all its microbatches."""
        self.boundary.accumulate(self.batches)
        self.update()

    def muon_flops(self) -> int:
        """FLOPs of the products of Newton-Schulz in one update."""
        plan = self.optimizer.plan() if isinstance(self.optimizer, MuonAdamW) else None
        return sum(
            newton_schulz_flops(rows, m.parameter.shape[-1], m.solver[0])
            for m in (plan.matrices if plan else ())
            for rows in m.view.heights(m.parameter.shape)
        )


class CapturedSteps(Steps):
    """Training step with forward and backward of a microbatch as one CUDA graph.

    All of it runs on a stream of its own (`on_stream`), because autograd nodes remember the stream
    that they were created on. Gradients stay in place and are zeroed, and rows are copied into the
    captured ones. Outside the graph are the counts for the divisor, the guard's check, clipping,
    and the optimizer, whose learning rate is a number.
    """

    def __init__(self, config: Config, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        with self.on_stream():
            super().__init__(config, device, packed=False)
            self.batch = self.batches[0].to(device)
            targets = sum(batch.num_targets for batch in self.batches)
            self.divisor = torch.tensor(float(targets), device=device)
            # Scales of auxiliary losses are those of a step of the boundary. Libraries make their
            # handles and workspaces, and gradients appear.
            self.boundary.accumulate(self.batches)
            for _ in range(2):
                self._body()
            self._zero()
            self.replay = self._captured()
            for source in self.boundary.sources:
                source.forget()

    def on_stream(self) -> AbstractContextManager[object]:
        """Return the context of the steps' stream."""
        if self.stream is None:
            return nullcontext()
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        return torch.cuda.stream(self.stream)

    def one_pass(self) -> None:
        """Replay one microbatch."""
        self._take(self.batches[0])
        self.replay()

    def step(self) -> None:
        """Run a whole step of all its microbatches."""
        for batch in self.batches:
            self._take(batch)
            self.replay()
        self.update()

    def update(self) -> None:
        """Clip, step and zero the gradients."""
        clip_gradients(self.model.parameters(), self.config.optim.clip_norm)
        self.optimizer.step()
        self._zero()
        self.boundary.finish_step()

    def _take(self, batch: Batch) -> None:
        self.batch.ids_BT.copy_(batch.ids_BT, non_blocking=True)
        self.batch.labels_BT.copy_(batch.labels_BT, non_blocking=True)

    def _body(self) -> None:
        batch = self.batch
        with self.boundary._precision():
            out = self.model(batch.ids_BT, batch.labels_BT, batch.docs)
        (out.loss_sum / self.divisor.to(out.loss_sum.dtype)).backward()
        batch.docs.forget()

    def _zero(self) -> None:
        for p in self.model.parameters():
            if p.grad is not None:
                p.grad.zero_()

    def _captured(self) -> Callable[[], None]:
        """On a CPU, which has no graphs, the body itself."""
        if self.stream is None:
            return self._body
        settle(self.device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=self.stream):
            self._body()
        return graph.replay


def graph_unsupported_reason(config: Config, device: torch.device) -> str | None:
    """Return the reason why forward and backward can't be one CUDA graph, or None.

    A graph repeats kernels with the addresses and numbers of its capture: sizes must not change
    (rows are whole here: a table of documents has another size in each batch), the host must read
    nothing in between, and no number of its own may change.
    """
    if device.type != "cuda":
        return None  # the body runs without a graph, for tests
    model, recompute = config.model, config.recompute
    dtype, sizes = compute_dtype(config.precision, device), (model.moe.hidden_dim, model.dim)
    routed = "E" in block_letters(model.pattern, model.depth)
    looped = routed and grouped_backend(device.type, dtype, *sizes) == "loop"
    around = model.mtp.depths or model.ngram.heads or model.engram.layers
    rules = {
        "what is offloaded waits for copies on other streams": recompute.offload != "none",
        "the host draws projections of compressed layers anew": recompute.compress,
        "the host must know how many rows each expert has": looped,
        "what is looked up around a token is made on the host": around,
        "the host changes the loss scale of fp16": dtype == torch.float16,
        "Transformer Engine keeps scales of its own between microbatches": (
            config.precision.fp8 == "te"
        ),
        "the host starts the maxima of QK-clip anew": config.optim.qk_clip,
    }
    return next((why for why, holds in rules.items() if holds), None)


def made_up(config: Config, packed: bool, seed: int = 0) -> Batch:
    """Return random rows of a microbatch, on the host."""
    shape = B, T = config.train.device_batch_size, config.data.seq_len
    g = torch.Generator().manual_seed(seed)
    ids_BT = torch.randint(config.model.vocab_size, shape, generator=g)
    labels_BT = torch.randint(config.model.vocab_size, shape, generator=g)
    docs = packed_documents(B, T, DOCUMENTS) if packed else Documents.rows(B, T)
    return Batch(ids_BT, labels_BT, docs, B * T, B * T, tuple(range(B)))


def expected(config: Config, device: torch.device) -> MemoryEstimate:
    """Return the launch gate's estimate of a run."""
    return Estimator(config, 1, device).admission(config).estimate


def in_use(device: torch.device) -> dict[str, int]:
    """Return peak bytes since the peaks were reset; empty on a CPU.

    `total` is what the allocator reserved plus other memory in use on the device: the context,
    libraries, other processes.
    """
    if device.type != "cuda":
        return {}
    stats = torch.cuda.memory_stats(device)
    free, whole = torch.cuda.mem_get_info(device)
    outside = max(0, whole - free - stats["reserved_bytes.all.current"])
    reserved = stats["reserved_bytes.all.peak"]
    allocated = stats["allocated_bytes.all.peak"]
    return {"allocated": allocated, "reserved": reserved, "total": reserved + outside}


def beside_estimate(config: Config, device: torch.device) -> dict[str, float | bool | None]:
    """Return GiB that a step took, GiB that the gate expects, and the relative error."""
    found, used = expected(config, device), in_use(device)
    row: dict[str, float | bool | None] = {f"{name}_gib": n / GIB for name, n in used.items()}
    row |= {"estimate_gib": found.point / GIB, "upper_gib": found.upper / GIB}
    row |= {"tensors_gib": found.tensors / GIB, "moment": found.moment}  # type: ignore[dict-item]
    if used:
        row["estimate_off"] = found.point / used["total"] - 1
        row["tensors_off"] = found.tensors / used["allocated"] - 1
        row["upper_held"] = used["total"] <= found.upper
    return row


def fitted(configs: Iterable[Config], device: torch.device) -> Config:
    """Return the first configuration whose upper bound fits a device.

    Raises:
        ConfigError: none does.
    """
    config, found = Config(), None
    for config in configs:
        found = expected(config, device)
        if found.verdict not in ("at_risk", "does_not_fit"):
            return config
    assert found is not None and found.budget is not None, "no configuration"
    raise config_error(
        "model.depth",
        config.model.depth,
        f"may not fit ({found.upper / GIB:.1f} of {found.budget / GIB:.1f} GiB)",
        "take a device with more memory, or a smaller model",
    )


def compiled(config: Config, is_tiny: bool) -> Config:
    """Return the configuration with compiled blocks; the compiler replaces the recompute policy."""
    backend = "aot_eager" if is_tiny else "inductor"  # inductor takes a minute on a CPU
    return replace(config, train=replace(config.train, compile=backend))
