"""The model as a whole: all letters together, in fp64, against itself and against arithmetic.

Legend: B rows, T tokens of a row, D model.
"""

from __future__ import annotations

import dataclasses
import math
import re
from typing import Literal

import pytest
import torch
from torch import Tensor

from megacpp.blocks.experts.router import Router
from megacpp.config.checks.every import check, resolve
from megacpp.config.presets import PRESETS, nam56r_base
from megacpp.config.schema import Config, ModelConfig, PrecisionConfig
from megacpp.lessons.awake import awake
from megacpp.model.auxiliary import AuxiliarySource
from megacpp.model.count import count_parameters, meta_model, published_reading, short, table_lines
from megacpp.model.decoding import decode, init_state
from megacpp.model.documents import Documents
from megacpp.model.hybrid import HybridLM
from parallel.build import build_model
from parallel.mesh import World
from tests.figures import Record
from tests.model.small import small, variants
from tests.synthetic import ragged_batch

B, T = 2, 12
LENGTHS = [[3, 1, 5, 3], [1, 6, 1, 4]]  # documents of each row: short, long, single tokens


def build(config: ModelConfig, precision: Literal["fp64", "fp32"] = "fp64") -> HybridLM:
    """With weights large enough that every path carries signal."""
    config = dataclasses.replace(config, init_std=0.3)
    world = World(0, 1, torch.device("cpu"))
    with awake():
        return build_model(Config(model=config, precision=PrecisionConfig(precision)), world)


def packed() -> Documents:
    ids = [[i for i, n in enumerate(row) for _ in range(n)] for row in LENGTHS]
    return Documents.from_ids(torch.tensor(ids))


def tokens(seed: int = 0) -> Tensor:
    return torch.randint(50, (B, T), generator=torch.Generator().manual_seed(seed))


# ---- documents ----------------------------------------------------------------------------------


def outputs_and_input_gradients(
    model: HybridLM, ids_BT: Tensor, weights_BTD: Tensor
) -> tuple[Tensor, Tensor]:
    """Final hidden states, and the gradient of their weighted sum w.r.t. the embedded tokens."""
    embedded: list[Tensor] = []

    def keep(_module: object, _args: object, x_BTD: Tensor) -> Tensor:
        embedded.append(x_BTD.detach().requires_grad_())
        return embedded[0]

    hook = model.embed.register_forward_hook(keep)
    y_BTD = model.hidden(ids_BT, packed())
    hook.remove()
    (grad_BTD,) = torch.autograd.grad((y_BTD * weights_BTD).sum(), embedded)
    return y_BTD.detach(), grad_BTD


def with_document_losses(config: ModelConfig) -> ModelConfig:
    """Auxiliary losses that look at a document alone; the batch-wide one couples by design."""
    moe = dataclasses.replace(config.moe, sequence_loss=0.1, z_loss=0.1)
    return dataclasses.replace(config, moe=moe)


@pytest.mark.parametrize(
    ("name", "precision"), [*((name, "fp64") for name in variants()), ("plain", "fp32")]
)
def test_a_token_changes_nothing_in_other_documents(
    name: str, precision: Literal["fp64", "fp32"], record_property: Record
) -> None:
    """Outputs and input gradients of every other document move by exactly 0."""
    model = build(with_document_losses(variants()[name]), precision)
    for module in model.modules():
        if isinstance(module, Router):
            module.aux_scale.fill_(1.0)
    generator = torch.Generator().manual_seed(1)
    weights_BTD = torch.randn(B, T, 16, dtype=torch.float64, generator=generator)
    weights_BTD = weights_BTD.to(model.embed.weight.dtype)
    ids_BT, docs = tokens(), packed()
    y_BTD, grad_BTD = outputs_and_input_gradients(model, ids_BT, weights_BTD)
    for row, lengths in enumerate(LENGTHS):
        for document in range(len(lengths)):
            inside_BT = docs.ids_BT == document
            inside_BT[1 - row] = False
            changed_BT = torch.where(inside_BT, (ids_BT + 7) % 50, ids_BT)
            y2_BTD, grad2_BTD = outputs_and_input_gradients(model, changed_BT, weights_BTD)
            assert not torch.equal(y2_BTD[inside_BT], y_BTD[inside_BT])
            assert not torch.equal(grad2_BTD[inside_BT], grad_BTD[inside_BT])
            assert torch.equal(y2_BTD[~inside_BT], y_BTD[~inside_BT])
            assert torch.equal(grad2_BTD[~inside_BT], grad_BTD[~inside_BT])
    record_property("documents changed, all others and their gradients moved by exactly 0", 1)


