"""Closed forms of what a forward keeps, against the meter on fake tensors and fake ranks.

Figures are bytes, so they are compared exactly, part by part. The meter runs the forward alone:
nothing of a backward is in question.
"""

from __future__ import annotations

import dataclasses
import random
from typing import Any, Literal

import pytest
import torch

from checkpointing.apply import ActivationCheckpointing
from checkpointing.tracing.activations import Activations, activations, one_of_each, standing_for
from checkpointing.tracing.meter import Meter
from megacpp.blocks.dense.config import MLPConfig
from megacpp.blocks.experts.rows import expert_rows
from megacpp.cli.activations import POLICIES
from megacpp.cli.measure import measure
from megacpp.config.checks.every import check
from megacpp.config.presets import PER_BLOCK, preset
from megacpp.config.schema import (
    KEEP,
    CheckpointingPolicy,
    Config,
    DataConfig,
    MeshConfig,
    PrecisionConfig,
    TrainConfig,
)
from megacpp.launch.start import kept_by_a_microbatch
from megacpp.memory.forms.activations import ActivationBytes, activation_bytes
from megacpp.memory.forms.local_shapes import LocalShapes
from megacpp.model.hybrid import HybridLM
from parallel.expert.even_routing import EvenRouting
from parallel.mesh import World
from parallel.simulate.fake import FakeBoundary, fake_batch, fake_tensors, fake_world, planned_model
from tests.model.small import small

Dtype = Literal["bf16", "fp16", "fp32", "fp64"]
NONE, SELECTIVE, FULL = POLICIES["none"], POLICIES["selective"], POLICIES["full"]


def config_of(
    pattern: str,
    dtype: Dtype = "bf16",
    policy: CheckpointingPolicy = NONE,
    mesh: MeshConfig | None = None,
    rows: int = 2,
    tokens: int = 16,
    **changes: dict[str, Any],
) -> Config:
    """A small model; `changes` are fields of its parts (`attention`, `moe`, ...)."""
    model = small(pattern, vocab_size=48)
    for part, fields in changes.items():
        changed = dataclasses.replace(getattr(model, part), **fields)
        model = dataclasses.replace(model, **{part: changed})
    return Config(
        model=model,
        data=DataConfig(seq_len=tokens),
        train=TrainConfig(device_batch_size=rows, grad_accum=1),
        precision=PrecisionConfig(dtype=dtype),
        mesh=mesh or MeshConfig(dp_shard=1),
        recompute=policy,
    )


def size_of(mesh: MeshConfig) -> int:
    return mesh.dp_shard * mesh.dp_replicate * mesh.cp * mesh.tp


def metered(config: Config, rank: int) -> Activations:
    """What the forward of a rank keeps."""
    with fake_world(config, size_of(config.mesh), rank) as world:
        model = planned_model(config, world, ActivationCheckpointing(config))
        with fake_tensors(memory=True):
            meter = forward(config, world, model)
    return activations(meter, standing_for(config.model, config.model))


def forward(config: Config, world: World, model: HybridLM) -> Meter:
    model.to_empty(device=world.device)
    model.train()
    boundary = FakeBoundary(model, world, config)
    if world.parallel:  # what FSDP2 gathers is there before the meter
        boundary._run(boundary._mine(fake_batch(config)))
    batch = fake_batch(config)
    with Meter(model) as meter:
        loss = boundary._run(boundary._mine(batch))
    assert loss.loss_sum.requires_grad
    return meter


def same(forms: ActivationBytes, found: Activations) -> None:
    mine = {part.name: (part.layers, part.bytes) for part in forms.parts}
    theirs = {part.name: (part.layers, part.bytes) for part in found.parts}
    assert mine == theirs, [(name, mine[name], theirs[name]) for name in mine]
    assert forms.bytes == found.bytes <= forms.upper


def agree(config: Config, rank: int = 0) -> None:
    """Forms and meter, in bytes of every part and of weights that are put together."""
    wide = config.precision.dtype == "fp64" and "A" in config.model.pattern
    if wide and torch.__version__ < "2.13":
        pytest.skip("fake attention keeps fp32 sums, not fp64 as the real one (pytorch#185539)")
    found, size = metered(config, rank), size_of(config.mesh)
    forms = activation_bytes(config, size, rank)
    same(forms, found)
    if size > 1:
        assert forms.weights == copied_weights(found)


