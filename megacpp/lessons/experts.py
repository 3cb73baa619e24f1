"""E mixers on forked ranks, their tokens spread in every way, against one process with all tokens.

Legend: B rows, T tokens of a row, D model.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any, Literal
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module
from torch.utils._python_dispatch import TorchDispatchMode

from megacpp.blocks.experts.config import MoEConfig
from megacpp.blocks.experts.module import MixtureOfExperts
from megacpp.blocks.experts.null_router import NullRouter
from megacpp.config.schema import MeshConfig, ModelConfig
from megacpp.lessons.differences import relative
from megacpp.model.documents import Documents
from megacpp.model.init import Slice, initialise
from parallel.context.layout import ContextLayout
from parallel.expert.parallel import ExpertParallel, Kind, SpreadRouter
from parallel.fsdp import shard_slice
from parallel.mesh import World
from parallel.notation import Array
from parallel.styles import shard_parameter

CPU = torch.device("cpu")
B, T, D = 4, 16, 12
MOE = MoEConfig(num_experts=8, top_k=3, hidden_dim=10, shared_hidden_dim=7, route_scale=1.7)
LOSSES = replace(MOE, balance_loss=0.7, sequence_loss=0.3, z_loss=0.2)
ROUTERS = {
    "sigmoid": LOSSES,
    "softmax_post": replace(LOSSES, score="softmax"),
    "softmax_pre": replace(LOSSES, score="softmax", softmax_order="pre"),
    "groups": replace(LOSSES, num_groups=4, top_k_groups=2),
    "no_shared": replace(LOSSES, num_shared=0, activation="relu2"),
    "shared_gate": replace(LOSSES, shared_gate=True, num_shared=2),
    "one_expert": replace(LOSSES, top_k=1),
    "every_expert": replace(LOSSES, top_k=8),
    "nulls": replace(LOSSES, null_rho=0.5),
    "nulls_softmax": replace(LOSSES, null_rho=0.5, score="softmax", num_groups=4, top_k_groups=3),
    "roomy_nulls": replace(LOSSES, null_rho=0.5, capacity_factor=8 / 3),
    "roomy": replace(LOSSES, capacity_factor=8 / 3),  # every expert could take every token
}
MESHES = {
    "dp2": MeshConfig(dp_shard=2, ep=2),
    "cp2": MeshConfig(dp_shard=1, cp=2, ep=2),
    "tp2": MeshConfig(dp_shard=1, tp=2, ep=2),
    "dp4": MeshConfig(dp_shard=4, ep=4),
    "cp2 tp2": MeshConfig(dp_shard=1, cp=2, tp=2, ep=4),
    "dp2 cp2": MeshConfig(dp_shard=2, cp=2, ep=4),
    "dp2 tp2, experts twice": MeshConfig(dp_shard=2, tp=2, ep=2),
    "replicas, experts twice": MeshConfig(dp_replicate=2, dp_shard=1, cp=2, ep=2),
}
# Experts that the selection bias prefers: all of the first rank, or all but the last rank's.
BIASES = {"even": [], "first": [0, 1, 2], "last": [5, 6, 7], "one": [4], "nulls": []}


@dataclass(frozen=True)
class ExpertCase:
    """E mixer to compare: router, mesh, way of dispatch, preferred experts, numeric type."""

    router: str
    mesh: str
    kind: Kind = "per_rank"
    bias: str = "even"
    dtype: Literal["fp64", "fp32"] = "fp64"

    @property
    def world(self) -> int:
        """Number of ranks."""
        m = MESHES[self.mesh]
        return m.dp_replicate * m.dp_shard * m.cp * m.tp

    @property
    def torch_dtype(self) -> torch.dtype:
        """Numeric type of the mixer."""
        return torch.float64 if self.dtype == "fp64" else torch.float32

    def __str__(self) -> str:
        return f"{self.router} {self.mesh} {self.kind} {self.bias} {self.dtype}"


@dataclass
class ExpertOutcome:
    """Errors relative to the largest entry, by tensor; what must be equal as it is."""

    errors: dict[str, float]
    counts: list[int]
    expected_counts: list[int]
    same_bias: bool


def outcome(case: ExpertCase, world: World) -> ExpertOutcome:
    """Compare one rank's part of a case with the whole on one process."""
    x_BTD, cotangent_BTD = randn(B, T, D, seed=1), randn(B, T, D, seed=2)
    x_BTD, cotangent_BTD = x_BTD.to(case.torch_dtype), cotangent_BTD.to(case.torch_dtype)
    docs = Documents.from_ids((randn(B, T, seed=3) > 0.9).cumsum(1))  # some longer than a rank's
    whole = mixer_of(ROUTERS[case.router], case.torch_dtype, BIASES[case.bias])
    if case.bias == "nulls":  # some tokens go nowhere; of the last rows all
        assert isinstance(whole.router, NullRouter)
        whole.router.null_score.fill_(0.9)
        x_BTD[-1] = 0.0
    want = backward(whole, x_BTD, docs, cotangent_BTD)

    rows, index_t = own_tokens(world)
    here = Documents(docs.ids_BT[rows], docs.positions_BT[rows])
    spread = mixer_of(ROUTERS[case.router], case.torch_dtype, BIASES[case.bias])
    spread.router.load_state_dict(whole.router.state_dict())
    spread_over(spread, world, ExpertParallel(case.kind))
    part = here if len(index_t) == T else here.take(index_t)
    x_btD, cotangent_btD = x_BTD[rows][:, index_t], cotangent_BTD[rows][:, index_t]
    got = backward(spread, x_btD, part, cotangent_btD)
    for name in ("y", "x"):
        want[name] = want[name][rows][:, index_t]
    assert got.keys() == want.keys()
    errors = {name: error(complete(got[name], name, world), want[name]) for name in want}
    counts_E = world.sum(spread.router.tokens_per_expert, "stage")
    expected = whole.router.tokens_per_expert.tolist()
    counted = counts_E.tolist()
    spread.router.update_bias()
    whole.router.update_bias()
    biases = [name for name, _ in whole.router.named_buffers() if "_bias" in name or "null" in name]
    same_bias = all(
        map(torch.equal, *([getattr(r, b) for b in biases] for r in (spread.router, whole.router)))
    )
    return ExpertOutcome(errors, counted, expected, same_bias)


