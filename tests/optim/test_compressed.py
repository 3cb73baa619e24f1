"""Weights that move through a latent: the update, redraws, state that goes on."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from checkpointing.compress import Projection, compress_linears
from megacpp.config.schema import KEEP, Config, OptimConfig
from megacpp.errors import CheckpointError
from megacpp.model.hybrid import HybridLM
from megacpp.model.init import initialise
from optim.build import build_optimizer, describe, groups
from optim.clip import clip_gradients
from optim.compressed import LowRankUpdate
from optim.groups import TABLE, assign
from optim.initial_state import StateKind
from optim.muon_adamw import MuonAdamW
from tests.optim.test_groups import MLA, SMALL

CPU, F64 = torch.device("cpu"), torch.float64
HYPER: dict[str, Any] = {"lr": 0.1, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.2}
CONFIG = Config(
    model=SMALL,
    recompute=replace(KEEP, compress=0.25, compress_redraw=3),
    optim=OptimConfig(),
)


def pair(
    rows: int = 10, width: int = 24, projected: int = 6, dtype: torch.dtype = F64
) -> LowRankUpdate:
    torch.manual_seed(0)
    weight = nn.Parameter(torch.randn(rows, width, dtype=dtype), requires_grad=False)
    latent = nn.Parameter(torch.zeros(rows, projected, dtype=dtype))
    return LowRankUpdate(weight, latent, Projection("x", width, projected, seed=3))


def optimizer_of(
    fold: LowRankUpdate, every: int = 0, kind: StateKind = "fp32", **more: Any
) -> MuonAdamW:
    group = {"params": [("x.latent", fold.latent)], "algorithm": "adamw", "folds": [fold]}
    return MuonAdamW([{**group, **HYPER, **more}], adamw_state=kind, redraw_every=every)


def gradient(step: int, like: Tensor) -> Tensor:
    return torch.randn(like.shape, generator=torch.Generator().manual_seed(step), dtype=like.dtype)


@pytest.mark.parametrize("lr", [0.1, torch.tensor(0.1, dtype=F64)], ids=["float", "tensor"])
def test_a_step_in_terms_of_the_weight(lr: Any) -> None:
    """torch's AdamW of the latent alone, then (1 - lr decay) W + S P^T."""
    fold = pair()
    optimizer = optimizer_of(fold, lr=lr)
    expected, free = fold.weight.detach().clone(), nn.Parameter(fold.latent.detach().clone())
    plain = torch.optim.AdamW([free], **{**HYPER, "weight_decay": 0.0})
    for step in range(4):
        fold.latent.grad = gradient(step, fold.latent)
        free.grad = fold.latent.grad.clone()
        free.data.zero_()
        optimizer.step()
        plain.step()
        p_DZ = fold.projection.matrix(F64, CPU)
        expected = (1 - 0.1 * 0.2) * expected + free.detach() @ p_DZ.t()
        assert not fold.latent.any()
        assert (fold.weight - expected).abs().max() <= 1e-12


def test_cautious_decay_asks_the_weight() -> None:
    """Entries decay where the update brings them nearer to zero, the others don't."""
    fold, other = pair(), pair()
    before = fold.weight.detach().clone()
    for some, cautious in ((fold, True), (other, False)):
        some.latent.grad = gradient(0, some.latent)
        optimizer_of(some, cautious=cautious).step()
    update = other.weight - before * (1 - 0.1 * 0.2)
    shrinks = update * before <= 0
    expected = before + update - torch.where(shrinks, before, 0) * 0.1 * 0.2
    assert 0.2 < shrinks.double().mean() < 0.8
    assert (fold.weight - expected).abs().max() <= 1e-12


def test_without_a_gradient_nothing_moves() -> None:
    fold = pair()
    before, optimizer = fold.weight.detach().clone(), optimizer_of(fold, every=1)
    optimizer.step()
    assert torch.equal(fold.weight, before) and fold.updates == fold.projection.number == 0


@pytest.mark.parametrize("kind", ["fp32", "8bit", "4bit"])
def test_a_redraw_keeps_what_is_true_of_any_projection(kind: StateKind) -> None:
    """After every third step: no first moment, of the second one the mean of each row."""
    if kind != "fp32":
        pytest.importorskip("torchao")
    fold = pair(64, 512, 128, torch.float32)
    optimizer, plain = optimizer_of(fold, every=3, kind=kind), pair(64, 512, 128, torch.float32)
    other = optimizer_of(plain, kind=kind)
    for step in range(3):
        assert fold.projection.number == 0
        assert torch.equal(fold.weight, plain.weight)
        fold.latent.grad = gradient(step, fold.latent) * torch.arange(1, 65)[:, None]
        plain.latent.grad = fold.latent.grad.clone()
        optimizer.step()
        other.step()
    assert fold.projection.number == 1 and plain.projection.number == 0
    state, want = optimizer.state_tensors(), other.state_tensors()
    assert not state["x.latent.exp_avg"].any() and want["x.latent.exp_avg"].any()
    second, rows = state["x.latent.exp_avg_sq"], want["x.latent.exp_avg_sq"].mean(1, keepdim=True)
    # Blocks of 8 and 4 bits hold some rows each; their tables are that coarse.
    coarse = {"fp32": 1e-6, "8bit": 0.05, "4bit": 0.5}[kind]
    assert ((second / rows - 1).abs() <= coarse).all()
    assert state["x.latent.step"] == 3


