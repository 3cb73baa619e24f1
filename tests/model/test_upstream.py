"""Fused projections of the authors' checkpoints: split into our parts and back, to the last bit."""

from __future__ import annotations

import pytest
import torch

from megacpp.blocks.gated_deltanet.descriptor import GATED_DELTANET
from megacpp.blocks.gated_deltanet.module import GatedDeltaNet
from megacpp.blocks.m2rnn.descriptor import M2RNN_KIND
from megacpp.blocks.m2rnn.module import M2RNN
from megacpp.blocks.mamba3.descriptor import MAMBA3
from megacpp.blocks.mamba3.module import Mamba3
from megacpp.model.upstream import from_upstream, to_upstream
from tests.model.small import small, variants

MIMO = variants()["mamba_mimo_norm_conv"]
HEADS = variants()["m2rnn_heads"]
CASES = {
    "mamba3": (Mamba3, small(), MAMBA3),
    "mamba3 with all options": (Mamba3, MIMO, MAMBA3),
    "m2rnn": (M2RNN, small(), M2RNN_KIND),
    "m2rnn with heads of q": (M2RNN, HEADS, M2RNN_KIND),
    "gated deltanet": (GatedDeltaNet, small("G"), GATED_DELTANET),
}


@pytest.mark.parametrize("name", CASES)
def test_there_and_back(name: str) -> None:
    mixer, config, kind = CASES[name]
    ours = {key: torch.randn_like(t) for key, t in mixer(config).state_dict().items()}
    theirs = to_upstream(kind, ours, config)
    parts = {part for one in kind.upstream for part in one.ours}
    assert not parts & theirs.keys()
    assert sum(t.numel() for t in theirs.values()) == sum(t.numel() for t in ours.values())
    back = from_upstream(kind, theirs, config)
    assert back.keys() == ours.keys()
    assert all(torch.equal(back[key], t) for key, t in ours.items())


IN_PROJ = "in_proj.weight"  # upstream's name, of Mamba-3


def test_order_of_the_rows() -> None:
    """z | x | B | C | dt | A | trap | angles, and q | k | v | forget | gate, by hand."""
    config = small()  # width 16: M has inner 32, 4 heads, N 8, 2 angles; R one head of K 6, V 4
    fused = torch.arange(32 + 32 + 8 + 8 + 4 + 4 + 4 + 2)[:, None].expand(-1, 16)
    parts = from_upstream(MAMBA3, {IN_PROJ: fused}, config)
    first = {key.split(".")[0]: int(t[0, 0]) for key, t in parts.items()}
    assert first == {
        **{"in_z": 0, "in_x": 32, "in_B": 64, "in_C": 72},
        **{"in_dt": 80, "in_A": 84, "in_trap": 88, "in_angles": 92},
    }
    fused = torch.arange(6 + 6 + 4 + 1 + 4)[:, None].expand(-1, 16)
    parts = from_upstream(M2RNN_KIND, {"input_projection.weight": fused}, config)
    first = {key.split(".")[0]: int(t[0, 0]) for key, t in parts.items()}
    assert first == {"in_q": 0, "in_k": 6, "in_v": 12, "in_forget": 16, "in_gate": 17}


def test_rows_of_another_shape_are_refused() -> None:
    with pytest.raises(AssertionError, match=r"conv1d\.weight: 7 rows, not 16"):
        from_upstream(M2RNN_KIND, {"conv1d.weight": torch.empty(7, 1, 4)}, small())