def copied_weights(found: Activations) -> int:
    """Of all that is made of weights alone: what is put together or turned into another number."""
    return sum(kept.bytes for kept in found.weights if kept.operator in ("cat", "exp", "neg"))


# ---- every choice by itself, on one process -----------------------------------------------------

LETTERS = {"ablock": "AF", "eblock": "EF", "mblock": "MF", "rblock": "RF", "fblock": "FF"}
VALUES = [
    ("ablock", "selective"),
    ("ablock", "full"),
    ("eblock", "expert_gemm_only"),
    ("eblock", "full"),
    ("mblock", "conv_bc_only"),
    ("rblock", "recurrence"),
    ("rblock", "full_plus_norms"),
    ("fblock", "full"),
    ("norms", True),
    ("core_attn", True),
    ("mlp", True),
    ("mla_q_upproj", True),
    ("mla_kv", True),
]
MLA = {"kind": "mla", "qk_norm": False}


@pytest.mark.parametrize(("name", "value"), VALUES, ids=lambda x: str(x))
def test_every_policy(name: str, value: Any) -> None:
    pattern = "AF" if name.startswith("mla") else LETTERS.get(name, "AMERFF")
    policy = dataclasses.replace(NONE, **{name: value})
    agree(config_of(pattern, policy=policy, attention=MLA if name.startswith("mla") else {}))


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32", "fp64"])
@pytest.mark.parametrize("policy", [NONE, SELECTIVE], ids=["none", "selective"])
def test_every_dtype(dtype: Dtype, policy: CheckpointingPolicy) -> None:
    """The residual stream is as narrow as the compute dtype; in fp32 and fp64 nothing is cast."""
    agree(config_of("AMERFF", dtype, policy))


OPTIONS: dict[str, tuple[str, dict[str, dict[str, Any]]]] = {
    "gqa": ("AA", {"attention": {"qk_norm": False, "softcap": 20.0}}),
    "mla": ("AA", {"attention": MLA}),
    "mla low rank": ("AA", {"attention": {**MLA, "q_lora_rank": 7, "v_head_dim": 12}}),
    "mimo": ("MM", {"mamba3": {"mimo_rank": 2, "ngroups": 2, "conv_kernel": 4, "chunk_size": 5}}),
    "out norm": ("MM", {"mamba3": {"out_norm": True, "a_activation": "softplus"}}),
    "heads of q": ("RR", {"m2rnn": {"num_heads": 4, "num_q_heads": 2, "chunk_size": 5}}),
    "relu2": ("EE", {"moe": {"activation": "relu2", "shared_gate": True, "num_shared": 2}}),
    "softmax": ("EE", {"moe": {"score": "softmax", "softmax_order": "pre", "num_shared": 0}}),
    "losses": ("EE", {"moe": {"balance_loss": 0.1, "sequence_loss": 0.1, "z_loss": 0.1}}),
    "capacity": ("EE", {"moe": {"capacity_factor": 1.25, "score": "softmax", "z_loss": 0.1}}),
    "nulls": ("EE", {"moe": {"null_rho": 0.5, "num_experts": 8, "sequence_loss": 0.1}}),
    "nulls softmax": ("EE", {"moe": {"null_rho": 0.5, "num_experts": 8, "score": "softmax"}}),
    "nulls capacity": ("EE", {"moe": {"null_rho": 0.5, "capacity_factor": 1.25}}),
    "mlp relu2": ("FF", {"mlp": {"activation": "relu2"}}),
}


@pytest.mark.parametrize("policy", [NONE, SELECTIVE, FULL], ids=["none", "selective", "full"])
@pytest.mark.parametrize("name", OPTIONS)
def test_every_option(name: str, policy: CheckpointingPolicy) -> None:
    pattern, changes = OPTIONS[name]
    agree(config_of(pattern, "bf16", policy, None, 3, 16, **changes))


# ---- samples of everything together, on fake ranks ----------------------------------------------


