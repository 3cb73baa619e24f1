"""Streams, pipelines and steps against closed forms, and monotonicity over random steps."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise

import pytest

from megacpp.model.stage_actions import StageAction, from_torch
from megacpp.speed.collectives import AxisSpread
from megacpp.speed.hardware import Rates
from megacpp.speed.operators import Passes, Product, SerialWork
from megacpp.speed.pipeline import (
    StageTime,
    pipeline_seconds,
    schedule,
    simulate,
)
from megacpp.speed.step import BlockWork, StepWork, Transfer, passes_of, predict
from megacpp.speed.streams import Task, UnitTime, fsdp_seconds, fsdp_tasks, run
from parallel.simulate.schedule import torch_order
from tests.speed.test_operators import PLAIN


def test_tasks_wait_for_their_stream_and_for_others() -> None:
    found = run([Task("link", 1.0), Task("compute", 2.0, (0,)), Task("link", 1.5, (0,))])
    assert found.starts == [0.0, 1.0, 1.0] and found.end == 3.0 and found.exposed == 1.0


def test_without_prefetch_every_gather_is_exposed() -> None:
    units = [UnitTime(2.0, 4.0, 1.0)] * 5
    total, exposed = fsdp_seconds(units, 1, prefetch=0)
    # The last unit's parameters are still there when its backward begins.
    assert exposed == pytest.approx(5 + 4) and total == pytest.approx(5 * 6 + 9)


def test_with_prefetch_the_first_gather_is_exposed() -> None:
    units = [UnitTime(2.0, 4.0, 1.0)] * 5
    for prefetch in (1, None):
        assert fsdp_seconds(units, 1, prefetch)[1] == pytest.approx(1.0)
    slow = [UnitTime(2.0, 4.0, 3.0)] * 5  # the link is busy throughout the forward
    assert fsdp_seconds(slow, 1, None, reshard=False)[1] == pytest.approx(5 * 3 + 2 - 10)


@pytest.mark.parametrize(
    ("settings", "gathers"),
    [({}, 2 * 3 * 5 - 3), ({"reshard": False}, 3 * 5), ({"resident": True}, 5)],
)
def test_a_step_gathers_as_often_as_its_settings_say(
    settings: dict[str, bool], gathers: int
) -> None:
    """In each pass, in each forward, or once a step; the last unit is whole in its backward."""
    tasks = fsdp_tasks([UnitTime(2.0, 4.0, 1.0, name="A")] * 5, 3, **settings)
    assert sum(task.name == "gather A" for task in tasks) == gathers


def test_the_last_reduction_is_exposed() -> None:
    units = [UnitTime(2.0, 4.0, 0.0, 1.0)] * 5
    assert fsdp_seconds(units, 3)[1] == pytest.approx(1.0)


@pytest.mark.parametrize("layers", [3, 20, 61])
@pytest.mark.parametrize("microbatches", [1, 3, 9])
def test_few_units_and_microbatches_stand_for_all(layers: int, microbatches: int) -> None:
    units = [UnitTime(0.1, 0.2, 2.0, 1.0), *[UnitTime(2.0, 4.5, 1.9, 3.0)] * layers]
    units.append(UnitTime(1.0, 2.0, 0.5, 0.5))
    for each in (False, True):
        whole = run(fsdp_tasks(units, microbatches, 1, True, each)).end
        assert fsdp_seconds(units, microbatches, 1, True, each)[0] == pytest.approx(whole)


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_a_pipeline_has_the_bubble_of_the_formula(name: str) -> None:
    for ranks, microbatches in ((2, 2), (4, 8), (8, 64), (16, 7)):
        stages = [StageTime(1.0, 2.0)] * ranks
        total = pipeline_seconds(name, stages, ranks, microbatches, 0.0)
        assert total == pytest.approx(3 * (microbatches + ranks - 1))


def test_interleaving_divides_the_bubble() -> None:
    for ranks, microbatches, per_rank in ((4, 8, 2), (4, 16, 4), (8, 8, 2)):
        stages = [StageTime(1.0, 2.0)] * (ranks * per_rank)
        total = pipeline_seconds("interleaved", stages, ranks, microbatches, 0.0)
        assert total == pytest.approx(3 * (microbatches * per_rank + ranks - 1))


def test_any_number_of_microbatches_is_interleaved() -> None:
    stages = [StageTime(1.0, 2.0)] * 16
    times = [pipeline_seconds("interleaved", stages, 8, m, 0.1) for m in range(1, 40)]
    assert all(time > 0 for time in times) and times[23] < times[30] < times[38]
    with pytest.raises(ValueError, match="microbatches=17: no multiple of its rounds"):
        schedule("interleaved", 8, 17, 2)


def test_few_microbatches_stand_for_all() -> None:
    stages = [StageTime(1.0 + n % 3, 2.5) for n in range(8)]
    for microbatches in (40, 77):
        whole = simulate(schedule("1f1b", 8, microbatches), stages, 0.3)
        assert pipeline_seconds("1f1b", stages, 8, microbatches, 0.3) == pytest.approx(whole)


@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 4), (4, 8), (4, 12)])
def test_interleaved_actions_are_torchs(ranks: int, microbatches: int) -> None:
    order = torch_order("interleaved", ranks, microbatches)
    assert schedule("interleaved", ranks, microbatches, 2) == from_torch(order)


def test_a_split_backward_fills_bubbles() -> None:
    ranks, microbatches = 4, 12
    stages = [StageTime(1.0, 2.0, 1.0)] * 8
    plain = pipeline_seconds("1f1b", [StageTime(2.0, 4.0)] * 4, ranks, microbatches, 0.0)
    for name in ("zbv", "dualpipev"):
        found = simulate(from_torch(torch_order(name, ranks, microbatches)), stages, 0.0)
        assert 6 * microbatches <= found < plain - 3


def test_a_stage_waits_for_what_is_sent() -> None:
    actions = ((StageAction(0, "F", 0),), (StageAction(1, "F", 0),))
    assert simulate(actions, [StageTime(1.0, 2.0)] * 2, send=0.5) == 2.5


def random_step(dice: random.Random) -> StepWork:
    """Return a step of any sizes."""
    size = dice.choice([256, 1024, 4096])
    ops = (Product(dice.choice([512, 8192]), size, size), Passes(size * 1e4))
    tp = (Transfer("tp", "all_reduce", size * 1e4, "products" * (dice.random() < 0.5)),)
    block = BlockWork("AF", ops, ops * 2, tp, tp, dense=size * size)
    layers, pp = 4 * dice.randint(1, 5), dice.choice([1, 4])
    stages = [list(range(s * layers // pp, (s + 1) * layers // pp)) for s in range(pp)]
    return StepWork(
        [block] * layers,
        {
            "tp": AxisSpread(8, 8),
            "data": AxisSpread(64, 1),
            "pp": AxisSpread(pp, 1),
        },
        dice.randint(1, 12),
        dice.choice(["fsdp", "zero1", "ddp"]),
        overlapped=dice.random() < 0.5,
        reshard=dice.random() < 0.5,
        stages=stages if pp > 1 else (),
        stage_bytes=size * 1e3,
        tokens=1e4,
    )


@pytest.mark.parametrize("seed", range(40))
def test_a_faster_machine_is_never_slower(seed: int) -> None:
    dice = random.Random(seed)
    step = random_step(dice)
    now = predict(step, PLAIN, Rates()).step_s
    for name in ("nvlink_gbs", "network_gbs", "hbm_gbs", "bf16_tflops"):
        faster = replace(PLAIN, **{name: 2 * getattr(PLAIN, name)})
        assert predict(step, faster, Rates()).step_s <= now * (1 + 1e-9), name
    for name in Rates._fields:
        assert predict(step, PLAIN, Rates(**{name: 2.0})).step_s <= now * (1 + 1e-9)


@pytest.mark.parametrize("seed", range(40))
def test_more_microbatches_never_have_a_larger_bubble(seed: int) -> None:
    step = replace(random_step(random.Random(seed)), microbatches=4)
    shares = []
    for count in (4, 8, 16, 32):
        found = predict(replace(step, microbatches=count), PLAIN, Rates())
        assert sum(found.parts.values()) == pytest.approx(found.step_s)
        shares.append(found.parts.get("bubble", 0.0) / found.step_s)
    assert all(b <= a + 1e-9 for a, b in pairwise(shares)), shares


def test_a_cluster_of_any_size_costs_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Count the tasks that are simulated: as many for 16,384 ranks as for 8."""
    from megacpp.speed import streams

    counts: list[int] = []
    real = streams.run
    monkeypatch.setattr(streams, "run", lambda tasks: counts.append(len(tasks)) or real(tasks))
    step = replace(random_step(random.Random(1)), stages=(), data="fsdp", overlapped=True)
    for size in (8, 16384):
        predict(replace(step, axes={"data": AxisSpread(size, 8)}), PLAIN, Rates())
    half = len(counts) // 2
    assert counts[:half] == counts[half:]


