"""Every setting at values that nobody means: a rule in one line, at once, and no crash."""

from __future__ import annotations

import signal
import sys
import typing

import pytest

from megacpp.config.arguments import leaf_types, parse_run, replace_keys
from megacpp.config.checks.every import broken
from megacpp.config.presets import tiny
from megacpp.config.schema import Config
from megacpp.config.settings import settings_of
from megacpp.errors import ConfigError, MegacppError

FP8 = {"precision.fp8": "torchao"}
SIZED = [one for one in settings_of(Config).values() if one.kind is int and one.range]
ODD: dict[object, list[str]] = {
    int: ["-1", "1000000007", "9223372036854775807", "9" * 400],
    float: ["-1", "1e300", "1e-300", "nan"],
    str: ["", "é\n", "x" * 5000],
    bool: [""],
}


def test_no_value_of_any_setting_hangs_or_crashes() -> None:
    """Each setting alone at values that nobody means: legal, or one line, and at once."""

    def late(*_: object) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGVTALRM, late)
    try:
        for key, kind in leaf_types(Config).items():
            inner = next((k for k in (*typing.get_args(kind), kind) if k in ODD), str)
            for value in ODD[inner]:
                signal.setitimer(signal.ITIMER_VIRTUAL, 1.0)  # of CPU time
                try:
                    parse_run(["tiny_full", f"--{key}={value}"], 8)
                except MegacppError as error:
                    line = str(error)
                    assert line.isprintable() and ". Fix: " in line and len(line) < 900, line
                except TimeoutError:
                    pytest.fail(f"--{key}={value[:40]} takes over a second")
                finally:
                    signal.setitimer(signal.ITIMER_VIRTUAL, 0)
    finally:
        signal.signal(signal.SIGVTALRM, before)


@pytest.mark.parametrize(
    "change",
    [
        {"model.pattern": "AXE"},
        {"model.attention.sparse.layers": "9"},
        {"model.attention.sparse.own": "x"},
        {"model.engram.layers": "9"},
    ],
    ids=str,
)
def test_a_mistake_is_reported_once(change: dict[str, str]) -> None:
    config = replace_keys(tiny(), change)
    found = [str(error) for error in broken(config, world_size=1)]
    (key,) = change
    assert len(found) == 1 and found[0].startswith(key), found


@pytest.mark.parametrize("state", ["8bit", "4bit"])
def test_low_bit_moments_need_torchao(state: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchao", None)  # as if it weren't installed
    wanted = ["tiny", "--optim.adamw-state", state]
    with pytest.raises(ConfigError, match="Fix: pip install torchao") as caught:
        parse_run(wanted, world_size=2)
    assert str(caught.value).startswith(f"optim.adamw_state={state}: needs torchao")
    assert caught.value.exit_code == 2
    parse_run(["tiny", "--optim.adamw-state", "fp32"], world_size=2)


@pytest.mark.parametrize("value", [-1, 0])
def test_a_size_out_of_range_is_a_rule_and_no_crash(value: int) -> None:
    """`megacpp validate` asks all rules, also those that divide by what is wrong."""
    checked = [one for one in SIZED if one.range and not one.range.holds(value)]
    assert len(checked) > 40
    for one in checked:
        for more in ({}, FP8):
            found = list(broken(replace_keys(tiny(), more | {one.key: value}), 1))
            assert one.range and one.range.least is not None
            start = f"{one.key}={value}: must be at least {one.range.least}. Fix: "
            assert str(found[0]).startswith(start), one.key