def drawn(seed: int) -> tuple[Config, int]:
    """A legal configuration of two layers and a rank of it; the same each time."""
    pick = random.Random(seed).choice
    while True:
        config, rank = _drawn(pick, (1.0, 0.5, 1.0, 0.7)[seed % 4])
        if not _broken(config):
            return config, rank


def _broken(config: Config) -> bool:
    try:
        check(config, size_of(config.mesh))
    except ValueError:
        return True
    return False


def _drawn(pick: Any, null_rho: float) -> tuple[Config, int]:
    latent = {"kind": "mla", "qk_norm": False, "q_lora_rank": pick([0, 7])}
    grouped = {"qk_norm": pick([True, False]), "num_kv_heads": 4, "softcap": pick([None, 20.0])}
    changes = {
        "attention": {"num_heads": 8, **pick([latent, grouped])},
        "mamba3": {
            "headdim": 4,
            "mimo_rank": pick([1, 1, 2]),
            "conv_kernel": pick([0, 4]),
            "ngroups": pick([1, 2]),
            "out_norm": pick([True, False]),
            "a_activation": pick(["heavy_tail", "softplus"]),
            "chunk_size": pick([4, 5, 64]),
        },
        "m2rnn": {"num_heads": pick([4, 6, 8]), "num_q_heads": pick([1, 2]), "chunk_size": 5},
        "moe": {
            "activation": pick(["swiglu", "relu2"]),
            "num_shared": pick([0, 1, 2]),
            "shared_gate": pick([True, False]),
            "score": pick(["sigmoid", "softmax"]),
            "softmax_order": pick(["pre", "post"]),
            "capacity_factor": pick([None, None, 1.25]),
            "balance_loss": pick([0.0, 0.1]),
            "sequence_loss": pick([0.0, 0.1]),
            "z_loss": pick([0.0, 0.1]),
            "top_k": pick([1, 2, 3]),
            "null_rho": null_rho,
        },
        "mlp": {"activation": pick(["swiglu", "relu2"])},
    }
    latent_only = changes["attention"].get("kind") == "mla"
    policy = dataclasses.replace(
        KEEP,
        ablock=pick(["none", "none", "selective", "full"]),
        eblock=pick(["none", "expert_gemm_only", "full"]),
        mblock=pick(["none", "conv_bc_only"]),
        rblock=pick(["none", "recurrence", "full_plus_norms"]),
        norms=pick([True, False]),
        regather=pick(["auto", "on", "off"]),
        core_attn=pick([True, False]),
        mlp=pick([True, False]),
        mla_q_upproj=latent_only and pick([True, False]),
        mla_kv=latent_only and pick([True, False]),
    )
    mesh = MeshConfig(
        dp_shard=pick([1, 1, 2]),
        tp=pick([1, 2]),
        cp=pick([1, 2]),
        ep=pick([1, 1, 2]),
        reshard="never",
        ep_dispatch=pick(["per_rank", "per_expert", "padded"]),
        cp_order=pick(["head_tail", "contiguous"]),
        cp_attention=pick(["all_gather", "all_gather", "ring", "heads"]),
        cp_mamba3=pick(["state", "state", "heads"]),
        cp_m2rnn=pick(["auto", "heads", "serial"]),
    )
    pattern = pick("AMER") + pick("AMER")
    dtype, rows, tokens = pick(["bf16", "bf16", "fp32", "fp64"]), pick([1, 2, 3]), pick([16, 32])
    config = config_of(pattern, dtype, policy, mesh, rows, tokens, **changes)
    return config, pick(range(size_of(mesh)))


@pytest.mark.parametrize("seed", range(60))
def test_any_model_policy_and_mesh(seed: int) -> None:
    agree(*drawn(seed))


def test_samples_cover_every_choice() -> None:
    """All letters on every axis, and every way over the context axis."""
    samples = [drawn(seed)[0] for seed in range(60)]
    met = {(letter, axis) for c in samples for letter in c.model.pattern for axis in axes(c)}
    wanted = {(letter, axis) for letter in "AMER" for axis in ("tp", "cp")} | {("E", "ep")}
    assert wanted <= met
    kinds = {
        (letter, getattr(c.mesh, field))
        for c in samples
        for letter, field in (("A", "cp_attention"), ("M", "cp_mamba3"), ("R", "cp_m2rnn"))
        if letter in c.model.pattern and c.mesh.cp > 1
    }
    assert len(kinds) == 8


