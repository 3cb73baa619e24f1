"""The authors' checkpoints of M and R blocks: their fused projections, and our parts of them.

Upstream keeps all that reads the input of a block in one matrix, and all channels of the short
convolution in one more. Here every part is a module of its own, so that tensor parallelism can cut
each by its heads. Same rows, same order: splitting and joining are exact, for gradients as well.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from megacpp.blocks.m2rnn import module as m2rnn
from megacpp.blocks.mamba3 import module as mamba3
from megacpp.config.schema import ModelConfig

Fused = Mapping[str, tuple[str, ...]]

# Upstream's name of a fused tensor, and our parts of it from top to bottom.
MAMBA3: Fused = {
    "in_proj.weight": tuple(
        f"in_{part}.weight" for part in ("z", "x", "B", "C", "dt", "A", "trap", "angles")
    ),
    "conv1d.weight": ("conv_x.weight", "conv_B.weight", "conv_C.weight"),
}
M2RNN: Fused = {
    "input_projection.weight": tuple(
        f"in_{part}.weight" for part in ("q", "k", "v", "forget", "gate")
    ),
    "conv1d.weight": ("conv_q.weight", "conv_k.weight", "conv_v.weight"),
}


def mamba3_from_upstream(state: Mapping[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """Our tensors (views) of a `Mamba3` module of state-spaces mamba; other names stay.

    Raises:
        AssertionError: a fused tensor hasn't the rows of `config`.
    """
    return _split(state, MAMBA3, mamba3.input_rows(config))


def mamba3_to_upstream(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The inverse: tensors, or gradients, under the names of state-spaces mamba."""
    return _join(state, MAMBA3)


def m2rnn_from_upstream(state: Mapping[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """Our tensors (views) of an `M2RNN` module of lm-engine; other names stay.

    Raises:
        AssertionError: a fused tensor hasn't the rows of `config`.
    """
    return _split(state, M2RNN, m2rnn.input_rows(config))


def m2rnn_to_upstream(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The inverse: tensors, or gradients, under the names of lm-engine."""
    return _join(state, M2RNN)


def _split(
    state: Mapping[str, Tensor], fused: Fused, input_rows: Mapping[str, int]
) -> dict[str, Tensor]:
    ours = {name: t for name, t in state.items() if name not in fused}
    for name in state.keys() & fused.keys():
        rows = [input_rows[_projection(part)] for part in fused[name]]
        assert sum(rows) == len(state[name]), f"{name}: {len(state[name])} rows, not {sum(rows)}"
        ours |= zip(fused[name], state[name].split(rows), strict=True)
    return ours


def _join(state: Mapping[str, Tensor], fused: Fused) -> dict[str, Tensor]:
    parts = {part for names in fused.values() for part in names}
    theirs = {name: t for name, t in state.items() if name not in parts}
    for name, names in fused.items():
        if names[0] in state:
            theirs[name] = torch.cat([state[part] for part in names])
    return theirs


def _projection(part: str) -> str:
    """`in_x` of `in_x.weight` and of `conv_x.weight`: a convolution has the rows of its input."""
    return part.removesuffix(".weight").replace("conv_", "in_")
