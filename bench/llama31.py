"""Llama 3 as torchtitan trained it in December 2024: every allocation of its steps.

    stream = record(ranks=8, steps=2)          # seconds: 8B, all 32 layers, fake tensors
    stream = record(ranks=256, shape=TP_70B)   # half a minute

One rank of many under FSDP2 with fake tensors and a fake process group: weights, gradients to
reduce and moments in fp32, compute in bf16, sequences of 8,192 tokens, selective recompute by
operator, cross entropy in fp32 over all logits, AdamW with `foreach`, clipping, no compiler. With
`tp` torch's styles share matrices and sequences, and layers run again as a whole. A pipeline's
first stage runs all forwards before a backward, and keeps its weights and gradients gathered.
Sources: pytorch/torchtitan, benchmarks/llama3_h100_202412_torchtitan.md, and what its train.py,
parallelize_llama.py, models/llama/model.py and optimizer.py did then; pull request 642 for where
logits become fp32. Written anew, for its allocations: weights are never set.

Not in it: what the attention kernel's backward asks for inside (0.26 GiB while a layer's backward
runs, when the loss has freed 23 GiB), buffers of NCCL (outside of the allocator).
"""

from __future__ import annotations

from collections import defaultdict
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from checkpointing.tracing.meter import local_part
from checkpointing.tracing.recorder import Recorder
from megacpp.lessons.muon import fake_group
from megacpp.memory.stream import Stream, StreamBlock
from parallel.simulate.fake import fake_tensors

aten = torch.ops.aten


@dataclass(frozen=True)
class Shape:
    """Sizes of a model, by default of Llama-3.1-8B, and its batch.

    Attributes:
        rows, tokens: of a microbatch.
        tp: ranks that share matrices.
        microbatches: of a pipeline's first stage, which has no head; 0: no pipeline.
    """

    num_layers: int = 32
    dim: int = 4096
    num_heads: int = 32
    num_kv_heads: int = 8
    hidden: int = 14336
    vocab: int = 128256
    rows: int = 2
    tokens: int = 8192
    tp: int = 1
    microbatches: int = 0


TP_70B = Shape(80, 8192, 64, 8, 28672, rows=16, tp=8)
STAGE_405B = Shape(16, 16384, 128, 8, 53248, rows=4, tp=8, microbatches=8)


class Norm(nn.Module):
    """RMSNorm as torch's eager mode ran it then: in fp32, operator by operator."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        """Normalise `x`, `[B, T, D]`."""
        wide = x.float()
        scale = torch.rsqrt(torch.pow(wide, 2).mean(-1, keepdim=True).add(1e-5))
        return wide.mul(scale).type_as(x).mul(self.weight)


class Attention(nn.Module):
    """Grouped-query attention with rotary positions."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.head_dim = shape.dim // shape.num_heads
        self.repeats = shape.num_heads // shape.num_kv_heads
        linear = partial(nn.Linear, bias=False)
        self.wq = linear(shape.dim, shape.num_heads * self.head_dim)
        self.wk = linear(shape.dim, shape.num_kv_heads * self.head_dim)
        self.wv = linear(shape.dim, shape.num_kv_heads * self.head_dim)
        self.wo = linear(shape.num_heads * self.head_dim, shape.dim)

    def forward(self, x: Tensor, turns: Tensor) -> Tensor:
        """Return the attention's output, `[B, T, D]`.

        Args:
            x: `[B, T, D]`.
            turns: `[1, T, 1, H / 2]`, complex rotations.
        """
        rows, tokens, _ = x.shape
        heads = partial(torch.reshape, shape=(rows, tokens, -1, self.head_dim))
        q, k, v = self.wq(x), self.wk(x), self.wv(x)
        q, k, v = heads(q), heads(k), heads(v)
        q, k = turned(q, k, turns)
        k, v = repeated(k, self.repeats), repeated(v, self.repeats)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        # By name: what `scaled_dot_product_attention` chooses on an H100.
        out = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, True)[0]
        return self.wo(out.transpose(1, 2).contiguous().view(rows, tokens, -1))


