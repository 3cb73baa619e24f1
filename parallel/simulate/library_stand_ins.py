"""Tensors that kernels of libraries allocate, without the kernels; no package is needed.

Each class below makes, keeps and frees what the host code of a kernel does, and computes nothing:

    mamba-ssm 2.3.2.post1   SISO: mamba3_siso_combined.py, mamba3_siso_fwd.py, mamba3_siso_bwd.py,
                            angle_dt.py; MIMO: mamba3_mimo.py, mamba3_mimo_bwd.py,
                            mamba3_mimo_utils.py
    torch                   FlexAttention as it is compiled, torch/_inductor/kernel/flex

Where mamba-ssm is installed, tests/model/test_mamba3_interpreted.py and
test_mamba3_mimo_interpreted.py run its kernels themselves and count the same bytes.

Legend: B rows (1: packed), T tokens of a row, H heads, G groups of heads, P head dim, N state size,
R MIMO rank, S sequences.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

FP32 = torch.float32
AT_ONCE = 64  # channels of q and k that one block of the SISO backward turns


def siso(
    Q: Tensor, K: Tensor, V: Tensor, ADT: Tensor, DT: Tensor, Trap: Tensor, **more: Any
) -> Tensor:
    """Return outputs `[B, T, H, P]`, in place of `mamba3_siso_combined`.

    Args:
        Q, K: `[B, T, G, N]`.
        V: `[B, T, H, P]`.
        ADT, DT, Trap: `[B, H, T]`.
        more: the other arguments of the kernel.
    """
    states = more["Input_States"] or (None,) * 4
    Q, K, V, Trap, angles = (x.to(torch.bfloat16) for x in (Q, K, V, Trap, more["Angles"]))
    Z = None if more["Z"] is None else more["Z"].to(torch.bfloat16)
    biases = more["Q_bias"], more["K_bias"]
    rest = more["chunk_size"], more["cu_seqlens"]
    return _Siso.apply(Q, K, V, ADT, DT, Trap, *biases, angles, more["D"], Z, *states, *rest)  # type: ignore[return-value]


class _Siso(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *args: Any) -> Tensor:
        *tensors, chunk, cu_seqlens = args
        Q, _, V, ADT, DT, Trap, _, _, angles = tensors[:9]
        (B, T, H, P), N = V.shape, Q.shape[-1]
        sequences, chunks = _cut(T, chunk, cu_seqlens, -(-T // chunk))
        turned, _ = _angles(angles, DT, sequences or B)
        _contiguous = [x.contiguous() for x in (ADT, DT, Trap, turned)]
        out, plain = V.new_empty(B, T, H, P), V.new_empty(B, T, H, P)
        kept = [
            V.new_empty(B, H, P, chunks * N, dtype=torch.bfloat16),
            V.new_empty(B, H, T, dtype=FP32),
            V.new_empty(B, H, chunks, dtype=FP32),
            *(V.new_empty(B, T, H, N) for _ in "qk"),
            *(V.new_empty(B, H, T, dtype=FP32) for _ in ("q k", "scale", "gamma")),
        ]
        ctx.cut = sequences, chunks
        ctx.save_for_backward(*tensors, turned, out, plain, *kept)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (do,), saved, (sequences, chunks) = grads, ctx.saved_tensors, ctx.cut
        Q, K, V, _, DT, Trap, Q_bias, K_bias, angles, D, Z = saved[:11]
        angle, ssm, k_state, v_state = saved[11:15]
        turned, da = saved[15], saved[19]
        (B, T, H, _), N = V.shape, Q.shape[-1]
        dz = None
        if Z is not None:
            do = do.contiguous()
            dz, _scaled = torch.empty_like(Z), torch.empty_like(do)
        _dq_heads, _dk_heads = V.new_empty(B, T, H, N), V.new_empty(B, T, H, N)
        dv, dda, _dqk = torch.empty_like(V), torch.empty_like(da), torch.empty_like(da)
        dD = V.new_empty(sequences or B, H, dtype=FP32).sum(0)
        _dssm = None if ssm is None else torch.empty_like(ssm)
        dq, dk = torch.empty_like(Q), torch.empty_like(K)
        _dturned = V.new_empty(turned.shape)
        blocks = max(1, N // AT_ONCE)
        dscale, dgamma = (V.new_empty(B, H, blocks, T, dtype=FP32) for _ in range(2))
        biases = [V.new_empty(B, chunks, H, N, dtype=FP32) for _ in range(2)]
        dscale, dgamma = dscale.sum(2), dgamma.sum(2)
        dq_bias, dk_bias = (bias.sum((0, 1)) for bias in biases)
        del biases
        ddt, dtrap = DT.new_empty(DT.shape, dtype=FP32), Trap.float()
        dstates: tuple[Tensor | None, ...] = (None,) * 4
        if ssm is not None:
            more = torch.empty_like(ssm), torch.empty_like(k_state), torch.empty_like(v_state)
            dstates = torch.empty_like(angle), *more
        dangles, ddt_angle = torch.empty_like(angles), torch.empty_like(DT)
        ddt = ddt + ddt_angle
        to = Q_bias.dtype, K_bias.dtype, D.dtype
        dq_bias, dk_bias, dD = (
            x.to(dtype) for x, dtype in zip((dq_bias, dk_bias, dD), to, strict=True)
        )
        return dq, dk, dv, dda, ddt, dtrap, dq_bias, dk_bias, dangles, dD, dz, *dstates, None, None


def mimo(
    Q: Tensor, K: Tensor, V: Tensor, ADT: Tensor, DT: Tensor, Trap: Tensor, **more: Any
) -> Tensor:
    """Return outputs `[B, T, H, P]`, `[B, T, R, H, P]` of all ranks; in place of `mamba3_mimo`.

    Args:
        Q, K: `[B, T, R, G, N]`.
        V: `[B, T, H, P]`.
        ADT, DT, Trap: `[B, H, T]`.
        more: the other arguments of the kernel.
    """
    names = ("Q_bias", "K_bias", "MIMO_V", "MIMO_Z", "MIMO_Out", "Angles", "D", "Z")
    rest = more["chunk_size"], more["dtype"], more["cu_seqlens"]
    return _Mimo.apply(Q, K, V, ADT, DT, Trap, *(more[name] for name in names), *rest)  # type: ignore[return-value]


class _Mimo(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *args: Any) -> Tensor:
        *given, chunk, dtype, cu_seqlens = args
        tensors: list[Any] = [None if x is None else x.contiguous() for x in given]
        Q, _, V, ADT, DT, _, _, _, _, _, mimo_out, angles, _, Z = tensors
        (B, T, H, P), R = V.shape, Q.shape[2]
        sequences, chunks = _cut(T, chunk, cu_seqlens, T // chunk)
        turned, _ = _angles(angles, DT, sequences or B)
        _sums = _segments(ADT, chunks, chunk)
        out = V.new_empty((B, T, H, P) if mimo_out is not None else (B, T, R, H, P), dtype=dtype)
        _gate = V.new_empty(B, T, H, P, dtype=dtype) if Z is None else None
        ctx.cut = sequences, chunks, chunk
        ctx.save_for_backward(*tensors, turned)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:
        sequences, chunks, chunk = ctx.cut
        _do = grads[0].contiguous()
        *tensors, turned = ctx.saved_tensors
        Q, K, V, ADT, DT, Trap, _, _, mimo_v, mimo_z, mimo_o, angles, D, Z = tensors
        (B, T, H, P), R, N = V.shape, Q.shape[2], Q.shape[-1]
        _sums = _segments(ADT, chunks, chunk)
        ranks = (B, H, R, P) if sequences is None else (B, H, sequences, R, P)

        def of_ranks(like: Tensor | None) -> Tensor | None:
            return None if like is None else like.new_empty(ranks).sum(0)

        dmimo_o = of_ranks(mimo_o)
        _states = V.new_empty(B, H, chunks, N, P)
        dz = None if Z is None else torch.empty_like(V)
        dmimo_z = of_ranks(mimo_z) if Z is not None else None
        _own = Q.new_empty(B, H, T, R, R)
        dq, dk = Q.new_empty(B, T, R, H, N), K.new_empty(B, T, R, H, N)
        dv, dmimo_v = torch.empty_like(V), of_ranks(mimo_v)
        dD = D.new_empty(B, H).sum(0)
        dturned = torch.empty_like(turned)
        factor, diagonal, dda, dda_rev, dda_sum = (
            DT.new_empty(B, H, T, dtype=FP32) for _ in range(5)
        )
        _segment = DT.new_empty(B, H, chunks, chunk, chunk, dtype=FP32)
        dq_bias, dk_bias = (x.sum((0, 1)).permute(1, 0, 2) for x in (dq, dk))
        if Q.shape[3] == 1:
            dq = dq.sum(3, keepdim=True)
            dk = dk.sum(3, keepdim=True)
        ddt, dtrap = torch.empty_like(DT), torch.empty_like(Trap)
        dda += DT.new_empty(B, H, T, dtype=FP32)
        del _states, _own, _segment, _sums, factor, diagonal, dda_rev, dda_sum
        dangles, ddt_angle = torch.empty_like(angles), torch.empty_like(DT)
        del dturned
        ddt = ddt + ddt_angle
        weights = dq_bias, dk_bias, dmimo_v, dmimo_z, dmimo_o
        weights = (
            *(
                None if x is None else _like(x, like)
                for x, like in zip(weights, tensors[6:11], strict=True)
            ),
        )
        return dq, dk, dv, dda, ddt, dtrap, *weights, dangles, dD, dz, None, None, None


def flex(q: Tensor, k: Tensor, v: Tensor, **more: Any) -> Tensor:
    """Return outputs `[B, N, T, V]`, in place of compiled `flex_attention`.

    Args:
        q: `[B, N, T, H]`.
        k: `[B, K, S, H]`.
        v: `[B, K, S, V]`.
        more: the other arguments, without tensors of tokens.
    """
    return _Flex.apply(q, k, v)  # type: ignore[return-value]


class _Flex(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        B, N, T, _ = q.shape
        out = q.new_empty(B, T, N, v.shape[-1]).transpose(1, 2)
        ctx.save_for_backward(q, k, v, out, q.new_empty(B, N, T, dtype=FP32))
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:
        q, k, v, _, sums = ctx.saved_tensors
        _delta = torch.empty_like(sums)
        return tuple(torch.empty_like(x) for x in (q, k, v))


def _like(gradient: Tensor, like: Tensor) -> Tensor:
    """Return a gradient with the shape of its parameter."""
    return gradient if gradient.shape == like.shape else gradient.sum(1)


def _cut(tokens: int, chunk: int, cu_seqlens: Tensor | None, plain: int) -> tuple[int | None, int]:
    """Return sequences (None: rows as they are) and chunks: one more for each sequence."""
    if cu_seqlens is None:
        return None, plain
    sequences = len(cu_seqlens) - 1
    return sequences, sequences + tokens // chunk


def _angles(angles: Tensor, DT: Tensor, sequences: int) -> tuple[Tensor, Tensor]:
    """Return angles summed over tokens, and of the last tokens."""
    H, A = angles.shape[2:]
    return torch.empty_like(angles), angles.new_empty(sequences, H, A)


def _segments(ADT: Tensor, chunks: int, chunk: int) -> tuple[Tensor, ...]:
    """Return sums of log decays from both ends of chunks, and between any two of its tokens."""
    B, H, _ = ADT.shape
    both = torch.empty_like(ADT), torch.empty_like(ADT)
    return *both, ADT.new_empty(B, H, chunks, chunk, chunk)
