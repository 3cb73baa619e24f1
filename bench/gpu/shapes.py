"""Models to measure: about 1B and 3B dense, an MoE, and the hybrid as large as a device takes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from megacpp.blocks.attention.config import AttentionConfig
from megacpp.blocks.dense.config import MLPConfig
from megacpp.blocks.experts.config import MoEConfig
from megacpp.config.checks.every import check, resolve
from megacpp.config.presets import PER_BLOCK, nam56r_base, tiny
from megacpp.config.schema import KEEP, Config, DataConfig, ModelConfig, TrainConfig


def _dense(name: str, dim: int, depth: int, heads: int, hidden: int, rows: int) -> Config:
    """Grouped-query attention with heads of 128, SwiGLU, rows of 4,096 tokens."""
    return Config(
        preset=name,
        model=ModelConfig(
            dim=dim,
            depth=depth,
            pattern="AF",
            vocab_size=32_768,
            attention=AttentionConfig(num_heads=heads, num_kv_heads=8, head_dim=128),
            mlp=MLPConfig(hidden_dim=hidden),
        ),
        data=DataConfig(seq_len=4096),
        train=TrainConfig(device_batch_size=rows, grad_accum=4),
    )


def dense_1b() -> Config:
    """1.1B parameters; 32,768 tokens a microbatch, 4 microbatches a step."""
    return _dense("dense_1b", 2048, 32, 16, 8192, rows=8)


def dense_3b(rows: int = 4) -> Config:
    """3.0B parameters; 4,096 tokens a row, 4 microbatches a step."""
    return _dense("dense_3b", 3072, 56, 24, 8192, rows)


def moe_1b() -> Config:
    """3.7B parameters, 0.9B active: softmax top-4 of 32 experts and a shared one, dropless."""
    base = _dense("moe_1b", 2048, 32, 16, 0, rows=4)
    moe = MoEConfig(
        num_experts=32,
        top_k=4,
        hidden_dim=1024,
        shared_hidden_dim=2048,
        score="softmax",
        bias_update_rate=0.0,
        balance_loss=1e-2,
        z_loss=1e-3,
    )
    model = replace(base.model, pattern="AE", moe=moe, mlp=MLPConfig())
    return replace(base, model=model, recompute=replace(KEEP, eblock="expert_gemm_only"))


def hybrid(depth: int = 52, rows: int = 2) -> Config:
    """nam56r_base, or its first layers: the pattern of all letters but F, at width 3584.

    A step has 16 microbatches, so at least the 131,072 tokens of the preset nam56r_quarter: Muon's
    products don't grow with the tokens, and would be a larger part of a smaller step.
    """
    base = nam56r_base()
    return replace(
        base,
        preset=f"hybrid_{depth}",
        model=replace(base.model, depth=depth),
        data=DataConfig(seq_len=4096),
        train=TrainConfig(device_batch_size=rows, grad_accum=16),
        # QK-clip needs a call after each step, which the benchmark lacks.
        optim=replace(base.optim, qk_clip=0.0),
        recompute=PER_BLOCK,
    )


def small(config: Config, depth: int = 12) -> Config:
    """Return a model of the same kind, at most `depth` deep, that takes milliseconds on a CPU."""
    like = tiny().model
    model = replace(
        config.model,
        dim=48,
        depth=min(depth, config.model.depth, 12 if "M" in config.model.pattern else 4),
        vocab_size=256,
        attention=replace(config.model.attention, num_heads=4, num_kv_heads=2, head_dim=16),
        mamba3=replace(config.model.mamba3, d_state=8, headdim=16, ngroups=1, chunk_size=16),
        m2rnn=replace(like.m2rnn, key_dim=8, value_dim=8, chunk_size=16),
        moe=replace(config.model.moe, num_experts=4, top_k=2, hidden_dim=32, shared_hidden_dim=32),
        mlp=MLPConfig(hidden_dim=96),
    )
    train = TrainConfig(device_batch_size=1, grad_accum=2)
    return replace(config, model=model, data=DataConfig(seq_len=32), train=train)


MODELS: dict[str, Callable[[], Config]] = {
    "dense_1b": dense_1b,
    "dense_3b": dense_3b,
    "moe_1b": moe_1b,
    "hybrid": hybrid,
}
# Configurations of a name from the largest: a run takes the first that fits its device.
CHOICES: dict[str, Sequence[Callable[[], Config]]] = {
    **{name: (make,) for name, make in MODELS.items()},
    "dense_3b": [partial(dense_3b, rows) for rows in (4, 2, 1)],
    "hybrid": [partial(hybrid, depth) for depth in (52, 39, 26, 13)],
    "hybrid_13": [partial(hybrid, 13, rows) for rows in (8, 4, 2, 1)],
}


def ready(config: Config, is_tiny: bool, depth: int = 12) -> Config:
    """Return the configuration, checked and resolved for one process; `depth` is for `small`."""
    config = small(config, depth) if is_tiny else config
    config = replace(config, memory=replace(config.memory, calibration=""))  # no calibration
    check(config, 1)
    return resolve(config, 1)
