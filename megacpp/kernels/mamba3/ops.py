"""Operations of the chunked Mamba-3 scan that plain autograd would make slow or inexact.

Legend: B rows, J chunks of a row, C tokens of a chunk, H heads, R MIMO rank, N state size, A
rotated pairs, X whatever is carried of a head. Time is the last dim (q_BHJNRC), so that
every elementwise pass is contiguous.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megacpp.kernels.mamba3.inputs import HeadWeights, Pairing, ScanInputs
from megacpp.model.documents import Documents
from megacpp.torch_extras import once_differentiable


@dataclass(frozen=True, eq=False)
class Chunks:
    """Visibility among the tokens of chunks; a size-1 B stands for every row.

    Attributes:
        before_BJCC: [t, s] s < t in the same document and chunk; 0.0 or 1.0, the others boolean.
        enters_BJC: the token's document was already running when the chunk began. In the first
            chunk that is the document which an initial state belongs to.
        leaves_BJC: the token's document still runs at the last token of the chunk.
        whole: every row is one document.
    """

    before_BJCC: Tensor
    enters_BJC: Tensor
    leaves_BJC: Tensor
    whole: bool

    @staticmethod
    def for_documents(docs: Documents, chunk: int, dtype: torch.dtype) -> Chunks:
        """Return the chunks of a batch, made once; padding extends a row's last document."""
        return docs.memo(("mamba3", chunk, dtype), lambda: Chunks._make(docs, chunk, dtype))

    @staticmethod
    def _make(docs: Documents, chunk: int, dtype: torch.dtype) -> Chunks:
        ids_BT = docs.ids_BT[:1] if docs.whole else docs.ids_BT
        tokens = ids_BT.shape[1]
        changes_BT = F.pad(ids_BT[:, 1:] != ids_BT[:, :-1], (1, -tokens % chunk), value=False)
        # Running numbers instead of ids: an id may come back in a later document of the row.
        run_BJC = changes_BT.cumsum(1).unflatten(1, (-1, chunk))
        entering_BJ = F.pad(run_BJC[:, :-1, -1], (1, 0))
        earlier_CC = torch.ones(chunk, chunk, dtype=torch.bool, device=ids_BT.device).tril(-1)
        return Chunks(
            before_BJCC=((run_BJC[..., :, None] == run_BJC[..., None, :]) & earlier_CC).to(dtype),
            enters_BJC=run_BJC == entering_BJ[..., None],
            leaves_BJC=run_BJC == run_BJC[..., -1:],
            whole=docs.whole,
        )

    @property
    def size(self) -> int:
        """Tokens of a chunk."""
        return self.before_BJCC.shape[-1]

    def same(self, lag: int) -> Tensor:
        """Return [B, J, C - lag]: 1.0 where t and t - lag are of the same document, else 0.0."""
        return self.before_BJCC.diagonal(-lag, -2, -1)


_WEIGHTS = tuple(f.name for f in fields(HeadWeights))


def check_contract(inputs: ScanInputs, weights: HeadWeights) -> None:
    """Assert that decays, steps and parameters are in at least fp32: else it is a bug elsewhere."""
    named = [(name, getattr(weights, name)) for name in _WEIGHTS]  # torch 2.11 compiles no `vars`
    for name, x in [("ADT", inputs.ADT), ("DT", inputs.DT), *named]:
        if isinstance(x, Tensor):
            assert x.dtype in (torch.float32, torch.float64), f"Mamba-3 scan: {name} is {x.dtype}"


def to_halves(x_N: Tensor, pairing: Pairing) -> Tensor:
    """Return x with its last dim reordered so that partners are N/2 apart."""
    return x_N if pairing == "half" else x_N.unflatten(-1, (-1, 2)).mT.flatten(-2)


def from_halves(x_N: Tensor, pairing: Pairing) -> Tensor:
    """Return x with its last dim in the order of `pairing`, the inverse of `to_halves`."""
    return x_N if pairing == "half" else x_N.unflatten(-1, (2, -1)).mT.flatten(-2)


