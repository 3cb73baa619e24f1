"""Speeds of a GPU that would change the order of a plan."""

from __future__ import annotations

import pytest

from megacpp.cli.plan_order import Asked, at_other_speeds
from megacpp.speed.hardware import Rates, gpu
from megacpp.speed.ours import step_work
from megacpp.speed.step import predict
from tests.speed.test_ours import config_of


@pytest.mark.parametrize("name", ["H100", "B200"])  # without a table of measured products, with one
def test_half_the_speed_of_products_doubles_their_time(name: str) -> None:
    config, machine = config_of("dense_110m", "--model.dim", "4096"), gpu(name)
    again = at_other_speeds(Asked(config, config, {}, 1, 80 << 30, 1 << 20), machine)
    found = predict(step_work(config, 1, machine.generation), machine, Rates())
    compute = found.parts["products"] + found.parts["attention"]
    slower = again(config, "products", 0.5)
    assert slower == pytest.approx(found.step_s + compute, rel=0.02)