@pytest.mark.parametrize("name", variants())
def test_a_packed_row_is_its_documents_one_by_one(name: str) -> None:
    """1e-12: the same formula on another shape, so sums may run in another order."""
    model, ids_BT = build(variants()[name]).eval(), tokens()
    y_BTD = model.hidden(ids_BT, packed())
    for row, lengths in enumerate(LENGTHS):
        ends = torch.tensor(lengths).cumsum(0).tolist()
        for start, end in zip([0, *ends], ends, strict=False):
            alone = model.hidden(ids_BT[row : row + 1, start:end])
            torch.testing.assert_close(alone[0], y_BTD[row, start:end], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", variants())
def test_rows_are_independent(name: str) -> None:
    model, ids_BT = build(variants()[name]).eval(), tokens()
    y_BTD = model.hidden(ids_BT)
    for row in range(B):
        alone = model.hidden(ids_BT[row : row + 1])
        torch.testing.assert_close(alone[0], y_BTD[row], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(model.hidden(ids_BT.flip(0)), y_BTD.flip(0), rtol=1e-12, atol=1e-12)
    other = model.hidden(torch.stack([ids_BT[0], tokens(seed=5)[1]]))
    assert torch.equal(other[0], y_BTD[0]), "a token of another row changes exactly nothing"


def test_the_future_changes_nothing() -> None:
    model, ids_BT = build(small()).eval(), tokens()
    y_BTD = model.hidden(ids_BT)
    for t in range(1, T):
        later_BT = ids_BT.clone()
        later_BT[:, t:] = (later_BT[:, t:] + 3) % 50
        assert torch.equal(model.hidden(later_BT)[:, :t], y_BTD[:, :t])


# ---- decoding -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", variants())
def test_step_is_forward(name: str) -> None:
    model, ids_BT = build(variants()[name]).eval(), tokens()
    logits_BTV = model.head.logits(model.hidden(ids_BT))
    state = init_state(model, B, torch.device("cpu"), torch.float64)
    for t in range(T):
        logits_BV, state = decode(model, ids_BT[:, t], state)
        torch.testing.assert_close(logits_BV, logits_BTV[:, t], rtol=1e-12, atol=1e-12)


def test_loss_is_cross_entropy_of_the_logits() -> None:
    config = dataclasses.replace(small(), logit_softcap=5.0, z_loss=1e-2)
    model, batch = build(config), ragged_batch([0, 1, 2, 3])
    out = model(batch.ids_BT, batch.labels_BT, batch.docs)
    logits_BTV = model.head.logits(model.hidden(batch.ids_BT, batch.docs))
    valid_BT = batch.labels_BT != -100
    log_z_BT = logits_BTV.logsumexp(-1)
    chosen_BT = logits_BTV.gather(-1, batch.labels_BT.clamp(min=0)[..., None])[..., 0]
    nll = (log_z_BT - chosen_BT)[valid_BT].sum()
    assert out.valid_tokens.item() == batch.num_targets == valid_BT.sum().item()
    torch.testing.assert_close(out.nll_sum, nll.detach(), rtol=1e-12, atol=0)
    with_z = nll + 1e-2 * log_z_BT[valid_BT].square().sum()
    torch.testing.assert_close(out.loss_sum, with_z, rtol=1e-12, atol=0)


# ---- gradients ----------------------------------------------------------------------------------


def smooth(config: ModelConfig) -> ModelConfig:
    """Without the state-gradient clip of M2RNN, which is no derivative by design."""
    m2rnn = dataclasses.replace(config.m2rnn, gradient_clip=None)
    moe = dataclasses.replace(config.moe, sequence_loss=0.05, z_loss=0.05)
    return dataclasses.replace(config, m2rnn=m2rnn, moe=moe, logit_softcap=8.0, z_loss=1e-3)


# Of a variant, the parts whose gradients its options change; of the plain model, all.
CHANGED_PART: dict[str, str | tuple[str, ...]] = {
    "top": ("top", "embed", "ngram.proj"),  # zero: it hides the tables at first
    "plain": "",
    "tied": "embed",
    "mla": "blocks.0",
    "gqa": "blocks.0",
    "mamba": "blocks.1",
    "moe": "blocks.2",
    "m2rnn": "blocks.3",
    "mlp": "blocks.4",
    "engram": "blocks.0.engram",
    "gated": "blocks.0",
}


@pytest.mark.parametrize("name", variants())
def test_gradients_are_finite_differences(name: str) -> None:
    """Every parameter tensor, along one random direction each.

    The objective is the loss plus what others attach to it. Error of a central difference:
    1e-16 / h of rounding and h^2 of curvature, each a few 1e-9 at h = 1e-5 and values near 1.
    """
    model, batch = build(smooth(variants()[name])), ragged_batch([0, 1, 2])
    sources = [m for m in model.modules() if isinstance(m, AuxiliarySource)]
    # An indexer's loss changes with what it doesn't teach.
    sources = [source for source in sources if "indexer" not in source.auxiliary]
    scale = 0.37
    for source in sources:
        source.aux_scale.fill_(scale)

    def objective() -> Tensor:
        for source in sources:
            source.forget()
        loss = model(batch.ids_BT, batch.labels_BT, batch.docs).loss_sum
        auxiliary = torch.stack([source.loss_sums for source in sources]).sum() if sources else 0.0
        return loss + scale * auxiliary

    objective().backward()
    generator, h = torch.Generator().manual_seed(2), 1e-5
    part = CHANGED_PART[name.split("_")[0]]
    for key, p in model.named_parameters():
        if not key.startswith(part) or "indexer" in key:  # which learns from a loss of its own
            continue
        assert p.grad is not None, key
        direction = torch.randn(p.shape, dtype=p.dtype, generator=generator)
        direction /= direction.norm()
        original, values = p.detach().clone(), []
        for sign in (1, -1):
            with torch.no_grad():
                p.copy_(original + sign * h * direction)
            values.append(objective().item())
        with torch.no_grad():
            p.copy_(original)
        slope, exact = (values[0] - values[1]) / (2 * h), (p.grad * direction).sum().item()
        assert abs(slope - exact) < 1e-6 * max(1.0, p.grad.norm().item()), key
        assert p.grad.norm() > 0, f"{key} learns nothing"


def test_tied_embeddings_are_one_parameter() -> None:
    """Its gradient is the sum of what the embedding and the head get in an untied twin."""
    tied, untied = build(variants()["tied"]), build(small())
    assert tied.head.weight is tied.embed.weight
    assert "head.weight" not in dict(tied.named_parameters())
    with torch.no_grad():
        untied.head.weight.copy_(untied.embed.weight)
    batch = ragged_batch([0, 1, 2])
    for model in (tied, untied):
        model(batch.ids_BT, batch.labels_BT, batch.docs).loss_sum.backward()
    into, out = untied.embed.weight.grad, untied.head.weight.grad
    assert into is not None and into.norm() > 0 and out is not None and out.norm() > 0
    assert tied.embed.weight.grad is not None
    torch.testing.assert_close(tied.embed.weight.grad, into + out, rtol=1e-12, atol=1e-12)


def test_a_tie_survives_moves_and_casts() -> None:
    model = meta_model(variants()["tied"])
    for change in (
        lambda m: m.to(torch.float64),
        lambda m: m.to_empty(device="cpu"),
        lambda m: m.to(torch.bfloat16),
        lambda m: m.to("meta"),
    ):
        assert change(model).head.weight is model.embed.weight


# ---- sizes --------------------------------------------------------------------------------------


def test_the_published_reading_of_nam56r() -> None:
    """4.73B total and 3.03B active, with M and R both counted as Mamba-2 style mixers.

    Both have three digits, so their difference, the idle experts, is known to 0.01B: the reading
    meets it, with 6M to 11M parameters too many (0.13 % of one figure, 0.35 % of the other).
    """
    count = published_reading(nam56r_base().model)
    assert count.total == pytest.approx(4.73e9, rel=3e-3)
    assert count.active == pytest.approx(3.03e9, rel=4e-3)
    assert count.total - count.active == 22 * 12 * 2 * 3584 * 896 == pytest.approx(1.70e9, abs=1e7)


def test_counts_by_hand() -> None:
    """One layer of each letter, spelled out."""
    D, V = 16, 50
    attention = D * 4 * 8 * 2 + D * 2 * 8 * 2 + 2 * 8 + D
    heads, state = 4, 8
    mamba = D * (2 * 32 + 2 * state + 3 * heads + 2) + 32 * D + 2 * heads + 2 * heads * state
    mamba += 2 * state + D
    experts, shared = 4 * 3 * D * 12, 3 * D * 20
    m2rnn = D * (2 * 6 + 2 * 4 + 1) + (2 * 6 + 4) * 4 + 4 * 4 + 4 + 1 + 1 + 4 + 4 * D + D
    by_kind = {
        "embed": V * D,
        "A": attention,
        "M": mamba,
        "E": experts + shared + 4 * D + D,
        "R": m2rnn,
        "F": 3 * D * 24 + D,
        "norm": D,
        "head": V * D,
    }
    count = count_parameters(small())
    assert count.by_kind == by_kind
    assert count.total == sum(by_kind.values())
    assert count.active == count.total - experts // 2
    tied = count_parameters(variants()["tied"])
    assert tied.total == count.total - V * D and "head" not in tied.by_kind


@pytest.mark.parametrize("name", PRESETS)
def test_headlines_of_the_presets(name: str) -> None:
    """`X parameters / Y active` in the docstring, to the digits that are written there."""
    headline = (PRESETS[name].__doc__ or "").strip().splitlines()[0]
    found = re.match(r"([\d.]+)([KMB]) parameters / ([\d.]+)([KMB]) active; ", headline)
    assert found, headline
    count = count_parameters(PRESETS[name]().model)
    for digits, unit, exact in (
        (found[1], found[2], count.total),
        (found[3], found[4], count.active),
    ):
        value, size = float(digits), {"K": 1e3, "M": 1e6, "B": 1e9}[unit]
        significant = len(digits.replace(".", ""))
        assert significant <= 3
        rounded = float(f"{exact / size:.{significant}g}")
        assert value == rounded, f"{name}: {digits}{unit} stands for {exact:,}"


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("world_size", [1, 2, 4, 8])
def test_every_preset_passes_the_rules(name: str, world_size: int) -> None:
    config = PRESETS[name]()
    assert config.preset == name
    check(config, world_size)
    final = resolve(config, world_size)
    check(final, world_size)
    if config.train.tokens_per_step:
        assert final.train.tokens_per_step == config.train.tokens_per_step


def test_sizes_by_name() -> None:
    """What a preset's name promises."""
    assert count_parameters(PRESETS["hybrid_400m"]().model).total == pytest.approx(4e8, rel=0.01)
    assert count_parameters(PRESETS["dense_110m"]().model).total == pytest.approx(1.1e8, rel=0.05)
    letters = [meta_model(PRESETS[n]().model).letters for n in ("nam56r_base", "nam56r_quarter")]
    assert len(letters[0]) == 4 * len(letters[1]) and letters[0].startswith(letters[1])


@pytest.mark.parametrize(
    ("number", "text"),
    [(999, "999"), (1000, "1K"), (64_000, "64K"), (113_266_944, "113M"), (4_736_000_000, "4.74B"),
     (999_999, "1M"), (999_999_999, "1B"), (12_345, "12.3K")],
)  # fmt: skip
def test_short_numbers(number: int, text: str) -> None:
    assert short(number) == text


def test_the_table_names_every_kind() -> None:
    lines = "\n".join(table_lines(small()))
    for word in ("attention", "Mamba-3", "mixture of experts", "M2RNN", "dense", "embed", "head"):
        assert word in lines
    assert math.isclose(sum(count_parameters(small()).by_kind.values()), _sum_of_table(lines))


def _sum_of_table(lines: str) -> int:
    return sum(int(x.replace(",", "")) for x in re.findall(r"([\d,]+) parameters$", lines, re.M))
