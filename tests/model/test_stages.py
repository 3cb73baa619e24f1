"""Pipeline stages: which layers, which rank, which settings are refused; all before torch."""

from __future__ import annotations

import dataclasses
import itertools
import subprocess
import sys

import pytest

from megacpp.config.presets import PRESETS
from megacpp.config.schema import Config, MeshConfig, ModelConfig
from megacpp.errors import ConfigError
from megacpp.model.count import count_parameters, meta_model
from megacpp.model.pattern import ENTRANCE, EXIT
from megacpp.model.sizes import embedding_parameters, head_parameters, layer_parameters
from megacpp.model.stages import (
    enough_microbatches,
    num_stages,
    owners,
    pipeline_rules,
    split_layers,
    stage_ids,
    stage_parts,
    stages_per_rank,
)
from tests.model.small import small, variants

MODELS = {**variants(), **{name: make().model for name, make in PRESETS.items()}}
ENDS = ENTRANCE, EXIT
IN_TURN = ("1f1b", "gpipe", "interleaved", "interleaved_zb", "looped_bfs", "zbv", "dualpipev")
SCHEDULES = (*IN_TURN, "dualpipe")


@pytest.mark.parametrize("name", MODELS)
def test_sizes_are_those_of_the_model(name: str) -> None:
    model = meta_model(MODELS[name])
    blocks = [sum(p.numel() for p in block.parameters()) for block in model.blocks.values()]
    assert layer_parameters(model.config) == blocks
    ends = {name: list(part.parameters()) for name, part in model.named_children()}
    ahead, behind = (sum(p.numel() for x in names for p in ends.get(x, ())) for names in ENDS)
    assert embedding_parameters(model.config) == ahead
    assert head_parameters(model.config) == behind


@pytest.mark.parametrize("name", MODELS)
def test_counts_are_those_of_the_model(name: str) -> None:
    """By kind, in the model's order; a tied head is counted with the embedding."""
    model, count = meta_model(MODELS[name]), count_parameters(MODELS[name])
    moe, by_kind, experts = model.config.moe, {}, 0
    for parameter_name, parameter in model.named_parameters():
        kind, *rest = parameter_name.split(".")
        kind = model.letters[int(rest[0])] if kind == "blocks" else kind
        by_kind[kind] = by_kind.get(kind, 0) + parameter.numel()
        experts += parameter.numel() if ".experts." in parameter_name else 0
    assert list(count.by_kind.items()) == list(by_kind.items())
    assert count.total == sum(by_kind.values())
    assert (count.total - count.active) * moe.num_experts == experts * (moe.num_experts - moe.top_k)


def test_no_torch_is_needed() -> None:
    code = "import sys, megacpp.model.stages; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


# ---- which rank ---------------------------------------------------------------------------------


@pytest.mark.parametrize("pp", [1, 2, 3, 4])
@pytest.mark.parametrize("schedule", IN_TURN)
def test_every_stage_has_one_owner(schedule: str, pp: int) -> None:
    ids = [stage_ids(schedule, pp, rank) for rank in range(pp)]
    assert all(list(of_rank) == sorted(of_rank) for of_rank in ids)
    assert sorted(itertools.chain(*ids)) == list(range(num_stages(schedule, pp)))
    assert {len(of_rank) for of_rank in ids} == {stages_per_rank(schedule)}
    assert all(owners(schedule, pp)[i] == rank for rank in range(pp) for i in ids[rank])


def test_owners_by_hand() -> None:
    assert owners("1f1b", 3) == [0, 1, 2]
    assert owners("interleaved", 3) == [0, 1, 2, 0, 1, 2]
    assert owners("zbv", 3) == owners("dualpipev", 3) == [0, 1, 2, 2, 1, 0]


def test_both_ways_two_ranks_own_a_stage() -> None:
    model, mesh = small("AMERFEMR"), MeshConfig(pp=4, pp_schedule="dualpipe")
    found = [stage_parts(model, mesh, rank) for rank in range(4)]
    assert [[part.index for part in parts] for parts in found] == [[0, 3], [1, 2], [2, 1], [3, 0]]
    assert [[part.back for part in parts] for parts in found] == [[False, True]] * 4
    assert owners("dualpipe", 4) == [0, 1, 2, 3] and num_stages("dualpipe", 4) == 4


