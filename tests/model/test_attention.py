"""A blocks of every kind: formula, documents, decoding, dtypes, memory, initialisation.

fp64 at 1e-12 compares two formulas of one thing; exact zeros are bitwise.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from megacpp.blocks.attention import rope
from megacpp.blocks.attention.config import AttentionConfig
from megacpp.blocks.attention.gqa import GroupedQueryAttention
from megacpp.blocks.attention.mla import MultiHeadLatentAttention
from megacpp.config.schema import ModelConfig
from megacpp.errors import ConfigError
from megacpp.kernels.attention import causal as kernel
from megacpp.kernels.attention.reference import attention_reference
from megacpp.model.documents import Documents
from megacpp.model.fp32 import contract_parameters
from megacpp.model.init import Constant, Normal, initialise
from tests.figures import Record
from tests.model.attention_cases import GQA, KINDS, LENGTHS, MLA, close, mixer, noise, packed

every_kind = pytest.mark.parametrize("kind", KINDS)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind.startswith("gqa")])
def test_grouped_query_attention_is_its_formula(kind: str) -> None:
    """MLA's formula is DeepSeek-V3's own code: tests/golden/check_mla.py."""
    block, config, docs, x = mixer(kind), KINDS[kind], packed(), noise(2, 23, 16)

    def heads(name: str) -> Tensor:
        weight = block.get_parameter(f"{name}.weight")
        return (x @ weight.mT).reshape(2, 23, -1, config.head_dim)

    def prepared(name: str) -> Tensor:
        t = heads(f"w{name}")
        if config.qk_norm:
            t = t / (t.square().mean(-1, keepdim=True) + 1e-5).sqrt()
            t = t * block.get_parameter(f"{name}_norm.weight")
        frequency = rope.inverse_frequencies(config.head_dim, config)
        angle = docs.positions_BT[:, :, None, None] * frequency
        turned = torch.complex(t[..., 0::2], t[..., 1::2]) * torch.exp(1j * angle)
        return torch.stack((turned.real, turned.imag), -1).flatten(-2)

    scale = rope.softmax_scale(config.head_dim, config)
    qkv = (prepared("q"), prepared("k"), heads("wv"))
    o = attention_reference(*qkv, docs, scale, config.softcap)
    close(block(x, docs), o.reshape(2, 23, -1) @ block.get_parameter("wo.weight").mT)


# --- memory ----------------------------------------------------------------------------------


@every_kind
@pytest.mark.parametrize(
    "docs", [packed(((100, 60),)), Documents.rows(1, 160)], ids=["packed", "whole"]
)
def test_nothing_of_size_tokens_squared_is_kept_for_backward(kind: str, docs: Documents) -> None:
    """Only the mask is, and all layers share that one."""
    block, x = mixer(kind, torch.float32), noise(1, 160, 16, dtype=torch.float32).requires_grad_()
    block(x, docs)
    shared = {t.data_ptr() for t in docs._memo.values() if isinstance(t, Tensor)}
    sizes: list[int] = []

    def keep(t: Tensor) -> Tensor:
        if t.data_ptr() not in shared:
            sizes.append(t.numel())
        return t

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        block(x, docs)
    assert sizes and max(sizes) < 160 * 160, max(sizes)


@pytest.mark.parametrize("kind", ["gqa", "mla"])
def test_mask_and_angles_are_made_once_a_batch(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []

    def counted(name: str, make: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def count(*args: object) -> Tensor:
            made.append(name)
            return make(*args)

        return count

    monkeypatch.setattr(kernel, "document_mask", counted("mask", kernel.document_mask))
    monkeypatch.setattr(rope, "angle_table", counted("angles", rope.angle_table))
    docs, x = packed(), noise(2, 23, 16)
    for layer in (mixer(kind), mixer(kind)):
        layer(x, docs)
    assert sorted(made) == ["angles", "mask"]


# --- documents -------------------------------------------------------------------------------


@every_kind
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_a_changed_token_changes_nothing_in_other_documents(
    kind: str, dtype: torch.dtype, record_property: Record
) -> None:
    block, docs = mixer(kind, dtype), packed()
    x, d_y = noise(2, 23, 16, dtype=dtype), noise(2, 23, 16, seed=1, dtype=dtype)
    runs = []
    for change in (0.0, 3.0):
        changed = x.clone()
        changed[0, 10] += change  # the third document of the first row
        changed.requires_grad_()
        y = block(changed, docs)
        y.backward(d_y)
        runs.append((y.detach(), changed.grad))
    other = torch.ones(2, 23, dtype=torch.bool)
    other[0, 8:20] = False
    for before, after in zip(*runs, strict=True):
        assert torch.equal(before[other], after[other])
        assert not torch.equal(before[~other], after[~other])
    record_property("documents changed, all others and their gradients moved by exactly 0", 1)


@every_kind
def test_gradients_stay_inside_the_document(kind: str) -> None:
    block, x = mixer(kind), noise(2, 23, 16).requires_grad_()
    block(x, packed())[0, 8:20].square().sum().backward()
    inside = torch.zeros(2, 23, dtype=torch.bool)
    inside[0, 8:20] = True
    assert x.grad is not None and torch.count_nonzero(x.grad[~inside]) == 0
    assert torch.count_nonzero(x.grad[inside]) == x.grad[inside].numel()


@every_kind
def test_a_packed_document_is_the_document_alone(kind: str) -> None:
    block, x = mixer(kind), noise(2, 23, 16)
    y = block(x, packed())
    for row, lengths in enumerate(LENGTHS):
        start = 0
        for length in lengths:
            alone = slice(start, start + length)
            close(y[row, alone], block(x[row : row + 1, alone])[0])
            start += length


# --- decoding --------------------------------------------------------------------------------


@every_kind
def test_decoding_is_forward(kind: str) -> None:
    """For MLA this is also the absorbed form against the expanded one."""
    block, x = mixer(kind), noise(2, 23, 16)
    state, tokens = block.init_state(2, x.device, x.dtype), []
    for t in range(23):
        y_BD, state = block.step(x[:, t], state)
        tokens.append(y_BD)
    close(torch.stack(tokens, 1), block(x))


@every_kind
def test_a_state_continues_twice(kind: str) -> None:
    block, x = mixer(kind), noise(2, 5, 16)
    state = block.init_state(2, x.device, x.dtype)
    for t in range(3):
        _, state = block.step(x[:, t], state)
    first, _ = block.step(x[:, 3], state)
    block.step(x[:, 4], state)
    again, _ = block.step(x[:, 3], state)
    assert torch.equal(first, again)


def test_cached_keys_and_values_are_those_of_forward() -> None:
    block, x = mixer("gqa_norm"), noise(2, 6, 16)
    state = block.init_state(2, x.device, x.dtype)
    for t in range(6):
        _, state = block.step(x[:, t], state)
    seen: list[Tensor] = []
    block.inner.register_forward_pre_hook(lambda _, args: seen.extend(args[1:3]))
    block(x)
    for got, want in zip(state.parts_BS, seen, strict=True):
        close(got, want)


def test_the_latent_cache_is_smaller_and_expands_to_the_same_keys() -> None:
    config = KINDS["mla"]
    block, x, docs = mixer("mla"), noise(2, 6, 16), Documents.rows(2, 6)
    state = block.init_state(2, x.device, x.dtype)
    for t in range(6):
        _, state = block.step(x[:, t], state)
    (latent_BSL,) = state.parts_BS
    assert latent_BSL.shape == (2, 6, config.kv_lora_rank + config.qk_rope_head_dim)
    latent = block.latent(x, rope.rotary_table(docs, config.qk_rope_head_dim, config, x.dtype))
    split = latent_BSL.split((config.kv_lora_rank, config.qk_rope_head_dim), dim=-1)
    for got, want in zip(block.expand_kv(*split), block.expand_kv(*latent), strict=True):
        close(got, want)


# --- dtypes ----------------------------------------------------------------------------------


@every_kind
@pytest.mark.parametrize("how", ["fp32", "bf16_weights", "autocast"])
def test_dtypes(kind: str, how: str) -> None:
    """fp32 agrees to 1e-5; bf16 to six roundings of at most 2^-8 (x, q, k, v, p, o)."""
    want = mixer(kind)(noise(2, 23, 16), packed())
    block = mixer(kind, torch.bfloat16 if how == "bf16_weights" else torch.float32)
    x = noise(2, 23, 16, dtype=torch.bfloat16 if how == "bf16_weights" else torch.float32)
    x.requires_grad_()
    with torch.autocast("cpu", torch.bfloat16, enabled=how == "autocast"):
        y = block(x, packed())
        state = block.init_state(2, x.device, x.dtype)
        stepped, _ = block.step(x[:, 0], state)
    y.sum().backward()
    assert y.dtype == stepped.dtype == x.dtype and x.grad is not None and x.grad.dtype == x.dtype
    assert all(p.dtype == torch.float32 for _, p in contract_parameters(block))
    assert all(p.grad is not None and p.grad.dtype == p.dtype for p in block.parameters())
    error = ((y.double() - want).norm() / want.norm()).item()
    assert error < (1e-5 if how == "fp32" else 6 * 2.0**-8), error


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gqa", "gqa_softcap", "mla"])
def test_the_compiler_takes_the_same_function(kind: str) -> None:
    block, x, d_y, results = mixer(kind), noise(2, 23, 16).requires_grad_(), noise(2, 23, 16), []
    for form in (block, torch.compile(block, backend="aot_eager", fullgraph=True)):
        y = form(x, packed())
        results.append((y, *torch.autograd.grad(y, (x, *block.parameters()), d_y)))
    for want, got in zip(*results, strict=True):
        close(got, want)


# --- initial values and rules ----------------------------------------------------------------


@every_kind
def test_rules_cover_every_tensor(kind: str) -> None:
    config = ModelConfig(dim=16, depth=8, init_std=0.3, attention=KINDS[kind])
    mla = config.attention.kind == "mla"
    with torch.device("meta"):
        block = MultiHeadLatentAttention(config) if mla else GroupedQueryAttention(config)
    block.to_empty(device="cpu")
    rules = block.init_rules()
    initialise(block, rules, seed=1)  # asserts exact cover
    for name, rule in rules.items():
        if name.endswith("norm.weight"):
            assert rule == Constant(1.0)
        else:
            assert rule == Normal(0.3 / 4.0 if name == "wo.weight" else 0.3), name


@pytest.mark.parametrize(
    ("attention", "said"),
    [
        (replace(GQA, num_kv_heads=3), "model.attention.num_kv_heads=3: must divide"),
        (replace(GQA, head_dim=7), "model.attention.head_dim=7: rotary turns pairs"),
        (replace(MLA, qk_rope_head_dim=3), "model.attention.qk_rope_head_dim=3: rotary"),
        (replace(GQA, softcap=0.0), "model.attention.softcap=0.0: must be above 0"),
    ],
)
def test_settings_that_cannot_work_are_refused(attention: AttentionConfig, said: str) -> None:
    config = ModelConfig(dim=16, attention=attention)
    with pytest.raises(ConfigError, match=said):
        MultiHeadLatentAttention(config) if attention.kind == "mla" else GroupedQueryAttention(
            config
        )
