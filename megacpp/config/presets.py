"""Presets: named functions that return a Config; go to the definition to change one.

Each docstring opens with: parameters total / active; what to expect; time; machine. Where sources
contradict each other, the docstring names the reading that the preset takes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from megacpp.blocks.attention.config import AttentionConfig, SparseAttentionConfig
from megacpp.blocks.dense.config import MLPConfig
from megacpp.blocks.engram.config import EngramConfig
from megacpp.blocks.experts.config import MoEConfig
from megacpp.blocks.hyper_connections.config import HyperConnectionConfig
from megacpp.blocks.m2rnn.config import M2RNNConfig
from megacpp.blocks.mamba3.config import Mamba3Config
from megacpp.blocks.mtp.config import MTPConfig
from megacpp.blocks.ngram.config import NgramConfig
from megacpp.blocks.top.config import TOPConfig
from megacpp.config.schema import (
    CheckpointConfig,
    CheckpointingPolicy,
    Config,
    DataConfig,
    ModelConfig,
    OptimConfig,
    RunConfig,
    TrainConfig,
)
from megacpp.errors import ConfigError, did_you_mean

NAM_PATTERN = "AEMEAEMEAEMR"
# Largest saving for the least work, by block kind (docs/21-activation-memory.md). Attention stays:
# a fused kernel saves its output and a number per query and head, and is slow to recompute.
PER_BLOCK = CheckpointingPolicy(
    eblock="expert_gemm_only",
    mblock="conv_bc_only",
    rblock="full_plus_norms",
    norms=True,
    mlp=True,
)


def tiny() -> Config:
    """6.16M parameters / 3.95M active; 1.5 bits per byte of C++ headers; 4 minutes; 2 CPU cores.

    Every letter of the NAM pattern once around (3 A, 5 E, 3 M, 1 R) on the corpus that needs no
    download. The default of `train.py`.
    """
    return Config(
        preset="tiny",
        model=ModelConfig(
            dim=192,
            depth=12,
            pattern=NAM_PATTERN,
            vocab_size=4096,
            attention=AttentionConfig(num_heads=6, num_kv_heads=2, head_dim=32, qk_norm=True),
            mamba3=Mamba3Config(d_state=32, headdim=32, chunk_size=64),
            m2rnn=M2RNNConfig(key_dim=32, value_dim=16),
            moe=MoEConfig(
                num_experts=8,
                top_k=2,
                hidden_dim=128,
                shared_hidden_dim=192,
                sequence_loss=1e-4,
                z_loss=1e-4,
            ),
        ),
        run=RunConfig(steps=140),
        checkpoint=CheckpointConfig(every=50),
        data=DataConfig(path="data/torch-headers", seq_len=256),
        train=TrainConfig(device_batch_size=4),
        optim=OptimConfig(lr=3e-3, muon_lr=1e-2, schedule="wsd"),
        recompute=PER_BLOCK,
    )


def tiny_full() -> Config:
    """9.3M parameters / 7.1M active; every feature on; minutes; 2 CPU cores.

    `tiny` with all of TINY_FEATURES: to see that everything works together, not because it learns
    more (docs/32-ablation.md has what each does).
    """
    base = tiny()
    model = base.model
    for feature in TINY_FEATURES.values():
        model = feature(model)
    return replace(base, preset="tiny_full", model=model)


def tiny_chat() -> Config:
    """6.16M parameters / 3.95M active; `tiny` for conversations; 1 minute; 2 CPU cores.

    Tunes a run of `tiny`, named by --checkpoint.init (docs/45-questions-on-a-corpus.md).
    """
    return replace(
        tiny(),
        preset="tiny_chat",
        run=RunConfig(dir="runs/tiny-chat", steps=60),
        data=DataConfig(path="data/questions", seq_len=128),
        train=TrainConfig(device_batch_size=8),
        optim=OptimConfig(lr=1e-3, muon_lr=3e-3, schedule="wsd"),
    )


def _sparse(model: ModelConfig) -> ModelConfig:
    chosen = SparseAttentionConfig(layers="1,2", top_k=64, num_heads=4, head_dim=32, share=2)
    return replace(model, attention=replace(model.attention, sparse=chosen))


def _null(model: ModelConfig) -> ModelConfig:
    return replace(model, moe=replace(model.moe, null_rho=0.5))


def _groups(model: ModelConfig) -> ModelConfig:
    moe = replace(model.moe, num_groups=4, top_k_groups=2, shared_gate=True)
    return replace(model, moe=moe)


TINY_FEATURES: dict[str, Callable[[ModelConfig], ModelConfig]] = {
    "sparse": _sparse,
    "mtp": lambda model: replace(model, mtp=MTPConfig(depths=2, hidden_dim=384)),
    "top": lambda model: replace(model, top=TOPConfig(loss=0.5, window=64)),
    "ngram": lambda model: replace(model, ngram=NgramConfig(heads=4, table_size=8_000, dim=8)),
    "engram": lambda model: replace(
        model, engram=EngramConfig(layers="1", heads=4, table_size=8_000, dim=64)
    ),
    "mhc": lambda model: replace(model, mhc=HyperConnectionConfig(streams=4)),
    "null": _null,
    "groups": _groups,
}


def dense_110m() -> Config:
    """113M parameters / 113M active; not yet run by us; a day; 1 GPU.

    A + F only, twelve of each: the size of GPT-2 small, to compare with other trainers. Losses that
    they report are of web text with their own tokenizers, and say nothing of `data/corpus`.
    """
    return Config(
        preset="dense_110m",
        model=ModelConfig(
            dim=768,
            depth=24,
            pattern="AF",
            vocab_size=49_152,
            tie_embeddings=True,
            attention=AttentionConfig(num_heads=12, num_kv_heads=4, head_dim=64, qk_norm=True),
            mlp=MLPConfig(hidden_dim=2048),
        ),
        run=RunConfig(steps=8_000),
        data=DataConfig(path="data/corpus", seq_len=1024),
        train=TrainConfig(device_batch_size=16, tokens_per_step=262_144),
        optim=OptimConfig(lr=1e-3, muon_lr=2e-2),
    )


def moe_small() -> Config:
    """303M parameters / 96M active; not yet run by us; a day; 1 GPU.

    A + E: softmax top-4 of 32 gated experts with one shared expert, dropless.
    """
    return Config(
        preset="moe_small",
        model=ModelConfig(
            dim=640,
            depth=20,
            pattern="AE",
            vocab_size=32_768,
            attention=AttentionConfig(num_heads=10, num_kv_heads=2, head_dim=64, qk_norm=True),
            moe=MoEConfig(
                num_experts=32,
                top_k=4,
                hidden_dim=384,
                shared_hidden_dim=768,
                score="softmax",
                bias_update_rate=0.0,
                balance_loss=1e-2,
                z_loss=1e-3,
            ),
        ),
        run=RunConfig(steps=8_000),
        data=DataConfig(path="data/corpus", seq_len=2048),
        train=TrainConfig(device_batch_size=8, tokens_per_step=262_144),
        optim=OptimConfig(lr=8e-4, muon_lr=1e-2),
        recompute=CheckpointingPolicy(eblock="expert_gemm_only"),
    )


def hybrid_400m() -> Config:
    """399M parameters / 258M active; not yet run by us; days; 1-8 GPUs.

    The NAM pattern twice around (6 A, 10 E, 6 M, 2 R) at width 1024.
    """
    return Config(
        preset="hybrid_400m",
        model=ModelConfig(
            dim=1024,
            depth=24,
            pattern=NAM_PATTERN,
            vocab_size=65_536,
            attention=AttentionConfig(num_heads=16, num_kv_heads=4, head_dim=64),
            mamba3=Mamba3Config(d_state=64, headdim=64, conv_kernel=4),
            moe=MoEConfig(
                num_experts=16,
                top_k=4,
                hidden_dim=576,
                activation="relu2",
                shared_hidden_dim=640,
                sequence_loss=1e-4,
            ),
        ),
        run=RunConfig(steps=20_000),
        data=DataConfig(path="data/corpus", seq_len=4096),
        train=TrainConfig(device_batch_size=4, tokens_per_step=524_288),
        optim=OptimConfig(lr=6e-4, muon_lr=1e-2),
        recompute=PER_BLOCK,
    )


def hybrid_mimo() -> Config:
    """399M parameters / 277M active; not yet run by us; days; 1-8 GPUs.

    hybrid_400m with MIMO at the production shape: 8 groups, rank 4, chunks of 16. Narrower experts
    pay for the wider B and C, so that the totals agree to 0.1 % (active ones are 8 % more).
    """
    base = hybrid_400m()
    model = replace(
        base.model,
        mamba3=replace(base.model.mamba3, ngroups=8, mimo_rank=4, chunk_size=16),
        moe=replace(base.model.moe, hidden_dim=496, shared_hidden_dim=688),
    )
    return replace(base, preset="hybrid_mimo", model=model)


def nam56r_base() -> Config:
    """4.5B parameters / 2.8B active; not yet run by us; weeks; 8 GPUs of 141 GB.

    The blocks of nam56r alone, with grouped-query attention: pattern AEMEAEMEAEMR to depth 52,
    13 A, 22 E, 13 M, 4 R. Readings: R is M2RNN (some sources list an n-gram head); routed experts
    are two-matrix relu² of 896, top-4 of 16, with one gated shared expert of 1024; M carries the
    short conv that contract S0-a recomputes (author Mamba-3 has none); A is plain GQA
    56/8; QK-clip at 100 is on (one source calls it a switch that is off by default). Counting M
    *and* R as Mamba-2 style mixers instead gives 4.74B / 3.04B, the published 4.73B / 3.03B to
    0.4 % (`megacpp show nam56r_base` prints both).
    """
    return Config(
        preset="nam56r_base",
        model=ModelConfig(
            dim=3584,
            depth=52,
            pattern=NAM_PATTERN,
            vocab_size=65_536,
            attention=AttentionConfig(num_heads=56, num_kv_heads=8, head_dim=64),
            mamba3=Mamba3Config(d_state=64, headdim=64, ngroups=8, conv_kernel=4),
            m2rnn=M2RNNConfig(key_dim=64, value_dim=16),
            moe=MoEConfig(
                num_experts=16,
                top_k=4,
                hidden_dim=896,
                activation="relu2",
                shared_hidden_dim=1024,
                sequence_loss=1e-4,
            ),
        ),
        run=RunConfig(steps=50_000),
        data=DataConfig(path="data/corpus", seq_len=4096),
        train=TrainConfig(device_batch_size=2, tokens_per_step=1_048_576),
        optim=OptimConfig(lr=3e-4, muon_lr=1e-2, muon_coefficients="polar_express", qk_clip=100.0),
        recompute=PER_BLOCK,
    )


def nam56r() -> Config:
    """4.6B parameters / 2.9B active; not yet run by us; weeks; 8 GPUs of 141 GB.

    nam56r_base with latent attention, of whose 13 layers the ranks 1-3, 5-7 and 9-11 are sparse
    (an indexer of 32 heads of 64 chooses 256 keys; of three layers the first chooses), two further
    tokens by one shared plain block of width 18944, and 16 tables of hashed n-grams. Readings: the
    latent ranks of 64 are those of the runs (one text has 512 and 24 heads); an early bring-up
    had its sparse layers at ranks 0, 4 and 8; the trunk learns from the further tokens (the runs
    cut that gradient).
    """
    base = nam56r_base()
    attention = AttentionConfig(
        kind="mla",
        num_heads=56,
        q_lora_rank=64,
        kv_lora_rank=64,
        qk_nope_head_dim=64,
        qk_rope_head_dim=64,
        v_head_dim=64,
        sparse=SparseAttentionConfig(
            layers="1,2,3,5,6,7,9,10,11", top_k=256, num_heads=32, head_dim=64, share=3
        ),
    )
    model = replace(
        base.model,
        attention=attention,
        mtp=MTPConfig(depths=2, hidden_dim=18_944),
        ngram=NgramConfig(heads=8),
    )
    return replace(base, preset="nam56r", model=model)


def nam56r_quarter() -> Config:
    """1.4B parameters / 1.0B active; not yet run by us; days; 1 GPU of 80 GB or more.

    The first 13 layers of nam56r_base (4 A, 5 E, 3 M, 1 R), for a single device. The published
    1.8-2.0B quarter profile counts R as a Mamba mixer and carries further features.
    """
    full = nam56r_base()
    return replace(
        full,
        preset="nam56r_quarter",
        model=replace(full.model, depth=13),
        run=RunConfig(steps=20_000),
        train=TrainConfig(device_batch_size=2, tokens_per_step=131_072),
    )


def nam52_deep_base() -> Config:
    """3.9B parameters / 863M active; not yet run by us; weeks; 8 GPUs of 141 GB.

    The deep, narrow worked example: width 1536, depth 52, 64 gated experts, top-6, capacity
    factor 1.25. The sources give no head shapes: 24 query and 8 KV heads of 64 are ours, and 20
    recurrent heads, which two ranks can share as their runs did (width / 80 would be 19). The
    expert width 512 follows from their up/down learning-rate ratio of about sqrt(D / 512).
    """
    return Config(
        preset="nam52_deep_base",
        model=ModelConfig(
            dim=1536,
            depth=52,
            pattern=NAM_PATTERN,
            vocab_size=65_536,
            attention=AttentionConfig(num_heads=24, num_kv_heads=8, head_dim=64),
            mamba3=Mamba3Config(d_state=64, headdim=64, ngroups=8, conv_kernel=4),
            m2rnn=M2RNNConfig(num_heads=20, key_dim=64, value_dim=16),
            moe=MoEConfig(
                num_experts=64,
                top_k=6,
                hidden_dim=512,
                shared_hidden_dim=512,
                route_scale=2.5,
                capacity_factor=1.25,
                balance_loss=1e-2,
                z_loss=1e-3,
            ),
        ),
        run=RunConfig(steps=50_000),
        data=DataConfig(path="data/corpus", seq_len=4096),
        train=TrainConfig(device_batch_size=2, tokens_per_step=1_048_576),
        optim=OptimConfig(lr=3e-4, muon_lr=1e-2, muon_coefficients="polar_express", qk_clip=100.0),
        recompute=PER_BLOCK,
    )


def nam52_deep() -> Config:
    """4.0B parameters / 982M active; not yet run by us; weeks; 8 GPUs of 141 GB.

    nam52_deep_base with four residual streams, half of the chosen slots null (12 of a pool of 128,
    six real ones on average), and n-gram memories in front of the second and the fifth attention
    block. Readings: the sources name these features and not which run had which; layers 2 and 15
    of the memories' paper are here the attention blocks next to them; five Sinkhorn iterations, as
    the port has, for the paper's 20.
    """
    base = nam52_deep_base()
    model = replace(
        base.model,
        moe=replace(base.model.moe, null_rho=0.5),
        mhc=HyperConnectionConfig(streams=4, iterations=5),
        engram=EngramConfig(layers="1,4"),
    )
    return replace(base, preset="nam52_deep", model=model)


PRESETS: dict[str, Callable[[], Config]] = {
    f.__name__: f
    for f in (
        tiny,
        tiny_chat,
        tiny_full,
        dense_110m,
        moe_small,
        hybrid_400m,
        hybrid_mimo,
        nam56r_quarter,
        nam56r_base,
        nam56r,
        nam52_deep_base,
        nam52_deep,
    )
}


def preset(name: str) -> Config:
    """Return the configuration of a preset by name.

    Raises:
        ConfigError: there is no such preset; the error suggests a similar name.
    """
    if name not in PRESETS:
        raise ConfigError(f"preset={name}: no such preset. Fix: {did_you_mean(name, PRESETS)}.")
    return PRESETS[name]()
