"""Launches of the M2RNN kernels: tensors to pointers, strides and sizes.

Legend: B rows, T tokens of a row, N heads, K key, V value, X chunks of a row, U tokens of a
launch, S sequences, P blocks of 16 rows of a state.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from megacpp.kernels.strides import launch

SPAN_BYTES = 2**29  # that the parts of sums of one launch may have
ROWS = 16  # of a state in a program, which is one warp: tl.dot takes no fewer


def padded(size: int) -> int:
    """Return the power of two, at least 16, that a value dim takes in a program."""
    return max(16, 1 << (size - 1).bit_length())


@dataclass(frozen=True, eq=False)
class Launch:
    """Inputs of a recurrence: vectors, W and index contiguous; no `starts_BT`: no restarts."""

    q_BTNK: Tensor
    k_BTNK: Tensor
    v_BTNV: Tensor
    f_BTN: Tensor
    w_NVV: Tensor
    starts_BT: Tensor | None
    index_BT: Tensor | None
    initial_SNKV: Tensor | None  # in front of sequences inside of rows; None: zeros
    num_heads: int
    chunk_size: int

    def spans(self, token_bytes: int) -> list[slice]:
        """Return the tokens of each launch: whole chunks, at most `SPAN_BYTES` or one chunk.

        Args:
            token_bytes: memory that a launch needs for one token of all rows; 0: none.
        """
        T, size = self.num_tokens, self.chunk_size
        size *= max(1, SPAN_BYTES // (token_bytes * size)) if token_bytes else -(-T // size)
        return [slice(first, min(first + size, T)) for first in range(0, T, size)]

    def run(
        self,
        span: slice,
        h_BNKV: Tensor,
        y_PBUNV: Tensor,
        fronts_XBNKV: Tensor | None,
        final_SNKV: Tensor | None,
        kept: Sequence[Tensor],
        from_zero: bool,
    ) -> None:
        """Launch the forward of some tokens; what is None or empty isn't written.

        Args:
            span: the tokens.
            h_BNKV: states in front of them; overwritten by those behind them.
            y_PBUNV: outputs of blocks of rows; written.
            fronts_XBNKV: states at chunk starts.
            final_SNKV: final states of sequences.
            kept: states in front of tokens, and tanh, `[N, T, B, K, V]`.
            from_zero: states in front of the tokens are 0, whatever `h_BNKV` holds.
        """
        from megacpp.kernels.m2rnn.triton_kernels import run_kernel

        q, k, v, f = self.q_BTNK, self.k_BTNK, self.v_BTNV, self.f_BTN
        before, z = kept or (None, None)
        self._start(
            run_kernel,
            *(q, k, v, f, self.w_NVV, h_BNKV),
            *(_given(x, h_BNKV) for x in (self.starts_BT, self.index_BT, self.initial_SNKV)),
            y_PBUNV,
            *(_given(x, h_BNKV) for x in (fronts_XBNKV, final_SNKV, before, z)),
            *(span.start, span.stop - span.start, self.num_rows, self.num_heads, self.chunk_size),
            *(*_strides(q, k, v, f), self.num_tokens, *y_PBUNV.stride()[:2]),
            FRONTS=fronts_XBNKV is not None,
            FINAL=final_SNKV is not None,
            KEEP=bool(kept),
            FROM_ZERO=from_zero,
        )

    def backward(
        self,
        span: slice,
        dy_BTNV: Tensor,
        fronts_XBNKV: Tensor | None,
        kept: Sequence[Tensor],
        dh_BNKV: Tensor,
        dinitial_SNKV: Tensor | None,
        dfinal_SNKV: Tensor | None,
        parts: Sequence[Tensor],
        dw_PBNVV: Tensor,
        clip: int,
        bound: float,
        from_zero: tuple[bool, bool],
    ) -> None:
        """Launch the backward through some tokens; moves dh from behind to before them.

        Args:
            span: the tokens.
            dy_BTNV: gradient of the outputs.
            fronts_XBNKV: states at chunk starts; None: those of all tokens are kept.
            kept: states in front of tokens, and tanh; with `fronts` memory for those of one chunk.
            dh_BNKV: gradient of the state behind the tokens; overwritten by that in front.
            dinitial_SNKV: gradient of the initial states of sequences; None: not wanted.
            dfinal_SNKV: gradient of the final states of sequences; None: none.
            parts: dq and dk `[1, B, U, N, K]`, dv `[P, B, U, N, V]`, df `[P, B, U, N]`; written.
            dw_PBNVV: gradient of W; added to.
            clip: kind of the clip.
            bound: of the clip.
            from_zero: whether dh and dw are 0 before, whatever is there.
        """
        from megacpp.kernels.m2rnn.triton_kernels import backward_kernel

        q, k, v, f = self.q_BTNK, self.k_BTNK, self.v_BTNV, self.f_BTN
        self._start(
            backward_kernel,
            *(q, k, v, f, self.w_NVV, dy_BTNV),
            *(_given(x, dh_BNKV) for x in (self.starts_BT, self.index_BT, self.initial_SNKV)),
            *(_given(fronts_XBNKV, dh_BNKV), *kept, dh_BNKV),
            *(_given(x, dh_BNKV) for x in (dinitial_SNKV, dfinal_SNKV)),
            *(*parts, dw_PBNVV, bound),
            *(span.start, span.stop - span.start, self.num_rows, self.num_heads, self.chunk_size),
            *(kept[0].shape[1], parts[0].shape[2], *_strides(q, k, v, f), self.num_tokens),
            AGAIN=fronts_XBNKV is not None,
            DINITIAL=dinitial_SNKV is not None,
            DFINAL=dfinal_SNKV is not None,
            CLIP=clip,
            DH_FROM_ZERO=from_zero[0],
            DW_FROM_ZERO=from_zero[1],
        )

    @property
    def blocks(self) -> int:
        """Programs of a state."""
        return -(-self.key_dim // ROWS)

    @property
    def num_rows(self) -> int:
        """Rows of the batch."""
        return self.v_BTNV.shape[0]

    @property
    def num_tokens(self) -> int:
        """Tokens of a row."""
        return self.v_BTNV.shape[1]

    @property
    def key_dim(self) -> int:
        """Return K."""
        return self.k_BTNK.shape[-1]

    @property
    def value_dim(self) -> int:
        """Return V."""
        return self.v_BTNV.shape[-1]

    def _start(self, kernel: Any, *arguments: Any, **constants: Any) -> None:
        launch(
            kernel,
            (self.blocks, self.num_heads, self.num_rows),
            *arguments,
            **constants,
            **self._shared(),
            PACKED=self.starts_BT is not None,
            INITIAL=self.initial_SNKV is not None,
            K=self.key_dim,
            V=self.value_dim,
            BLOCK_K=ROWS,
            BLOCK_V=padded(self.value_dim),
            num_warps=1,
        )

    def _shared(self) -> dict[str, int]:
        """Return how many neighbouring heads share one of each input."""
        counts = {
            "Q": self.q_BTNK.shape[2],
            "K": self.k_BTNK.shape[2],
            "V": self.v_BTNV.shape[2],
            "F": self.f_BTN.shape[2],
            "W": len(self.w_NVV),
        }
        return {f"{name}_SHARED": self.num_heads // count for name, count in counts.items()}


def _given(x: Tensor | None, otherwise: Tensor) -> Tensor:
    return otherwise if x is None else x


def _strides(*inputs_BTN: Tensor) -> tuple[int, ...]:
    """Return the strides of rows, tokens and heads of each input."""
    return tuple(stride for x in inputs_BTN for stride in x.stride()[:3])
