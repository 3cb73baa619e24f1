"""Regions that run again: what they drop, what they don't disturb. One process, fp64.

Legend: B rows, D model, F hidden.
"""

from __future__ import annotations

import gc

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from checkpointing.recompute import BlockRecompute, RecomputeError, Replays
from checkpointing.rng_and_autocast import RngAndAutocastState
from checkpointing.tracing.live_bytes import LiveBytes
from megacpp.model.recompute import recomputing
from megacpp.model.regions import Region

B, D, HIDDEN = 4, 16, 32


class Layer(nn.Module):
    """x + down(dropout(silu(up(norm(x))))) with two regions in a row."""

    def __init__(self, regions: set[Region], replays: Replays, dropout: float = 0.0) -> None:
        super().__init__()
        self.recompute = BlockRecompute(frozenset(regions), replays)
        self.norm, self.up = nn.LayerNorm(D), nn.Linear(D, HIDDEN, bias=False)
        self.down, self.dropout = nn.Linear(HIDDEN, D, bias=False), dropout
        self.calls = {"norm": 0, "mlp": 0}

    def forward(self, x_BD: Tensor) -> Tensor:
        return self.recompute("block", self._forward, x_BD)

    def _forward(self, x_BD: Tensor) -> Tensor:
        n_BD = self.recompute("norm", self._norm, x_BD)
        return x_BD + self.down(self.recompute("mlp", self._hidden, n_BD))

    def _norm(self, x_BD: Tensor) -> Tensor:
        self.calls["norm"] += 1
        return self.norm(x_BD)

    def _hidden(self, n_BD: Tensor) -> Tensor:
        self.calls["mlp"] += 1
        return F.dropout(F.silu(self.up(n_BD)), self.dropout)


def stack(
    regions: set[Region], layers: int = 3, dropout: float = 0.0
) -> tuple[nn.Sequential, Replays]:
    replays = Replays()
    torch.manual_seed(0)
    return nn.Sequential(
        *(Layer(regions, replays, dropout) for _ in range(layers))
    ).double(), replays


def inputs() -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(B, D, dtype=torch.float64, generator=generator).requires_grad_()


def gradients(model: nn.Module, x_BD: Tensor, seed: int = 2) -> list[Tensor]:
    torch.manual_seed(seed)
    model(x_BD).square().sum().backward()
    found = [x_BD.grad, *(p.grad for p in model.parameters())]
    assert all(g is not None for g in found)
    return [g.clone() for g in found if g is not None]


CHOICES: tuple[set[Region], ...] = ({"norm"}, {"mlp"}, {"norm", "mlp"}, {"block"})


@pytest.mark.parametrize("regions", CHOICES, ids=lambda p: "+".join(sorted(p)))
@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_gradients_are_the_same_bits(regions: set[Region], dropout: float) -> None:
    plain, _ = stack(set(), dropout=dropout)
    model, replays = stack(regions, dropout=dropout)
    for found, expected in zip(gradients(model, inputs()), gradients(plain, inputs()), strict=True):
        assert torch.equal(found, expected)
    assert replays.counts == dict.fromkeys(regions, 3)


def test_random_numbers_after_the_backward_are_as_without() -> None:
    drawn = []
    for regions in (set(), {"mlp"}):
        model, _ = stack(regions, dropout=0.5)  # type: ignore[arg-type]
        gradients(model, inputs())
        drawn.append(torch.rand(3))
    assert torch.equal(*drawn)