def axes(config: Config) -> list[str]:
    return [axis for axis in ("tp", "cp", "ep") if getattr(config.mesh, axis) > 1]


# ---- whole presets ------------------------------------------------------------------------------

EIGHT = {
    "nam56r_base": MeshConfig(dp_shard=4, tp=2, ep=4, reshard="never"),
    "nam52_deep_base": MeshConfig(dp_shard=4, cp=2, ep=8, reshard="never"),
}


def of_preset(name: str, tokens: int = 4096, **changes: Any) -> Config:
    config = preset(name)
    train = dataclasses.replace(config.train, grad_accum=1)
    config = dataclasses.replace(config, train=train, data=DataConfig(seq_len=tokens), **changes)
    return dataclasses.replace(config, precision=PrecisionConfig(dtype="bf16"))


@pytest.mark.parametrize("name", EIGHT)
@pytest.mark.parametrize("world", [1, 8])
def test_deep_presets_at_4k(name: str, world: int) -> None:
    """To the byte, with one layer of each kind metered for all of them."""
    mesh = EIGHT[name] if world > 1 else MeshConfig(dp_shard=1)
    config = of_preset(name, mesh=mesh)
    few = dataclasses.replace(config, model=one_of_each(config.model))
    with fake_world(few, world) as fake:
        model = planned_model(few, fake, ActivationCheckpointing(few))
        with fake_tensors(memory=True):
            meter = forward(few, fake, model)
    found = activations(meter, standing_for(few.model, config.model))
    same(activation_bytes(config, world), found)


def test_it_is_what_the_command_shows() -> None:
    """Which also runs the backward; of a pipeline the layers of a rank's stage."""
    config = config_of("AMERFF", policy=PER_BLOCK)
    same(activation_bytes(config), measure(config, 1, 0))
    config = config_of("AFAF", mesh=MeshConfig(pp=2, dp_shard=1))
    config = dataclasses.replace(config, train=dataclasses.replace(config.train, grad_accum=4))
    for rank in range(2):
        forms = activation_bytes(config, 2, rank)
        same(forms, measure(config, 2, rank))
        assert forms.in_flight == 2 - rank


@pytest.mark.parametrize("name", EIGHT)
def test_linear_in_tokens(name: str) -> None:
    """Of every part: what 3072 tokens add, twice as many add twice.

    Not all is proportional: a scan has a first state and the head a weight. The number is one that
    fills the slots of dropless experts, which are padded to a multiple of 48 for each.
    """
    for mesh, size in ((MeshConfig(dp_shard=1), 1), (EIGHT[name], 8)):
        once, twice, four_times = (
            activation_bytes(of_preset(name, tokens, mesh=mesh), size).parts
            for tokens in (3072, 6144, 12288)
        )
        for one, two, four in zip(once, twice, four_times, strict=True):
            assert four.bytes - two.bytes == 2 * (two.bytes - one.bytes), one.name


