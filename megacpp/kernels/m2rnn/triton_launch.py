"""Launches of the M2RNN kernels: tensors to pointers, strides and sizes.

Legend: B rows, T tokens of a row, N heads, K key, V value, C tokens of a chunk, S sequences.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

BY_ROW, BY_SEQUENCE = 1, 2  # final states, as the kernel calls them
# Of a padded state of K = 64, V = 16 each of 128 threads holds 8 numbers.
NUMBERS_PER_WARP = 256
MOST_WARPS = 8


def padded(size: int) -> int:
    """Return the power of two, at least 16, that a key or value dim takes in a program."""
    return max(16, 1 << (size - 1).bit_length())


def num_warps(key_dim: int, value_dim: int) -> int:
    """Return the warps of a program."""
    return min(MOST_WARPS, max(1, padded(key_dim) * padded(value_dim) // NUMBERS_PER_WARP))


@dataclass(frozen=True)
class Span:
    """Tokens of one launch, and the place of their states in a buffer.

    Attributes:
        first, count: tokens of the row.
        place: of the first token in the buffer.
        capacity: tokens of the buffer.
    """

    first: int
    count: int
    place: int
    capacity: int


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
    num_heads: int

    def run(
        self,
        span: Span,
        entering_BNKV: Tensor,
        initial_SNKV: Tensor | None,
        chunk_size: int = 1,
        y_BTNV: Tensor | None = None,
        fronts_XBNKV: Tensor | None = None,
        final_SNKV: Tensor | None = None,
        by_row: bool = False,
        kept: Sequence[Tensor] = (),
    ) -> None:
        """Launch the forward of some tokens; outputs that are None aren't written.

        Args:
            span: the tokens.
            entering_BNKV: states in front of them.
            initial_SNKV: states in front of sequences; None: zeros.
            chunk_size: tokens of a chunk.
            y_BTNV: outputs.
            fronts_XBNKV: states at chunk starts.
            final_SNKV: final states.
            by_row: one final state per row.
            kept: states in front of tokens, and tanh.
        """
        from megacpp.kernels.m2rnn.triton_kernels import run_kernel

        q, k, v, f, w = self.q_BTNK, self.k_BTNK, self.v_BTNV, self.f_BTN, self.w_NVV
        packed, final = self.starts_BT is not None, 0
        if final_SNKV is not None:
            final = BY_SEQUENCE if packed and not by_row else BY_ROW
        before, z = kept or (None, None)
        some = entering_BNKV  # a pointer where none is read
        self._start(
            run_kernel,
            (self.num_heads, self.num_rows),
            *(q, k, v, f, w, entering_BNKV),
            *(_given(x, some) for x in (self.starts_BT, self.index_BT, initial_SNKV)),
            *(_given(x, some) for x in (y_BTNV, fronts_XBNKV, final_SNKV, before, z)),
            *(span.first, span.count, self.num_rows, self.num_heads, chunk_size),
            *(span.place, span.capacity, *_strides(q, k, v, f), self.num_tokens),
            **self._shared("QKVFW"),
            PACKED=packed,
            INITIAL=initial_SNKV is not None,
            OUTPUTS=y_BTNV is not None,
            FRONTS=fronts_XBNKV is not None,
            FINAL=final,
            KEEP=bool(kept),
        )

    def state_gradients(
        self,
        span: Span,
        dy_BTNV: Tensor,
        z_NCBKV: Tensor,
        g_NCBKV: Tensor,
        dh_BNKV: Tensor,
        dinitial_SNKV: Tensor | None,
        dfinal_SNKV: Tensor | None,
        clip: int,
        bound: float,
    ) -> None:
        """Launch the backward through tokens: fills g, and moves dh from behind to before them.

        Args:
            span: the tokens.
            dy_BTNV: gradient of the outputs.
            z_NCBKV: tanh.
            g_NCBKV: dL/dh of each token; written.
            dh_BNKV: gradient of the state behind the tokens; overwritten by that in front.
            dinitial_SNKV: gradient of the initial states; None: not wanted.
            dfinal_SNKV: gradient of the final states; None: none.
            clip: kind of the clip.
            bound: of the clip.
        """
        from megacpp.kernels.m2rnn.triton_kernels import state_gradients_kernel

        q, f = self.q_BTNK, self.f_BTN
        outside = (self.starts_BT, self.index_BT, dinitial_SNKV, dfinal_SNKV)
        self._start(
            state_gradients_kernel,
            (self.num_heads, self.num_rows),
            *(q, f, dy_BTNV, self.w_NVV, z_NCBKV, g_NCBKV, dh_BNKV),
            *(_given(x, dh_BNKV) for x in outside),
            *(bound, span.first, span.count, self.num_rows, self.num_heads),
            *(span.place, span.capacity, g_NCBKV.shape[1], *_strides(q, f), self.num_tokens),
            **self._shared("QFW"),
            PACKED=self.starts_BT is not None,
            DINITIAL=dinitial_SNKV is not None,
            DFINAL=dfinal_SNKV is not None,
            CLIP=clip,
        )

    def gradients(
        self,
        span: Span,
        dy_BTNV: Tensor,
        before_NCBKV: Tensor,
        z_NCBKV: Tensor,
        g_NCBKV: Tensor,
        parts: Sequence[Tensor],
    ) -> None:
        """Launch the gradients of q, k, v and f for each head; g becomes dL/dx.

        Args:
            span: the tokens.
            dy_BTNV: gradient of the outputs.
            before_NCBKV: states in front of tokens.
            z_NCBKV: tanh.
            g_NCBKV: dL/dh of each token; overwritten.
            parts: gradients `[B, C, N, ...]`; written.
        """
        from megacpp.kernels.m2rnn.triton_kernels import gradients_kernel

        k, v, f = self.k_BTNK, self.v_BTNV, self.f_BTN
        self._start(
            gradients_kernel,
            (span.count, self.num_heads, self.num_rows),
            *(k, v, f, dy_BTNV, before_NCBKV, z_NCBKV, g_NCBKV, *parts),
            *(span.first, self.num_rows, self.num_heads),
            *(span.place, span.capacity, g_NCBKV.shape[1], *_strides(k, v, f), self.num_tokens),
            *(stride for part in parts for stride in part.stride()[:2]),
            **self._shared("KVF"),
        )

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

    def _start(self, kernel: Any, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
        from triton import knobs

        device = self.v_BTNV.device.type
        if device != "cuda" and not knobs.runtime.interpret:
            raise RuntimeError(f"m2rnn: triton has no kernels for {device}")
        # Triton launches on the current device, which needn't be the tensors'.
        with torch.cuda.device_of(self.v_BTNV):
            kernel[grid](
                *arguments,
                **constants,
                K=self.key_dim,
                V=self.value_dim,
                BLOCK_K=padded(self.key_dim),
                BLOCK_V=padded(self.value_dim),
                num_warps=num_warps(self.key_dim, self.value_dim),
            )

    def _shared(self, inputs: str) -> dict[str, int]:
        """Return how many neighbouring heads share one of each input."""
        counts = {
            "Q": self.q_BTNK.shape[2],
            "K": self.k_BTNK.shape[2],
            "V": self.v_BTNV.shape[2],
            "F": self.f_BTN.shape[2],
            "W": len(self.w_NVV),
        }
        return {f"{name}_SHARED": self.num_heads // counts[name] for name in inputs}


def _given(x: Tensor | None, otherwise: Tensor) -> Tensor:
    return otherwise if x is None else x


def _strides(*inputs_BTN: Tensor) -> tuple[int, ...]:
    """Return the strides of rows, tokens and heads of each input."""
    return tuple(stride for x in inputs_BTN for stride in x.stride()[:3])