def mixer_of(moe: MoEConfig, dtype: torch.dtype, preferred: list[int]) -> MixtureOfExperts:
    """Return a mixer that is the same on any rank."""
    mixer = MixtureOfExperts(ModelConfig(dim=D, depth=8, init_std=0.5, moe=moe)).to(dtype)
    initialise(mixer, mixer.init_rules(), seed=1)
    mixer.router.aux_scale.fill_(1.0 / (B * T))
    mixer.router.expert_bias[preferred] = 9.0
    return mixer


def spread_over(mixer: MixtureOfExperts, world: World, style: ExpertParallel) -> None:
    """Shard experts over `ep` (and `efsdp`), and replace the mixer's submodules."""
    for leaf in dict(mixer.experts.named_parameters()):
        shard_parameter(mixer.experts, leaf, Array.parse("[E_ep, I, D]"), world.meshes["ep"])
    parallelize_module(mixer, world.meshes["ep"], style)
    parallelize_module(mixer.router, world.meshes["stage"], SpreadRouter(world.meshes["row"]))
    if world.degree("stage") > world.degree("ep"):
        unit = fully_shard(mixer.experts, mesh=world.meshes["expert_shard"])
        unit.set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(True)


def own_tokens(world: World) -> tuple[slice, Tensor]:
    """Return this rank's rows, and the positions of its tokens: cut over `cp`, then over `tp`."""
    share = B // world.degree("batch")
    first = world.coordinate("batch") * share
    layout = ContextLayout.for_rank("head_tail", world.coordinate("cp"), world.degree("cp"))
    index_t = layout.index(T).chunk(world.degree("tp"))[world.coordinate("tp")]
    return slice(first, first + share), index_t