def test_parts_of_a_rank() -> None:
    model, mesh = small("AMERFEMR"), MeshConfig(pp=2, pp_schedule="zbv")
    parts = [part for rank in range(2) for part in stage_parts(model, mesh, rank)]
    assert [part.index for part in parts] == [0, 3, 1, 2]
    assert [part.first for part in parts] == [True, False, False, False]
    assert [part.last for part in parts] == [False, True, False, False]
    assert sorted(layer for part in parts for layer in part.layers) == list(range(8))


# ---- which layers -------------------------------------------------------------------------------


def test_cuts_of_the_pattern_are_obeyed() -> None:
    model = dataclasses.replace(small("AMERFEMR"), pattern="AMERFE|M|R")
    assert split_layers(model, 3) == [range(6), range(6, 7), range(7, 8)]
    assert split_layers(model, 1) == [range(8)], "one stage runs all"


@pytest.mark.parametrize("name", ["plain", "tiny", "nam56r_base"])
@pytest.mark.parametrize("stages", [1, 2, 3, 4, 5])
def test_without_cuts_weights_are_as_even_as_they_can_be(name: str, stages: int) -> None:
    """Against all cuts there are, by (heaviest stage, sum of squares)."""
    model = dataclasses.replace(MODELS[name], depth=min(MODELS[name].depth, 13))
    weights = layer_parameters(model)
    weights[0] += embedding_parameters(model)
    weights[-1] += head_parameters(model)

    def cost(ends: tuple[int, ...]) -> tuple[int, int]:
        cuts = (0, *ends, len(weights))
        sums = [sum(weights[a:b]) for a, b in itertools.pairwise(cuts)]
        return max(sums), sum(s * s for s in sums)

    ranges = split_layers(model, stages)
    assert [i for layers in ranges for i in layers] == list(range(model.depth)) and all(ranges)
    every = itertools.combinations(range(1, model.depth), stages - 1)
    assert cost(tuple(layers.start for layers in ranges[1:])) == min(map(cost, every))


@pytest.mark.parametrize(
    ("pattern", "depth", "stages", "line"),
    [
        ("AE|M", 3, 3, "model.pattern=AE|M: its cuts make 2 stages, the pipeline has 3. Fix: cut"),
        ("AE", 3, 4, "model.depth=3: every one of the 4 pipeline stages needs a layer. Fix: use"),
        ("AX", 3, 2, "model.pattern=AX: unknown letter 'X'"),
    ],
)
def test_a_wrong_split_is_one_line(pattern: str, depth: int, stages: int, line: str) -> None:
    model = dataclasses.replace(small(), pattern=pattern, depth=depth)
    with pytest.raises(ConfigError) as caught:
        split_layers(model, stages)
    assert str(caught.value).startswith(line) and "\n" not in str(caught.value)


# ---- what is refused ----------------------------------------------------------------------------


