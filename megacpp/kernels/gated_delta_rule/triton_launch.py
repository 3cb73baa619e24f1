"""Launches of the gated delta rule's kernels: tensors to pointers, strides and sizes.

Legend: as megacpp/kernels/gated_delta_rule/chunks.py, and J chunks of a row, C tokens of a chunk.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from megacpp.kernels.strides import launch, side_by_side

COLUMNS = 64  # of values that a program of a chunk takes at a time
CARRIED = 32  # columns of a state that a program carries from chunk to chunk


class DeltaRulePlan(NamedTuple):
    """How a run goes.

    Attributes:
        chunk: tokens of a chunk.
        runs_BT: int32, the number of each token's document in its row; None: whole rows.
    """

    chunk: int
    runs_BT: Tensor | None


class SolvedChunks(NamedTuple):
    """Numbers of chunks that need nothing of other chunks.

    Attributes:
        sums_BNT: of log decays within chunk and document.
        lengths_BNT: 1 / length of keys.
        T_BNTC: rows of T; empty if they weren't wanted.
        w_BNTK: W.
        u_BNTV: Y, then U.
    """

    sums_BNT: Tensor
    lengths_BNT: Tensor
    T_BNTC: Tensor
    w_BNTK: Tensor
    u_BNTV: Tensor


class QueryGradients(NamedTuple):
    """Results of the queries' backward.

    Attributes:
        dq_BTNK: gradient of queries.
        du_BNTV: of U, as far as outputs read it.
        lengths_BNT: 1 / length of queries.
        dsums_BNT: gradient of sums of log decays, as far as outputs decay with them.
    """

    dq_BTNK: Tensor
    du_BNTV: Tensor
    lengths_BNT: Tensor
    dsums_BNT: Tensor


class DeltaRule:
    """Launches of a run of the rule, by what they make."""

    def __init__(
        self, plan: DeltaRulePlan, q: Tensor | None, k: Tensor, v: Tensor, g: Tensor, beta: Tensor
    ) -> None:
        """Keep the inputs of a run.

        Args:
            plan: how it goes.
            q: `[B, T, H, K]`; None: no outputs.
            k: `[B, T, H, K]`.
            v: `[B, T, N, V]`.
            g: `[B, T, N]`.
            beta: `[B, T, N]`.
        """
        self.plan, self.asked = plan, q is not None
        self.k, self.v = side_by_side(k), side_by_side(v)
        self.q = self.k if q is None else side_by_side(q)
        self.g, self.beta = g.contiguous(), beta.contiguous()
        self.sizes = *v.shape, k.shape[-1]  # B, T, N, V, K
        self.chunks = -(-v.shape[1] // plan.chunk)
        self.runs = self.g if plan.runs_BT is None else plan.runs_BT

    def solve(self, keep: bool) -> SolvedChunks:
        """Return what needs nothing of other chunks.

        Args:
            keep: T, too.
        """
        from megacpp.kernels.gated_delta_rule.triton_kernels import _solve_kernel

        B, T, N, V, K = self.sizes
        dtype = self.v.dtype
        sums, lengths = self._new(B, N, T), self._new(B, N, T)
        solved = self._new(B, N, T, self.plan.chunk if keep else 0, dtype=dtype)
        w, u = self._new(B, N, T, K, dtype=dtype), self._new(B, N, T, V, dtype=dtype)
        self._launch(
            _solve_kernel,
            (self.chunks, N, B),
            *(self.k, self.v, self.g, self.beta, self.runs, sums, lengths),
            *(solved, w, u, T, N, self.chunks, *self.k.stride()[:3], *self.v.stride()[:3]),
            KEEP=keep,
        )
        return SolvedChunks(sums, lengths, solved, w, u)

    def states(
        self, of: SolvedChunks, first_BNKV: Tensor | None, keep: bool
    ) -> tuple[Tensor, Tensor]:
        """Return the state in front of each chunk, `[B, N, J, K, V]`, and behind each row.

        Those in front of chunks are in the dtype of v. U takes the place of Y.

        Args:
            of: numbers of chunks.
            first_BNKV: in front of each row; None: zeros.
            keep: those in front of chunks; else none of them are returned.
        """
        from megacpp.kernels.gated_delta_rule.triton_kernels import _states_kernel

        B, T, N, V, K = self.sizes
        states = self._new(B, N, self.chunks if keep else 0, K, V, dtype=self.v.dtype)
        last = self._new(B, N, K, V)
        first = last if first_BNKV is None else first_BNKV.contiguous()
        self._launch(
            _states_kernel,
            (-(-V // self.carried()["BLOCK_V"]), N, B),
            *(self.k, of.w_BNTK, of.u_BNTV, of.sums_BNT, of.lengths_BNT, self.runs),
            *(first, states, last, T, N, self.chunks, *self.k.stride()[:3]),
            FIRST=first_BNKV is not None,
            STATES=keep,
            **self.carried(),
        )
        return states, last

    def outputs(self, of: SolvedChunks, states_BNJKV: Tensor) -> Tensor:
        """Return the outputs `[B, T, N, V]`.

        Args:
            of: numbers of chunks.
            states_BNJKV: in front of each chunk.
        """
        from megacpp.kernels.gated_delta_rule.triton_kernels import _outputs_kernel

        B, T, N, V, _ = self.sizes
        o_BTNV = self._new(B, T, N, V, dtype=self.v.dtype)
        self._launch(
            _outputs_kernel,
            (self.chunks, N, B),
            *(self.q, self.k, of.u_BNTV, of.sums_BNT, of.lengths_BNT, self.runs),
            *(states_BNJKV, o_BTNV, T, N, self.chunks, self._scale()),
            *(*self.q.stride()[:3], *self.k.stride()[:3]),
        )
        return o_BTNV

    def of_queries(self, of: SolvedChunks, states_BNJKV: Tensor, do_BTNV: Tensor) -> QueryGradients:
        """Return the gradients that need none of later chunks.

        Args:
            of: numbers of chunks.
            states_BNJKV: in front of each chunk.
            do_BTNV: gradient of the outputs.
        """
        from megacpp.kernels.gated_delta_rule.triton_gradients import _queries_kernel

        B, T, N, _, K = self.sizes
        dq, du = self._new(B, T, N, K, dtype=self.v.dtype), torch.empty_like(of.u_BNTV)
        lengths, dsums = self._new(B, N, T), self._new(B, N, T)
        self._launch(
            _queries_kernel,
            (self.chunks, N, B),
            *(do_BTNV, self.q, self.k, of.u_BNTV, of.sums_BNT, of.lengths_BNT, self.runs),
            *(states_BNJKV, dq, du, lengths, dsums, T, N, self.chunks, self._scale()),
            *(*do_BTNV.stride()[:3], *self.q.stride()[:3], *self.k.stride()[:3]),
        )
        return QueryGradients(dq, du, lengths, dsums)

    def dstates(
        self,
        of: SolvedChunks,
        queries: QueryGradients | None,
        do_BTNV: Tensor,
        dlast_BNKV: Tensor | None,
        first: bool,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return the gradients of the state behind each chunk, of U, and of the first state.

        Args:
            of: numbers of chunks.
            queries: their backward; None: outputs have no gradient.
            do_BTNV: gradient of the outputs.
            dlast_BNKV: gradient of the state behind each row; None: zeros.
            first: that in front of each row is wanted.
        """
        from megacpp.kernels.gated_delta_rule.triton_gradients import _dstates_kernel

        B, T, N, V, K = self.sizes
        dstates = self._new(B, N, self.chunks, K, V, dtype=self.v.dtype)
        du = torch.empty_like(of.u_BNTV) if queries is None else queries.du_BNTV
        q_lengths = of.lengths_BNT if queries is None else queries.lengths_BNT
        dfirst = self._new(B, N, K, V) if first else None
        dlast = of.sums_BNT if dlast_BNKV is None else dlast_BNKV.contiguous()
        self._launch(
            _dstates_kernel,
            (-(-V // self.carried()["BLOCK_V"]), N, B),
            *(do_BTNV, self.q, self.k, of.w_BNTK, of.sums_BNT, of.lengths_BNT, q_lengths),
            *(self.runs, dlast, du, dstates, of.sums_BNT if dfirst is None else dfirst),
            *(T, N, self.chunks, self._scale()),
            *(*do_BTNV.stride()[:3], *self.q.stride()[:3], *self.k.stride()[:3]),
            QUERIES=queries is not None,
            LAST=dlast_BNKV is not None,
            FIRST=first,
            **self.carried(),
        )
        return dstates, du, dfirst

    def of_keys(
        self,
        of: SolvedChunks,
        queries: QueryGradients | None,
        states_BNJKV: Tensor,
        dstates_BNJKV: Tensor,
        du_BNTV: Tensor,
        do_BTNV: Tensor,
    ) -> tuple[Tensor | None, ...]:
        """Return the gradients of q (None: no outputs), k, v, g and beta.

        Args:
            of: numbers of chunks, with T.
            queries: their backward; None: outputs have no gradient.
            states_BNJKV: in front of each chunk.
            dstates_BNJKV: gradient of that behind each chunk.
            du_BNTV: gradient of U.
            do_BTNV: gradient of the outputs.
        """
        from megacpp.kernels.gated_delta_rule.triton_gradients import _keys_kernel

        B, T, N, V, K = self.sizes
        dk = self._new(B, T, N, K, dtype=self.v.dtype)
        dv = self._new(B, T, N, V, dtype=self.v.dtype)
        dg, dbeta = self._new(B, T, N), self._new(B, T, N)
        spare = of.lengths_BNT
        q_lengths, dsums = (spare, spare) if queries is None else queries[2:]
        self._launch(
            _keys_kernel,
            (self.chunks, N, B),
            *(do_BTNV, self.q, self.k, self.v, self.beta, of.sums_BNT, of.lengths_BNT, q_lengths),
            *(self.runs, of.T_BNTC, of.u_BNTV, du_BNTV, states_BNJKV, dstates_BNJKV, dsums),
            *(dk, dv, dg, dbeta, T, N, self.chunks, self._scale(), *do_BTNV.stride()[:3]),
            *(*self.q.stride()[:3], *self.k.stride()[:3], *self.v.stride()[:3]),
            QUERIES=queries is not None,
        )
        dq = None if queries is None else self._shared(queries.dq_BTNK).to(self.q.dtype)
        dk = self._shared(dk).to(self.k.dtype)
        return dq, dk, dv, dg.to(self.g.dtype), dbeta.to(self.beta.dtype)

    def constants(self) -> dict[str, Any]:
        """Return the constants of kernels that have a chunk."""
        _, _, N, V, K = self.sizes
        blocks = {"BLOCK_K": _padded(K), "BLOCK_V": min(COLUMNS, _padded(V))}
        sizes = {"K": K, "V": V, "C": self.plan.chunk, "SHARED": N // self.k.shape[2]}
        small = self.v.element_size() == 2 and K <= 64 and self.plan.chunk <= 32
        packed = self.plan.runs_BT is not None
        return blocks | sizes | {"PACKED": packed, "num_warps": 4 if small else 8}

    def carried(self) -> dict[str, Any]:
        """Return the constants in which kernels that go from chunk to chunk differ."""
        # Loads run ahead of products: in fp32, a third stage takes more shared memory than GPUs of
        # 8.6, 8.9 and 12.0 have.
        stages = 3 if self.v.element_size() == 2 else 2
        block = min(CARRIED, _padded(self.sizes[3]))
        return {"BLOCK_V": block, "num_warps": 4, "num_stages": stages}

    def _shared(self, d_BTNK: Tensor) -> Tensor:
        """Return the sums over the value heads of a key head, `[B, T, H, K]`."""
        H = self.k.shape[2]
        return d_BTNK if d_BTNK.shape[2] == H else d_BTNK.unflatten(2, (H, -1)).sum(3)

    def _scale(self) -> float:
        return self.sizes[4] ** -0.5

    def _launch(self, kernel: Any, grid: tuple[int, int, int], *given: Any, **fixed: Any) -> None:
        launch(kernel, grid, *given, **(self.constants() | fixed))

    def _new(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=self.v.device)


def _padded(size: int) -> int:
    """Return the block that a size takes: `tl.dot` takes 16 at least."""
    return max(16, 1 << (size - 1).bit_length())
