"""The fixes that a refused launch is told: cheap ones first, legal, and worth what they say."""

from __future__ import annotations

import shlex
from collections.abc import Callable

import pytest

from megacpp.config.arguments import parse_run
from megacpp.config.checks.every import broken
from megacpp.config.schema import Config
from megacpp.launch.fit import difference
from megacpp.memory.budget import fullest
from megacpp.memory.estimate import MemoryEstimate, estimate
from megacpp.memory.fixes import Fix, changed, cheapest_fixes, levers, memory_error

GIB = 1 << 30
Need = Callable[[Config], float]


def pricing(need: Need, budget: float) -> Callable[[Config], MemoryEstimate]:
    """Estimates of a made-up formula, in GiB."""

    def price(config: Config) -> MemoryEstimate:
        point = int(need(config) * GIB)
        parts = {"activations": point}
        return MemoryEstimate(parts, {}, "backward", {}, 0, point, point, int(budget * GIB), ())

    return price


def found(
    need: Need, budget: float, *flags: str, world: int = 8
) -> tuple[Config, list[Fix], bool | None]:
    config = parse_run(["nam56r_base", *flags], world).config
    price = pricing(need, budget)
    return config, *cheapest_fixes(config, world, price, price(config))


def keys(fixes: list[Fix]) -> list[str]:
    """The setting that is turned; what follows from it comes behind."""
    return [next(iter(fix.keys)) for fix in fixes]


BARE = (
    "--recompute.eblock none --recompute.mblock none --recompute.rblock none --recompute.mlp false "
    "--recompute.norms false"
).split()


def need_of_all(c: Config) -> float:
    """Everything helps."""
    r = c.recompute
    light = sum([r.norms, r.mlp, r.eblock != "none", r.mblock != "none", r.rblock != "none"])
    heavy = sum([r.ablock != "none", r.eblock == "full", r.offload != "none"])
    mesh = c.mesh.tp * c.mesh.ep * c.mesh.cp * c.mesh.pp
    return 40 * c.train.device_batch_size / mesh + 20 - light - heavy


def test_the_least_extra_work_comes_first() -> None:
    _, fixes, together = found(need_of_all, 99.5, *BARE)
    assert keys(fixes) == ["recompute.norms", "recompute.mlp", "recompute.eblock"]
    assert all(fix.fits and fix.gain_bytes == GIB for fix in fixes) and together
    _, fixes, _ = found(need_of_all, 79, *BARE)
    assert keys(fixes)[0] == "train.device_batch_size", "nothing lighter is enough"
    assert keys(fixes)[1:] == ["mesh.ep", "mesh.tp"]


def test_rows_are_halved_and_ranks_doubled_as_often_as_it_takes() -> None:
    flags = ["--train.device-batch-size", "8", "--train.tokens-per-step", "1048576"]
    config, fixes, _ = found(need_of_all, 60, *flags)
    first = fixes[0]
    assert first.config.train.device_batch_size == 1, "2 need 100 GiB, 1 needs 60 less the rest"
    assert first.config.train.tokens_per_step == config.train.tokens_per_step
    assert first.keys == {"train.device_batch_size": 1, "train.grad_accum": 32}
    assert keys(fixes) == ["train.device_batch_size", "mesh.ep", "mesh.cp"], "tp 4 is the most"
    assert fixes[2].keys == {"mesh.cp": 8, "mesh.dp_shard": 1, "train.grad_accum": 32}
    assert fixes[2].config.train.tokens_per_step == config.train.tokens_per_step


def test_where_nothing_is_enough_changes_are_put_together() -> None:
    either: Need = lambda c: (  # noqa: E731
        100 - 30 * c.recompute.norms - 20 * (c.mesh.reshard == "always") - 0.1 * c.recompute.mlp
    )
    _, fixes, together = found(either, 55, *BARE)
    assert keys(fixes) == ["recompute.norms", "mesh.reshard"]
    assert [fix.gain_bytes for fix in fixes] == [30 * GIB, 20 * GIB] and together
    assert fixes[1].config.recompute.norms, "on top of those before"
    _, fixes, together = found(either, 40, *BARE)
    assert keys(fixes) == ["recompute.norms", "mesh.reshard"], "0.1 % is not worth naming"
    assert not together


def test_what_gains_nothing_or_costs_memory_is_not_named() -> None:
    _, fixes, _ = found(lambda c: 10.0 + c.mesh.tp, 5)
    assert fixes == []


@pytest.mark.parametrize("world", [1, 8, 12])
@pytest.mark.parametrize(
    "flags",
    [
        "tiny",
        "dense_110m --train.compile inductor",
        "nam56r_base --mesh.pp 1",
        "nam56r_base --mesh.dp-replicate 2 --train.gradient-sync resident",
        "moe_small --train.device cpu",
        "dense_110m --model.attention.kind mla --model.attention.qk-norm false",
    ],
)
def test_every_fix_is_legal_and_its_flags_mean_it(flags: str, world: int) -> None:
    preset, *given = flags.split()
    if "--mesh.dp-replicate" in given and world == 1:
        given[given.index("--mesh.dp-replicate") + 1] = "1"
    if world == 12:
        given += ["--train.tokens-per-step", "0"]  # no power of two divides by 12
    config = parse_run([preset, *given], world).config
    seen = 0
    for notches in levers(config, world):
        for change in notches:
            other = changed(config, world, change)
            if other is None:
                continue
            seen += 1
            assert not list(broken(other, world))
            assert other.train.tokens_per_step == config.train.tokens_per_step
            fix = Fix(difference(config, other), other, 0, False)
            again = parse_run([preset, *given, *shlex.split(fix.flags)], world).config
            assert again == other, fix.flags
    assert seen >= 3


def test_the_line_of_a_refusal() -> None:
    config = parse_run(["nam56r_base", *BARE], 8).config
    price = pricing(need_of_all, 99.5)
    line = str(memory_error(config, 8, 0, price, price(config), "110 GiB given, 10% headroom"))
    assert line.startswith("memory.gate=on: rank 0 of 8 needs 100.0 GiB in backward (activations")
    assert "99.5 GiB may be used (110 GiB given, 10% headroom). Fix: " in line
    assert "--recompute.norms true (-1.00 GiB), or --recompute.mlp true (-1.00 GiB), or " in line
    assert line.endswith("; --memory.gate off starts all the same.") and "\n" not in line


def test_the_estimator_prices_them() -> None:
    """What a change gains is what the estimates of both say."""
    config = parse_run(["nam56r_base", *BARE, "--precision.dtype", "bf16"], 8).config
    before = fullest(config, 8)[1].point
    price = lambda c: fullest(c, 8, before * 9 // 10)[1]  # noqa: E731
    fixes, enough = cheapest_fixes(config, 8, price, price(config))
    assert enough and fixes[0].fits
    for fix in fixes:
        assert fix.gain_bytes == before - fullest(fix.config, 8)[1].point > 0


def test_the_fullest_rank_is_found_among_the_stages() -> None:
    config = parse_run(["nam56r_base", "--mesh.pp", "4"], 8).config
    points = [estimate(config, 8, rank).point for rank in range(8)]
    rank, needs = fullest(config, 8)
    assert needs.point == max(points) and points[rank] == needs.point
    assert len(set(points)) > 1
