"""Stand-ins for local work of which a run without values only needs the shapes.

A recurrence runs token by token, and how many rows an expert gets is a value: under fake tensors
the first takes minutes of Python for results without values, the second doesn't exist. None of the
functions below calls a collective, so a dry run puts outputs of the right shape and type in their
place, joined to the same inputs in autograd's graph. tests/parallel/test_dry_run.py holds that real
ranks, which compute everything, issue the same collectives.

Measurements of saved activations get `memory_stand_ins` instead: nothing is left out but the loop
over tokens inside the chunks of M2RNN, with a product of as many FLOPs in its place, and the number
of rows that each expert gets. tests/checkpointing/test_meter.py holds that real tensors are the
same, byte by byte.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import lru_cache
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from megacpp.blocks.experts.rows import ExpertRows
from megacpp.kernels.experts import grouped_mm
from megacpp.kernels.experts.rows import Groups, group_rows
from megacpp.kernels.experts.sizes import most_slots
from megacpp.kernels.m2rnn import chunks as m2rnn_chunks
from megacpp.kernels.m2rnn.chunks import Chunked, ChunkPlan
from megacpp.kernels.mamba3.chunks import mamba3_chunked
from megacpp.kernels.mamba3.inputs import HeadWeights, Mamba3State, Pairing, ScanInputs
from megacpp.memory.block_trace import DOCUMENT
from megacpp.model.documents import Documents
from megacpp.model.hybrid import HybridLM
from megacpp.model.recompute import PLAIN, Recompute
from megacpp.torch_extras import wide
from parallel.expert.even_routing import EvenRouting, Exchanged
from parallel.expert.parallel import ExpertDispatch
from parallel.simulate import gpu_stand_ins
from parallel.simulate.few_chunks import FEW

Shape = tuple[Sequence[int], torch.dtype]


@contextmanager
def stand_ins() -> Iterator[None]:
    """Replace the originals by stand-ins wherever a module of the project has imported them."""
    with _instead(*SHAPES_ALONE):
        yield


@contextmanager
def memory_stand_ins(every_chunk: bool = True) -> Iterator[None]:
    """Replace fewer originals: saved tensors and FLOPs are those of a real step.

    Args:
        every_chunk: run all chunks of M2RNN and of a head's logits, all blocks and heads of an
            indexer and of sparse and softcapped attention, and all tokens of hyper-connections;
            else those at the ends, which allocate as much as others.
    """
    with _instead(*SAME_MEMORY, *(() if every_chunk else FEW)):
        yield


@contextmanager
def given_batch(model: HybridLM, counts: Mapping[str, int], document: int) -> Iterator[None]:
    """Take a batch of given numbers, inside of the other stand-ins.

    Args:
        model: whose exchanges of rows are those of even choices.
        counts: of an E block, as `ExpertRows.counts`.
        document: tokens of one.
    """
    rows = None
    if counts:
        rows = GivenRows(counts["leaving"], counts["arriving"], counts["copies"], counts["slots"])
    for module in model.modules():
        if isinstance(module, ExpertDispatch) and module.even is not None and rows:
            module.even = GivenRouting(**vars(module.even), given=rows)
    gpu_stand_ins.document_tokens = document
    try:
        with _instead(*((balanced_rows, rows.grouped),) if rows else ()):
            yield
    finally:
        gpu_stand_ins.document_tokens = DOCUMENT


@contextmanager
def _instead(*instead: tuple[Any, Any]) -> Iterator[None]:
    """Replace the first of each pair by the second in every module of the project that has it."""
    others = {id(original): other for original, other in instead}
    modules = [m for name, m in sys.modules.items() if name.startswith(("megacpp.", "parallel."))]
    held = [(module, name, vars(module).get(name)) for module, name in _places(tuple(modules))]
    changed = [place for place in held if id(place[2]) in others]
    for module, name, value in changed:
        setattr(module, name, others[id(value)])
    try:
        yield
    finally:
        for module, name, original in changed:
            setattr(module, name, original)


@lru_cache(maxsize=1)
def _places(modules: tuple[ModuleType, ...]) -> list[tuple[ModuleType, str]]:
    """Return the names by which modules have what is replaced, or what stands for it now."""
    either = {id(x) for pair in (*SHAPES_ALONE, *SAME_MEMORY, *FEW) for x in pair}
    return [
        (module, name)
        for module in modules
        for name, value in vars(module).items()
        if id(value) in either and not module.__name__.startswith("parallel.simulate.")
    ]


def scan(
    inputs: ScanInputs,
    weights: HeadWeights,
    docs: Documents,
    pairing: Pairing,
    chunk_size: int,
    initial: Mamba3State | None = None,
    *,
    recompute: Recompute = PLAIN,
) -> tuple[Tensor, Mamba3State]:
    """Stand-in for `mamba3_chunked`: outputs `[B, T, H, P]` and state of the right shapes.

    Args:
        inputs: of every token.
        weights: of the heads.
        docs: not used.
        pairing: not used.
        chunk_size: not used.
        initial: state in front; joined to the graph.
        recompute: not used.
    """
    (B, _, H, P), dtype, state_dtype = inputs.V.shape, inputs.V.dtype, wide(inputs.V[:0]).dtype
    R, N, A = inputs.Q.shape[2], inputs.Q.shape[-1], inputs.Angles.shape[-1]
    shapes: list[Shape] = [
        (inputs.V.shape, dtype),
        ((B, H, A), state_dtype),
        ((B, H, P, N), state_dtype),
        ((B, H, R, N), dtype),
        ((B, H, P), dtype),
    ]
    given = (*vars(inputs).values(), *vars(weights).values(), *vars(initial or inputs).values())
    y_BTHP, *state = shaped(shapes, *(x for x in given if isinstance(x, Tensor)))
    return y_BTHP, Mamba3State(*state)


class Recurrence:
    """Stand-in for `m2rnn_chunks.Chunked`."""

    @staticmethod
    def apply(
        q_BTNK: Tensor,
        k_BTNK: Tensor,
        v_BTNV: Tensor,
        f_BTN1: Tensor,
        w_NVV: Tensor,
        initial_SNKV: Tensor | None,
        plan: ChunkPlan,
    ) -> tuple[Tensor, Tensor | None]:
        """Return outputs `[B, T, N, V]` and final states of the right shapes.

        Args:
            q_BTNK: queries.
            k_BTNK: keys.
            v_BTNV: values.
            f_BTN1: forget gates.
            w_NVV: state weights.
            initial_SNKV: initial states.
            plan: whether final states are returned.
        """
        (B, T, _, V), K, N = v_BTNV.shape, k_BTNK.shape[-1], plan.num_heads
        shapes: list[Shape] = [((B, T, N, V), v_BTNV.dtype)]
        if plan.final_states:
            assert initial_SNKV is not None, "the number of documents is known to a device alone"
            shapes.append(((len(initial_SNKV), N, K, V), plan.dtype))
        tensors = (q_BTNK, k_BTNK, v_BTNV, f_BTN1, w_NVV, initial_SNKV)
        out = shaped(shapes, *(x for x in tensors if x is not None))
        return out[0], out[1] if plan.final_states else None


def balanced_rows(
    expert_TK: Tensor,
    num_experts: int,
    multiple: int = 1,
    expected: Fraction | int | None = None,
    backend: str = "torch",
) -> Groups:
    """Stand-in for `group_rows`: every expert has an even share of the copies.

    Args:
        expert_TK: chosen experts, without values.
        num_experts: of the layer.
        multiple: groups are padded to a multiple of it.
        expected: copies of a token that aren't nulls, on average; None: no nulls.
        backend: all have the same shapes.
    """
    (T, K), new = expert_TK.shape, expert_TK.new_zeros
    sizes = [int(T * (expected or K) + e) // num_experts for e in range(num_experts)]
    slots = sum(-(-size // multiple) * multiple for size in sizes)
    if expert_TK.is_cuda:
        copies = T * K if expected is None else T * min(K, num_experts)
        slots = most_slots(num_experts, copies, multiple)
    slot_KT = new(T * K).view(T, K).T
    if expected is None:
        return Groups(slot_KT, new(slots), new(num_experts))
    kept_KT = new(T * K, dtype=torch.bool).view(T, K).T
    return Groups(slot_KT, new(slots + 1)[:-1], new(num_experts + 1), kept_KT)


@dataclass(frozen=True)
class GivenRows(ExpertRows):
    """Rows of a rank, whatever its routers choose."""

    def grouped(
        self,
        expert_TK: Tensor,
        num_experts: int,
        multiple: int = 1,
        expected: Fraction | int | None = None,
        backend: str = "torch",
    ) -> Groups:
        """Return groups of as many slots, in place of `group_rows`.

        Args:
            expert_TK: chosen experts.
            num_experts: of this rank.
            multiple: that groups are padded to.
            expected: choices of a token that aren't null, on average; None: there are no nulls.
            backend: all have the same shapes.
        """
        found = balanced_rows(expert_TK, num_experts, multiple, expected)
        return replace(
            found, token_S=expert_TK.new_zeros(self.slots + (expected is not None))[: self.slots]
        )

    def sizes(self, experts: int, multiple: int) -> list[int]:
        """Return copies of each expert of a rank: as many in all, with as much padding."""
        full, rest = divmod(self.slots - self.copies, multiple - 1)
        found = [1] * full + ([multiple - rest] if rest else [])
        found = (found or [0])[:experts]
        found[0] += self.copies - sum(found)
        return found + [0] * (experts - len(found))


@dataclass(frozen=True)
class GivenRouting(EvenRouting):
    """Choices of all ranks that make as many rows of this one."""

    given: GivenRows = field(default_factory=lambda: GivenRows(0, 0, 0, 0))

    def copies(self, tokens: int, ranks: int, rank: int) -> Exchanged:
        """Return copies that leave and that arrive, all of them to and from one rank."""
        each = self.num_experts // ranks
        none = [[0] * each for _ in range(ranks - 1)]
        away = [self.given.leaving, *[0] * (each - 1)]
        return [away, *none], [self._here(each), *none]

    def rows(self, tokens: int, ranks: int, rank: int) -> Exchanged:
        """Return rows that leave and that arrive, with their copies."""
        each = self.num_experts // ranks
        none = [[0] * (each + 1) for _ in range(ranks - 1)]
        away = [self.given.leaving, self.given.leaving, *[0] * (each - 1)]
        return [away, *none], [[self.given.arriving, *self._here(each)], *none]

    def _here(self, each: int) -> list[int]:
        return self.given.sizes(each, grouped_mm.CPU_ROWS)


class ChunkAtOnce(m2rnn_chunks._Chunk):
    """Stand-in for `m2rnn_chunks._Chunk`: the tokens of a chunk meet W in one product.

    The product is as large as theirs together. Any token could start a document, as tensors without
    values can't tell; none is assumed to.
    """

    def __init__(self, plan: ChunkPlan, span: slice, *rest: Any) -> None:
        super().__init__(replace(plan, seqs=replace(plan.seqs, entries=())), span, *rest)

    def _run(self, initial_SNKV: Tensor | None, states_C1NBKV: Tensor) -> dict[int, Tensor]:
        before_CNBKV = states_C1NBKV[:-1]
        _by_head(self.z_CNBKV).baddbmm_(_by_head(before_CNBKV), self.w_NVV)
        return {}

    def state_gradients(
        self,
        dy_CNBV: Tensor,
        dh_NBKV: Tensor,
        dinitial_SNKV: Tensor | None,
        dfinal_SNKV: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return dL/dh, dL/dx and the gradient that leaves the chunk to the left, by one product.

        Args:
            dy_CNBV: gradient of the outputs.
            dh_NBKV: gradient of the state behind the chunk.
            dinitial_SNKV: not used: no document starts.
            dfinal_SNKV: not used: no document ends.
        """
        dafter_CNBKV = self.q_CNBK[..., :, None] * dy_CNBV[..., None, :]
        dx_CNBKV = (1 - self.z_CNBKV.square()).mul_(1 - self.f_CNB11)
        w_back_NVV = self.w_NVV.transpose(1, 2).contiguous()
        _by_head(dafter_CNBKV).baddbmm_(_by_head(dx_CNBKV), w_back_NVV)
        return dafter_CNBKV, dx_CNBKV, dh_NBKV