def backward(
    mixer: MixtureOfExperts, x_BTD: Tensor, docs: Documents, cotangent_BTD: Tensor
) -> dict[str, Tensor]:
    """Return the output, and the gradients of the input and of every parameter.

    Args:
        mixer: experts and their router.
        x_BTD: inputs.
        docs: documents of the rows.
        cotangent_BTD: gradient of the output.
    """
    x_BTD = x_BTD.clone().requires_grad_()
    y_BTD = mixer(x_BTD, docs)
    y_BTD.backward(cotangent_BTD)
    assert x_BTD.grad is not None
    found = {"y": y_BTD.detach(), "x": x_BTD.grad}
    for name, p in mixer.named_parameters():
        assert p.grad is not None, name
        found[name] = p.grad
    return found


def complete(grad: Tensor, name: str, world: World) -> Slice:
    """Return a rank's part of a gradient of any shape (`grad`), summed over the ranks."""
    if not isinstance(grad, DTensor) and name not in ("x", "y"):
        grad = world.sum(grad.clone(), "stage")
    return shard_slice(grad)


def error(got: Slice, want: Tensor) -> float:
    """Return the largest difference, relative to the largest entry of `want`, of any shape."""
    box = tuple(slice(a, a + n) for a, n in zip(got.offset, got.local.shape, strict=True))
    return relative(got.local, want[box], want)


def randn(*shape: int, seed: int = 0) -> Tensor:
    """Return normal random numbers in fp64."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


class Leaving(TorchDispatchMode):
    """Bytes of all-to-alls that leave this rank, by dtype, and how many there were."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes: dict[torch.dtype, int] = {}
        self.calls: dict[torch.dtype, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops._c10d_functional.all_to_all_single.default:
            x, _, splits, name = args
            others = sum(splits) - splits[dist.distributed_c10d._resolve_process_group(name).rank()]
            row_bytes = x[:1].numel() * x.itemsize
            self.bytes[x.dtype] = self.bytes.get(x.dtype, 0) + others * row_bytes
            self.calls[x.dtype] = self.calls.get(x.dtype, 0) + 1
        return func(*args, **(kwargs or {}))


class Waits:
    """Log of the calls that make the host wait for a value, while the `with` block runs."""

    NAMES = ("item", "tolist", "__bool__", "__int__", "__float__", "nonzero")

    def __enter__(self) -> Waits:
        self.seen: list[str] = []
        self._patches = ExitStack()
        for name in self.NAMES:
            noted = self._noted(name, getattr(Tensor, name))
            self._patches.enter_context(mock.patch.object(Tensor, name, noted))
        return self

    def __exit__(self, *error: object) -> None:
        self._patches.close()

    def _noted(self, name: str, original: Callable) -> Callable:
        def call(*args: Any, **kwargs: Any) -> Any:
            self.seen.append(name)
            return original(*args, **kwargs)

        return call


def choices(tokens: int, moe: MoEConfig, seed: int) -> Tensor:
    """Return uniform random experts, `[T, K]`."""
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(tokens, moe.num_experts, generator=generator).topk(moe.top_k, dim=1).indices


def travel(mixer: MixtureOfExperts, x_TD: Tensor, indices_TK: Tensor) -> Tensor:
    """Run forward and backward of routed experts alone; return the gate weights' gradient."""
    weights_TK = torch.ones(indices_TK.shape, requires_grad=True)
    x_TD = x_TD.clone().requires_grad_()
    arrived, trip = mixer.dispatch(x_TD, indices_TK, weights_TK)
    mixer.combine(mixer.experts(*arrived)[0], weights_TK, trip).sum().backward()
    assert x_TD.grad is not None and weights_TK.grad is not None
    return weights_TK.grad
