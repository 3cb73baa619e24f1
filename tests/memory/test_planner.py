"""The planner's order, its candidates, and what it promises of a run."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from dataclasses import replace

import pytest

from megacpp.config.checks.every import broken, resolve
from megacpp.config.presets import nam52_deep_base, tiny
from megacpp.config.recompute_flags import BY_KIND, NONE
from megacpp.config.schema import KEEP, Config, MeshConfig, ModelConfig
from megacpp.errors import ConfigError
from megacpp.memory.estimate import MemoryEstimate
from megacpp.memory.plan_space import (
    MESH,
    meshes,
    policies,
    row_choices,
)
from megacpp.memory.planner import Plan, Score, deciding, plan

SEQ = 64
KEPT = {"none": 40, "experts": 33, "preset": 21, "selective": 18, "full": 10}  # bytes a token


def small(**model: object) -> Config:
    """Every letter, in sizes that 8 ranks divide in several ways."""
    base = tiny()
    attention = replace(base.model.attention, num_heads=8, num_kv_heads=4)
    other = {"depth": 6, "pattern": "AEMERF"} | model
    return replace(
        base,
        model=replace(base.model, attention=attention, **other),
        data=replace(base.data, seq_len=SEQ),
    )


def estimator(weights: int = 400_000, upper: float = 1.0):
    """Memory that falls with every axis and grows with rows: a stand-in with known bounds."""

    def needs(config: Config, size: int, rank: int, budget: int | None) -> MemoryEstimate:
        mesh, stage = config.mesh, rank // (size // config.mesh.pp)
        names = {rung.recompute: rung.name for rung in policies(small())}
        kept = KEPT[names[config.recompute]]
        tokens = config.train.device_batch_size * config.data.seq_len / (mesh.tp * mesh.cp)
        flying = min(config.train.grad_accum, mesh.pp - stage)
        point = int(
            weights / (mesh.pp * mesh.tp * mesh.dp_shard * mesh.cp)
            + weights / 8 / mesh.ep
            + 100 * tokens * kept * flying / mesh.pp / 10
            + 3_000 * (stage == 0)
        )
        parts = {"activations": point}
        return MemoryEstimate(parts, {}, "", {}, 0, point, int(point * upper), budget, ())

    return needs


def estimator_of_any():
    """A byte for whatever is asked."""

    def needs(config: Config, size: int, rank: int, budget: int | None) -> MemoryEstimate:
        return MemoryEstimate({}, {}, "", {}, 0, 1, 1, budget, ())

    return needs


def all_meshes(config: Config, world: int) -> list[MeshConfig]:
    degrees = [d for d in range(1, world + 1) if world % d == 0]
    found = []
    for pp, copies, shards, cp, tp in itertools.product(degrees, repeat=5):
        same = copies > 1 == shards * cp  # as dp_shard of that size
        if pp * copies * shards * cp * tp == world and not same:
            folded = shards * cp * tp
            found += [
                replace(
                    config.mesh, pp=pp, dp_replicate=copies, dp_shard=shards, cp=cp, tp=tp, ep=ep
                )
                for ep in degrees
                if folded % ep == 0
            ]
    return found


def random_score(rng: random.Random) -> Score:
    kinds = {"checkpointing": lambda: rng.random() < 0.5}
    return Score(*(kinds.get(name, lambda: rng.randrange(3))() for name in Score._fields))


def test_the_order_is_the_articles() -> None:
    """`policy` tells apart what they don't: which of the policies that run something again."""
    first = ("misfit", "fewer_rows", "checkpointing", "grad_accum", "less_headroom", "tp", "ep")
    fields = [name for name in Score._fields if name != "policy"]
    assert tuple(fields[: len(first)]) == first


def test_each_criterion_beats_all_that_follow() -> None:
    rng = random.Random(0)
    for _ in range(500):
        one, other = random_score(rng), random_score(rng)
        at = rng.randrange(len(Score._fields))
        name = Score._fields[at]
        if getattr(one, name) == getattr(other, name):
            continue
        other = Score(*one[:at], *other[at:])
        better, worse = sorted((one, other))
        assert deciding(better, worse) == name
        assert getattr(better, name) < getattr(worse, name)


