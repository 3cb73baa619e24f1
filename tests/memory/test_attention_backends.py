"""Estimates of attention by its backends: who has a mask, who expands, who pads."""

from dataclasses import replace

import pytest

from megacpp.blocks.attention.config import AttentionConfig
from megacpp.config.presets import tiny
from megacpp.config.schema import Config, KernelsConfig
from megacpp.memory.forms.batch import mask_bytes
from megacpp.memory.forms.local_shapes import LocalShapes
from megacpp.memory.forms.traced import TracedPart, traced_kept

GQA = AttentionConfig(num_heads=8, num_kv_heads=2, head_dim=64)
MLA = AttentionConfig(
    kind="mla", num_heads=8, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128
)
GENERATOR = 16  # bytes: torch's kernel for packed rows keeps the state of a generator


def share(config: AttentionConfig, backend: str, device: str = "cuda") -> LocalShapes:
    base: Config = tiny()
    named = KernelsConfig(attention=backend)  # type: ignore[arg-type]
    run = replace(
        base,
        model=replace(base.model, attention=config, pattern="A", depth=2),
        kernels=named,
        train=replace(base.train, device=device, device_batch_size=2),
        data=replace(base.data, seq_len=4096),
        precision=replace(base.precision, dtype="bf16"),
    )
    return LocalShapes.on_rank(run, 1, 0)


def kept(own: LocalShapes) -> int:
    return sum(traced_kept(own, TracedPart(("A",), last=True)).values())


def test_only_torch_has_a_mask() -> None:
    found = {b: mask_bytes(share(GQA, b), ["A"]) for b in ("torch", "varlen", "flex")}
    pairs = 2 * 4096 * 4096  # queries and keys of two rows: bool, and in bf16
    assert found["torch"] - found["varlen"] == pairs * 3
    assert 0 < found["flex"] - found["varlen"] < pairs // 100


def test_masked_kernels_on_cuda_keep_keys_and_values_of_all_heads() -> None:
    more = kept(share(GQA, "torch")) - kept(share(GQA, "varlen"))
    assert more == 2 * 4096 * 2 * (8 - 2) * 64 * 2 - GENERATOR
    assert kept(share(GQA, "torch", "cpu")) == kept(share(GQA, "flex"))
    every = replace(GQA, num_kv_heads=8)
    assert kept(share(every, "torch")) == kept(share(every, "varlen")) - GENERATOR


@pytest.mark.parametrize("backend", ["flex", "torch"])
def test_zero_columns_cost_what_they_hold(backend: str) -> None:
    """Values 64 numbers wider, an output of 192 beside the one of 128."""
    more = kept(share(MLA, "varlen_padded")) - kept(share(MLA, backend))
    assert more == 2 * 4096 * 8 * (64 + 192) * 2 + GENERATOR
