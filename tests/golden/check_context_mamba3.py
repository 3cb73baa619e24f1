"""Mamba-3 scans cut over context ranks against one recurrence over the whole row.

The distributed scans run on forked gloo ranks; what crosses each boundary is compared as well.
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module

from megacpp.blocks.mamba3.config import Mamba3Config
from megacpp.blocks.mamba3.module import Mamba3, Mamba3Scan
from megacpp.config.schema import ModelConfig
from megacpp.kernels.mamba3.inputs import HeadWeights, Mamba3State, Pairing, ScanInputs
from megacpp.kernels.mamba3.library import mimo_scan, siso_scan
from megacpp.kernels.mamba3.ops import from_halves, to_halves
from megacpp.kernels.mamba3.segments import fold, summarize
from megacpp.model.documents import Documents
from parallel.context.layout import ContextLayout, Order
from parallel.context.scan import ContextScan
from parallel.context.segments import carries
from tests.golden.check_mamba3 import arguments, documents
from tests.golden.harness import GoldenFile
from tests.model.mamba3_upstream import mamba3_mimo, mamba3_siso_combined
from tests.ranks import run_ranks

KNOWN = ("mamba3_*_cp*.safetensors",)

TOKENS_LAST = ("ADT", "DT", "Trap")
TOKENS = ("Q", "K", "V", "Z", "Angles", *TOKENS_LAST)
LEAVES = (*TOKENS, "Q_bias", "K_bias", "D", "MIMO_V", "MIMO_Z", "MIMO_Out")


class Case(NamedTuple):
    """`library`: the scan is that of the library kernels, with stand-ins for the kernels."""

    ranks: int
    kind: Literal["state", "heads"]
    order: Order
    library: bool = False


def check(golden: GoldenFile) -> None:
    leaves = {name: golden.input(name) for name in golden.names() if name in LEAVES}
    (B, T, H, _), mimo = leaves["V"].shape, leaves["Q"].ndim == 5
    docs, cut = documents(golden, B, T), golden.input("carries").shape[0]
    cases = [Case(cut, "state", "contiguous"), Case(cut // 2, "state", "head_tail")]
    cases += [Case(H, "heads", "contiguous"), Case(H, "heads", "head_tail")]
    cases += [case._replace(library=True) for case in cases]
    d_out = golden.input("d_out")
    for ranks in sorted({case.ranks for case in cases}):
        chosen = [case for case in cases if case.ranks == ranks]
        results = run_ranks(on_rank, ranks, chosen, leaves, d_out, docs, mimo)
        for i, case in enumerate(chosen):
            compare(golden, case, [result[i] for result in results])
    check_boundaries(golden, leaves, docs, cut, "half" if mimo else "interleaved")


def on_rank(
    rank: int,
    world: int,
    cases: list[Case],
    leaves: dict[str, Tensor],
    d_out: Tensor,
    docs: Documents,
    mimo: bool,
) -> list[dict[str, Tensor]]:
    """This rank's outputs and gradients of each case."""
    mesh = init_device_mesh("cpu", (world,))
    found = []
    for case in cases:
        layout = ContextLayout.for_rank(case.order, rank, world)
        index_T = layout.index(d_out.shape[1])
        mine = {name: part(name, x, index_T).requires_grad_() for name, x in leaves.items()}
        inputs, weights, _ = arguments(mine, mimo)
        mixer = mixer_of(inputs)
        if case.library:
            mixer.scan = LibraryScan("half" if mimo else "interleaved", 8)
        parallelize_module(mixer, mesh, ContextScan(case.kind, layout))
        out = mixer.scan(inputs, weights, docs.take(index_T))
        out.backward(d_out[:, index_T])
        found.append({"out": out.detach()} | {n: x.grad for n, x in mine.items()})
    return found  # type: ignore[return-value]


class LibraryScan(Mamba3Scan):
    """Scan by a library kernel's stand-in."""

    def forward(
        self,
        inputs: ScanInputs,
        weights: HeadWeights,
        docs: Documents,
        entering: Mamba3State | None = None,
    ) -> Tensor:
        given = (inputs, weights, docs, self.chunk_size, entering)
        if self.pairing == "half":
            return mimo_scan(mamba3_mimo, *given)
        return siso_scan(mamba3_siso_combined, *given)


def mixer_of(inputs: ScanInputs) -> Mamba3:
    """A layer of which only `scan` is used, in chunks that divide nothing."""
    R, N, P = inputs.Q.shape[2], inputs.Q.shape[4], inputs.V.shape[-1]
    mamba = Mamba3Config(d_state=N, headdim=P, mimo_rank=R, chunk_size=3)
    return Mamba3(ModelConfig(dim=P, mamba3=mamba))