def test_a_total_order_that_no_shuffle_changes() -> None:
    rng = random.Random(1)
    found = plan(small(), 8, 260_000, 8 * 8 * SEQ, estimator=estimator()).candidates
    assert len(found) > 20
    assert len({c.score for c in found}) == len(found)
    for _ in range(20):
        mixed = rng.sample(found, len(found))
        assert tuple(sorted(mixed, key=lambda c: c.score)) == found


def test_the_same_plan_twice() -> None:
    first, second = (
        plan(small(), 8, 260_000, 8 * 8 * SEQ, estimator=estimator()) for _ in range(2)
    )
    assert first == second


def test_two_rows_in_eight_microbatches_before_one_in_sixteen() -> None:
    """Also where memory is the same, and where it is less for the one row."""
    fixed = ("mesh.tp", "mesh.ep", "mesh.cp", "mesh.pp", "mesh.dp_replicate", "recompute.norms")
    for per_row in (0, 1000):

        def needs(config: Config, size: int, rank: int, budget: int | None) -> MemoryEstimate:
            point = 5000 + per_row * config.train.device_batch_size  # noqa: B023
            return MemoryEstimate({}, {}, "", {}, 0, point, point, budget, ())

        found = plan(small(), 4, 7500, 4 * 16 * SEQ, fixed, needs).candidates
        order = [(c.config.train.device_batch_size, c.config.train.grad_accum) for c in found]
        assert order.index((2, 8)) < order.index((1, 16))
        assert order == sorted(order, reverse=True)


def found_by(memory: int = 260_000, **kwargs: object) -> Plan:
    return plan(small(), 8, memory, 8 * 8 * SEQ, estimator=estimator(), **kwargs)  # type: ignore


def test_every_candidate_can_be_launched_and_has_the_tokens() -> None:
    found = found_by()
    for one in found.candidates:
        train, mesh = one.config.train, one.config.mesh
        rows = train.device_batch_size * train.grad_accum * mesh.dp_replicate * mesh.dp_shard
        assert rows * SEQ == found.tokens_per_step == train.tokens_per_step
        assert one.estimate.point <= found.budget_bytes
        assert not list(broken(one.config, 8))
        assert resolve(one.config, 8) == replace(
            one.config, run=replace(one.config.run, dir="runs/tiny")
        )


def test_a_plan_of_reduced_microbatches_has_no_pipeline() -> None:
    """`train.gradient_sync=each` reduces every microbatch; a pipeline's schedule once a step."""
    config = small()
    each = replace(config, train=replace(config.train, gradient_sync="each"))
    plain, found = (plan(c, 8, 10**9, 64 * SEQ, estimator=estimator()) for c in (config, each))
    assert found.candidates and not [c for c in found.candidates if list(broken(c.config, 8))]
    assert found.out["pipeline"] > plain.out["pipeline"] > 0
    in_stages = replace(each, mesh=replace(each.mesh, pp=2))
    assert not plan(in_stages, 8, 10**9, 64 * SEQ, ("mesh.pp",), estimator()).candidates
    deferred = replace(config, mesh=in_stages.mesh)
    assert plan(deferred, 8, 10**9, 64 * SEQ, ("mesh.pp",), estimator()).candidates


def test_a_pipeline_must_run_the_first_steps_of_a_warmup() -> None:
    """An eighth of the microbatches, which must be as many as stages."""
    config = small()
    config = replace(config, train=replace(config.train, batch_warmup_steps=10))
    config = replace(config, mesh=replace(config.mesh, pp=2))
    found = plan(config, 8, 10**9, 64 * 8 * SEQ, ("mesh.pp",), estimator()).candidates
    assert found and all(not list(broken(c.config, 8)) for c in found)
    assert min(c.config.train.grad_accum for c in found) == 16


def test_whole_expert_blocks_run_again_on_no_mesh_of_experts() -> None:
    """They would send their rows again: refused, so not offered."""
    config = replace(small(), recompute=replace(KEEP, eblock="full"))
    found = plan(config, 8, 10**9, 64 * SEQ, ("recompute.eblock",), estimator_of_any()).candidates
    assert found and {c.config.mesh.ep for c in found} == {1}
    assert all(not list(broken(c.config, 8)) for c in found)


def test_knobs_make_the_candidate() -> None:
    from megacpp.config.arguments import replace_keys

    for one in found_by().candidates:
        again = replace_keys(small(), one.knobs())
        assert resolve(again, 8) == replace(one.config, run=replace(again.run, dir="runs/tiny"))


