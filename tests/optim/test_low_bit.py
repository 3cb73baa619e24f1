"""AdamW with 8-bit and 4-bit moments: the kernel's update, packed; saved and found to the bit."""

from __future__ import annotations

import math
import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode

from megacpp.errors import ConfigError
from megacpp.torch_extras import local_part
from optim import low_bit
from optim.adamw import adamw_update
from optim.initial_state import new_state
from optim.low_bit import BLOCKS, Bits, is_packed, low_bit_update, plain, write
from tests.ranks import run_ranks

GROUP: dict[str, Any] = {"lr": 0.01, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
MOMENTS = ("exp_avg", "exp_avg_sq")
KINDS: list[Bits] = ["8bit", "4bit"]


@pytest.fixture
def torchao() -> None:
    pytest.importorskip("torchao.optim", reason="torchao isn't installed (the lowp extra)")


def random(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def updated(parameter: Tensor, state: dict[str, Tensor], grads: list[Tensor]) -> None:
    for grad in grads:
        parameter.grad = grad
        state["step"] += 1
        adamw_update(GROUP, [parameter], [state])


def fresh(parameter: Tensor, kind: Any) -> dict[str, Tensor]:
    return {"step": torch.zeros(()), **new_state(parameter, kind)}


def trained(kind: Any, num_steps: int = 8) -> tuple[Tensor, dict[str, Tensor]]:
    """Return a weight and its state; gradients differ in magnitude, some rows have none."""
    weight = nn.Parameter(random(0, 64, 128))
    state = fresh(weight, kind)
    sizes = torch.logspace(-9, 2, 64)[:, None]
    sizes[::7] = 0
    sizes[20:28] = 0  # whole blocks
    updated(weight, state, [random(i, 64, 128) * sizes for i in range(1, num_steps + 1)])
    return weight, state


@pytest.mark.usefixtures("torchao")
@pytest.mark.parametrize("cautious", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_an_update_is_the_wide_one_on_unpacked_moments(kind: Bits, cautious: bool) -> None:
    weight, state = trained(kind)
    twin = nn.Parameter(weight.detach().clone())
    wide = {name: plain(state[name]) for name in MOMENTS}
    twin.grad = weight.grad = random(99, 64, 128)
    state["step"] += 1
    group = {**GROUP, "cautious": cautious}
    adamw_update(group, [weight], [state])
    adamw_update(group, [twin], [{**wide, "step": state["step"]}])
    assert torch.equal(weight, twin)
    # A block's error is at most half of the table's widest gap, times its largest magnitude. The
    # table of second moments in 4 bits begins at 1/16, not at 0: that error is a whole gap.
    for name, gap in zip(MOMENTS, (0.016, 0.016) if kind == "8bit" else (0.23, 0.126), strict=True):
        distance = (plain(state[name]) - wide[name]).view(-1, BLOCKS[kind]).abs().amax(1)
        largest = wide[name].view(-1, BLOCKS[kind]).abs().amax(1)
        assert (distance <= gap / 2 * largest + 1e-12).all()


@pytest.mark.usefixtures("torchao")
@pytest.mark.parametrize(("kind", "angle"), [("8bit", 0.03), ("4bit", 0.3)])
def test_training_stays_near_wide_moments(kind: Bits, angle: float) -> None:
    """Bound the angle (radians) between the updates of 20 steps; gradients are half noise.

    Rounding has no closed form here. In 8 bits entries are off by about half a percent of their
    size, in 4 bits by a tenth, and most of that averages out over 20 steps.
    """
    grads = [random(7, 64, 128) + random(i, 64, 128) for i in range(20)]
    ways = []
    for k in (kind, "fp32"):
        weight = nn.Parameter(random(0, 64, 128))
        updated(weight, fresh(weight, k), grads)
        ways.append((weight.detach() - random(0, 64, 128)).flatten())
    assert 1 > torch.cosine_similarity(*ways, dim=0) > math.cos(angle)


@pytest.mark.usefixtures("torchao")
@pytest.mark.parametrize("kind", KINDS)
def test_saved_state_is_found_to_the_bit(kind: Bits) -> None:
    """Codes and scales; blocks of nothing, of less than torchao's smallest scale, and others."""
    weight, state = trained(kind)
    saved = {name: plain(state[name]) for name in MOMENTS}
    again = fresh(weight, kind)
    for name in MOMENTS:
        assert type(saved[name]) is Tensor and saved[name].dtype == torch.float32
        write(again[name], saved[name])
        assert torch.equal(plain(again[name]), saved[name])
        values = saved[name].view(-1, BLOCKS[kind])
        used = (values != 0).any(1)
        assert used.any() and (name == "exp_avg_sq" or not used.all())
        for field in ("codes", "scale"):
            ours, theirs = (
                getattr(t, field).view(len(values), -1)[used] for t in (again[name], state[name])
            )
            assert torch.equal(ours, theirs), (name, field)
    twin = nn.Parameter(weight.detach().clone())
    again["step"] = state["step"].clone()
    for p, s in ((weight, state), (twin, again)):
        updated(p, s, [random(i, 64, 128) for i in (50, 51)])
    assert torch.equal(weight, twin)


@pytest.mark.usefixtures("torchao")
@pytest.mark.parametrize("kind", KINDS)
def test_state_of_wide_moments_can_be_taken_over(kind: Bits) -> None:
    """Pack values that no block can have held; saving the result is stable again."""
    _, wide = trained("fp32")
    _, state = trained(kind)
    for name in MOMENTS:
        write(state[name], wide[name])
        once = plain(state[name])
        assert not torch.equal(once, wide[name])
        assert name == "exp_avg" or (once[wide[name] > 0] > 0).all()
        write(state[name], once)
        assert torch.equal(plain(state[name]), once)
    write(wide["exp_avg"], plain(state["exp_avg"]))
    assert torch.equal(wide["exp_avg"], plain(state["exp_avg"])) and not is_packed(wide["exp_avg"])


@pytest.mark.usefixtures("torchao")
@pytest.mark.parametrize("kind", KINDS)
def test_a_large_parameter_goes_piece_by_piece(kind: Bits, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, _ = trained(kind)
    monkeypatch.setattr(low_bit, "PIECE", 1024)
    assert torch.equal(trained(kind)[0], whole)
    monkeypatch.setattr(low_bit, "PIECE", 3072)  # not a divisor of the 8192 entries
    assert torch.equal(trained(kind)[0], whole)


@pytest.mark.usefixtures("torchao")
@pytest.mark.parametrize("kind", KINDS)
def test_a_second_moment_above_zero_stays_above_zero(kind: Bits) -> None:
    """Else a weight whose gradient is small beside its block's would jump by momentum / eps."""
    weight = nn.Parameter(torch.zeros(64, 128))
    state = fresh(weight, kind)
    grad = torch.full((64, 128), 1e-4)
    grad[:, 0] = 1.0
    updated(weight, state, [grad, torch.zeros(64, 128)])
    assert (plain(state["exp_avg_sq"]) > 0).all()
    assert weight.abs().max() < 0.03  # two steps of 0.01 and a little


@pytest.mark.usefixtures("torchao")
@pytest.mark.parametrize("kind", KINDS)
def test_small_or_uneven_parameters_keep_wide_moments(kind: Bits) -> None:
    block = BLOCKS[kind]
    for shape, packs in (((4096,), True), ((4096 - block,), False), ((4096 + block // 2,), False)):
        weight, twin = (nn.Parameter(random(0, *shape)) for _ in range(2))
        state, wide = fresh(weight, kind), fresh(twin, "fp32")
        assert [is_packed(state[name]) for name in MOMENTS] == [packs, packs]
        updated(weight, state, [random(i, *shape) for i in (1, 2)])
        updated(twin, wide, [random(i, *shape) for i in (1, 2)])
        assert torch.equal(weight, twin) != packs


@pytest.mark.usefixtures("torchao")
@pytest.mark.parametrize(("kind", "want"), [("8bit", 2 + 2 * 4 / 256), ("4bit", 1 + 2 * 4 / 128)])
def test_bytes_of_a_parameter(kind: Bits, want: float) -> None:
    """Codes and scales; the table is 1 KiB (64 bytes in 4 bits) for a moment of any size."""
    weight = nn.Parameter(torch.zeros(256, 1024))
    total = 0
    for entry in new_state(weight, kind).values():
        names, _ = entry.__tensor_flatten__()  # type: ignore[attr-defined]
        total += sum(getattr(entry, name).nbytes for name in names if name != "qmap")
    assert total / weight.numel() == want


@pytest.mark.parametrize("kind", KINDS)
def test_without_torchao(kind: Bits, monkeypatch: pytest.MonkeyPatch) -> None:
    # Not the submodule: once imported it is found as an attribute of the package.
    monkeypatch.setitem(sys.modules, "torchao.optim", None)
    with pytest.raises(ConfigError, match=f"^optim.adamw_state={kind}: torchao .*pip install"):
        new_state(nn.Parameter(torch.zeros(4096)), kind)


@pytest.mark.usefixtures("torchao")
def test_shards_of_fsdp() -> None:
    """Pack a rank's own shard as if it were a parameter; nothing is exchanged."""

    def body(rank: int, world: int, kind: Bits) -> list[Tensor]:
        layer = nn.Linear(128, 129, bias=True)  # 65 and 64 rows: the first part fits no blocks
        wide = nn.Linear(128, 128, bias=False)
        torch.manual_seed(3)
        model = nn.Sequential(layer, nn.Linear(129, 128, bias=False), wide)
        fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
        params = list(model.parameters())
        states = [fresh(p, kind) for p in params]
        twins = [nn.Parameter(local_part(p.detach()).clone()) for p in params]
        theirs = [fresh(p, kind) for p in twins]
        for step in range(3):
            model(random(step, 4, 128)).square().sum().backward()
            for p, twin, ours, other in zip(params, twins, states, theirs, strict=True):
                assert isinstance(p.grad, DTensor)
                twin.grad = p.grad.to_local().clone()
                ours["step"] += 1
                other["step"] += 1
            with CommDebugMode() as comms:
                adamw_update(GROUP, list(params), states)
            assert comms.get_total_counts() == 0
            adamw_update(GROUP, list(twins), theirs)
            model.zero_grad()
        packed = 0
        for p, twin, ours, other in zip(params, twins, states, theirs, strict=True):
            assert torch.equal(local_part(p.detach()), twin)
            for name in MOMENTS:
                entry = ours[name]
                assert isinstance(entry, DTensor) and isinstance(p, DTensor)
                assert entry.shape == p.shape and entry.placements == p.placements
                saved = plain(entry)
                assert isinstance(saved, DTensor) and saved.shape == p.shape
                assert torch.equal(local_part(saved), plain(other[name]))
                write(entry, torch.zeros_like(saved))
                write(entry, saved)
                assert torch.equal(local_part(plain(entry)), local_part(saved))
                packed += is_packed(entry)
        return [torch.tensor(packed), plain(states[-1]["exp_avg"]).full_tensor()]  # type: ignore[attr-defined]

    for kind in KINDS:
        (first, whole), (second, same) = run_ranks(body, 2, kind)
        assert torch.equal(whole, same) and whole.shape == (128, 128)
        assert whole.abs().sum() > 0 and first > 0 and second > 0


def test_low_bit_update_of_nothing() -> None:
    low_bit_update(GROUP, [], [])
