"""Model shapes for benchmarks; every benchmark takes presets of megacpp too."""

from __future__ import annotations

import dataclasses

from megacpp.blocks.attention.config import AttentionConfig
from megacpp.blocks.dense.config import MLPConfig
from megacpp.config.presets import PRESETS, preset
from megacpp.config.schema import Config, DataConfig, ModelConfig, OptimConfig, TrainConfig


def dense_4m() -> Config:
    """4.2M parameters: 4 x (GQA 8/4 + SwiGLU 768), width 256, vocabulary 2048, 4 rows of 512."""
    return Config(
        preset="dense_4m",
        model=ModelConfig(
            dim=256,
            depth=8,
            pattern="AF",
            vocab_size=2048,
            attention=AttentionConfig(num_heads=8, num_kv_heads=4, head_dim=32),
            mlp=MLPConfig(hidden_dim=768),
        ),
        data=DataConfig(seq_len=512),
        train=TrainConfig(device_batch_size=4),
        optim=OptimConfig(name="adamw", lr=8e-4),
    )


def dense_4m_128() -> Config:
    """Return `dense_4m` on one row of 128 tokens: the cost of a step besides arithmetic."""
    return dataclasses.replace(
        dense_4m(),
        preset="dense_4m_128",
        data=DataConfig(seq_len=128),
        train=TrainConfig(device_batch_size=1),
    )


SHAPES = {f.__name__: f for f in (dense_4m, dense_4m_128)}


def shape(name: str) -> Config:
    """Return a benchmark shape or a preset by name."""
    return SHAPES[name]() if name in SHAPES else preset(name)


def names() -> str:
    """Return every name that `shape` knows."""
    return ", ".join([*SHAPES, *PRESETS])