def test_counts_add_up() -> None:
    found = found_by()
    assert found.considered == len(found.candidates) + sum(found.out.values())
    assert found.legal == len(found.candidates) + found.out["dominated"] + found.out["memory"]
    assert all(found.out[reason] for reason in ("mesh", "pipeline", "dominated", "memory"))


def test_what_is_given_stays() -> None:
    config = small()
    config = replace(config, mesh=replace(config.mesh, tp=2, ep=4))
    config = replace(config, train=replace(config.train, device_batch_size=4))
    fixed = ("mesh.tp", "mesh.ep", "train.device_batch_size", "recompute.norms")
    found = plan(config, 8, 10**9, 8 * 8 * SEQ, fixed, estimator()).candidates
    assert found
    for one in found:
        mesh = one.config.mesh
        assert (mesh.tp, mesh.ep, one.config.train.device_batch_size) == (2, 4, 4)
        assert one.config.recompute == config.recompute


def test_a_given_number_of_microbatches_stays() -> None:
    config = small()
    config = replace(config, train=replace(config.train, grad_accum=4))
    found = plan(config, 8, 10**9, 8 * 8 * SEQ, ("train.grad_accum",), estimator()).candidates
    assert {c.config.train.grad_accum for c in found} == {4}


def test_experts_rows_are_padded_where_that_fits() -> None:
    """Choose padded dispatch where two ranks share the experts, and only where it fits.

    With 6 of 8 experts a token nearly all rows go to both ranks anyway; with 2 many don't.
    """
    fixed = ("mesh.tp", "mesh.cp", "mesh.pp", "mesh.dp_replicate", "mesh.ep")

    def chosen(ep: int, more: int, *also: str, top_k: int = 6, lower: bool = False) -> set[str]:
        def needs(config: Config, *rest: object) -> MemoryEstimate:
            point = 100 + more * (config.mesh.ep_dispatch == "padded")
            return MemoryEstimate({}, {}, "", {}, 0, point, point, 150, ())

        base = small(moe=replace(tiny().model.moe, top_k=top_k))
        given = replace(base, mesh=replace(base.mesh, tp=1, cp=1, pp=1, dp_replicate=1, ep=ep))
        if lower:
            given = replace(given, model=replace(base.model, pattern=base.model.pattern.lower()))
        found = plan(given, 8, 150, 8 * SEQ, (*fixed, *also), needs).candidates
        assert all(
            (c.knobs().get("mesh.ep_dispatch", "per_rank")) == c.config.mesh.ep_dispatch
            for c in found
        )
        free = [(150 - c.estimate.point) * 100 // 150 for c in found]
        assert [-c.score.less_headroom for c in found] == free
        assert [c.score for c in found] == sorted(c.score for c in found)
        return {c.config.mesh.ep_dispatch for c in found}

    assert chosen(2, more=0) == chosen(2, more=20) == {"padded"}
    assert chosen(2, more=0, lower=True) == {"padded"}
    assert chosen(1, more=0) == {"per_rank"}
    assert chosen(2, more=100) == chosen(8, more=0) == {"per_rank"}
    assert chosen(2, more=0, top_k=2) == {"per_rank"}
    assert chosen(2, 0, "mesh.ep_dispatch") == {"per_rank"}


def test_what_may_not_fit_comes_after_all_that_does() -> None:
    needs = estimator(upper=1.3)
    found = plan(small(), 8, 260_000, 8 * 8 * SEQ, estimator=needs).candidates
    verdicts = [c.estimate.verdict for c in found]
    assert set(verdicts) == {"fits", "at_risk"}
    assert verdicts == sorted(verdicts, reverse=True)


def test_the_fullest_stage_decides() -> None:
    """Weights that only the last stage has."""

    def needs(config: Config, size: int, rank: int, budget: int | None) -> MemoryEstimate:
        last = rank // (size // config.mesh.pp) == config.mesh.pp - 1
        point = 900 if last else 100
        return MemoryEstimate({}, {}, "", {}, 0, point, point, budget, ())

    fixed = ("mesh.pp",)
    config = small()
    config = replace(config, mesh=replace(config.mesh, pp=2))
    assert not plan(config, 8, 800, 64 * SEQ, fixed, needs).candidates
    found = plan(config, 8, 1000, 64 * SEQ, fixed, needs).candidates
    assert {(c.rank, c.estimate.point) for c in found} == {(4, 900)}


def test_nothing_fits_and_what_lacks_least() -> None:
    found = found_by(memory=1000)
    assert not found.candidates and found.nearest is not None
    seen = found.nearest.estimate.point
    assert seen > 1000 and found.nearest.estimate.verdict == "does_not_fit"
    assert found.legal == found.out["memory"]


def test_tokens_that_are_no_rows_name_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"^tokens_per_step=1000: .* \(64\)\. Fix: use 1024, "):
        plan(small(), 8, 10**9, 1000, estimator=estimator())
    with pytest.raises(ConfigError, match="use 512, rows for all 8 ranks"):
        plan(small(), 8, 10**9, 30, estimator=estimator())


