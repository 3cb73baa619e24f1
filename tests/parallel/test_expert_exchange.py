"""How rows travel to experts: what is sent, and what the host waits for."""

from __future__ import annotations

import math
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
import torch.testing._internal.distributed.fake_pg  # registers the backend "fake"
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module
from torch.utils._python_dispatch import TorchDispatchMode

from megacpp.blocks.experts.config import MoEConfig
from megacpp.blocks.experts.module import MixtureOfExperts
from megacpp.config.schema import MeshConfig, ModelConfig
from megacpp.lessons.experts import (
    CPU,
    MOE,
    D,
    Leaving,
    Waits,
    choices,
    mixer_of,
    randn,
    spread_over,
    travel,
)
from megacpp.model.documents import Documents
from megacpp.model.init import initialise
from parallel.expert.even_routing import EvenRouting
from parallel.expert.parallel import ExpertCombine, ExpertParallel, Kind
from parallel.start import join
from tests.collectives import CollectiveCounter
from tests.differences import largest
from tests.ranks import run_ranks

KINDS: tuple[Kind, Kind] = ("per_rank", "per_expert")
FOUR, TWO = MeshConfig(dp_shard=4, ep=4), MeshConfig(dp_shard=2, ep=2)
# What a token meets on other ranks, and what crosses between ranks for it, in DeepSeek-like sizes.
BIG = MoEConfig(num_experts=64, top_k=6, hidden_dim=8, num_shared=0)


