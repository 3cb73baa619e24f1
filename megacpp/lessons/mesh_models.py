"""Small models to run on different meshes: one for each thing that a model can have."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from megacpp.blocks.attention.config import AttentionConfig, SparseAttentionConfig
from megacpp.blocks.engram.config import EngramConfig
from megacpp.blocks.hyper_connections.config import HyperConnectionConfig
from megacpp.blocks.mtp.config import MTPConfig
from megacpp.blocks.ngram.config import NgramConfig
from megacpp.blocks.top.config import TOPConfig
from megacpp.config.schema import ModelConfig
from megacpp.lessons.models import SMALL_ENGRAM, layers, shrunk, small, variants

SPARSE = SparseAttentionConfig(top_k=3, num_heads=2, head_dim=6, loss=0.1)


@functools.cache
def models() -> Mapping[str, ModelConfig]:
    """Return small models of heads, experts and words that divide by four; losses on."""
    base, options, replace = small(), variants(), dataclasses.replace
    plain = replace(
        base,
        vocab_size=48,
        attention=replace(base.attention, num_kv_heads=4),
        m2rnn=replace(base.m2rnn, num_heads=4),
    )
    gqa, moe, short = plain.attention, plain.moe, layers(plain, "AEFR")
    mamba = replace(plain.mamba3, mimo_rank=2, ngroups=2, out_norm=True, conv_kernel=4)
    mla_yarn = replace(options["mla_low_rank_queries_yarn"].attention, q_lora_rank=8)
    mla, mla_low = replace(gqa, kind="mla", qk_norm=False), replace(mla_yarn, yarn=None)
    groups = replace(moe, num_experts=8, null_rho=0.5, num_groups=4, top_k_groups=3)
    biased = replace(options["gqa_bias"].attention, num_kv_heads=gqa.num_kv_heads)
    delta = replace(plain.gated_deltanet, num_key_heads=4, num_value_heads=8)
    far = MTPConfig(depths=3, shared=False, hidden="post_norm", order="hidden_embedding")
    found = {
        "plain": plain,
        "tied": replace(plain, tie_embeddings=True),
        "mla": replace(plain, attention=mla),
        "options": replace(
            plain,
            logit_softcap=5.0,
            attention=mla_yarn,
            mamba3=mamba,
            m2rnn=replace(plain.m2rnn, num_q_heads=4, num_k_heads=4),
            moe=replace(moe, shared_gate=True, score="softmax"),
            mlp=replace(plain.mlp, activation="relu2"),
        ),
        "bias": layers(options["gqa_bias"], "AAE", vocab_size=48, attention=biased),
        "norm_over_heads": layers(
            plain, "AF", attention=replace(gqa, qk_norm=True, qk_norm_wide=True)
        ),
        "nulls": replace(plain, moe=replace(groups, shared_gate=True)),
        # counted over the ranks of a microbatch: only meshes leave it alone, accumulation doesn't
        "balance": replace(plain, moe=replace(moe, balance_loss=1e-2)),
        # all keys, chosen keys, a choice that is taken over (beside an E block), chosen keys
        "sparse_mla": sparse(plain, "AAEAA", mla_low, layers="1,2,3", share=2, own="3"),
        # one choice for all, which goes through every stage of a pipeline
        "sparse_stages": sparse(plain, "AAEAAA", mla_low, layers="all", share=6),
        "sparse_gqa": sparse(plain, "AAE", gqa, layers="all", share=2),
        "delta": layers(plain, "GAGE", gated_deltanet=delta),
        "around": layers(
            plain,
            "AEFA",
            top=TOPConfig(0.3, window=6),
            ngram=NgramConfig(heads=2, table_size=30, dim=4),
        ),
        "ahead": replace(short, mtp=MTPConfig(depths=2, hidden_dim=24)),
        "ahead_tied": replace(
            short,
            attention=mla,
            tie_embeddings=True,
            logit_softcap=5.0,
            mtp=replace(far, hidden_dim=24),
        ),
        "ahead_apart": replace(
            short, mtp=MTPConfig(depths=2, hidden_dim=24, detach_trunk=True, detach_head=True)
        ),
        # streams that differ by a tenth behind the first layer: of equal ones `res` has no gradient
        "streams": replace(
            plain,
            mhc=HyperConnectionConfig(
                streams=3, iterations=5, ordering="deepseek_v4", init="published"
            ),
        ),
        "engram": small("AEMA", vocab_size=48, attention=gqa, engram=SMALL_ENGRAM),
    } | {letter: layers(plain, letter) for letter in "AMERF"}
    found["everything"] = everything(layers(plain, "AEMRAFA"))
    found["everything_mla"] = everything(layers(plain, "AEMA", attention=mla_low))
    # As it ships, layer 8 with the choice of layer 4; streams differ, so that `res` learns.
    full = shrunk("tiny_full")
    found["everything_tiny"] = replace(
        full,
        vocab_size=48,
        m2rnn=replace(full.m2rnn, num_heads=4),
        moe=replace(full.moe, num_experts=8),
        mhc=replace(full.mhc, iterations=5, init="published"),
    )
    nam = shrunk("nam56r")
    found["nam56r"] = replace(nam, vocab_size=48, m2rnn=replace(nam.m2rnn, num_heads=4))
    # One stream: with several, gradients of `scale` are sums that cancel to 1e-4 of their terms.
    found["one_stream"] = replace(found["everything"], mhc=HyperConnectionConfig())
    for name, model in list(found.items()):
        if name.startswith("sparse"):
            a = replace(
                model.attention, sparse=replace(model.attention.sparse, stage="dense", loss=1.0)
            )
            found[f"{name}_warmup"] = replace(model, attention=a)
    return MappingProxyType(
        {
            name: replace(
                m, moe=replace(m.moe, sequence_loss=1e-2, z_loss=1e-2), init_std=0.1, z_loss=1e-3
            )
            for name, m in found.items()
        }
    )


def sparse(
    model: ModelConfig, pattern: str, attention: AttentionConfig, **settings: Any
) -> ModelConfig:
    """Return a model with a layer for each letter, whose attention chooses its keys.

    Args:
        model: with all other settings.
        pattern: letters of the layers.
        attention: of the A blocks.
        settings: of the choice, that `SPARSE` lacks.
    """
    chosen = dataclasses.replace(SPARSE, **settings)
    return layers(model, pattern, attention=dataclasses.replace(attention, sparse=chosen))


def everything(model: ModelConfig) -> ModelConfig:
    """Return a model with every further feature; two A blocks are sparse, one remembers."""
    replace = dataclasses.replace
    return replace(
        model,
        attention=replace(model.attention, sparse=replace(SPARSE, layers="0,1")),
        moe=replace(model.moe, num_experts=8, null_rho=0.5, num_groups=4, top_k_groups=3),
        mtp=MTPConfig(depths=2, hidden_dim=24),
        top=TOPConfig(0.3, window=6),
        ngram=NgramConfig(heads=2, table_size=30, dim=4),
        engram=EngramConfig(layers="0", heads=2, max_order=2, table_size=30, dim=8, conv_kernel=3),
        mhc=HyperConnectionConfig(streams=2, iterations=5, init="published"),
    )