@pytest.mark.parametrize("beside", ["products", "all"])
def test_a_step_is_the_sum_of_its_parts(beside: str) -> None:
    """Return a block on 8 ranks: 1 and 2 ms of memory, a hidden collective, a reduction, Adam 3 ms.

    The collective takes 8e7 x 7/8 / 100e9 + 22 us = 722 us; a product of 400 us hides 360 of them,
    of which half slow the kernels beside it. A whole pass hides all but the first of 8 parts.
    """
    product = Product(2560, 1280, 6103 - 133)
    hidden = (Transfer("tp", "all_gather", 8e7, beside),)
    block = BlockWork("F", (Passes(1e9), product), (Passes(2e9),), hidden, (), dense=1e7)
    step = StepWork(
        [block], {"tp": AxisSpread(8, 8), "data": AxisSpread(8, 8)}, 2, "ddp",
        overlapped=False, optimizer=(Passes(3e9),), tokens=100.0, flops=1e12,
    )  # fmt: skip
    found = predict(step, PLAIN, Rates())
    once = 2 * 2560 * 1280 * 6103 / 1e14
    tp = 8e7 * 7 / 8 / 100e9 + 22e-6
    assert found.parts["products"] == pytest.approx(2 * once)
    assert found.parts["memory-bound"] == pytest.approx(6e-3)
    room = {"products": 0.9 * once, "all": tp * 7 / 8}[beside]
    assert found.parts["exposed tp"] == pytest.approx(2 * (tp - room))
    assert found.parts["slowed by tp"] == pytest.approx(2 * room / 2)
    assert found.parts["exposed data"] == pytest.approx(2 * 4e7 * 7 / 8 / 100e9 + 29e-6)
    assert found.parts["optimizer"] == pytest.approx(3e-3)
    assert found.step_s == pytest.approx(sum(found.parts.values()))
    assert found.tokens_per_s == pytest.approx(100 / found.step_s)
    assert found.mfu == pytest.approx(1e12 / found.step_s / 1e14)


