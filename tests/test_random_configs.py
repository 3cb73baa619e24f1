"""Random configurations have a plan or end in one line each, at once (tests/fuzz_config.py)."""

from __future__ import annotations

import pytest

from megacpp.config.arguments import parse_run
from megacpp.errors import ConfigError
from tests.fuzz_config import trials


def test_no_configuration_crashes_or_hangs() -> None:
    """Try a part of the 20,000 that `python -m tests.fuzz_config` tries."""
    tried = list(trials(range(64), seed=7))
    assert [one for one in tried if one.wrong] == []
    assert any(one.planned for one in tried), "no plan was tried"


@pytest.mark.parametrize("axis", ["pp", "dp_replicate", "dp_shard", "cp", "tp", "ep"])
def test_a_degree_is_bounded(axis: str) -> None:
    """The search for the nearest legal degree divides by every number up to its root."""
    for value in (1_000_003, 2**31, 2**62):
        with pytest.raises(ConfigError, match=f"^mesh.{axis}={value}: must be at most 131072"):
            parse_run(["tiny_full", f"--mesh.{axis.replace('_', '-')}", str(value)], 1_000)
