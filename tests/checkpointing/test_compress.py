"""Inputs kept as random projections: exact outputs and input gradients, projected weight gradients.

What is compared bit by bit does the same products in the same order as nn.Linear; fp64 1e-12 tells
a wrong formula from rounding.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from checkpointing.apply import ActivationCheckpointing
from checkpointing.compress import Projection, compress_linears, compressed_linear
from megacpp.config.schema import KEEP, CheckpointingPolicy, Config, ModelConfig
from megacpp.errors import ConfigError
from megacpp.model.hybrid import HybridLM
from megacpp.model.init import initialise
from tests.model.small import small, variants
from tests.synthetic import ragged_batch

RATIO, SEED = 0.25, 3


def linear(width: int = 24, out: int = 10, dtype: torch.dtype = torch.float64) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(width, out, bias=False, dtype=dtype)


def compressed(plain: nn.Linear, projected: int = 6) -> tuple[nn.Linear, Projection]:
    layer = copy.deepcopy(plain)
    layer.weight.requires_grad_(False)
    projection = Projection("x", layer.in_features, projected, SEED)
    latent = torch.zeros(layer.out_features, projected, dtype=layer.weight.dtype)
    layer.register_parameter("latent", nn.Parameter(latent))
    return layer, projection


def build(config: ModelConfig, ratio: float = RATIO) -> HybridLM:
    with torch.device("meta"):
        model = HybridLM(config).double()
    if ratio:
        compress_linears(model, ratio, SEED)
    model.to_empty(device="cpu")
    initialise(model, model.init_rules(), seed=1)
    return model.train()


def backward(model: HybridLM, rows: range = range(3)) -> Tensor:
    batch = ragged_batch(rows, 16, model.config.vocab_size)
    loss = model(batch.ids_BT, batch.labels_BT, batch.docs).loss_sum
    loss.backward()
    return loss.detach()


@pytest.mark.parametrize("shape", [(7, 24), (2, 7, 24)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_output_and_input_gradient_are_those_of_linear(
    shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    plain = linear(dtype=dtype)
    layer, projection = compressed(plain)
    x = torch.randn(shape, dtype=dtype, requires_grad=True)
    again = x.detach().clone().requires_grad_()
    y, same = plain(x), compressed_linear(projection, again, layer)
    g = torch.randn_like(y)
    y.backward(g)
    same.backward(g)
    assert x.grad is not None and again.grad is not None
    assert torch.equal(y, same) and torch.equal(x.grad, again.grad)
    assert layer.weight.grad is None


def test_under_autocast_too() -> None:
    """Run one process below fp32: fp32 weights, bf16 products, an fp32 latent gradient."""
    plain = linear(dtype=torch.float32)
    layer, projection = compressed(plain)
    x = torch.randn(2, 7, 24, requires_grad=True)
    again = x.detach().clone().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        y, same = plain(x), compressed_linear(projection, again, layer)
        z = projection.project(again)
    assert z.dtype == same.dtype == torch.bfloat16
    g = torch.randn_like(y)
    y.backward(g)
    same.backward(g)
    assert x.grad is not None and again.grad is not None and layer.latent.grad is not None
    assert torch.equal(y, same) and torch.equal(x.grad, again.grad)
    assert layer.latent.grad.dtype == torch.float32


def test_the_latent_gets_the_projected_gradient() -> None:
    plain = linear()
    layer, projection = compressed(plain)
    x = torch.randn(3, 11, 24, dtype=torch.float64)
    g = torch.randn(3, 11, 10, dtype=torch.float64)
    for _ in range(2):  # gradients of microbatches add up
        plain(x).backward(g)
        compressed_linear(projection, x, layer).backward(g)
    assert plain.weight.grad is not None and layer.latent.grad is not None
    want = plain.weight.grad @ projection.matrix(torch.float64, x.device)
    assert (layer.latent.grad - want).abs().max() <= 1e-12 * want.abs().max()


def test_the_estimate_is_unbiased() -> None:
    """Compare the mean over K redraws of (G P) P^T with G, within six of its standard errors.

    The variance of one entry is (|G_o|^2 - G_od^2) / Z.
    """
    draws, g_OD = 4000, torch.randn(5, 24, dtype=torch.float64)
    projection = Projection("x", 24, 6, SEED)
    total = torch.zeros_like(g_OD)
    for projection.number in range(draws):
        p_DZ = projection.matrix(torch.float64, g_OD.device)
        total += g_OD @ p_DZ @ p_DZ.t()
    error = ((g_OD.square().sum(1, keepdim=True) - g_OD.square()) / 6 / draws).sqrt()
    off = (total / draws - g_OD).abs() / error
    assert off.max() < 6 and 0.5 < off.square().mean().sqrt() < 1.5


def test_projections_are_signs_that_depend_on_all_of_their_key() -> None:
    device = torch.device("cpu")
    projection = Projection("blocks.0.mixer", 24, 7, SEED)
    p_DZ = projection.matrix(torch.float64, device)
    assert p_DZ.shape == (24, 7)
    assert torch.equal(p_DZ.abs(), torch.full_like(p_DZ, 1 / math.sqrt(7)))
    assert torch.equal(p_DZ, projection.matrix(torch.float64, device))
    assert torch.equal(p_DZ.bfloat16(), projection.matrix(torch.bfloat16, device))
    again = Projection("blocks.0.mixer", 24, 7, SEED)
    again.number = 1
    others = [
        Projection("blocks.1.mixer", 24, 7, SEED),
        Projection("blocks.0.mixer", 24, 7, SEED + 1),
        again,
    ]
    assert not any(torch.equal(p_DZ, other.matrix(torch.float64, device)) for other in others)


def test_large_projections_are_balanced() -> None:
    """Sum a million signs, rows and columns: sums of n signs are within six sqrt(n)."""
    p_DZ = Projection("x", 2048, 512, SEED).matrix(torch.float64, torch.device("cpu")) * 512**0.5
    assert p_DZ.sum().abs() < 6 * 1024
    assert p_DZ.sum(0).abs().max() < 6 * 2048**0.5 and p_DZ.sum(1).abs().max() < 6 * 512**0.5


def test_what_needs_no_gradient_projects_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    model, calls = build(small("AF")), []
    monkeypatch.setattr(Projection, "matrix", lambda *args: calls.append(args))
    batch = ragged_batch(range(3), 16, model.config.vocab_size)
    with torch.no_grad():
        loss = model(batch.ids_BT, batch.labels_BT, batch.docs).loss_sum
    plain = build(small("AF"), ratio=0)
    with torch.no_grad():
        assert loss == plain(batch.ids_BT, batch.labels_BT, batch.docs).loss_sum
    assert not calls


@pytest.mark.parametrize("name", ["plain", "mla_low_rank_queries_yarn", "mlp_relu2"])
def test_a_model_loses_nothing_but_the_width_of_some_gradients(name: str) -> None:
    """The loss is the same to the bit, other gradients to rounding, G P in the place of G.

    Layers that aren't compressed add their gradients of one input inside the products.
    """
    whole, model = build(variants()[name], ratio=0), build(variants()[name])
    assert backward(whole) == backward(model)
    gradients = {n: p.grad for n, p in whole.named_parameters()}
    for n, p in model.named_parameters():
        if n.endswith(".latent"):
            g_OD = gradients[n.replace(".latent", ".weight")]
            layer: Any = model.get_submodule(n.rpartition(".")[0])
            assert p.grad is not None and g_OD is not None
            want = g_OD @ layer.projection.matrix(torch.float64, p.device)
            assert (p.grad - want).abs().max() <= 1e-12 * want.abs().max(), n
        elif p.requires_grad:
            want = gradients[n]
            assert p.grad is not None and want is not None
            assert (p.grad - want).abs().max() <= 1e-12 * want.abs().max(), n


@pytest.mark.parametrize(
    "policy",
    [
        dataclasses.replace(KEEP, norms=True),
        dataclasses.replace(KEEP, mlp=True),
        dataclasses.replace(KEEP, ablock="selective", mlp=True, norms=True),
        dataclasses.replace(KEEP, ablock="full", fblock="full"),
    ],
    ids=["norms", "mlp", "selective", "full"],
)
@pytest.mark.parametrize("name", ["plain", "mla_low_rank_queries_yarn"])
def test_what_runs_again_projects_alike(name: str, policy: CheckpointingPolicy) -> None:
    config = variants()[name]
    once, model = build(config), build(config)
    ac = ActivationCheckpointing(Config(model=config, recompute=policy))
    ac(model)
    assert backward(once) == backward(model)
    assert ac.replays.counts
    for (n, p), q in zip(once.named_parameters(), model.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None) == n.endswith(tuple(frozen(once)))
        assert p.grad is None or torch.equal(p.grad, q.grad), n  # type: ignore[arg-type]


def frozen(model: HybridLM) -> list[str]:
    return [n for n, p in model.named_parameters() if not p.requires_grad]


def test_which_layers_by_hand() -> None:
    """Projections of the normed input in every kind; the last F is left alone."""
    config = small("AGMERFF")
    config = dataclasses.replace(config, moe=dataclasses.replace(config.moe, shared_gate=True))
    names = dict(
        [
            ("A", "wq wk wv"),
            ("G", "in_q in_k in_v in_z in_b in_a"),
            ("M", "in_z in_x in_B in_C in_dt in_A in_trap in_angles"),
            ("E", "shared.w1 shared.w3 shared.gate"),
            ("R", "in_q in_k in_v in_forget in_gate"),
            ("F", "w1 w3"),
        ]
    )
    model = build(config)
    wanted = {
        f"blocks.{i}.mixer.{layer}.weight"
        for i, layers in enumerate(names.values())
        for layer in layers.split()
    }
    assert set(frozen(model)) == wanted
    latents = {n: tuple(p.shape) for n, p in model.named_parameters() if n.endswith("latent")}
    assert latents["blocks.0.mixer.wk.latent"] == (16, 4)
    assert latents["blocks.5.mixer.w1.latent"] == (24, 4)
    assert not any(p.any() for n, p in model.named_parameters() if n in latents)


def test_a_model_of_one_layer_is_refused_in_one_line() -> None:
    with torch.device("meta"):
        model = HybridLM(small("F"))
    with pytest.raises(
        ConfigError, match=r"recompute\.compress=0\.25: .*but the last.* Fix: "
    ) as e:
        compress_linears(model, RATIO, SEED)
    assert "\n" not in str(e.value)