def part(name: str, x: Tensor, index_T: Tensor) -> Tensor:
    """A rank's tokens of an input; weights are everybody's."""
    if name not in TOKENS:
        return x.clone()
    return x.index_select(2 if name in TOKENS_LAST else 1, index_T)


def compare(golden: GoldenFile, case: Case, results: list[dict[str, Tensor]]) -> None:
    layout = ContextLayout.for_rank(case.order, 0, case.ranks)
    index_T = layout.gathered_index(golden.input("d_out").shape[1]).argsort()
    for name in results[0]:
        parts = [result[name] for result in results]
        if name == "out":
            golden.expect("out", torch.cat(parts, 1)[:, index_T])
        elif name in TOKENS:
            dim = 2 if name in TOKENS_LAST else 1
            golden.expect(f"grad_{name}", torch.cat(parts, dim).index_select(dim, index_T))
        else:
            golden.expect(f"grad_{name}", torch.stack(parts).sum(0))


def check_boundaries(
    golden: GoldenFile, leaves: dict[str, Tensor], docs: Documents, cut: int, pairing: Pairing
) -> None:
    """What each slice says of itself, and the state that enters the next, in both frames."""
    inputs, weights, _ = arguments(leaves, pairing == "half")
    T = inputs.V.shape[1]
    layout = ContextLayout.for_rank("contiguous", 0, cut)
    slices = [slice(w * T // cut, (w + 1) * T // cut) for w in range(cut)]
    parts = [inputs.part(slice(None), tokens) for tokens in slices]
    of_parts = [docs.take(torch.arange(T)[tokens]) for tokens in slices]
    summaries = [summarize(i, weights, d, pairing) for i, d in zip(parts, of_parts, strict=True)]
    carries_WB = carries(of_parts[0], layout)
    states = fold(summaries, carries_WB, weights, pairing)

    turns = torch.stack([s.turn for s in summaries])
    # A file of whole rows counts their first token as no start; nothing enters there anyway.
    starts_W1 = torch.arange(cut)[:, None] == 0
    golden.expect("carries", carries_WB | (starts_W1 if docs.whole else torch.tensor(False)))
    golden.expect("local_log_decay", torch.stack([s.decay for s in summaries]))
    golden.expect("local_angle", same_turn(turns, golden.input("local_angle")))
    added = torch.stack([from_halves(s.added, pairing) for s in summaries])
    golden.expect("local_state", turned(added, turns, pairing))
    continues_WB = torch.stack([d.positions_BT[:, 0] > 0 for d in of_parts])
    entering = [s.kept(c).ssm for s, c in zip(states[:-1], continues_WB, strict=True)]
    golden.expect("entering_state", torch.stack(entering))

    after = states[1:]
    golden.expect("v_last", torch.stack([weights.ranks_of_token(s.v) for s in after]))
    absolute, angle = [], torch.zeros_like(turns[0])
    for turn, carries_B in zip(turns, carries_WB, strict=True):
        angle = torch.where(carries_B[:, None, None], angle, 0.0) + turn
        absolute.append(angle)
    angles, k = torch.stack(absolute), torch.stack([s.k for s in after])
    golden.expect("abs_angle", same_turn(angles, golden.input("abs_angle")))
    golden.expect("abs_ssm", turned(torch.stack([s.ssm for s in after]), angles, pairing))
    golden.expect("abs_k", turned(k, angles, pairing))
    golden.expect("local_k", turned(k, turns, pairing))


def same_turn(got: Tensor, want: Tensor) -> Tensor:
    """`got` as the angle nearest to `want`: they are equal modulo a turn."""
    return want + torch.remainder(got - want + math.pi, 2 * math.pi) - math.pi


def turned(x_N: Tensor, angle_A: Tensor, pairing: Pairing) -> Tensor:
    """`[W, B, H, X, N]` with pair i of N turned by angle i of `[W, B, H, A]`."""
    first, second = to_halves(x_N, pairing).chunk(2, -1)
    angle = F.pad(angle_A, (0, first.shape[-1] - angle_A.shape[-1]))[..., None, :]
    pairs = torch.complex(first.contiguous(), second.contiguous()) * torch.polar(
        torch.ones_like(angle), angle
    )
    return from_halves(torch.cat([pairs.real, pairs.imag], -1), pairing)
