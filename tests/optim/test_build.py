"""Optimizer of a whole model: rates, state by name, and shards equal to one device."""

from __future__ import annotations

import hashlib
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from megacpp.config.schema import Config, MeshConfig, OptimConfig
from megacpp.errors import CheckpointError
from megacpp.model.hybrid import HybridLM
from megacpp.model.init import initialise
from optim.build import build_optimizer, describe
from optim.muon_adamw import MuonAdamW
from optim.schedule import build_scheduler
from parallel.fsdp import shard_model, shard_slice
from parallel.start import join
from tests.optim.test_groups import SMALL
from tests.ranks import run_ranks

CONFIG = Config(model=SMALL, optim=OptimConfig(muon_weight_decay=0.01))


def build(config: Config = CONFIG, world: int = 1) -> tuple[HybridLM, MuonAdamW]:
    with torch.device("meta"):
        model = HybridLM(config.model).double()
    if world > 1:
        shard_model(model, join(MeshConfig(dp_shard=world), torch.device("cpu")), torch.float64)
    model.to_empty(device="cpu")
    initialise(model, model.init_rules(), seed=1, part=shard_slice)
    return model, build_optimizer(model, config)


def give_gradients(model: HybridLM, step: int) -> None:
    for name, p in model.named_parameters():
        seed = int.from_bytes(hashlib.sha256(f"{name}/{step}".encode()).digest()[:4], "big")
        g = torch.Generator().manual_seed(seed)
        grad = torch.randn(p.shape, generator=g, dtype=torch.float64)
        if isinstance(p, DTensor):
            p.grad = distribute_tensor(grad, p.device_mesh, p.placements)
        else:
            p.grad = grad


def train(model: HybridLM, optimizer: MuonAdamW, steps: range) -> None:
    peaks = [group.setdefault("initial_lr", group["lr"]) for group in optimizer.param_groups]
    for step in steps:
        give_gradients(model, step)
        for group, peak in zip(optimizer.param_groups, peaks, strict=True):
            group["lr"] = peak / (step + 1)
        optimizer.step()
        optimizer.zero_grad()


def whole(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {k: t.full_tensor() if isinstance(t, DTensor) else t for k, t in tensors.items()}


def everything(model: HybridLM, optimizer: MuonAdamW) -> dict[str, Tensor]:
    params = {name: p.detach() for name, p in model.named_parameters()}
    return whole({**params, **optimizer.state_tensors()})


def test_every_parameter_moves_and_zero_grad_drops_all() -> None:
    model, optimizer = build()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    train(model, optimizer, range(1))
    assert all(not torch.equal(p, before[name]) for name, p in model.named_parameters())
    assert all(p.grad is None for p in model.parameters())


def test_a_rate_of_zero_moves_nothing() -> None:
    model, optimizer = build()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    give_gradients(model, 0)
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    optimizer.step()
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())


def test_rates_and_decays_are_those_of_the_configuration() -> None:
    """Each group's peak by its rows; the scheduler scales all alike."""
    optim = replace(CONFIG.optim, embed_lr=0.1, head_lr=0.2, vector_lr=0.3, schedule="wsd")
    model, optimizer = build(replace(CONFIG, optim=optim))
    build_scheduler(optimizer, optim, total_steps=100)  # warms up over 3
    groups = optimizer.param_groups
    assert all(group["lr"] == group["initial_lr"] * (1 / 3) for group in groups)
    found = {(g["algorithm"], g["initial_lr"], g["weight_decay"]) for g in groups}
    expected = [
        ("muon", optim.muon_lr, 0.01),
        ("adamw", optim.lr, optim.weight_decay),
        ("adamw", 0.1, optim.weight_decay),
        ("adamw", 0.2, optim.weight_decay),
        ("adamw", 0.3, 0.0),
        ("adamw", optim.lr, 0.0),
    ]
    assert found == set(expected)
    rates = {
        name: group["initial_lr"]
        for group in optimizer.param_groups
        for name in group["param_names"]
    }
    assert rates.keys() == dict(model.named_parameters()).keys()
    assert rates["embed.weight"] == 0.1 and rates["head.weight"] == 0.2
    assert rates["blocks.0.mixer.wq.weight"] == optim.muon_lr
    assert {rates[n] for n in rates if n.endswith(("norm.weight", "dt_bias", "A_log"))} == {0.3}