def test_tensor_parallelism_cuts_the_residual_stream() -> None:
    """Halves it and what the last norm keeps with tp 2, quarters both with tp 4.

    A rank of a stage without tp has it in full; the meter agrees by the tests above.
    """
    found = []
    for tp in (1, 2, 4):
        mesh = MeshConfig(dp_shard=8 // tp, tp=tp)
        parts = activation_bytes(of_preset("nam56r_base", mesh=mesh, recompute=NONE), 8).parts
        residual = sum(part.groups.get("residual", 0) for part in parts)
        found.append((residual, parts[-2].bytes))
    whole, half, quarter = found
    assert [x // 2 for x in whole] == list(half)
    assert [x // 4 for x in whole] == list(quarter)


def test_fake_ranks_keep_a_part_of_the_residual_stream() -> None:
    """The same on the meter: bytes of the sums between blocks."""
    found = []
    for tp in (1, 2, 4):
        config = config_of("AFF", mesh=MeshConfig(dp_shard=4 // tp, tp=tp, reshard="never"))
        config = dataclasses.replace(
            config,
            model=dataclasses.replace(
                config.model,
                attention=dataclasses.replace(config.model.attention, num_kv_heads=4),
            ),
        )
        parts = metered(config, 3).parts
        sums = [kept for p in parts for kept in p.kept if kept.operator == "add" and not kept.path]
        found.append((sum(kept.bytes for kept in sums), parts[-2].bytes))
    assert found[0] == tuple(2 * x for x in found[1]) == tuple(4 * x for x in found[2])


# ---- experts, and the rest ----------------------------------------------------------------------


@pytest.mark.parametrize("experts", [4, 16, 60])
def test_even_choices_are_those_of_runs_without_values(experts: int) -> None:
    even, tokens = EvenRouting(experts, 3), 50
    for rank in range(4):
        mesh = MeshConfig(dp_shard=4, ep=4)
        moe = {"num_experts": experts, "top_k": 3}
        config = config_of("EE", mesh=mesh, rows=1, tokens=tokens, moe=moe)
        trip = expert_rows(LocalShapes.on_rank(config, 4, rank))
        to_Wn, from_Wn = even.rows(tokens, 4, rank)
        assert trip.leaving == sum(n for n, *_ in to_Wn)
        assert trip.arriving == sum(n for n, *_ in from_Wn)
        assert trip.copies == sum(sum(copies) for _, *copies in from_Wn)


def test_capacity_is_counted_as_the_block_counts_it() -> None:
    moe = {"num_experts": 8, "top_k": 4, "capacity_factor": 1.1}
    config = config_of("EE", rows=1, tokens=100, moe=moe)
    assert expert_rows(LocalShapes.on_rank(config, 1, 0)).slots == 8 * 55  # in floats 50 * 1.1 > 55


@pytest.mark.parametrize("dispatch", ["per_rank", "per_expert"])
@pytest.mark.parametrize("skew", [0.0, 1.0, 100.0])
def test_no_choice_needs_more_than_the_bound(
    dispatch: Literal["per_rank", "per_expert"], skew: float
) -> None:
    """Routers of four ranks that prefer the first experts a little, or always."""
    draw, experts, top_k, tokens = random.Random(0), 16, 3, 40
    mesh = MeshConfig(dp_shard=4, ep=4, ep_dispatch=dispatch)
    moe = {"num_experts": experts, "top_k": top_k}
    config = config_of("EE", mesh=mesh, rows=1, tokens=tokens, moe=moe)
    most = expert_rows(LocalShapes.on_rank(config, 4, 0, most=True))
    chosen = []
    for _ in range(4 * tokens):
        score = [draw.random() - skew * expert for expert in range(experts)]
        chosen.append(sorted(range(experts), key=lambda e, s=score: -s[e])[:top_k])
    mine = [[e for e in token if e < 4] for token in chosen]
    copies = sum(map(len, mine))
    rows = sum(map(bool, mine)) if dispatch == "per_rank" else copies
    slots = sum(-(-sum(t.count(e) for t in mine) // 48) * 48 for e in range(4))
    assert rows <= most.arriving and copies <= most.copies and slots <= most.slots
    if skew == 100.0:
        assert rows == most.arriving and copies == most.copies


def test_what_is_said_for_machines() -> None:
    config = config_of("AEMRF", mlp=dataclasses.asdict(MLPConfig(hidden_dim=32)))
    content = activation_bytes(config).as_dict()
    assert content["bytes"] == sum(part["bytes"] for part in content["parts"])
    assert all(part["bytes"] == sum(part["groups"].values()) for part in content["parts"])
    assert content["microbatches_in_flight"] == 1


def test_the_launch_record_has_it() -> None:
    """For the device that the run is on: `auto` computes in fp32 on a CPU."""
    config = dataclasses.replace(config_of("AEMRF"), precision=PrecisionConfig())
    fp32 = dataclasses.replace(config, precision=PrecisionConfig(dtype="fp32"))
    recorded = kept_by_a_microbatch(config, 1, torch.device("cpu"))
    assert recorded == activation_bytes(fp32).as_dict() != activation_bytes(config).as_dict()