def _by_head(x_CNBKV: Tensor) -> Tensor:
    """View the memory of `[C, N, B, K, V]` as rows of N matrices; the order has no meaning here."""
    return x_CNBKV.view(x_CNBKV.shape[1], -1, x_CNBKV.shape[-1])


def shaped(outputs: Sequence[Shape], *inputs: Tensor) -> tuple[Tensor, ...]:
    """Return tensors of these shapes and dtypes that depend on `inputs`, without values."""
    apply: Callable[..., tuple[Tensor, ...]] = _Shaped.apply  # type: ignore[assignment]
    return apply(outputs, *inputs)


class _Shaped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, outputs: Sequence[Shape], *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.save_for_backward(*inputs)
        return tuple(inputs[0].new_empty(shape, dtype=dtype) for shape, dtype in outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        inputs = zip(ctx.saved_tensors, ctx.needs_input_grad[1:], strict=True)
        return None, *(torch.empty_like(x) if needed else None for x, needed in inputs)


# Originals and what takes their place: without their work, and where memory is to be the same.
SHAPES_ALONE = (
    (mamba3_chunked, scan),
    (Chunked, Recurrence),
    (group_rows, balanced_rows),
)
SAME_MEMORY = (group_rows, balanced_rows), (m2rnn_chunks._Chunk, ChunkAtOnce)
