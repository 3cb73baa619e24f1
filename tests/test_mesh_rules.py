"""Rules between mesh and model: one line each, with a degree that is legal for the whole model."""

from __future__ import annotations

import itertools
import re

import pytest

from megacpp.blocks.attention.config import AttentionConfig
from megacpp.blocks.engram.config import EngramConfig
from megacpp.blocks.ngram.config import NgramConfig
from megacpp.config.checks.every import broken
from megacpp.config.checks.mesh import mesh_rules, resolve_mesh, tensor_dims
from megacpp.config.presets import PRESETS, preset
from megacpp.config.schema import MeshConfig
from megacpp.errors import ConfigError
from megacpp.lessons.models import config_of

# preset, world, mesh, other settings -> what the line says
CASES = [
    (
        "tiny",
        8,
        {"tp": 4},
        {},
        "mesh.tp=4: must divide model.attention.num_heads (6). Fix: use --mesh.tp 2.",
    ),
    (
        "tiny",
        6,
        {"tp": 3},
        {},
        "mesh.tp=3: must divide model.vocab_size (4096). Fix: use --mesh.tp 2.",
    ),
    (
        "tiny",
        8,
        {"tp": 2, "dp_shard": 4},
        {"model.vocab_size": 50_257},
        "mesh.tp=2: must divide model.vocab_size (50257). Fix: --model.vocab-size 50258.",
    ),
    (
        "tiny",
        8,
        {"tp": 4},
        {"model.vocab_size": 602},
        "mesh.tp=4: must divide model.vocab_size (602). Fix: use --mesh.tp 2.",
    ),
    (
        "tiny",
        6,
        {"tp": 3},
        {"model.vocab_size": 4098, "model.ngram": NgramConfig(heads=1, table_size=100)},
        "mesh.tp=3: must divide the rows of all n-gram tables (256). Fix: use --mesh.tp 2.",
    ),
    (
        "nam56r_base",
        64,
        {"tp": 16},
        {},
        "must divide model.attention.num_heads (56). Fix: use --mesh.tp ",
    ),
    ("tiny", 4, {"tp": 2}, {"data.seq_len": 255}, "must divide data.seq_len / mesh.cp (255)"),
    ("tiny", 2, {"ep": 4}, {}, "mesh.ep=4: must divide dp_shard * cp * tp (2)"),
    (
        "tiny",
        6,
        {"ep": 3},
        {},
        "mesh.ep=3: must divide model.moe.num_experts (8). Fix: use --mesh.ep 2.",
    ),
    ("dense_110m", 2, {"ep": 2}, {}, "mesh.ep=2: the model has no E block to spread"),
    (
        "tiny",
        6,
        {"ep": 6},
        {"model.moe.num_experts": 24, "model.moe.num_groups": 4, "model.moe.top_k_groups": 2},
        "mesh.ep=6: must divide model.moe.num_groups (4) or be a multiple of it: a token visits 2 "
        "groups, and those that straddle ranks don't bound what it is sent to. Fix: use --mesh.ep ",
    ),
    ("tiny", 8, {"cp": 8}, {"data.seq_len": 24}, "head_tail order cuts data.seq_len (24) into 16"),
    (
        "tiny",
        8,
        {"cp": 8},
        {"data.seq_len": 32},
        "leaves chunks of 2 tokens, a convolution looks back 3",
    ),
    (
        "tiny",
        2,
        {"cp": 2},
        {"data.seq_len": 32, "model.engram": EngramConfig(layers="0")},
        "leaves chunks of 8 tokens, a convolution looks back 9. Fix: use --mesh.cp 1, or "
        "--data.seq-len 36 or more.",
    ),
    (
        "dense_110m",
        3,
        {"tp": 3},
        {
            "model.engram": EngramConfig(layers="all"),
            "model.vocab_size": 30_000,
            "model.attention": AttentionConfig(num_heads=12, num_kv_heads=3, head_dim=64),
        },
        "mesh.tp=3: must divide rows of the tables of model.engram (256). Fix: use --mesh.tp ",
    ),
    (
        "tiny",
        4,
        {"cp": 4, "cp_attention": "heads"},
        {},
        "tp * cp (4) must divide model.attention.num_kv_heads (2)",
    ),
    (
        "tiny",
        8,
        {"cp": 8, "cp_m2rnn": "heads"},
        {},
        "tp * cp (8) must divide the number of M2RNN heads (4)",
    ),
    (
        "tiny",
        4,
        {"pp": 3},
        {},
        "mesh.pp=3: it must divide the world (4 ranks). Fix: use --mesh.pp ",
    ),
    (
        "tiny",
        4,
        {"tp": 2, "cp": 4},
        {},
        "tp=2 * cp=4 must divide the world (4 ranks). Fix: use --mesh.cp 2",
    ),
    (
        "tiny",
        4,
        {"dp_shard": 3},
        {},
        "mesh.dp_shard=3: makes 3 ranks, not 4. Fix: use --mesh.dp-shard -1, or start 3 ranks.",
    ),
    (
        "tiny",
        8,
        {"dp_shard": 2, "tp": 4, "cp": 2},
        {},
        "makes 16 ranks with tp=4 * cp=2, not 8. Fix: use --mesh.tp 2 --mesh.dp-shard -1.",
    ),
    ("tiny", 2, {"pp": 2}, {}, "train.grad_accum=1: microbatches a step: 1f1b needs mesh.pp (2)"),
    ("tiny", 16, {"pp": 16}, {"train.grad_accum": 16}, "mesh.pp=16: 1f1b makes 16 stages of it"),
    (
        "tiny",
        2,
        {"pp": 2, "pp_schedule": "dualpipev"},
        {"train.grad_accum": 3},
        "dualpipev needs 2 * mesh.pp",
    ),
    ("tiny", 6, {"pp": 3, "tp": 2, "cp": 2}, {}, "Fix: use --mesh.tp 1, or start 12 ranks."),
]