def test_settings_reach_the_optimizer() -> None:
    optim = OptimConfig(
        muon_momentum=0.9,
        muon_nesterov=False,
        muon_steps=4,
        muon_coefficients="polar_express",
        muon_scale="rms",
        muon_momentum_dtype="fp32",
        muon_dtype="bf16",
        muon_bucket_mib=3,
        beta2=0.99,
        eps=1e-9,
        cautious_weight_decay=True,
    )
    _, optimizer = build(replace(CONFIG, optim=optim))
    for group in optimizer.param_groups:
        assert group["cautious"] is True
        if group["algorithm"] == "muon":
            assert (group["momentum"], group["nesterov"], group["scale"]) == (0.9, False, "rms")
        else:
            assert (group["betas"], group["eps"]) == ((0.9, 0.99), 1e-9)
    exchange, matrix = optimizer.plan().exchanges[0], optimizer.plan().matrices[0]
    assert exchange.wire == torch.bfloat16 and matrix.solver == (4, "polar_express")
    assert optimizer.state[matrix.parameter]["momentum"].dtype == torch.float32
    assert optimizer._bucket_bytes == 3 << 20


def test_what_a_run_prints() -> None:
    model, _ = build()
    lines = describe(model, CONFIG)
    assert lines[0] == (
        "muon:  lr 0.02, momentum 0.95, 5 steps (quintic), scale spectral, weight decay 0.01"
    )
    assert lines[1] == "adamw: lr 0.003, betas 0.9 0.95, eps 1e-08, weight decay 0.1, moments fp32"
    assert lines[2].startswith("adamw lr 0.003   decay    1 tensors ")
    assert len(lines) > 10
    alone = describe(model, replace(CONFIG, optim=OptimConfig(name="adamw")))
    assert alone[0].startswith("adamw:") and not [line for line in alone if "muon" in line]


def test_adamw_alone() -> None:
    model, optimizer = build(replace(CONFIG, optim=OptimConfig(name="adamw")))
    train(model, optimizer, range(1))
    assert {group["algorithm"] for group in optimizer.param_groups} == {"adamw"}
    assert not [name for name in optimizer.state_tensors() if name.endswith("momentum")]


def test_state_by_name_resumes_bit_for_bit() -> None:
    model, optimizer = build()
    train(model, optimizer, range(2))
    saved = {key: value.clone() for key, value in optimizer.state_tensors().items()}
    weights = model.state_dict()
    names = {name for name, _ in model.named_parameters()}
    assert {key.rsplit(".", 1)[0] for key in saved} == names
    again, fresh = build()
    again.load_state_dict({k: v.clone() for k, v in weights.items()})
    fresh.load_state_tensors(saved)
    train(model, optimizer, range(2, 4))
    train(again, fresh, range(2, 4))
    got, want = everything(again, fresh), everything(model, optimizer)
    assert got.keys() == want.keys()
    assert all(torch.equal(got[key], want[key]) for key in want)
    assert not all(torch.equal(saved[key], want[key]) for key in saved), "the copy was not one"


def test_live_state_can_be_written_into() -> None:
    model, optimizer = build()
    train(model, optimizer, range(2))
    again, fresh = build()
    for name, p in again.named_parameters():
        p.data.copy_(dict(model.named_parameters())[name])
    for key, value in fresh.state_tensors().items():
        value.copy_(optimizer.state_tensors()[key])
    train(model, optimizer, range(2, 3))
    train(again, fresh, range(2, 3))
    want = everything(model, optimizer)
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
    _, optimizer = build()
    state = optimizer.state_tensors()
    state.pop(key, None)
    if value is not None:
        state[key] = value
    with pytest.raises(CheckpointError, match=message):
        optimizer.load_state_tensors(state)


def test_a_sharded_model_equals_one_device() -> None:
    """Compare real FSDP2 units of a hybrid on 2 ranks with one device, state included.

    Muon's half is equal to the bit. AdamW's kernel computes the last elements of a shard one by one
    and the others by vectors, which may round a fused multiply-add differently: 1e-15.
    """

    def body(rank: int, world: int) -> dict[str, Tensor]:
        model, optimizer = build(world=world)
        assert all(isinstance(p, DTensor) for p in model.parameters())
        train(model, optimizer, range(3))
        return everything(model, optimizer)

    model, optimizer = build()
    train(model, optimizer, range(3))
    want = everything(model, optimizer)
    groups = [g for g in optimizer.param_groups if g["algorithm"] == "muon"]
    muon = {name for group in groups for name in group["param_names"]}
    for got in run_ranks(body, 2):
        assert got.keys() == want.keys()
        for key, value in want.items():
            exact = key in muon or key.endswith(".momentum")
            assert (got[key] - value).abs().max() <= (0 if exact else 1e-15), key