def segmented_cumsum(x_BHJAC: Tensor, chunks: Chunks) -> Tensor:
    """Return the inclusive cumulative sum over C that restarts at documents.

    log2(C) shifted additions (Hillis & Steele 1986) instead of a product with a 0/1 matrix, which
    a GPU may run in TF32: sums of log decays and angles are part of the fp32 contract.
    """
    if chunks.whole:
        return x_BHJAC.cumsum(-1)
    lags = [1 << i for i in range((x_BHJAC.shape[-1] - 1).bit_length())]
    return _SegmentedCumsum.apply(x_BHJAC, [(k, chunks.same(k)[:, None, :, None]) for k in lags])  # type: ignore[return-value]


@torch.library.custom_op("megacpp::carry", mutates_args=())
def carry(added_BHJX: Tensor, keep_BHJ: Tensor, first_BHX: Tensor, backwards: bool) -> Tensor:
    """Return all s `[B, H, J + 1, ...]`: s[0] = first, s[j+1] = keep[j] s[j] + added[j].

    A loop over chunks outside of an operator would be copied into a compiled graph chunk by chunk:
    at 4,096 tokens a Mamba-3 block had thousands of nodes, and took minutes to compile.

    Args:
        added_BHJX: what each chunk adds.
        keep_BHJ: factor of each chunk; may broadcast.
        first_BHX: state that enters; s has its dtype.
        backwards: s[J] = first, s[j] = keep[j] s[j+1] + added[j].
    """
    B, H, J, *rest = added_BHJX.shape
    s = first_BHX.new_empty(B, H, J + 1, *rest)
    from_, to, order = (1, 0, reversed(range(J))) if backwards else (0, 1, range(J))
    s[:, :, J if backwards else 0] = first_BHX
    s[:, :, to : to + J] = added_BHJX
    keep = keep_BHJ[(..., *[None] * len(rest))]
    for j in order:
        s[:, :, j + to].addcmul_(keep[:, :, j], s[:, :, j + from_])
    return s


@carry.register_fake
def _(added_BHJX: Tensor, keep_BHJ: Tensor, first_BHX: Tensor, backwards: bool) -> Tensor:
    B, H, J, *rest = added_BHJX.shape
    return first_BHX.new_empty(B, H, J + 1, *rest)


def carried_sum(total_BHJA: Tensor, passes_BJ: Tensor, first_BHA: Tensor | None) -> Tensor:
    """Return the sum that enters each chunk, when chunk j adds `total` to what `passes` through it.

    In fp64: the angle of a long document grows to thousands of radians, and only its remainder
    modulo 2 pi matters.
    """
    if first_BHA is None:
        first_BHA = torch.zeros_like(total_BHJA[:, :, 0])
    return _CarriedSum.apply(total_BHJA, passes_BJ, first_BHA)  # type: ignore[return-value]


def bias_and_rotate(
    q_BGJNRC: Tensor,
    k_BGJNRC: Tensor,
    q_bias_GUNR: Tensor,
    k_bias_GUNR: Tensor,
    angle_BHJAC: Tensor,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """Return q and k of every head, `[B, H, J, N, R, C]` in `dtype`: plus its bias, then rotated.

    Rows i and i + N/2 of the N axis turn by angle i < A, the others pass. Saves angles and its
    outputs, not its inputs, for backward: the product that follows saves outputs anyway.

    Args:
        q_BGJNRC: of each group.
        k_BGJNRC: of each group.
        q_bias_GUNR: of the U heads of each group.
        k_bias_GUNR: of the U heads of each group.
        angle_BHJAC: of each head.
        dtype: of the results.
    """
    return _BiasAndRotate.apply(  # type: ignore[return-value]
        q_BGJNRC[:, :, None],
        k_BGJNRC[:, :, None],
        q_bias_GUNR[None, :, :, None, ..., None],
        k_bias_GUNR[None, :, :, None, ..., None],
        angle_BHJAC,
        dtype,
    )


class _SegmentedCumsum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, same: list[tuple[int, Tensor]]) -> Tensor:
        ctx.same = same
        y = x.clone()
        for lag, same_lag in same:
            y[..., lag:].add_(y[..., :-lag] * same_lag)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        dx = grads[0].clone()
        for lag, same_lag in reversed(ctx.same):
            dx[..., :-lag].add_(dx[..., lag:] * same_lag)
        return dx, None


