"""Optimizer with both algorithms: groups, schedulers, hooks, and state in torch's standard form."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR

from megacpp.errors import CheckpointError
from optim.muon_adamw import MuonAdamW
from optim.ownership import MatrixView


class Net(nn.Module):
    """Model of a matrix, a fused one, and a bias."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        g = torch.Generator().manual_seed(1)
        for name, shape in (("w", (6, 8)), ("qk", (10, 6)), ("b", (6,)), ("d", (6,))):
            value = torch.randn(shape, generator=g, dtype=torch.float64).to(dtype)
            self.register_parameter(name, nn.Parameter(value))


def optimizer_of(net: Net, lr: Any = 0.02, **settings: Any) -> MuonAdamW:
    views = [MatrixView(), MatrixView((4, 6))]
    muon = [("w", net.w), ("qk", net.qk)]
    return MuonAdamW(
        [
            {"params": muon, "algorithm": "muon", "views": views, "lr": lr, "weight_decay": 0.1},
            {"params": [("b", net.b), ("d", net.d)], "algorithm": "adamw", "lr": lr},
        ],
        **settings,
    )


def give_gradients(net: Net, step: int) -> None:
    g = torch.Generator().manual_seed(100 + step)
    for p in net.parameters():
        p.grad = torch.randn(p.shape, generator=g, dtype=torch.float64).to(p.dtype)


def train(net: Net, optimizer: MuonAdamW, steps: range) -> None:
    for step in steps:
        give_gradients(net, step)
        optimizer.step()


def everything(net: Net, optimizer: MuonAdamW) -> dict[str, Tensor]:
    own = {name: p.detach().clone() for name, p in net.named_parameters()}
    return own | {name: t.clone() for name, t in optimizer.state_tensors().items()}


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    assert a.keys() == b.keys()
    return all(torch.equal(a[k], b[k]) and a[k].dtype == b[k].dtype for k in a)


def test_a_rate_may_be_a_number_or_a_tensor_and_is_read_at_every_step() -> None:
    results = []
    for lr in (0.02, torch.tensor(0.02, dtype=torch.float64)):
        net = Net()
        optimizer = optimizer_of(net, lr)
        train(net, optimizer, range(1))
        for group in optimizer.param_groups:
            group["lr"] = group["lr"] * 0.5
        train(net, optimizer, range(1, 3))
        results.append(everything(net, optimizer))
    for key, value in results[0].items():
        assert (results[1][key].float() - value.float()).abs().max() <= 1e-6, key
    net = Net()
    train(net, optimizer_of(net), range(3))
    assert not torch.equal(net.w, results[0]["w"]), "the new rate was not read"


@pytest.mark.parametrize("kind", ["lambda", "one cycle"])
def test_schedulers_of_torch_move_every_group(kind: str) -> None:
    net = Net()
    optimizer = optimizer_of(net)
    scheduler = (
        LambdaLR(optimizer, lambda step: 1 / (step + 1))
        if kind == "lambda"
        else OneCycleLR(optimizer, max_lr=0.1, total_steps=10, cycle_momentum=False)
    )
    rates = []
    for step in range(3):
        give_gradients(net, step)
        optimizer.step()
        scheduler.step()
        rates.append([group["lr"] for group in optimizer.param_groups])
    assert all(a == b for a, b in rates) and len({a for a, _ in rates}) == 3


def test_closure_and_hooks() -> None:
    net = Net()
    optimizer = optimizer_of(net)
    seen: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
    optimizer.register_step_post_hook(lambda *_: seen.append("after"))

    def closure() -> bool:
        seen.append("closure")
        give_gradients(net, 0)
        return torch.is_grad_enabled()

    assert optimizer.step(closure) is True
    assert seen == ["before", "closure", "after"]
    assert optimizer.state_tensors()["b.step"].item() == 1


