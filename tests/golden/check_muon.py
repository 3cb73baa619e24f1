"""Muon: Newton-Schulz in fp64 and bf16, and two optimizer steps."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from optim.initial_state import Width
from optim.muon_adamw import MuonAdamW
from optim.muon_reference import muon_update, newton_schulz_plain
from optim.newton_schulz import QUINTIC, newton_schulz, update_scale
from tests.golden.harness import GoldenFile

KNOWN = ("muon*.safetensors",)


def check(golden: GoldenFile) -> None:
    assert tuple(golden.config["coeffs"]) == QUINTIC
    assert golden.config["scale"] == "max(1,rows/cols)^0.5"  # "spectral" here
    numbers = [name[1:] for name in golden.names("W") if "_" not in name]
    assert numbers
    narrow = max(check_newton_schulz(golden, i) for i in numbers)
    for i in numbers:
        check_reference(golden, i)
        weight = golden.input(f"W{i}")
        widths: tuple[Width, Width] = ("auto", "auto" if weight.dtype == torch.float64 else "fp32")
        weights = check_optimizer(golden, i, weight, widths)
        for number, (weight, momentum) in enumerate(weights, start=1):
            golden.expect(f"W{i}_step{number}", weight)
            golden.expect(f"buf{i}_step{number}", momentum)
        check_as_shipped(golden, i, narrow)


def check_newton_schulz(golden: GoldenFile, i: str) -> float:
    """Both forms; returns how far upstream's own bf16 result is from its fp64 one.

    In bf16 the plain form does upstream's operations in upstream's order: the same bits where the
    CPU sums products in the same order, else one more error of upstream's size. The fast form
    fuses a product with a sum, which rounds less often, so it may be as far from fp64 as upstream
    is, and twice that from upstream.
    """
    steps = golden.config["ns_steps"]
    g = golden.input(f"G{i}")
    for function in (newton_schulz, newton_schulz_plain):
        golden.expect(f"ns5_{i}", function(g, steps))
    exact, narrow = (golden.input(name).double() for name in (f"ns5_{i}", f"ns5_bf16_{i}"))
    distance = (narrow - exact).abs().max().item()
    plain = newton_schulz_plain(g, steps, torch.bfloat16)
    golden.expect_within(f"ns5_bf16_{i}", plain, limit=distance)
    fast = newton_schulz(g, steps, torch.bfloat16)
    golden.expect_within(f"ns5_bf16_{i}", fast, limit=2 * distance)
    return distance


def check_reference(golden: GoldenFile, i: str) -> None:
    """The written-out update, twice."""
    c, weight = golden.config, golden.input(f"W{i}")
    momentum = torch.zeros_like(weight)
    for number, grad in enumerate(gradients(golden, i), start=1):
        update = muon_update(grad, momentum, c["momentum"], c["nesterov"], c["ns_steps"])
        weight = weight * (1 - c["lr"] * c["weight_decay"]) - c["lr"] * update
        golden.expect(f"W{i}_step{number}", weight)


def check_optimizer(
    golden: GoldenFile, i: str, weight: Tensor, widths: tuple[Width, Width]
) -> list[tuple[Tensor, Tensor]]:
    """Weight and momentum after each step of the optimizer; widths of iteration and momentum."""
    c, p = golden.config, nn.Parameter(weight)
    settings = {name: c[name] for name in ("lr", "momentum", "nesterov", "weight_decay")}
    group = {"params": [p], "algorithm": "muon", "steps": c["ns_steps"], **settings}
    optimizer = MuonAdamW([group], muon_width=widths[0], momentum_width=widths[1])
    after = []
    for grad in gradients(golden, i):
        p.grad = grad.to(p.dtype)
        optimizer.step()
        after.append((p.detach().clone(), optimizer.state[p]["momentum"].clone()))
    return after


def check_as_shipped(golden: GoldenFile, i: str, narrow: float) -> None:
    """fp32 weights with bf16 Newton-Schulz: each step may add lr * scale * 2 * `narrow`.

    Upstream also rounds the scale into bf16: one last place, 2^-8, of an update of at most 1.2.
    """
    weight = golden.input(f"W{i}").float()
    (_, _), (got, _) = check_optimizer(golden, i, weight, ("bf16", "fp32"))
    scale = update_scale("spectral", *weight.shape)
    limit = 2 * golden.config["lr"] * scale * (2 * narrow + 1.2 * 2.0**-8)
    golden.expect_within(f"W{i}_step2_upstream_fp32_bf16ns", got, limit)


def gradients(golden: GoldenFile, i: str) -> tuple[Tensor, Tensor]:
    """Of the first and the second step."""
    return golden.input(f"G{i}"), golden.input(f"G2_{i}")
