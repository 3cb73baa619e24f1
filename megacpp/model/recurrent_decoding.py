"""Decoding of recurrent mixers: a prompt at once, then one token after another.

Legend: B rows, T tokens of a row, D model, C convolved channels, J = taps - 1 past inputs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from megacpp.kernels.causal_conv_steps import causal_conv_step, last_inputs
from megacpp.model.documents import Documents
from megacpp.model.short_conv import ShortConv, stacked


@dataclass(frozen=True, eq=False)
class RecurrentState:
    """State that one token leaves to the next of its document.

    Attributes:
        scan: of the recurrence, at least fp32.
        taps_BCJ: last inputs of the short convolution; None: the mixer has none.
    """

    scan: Any
    taps_BCJ: Tensor | None


class RecurrentDecoding(nn.Module):
    """Decoding of a mixer that is projections, a short convolution, a scan and an output.

    Its subclass has these parts (`_project`, `_inputs`, `head_weights`, `_output`), and a `scan`.
    The scan's `prompt` returns the outputs of a prompt and the state behind it, its `token` those
    of one token behind a state. The state of an empty document is None.
    """

    scan: Any
    convolve: Any
    head_weights: Any
    _project: Any
    _inputs: Any
    _output: Any

    def short_convs(self) -> dict[str, ShortConv]:
        """Return the short convolutions by name, in the order of the channels."""
        return {name: m for name, m in self.named_children() if isinstance(m, ShortConv)}

    def init_state(
        self, batch_size: int, device: torch.device | str, dtype: torch.dtype
    ) -> RecurrentState | None:
        """Return None: no token is in front of the first."""
        return None

    def prefill(self, x_BTD: Tensor, docs: Documents) -> tuple[Tensor, RecurrentState]:
        """Return the output `[B, T, D]` of rows of one document each, and the state behind them."""
        return self._extend(x_BTD, None, docs)

    def step(self, x_BD: Tensor, state: RecurrentState | None) -> tuple[Tensor, RecurrentState]:
        """Decode one token: return the output `[B, D]` and the next state, at a constant cost."""
        y_B1D, state = self._extend(x_BD[:, None], state, None)
        return y_B1D[:, 0], state

    def _extend(
        self, x_BTD: Tensor, state: RecurrentState | None, docs: Documents | None
    ) -> tuple[Tensor, RecurrentState]:
        """Return the output `[B, T, D]` of prompts, without `docs` of one token, and the state."""
        channels, rest = self._project(x_BTD)
        taps_BCJ = None
        if self.short_convs():
            before_BCJ = None if state is None else state.taps_BCJ
            channels, taps_BCJ = self._convolved(channels, before_BCJ, docs)
        inputs, rest = self._inputs(channels, rest)
        given = inputs, self.head_weights()
        if docs is None:
            y, scan = self.scan.token(*given, None if state is None else state.scan)
        else:
            y, scan = self.scan.prompt(*given, docs)
        return self._output(y, inputs, rest).to(x_BTD.dtype), RecurrentState(scan, taps_BCJ)

    def _convolved(
        self, channels: tuple[Tensor, ...], taps_BCJ: Tensor | None, docs: Documents | None
    ) -> tuple[tuple[Tensor, ...], Tensor]:
        """Return all channels behind the short convolution, and its last inputs."""
        x_BTC, weight_C1K = torch.cat(channels, -1), stacked(*self.short_convs().values())
        num_past = weight_C1K.shape[-1] - 1
        if docs is None:
            if taps_BCJ is None:
                taps_BCJ = x_BTC.new_zeros(len(x_BTC), x_BTC.shape[-1], num_past)
            x_BC, taps_BCJ = causal_conv_step(x_BTC[:, 0], taps_BCJ, weight_C1K)
            y_BTC = x_BC[:, None]
        else:
            taps_BCJ = last_inputs(x_BTC, num_past)
            y_BTC = self.convolve(x_BTC, weight_C1K, docs)
        return y_BTC.split([c_BTX.shape[-1] for c_BTX in channels], -1), taps_BCJ