def test_a_group_added_later_is_planned_and_moved() -> None:
    """Add a group later: three groups at once give the same bits."""
    late, early = Net(), Net()
    extra = [nn.Parameter(torch.ones(4, 5)) for _ in range(2)]
    optimizer, both = optimizer_of(late), optimizer_of(early)
    plan = optimizer.plan()
    for one, p in ((optimizer, extra[0]), (both, extra[1])):
        one.add_param_group({"params": [("x", p)], "algorithm": "muon", "lr": 0.05})
    assert optimizer.plan() is not plan and optimizer.plan() is optimizer.plan()
    for step in range(2):
        for net, one, p in ((late, optimizer, extra[0]), (early, both, extra[1])):
            p.grad = torch.full((4, 5), 1.0 + step)
            give_gradients(net, step)
            one.step()
    assert torch.equal(*extra) and (extra[0] < 1).all()
    assert same(everything(late, optimizer), everything(early, both))


@pytest.mark.parametrize(
    "group, message",
    [
        ({"algorithm": "sgd"}, "muon or adamw"),
        ({}, "muon or adamw"),
        ({"algorithm": "adamw", "nesterov": True}, "adamw has no"),
        ({"algorithm": "muon", "betas": (0.9, 0.9)}, "muon has no"),
        ({"algorithm": "muon"}, "Muon is for matrices"),
    ],
)
def test_groups_that_make_no_sense_are_refused(group: dict[str, Any], message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        MuonAdamW([{"params": [nn.Parameter(torch.ones(3))], **group}])


def test_parameters_without_a_gradient_are_left_alone() -> None:
    net = Net()
    optimizer = optimizer_of(net)
    before = everything(net, optimizer)
    give_gradients(net, 0)
    net.qk.grad = net.d.grad = None
    optimizer.step()
    after = everything(net, optimizer)
    still = {key for key in before if torch.equal(before[key], after[key])}
    assert still == {k for k in before if k.split(".")[0] in ("qk", "d")}
    train(net, optimizer, range(1))
    steps = {k: t.item() for k, t in optimizer.state_tensors().items() if k.endswith("step")}
    assert steps == {"b.step": 2, "d.step": 1}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_standard_state_dict_resumes_bit_for_bit(dtype: torch.dtype) -> None:
    """Momenta stay bf16, which torch's own loading would widen, and rates are those saved."""
    net = Net(dtype)
    optimizer = optimizer_of(net)
    train(net, optimizer, range(2))
    optimizer.param_groups[0]["lr"] = 0.01
    saved, weights = copy.deepcopy(optimizer.state_dict()), copy.deepcopy(net.state_dict())
    again = Net(dtype)
    fresh = optimizer_of(again)
    seen: list[str] = []
    fresh.register_load_state_dict_pre_hook(lambda _, s: seen.append(f"{len(s['state'])} states"))
    fresh.register_load_state_dict_post_hook(lambda o: seen.append(f"then {len(o.state)}"))
    again.load_state_dict(weights)
    fresh.load_state_dict(saved)
    assert seen == ["4 states", "then 4"]
    assert [g["lr"] for g in fresh.param_groups] == [0.01, 0.02]
    assert same(everything(again, fresh), everything(net, optimizer))
    live = fresh.state_tensors()
    train(net, optimizer, range(2, 4))
    train(again, fresh, range(2, 4))
    assert same(everything(again, fresh), everything(net, optimizer))
    assert live["b.step"].item() == 4, "counters are still counted together"


def test_it_is_plain_data_that_torch_can_save(tmp_path: Any) -> None:
    net = Net()
    optimizer = optimizer_of(net)
    train(net, optimizer, range(1))
    torch.save(optimizer.state_dict(), tmp_path / "state.pt")
    loaded = torch.load(tmp_path / "state.pt", weights_only=True)
    fresh = optimizer_of(Net())
    fresh.load_state_dict(loaded)
    assert same(fresh.state_tensors(), optimizer.state_tensors())


def test_a_state_dict_of_other_groups_is_refused() -> None:
    optimizer = optimizer_of(Net())
    state = optimizer.state_dict()
    with pytest.raises(CheckpointError, match=r"parameter 2 has \['momentum'\], not \['exp_avg'"):
        optimizer.load_state_dict({**state, "state": {**state["state"], 2: {"momentum": 0}}})
    with pytest.raises(CheckpointError, match="parameter 0 has"):
        optimizer.load_state_dict({**state, "state": {}})
    with pytest.raises(ValueError, match="different number of parameter groups"):
        groups = state["param_groups"][:1]
        optimizer.load_state_dict({**state, "param_groups": groups})
    assert len(optimizer.state) == 4