@pytest.mark.parametrize(("nodes", "lost"), [(1, 0.5), (2, 0.2)])
def test_an_exchange_slows_kernels_by_its_bytes_or_by_its_sms(nodes: int, lost: float) -> None:
    """Return 8e7 bytes to 8 ranks of a node: 0.7 ms of links and 27 us; to 16: 4 ms and 39 us.

    Inside a node half of the time is lost. Between nodes that is half of the 0.75 ms that the bytes
    would take inside one, or 20 of 100 SMs throughout, which is more.
    """
    group = AxisSpread(8 * nodes, 8)
    trip = (Transfer("ep", "all_to_all", 8e7, "all"),)
    block = BlockWork("E", (Passes(1e10),), (), trip, ())
    (forward, _), *_ = passes_of(StepWork([block], {"ep": group}), PLAIN, Rates())
    time = (0.727e-3, 4.039e-3)[nodes - 1]
    hidden = time * (1 - 1 / group.size)
    assert dict(forward.parts)["exposed ep"] == pytest.approx(time - hidden)
    assert dict(forward.parts)["slowed by ep"] == pytest.approx(hidden * lost)


def test_a_hidden_reduction_slows_kernels() -> None:
    """DDP on 8 ranks: 4e7 bytes twice 7/8 at 100 GB/s and 29 us hide in a backward of 2 ms.

    A block of one can't hide its own share, so none is hidden; of two blocks half is.
    """
    block = BlockWork("F", (Passes(1e9),), (Passes(2e9),), (), (), dense=1e7)
    reduce = 4e7 * 2 * 7 / 8 / 100e9 + 29e-6
    for count, hidden in ((1, 0.0), (2, 0.5)):
        step = StepWork(
            [block] * count, {"data": AxisSpread(8, 8)}, 1, "ddp", overlapped=True,
            optimizer=(), tokens=100.0, flops=1e12,
        )  # fmt: skip
        parts = predict(step, PLAIN, Rates()).parts
        assert parts["exposed data"] == pytest.approx(count * reduce * (1 - hidden))
        slowed = 0.5 * count * 4e7 * 2 * 7 / 8 / 100e9 * hidden
        assert parts.get("slowed by data", 0.0) == pytest.approx(slowed, abs=1e-12)


def test_fsdp2_copies_what_it_gathers_and_what_it_reduces() -> None:
    """Read and write of 1e7 numbers at 1 TB/s: 2 bytes each behind a gather, 2 and 4 to reduce.

    Gradients of the first of two microbatches are read in 2 and written in 4 bytes, those of the
    second read in 2 and added to what is read and written in 4.
    """
    block = BlockWork("F", (Passes(1e9),), (Passes(2e9),), (), (), dense=1e7)
    data = {"data": AxisSpread(8, 8)}
    for reshard, gathers in ((True, 4 + 2), (False, 2 + 2)):  # the last isn't gathered again
        step = StepWork([block] * 2, data, 2, "fsdp", copied=True, reshard=reshard)
        copied = (gathers * 4e7 + 2 * (6e7 + 6e7 + 10e7)) / 1e12
        assert predict(step, PLAIN, Rates()).parts["copied data"] == pytest.approx(copied)
        plain = predict(replace(step, copied=False), PLAIN, Rates())
        assert predict(step, PLAIN, Rates()).step_s - plain.step_s == pytest.approx(copied)
    step = StepWork([block], data, 1, "ddp", copied=True)
    assert "copied data" not in predict(step, PLAIN, Rates()).parts


def test_a_cpu_starts_each_product_of_a_group_and_each_step_of_a_recurrence() -> None:
    """Four launches, seven more products of eight, and three operators for each of ten steps."""
    operators = (Product(48, 64, 64, count=8), SerialWork(10, 0.0, 0.0))
    block = BlockWork("E", operators, (), launches=(4, 0))
    for on_host, launches in ((True, 4 + 7 + 30), (False, 4)):
        machine = replace(PLAIN, on_host=on_host, launch_us=1e4)
        (forward, _), *_ = passes_of(StepWork([block]), machine, Rates())
        wait = dict(forward.parts)["host"] + (0.0 if on_host else forward.parts[0][1])
        assert wait == pytest.approx(launches * 1e-2, rel=1e-3)
