"""Random configurations are legal or end in one line each, at once (tests/fuzz_config.py)."""

from __future__ import annotations

import pytest

from megacpp.config.arguments import parse_run
from megacpp.errors import ConfigError
from tests.fuzz_config import failures


def test_no_configuration_crashes_or_hangs() -> None:
    """Draw a part of the 20,000 that `python -m tests.fuzz_config` draws."""
    assert list(failures(count=60, seed=1)) == []


@pytest.mark.parametrize("axis", ["pp", "dp_replicate", "dp_shard", "cp", "tp", "ep"])
def test_a_degree_is_bounded(axis: str) -> None:
    """The search for the nearest legal degree divides by every number up to its root."""
    for value in (1_000_003, 2**31, 2**62):
        with pytest.raises(ConfigError, match=f"^mesh.{axis}={value}: must be at most 131072"):
            parse_run(["tiny_full", f"--mesh.{axis.replace('_', '-')}", str(value)], 1_000)