def bytes_of_rank(rank: int, _size: int) -> dict[str, Any]:
    world, tokens, dim = join(FOUR, CPU), 512, 32
    indices_TK = choices(tokens, BIG, seed=rank)
    found: dict[str, Any] = {}
    for kind in KINDS:
        mixer = MixtureOfExperts(ModelConfig(dim=dim, depth=1, moe=BIG)).to(torch.bfloat16)
        initialise(mixer, mixer.init_rules(), seed=0)
        spread_over(mixer, world, ExpertParallel(kind))
        with Leaving() as seen:
            gates = travel(mixer, torch.ones(tokens, dim, dtype=torch.bfloat16), indices_TK)
        assert gates.isfinite().all()
        found[kind] = seen.bytes, seen.calls
    away_TK = torch.where(indices_TK // 16 == rank, -1, indices_TK // 16)
    found["copies"] = int((away_TK >= 0).sum())
    found["ranks"] = sum(len(set(of_token) - {-1}) for of_token in away_TK.tolist())
    return found


def test_bytes_that_cross_between_ranks() -> None:
    """Counted from real runs: 4 rows of D per copy (there and back, twice), by token 1.79x fewer.

    With N experts of which a token takes K, a rank of W has none of them with probability
    C(N - N/W, K) / C(N, K). 2,048 tokens are a sample: its mean is off by 0.013 copies at 1 sigma.
    """
    ranks = run_ranks(bytes_of_rank, 4)
    N, K, W, D_bytes = 64, 6, 4, 32 * 2
    copies, met = (sum(r[key] for r in ranks) for key in ("copies", "ranks"))
    p = 1 - math.comb(N - N // W, K) / math.comb(N, K)
    tokens = 4 * 512
    assert (W - 1) * p == pytest.approx(2.51, abs=0.005)
    assert met / tokens == pytest.approx((W - 1) * p, abs=4 * 0.013)
    assert copies / tokens == pytest.approx(K * (W - 1) / W, abs=4 * 0.023)
    by_copy, by_token = (
        sum(r[kind][0][torch.bfloat16] for r in ranks) for kind in ("per_expert", "per_rank")
    )
    assert by_copy == 4 * copies * D_bytes and by_token == 4 * met * D_bytes
    assert by_copy / by_token == pytest.approx(1.79, abs=0.04)
    for rank in ranks:
        labels, calls = rank["per_rank"]
        assert rank["per_expert"][1] == {torch.int64: 1, torch.bfloat16: 4}
        assert calls == {torch.int64: 1, torch.bfloat16: 4, torch.float32: 2}
        assert labels[torch.int64] == 3 * (1 + 16) * 8
    # Weights and ids of a row: 6 of each in fp32, and their gradients. Under 1% at D = 2,560.
    sent = sum(r["per_rank"][0][torch.float32] for r in ranks)
    back = sum(r["per_rank"][0][torch.float32] for r in ranks) - met * 12 * 4
    assert sent == 2 * met * 12 * 4 and back == met * 12 * 4


def uneven_rank(rank: int, _size: int) -> dict[str, float]:
    """Ranks with 5, 0, 7 and 3 tokens; experts 6 and 7 are never chosen."""
    world, sizes = join(FOUR, CPU), [5, 0, 7, 3]
    x_TD, cotangent_TD = randn(15, D, seed=1), randn(15, D, seed=2)
    first = sum(sizes[:rank])
    here = slice(first, first + sizes[rank])
    found = {}
    moe = replace(MOE, top_k=2)
    for kind in KINDS:
        whole, spread = (mixer_of(moe, torch.float64, [0, 1, 2, 3, 4, 5]) for _ in range(2))
        spread_over(spread, world, ExpertParallel(kind))
        x_D, own_D = (x.clone().requires_grad_() for x in (x_TD[None], x_TD[None, here]))
        y_D, own_y_D = whole(x_D), spread(own_D)
        y_D.backward(cotangent_TD[None])
        own_y_D.backward(cotangent_TD[None, here])
        assert x_D.grad is not None and own_D.grad is not None
        found[f"{kind} y"] = difference(own_y_D, y_D[:, here])
        found[f"{kind} x"] = difference(own_D.grad, x_D.grad[:, here])
        for (name, p), own in zip(whole.named_parameters(), spread.parameters(), strict=True):
            grad, want = own.grad, p.grad
            assert grad is not None and want is not None
            if "experts" in name:
                grad, want = grad.to_local(), want.chunk(4)[rank]  # type: ignore[attr-defined]
            else:
                grad = world.sum(grad.clone(), "stage")
            found[f"{kind} {name}"] = difference(grad, want)
    return found


def difference(got: Tensor, want: Tensor) -> float:
    assert got.shape == want.shape
    return float((got - want).abs().max()) if got.numel() else 0.0


def test_ranks_without_tokens() -> None:
    for found in run_ranks(uneven_rank, 4):
        assert largest(found.values()) < 1e-12, found


def waiting_rank(rank: int, _size: int) -> dict[str, list[str]]:
    world, found = join(TWO, CPU), {}
    styles = {kind: (MOE, ExpertParallel(kind)) for kind in KINDS}
    styles["slots"] = replace(MOE, capacity_factor=1.25), ExpertParallel()
    styles["even"] = MOE, ExpertParallel(balanced=True)
    for name, (moe, style) in styles.items():
        mixer = mixer_of(moe, torch.float64, [])
        spread_over(mixer, world, style)
        x, docs = randn(1, 40, D, seed=rank).requires_grad_(), Documents.rows(1, 40)
        with Waits() as waits:
            mixer(x, docs).sum().backward()
        found[name] = waits.seen
    return found


def test_the_host_waits_once_or_never() -> None:
    for found in run_ranks(waiting_rank, 2):
        once = ["tolist"]
        assert found == {"per_rank": once, "per_expert": once, "slots": [], "even": []}


def even_rank(rank: int, _size: int) -> dict[str, bool]:
    """`balanced` against the same choices made by a router: what the host foretold is true."""
    world, found = join(FOUR, CPU), {}
    for kind in KINDS:
        for tokens in (16, 19):  # 19 * 3 choices are no multiple of 8 experts
            indices_TK = EvenRouting(8, 3).indices(tokens, CPU)
            gates = []
            for balanced in (False, True):
                mixer = mixer_of(MOE, torch.float32, [])
                spread_over(mixer, world, ExpertParallel(kind, balanced))
                x_TD = randn(tokens, D, seed=rank).float()
                wanted = choices(tokens, MOE, seed=rank) if balanced else indices_TK
                with CollectiveCounter() as seen:
                    gates.append((travel(mixer, x_TD, wanted), seen.calls))
            found[f"{kind} {tokens}"] = torch.equal(gates[0][0], gates[1][0])
            found[f"{kind} {tokens} calls"] = gates[0][1] == gates[1][1]
    return found


def test_even_routing_on_real_ranks() -> None:
    for found in run_ranks(even_rank, 4):
        assert all(found.values()), found


def test_even_routing_is_even() -> None:
    """All experts alike, no expert twice for a token, and about the ranks that chance meets."""
    even = EvenRouting(64, 6)

    def copies(tokens: int) -> list[int]:
        to_We, from_We = even.copies(tokens, 4, 1)
        assert from_We == [to_We[1]] * 4
        return [n for of_rank in to_We for n in of_rank]

    def rows(tokens: int) -> list[int]:
        to_Wn, from_Wn = even.rows(tokens, 4, 1)
        assert from_Wn == [to_Wn[1]] * 4
        return [n for n, *_ in to_Wn]

    indices_TK = even.indices(320, CPU)
    assert indices_TK.flatten().bincount(minlength=64).tolist() == [30] * 64 == copies(320)
    assert all(len(set(of_token)) == 6 for of_token in indices_TK.tolist())
    for tokens in (1, 7, 32, 100):
        ranks = [{e // 16 for e in of_token} for of_token in even.indices(tokens, CPU).tolist()]
        assert rows(tokens) == [sum(r in met for met in ranks) for r in range(4)]
        counts = even.indices(tokens, CPU).flatten().bincount(minlength=64).tolist()
        assert copies(tokens) == counts
    met = sum(rows(3200)) / 3200
    assert met == pytest.approx(4 * (1 - math.comb(48, 6) / math.comb(64, 6)), rel=0.05)


FAKE = {
    "slots": (replace(MOE, capacity_factor=1.25), ExpertParallel()),
    "even per_rank": (MOE, ExpertParallel("per_rank", balanced=True)),
    "even per_expert": (MOE, ExpertParallel("per_expert", balanced=True)),
    "per_rank": (MOE, ExpertParallel("per_rank")),
    "padded": (MOE, ExpertParallel("padded")),
}


def without_values(rank: int, _size: int, how: str) -> dict[torch.dtype, int] | None:
    """What a rank sends of eight that exist in name only; four of them share the experts."""
    mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("a", "ep"))["ep"]
    moe, style = FAKE[how]
    meta = how == "padded"  # as on a GPU: reading a count would fail
    if meta:
        torch.autocast = lambda *args, **kwargs: nullcontext()  # this device has none
        torch.is_autocast_enabled = lambda *args: False
    with torch.device("meta") if meta else FakeTensorMode():
        mixer = MixtureOfExperts(ModelConfig(dim=D, depth=1, moe=moe))
        for name, p in list(mixer.experts.named_parameters()):
            setattr(mixer.experts, name, torch.nn.Parameter(p[:2].detach().clone()))
        parallelize_module(mixer, mesh, style)
        x = torch.randn(2, 9, D, requires_grad=True)
        if how == "per_rank":
            with pytest.raises(RuntimeError):
                mixer(x)
            return None
        with Leaving() as seen:
            mixer(x).sum().backward()
        assert x.grad is not None and x.grad.shape == x.shape
        assert all(p.grad is not None and p.grad.shape == p.shape for p in mixer.parameters())
    return dict(seen.calls)


@pytest.mark.parametrize("how", FAKE)
def test_runs_without_values(how: str) -> None:
    """Tensors and peers that have shapes only; without even sizes it needs values and says so.

    What goes to all ranks needs none, and a GPU doesn't wait: as on meta, where no value exists.

    In forks: a backward of fake tensors in this process would forbid those of later forks, where
    torch is built for CUDA.
    """
    calls = run_ranks(without_values, 8, how, backend="fake")[5]
    # Counts (but not of slots), then rows there and back, twice; labels and their gradients.
    # What goes to all is gathered; all else is exchanged.
    rows = {"slots": 4, "even per_expert": 4, "even per_rank": 6, "per_rank": None}.get(how, 4)
    counts = {} if how in ("slots", "padded") else {torch.int64: 1}
    assert calls == (None if rows is None else {torch.float32: rows} | counts)


def narrow_rank(rank: int, _size: int) -> dict[str, float]:
    """Errors of bf16 in the norm, against one process in fp64 with the same rounded weights."""
    world, found = join(TWO, CPU), {}
    x_TD = randn(2, 40, D, seed=4).to(torch.bfloat16)
    whole = mixer_of(MOE, torch.float32, []).to(torch.bfloat16).double()
    whole_x_TD = x_TD.double().requires_grad_()
    whole_y_TD = whole(whole_x_TD)
    whole_y_TD.backward(torch.ones_like(whole_y_TD))
    assert whole_x_TD.grad is not None
    for kind in (*KINDS, "padded"):
        spread = mixer_of(MOE, torch.float32, []).to(torch.bfloat16)
        spread_over(spread, world, ExpertParallel(kind))
        own_TD = x_TD[rank : rank + 1].clone().requires_grad_()
        y_TD = spread(own_TD)
        y_TD.backward(torch.ones_like(y_TD))
        router = world.sum(spread.router.weight.grad.clone(), "stage")  # type: ignore[union-attr]
        pairs = {
            "y": (y_TD, whole_y_TD[rank : rank + 1]),
            "x": (own_TD.grad, whole_x_TD.grad[rank : rank + 1]),
            "router": (router, whole.router.weight.grad),
        }
        for name, (got, want) in pairs.items():
            assert got is not None and want is not None
            found[f"{kind} {name}"] = float((got.double() - want).norm() / want.norm())
    return found


def test_bf16_rounds_once_more() -> None:
    """One process rounds 8 times on the way (tests/model/test_moe.py); summed ranks once more."""
    for found in run_ranks(narrow_rank, 2):
        for name, value in found.items():
            assert value < (8 if "per_expert" in name else 9) * 2.0**-9, (name, value)


def isolated_rank(rank: int, _size: int) -> dict[str, bool]:
    """Tokens of document 0 change, on both ranks; are those of the others bitwise the same?"""
    world, found = join(TWO, CPU), {}
    moe = replace(MOE, sequence_loss=0.5, z_loss=0.5, hidden_dim=16)
    docs = Documents.from_ids(torch.tensor([[0] * 40 + [1] * 30]))
    for kind in KINDS:
        mixer = mixer_of(moe, torch.float32, [])
        spread_over(mixer, world, ExpertParallel(kind))
        outputs = []
        for seed in (0, 1):
            x = randn(1, 70, D, seed=10 + rank).float()
            x[:, :40] += randn(1, D, seed=seed).float()
            x.requires_grad_()
            y = mixer(x, docs)
            y.square().sum().backward()
            assert x.grad is not None
            outputs.append((y.detach(), x.grad))
        (y, g), (other_y, other_g) = outputs
        found[f"{kind} kept"] = torch.equal(y[:, 40:], other_y[:, 40:]) and torch.equal(
            g[:, 40:], other_g[:, 40:]
        )
        found[f"{kind} moved"] = not torch.equal(y[:, :40], other_y[:, :40])
    return found


class Order(TorchDispatchMode):
    """Products, sends of rows and waits, in the order of their calls."""

    NAMES: ClassVar = {
        "all_to_all_single": "send",
        "wait_tensor": "wait",
        "mm": "product",
        "addmm": "product",
    }

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in self.NAMES and args[0].is_floating_point():
            self.seen.append(self.NAMES[name])
        return func(*args, **(kwargs or {}))


def order_rank(rank: int, _size: int) -> dict[str, tuple[list[str], list[str]]]:
    world, found = join(TWO, CPU), {}
    for name, kind, capacity in CASES:
        moe = replace(MOE, num_shared=1, capacity_factor=capacity)
        mixer = mixer_of(moe, torch.float32, [])
        spread_over(mixer, world, ExpertParallel(kind))
        x = randn(1, 12, D, seed=rank).float().requires_grad_()
        with Order() as forward:
            y = mixer(x)
        with Order() as backward:
            y.square().sum().backward()
        found[name] = forward.seen, backward.seen
    return found


CASES: list[tuple[str, Kind, float | None]] = [
    ("per_rank", "per_rank", None),
    ("per_expert", "per_expert", None),
    ("padded", "padded", None),
    ("slots", "per_rank", 1.25),
]


def test_rows_travel_while_the_shared_expert_computes() -> None:
    """Three products beside the way back of outputs, six beside the way there of gradients."""
    for found in run_ranks(order_rank, 2):
        for name, (forward, backward) in found.items():
            last = len(forward) - 1 - forward[::-1].index("send")
            assert forward[last:] == ["send", *["product"] * 3, "wait"], name
            first = backward.index("send")
            assert backward[first : first + 8] == ["send", *["product"] * 6, "wait"], name


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_a_sum_has_the_type_that_is_asked_for(dtype: torch.dtype | None) -> None:
    rows_SD = torch.ones(2, 4)
    counts: Any = SimpleNamespace(back=lambda rows, _, work: (rows + rows, work()))
    y_TD = ExpertCombine()(rows_SD, torch.ones(2, 1), counts, lambda: rows_SD, dtype)
    assert y_TD.dtype == (dtype or torch.float32) and (y_TD == 3).all()


def test_documents_are_isolated() -> None:
    for found in run_ranks(isolated_rank, 2):
        assert all(found.values()), found
