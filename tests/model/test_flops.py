"""The FLOP formula against torch's own counter, within 1 %."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import megacpp.blocks.experts.module
import megacpp.kernels.flop_formulas
from megacpp.blocks.attention.config import AttentionConfig, SparseAttentionConfig
from megacpp.blocks.dense.config import MLPConfig
from megacpp.blocks.engram.config import EngramConfig
from megacpp.blocks.gated_deltanet.config import GatedDeltaNetConfig
from megacpp.blocks.hyper_connections.config import HyperConnectionConfig
from megacpp.blocks.hyper_connections.module import HyperConnection
from megacpp.blocks.mtp.config import MTPConfig
from megacpp.blocks.ngram.config import NgramConfig
from megacpp.blocks.top.config import TOPConfig
from megacpp.config.presets import tiny
from megacpp.config.schema import ModelConfig
from megacpp.model.block import Block
from megacpp.model.documents import Documents
from megacpp.model.flops import (
    block_flops,
    connection_flops,
    forward_flops_per_token,
    train_flops_per_token,
)
from megacpp.model.hybrid import HybridLM
from megacpp.model.init import initialise

T, B = 128, 2


def in_place_baddbmm(out, a, b, **_) -> int:
    """torch 2.13 counts `baddbmm` and `addmm` but not their in-place forms, which we use."""
    return 2 * a[0] * a[1] * a[2] * b[2]


def in_place_addmm(out, a, b, **_) -> int:
    return 2 * a[0] * a[1] * b[1]


def counter() -> FlopCounterMode:
    mapping = {
        torch.ops.aten.baddbmm_: in_place_baddbmm,
        torch.ops.aten.addmm_: in_place_addmm,
    }
    return FlopCounterMode(display=False, custom_mapping=mapping)


def chosen(config: ModelConfig) -> ModelConfig:
    """One block, which attends to keys that it chooses."""
    sparse = SparseAttentionConfig(layers="all", top_k=16, num_heads=3, head_dim=32)
    attention = dataclasses.replace(config.attention, sparse=sparse)
    return dataclasses.replace(config, attention=attention, pattern="A", depth=1)


def variants() -> dict[str, tuple[str, ModelConfig]]:
    base = tiny().model
    mla = AttentionConfig(
        kind="mla", num_heads=4, q_lora_rank=48, kv_lora_rank=32,
        qk_nope_head_dim=24, qk_rope_head_dim=8, v_head_dim=32,
    )  # fmt: skip
    replace = dataclasses.replace
    return {
        "gqa": ("A", base),
        "gqa with a window": ("A", replace(base, attention=replace(base.attention, window=4096))),
        "gated gqa": ("A", replace(base, attention=replace(base.attention, output_gate=True))),
        "mla": ("A", replace(base, attention=mla)),
        "gqa index": ("A.index", chosen(base)),
        "mla index": ("A.index", chosen(replace(base, attention=mla))),
        "siso": ("M", base),
        "gated deltanet": ("G", base),
        "ungated deltanet": (
            "G",
            replace(base, gated_deltanet=GatedDeltaNetConfig(3, 6, 24, 40, gate=False)),
        ),
        "mimo": ("M", replace(base, mamba3=replace(base.mamba3, mimo_rank=4, chunk_size=16))),
        "swiglu_moe": ("E", base),
        "relu2_moe": (
            "E",
            replace(base, moe=replace(base.moe, activation="relu2", shared_gate=True)),
        ),
        "m2rnn": ("R", base),
        "swiglu": ("F", base),
        "engram": ("A+engram", replace(base, engram=EngramConfig("all", 2, 3, 100, 32))),
        "relu2": ("F", replace(base, mlp=MLPConfig(hidden_dim=96, activation="relu2"))),
    }


@pytest.fixture(autouse=True)
def no_padding_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU each expert's rows are padded to whole blocks; padding is no work of a token."""
    monkeypatch.setattr(megacpp.blocks.experts.module, "row_multiple", lambda device: 1)


@pytest.mark.parametrize("name", variants())
def test_each_block_within_one_percent(name: str) -> None:
    letter, config = variants()[name]
    block = Block(letter, config)
    initialise(block, block.init_rules(), seed=0)
    x_BTD, ids_BT = torch.randn(B, T, config.dim), torch.zeros(B, T, dtype=torch.int64)
    docs = Documents.rows(B, T).with_tokens(ids_BT, ids_BT)
    learns = not letter.endswith(".index")  # its loss would make gradients at once
    with torch.set_grad_enabled(learns), sdpa_kernel(SDPBackend.MATH), counter() as counted:
        block(x_BTD, docs)
    measured = counted.get_total_flops() / (B * T)
    assert block_flops(letter, config, T) == pytest.approx(measured, rel=0.01)