def lines(mesh: MeshConfig, microbatches: int = 8, model: ModelConfig | None = None) -> list[str]:
    config = Config(model=model or small("AMERFEMR"), mesh=mesh)
    return [str(error) for error in pipeline_rules(config, microbatches)]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_legal_pipeline_breaks_no_rule(schedule: str) -> None:
    assert lines(MeshConfig(pp=4, pp_schedule=schedule)) == []  # type: ignore[arg-type]
    assert lines(MeshConfig(pp=1, pp_schedule=schedule), 1) == []  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("mesh", "microbatches", "changes", "expected"),
    [
        (
            MeshConfig(pp=0),
            1,
            {},
            "mesh.pp=0: must be at least 1. Fix: use --mesh.pp 1.",
        ),
        (
            MeshConfig(pp=9),
            9,
            {},
            "mesh.pp=9: 1f1b makes 9 stages of it, each needs a layer (model.depth=8). "
            "Fix: use --mesh.pp 8.",
        ),
        (
            MeshConfig(pp=5, pp_schedule="zbv"),
            9,
            {},
            "mesh.pp=5: zbv makes 10 stages of it, each needs a layer (model.depth=8). "
            "Fix: use --mesh.pp 4.",
        ),
        (
            MeshConfig(pp=3, pp_schedule="interleaved"),
            6,
            {"pattern": "AM|ER|FE|MR"},
            "mesh.pp=3: interleaved makes 6 stages of it, the cuts of model.pattern make 4. "
            "Fix: cut it into 6, or leave the cuts out, or use --mesh.pp 2.",
        ),
        (
            MeshConfig(pp=2, pp_schedule="interleaved"),
            6,
            {"pattern": "AM|ER|FEMR"},
            "mesh.pp=2: interleaved makes 4 stages of it, the cuts of model.pattern make 3. "
            "Fix: cut it into 4, or leave the cuts out.",
        ),
        (
            MeshConfig(pp=4),
            3,
            {},
            "train.grad_accum=3: microbatches a step: 1f1b needs mesh.pp (4) or more. "
            "Fix: use --train.grad-accum 4 or --mesh.pp 3.",
        ),
        (
            MeshConfig(pp=4, pp_schedule="dualpipev"),
            5,
            {},
            "train.grad_accum=5: microbatches a step: dualpipev needs 2 * mesh.pp (8) or more. "
            "Fix: use --train.grad-accum 8 or --mesh.pp 2.",
        ),
        (
            MeshConfig(pp=4, pp_schedule="dualpipe"),
            9,
            {},
            "train.grad_accum=9: microbatches a step: dualpipe needs 2 * mesh.pp (8) or more, and "
            "an even number. Fix: use --train.grad-accum 8 or --mesh.pp 1.",
        ),
        (
            MeshConfig(pp=3, pp_schedule="dualpipe"),
            8,
            {},
            "mesh.pp=3: dualpipe needs an even number: two ranks hold the same two stages. "
            "Fix: use --mesh.pp 4 or --mesh.pp-schedule dualpipev.",
        ),
        (
            MeshConfig(pp=4, pp_schedule="interleaved"),
            9,
            {},
            "train.grad_accum=9: microbatches a step: interleaved runs them in 2 equal rounds. "
            "Fix: use --train.grad-accum 8 or --mesh.pp 3.",
        ),
        (
            MeshConfig(pp=2, pp_schedule="dualpipev", reshard="always"),
            4,
            {},
            "mesh.reshard=always: dualpipev needs gathered weights from the forward to both "
            "backwards. Fix: use --mesh.reshard auto.",
        ),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_broken_rule_is_one_line(
    mesh: MeshConfig, microbatches: int, changes: dict[str, object], expected: str
) -> None:
    model = dataclasses.replace(small("AMERFEMR"), **changes)  # type: ignore[arg-type]
    assert lines(mesh, microbatches, model) == [expected]


def test_a_broken_pattern_is_left_to_its_own_rule() -> None:
    model = dataclasses.replace(small("AMERFEMR"), pattern="AXE|M")
    assert lines(MeshConfig(pp=2), 4, model) == []


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_fix_is_legal(schedule: str) -> None:
    """The number of microbatches and the degree that a message names break no rule."""
    degrees = (2, 4) if schedule == "dualpipe" else range(2, 6)
    for pp, microbatches in itertools.product(degrees, range(1, 20)):
        mesh = MeshConfig(pp=pp, pp_schedule=schedule)  # type: ignore[arg-type]
        model = small("AMERFEMRAMER")
        for line in lines(mesh, microbatches, model):
            number, degree = fixes(line)
            assert enough_microbatches(schedule, pp, number)
            assert degree == 1 or enough_microbatches(schedule, degree, microbatches)


def fixes(line: str) -> tuple[int, int]:
    fix = line.partition("Fix: use --train.grad-accum ")[2].rstrip(".")
    number, _, degree = fix.partition(" or --mesh.pp ")
    return int(number), int(degree)
