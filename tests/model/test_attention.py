"""A blocks: kernels against the definition, rotary, documents, decoding, dtypes, initialisation.

fp64 at 1e-12 compares two formulas of one thing; exact zeros are bitwise.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from megacpp.config import AttentionConfig, ModelConfig, YarnConfig
from megacpp.errors import ConfigError
from megacpp.kernels import attention as kernel
from megacpp.kernels import softcap_attention as softcap_kernel
from megacpp.model import rope
from megacpp.model.attention import GroupedQueryAttention
from megacpp.model.documents import Documents
from megacpp.model.fp32 import contract_parameters
from megacpp.model.init import Constant, Normal, initialise
from megacpp.model.mla import MultiHeadLatentAttention

SAME_FORMULA = 1e-12
LENGTHS = ((7, 1, 12, 3), (1, 1, 20, 1))  # documents of two packed rows of 23 tokens

GQA = AttentionConfig(num_heads=4, num_kv_heads=2, head_dim=8)
MLA = AttentionConfig(
    kind="mla",
    num_heads=3,
    q_lora_rank=10,
    kv_lora_rank=6,
    qk_nope_head_dim=5,  # odd: the rotary part starts at an odd column
    qk_rope_head_dim=4,
    v_head_dim=6,
)
KINDS = {
    "gqa": GQA,
    "gqa_norm": replace(GQA, qk_norm=True),
    "gqa_softcap": replace(GQA, softcap=2.0),
    "gqa_one_kv_head": replace(GQA, num_kv_heads=1, qk_norm=True, softcap=2.0),
    "gqa_yarn": replace(GQA, max_seq_len=64, yarn=YarnConfig(original_seq_len=16, factor=4.0)),
    "mla": MLA,
    "mla_softcap": replace(MLA, softcap=2.0),
    "mla_direct_queries": replace(MLA, q_lora_rank=0),
    "mla_wide_values": replace(MLA, v_head_dim=11),
}
every_kind = pytest.mark.parametrize("kind", KINDS)


def mixer(kind: str, dtype: torch.dtype = torch.float64) -> nn.Module:
    """A mixer with weights large enough that attention is far from uniform, and uneven norms."""
    config = ModelConfig(dim=16, depth=2, init_std=0.4, attention=KINDS[kind])
    mla = config.attention.kind == "mla"
    made = MultiHeadLatentAttention(config) if mla else GroupedQueryAttention(config)
    rules = {
        name: Normal(1.0) if isinstance(rule, Constant) else rule
        for name, rule in made.init_rules().items()
    }
    made.double()
    initialise(made, rules, seed=3)
    return made if dtype == torch.float64 else made.float().to(dtype)


def packed(lengths: tuple[tuple[int, ...], ...] = LENGTHS) -> Documents:
    rows = [torch.repeat_interleave(torch.arange(len(row)), torch.tensor(row)) for row in lengths]
    return Documents.from_ids(torch.stack(rows))


def noise(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def close(got: Tensor, want: Tensor, limit: float = SAME_FORMULA) -> None:
    error = (got - want).abs().max().item()
    assert error <= limit * max(1.0, want.abs().max().item()), f"{error:.2e}"


# --- kernels ---------------------------------------------------------------------------------


@pytest.mark.parametrize("softcap", [None, 1.5], ids=["plain", "softcap"])
@pytest.mark.parametrize("docs", [packed(), Documents.rows(2, 23)], ids=["packed", "whole"])
@pytest.mark.parametrize(
    "heads",
    [(4, 4, 6, 6), (4, 2, 6, 6), (4, 1, 8, 5), (2, 2, 4, 7)],
    ids=lambda h: "-".join(map(str, h)),
)
def test_fast_attention_is_the_definition(
    heads: tuple[int, int, int, int],
    docs: Documents,
    softcap: float | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(softcap_kernel, "BLOCK", 8)  # three blocks, the last one ragged
    num_q, num_kv, dim, value_dim = heads
    shapes = ((num_q, dim), (num_kv, dim), (num_kv, value_dim))
    qkv = [noise(2, 23, *s, seed=i).requires_grad_() for i, s in enumerate(shapes)]
    d_o = noise(2, 23, num_q, value_dim, seed=9)
    results = []
    for form in (kernel.attention_reference, kernel.causal_attention):
        o = form(*qkv, docs, 0.7, softcap)
        results.append((o, *torch.autograd.grad(o, qkv, d_o)))
    for want, got in zip(*results, strict=True):
        close(got, want)


@pytest.mark.parametrize("softcap", [None, 1.5], ids=["plain", "softcap"])
def test_fast_attention_is_the_definition_beyond_one_kernel_block(softcap: float | None) -> None:
    docs = packed(((130, 1, 420, 49),))  # SDPA on CPU takes 512 keys at a time
    q, k, v = noise(1, 600, 2, 4), noise(1, 600, 1, 4, seed=1), noise(1, 600, 1, 4, seed=2)
    want = kernel.attention_reference(q, k, v, docs, 0.5, softcap)
    close(kernel.causal_attention(q, k, v, docs, 0.5, softcap), want)


@pytest.mark.parametrize("softcap", [None, 1.5], ids=["plain", "softcap"])
def test_documents_are_isolated_beyond_one_kernel_block(softcap: float | None) -> None:
    docs, d_o = packed(((130, 1, 420, 49),)), noise(1, 600, 2, 4, dtype=torch.float32)
    other = torch.ones(600, dtype=torch.bool)
    other[131:551] = False
    runs = []
    for change in (0.0, 5.0):
        qkv = [noise(1, 600, n, 4, seed=n, dtype=torch.float32) for n in (4, 2, 2)]
        for t in qkv:
            t[:, 300] += change
            t.requires_grad_()
        o = kernel.causal_attention(*qkv, docs, 0.5, softcap)
        runs.append((o, *torch.autograd.grad(o, qkv, d_o.repeat(1, 1, 2, 1))))
    for before, after in zip(*runs, strict=True):
        assert torch.equal(before[:, other], after[:, other])
        assert not torch.equal(before[:, ~other], after[:, ~other])


def test_a_large_cap_is_no_cap() -> None:
    q, k, v, docs = (
        noise(2, 23, 2, 4),
        noise(2, 23, 2, 4, seed=1),
        noise(2, 23, 2, 4, seed=2),
        packed(),
    )
    capped = kernel.causal_attention(q, k, v, docs, 0.5, softcap=1e7)
    close(
        capped, kernel.causal_attention(q, k, v, docs, 0.5)
    )  # cap tanh(z / cap) - z ~ z^3 / cap^2


def test_queries_of_another_part_of_the_row_see_the_right_keys() -> None:
    """What context parallelism needs: some tokens' queries, all tokens' keys."""
    docs, q, kv = packed(), noise(2, 23, 2, 4), noise(2, 23, 2, 4, seed=1)
    part = torch.tensor([0, 1, 2, 17, 18, 22])
    mine = Documents(docs.ids_BT[:, part], docs.positions_BT[:, part])
    for softcap in (None, 1.5):
        want = kernel.causal_attention(q, kv, kv, docs, 0.5, softcap)[:, part]
        mask = kernel.document_mask(mine, docs)
        close(kernel.attend(q[:, part], kv, kv, 0.5, softcap, mask), want)


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


# --- rotary ----------------------------------------------------------------------------------


@pytest.mark.parametrize("start", [0, 1, 2], ids=["all", "odd_column", "even_column"])
def test_the_complex_product_is_the_rotation_written_out(start: int) -> None:
    table = rope.rotary_table(packed(), 6, GQA, torch.float64)
    x = noise(2, 23, 3, 6 + start).requires_grad_()
    d_y, results = noise(2, 23, 3, 6, seed=1), []
    for form in (rope.rotate_pairs, rope.rotate):
        y = form(x[..., start:], table)
        results.append((y, *torch.autograd.grad(y, x, d_y)))
    for want, got in zip(*results, strict=True):
        close(got, want)


def test_scores_depend_on_distance_only() -> None:
    q, k = noise(1, 1, 1, 8).expand(1, 40, 1, 8), noise(1, 1, 1, 8, seed=1).expand(1, 40, 1, 8)
    table = rope.rotary_table(Documents.rows(1, 40), 8, GQA, torch.float64)
    scores = (rope.rotate(q, table) @ rope.rotate(k, table)[0, 0, 0])[0, :, 0]
    later = (rope.rotate(q, table) @ rope.rotate(k, table)[0, 5, 0])[0, :, 0]
    close(later[5:], scores[:-5])


def test_angles_are_exact_far_out_and_never_narrow() -> None:
    far = Documents(torch.zeros(1, 1, dtype=torch.int64), torch.tensor([[1_000_003]]))
    table = rope.rotary_table(far, 8, GQA, torch.bfloat16)
    assert table.dtype == torch.float32
    want = [1_000_003 * 500_000.0 ** (-i / 4) for i in range(4)]
    got = table[0, 0].double()
    for pair, angle in enumerate(want):
        assert abs(got[pair, 0].item() - math.cos(angle)) < 1e-7  # fp32 rounding of the result
        assert abs(got[pair, 1].item() - math.sin(angle)) < 1e-7


def test_yarn_keeps_fast_pairs_and_stretches_slow_ones() -> None:
    yarn = YarnConfig(original_seq_len=4096, factor=40.0)
    plain = rope.inverse_frequencies(64, replace(MLA, rope_theta=1e4))
    config = replace(MLA, rope_theta=1e4, yarn=yarn, max_seq_len=4097)
    ratio = (rope.inverse_frequencies(64, config) / plain).tolist()
    # Pair i turns 4096 theta^(-i / 32) / 2 pi times: 32 times at i = 10.5, once at i = 22.5.
    assert ratio[:11] == [1.0] * 11
    assert all(abs(r - 1 / 40) < 1e-12 for r in ratio[23:])
    assert all(1 / 40 < r < 1.0 for r in ratio[11:23])
    assert abs(ratio[11] - (12 / 13 + 1 / 13 / 40)) < 1e-12
    mscale = 0.1 * math.log(40.0) + 1.0
    assert abs(rope.softmax_scale(192, config) - mscale**2 / math.sqrt(192)) < 1e-15
    short = replace(config, max_seq_len=4096)
    assert torch.equal(rope.inverse_frequencies(64, short), plain)
    assert rope.softmax_scale(192, short) == 192**-0.5


@pytest.mark.parametrize("kind", ["gqa", "mla"])
def test_mask_and_angles_are_made_once_a_batch(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []

    def counted(name: str, make: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def count(*args: object) -> Tensor:
            made.append(name)
            return make(*args)

        return count

    monkeypatch.setattr(kernel, "document_mask", counted("mask", kernel.document_mask))
    monkeypatch.setattr(rope, "_table", counted("angles", rope._table))
    docs, x = packed(), noise(2, 23, 16)
    for layer in (mixer(kind), mixer(kind)):
        layer(x, docs)
    assert sorted(made) == ["angles", "mask"]


# --- documents -------------------------------------------------------------------------------


@every_kind
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_a_changed_token_changes_nothing_in_other_documents(kind: str, dtype: torch.dtype) -> None:
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


def test_the_latent_cache_is_smaller_and_expands_to_the_same_keys() -> None:
    config = KINDS["mla"]
    block, x, docs = mixer("mla"), noise(2, 6, 16), Documents.rows(2, 6)
    state = block.init_state(2, x.device, x.dtype)
    for t in range(6):
        _, state = block.step(x[:, t], state)
    assert state.latent_BSL.shape == (2, 6, config.kv_lora_rank + config.qk_rope_head_dim)
    latent = block.latent(x, rope.rotary_table(docs, config.qk_rope_head_dim, config, x.dtype))
    split = state.latent_BSL.split((config.kv_lora_rank, config.qk_rope_head_dim), dim=-1)
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
