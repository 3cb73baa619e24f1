"""Attention of a block as work of the time model: windows, indexers, chosen keys."""

from __future__ import annotations

import pytest

from megacpp.speed.operators import Attend
from megacpp.speed.ours import step_work
from tests.speed.test_ours import config_of


@pytest.mark.parametrize("window", [0, 1, 1000, 2048, 3000, 5000])
def test_a_query_attends_to_the_keys_of_its_window(window: int) -> None:
    """On average over a row, half a key of the diagonal apart."""
    words = ("dense_110m", "--data.seq-len", "4096", "--model.attention.window", str(window))
    block = step_work(config_of(*words, "--kernels.attention", "flex"), 1, "H100").blocks[1]
    found = next(op.keys for op in block.forward if isinstance(op, Attend))
    seen = [min(token + 1, window or 4096) for token in range(4096)]
    assert found == pytest.approx(sum(seen) / 4096, abs=0.5)