class Generators:
    """Module of an accelerator whose generators can't be read while a graph is captured."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reads, self.capturing = 0, False
        monkeypatch.setattr(torch, "get_device_module", lambda device: self)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: self.capturing)

    def get_rng_state(self, device: torch.device) -> Tensor:
        if self.capturing:
            raise RuntimeError("Cannot call CUDAGeneratorImpl::get_state during graph capture")
        self.reads += 1
        return torch.zeros(16, dtype=torch.uint8)

    def set_rng_state(self, state: Tensor, device: torch.device) -> None:
        assert not self.capturing


class OnGpu(Tensor):
    """Tensor of the CPU that says that it is on a GPU."""

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return torch.device("cuda", 0)


@pytest.fixture
def generators(monkeypatch: pytest.MonkeyPatch) -> Generators:
    """Every region has a further argument, on a GPU."""
    plain, there = RngAndAutocastState.now, torch.ones(()).as_subclass(OnGpu)
    monkeypatch.setattr(RngAndAutocastState, "now", lambda args: plain([*args, there]))
    return Generators(monkeypatch)


def test_no_generator_is_read_while_a_graph_is_captured(generators: Generators) -> None:
    model, _ = stack({"norm", "mlp"})
    expected = gradients(model, inputs())
    assert generators.reads == 2 * 2 * 3  # before and after each region
    generators.capturing = True
    model.zero_grad()
    for found, other in zip(gradients(model, inputs()), expected, strict=True):
        assert torch.equal(found, other)
    assert generators.reads == 2 * 2 * 3


def test_a_region_that_draws_is_not_captured(generators: Generators) -> None:
    model, _ = stack({"mlp"}, dropout=0.5)
    gradients(model, inputs())
    generators.capturing = True
    with pytest.raises(RecomputeError, match="region mlp draws random numbers"):
        model(inputs())


@pytest.mark.parametrize(
    ("regions", "numbers"),
    [
        # up's input n, pre-activation, silu's result for down; x and the statistics of the norm
        (set(), 2 * D + 2 * HIDDEN + 2),
        ({"norm"}, D + 2 * HIDDEN),  # n and the statistics are gone
        ({"mlp"}, 2 * D + 2),  # n stays, as the argument of the region
        ({"norm", "mlp"}, D),  # the chain goes back to x
        ({"block"}, D),
    ],
    ids=lambda value: "+".join(sorted(value)) if isinstance(value, set) else "",
)
def test_what_a_layer_keeps(regions: set[Region], numbers: int) -> None:
    model, _ = stack(regions, layers=2)
    x_BD = inputs()
    with LiveBytes() as live:
        y_BD = model(x_BD)
        # x of the first layer came from outside; the last result is y.
        assert live.alive() == 8 * B * (2 * numbers - D + D)
        y_BD.sum().backward()
        del y_BD
        x_BD.grad = None
        model.zero_grad()
        gc.collect()
        assert live.alive() == 0


def test_a_piece_runs_once_more_and_not_at_all_without_gradients() -> None:
    model, replays = stack({"norm", "mlp"}, layers=1)
    layer = model[0]
    assert isinstance(layer, Layer)
    with torch.no_grad():
        model(inputs())
    assert layer.calls == {"norm": 1, "mlp": 1} and not replays.counts
    gradients(model, inputs())
    assert layer.calls == {"norm": 3, "mlp": 3}


def test_a_second_backward_through_the_same_graph_runs_it_again() -> None:
    model, replays = stack({"norm", "mlp"}, layers=1)
    x_BD = inputs()
    loss = model(x_BD).square().sum()
    loss.backward(retain_graph=True)
    assert x_BD.grad is not None
    first, x_BD.grad = x_BD.grad, None
    loss.backward()
    assert torch.equal(first, x_BD.grad)
    assert replays.counts == {"norm": 2, "mlp": 2}


def test_forwards_in_flight_do_not_mix() -> None:
    """Microbatches of a pipeline: all forwards first, backwards in any order."""
    model, _ = stack({"norm", "mlp"})
    plain, _ = stack(set())
    parts = inputs().detach().unsqueeze(1).unbind(0)
    losses = [model(part).square().sum() for part in parts]
    for loss in (losses[2], losses[0], losses[3], losses[1]):
        loss.backward()
    for part in (parts[2], parts[0], parts[3], parts[1]):
        plain(part).square().sum().backward()
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        assert p.grad is not None and q.grad is not None and torch.equal(p.grad, q.grad)


class Odd(nn.Module):
    """Block with one region that the test provides."""

    def __init__(self, fn: object, check: str = "default") -> None:
        super().__init__()
        self.recompute = BlockRecompute(frozenset({"mlp"}), Replays(), check=check)  # type: ignore[arg-type]
        self.fn = fn

    def forward(self, x_BD: Tensor) -> Tensor:
        return self.recompute(
            "block", lambda x: self.after(self.recompute("mlp", self.fn, x)), x_BD
        )  # type: ignore[arg-type]

    def after(self, h_BD: Tensor) -> Tensor:
        return h_BD.sin()


def test_a_piece_that_does_something_else_is_found() -> None:
    def fewer(x_BD: Tensor) -> Tensor:
        return x_BD if recomputing() else x_BD.exp()

    def narrower(x_BD: Tensor) -> Tensor:
        return (x_BD[:2] if recomputing() else x_BD).exp()

    for fn in (fewer, narrower):
        with pytest.raises(RecomputeError, match="run again"):
            Odd(fn)(inputs()).sum().backward()


def test_the_shape_check_can_be_left_out() -> None:
    """Rows of experts may be as many as they like, as long as the gradient's shapes fit."""

    def padded(x_BD: Tensor) -> Tensor:
        return x_BD.new_ones(1 if recomputing() else B, 1) * x_BD.exp()

    x_BD = inputs()
    Odd(padded, check="none")(x_BD).sum().backward()
    assert x_BD.grad is not None
    with pytest.raises(RecomputeError):
        Odd(padded)(inputs()).sum().backward()