def test_the_second_moment_of_a_row_is_that_of_any_projection() -> None:
    """E[(g P)_oz^2] = |g_o|^2 / Z: mean over Z and K draws within six standard errors."""
    fold, draws, g_OD = pair(), 2000, gradient(5, pair().weight)
    total = torch.zeros(len(g_OD), dtype=F64)
    for number in range(draws):
        fold.projection.number = number
        total += (g_OD @ fold.projection.matrix(F64, CPU)).square().mean(1)
    expected = g_OD.square().sum(1) / 6
    # The square of a sum of signs has a variance below 2 E^2.
    assert ((total / draws / expected - 1).abs() < 6 * (2 / 6 / draws) ** 0.5).all()


def build(config: Config = CONFIG) -> tuple[HybridLM, MuonAdamW]:
    with torch.device("meta"):
        model = HybridLM(config.model).double()
    compress_linears(model, config.recompute.compress, seed=3)
    model.to_empty(device="cpu")
    initialise(model, model.init_rules(), seed=1)
    return model, build_optimizer(model, config)


def train(model: HybridLM, optimizer: MuonAdamW, steps: range) -> None:
    for step in steps:
        for number, p in enumerate(model.parameters()):
            if p.requires_grad:
                p.grad = gradient(100 * step + number, p)
        optimizer.step()
        optimizer.zero_grad()


def everything(model: HybridLM, optimizer: MuonAdamW) -> dict[str, Tensor]:
    return {**dict(model.named_parameters()), **optimizer.state_tensors()}


@pytest.mark.parametrize("name", ["muon_adamw", "adamw"])
def test_every_parameter_has_one_row_and_moves(name: Any) -> None:
    config = replace(CONFIG, optim=OptimConfig(name=name))
    model, optimizer = build(config)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    found = {a.name: a for a in assign(model, name)}
    assert found.keys() == before.keys()
    folded = {n for n, a in found.items() if a.algorithm == "fold"}
    assert folded == {n for n, p in model.named_parameters() if not p.requires_grad} and folded
    latents = {n for n, a in found.items() if a.fold is not None}
    assert latents == {n.replace(".weight", ".latent") for n in folded}
    of_latents = [g for g in groups(list(found.values()), config.optim) if "folds" in g]
    assert [n for g in of_latents for n, _ in g["params"]] == [n for n in found if n in latents]
    train(model, optimizer, range(1))
    for n, p in model.named_parameters():
        assert (n in latents and not p.any()) or not torch.equal(p, before[n]), n


def test_latents_of_mla_match_one_row() -> None:
    longer = replace(MLA, pattern=f"{MLA.pattern}F", depth=MLA.depth + 1)
    model, _ = build(replace(CONFIG, model=longer))
    latents = [n for n, _ in model.named_parameters() if n.endswith(".latent")]
    assert latents == [f"blocks.0.mixer.{layer}.latent" for layer in ("wq_a", "wkv_a")]
    assert sum(row.matches("A", "wq_a.latent") for row in TABLE) == 1


def test_the_header_says_which_weights_have_latents() -> None:
    model, _ = build()
    lines = describe(model, CONFIG)
    (folded,) = [line for line in lines if line.startswith("fold") and "A:" in line]
    assert folded.split()[4] == "3" and "lr 0.003" in folded
    (muon,) = [line for line in lines if line.startswith("muon ") and "A: wq.weight wk" in line]
    assert muon.split()[4] == "1"  # the output projection
    assert any(line.endswith("A: *.latent") for line in lines)


def test_saved_state_goes_on_to_the_bit_across_redraws() -> None:
    model, optimizer = build()
    train(model, optimizer, range(4))
    saved = {k: v.clone() for k, v in optimizer.state_tensors().items()}
    standard = optimizer.state_dict()
    weights = {k: v.clone() for k, v in model.state_dict().items()}
    again = [build() for _ in range(2)]
    for fresh, _ in again:
        fresh.load_state_dict(weights)
    again[0][1].load_state_tensors(saved)
    again[1][1].load_state_dict(standard)
    train(model, optimizer, range(4, 8))
    want = everything(model, optimizer)
    assert {f.projection.number for f in optimizer._folds.values()} == {2}
    for fresh, restored in again:
        train(fresh, restored, range(4, 8))
        got = everything(fresh, restored)
        assert all(torch.equal(got[k], want[k]) for k in want)


def test_another_width_is_refused_in_one_line() -> None:
    _, optimizer = build()
    narrow = replace(KEEP, compress=0.125)
    _, other = build(replace(CONFIG, recompute=narrow))
    with pytest.raises(CheckpointError, match=r"latent\.exp_avg.* has shape .* Fix: ") as e:
        other.load_state_tensors(optimizer.state_tensors())
    assert "\n" not in str(e.value)


def test_norms_and_the_loss_scale_are_those_of_the_latents() -> None:
    """Gradients of fp16 come scaled; clipping divides, and counts what is there."""
    found = []
    for scale in (1.0, 1024.0):
        model, optimizer = build()
        for number, p in enumerate(model.parameters()):
            if p.requires_grad:
                p.grad = gradient(number, p) * scale
        square = sum(p.grad.square().sum() for p in model.parameters() if p.grad is not None)
        norm = clip_gradients(model.parameters(), 1.0, loss_scale=scale)
        assert norm == pytest.approx(float(square) ** 0.5 / scale, rel=1e-12)
        optimizer.step()
        found.append(everything(model, optimizer))
    for key, value in found[0].items():
        assert torch.allclose(value, found[1][key], rtol=1e-12, atol=1e-15), key
