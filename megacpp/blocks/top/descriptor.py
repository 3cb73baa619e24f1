"""Token order prediction as data: a second matrix to the vocabulary, in training alone."""

from __future__ import annotations

from collections.abc import Iterator

from megacpp.blocks.descriptor import LOSS_BUFFERS, ActivationLayout, ModelFeature, Parameter
from megacpp.config.schema import Config


def _lines(config: Config) -> Iterator[str]:
    top = config.model.top
    yield f"token order: {top.loss:g} of the loss, {top.window} tokens ahead"


TOP = ModelFeature(
    name="top",
    title="token-order prediction",
    present=lambda model: model.top.loss > 0,
    below="top.",
    parameters=(Parameter(("unembed.weight",), "[V_tp, D]", "adamw", rate="head_lr"),),
    around=("top",),
    buffer_numbers=lambda model, part: (LOSS_BUFFERS, 0),
    multiply_adds=lambda model, kind: model.dim * model.vocab_size * (not kind),
    dims=lambda model: {"V": model.vocab_size},
    lines=_lines,
    exported=(),
    layouts=(ActivationLayout("", "x[B, T_tp, D] -> x[B, T, D]", None),),
)