def test_a_result_that_was_changed_in_place_is_kept() -> None:
    class InPlace(Odd):
        def after(self, h_BD: Tensor) -> Tensor:
            return h_BD.add_(1.0).sin()

    def shifted(x_BD: Tensor) -> Tensor:
        return x_BD + 0.5

    x_BD, y_BD = inputs(), inputs()
    InPlace(shifted)(x_BD).sum().backward()
    ((y_BD + 0.5) + 1.0).sin().sum().backward()  # the same two roundings
    assert x_BD.grad is not None and y_BD.grad is not None
    assert torch.equal(x_BD.grad, y_BD.grad)


def test_an_argument_that_was_changed_in_place_is_found() -> None:
    class Changed(Odd):
        def forward(self, x_BD: Tensor) -> Tensor:
            h_BD = x_BD * 1.0
            out = self.recompute("block", lambda h: self.recompute("mlp", self.fn, h).sin(), h_BD)  # type: ignore[arg-type]
            h_BD.add_(1.0)
            return out

    with pytest.raises(RecomputeError, match="in place"):
        Changed(torch.exp)(inputs()).sum().backward()


def test_autocast_is_that_of_the_forward() -> None:
    found = []
    for regions in (set(), {"norm", "mlp"}):
        model, _ = stack(regions)  # type: ignore[arg-type]
        model = model.float()
        x_BD = inputs().detach().float().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(x_BD).square().sum()
        loss.backward()
        found.append([p.grad for p in model.parameters()])
    for a, b in zip(*found, strict=True):
        assert a is not None and b is not None and torch.equal(a, b)


def test_a_decision_is_made_once() -> None:
    """Check that a choice isn't made again, even if it would differ."""

    class Choosing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.recompute, self.made = BlockRecompute(frozenset({"block"}), Replays()), 0

        def choose(self) -> Tensor:
            self.made += 1
            return torch.tensor([self.made, 0])

        def forward(self, x_BD: Tensor) -> Tensor:
            return self.recompute("block", self._forward, x_BD)

        def _forward(self, x_BD: Tensor) -> Tensor:
            return x_BD.exp()[self.recompute.keep(self.choose)].square()

    model, x_BD = Choosing(), inputs()
    model(x_BD).sum().backward()
    assert model.made == 1 and x_BD.grad is not None
    assert x_BD.grad.abs().sum(1).nonzero().flatten().tolist() == [0, 1]
