"""Fused projections of the authors' checkpoints: split into our parts and back, to the last bit."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from megacpp.blocks.m2rnn.module import M2RNN
from megacpp.blocks.mamba3.module import Mamba3
from megacpp.config.schema import ModelConfig
from megacpp.model.upstream import (
    m2rnn_from_upstream,
    m2rnn_to_upstream,
    mamba3_from_upstream,
    mamba3_to_upstream,
)
from tests.model.small import small, variants

MIMO = variants()["mamba_mimo_norm_conv"]
HEADS = variants()["m2rnn_heads"]
CASES = {
    "mamba3": (Mamba3, small(), mamba3_from_upstream, mamba3_to_upstream),
    "mamba3 with all options": (Mamba3, MIMO, mamba3_from_upstream, mamba3_to_upstream),
    "m2rnn": (M2RNN, small(), m2rnn_from_upstream, m2rnn_to_upstream),
    "m2rnn with heads of q": (M2RNN, HEADS, m2rnn_from_upstream, m2rnn_to_upstream),
}
Split = Callable[[dict[str, Tensor], ModelConfig], dict[str, Tensor]]
Join = Callable[[dict[str, Tensor]], dict[str, Tensor]]


@pytest.mark.parametrize("name", CASES)
def test_there_and_back(name: str) -> None:
    kind, config, split, join = CASES[name]
    ours = {key: torch.randn_like(t) for key, t in kind(config).state_dict().items()}
    theirs = join(ours)
    assert not [key for key in theirs if key.startswith(("in_", "conv_")) and key != IN_PROJ]
    assert sum(t.numel() for t in theirs.values()) == sum(t.numel() for t in ours.values())
    back = split(theirs, config)
    assert back.keys() == ours.keys()
    assert all(torch.equal(back[key], t) for key, t in ours.items())


IN_PROJ = "in_proj.weight"  # upstream's name, of Mamba-3


def test_order_of_the_rows() -> None:
    """z | x | B | C | dt | A | trap | angles, and q | k | v | forget | gate, by hand."""
    config = small()  # width 16: M has inner 32, 4 heads, N 8, 2 angles; R one head of K 6, V 4
    fused = torch.arange(32 + 32 + 8 + 8 + 4 + 4 + 4 + 2)[:, None].expand(-1, 16)
    parts = mamba3_from_upstream({IN_PROJ: fused}, config)
    first = {key.split(".")[0]: int(t[0, 0]) for key, t in parts.items()}
    assert first == {
        **{"in_z": 0, "in_x": 32, "in_B": 64, "in_C": 72},
        **{"in_dt": 80, "in_A": 84, "in_trap": 88, "in_angles": 92},
    }
    fused = torch.arange(6 + 6 + 4 + 1 + 4)[:, None].expand(-1, 16)
    parts = m2rnn_from_upstream({"input_projection.weight": fused}, config)
    first = {key.split(".")[0]: int(t[0, 0]) for key, t in parts.items()}
    assert first == {"in_q": 0, "in_k": 6, "in_v": 12, "in_forget": 16, "in_gate": 17}


def test_rows_of_another_shape_are_refused() -> None:
    with pytest.raises(AssertionError, match=r"conv1d\.weight: 7 rows, not 16"):
        m2rnn_from_upstream({"conv1d.weight": torch.empty(7, 1, 4)}, small())