def test_a_window_is_counted_as_wide_as_it_is() -> None:
    base = tiny().model
    narrow = dataclasses.replace(base, attention=dataclasses.replace(base.attention, window=8))
    fewer = block_flops("A", base, 64) - block_flops("A", narrow, 64)
    assert fewer == 2 * 2 * (64 - 8) * base.attention.num_heads * base.attention.head_dim
    some = dataclasses.replace(narrow.attention, full_layers="every:2")
    some = dataclasses.replace(narrow, attention=some, pattern="AF", depth=8)
    all_keys, none = (
        forward_flops_per_token(dataclasses.replace(m, pattern="AF", depth=8), 64)
        for m in (base, narrow)
    )
    assert forward_flops_per_token(some, 64) == (all_keys + none) / 2


@pytest.mark.parametrize("shared", [True, False])
def test_further_tokens_within_one_percent(shared: bool) -> None:
    """In training, which alone runs them: blocks, projections and one head for all depths."""
    config = dataclasses.replace(
        tiny().model, pattern="F", depth=1, mtp=MTPConfig(depths=2, shared=shared, hidden_dim=64)
    )
    model = HybridLM(config)
    initialise(model, model.init_rules(), seed=0)
    model.mtp.weigh(B * T, torch.tensor([B * (T - 1), B * (T - 2)]), 0, 1)
    ids_BT = torch.randint(config.vocab_size, (B, T))
    with sdpa_kernel(SDPBackend.MATH), counter() as counted:
        model(ids_BT, ids_BT).loss_sum.backward()
    measured = counted.get_total_flops() / (B * T)
    assert train_flops_per_token(config, T) == pytest.approx(measured, rel=0.01)


def test_a_second_unembedding_and_ngrams_within_one_percent() -> None:
    """In training, where token order prediction makes its gradients in the forward."""
    base = tiny().model
    config = dataclasses.replace(
        base, pattern="F", depth=1, top=TOPConfig(0.1), ngram=NgramConfig(heads=2, table_size=50)
    )
    model = HybridLM(config)
    initialise(model, model.init_rules(), seed=0)
    ids_BT = torch.randint(config.vocab_size, (B, T))
    with counter() as counted:
        model(ids_BT, ids_BT).loss_sum.backward()
    measured = counted.get_total_flops() / (B * T)
    assert train_flops_per_token(config, T) == pytest.approx(measured, rel=0.01)


@pytest.mark.parametrize("streams", [2, 4])
def test_hyper_connections_to_the_last_product(streams: int) -> None:
    """About twice as many in the backward, which also takes y from the gradient of each stream."""
    mhc = HyperConnectionConfig(streams=streams)
    config = dataclasses.replace(tiny().model, mhc=mhc)
    connection = HyperConnection(config, 0)
    initialise(connection, connection.init_rules(), seed=0)
    x_BTnD = torch.randn(B, T, streams, config.dim).requires_grad_()
    found = []
    with counter() as counted:
        u_BTD, *coefficients = connection.read(x_BTnD)
        found.append(counted.get_total_flops() / (B * T))
        out_BTnD = connection.mix(x_BTnD, u_BTD, *coefficients)
        found.append(counted.get_total_flops() / (B * T) - found[0])
        assert tuple(found) == connection_flops(config)
        out_BTnD.sum().backward()
    whole = counted.get_total_flops() / (B * T)
    assert 3 * sum(found) == pytest.approx(whole, rel=0.04 if streams == 2 else 0.02)


def test_the_whole_model_forward_and_backward_within_one_percent() -> None:
    """Backward counts twice forward; what M and R recompute comes on top of the convention."""
    config = tiny().model
    model = HybridLM(config)
    initialise(model, model.init_rules(), seed=0)
    ids_BT = torch.randint(config.vocab_size, (B, T))
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), counter() as forward:
        model(ids_BT, ids_BT)
    measured = forward.get_total_flops() / (B * T)
    assert forward_flops_per_token(config, T) == pytest.approx(measured, rel=0.01)
    with sdpa_kernel(SDPBackend.MATH), counter() as both:
        model(ids_BT, ids_BT).loss_sum.backward()
    m, r = config.mamba3, config.m2rnn
    inner, heads = m.expand * config.dim, config.dim // (r.key_dim + r.value_dim)
    scores = 2 * inner // m.headdim * m.chunk_size * m.d_state * model.letters.count("M")
    states = 2 * heads * r.key_dim * r.value_dim**2 * model.letters.count("R")
    measured = both.get_total_flops() / (B * T) - scores - states
    assert train_flops_per_token(config, T) == pytest.approx(measured, rel=0.01)