class _CarriedSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, total: Tensor, passes_BJ: Tensor, first: Tensor) -> Tensor:
        ctx.save_for_backward(passes_BJ)  # of the documents, so every layer keeps the same one
        ctx.dtypes = total.dtype, first.dtype
        return carry(total[:, :, :-1], _kept(passes_BJ), first.double(), False)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, Tensor]:
        (passes_BJ,), (of_total, of_first) = ctx.saved_tensors, ctx.dtypes
        d = carry(grads[0][:, :, :-1], _kept(passes_BJ), grads[0][:, :, -1], True)
        dtotal = F.pad(d[:, :, 1:], (0, 0, 0, 1))  # the last goes nowhere
        return dtotal.to(of_total), None, d[:, :, 0].to(of_first)


def _kept(passes_BJ: Tensor) -> Tensor:
    """Return 1 where a sum carries over, else 0, `[B, 1, J - 1]`: the last chunk precedes none."""
    return passes_BJ[:, None, :-1].double()


class _BiasAndRotate(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        q_bias: Tensor,
        k_bias: Tensor,
        angle_BHJAC: Tensor,
        dtype: torch.dtype,
    ) -> tuple[Tensor, Tensor]:
        cos, sin = _cos_sin(angle_BHJAC)
        out = []
        for x, bias in ((q, q_bias), (k, k_bias)):
            out.append(_turn_((x + bias).flatten(1, 2).contiguous(), cos, sin).to(dtype))
        ctx.save_for_backward(*out, angle_BHJAC)
        ctx.shapes = q.shape, q_bias.shape
        return out[0], out[1]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q_out, k_out, angle_BHJAC = ctx.saved_tensors
        cos, sin = _cos_sin(angle_BHJAC)
        shape, bias_shape = ctx.shapes
        dangle = torch.zeros_like(cos)
        dx, dbias = [], []
        for out, dout in ((q_out, grads[0]), (k_out, grads[1])):
            (out1, out2), (dout1, dout2) = _pairs(out, cos), _pairs(dout, cos)
            # A small turn moves (x1, x2) along (-x2, x1).
            dangle += torch.addcmul(dout2 * out1, dout1, out2, value=-1).sum(-2, keepdim=True)
            dout = dout.to(cos.dtype, memory_format=torch.contiguous_format, copy=True)
            turned_back = _turn_(dout, cos, -sin).unflatten(1, bias_shape[1:3])
            dx.append(turned_back.sum_to_size(shape))
            dbias.append(turned_back.sum_to_size(bias_shape))
        return *dx, *dbias, dangle.squeeze(-2), None


def _cos_sin(angle_BHJAC: Tensor) -> tuple[Tensor, Tensor]:
    """Return cos and sin for every rank, `[B, H, J, A, 1, C]`."""
    return angle_BHJAC.cos().unsqueeze(-2), angle_BHJAC.sin().unsqueeze(-2)


def _turn_(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs of `x` in place; return it."""
    x1, x2 = _pairs(x, cos)
    x1_sin = x1 * sin
    x1.mul_(cos).addcmul_(x2, sin, value=-1)
    x2.mul_(cos).add_(x1_sin)
    return x


def _pairs(x: Tensor, cos: Tensor) -> tuple[Tensor, Tensor]:
    """Return views of the N axis: first and second partners of the pairs that turn."""
    half, turned = x.shape[-3] // 2, cos.shape[-3]
    return x.narrow(-3, 0, turned), x.narrow(-3, half, turned)