@pytest.mark.parametrize(("name", "world", "mesh", "others", "words"), CASES)
def test_one_line(
    name: str, world: int, mesh: dict[str, object], others: dict[str, object], words: str
) -> None:
    lines = [str(error) for error in broken(config_of(name, mesh, others), world)]
    assert any(words in line for line in lines), lines
    assert all(". Fix: " in line and "\n" not in line for line in lines)


@pytest.mark.parametrize("axis", ["tp", "ep", "cp"])
def test_the_nearest_degree_is_legal(axis: str) -> None:
    """Taken at its word the message ends in a mesh without a broken rule, on as many ranks."""
    taken = 0
    for name, degree, world in itertools.product(PRESETS, (2, 3, 5, 6, 8, 16), (8, 12, 72)):
        for others in ({}, {"pp": 3}, {"tp": 2}, {"cp": 2, "dp_replicate": 2}):
            wanted = {**others, axis: degree}
            for error in mesh_rules(config_of(name, wanted, {}), world):
                taken += taken_at_its_word(name, wanted, world, error)
    assert taken > 50


def test_a_fix_of_several_axes_is_legal() -> None:
    """Typed as it stands, where no degree of one axis mends the mesh."""
    taken = 0
    for name, world in itertools.product(("tiny", "nam56r_base", "moe_small"), (1, 6, 8, 24)):
        for pp, cp, tp, ep, shard in itertools.product((1, 3), (1, 2, 3), (1, 4), (1, 4), (-1, 5)):
            wanted = {"pp": pp, "cp": cp, "tp": tp, "ep": ep, "dp_shard": shard}
            for error in mesh_rules(config_of(name, wanted, {}), world):
                taken += taken_at_its_word(name, wanted, world, error) > 1
    assert taken > 50


def taken_at_its_word(name: str, wanted: dict[str, object], world: int, error: ConfigError) -> int:
    """Return how many axes a fix names, once it is seen to leave no broken rule."""
    fix = str(error).partition(". Fix: ")[2]
    assert re.search(r"\d", fix), fix
    typed = re.findall(r"--mesh\.(\w[a-z-]*) (-?\d+)", fix.partition(", or ")[0])
    axes = {axis.replace("-", "_"): int(degree) for axis, degree in typed}
    again = mesh_rules(config_of(name, {**wanted, **axes}, {}), world)
    assert not axes or not list(again), (name, wanted, world, str(error))
    return len(axes)


def test_shards_fill_the_world() -> None:
    assert resolve_mesh(MeshConfig(tp=2, cp=2), 16).dp_shard == 4
    assert resolve_mesh(MeshConfig(pp=2, dp_replicate=2), 16).dp_shard == 4
    assert resolve_mesh(MeshConfig(dp_shard=3), 16).dp_shard == 3


def test_only_blocks_that_are_there_bind_a_mesh() -> None:
    model = preset("tiny").model
    assert set(tensor_dims(model, {"F"})) == {"model.vocab_size", "model.mlp.hidden_dim"}
