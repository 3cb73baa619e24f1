"""Numbers that a published account of a 4B hybrid works out, and what the real trainer needs.

Each test reckons the published figure by its own formula, then says what the estimate of the
trainer gives beside it, and why they differ where they do.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from megacpp.config.presets import nam52_deep_base
from megacpp.config.schema import ModelConfig
from megacpp.memory.estimate import MemoryEstimate, estimate_memory
from tests.memory.literature import (
    dispatch_bytes,
    expert_capacity,
    hybrid_activations,
    optimizer_state,
    router_bytes,
    transformer_activations,
)

MODEL = nam52_deep_base().model  # width 1536, 52 layers of which 22 are E, 64 experts, top 6
GB = 1e9


def with_moe(**changes: float) -> ModelConfig:
    return replace(MODEL, moe=replace(MODEL.moe, **changes))  # type: ignore[arg-type]


def estimate_of(model: ModelConfig = MODEL, ep: int = 1, tokens: int = 4096) -> MemoryEstimate:
    return estimate_memory(model, 8, ep_degree=ep, seq_len=tokens, grad_checkpoint=False)


def test_activations_of_a_dense_model_of_that_size() -> None:
    """11.1 GB; with an M layer for two 13.9. Ours by kind: an M layer keeps one and a half of the
    formula's (states of chunks, what the scan reads), A and E less than half: fused kernels.
    """
    published = transformer_activations(1, 4096, 1536, 52)
    assert published / GB == pytest.approx(11.1, abs=0.05)
    with_scan = hybrid_activations(1, 4096, 1536, 52, mamba_layers=13)
    assert with_scan == 1.25 * published
    found, layer = estimate_of().detail, published / 52
    kept = found["activations"]
    ours = sum(kept.values()) + found["moe_routing"]["kept"]
    assert 1.4 * layer < kept["M"] / 13 < 2 * layer
    assert kept["A"] / 13 < layer / 2 and kept["E"] / 22 < layer / 2
    assert ours < published < with_scan


def test_dispatch_of_an_expert_layer() -> None:
    """189 MB, 47 MB on four ranks that share the tokens; here each rank brings its own tokens."""
    assert dispatch_bytes(4096, 1536, 6, 64, 1.25) / 1e6 == pytest.approx(189, abs=1)
    assert dispatch_bytes(4096, 1536, 6, 64, 1.25, ep=4) / 1e6 == pytest.approx(47, abs=0.5)
    assert 22 * dispatch_bytes(4096, 1536, 6, 64, 1.25) / GB == pytest.approx(4.15, abs=0.01)
    assert 22 * dispatch_bytes(4096, 1536, 6, 64, 1.25, ep=4) / GB == pytest.approx(1.04, abs=0.01)
    for ep in (1, 4):
        routing = estimate_of(ep=ep).detail["moe_routing"]
        ours = routing["gathered inputs"] + routing["expert outputs"]
        assert ours == dispatch_bytes(4096, 1536, 6, 64, 1.25)


def test_optimizer_state_of_four_billion_parameters() -> None:
    """32 against 8 GB; a model's embedding and head stay with AdamW, so Muon saves less."""
    assert optimizer_state(4_000_000_000) == 32 * 10**9
    assert optimizer_state(4_000_000_000, muon_share=1.0) == 8 * 10**9
    muon = estimate_of().detail["optimizer_state"]
    adamw = estimate_memory(MODEL, 8, optimizer="adamw").detail["optimizer_state"]
    moved = sum(n for name, n in muon.items() if name.startswith("muon")) // 2
    rest = sum(n for name, n in muon.items() if name.startswith("adamw")) // 8
    assert sum(adamw.values()) == pytest.approx(optimizer_state(moved + rest), rel=1e-4)
    assert sum(muon.values()) == pytest.approx(
        optimizer_state(moved + rest, moved / (moved + rest)), rel=1e-4
    )
    assert 0.9 < moved / (moved + rest) < 1


def test_capacity_factor_is_paid_in_routing_memory() -> None:
    """A quarter more from 1.0 to 1.25, by the formula; in rows that are kept, here too."""
    one, more = (dispatch_bytes(4096, 1536, 6, 64, factor) for factor in (1.0, 1.25))
    assert more == 1.25 * one
    rows = [estimate_of(with_moe(capacity_factor=f)).detail["moe_routing"] for f in (1.0, 1.25)]
    assert rows[1]["gathered inputs"] == 1.25 * rows[0]["gathered inputs"]


def test_more_experts_are_parameters_not_dispatch() -> None:
    """64 to 128: weights double, rows don't move, router logits double."""
    few, many = estimate_of(), estimate_of(with_moe(num_experts=128))
    assert dispatch_bytes(4096, 1536, 6, 128, 1.25) == dispatch_bytes(4096, 1536, 6, 64, 1.25)
    assert expert_capacity(4096, 6, 128, 1.25) == expert_capacity(4096, 6, 64, 1.25) / 2
    experts = [found.detail["parameters"]["muon experts"] for found in (few, many)]
    assert experts[1] == 2 * experts[0]
    routing = [found.detail["moe_routing"] for found in (few, many)]
    assert routing[0]["gathered inputs"] == routing[1]["gathered inputs"]
    assert routing[1]["router logits"] == 2 * routing[0]["router logits"]
    assert routing[0]["router logits"] == router_bytes(4096, 64)


def test_four_times_the_tokens() -> None:
    """Linear, in the formula and here, but for what is stored once."""
    assert transformer_activations(1, 16384, 1536, 52) == 4 * transformer_activations(
        1, 4096, 1536, 52
    )
    short, long = estimate_of(), estimate_of(tokens=16384)
    for part in ("activations", "moe_routing"):
        before, after = (sum(found.detail[part].values()) for found in (short, long))
        assert after == pytest.approx(4 * before, rel=2e-3)
