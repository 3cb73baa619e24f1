"""Launches of the Mamba-3 scan's kernels: tensors to pointers, strides and sizes.

Legend: as megacpp/kernels/mamba3/inputs.py, and J chunks of a row, C tokens of a chunk, X whatever
is carried of a head.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megacpp.kernels.strides import launch, side_by_side

ELEMENTS = 512  # of a state that a program carries from chunk to chunk
HEADS = 8  # whose gradients of rates are one program's


class ScanPlan(NamedTuple):
    """How a scan runs.

    Attributes:
        chunk: tokens of a chunk.
        halves: pairs are (i, i + N/2), else (2i, 2i + 1).
        runs_BT: int32, the number of each token's document in its row; None: whole rows.
        narrow: the output is in the dtype of V, else in fp32.
    """

    chunk: int
    halves: bool
    runs_BT: Tensor | None
    narrow: bool


@dataclass(frozen=True, eq=False)
class TokenRates:
    """Numbers of tokens in fp32: the kernels' operands beside vectors (triton_tokens.py).

    Attributes:
        tokens: sums of log decays, scale and gamma, `[3, B, H, T]`.
        turns_BHTA: running angle of the chunk and document, in turns.
        entering_BHJA: angle that enters each chunk.
    """

    tokens: Tensor
    turns_BHTA: Tensor
    entering_BHJA: Tensor


class Gradients(NamedTuple):
    """Results of the chunks' backward: what a caller gets, then what `Scan.drates` takes.

    Attributes:
        dqk: of Q and of K, `[2, B, T, 1, G, N]` in the dtype of V.
        dv: of V.
        dz: of Z, in the dtype of V; None: no gate.
        of_heads: of the biases and of D, `[H (2 N + 1)]`.
        tokens: of sums, scale and gamma, `[3, B, H, T]`.
        turns_BHTA: of the angle of each token.
        entering_BHJA: of the angle that enters each chunk, by its own tokens.
    """

    dqk: Tensor
    dv: Tensor
    dz: Tensor | None
    of_heads: Tensor
    tokens: Tensor
    turns_BHTA: Tensor
    entering_BHJA: Tensor


class Scan:
    """Launches of a scan, by what they make."""

    def __init__(
        self,
        plan: ScanPlan,
        Q: Tensor,
        K: Tensor,
        V: Tensor,
        Z: Tensor | None,
        ADT: Tensor,
        DT: Tensor,
        Trap: Tensor,
        Angles: Tensor,
        Q_bias: Tensor,
        K_bias: Tensor,
        D: Tensor,
    ) -> None:
        """Keep the inputs of a scan.

        Args:
            plan: how it runs.
            Q: `[B, T, 1, G, N]`.
            K: `[B, T, 1, G, N]`.
            V: `[B, T, H, P]`.
            Z: gate, `[B, T, H, P]`; None: none.
            ADT: log decay, `[B, H, T]`.
            DT: step, `[B, H, T]`.
            Trap: logits of lambda, `[B, H, T]`.
            Angles: before tanh, `[B, T, H, A]`, or of one head for all.
            Q_bias: `[H, 1, N]`.
            K_bias: `[H, 1, N]`.
            D: skip connection, `[H]`.
        """
        self.plan, self.gated = plan, Z is not None
        self.Q, self.K, self.V = side_by_side(Q), side_by_side(K), side_by_side(V)
        self.Z = self.V if Z is None else side_by_side(Z)
        self.ADT, self.DT, self.Trap = ADT.contiguous(), DT.contiguous(), Trap
        self.Angles = side_by_side(Angles)
        self.biases, self.D = (Q_bias.contiguous(), K_bias.contiguous()), D.contiguous()
        self.sizes = *V.shape, Q.shape[-1], Angles.shape[-1]  # B, T, H, P, N, A
        self.chunks = -(-V.shape[1] // plan.chunk)
        self.runs = self.DT if plan.runs_BT is None else plan.runs_BT

    def rates(self, angle_BHA: Tensor | None) -> TokenRates:
        """Return the numbers of tokens.

        Args:
            angle_BHA: in front of each row; None: zeros.
        """
        from megacpp.kernels.mamba3.triton_tokens import _rates_kernel

        B, T, H, _, _, A = self.sizes
        tokens_3BHT, turns_BHTA = self._new(3, B, H, T), self._new(B, H, T, A)
        of_chunks_BHJA = self._new(B, H, self.chunks, A)
        self._launch(
            _rates_kernel,
            (self.chunks, H, B),
            *(self.ADT, self.DT, self.Trap, self.Angles, self.runs),
            *(*tokens_3BHT.unbind(), turns_BHTA, of_chunks_BHJA),
            *(T, H, self.chunks, *self.Trap.stride(), *self._angle_strides()),
            A=A,
            BLOCK_A=_padded(A),
        )
        first = None if angle_BHA is None else (angle_BHA / (2 * math.pi)).contiguous()
        return TokenRates(
            tokens_3BHT, turns_BHTA, self._carry(of_chunks_BHJA, None, first, turns=True)
        )

    def states(self, rates: TokenRates, first_BHNP: Tensor | None) -> Tensor:
        """Return the state in front of each chunk, `[B, H, J, N, P]` in the dtype of V.

        Args:
            rates: numbers of tokens.
            first_BHNP: in front of each row; None: zeros.
        """
        added_BHJNP = self._added(rates, self.K, self.biases[1], self.V, backward=False)
        first = None if first_BHNP is None else first_BHNP.contiguous()
        return self._carry(added_BHJNP, rates, first, dtype=self.V.dtype)

    def dstates(
        self, rates: TokenRates, dy_BTHP: Tensor, first: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Return the gradients of the state behind each chunk, and in front of each row.

        Args:
            rates: numbers of tokens.
            dy_BTHP: of the outputs.
            first: a row's is wanted.
        """
        B, _, H, P, N, _ = self.sizes
        dstates_BHJNP = self._added(rates, self.Q, self.biases[0], dy_BTHP, backward=True)
        last_BHNP = self._new(B, H, N, P) if first else None
        how: dict[str, Any] = {"last": last_BHNP, "dtype": self.V.dtype, "backward": True}
        return self._carry(dstates_BHJNP, rates, None, **how), last_BHNP

    def outputs(self, rates: TokenRates, states_BHJNP: Tensor) -> Tensor:
        """Return the outputs `[B, T, H, P]`.

        Args:
            rates: numbers of tokens.
            states_BHJNP: in front of each chunk.
        """
        from megacpp.kernels.mamba3.triton_kernels import _outputs_kernel

        B, T, H, P, _, _ = self.sizes
        dtype = self.V.dtype if self.plan.narrow else torch.float32
        y_BTHP = self._new(B, T, H, P, dtype=dtype)
        self._launch(
            _outputs_kernel,
            (self.chunks, H, B),
            *(self.Q, self.K, *self.biases, self.V, self.Z, self.D, *self._operands(rates)),
            *(states_BHJNP, y_BTHP, T, H, self.chunks),
            *(*_strides(self.Q), *_strides(self.K), *self.V.stride()[:3], *self.Z.stride()[:3]),
            **self.constants(),
            GATED=self.gated,
        )
        return y_BTHP

    def gradients(
        self, rates: TokenRates, states_BHJNP: Tensor, dstates_BHJNP: Tensor, dy_BTHP: Tensor
    ) -> Gradients:
        """Return the gradients of chunks.

        Args:
            rates: numbers of tokens.
            states_BHJNP: in front of each chunk.
            dstates_BHJNP: gradient of that behind each chunk.
            dy_BTHP: of the outputs.
        """
        from megacpp.kernels.mamba3.triton_gradients import _keys_kernel, _queries_kernel

        (B, T, H, P, N, A), J, G, dtype = self.sizes, self.chunks, self.Q.shape[3], self.V.dtype
        dqk = self._new(2, B, T, H, N, dtype=dtype)
        dv = self._new(B, T, H, P, dtype=dtype)
        dz = torch.empty_like(dv) if self.gated else dv
        of_tokens, dturns = self._new(3, B, H, T), self._new(B, H, T, A)
        dentering, of_heads = self._new(B, H, J, A), self._new(B, J, H * (2 * N + 1))
        given = dy_BTHP, self.Q, self.K, *self.biases, self.V, self.Z, self.D
        given = *given, *self._operands(rates), states_BHJNP
        strides = *dy_BTHP.stride()[:3], *_strides(self.Q), *_strides(self.K)
        places = B, T, H, J, *strides, *self.V.stride()[:3], *self.Z.stride()[:3]
        for kernel, found in (
            (_queries_kernel, (dqk[0], dz, of_tokens, dturns, of_heads)),
            (_keys_kernel, (dstates_BHJNP, dqk[1], dv, of_tokens, dturns, dentering, of_heads)),
        ):
            fixed = self.constants() | {"GATED": self.gated}
            self._launch(kernel, (J, H, B), *given, *found, *places, **fixed)
        dqk = dqk.view(2, B, T, 1, G, H // G, N)
        dqk = dqk.sum(5) if H > G else dqk.squeeze(5)
        of_vectors = dqk, dv, dz if self.gated else None
        return Gradients(*of_vectors, of_heads.sum((0, 1)), of_tokens, dturns, dentering)

    def drates(self, of: Gradients, first: bool) -> tuple[Tensor | None, ...]:
        """Return the gradients of ADT, DT, Trap and Angles, and of the angle in front of rows.

        Args:
            of: the chunks' backward.
            first: a row's is wanted.
        """
        from megacpp.kernels.mamba3.triton_tokens import _rates_backward_kernel

        B, T, H, _, _, A = self.sizes
        first_BHA = self._new(B, H, A) if first else None
        dleaving_BHJA = self._carry(of.entering_BHJA, None, None, last=first_BHA, backward=True)
        dadt, ddt = (self._new(B, H, T) for _ in range(2))
        dtrap = torch.empty_like(self.Trap)
        shared, blocks = self.Angles.shape[2] == 1 < H, -(-H // HEADS)
        # Parts of HEADS heads each in the dtype of the result, as those of Q and K are of one head.
        dangles = self._new(B, blocks if shared else H, T, A, dtype=self.Angles.dtype)
        self._launch(
            _rates_backward_kernel,
            (self.chunks, blocks, B),
            *(of.tokens, of.turns_BHTA, dleaving_BHJA, self.DT, self.Trap, self.Angles, self.runs),
            *(dadt, ddt, dtrap, dangles, B, T, H, self.chunks),
            *(*self.Trap.stride(), *dtrap.stride(), *self._angle_strides()),
            SHARED=shared,
            HEADS=min(H, HEADS),
            A=A,
            BLOCK_A=_padded(A),
        )
        dangles = dangles.sum(1)[:, :, None] if shared else dangles.transpose(1, 2)
        return dadt, ddt, dtrap, dangles, first_BHA

    def constants(self) -> dict[str, Any]:
        """Return the constants of kernels that read queries, keys and values."""
        _, _, H, P, N, A = self.sizes
        step, partner = (1, N // 2) if self.plan.halves else (2, 1)
        blocks = {"BLOCK_N": _padded(N // 2), "BLOCK_P": _padded(P)}
        small = self.V.element_size() == 2 and max(32, N) * max(16, P) <= 64 * 64
        sizes = {"N": N, "P": P, "A": A, "SHARED": H // self.Q.shape[3]}
        return blocks | sizes | {"STEP": step, "PARTNER": partner, "num_warps": 4 if small else 8}

    def _added(
        self, rates: TokenRates, x: Tensor, bias: Tensor, values_BTHP: Tensor, backward: bool
    ) -> Tensor:
        """Return what each chunk adds to a state, or to its gradient, `[B, H, J, N, P]` in fp32."""
        from megacpp.kernels.mamba3.triton_kernels import _states_kernel

        B, T, H, P, N, _ = self.sizes
        added_BHJNP, gated = self._new(B, H, self.chunks, N, P), backward and self.gated
        sums, scale, _, *others = self._operands(rates)
        self._launch(
            _states_kernel,
            (self.chunks, H, B),
            *(x, bias, values_BTHP, self.Z if gated else self.V),
            *(sums, scale, *others, added_BHJNP, T, H, self.chunks),
            *(*_strides(x), *values_BTHP.stride()[:3], *self.Z.stride()[:3]),
            **self.constants(),
            BACKWARD=backward,
            GATED=gated,
        )
        return added_BHJNP

    def _carry(
        self,
        added: Tensor,
        rates: TokenRates | None,
        first: Tensor | None,
        last: Tensor | None = None,
        dtype: torch.dtype = torch.float32,
        backward: bool = False,
        turns: bool = False,
    ) -> Tensor:
        """Return what enters each chunk of `[B, H, J, ...]`; `backward` what enters from behind."""
        from megacpp.kernels.mamba3.triton_tokens import _carry_kernel

        (B, T, H, *_), X = self.sizes, math.prod(added.shape[3:])
        out, block = self._new(*added.shape, dtype=dtype), min(ELEMENTS, _padded(X))
        self._launch(
            _carry_kernel,
            (-(-X // block), H, B),
            *(added, added if rates is None else rates.tokens[0], self.runs),
            *(added if first is None else first, out, added if last is None else last),
            *(T, H, self.chunks, X),
            DECAY=rates is not None,
            BACKWARD=backward,
            FIRST=first is not None,
            LAST=last is not None,
            TURNS=turns,
            BLOCK=block,
        )
        return out

    def _launch(self, kernel: Any, grid: tuple[int, int, int], *given: Any, **fixed: Any) -> None:
        constants = {"PACKED": self.plan.runs_BT is not None, "C": self.plan.chunk}
        launch(kernel, grid, *given, **constants, **fixed)

    def _operands(self, rates: TokenRates) -> tuple[Tensor, ...]:
        return *rates.tokens.unbind(), rates.turns_BHTA, rates.entering_BHJA, self.runs

    def _angle_strides(self) -> tuple[int, int, int]:
        row, token, head, _ = self.Angles.stride()
        return row, token, 0 if self.Angles.shape[2] == 1 else head

    def _new(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=self.V.device)


def _strides(x_BT1GN: Tensor) -> tuple[int, int, int]:
    """Return the strides of rows, tokens and groups."""
    row, token, _, group, _ = x_BT1GN.stride()
    return row, token, group


def _padded(size: int) -> int:
    """Return the block that a size takes: `tl.dot` takes 16 at least."""
    return max(16, 1 << (size - 1).bit_length())