def turned(q: Tensor, k: Tensor, turns: Tensor) -> tuple[Tensor, Tensor]:
    """Apply rotary positions by complex numbers.

    Args:
        q: `[B, T, N, H]`.
        k: `[B, T, K, H]`.
        turns: `[1, T, 1, H / 2]`, complex rotations.
    """
    q_ = torch.view_as_complex(q.float().reshape(*q.shape[:-1], -1, 2))
    k_ = torch.view_as_complex(k.float().reshape(*k.shape[:-1], -1, 2))
    q_out = torch.view_as_real(q_ * turns).flatten(3)
    k_out = torch.view_as_real(k_ * turns).flatten(3)
    return q_out.type_as(q), k_out.type_as(k)


def repeated(x: Tensor, times: int) -> Tensor:
    """Repeat every key or value head for the queries that share it; `x` is `[B, T, K, H]`."""
    rows, tokens, heads, dim = x.shape
    wider = x.unsqueeze(3).expand(rows, tokens, heads, times, dim)
    return wider.reshape(rows, tokens, heads * times, dim)


class FeedForward(nn.Module):
    """SwiGLU feed-forward."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.w1 = nn.Linear(shape.dim, shape.hidden, bias=False)
        self.w2 = nn.Linear(shape.hidden, shape.dim, bias=False)
        self.w3 = nn.Linear(shape.dim, shape.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return the output, `[B, T, D]`, of `x`, `[B, T, D]`."""
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class LlamaLayer(nn.Module):
    """Attention and feed-forward with residuals."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.attention, self.feed_forward = Attention(shape), FeedForward(shape)
        self.attention_norm, self.ffn_norm = Norm(shape.dim), Norm(shape.dim)

    def forward(self, x: Tensor, turns: Tensor) -> Tensor:
        """Return the output, `[B, T, D]`.

        Args:
            x: `[B, T, D]`.
            turns: `[1, T, 1, H / 2]`, complex rotations.
        """
        h = x + self.attention(self.attention_norm(x), turns)
        return h + self.feed_forward(self.ffn_norm(h))


class Llama(nn.Module):
    """Language model of Llama-3.1's architecture."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embed = nn.Embedding(shape.vocab, shape.dim)
        size = 1, shape.tokens, 1, shape.dim // shape.num_heads // 2
        self.register_buffer("turns", torch.empty(size, dtype=torch.complex64))
        self.blocks = nn.ModuleList(LlamaLayer(shape) for _ in range(shape.num_layers))
        if not shape.microbatches:
            self.norm = Norm(shape.dim)
            self.head = nn.Linear(shape.dim, shape.vocab, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        """Return the logits, `[B, T, V]`, of `ids`, `[B, T]`; a first stage's hidden states."""
        h = self.embed(ids)
        for block in self.blocks:
            h = block(h, self.turns)
        return self.head(self.norm(h)) if hasattr(self, "head") else h


SAVED = {  # "selective op": outputs kept, but for every second product's
    aten.mm.default,
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_flash_attention.default,
    aten.max.default,
}


def contexts() -> Any:
    """Return the contexts of one layer's forward and of its recomputation."""
    products: dict[bool, int] = defaultdict(int)

    def policy(context: Any, operator: Any, *_: Any, **__: Any) -> CheckpointPolicy:
        if operator == aten.mm.default:
            products[context.is_recompute] += 1
            if products[context.is_recompute] % 2 == 0:
                return CheckpointPolicy.PREFER_RECOMPUTE
        save = operator in SAVED
        return CheckpointPolicy.MUST_SAVE if save else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def share_matrices(model: Llama, tp: DeviceMesh) -> None:
    """Shard matrices, and the sequence between them, by torch's styles; the loss stays sharded."""
    whole, part = Replicate(), Shard(1)
    styles: dict[str, ParallelStyle] = {
        "embed": RowwiseParallel(input_layouts=whole, output_layouts=part)
    }
    if hasattr(model, "head"):
        head = ColwiseParallel(input_layouts=part, output_layouts=Shard(-1), use_local_output=False)
        styles |= {"norm": SequenceParallel(), "head": head}
    for index in range(len(model.blocks)):
        layer: dict[str, ParallelStyle] = {
            "attention_norm": SequenceParallel(),
            "attention": PrepareModuleInput(
                input_layouts=(part, None), desired_input_layouts=(whole, None)
            ),
            "ffn_norm": SequenceParallel(),
            "feed_forward": PrepareModuleInput(input_layouts=part, desired_input_layouts=whole),
        }
        layer |= {f"attention.{name}": ColwiseParallel() for name in ("wq", "wk", "wv")}
        layer |= {f"feed_forward.{name}": ColwiseParallel() for name in ("w1", "w3")}
        for name in ("attention.wo", "feed_forward.w2"):
            layer[name] = RowwiseParallel(output_layouts=part)
        styles |= {f"blocks.{index}.{name}": style for name, style in layer.items()}
    parallelize_module(model, tp, styles)


def sharded(shape: Shape, ranks: int) -> Llama:
    """Return the model on the meta device under FSDP2, a unit per layer and one for the rest."""
    sizes = (ranks // shape.tp, shape.tp)
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("dp", "tp"))
    with torch.device("meta"):
        model = Llama(shape)
    if shape.tp > 1:
        share_matrices(model, mesh["tp"])
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    last = -1 if shape.microbatches else shape.num_layers - 1
    again: dict[str, Any] = {} if shape.tp > 1 else {"context_fn": contexts}
    for index, block in enumerate(model.blocks):
        model.blocks[index] = checkpoint_wrapper(block, preserve_rng_state=False, **again)
        reshard = index < last
        fully_shard(
            model.blocks[index], mesh=mesh["dp"], mp_policy=policy, reshard_after_forward=reshard
        )
    # FSDP2 of then never resharded the root after its forward.
    fully_shard(model, mesh=mesh["dp"], mp_policy=policy, reshard_after_forward=False)
    return model


def record(ranks: int, steps: int = 2, shape: Shape | None = None) -> Stream:
    """Return all allocations of rank 0 of `ranks`, from the weights on, for `steps` steps."""
    shape = shape or Shape()
    with fake_group(ranks):
        model = sharded(shape, ranks)
        with fake_tensors(memory=True), Recorder(model) as recorder:
            model.to_empty(device="cpu")
            # Shards instead of DTensors around them: the same memory in half the time.
            shards = [nn.Parameter(local_part(p).detach()) for p in model.parameters()]
            optimizer = torch.optim.AdamW(
                shards, lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, foreach=True
            )
            for index in range(steps):
                recorder.mark(f"step {index + 1}")
                _step(model, shards, optimizer, recorder, shape)
            recorder.name_resting(optimizer)
        return with_workspaces(recorder.stream())


def with_workspaces(stream: Stream) -> Stream:
    """Insert cuBLAS's workspaces first: 32 MiB on Hopper for each handle.

    Forward and backward run on separate threads and so have separate handles. Source: pytorch,
    aten/src/ATen/cuda/CublasHandlePool.cpp, parseChosenWorkspaceSize.
    """
    blocks = [StreamBlock(32 * 2**20, "runtime_reserved", "", "cuBLAS workspace") for _ in range(2)]
    count = len(blocks)
    return Stream(
        blocks + stream.blocks,
        [*range(count), *(number + count for number in stream.events)],
        [(event + count, name) for event, name in stream.marks],
    )


def _step(
    model: Llama,
    shards: list[nn.Parameter],
    optimizer: torch.optim.Optimizer,
    recorder: Recorder,
    shape: Shape,
) -> None:
    """Run one training step on fake tensors."""
    with recorder.stage("batch"):
        ids = torch.zeros(shape.rows, shape.tokens, dtype=torch.int64)
        labels = torch.zeros(shape.rows, shape.tokens, dtype=torch.int64)
    optimizer.zero_grad()
    model.zero_grad()
    if shape.microbatches:
        staged(model, [ids] * shape.microbatches)
    else:
        with loss_parallel() if shape.tp > 1 else nullcontext():
            logits = model(ids)
            loss = F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(0, 1))
            del logits
            loss.backward()
    recorder.note_gradients()
    for shard, p in zip(shards, model.parameters(), strict=True):
        assert p.grad is not None
        shard.grad = local_part(p.grad)
    with recorder.stage("clip"):
        torch.nn.utils.clip_grad_norm_(shards, 1.0, foreach=True)
    with recorder.stage("optimizer"):
        optimizer.step()


def staged(model: Llama, batches: list[Tensor]) -> None:
    """Run a pipeline's first stage: all forwards, then all backwards; the last one reduces.

    Args:
        model: sharded stage.
        batches: ids of each microbatch, `[B, T]`.
    """
    assert isinstance(model, FSDPModule)
    sent = [model(ids) for ids in batches]
    while sent:
        for last in (model.set_is_last_backward, model.set_requires_gradient_sync):
            last(len(sent) == 1)
        model.set_reshard_after_backward(len(sent) == 1)
        out = sent.pop(0)
        torch.autograd.backward(out, torch.empty_like(out))
