"""FLOPs that backwards repeat: the closed form against the running model, piece by piece."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megacpp.blocks.attention.config import AttentionConfig
from megacpp.cli.measure import measure
from megacpp.config.checks.every import resolve
from megacpp.config.presets import tiny
from megacpp.config.schema import KEEP, Config, TrainConfig
from megacpp.memory.replayed import replayed_flops_per_token

NOTHING = replace(KEEP, rblock="none")
MLA = AttentionConfig(kind="mla", num_heads=4, q_lora_rank=48, v_head_dim=32)
LEVERS = {
    "recurrence": {"rblock": "recurrence"},
    "selective": {
        **{"ablock": "selective", "mlp": True, "norms": True},
        **{"mblock": "conv_bc_only", "eblock": "expert_gemm_only"},
    },
    "full": {
        **{"ablock": "full", "eblock": "full", "fblock": "full"},
        **{"rblock": "full_plus_norms", "mblock": "conv_bc_only"},
    },
}


def run_of(attention: AttentionConfig | None, pattern: str, relu2: bool = False) -> Config:
    """Two rows; experts of a fixed number of slots, which aren't padded."""
    base = tiny()
    kind = "relu2" if relu2 else "swiglu"
    moe = replace(base.model.moe, capacity_factor=1.0, activation=kind)
    model = replace(
        base.model,
        pattern=pattern,
        depth=len(pattern),
        moe=moe,
        mlp=replace(base.model.mlp, hidden_dim=96, activation=kind),
        attention=attention or base.model.attention,
    )
    config = replace(base, model=model, train=TrainConfig(device_batch_size=2), recompute=NOTHING)
    return resolve(replace(config, data=replace(base.data, seq_len=16)), 1)


RUNS = {
    "gqa": run_of(None, "AFEMRA"),
    "norms behind": replace(
        run_of(None, "AFA"), model=replace(run_of(None, "AFA").model, post_norm=True)
    ),
    "relu2": run_of(None, "FEF", relu2=True),
    "mla": run_of(MLA, "AA"),
    "mla, no latent of queries": run_of(replace(MLA, q_lora_rank=0), "AA"),
}


@pytest.mark.parametrize("size", [-1, 1, 2, 3])
@pytest.mark.parametrize("lever", ["full", "selective"])
def test_streams_of_a_group(size: int, lever: str) -> None:
    config = RUNS["gqa"]
    mhc = replace(config.model.mhc, streams=3)
    config = replace(config, model=replace(config.model, mhc=mhc))
    base = measure(replace(config, recompute=replace(NOTHING, mhc_group_size=-1)), 1, 0)
    one = replace(config, recompute=replace(NOTHING, mhc_group_size=size, **LEVERS[lever]))
    repeated = measure(one, 1, 0).repeated(base) / (2 * config.data.seq_len)
    assert replayed_flops_per_token(one) == repeated


@pytest.mark.parametrize("name", RUNS)
def test_as_the_model_runs(name: str) -> None:
    config = RUNS[name]
    tokens = 2 * config.data.seq_len
    base = measure(config, 1, 0)
    levers = dict(LEVERS)
    if name.startswith("mla"):
        levers = {
            "queries": {"mla_q_upproj": True},
            "latents": {"mla_kv": True},
            **{key: LEVERS[key] for key in ("selective", "full")},
        }
    for lever, fields in levers.items():
        one = replace(config, recompute=replace(NOTHING, **fields))
        repeated = measure(one, 1, 0).repeated(base) / tokens
        assert replayed_flops_per_token(one) == repeated, lever


def test_nothing_runs_again_for_nothing() -> None:
    assert replayed_flops_per_token(RUNS["gqa"]) == 0
