"""S4: microbatches become one step: divisors, collectives, bad steps, schedules, the plan."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from megacpp.config.arguments import parse_run
from megacpp.config.batch_schedule import BatchSchedule, batch_schedule
from megacpp.config.checks.every import broken
from megacpp.config.presets import PRESETS
from megacpp.config.schema import Config, MeshConfig
from megacpp.data.loader import Loader
from megacpp.errors import ConfigError
from megacpp.model.stages import enough_microbatches
from tests.data import test_schedule
from tests.memory import test_planner
from tests.model import test_router
from tests.parallel import test_boundary, test_chunks, test_guard, test_loss_scale
from tests.parallel.parity import TOLERANCE, Run, check_scatters, covered, error, traces_of
from tests.ranks import on_worlds
from tests.run import test_fit

ONE, TWO = MeshConfig(dp_shard=1), MeshConfig(dp_shard=2)


def test_s4_1_microbatches_have_the_gradient_of_one_batch() -> None:
    """Eight rows as 1 x 8, 2 x 4, 8 x 1 and on two ranks, ragged labels, fp64."""
    Split = test_boundary.Split
    splits = [Split(ONE, 2), Split(ONE, 8), Split(TWO, 2)]
    whole = Split(ONE, 1)
    found = on_worlds(test_boundary.outcome, {s: s.run.world for s in (*splits, whole)})
    (expected,) = found[whole]
    for split in splits:
        covered([rank.gradients for rank in found[split]], expected.gradients)
        for rank in found[split]:
            assert rank.valid == expected.valid
            assert error(rank.gradients, expected.gradients)[0] <= TOLERANCE["fp64"]


def test_s4_2_each_unit_reduces_exactly_once_in_a_step() -> None:
    run = Run("plain", TWO, accum=4)
    for trace in traces_of([run], collectives=True)[run]:
        assert trace.scatters and set(trace.scatters.values()) == {1}
        check_scatters(trace)
        reductions = [c for c in trace.collectives if c.kind == "reduce_scatter"]
        assert len(reductions) == len(trace.scatters)


def test_s4_3_the_auxiliary_coefficient_does_not_depend_on_microbatches() -> None:
    test_router.test_microbatches_do_not_change_the_losses()
    runs = [Run("plain", accum=1), Run("plain", accum=4)]
    one, four = (traces[0].auxiliary[0] for traces in traces_of(runs).values())
    assert one.keys() == four.keys() and any(one.values())
    for term, value in one.items():
        assert four[term] == pytest.approx(value, rel=1e-12), term


def test_s4_4_a_pipeline_divides_by_microbatches_times_chunks() -> None:
    test_boundary.test_divisors()


def test_s4_4_chunks_of_a_pipeline_are_counted_apart_from_microbatches() -> None:
    """Two microbatches of the loader in two parts each: the gradient of four, divided by four."""
    test_chunks.test_counts_are_apart_and_rules_know_both()
    case = test_chunks.Case(2, 2, "microbatches")
    other = test_chunks.alone(case)
    found = on_worlds(test_chunks.outcome, {case: 2, other: 2})
    for mine, theirs in zip(found[case], found[other], strict=True):
        assert mine.run == theirs.run == 4
        assert error(mine.gradients, theirs.gradients)[0] <= TOLERANCE["fp64"]


def test_s4_5_a_nan_on_one_rank_costs_one_step_and_nothing_else() -> None:
    """Seen before ranks add up, the step left out, parameters and rates as if it had not been."""
    case = test_guard.Case("fsdp2")
    other = test_guard.without(case)
    found = on_worlds(test_guard.play, dict.fromkeys(test_guard.jobs([case]), 2))
    for seen, left_out in zip(found[case], found[other], strict=True):
        assert [v.healthy for v in seen.statuses] == [True, False, True]
        assert seen.statuses[1].nonfinite > 0
        assert test_guard.equal(seen.states[1], seen.states[2])
        assert test_guard.equal(seen.states[-1], left_out.states[-1])


def test_s4_5_the_look_before_the_reduction_can_be_turned_off() -> None:
    """By a setting of the run, not of the environment; a step without a finite norm stays out."""
    assert parse_run(["tiny", "--train.nonfinite", "off"], 1).config.train.nonfinite == "off"
    test_guard.test_without_a_look_nothing_is_watched()
    case = test_guard.Case("fsdp2", policy="off")
    for seen in on_worlds(test_guard.play, {case: 2})[case]:
        assert [v.healthy for v in seen.statuses] == [True, False, True]
        assert seen.statuses[1].nonfinite == 0


def test_s4_6_fp16_halves_its_scale_on_the_same_event() -> None:
    test_loss_scale.test_the_published_rule()


def test_s4_7_batch_warmup_has_its_endpoints_and_counts_tokens() -> None:
    for schedule in (BatchSchedule(3, 8, 4), BatchSchedule(1, 64, 10), BatchSchedule(2, 7, 97)):
        test_schedule.test_end_points_and_growth(schedule)
        test_schedule.test_rows_tile(schedule)
    assert BatchSchedule(1, 64, 10).accum(0) == 8 and BatchSchedule(1, 7, 10).accum(0) == 1


def test_s4_8_static_shapes_leave_the_warmup_out() -> None:
    test_schedule.test_static_shapes_leave_the_warmup_out_and_say_so()


def test_s4_8_static_shapes_are_a_setting() -> None:
    flags = "--train.static-shapes true --train.batch-warmup-steps 5 --train.grad-accum 8"
    schedule, reason = batch_schedule(parse_run(["tiny", *flags.split()], 1).config, 1)
    assert schedule.warmup_steps == 0 and reason


def test_s4_9_a_v_shaped_schedule_needs_twice_as_many_microbatches_as_ranks() -> None:
    for pp in (2, 4):
        assert enough_microbatches("dualpipev", pp, 2 * pp)
        assert not enough_microbatches("dualpipev", pp, 2 * pp - 1)
    base = replace(test_planner.small(), mesh=MeshConfig(pp=2, pp_schedule="dualpipev"))
    few = replace(base, train=replace(base.train, grad_accum=3, tokens_per_step=0))
    assert any("needs 2 * mesh.pp (4) or more" in str(e) for e in broken(few, 2))


def test_s4_9_a_device_batch_that_does_not_divide_is_refused() -> None:
    flags = "--mesh.pp 2 --train.grad-accum 2 --train.num-chunks 4 --train.device-batch-size 6"
    with pytest.raises(ConfigError, match=r"must divide train.device_batch_size \(6\)"):
        parse_run(["tiny", *flags.split()], 2)


def test_s4_10_plans_are_in_the_articles_order_and_a_retry_keeps_checkpointing() -> None:
    test_planner.test_the_order_is_the_articles()
    test_planner.test_two_rows_in_eight_microbatches_before_one_in_sixteen()
    test_fit.test_a_retry_preserves_gradient_checkpointing()
    test_fit.test_the_first_step_counts_for_nothing()


def test_s4_10_auto_fit_ranks_the_best_few_by_their_median_step() -> None:
    """And a retry after lack of memory compares policies, not whether there is one."""
    assert Config().memory.fit_candidates > 1
    test_fit.test_the_fastest_of_the_best_few_trains()
    test_fit.test_a_retry_compares_policies()


def test_s4_11_the_loader_moves_by_one_microbatch() -> None:
    rows: list[tuple[int, ...]] = []
    corpus: Any = SimpleNamespace(train_batch=lambda some: rows.append(tuple(some)) or len(rows))
    loader = Loader(corpus, 1, 2, 3, position=12)
    batches = loader.take(5)
    for k in range(1, 6):
        next(batches)
        assert (loader.microbatches, loader.position) == (k, 12 + 6 * k)
        assert rows[-1] == tuple(range(12 + 6 * k - 3, 12 + 6 * k))


def test_s4_a_one_row_is_no_default() -> None:
    """No preset has one row a rank; a planner falls back to it where two don't fit."""
    rows = {name: make().train.device_batch_size for name, make in PRESETS.items()}
    rows["a bare configuration"] = Config().train.device_batch_size
    assert all(count > 1 for count in rows.values()), rows
    for config in (make() for make in PRESETS.values() if make().train.tokens_per_step):
        a_row = config.data.seq_len * config.train.device_batch_size
        assert config.train.tokens_per_step % (8 * a_row) == 0, config.preset
