"""Both optimizers over a whole model: rates, state by name, and shards equal to one device."""

from __future__ import annotations

import hashlib
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from megacpp.config import Config, MeshConfig, OptimConfig
from megacpp.errors import CheckpointError
from megacpp.model.hybrid import HybridLM
from megacpp.model.init import initialise
from optim.build import Optimizers, build_optimizers
from parallel.fsdp import shard_model, shard_slice
from parallel.mesh import join
from tests.optim.test_groups import SMALL
from tests.ranks import run_ranks

CONFIG = Config(model=SMALL, optim=OptimConfig(muon_weight_decay=0.01))


def build(config: Config = CONFIG, world: int = 1) -> tuple[HybridLM, Optimizers]:
    with torch.device("meta"):
        model = HybridLM(config.model).double()
    if world > 1:
        shard_model(model, join(MeshConfig(dp_shard=world), torch.device("cpu")), torch.float64)
    model.to_empty(device="cpu")
    initialise(model, model.init_rules(), seed=1, part=shard_slice)
    return model, build_optimizers(model, config)


def give_gradients(model: HybridLM, step: int) -> None:
    for name, p in model.named_parameters():
        seed = int.from_bytes(hashlib.sha256(f"{name}/{step}".encode()).digest()[:4], "big")
        g = torch.Generator().manual_seed(seed)
        grad = torch.randn(p.shape, generator=g, dtype=torch.float64)
        if isinstance(p, DTensor):
            p.grad = distribute_tensor(grad, p.device_mesh, p.placements)
        else:
            p.grad = grad


def train(model: HybridLM, optimizers: Optimizers, steps: range) -> None:
    for step in steps:
        give_gradients(model, step)
        optimizers.step(1.0 / (step + 1))
        optimizers.zero_grad()


def whole(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {k: t.full_tensor() if isinstance(t, DTensor) else t for k, t in tensors.items()}


def everything(model: HybridLM, optimizers: Optimizers) -> dict[str, Tensor]:
    params = {name: p.detach() for name, p in model.named_parameters()}
    return whole({**params, **optimizers.state_tensors()})


def test_every_parameter_moves_and_zero_grad_drops_all() -> None:
    model, optimizers = build()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    train(model, optimizers, range(1))
    assert all(not torch.equal(p, before[name]) for name, p in model.named_parameters())
    assert all(p.grad is None for p in model.parameters())


def test_a_multiplier_of_zero_moves_nothing() -> None:
    model, optimizers = build()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    give_gradients(model, 0)
    optimizers.step(0.0)
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())


def test_rates_and_decays_are_those_of_the_configuration() -> None:
    _, optimizers = build()
    optimizers.step(0.5)
    found = {
        (name, g["lr"], g["weight_decay"])
        for name, part in optimizers.parts.items()
        for g in part.param_groups
    }
    c = CONFIG.optim
    assert found == {
        ("muon", c.muon_lr / 2, 0.01),
        ("adamw", c.lr / 2, c.weight_decay),
        ("adamw", c.lr / 2, 0.0),
    }
    lines = optimizers.describe()
    assert lines[0] == "muon:  lr 0.02, momentum 0.95, 5 steps, scale keller, weight decay 0.01"
    assert lines[1] == "adamw: lr 0.003, betas 0.9 0.95, eps 1e-08, weight decay 0.1"
    assert len(lines) > 10


def test_adamw_alone() -> None:
    model, optimizers = build(replace(CONFIG, optim=OptimConfig(name="adamw")))
    train(model, optimizers, range(1))
    assert list(optimizers.parts) == ["adamw"]
    assert not [name for name in optimizers.state_tensors() if name.endswith("momentum")]


def test_state_by_name_resumes_bit_for_bit() -> None:
    model, optimizers = build()
    train(model, optimizers, range(2))
    saved, weights = optimizers.state_dict(), model.state_dict()
    names = {name for name, _ in model.named_parameters()}
    assert {key.rsplit(".", 1)[0] for key in saved} == names
    again, fresh = build()
    again.load_state_dict({k: v.clone() for k, v in weights.items()})
    fresh.load_state_dict(saved)
    train(model, optimizers, range(2, 4))
    train(again, fresh, range(2, 4))
    got, want = everything(again, fresh), everything(model, optimizers)
    assert got.keys() == want.keys()
    assert all(torch.equal(got[key], want[key]) for key in want)
    assert not all(torch.equal(saved[key], want[key]) for key in saved), "the copy was not one"


def test_live_state_can_be_written_into() -> None:
    model, optimizers = build()
    train(model, optimizers, range(2))
    again, fresh = build()
    for name, p in again.named_parameters():
        p.data.copy_(dict(model.named_parameters())[name])
    for key, value in fresh.state_tensors().items():
        value.copy_(optimizers.state_tensors()[key])
    train(model, optimizers, range(2, 3))
    train(again, fresh, range(2, 3))
    want = everything(model, optimizers)
    assert all(torch.equal(value, want[key]) for key, value in everything(again, fresh).items())
    assert fresh.state_tensors()["norm.weight.step"].item() == 3


@pytest.mark.parametrize(
    "key, value, message",
    [
        ("norm.weight.step", None, "'norm.weight.step' is missing"),
        ("norm.weight.momentum", torch.zeros(24), "'norm.weight.momentum' is unknown"),
        ("norm.weight.exp_avg", torch.zeros(23), r"has shape \(23,\), not \(24,\)"),
    ],
)
def test_state_of_another_model_is_refused(key: str, value: Tensor | None, message: str) -> None:
    _, optimizers = build()
    state = optimizers.state_dict()
    state.pop(key, None)
    if value is not None:
        state[key] = value
    with pytest.raises(CheckpointError, match=message):
        optimizers.load_state_dict(state)


def test_a_sharded_model_equals_one_device() -> None:
    """The real FSDP2 units of a hybrid on 2 ranks, state and all.

    Muon's half to the bit. AdamW's kernel computes the last elements of a shard one by one and the
    others by vectors, which may round a fused multiply-add differently: 1e-15.
    """

    def body(rank: int, world: int) -> dict[str, Tensor]:
        model, optimizers = build(world=world)
        assert all(isinstance(p, DTensor) for p in model.parameters())
        train(model, optimizers, range(3))
        return everything(model, optimizers)

    model, optimizers = build()
    train(model, optimizers, range(3))
    want = everything(model, optimizers)
    muon = {a.name for a in optimizers.assignments if a.algorithm == "muon"}
    for got in run_ranks(body, 2):
        assert got.keys() == want.keys()
        for key, value in want.items():
            exact = key in muon or key.endswith(".momentum")
            assert (got[key] - value).abs().max() <= (0 if exact else 1e-15), key