def test_the_ladder_repeats_more_and_keeps_less() -> None:
    for config in (small(), nam52_deep_base()):
        ladder = policies(config)
        assert [rung.name for rung in ladder] == ["none", "experts", "preset", "selective", "full"]
        assert [rung.checkpointing for rung in ladder] == [False, True, True, True, True]
        for less, more in itertools.pairwise(ladder):
            assert more.keeps_less(less) and not less.keeps_less(more)
            assert more.replayed > less.replayed


def test_rungs_of_the_ladder_are_what_gradient_checkpointing_means() -> None:
    """`--gradient-checkpointing true | false`, whose states a retry must not mix up."""
    from megacpp.config.arguments import replace_keys
    from megacpp.model.regions import layer_regions

    words = {"true": True, "false": False}
    config = small()
    ladder = {rung.name: rung for rung in policies(config)}
    for name, meaning in (("preset", BY_KIND), ("none", NONE)):
        said = replace_keys(config, {k: words.get(v, v) for k, v in meaning.items()})
        assert layer_regions(said.recompute, config.model) == list(ladder[name].pieces)


def test_a_dense_model_has_no_rung_twice() -> None:
    config = small(pattern="AF", depth=4)
    config = replace(config, recompute=KEEP)
    names = [rung.name for rung in policies(config)]
    assert names == ["none", "selective", "full"]


def test_small_axes_come_first() -> None:
    """What dominates is looked at before what it dominates."""
    sizes = [m.tp * m.cp * m.pp * m.dp_replicate for m in meshes(small(), 16)]
    assert sizes == sorted(sizes)
    assert Counter(meshes(small(), 8)) == Counter(all_meshes(small(), 8))


def test_rows_are_all_divisors() -> None:
    mesh = MeshConfig(dp_shard=4)
    assert row_choices(small(), mesh, 48 * SEQ) == [1, 2, 3, 4, 6, 12]
    assert row_choices(small(), mesh, 6 * SEQ) == []


def test_settings_that_are_no_knobs_stay() -> None:
    config = small()
    config = replace(config, optim=replace(config.optim, name="adamw", adamw_state="fp32"))
    found = plan(config, 8, 260_000, 8 * 8 * SEQ, estimator=estimator()).candidates
    for one in found:
        same = replace(one.config, mesh=config.mesh, train=config.train, recompute=config.recompute)
        assert same == config
        moved = {name.split(".")[0] for name in one.knobs()}
        assert moved <= {"mesh", "train", "recompute"}
        assert {f"mesh.{axis}" for axis in MESH} <= set(one.knobs())


def test_a_model_that_no_axis_divides_still_has_data_parallelism() -> None:
    model = ModelConfig(dim=96, depth=2, pattern="AF", vocab_size=997)
    config = replace(small(), model=model)
    found = plan(config, 6, 10**9, 12 * SEQ, estimator=estimator()).candidates
    assert found and all(c.config.mesh.tp == 1 for c in found)


@pytest.mark.parametrize("device", ["auto", "cuda", "cpu"])
def test_memory_is_that_of_the_device_that_will_run(device: str) -> None:
    """`auto` is a GPU that computes in bf16, with the kernels of a run there."""
    seen, stand_in = set(), estimator_of_any()

    def needs(config: Config, size: int, rank: int, budget: int | None) -> MemoryEstimate:
        seen.add((config.train.device, config.precision.dtype, config.kernels.rms_norm))
        return stand_in(config, size, rank, budget)

    given = replace(small(), train=replace(small().train, device=device))
    found = plan(given, 2, 10**9, 8 * SEQ, estimator=needs).candidates
    gpu = "cuda", "bf16", "triton"
    assert seen == {("cpu", "fp32", "torch") if device == "cpu" else gpu}
    assert {one.config.kernels for one in found} == {given.kernels}  # the command names none
