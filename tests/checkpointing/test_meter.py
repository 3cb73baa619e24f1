"""Meter: by hand on small examples, and equal on real and fake tensors, on any mesh.

Figures are bytes and counts, so they are compared exactly. Experts are chosen evenly on both sides:
the rows of each can't depend on values that don't exist.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections import Counter
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, UntypedStorage, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.utils.checkpoint import checkpoint

from checkpointing.apply import ActivationCheckpointing
from checkpointing.tracing.live_bytes import LiveBytes
from checkpointing.tracing.meter import Meter
from megacpp.blocks.experts.router import Router
from megacpp.cli.activations import POLICIES
from megacpp.cli.measure import measure, run
from megacpp.config.schema import (
    CheckpointingPolicy,
    Config,
    DataConfig,
    MeshConfig,
    PrecisionConfig,
    TrainConfig,
)
from megacpp.model.init import initialise, whole
from parallel.boundary import AccumulationBoundary
from parallel.build import plan_model
from parallel.fsdp import shard_slice
from parallel.mesh import World
from parallel.simulate.fake import fake_batch, fake_tensors, fake_world, planned_model
from parallel.start import join
from tests.model.small import small, variants
from tests.ranks import on_worlds
from tests.together import Together

CPU = torch.device("cpu")
T = 16
FULL, SELECTIVE, NONE = POLICIES["full"], POLICIES["selective"], POLICIES["none"]

# ---- by hand ------------------------------------------------------------------------------------


class TwoLayers(nn.Module):
    """Named like a model: `blocks.0` is two linear layers with a SiLU between them."""

    def __init__(self, again: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleDict({"0": Middle(again)})

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks["0"](x).sum()


class Middle(nn.Module):
    def __init__(self, again: bool) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 6, bias=False), nn.Linear(6, 4, bias=False)
        self.again = again

    def forward(self, x: Tensor) -> Tensor:
        if self.again:
            return checkpoint(self._run, x, use_reentrant=False)  # type: ignore[return-value]
        return self._run(x)

    def _run(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.up(x)))


def test_what_is_kept_by_hand() -> None:
    """Count the hidden units of two layers before and after the SiLU; x existed before."""
    model, x = TwoLayers(), torch.ones(10, 4)
    with Meter(model) as meter:
        model(x).backward()
    kept = [
        (alloc.part, alloc.path, alloc.operator, alloc.shape, alloc.bytes) for alloc in meter.kept
    ]
    assert kept == [
        ("blocks.0", "up", "mm", (10, 6), 240),
        ("blocks.0", "", "silu", (10, 6), 240),
        ("", "", "sum", (), 4),
        ("", "", "ones_like", (), 4),
    ]
    product = 2 * 10 * 4 * 6
    assert meter.flops["blocks.0", "forward"] == 2 * product
    assert meter.flops["blocks.0", "backward"] == 3 * product  # x needs no gradient
    assert meter.flops["blocks.0", "replayed"] == 0


def test_what_runs_again_is_replayed() -> None:
    """Under torch's checkpoint, and in any other hook that gives a saved tensor back."""
    model, x = TwoLayers(again=True), torch.ones(10, 4)
    with Meter(model) as meter:
        model(x).backward()
    product = 2 * 10 * 4 * 6
    assert [alloc.shape for alloc in meter.kept if alloc.part] == []
    assert meter.flops["blocks.0", "forward"] == 2 * product
    assert meter.flops["blocks.0", "replayed"] in (product, 2 * product)  # stops when it can
    assert meter.flops["blocks.0", "backward"] == 3 * product
    layer = nn.Linear(4, 4, bias=False)
    with Meter(layer) as meter:
        with saved_tensors_hooks(lambda t: t, lambda t: (t @ t.T @ t) * 0 + t):
            y = layer(x)
        y.sum().backward()
    assert meter.flops["", "replayed"] == 2 * (2 * 10 * 4 * 10)


def test_lives_begin_and_end() -> None:
    """a (400 bytes) lives until it is squared, its double (800) to the end; views are nobody."""
    with Meter(nn.Identity()) as meter:
        a = torch.zeros(100)
        b = a.view(10, 10)[2:].T
        c = torch.cat([a, a])
        del a, b
        d = c * 2
        del c
        d.add_(1.0)
    assert [
        (alloc.operator, alloc.bytes, alloc.allocated_at, alloc.freed_at)
        for alloc in meter.allocations
    ] == [
        ("zeros", 400, 1, 2),
        ("cat", 800, 2, 3),
        ("mul", 800, 3, None),
    ]
    assert meter.timeline() == [(1, 400), (2, 800), (3, 800)]
    assert meter.peak(backward=False) == (2, 800)
    assert [(alloc.operator, size) for alloc, size in meter.alive_at(2)] == [("cat", 800)]
    assert len(d) == 200


def test_memory_is_what_first_fills_it() -> None:
    w = nn.Linear(4, 4, bias=False)
    with Meter(w) as meter:
        copy, sums = w.weight.to(torch.bfloat16), torch.empty(4, 4)
        torch.mm(torch.ones(4, 4), w.weight.detach(), out=sums)
        gathered = torch.empty(16)
        gathered.copy_(w.weight.detach().flatten())
        gathered.untyped_storage().resize_(0)
        now = dict(meter.timeline())
        gathered.untyped_storage().resize_(64)
    found = {alloc.operator: alloc.weight for alloc in meter.kept}
    assert found == {"_to_copy": True, "mm": False, "copy_": True}
    assert list(now.values())[-1] == 32 + 64 and meter.timeline()[-1][1] == 32 + 64 + 64
    assert len(copy) == 4


def test_it_leaves_nothing_behind() -> None:
    model = TwoLayers()
    before = UntypedStorage.resize_, saved_tensors_hooks.__init__
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"), Meter(model):
        model(torch.ones(3, 5))
    assert (UntypedStorage.resize_, saved_tensors_hooks.__init__) == before
    assert "resize_" not in vars(UntypedStorage)
    assert not any(module._forward_hooks for module in model.modules())
    assert not torch.nn.modules.module._global_forward_pre_hooks


# ---- real and fake ------------------------------------------------------------------------------


def config_of(
    pattern: str,
    dtype: Any,
    policy: CheckpointingPolicy = NONE,
    mesh: MeshConfig | None = None,
    **model: Any,
) -> Config:
    return Config(
        model=small(pattern, **model),
        data=DataConfig(seq_len=T),
        train=TrainConfig(device_batch_size=2, grad_accum=1, device="cpu"),
        precision=PrecisionConfig(dtype=dtype),
        mesh=mesh or MeshConfig(dp_shard=1),
        recompute=policy,
    )


def even_choice(self: Router, scores_TE: Tensor) -> Tensor:
    """Every expert as often as any other."""
    T, E = scores_TE.shape
    place_N = torch.arange(T * self.moe.top_k, device=scores_TE.device)
    return (place_N % E).view(T, self.moe.top_k)


def described(meter: Meter) -> tuple[Counter[Any], Counter[Any]]:
    """Bytes by what there is to tell storages apart by, and FLOPs.

    Not by operator: rows of experts are counted on one side and foretold on the other. Real
    collectives hold on to what they send from until they notice that it has arrived.
    """
    kept: Counter[Any] = Counter()
    for alloc in meter.kept:
        if alloc.weight and "gather" in alloc.operator:
            continue
        place = (
            alloc.part,
            alloc.path,
            alloc.shape,
            str(alloc.dtype),
            bool(alloc.weight),
            alloc.batch,
        )
        kept[place] += alloc.bytes
    return kept, +Counter(meter.flops)


def metered(boundary: AccumulationBoundary, config: Config) -> tuple[Counter[Any], Counter[Any]]:
    """On a mesh not the first microbatch, which leaves things behind for good.

    Threads of gloo let go of what they sent some time after it arrived, so there it is the least of
    three, with a moment between forward and backward.
    """
    model, found = boundary.model, []
    if boundary.world.parallel:
        boundary.accumulate([fake_batch(config)])
        model.register_forward_hook(lambda *_: time.sleep(0.02))
    for _ in range(3 if boundary.world.parallel else 1):
        model.zero_grad()
        batch = fake_batch(config)
        with Meter(model) as meter:
            boundary.accumulate([batch])
        found.append(described(meter))
    kept, flops = found[0]
    for others, same_flops in found[1:]:
        kept &= others
        assert same_flops == flops
    return kept, flops


def real(config: Config, world: World) -> tuple[Counter[Any], Counter[Any]]:
    if config.mesh.ep > 1:
        model = planned_model(config, world, ActivationCheckpointing(config))
    else:
        model = plan_model(config, world, ActivationCheckpointing(config))
    model.to_empty(device=CPU)
    initialise(model, model.init_rules(), 0, shard_slice if world.parallel else whole)
    model.train()
    return metered(AccumulationBoundary(model, world, config), config)


def fake(config: Config, size: int, rank: int) -> tuple[Counter[Any], Counter[Any]]:
    with fake_world(config, size, rank) as world:
        ac = ActivationCheckpointing(config)
        model = planned_model(config, world, ac)
        with fake_tensors(memory=True):
            return described(run(config, world, model, ac))


def same(found: tuple[Counter[Any], Counter[Any]], real: tuple[Counter[Any], Counter[Any]]) -> None:
    for mine, theirs in zip(found, real, strict=True):
        wrong = {key for key in mine | theirs if mine[key] != theirs[key]}
        assert not wrong, [(key, mine[key], theirs[key]) for key in sorted(wrong)]


@pytest.mark.parametrize(
    ("policy", "dtype"), [(NONE, "bf16"), (SELECTIVE, "fp32"), (SELECTIVE, "bf16"), (FULL, "bf16")]
)
def test_fake_tensors_keep_what_real_ones_keep(
    policy: CheckpointingPolicy, dtype: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every letter, on one process."""
    monkeypatch.setattr(Router, "_choose", even_choice)
    config = config_of("AMERFE", dtype, policy)
    same(fake(config, 1, 0), real(config, World(0, 1, CPU)))


OPTIONS = {  # layers that an option is about
    "mla": "AA",
    "mla_low_rank_queries_yarn": "AA",
    "mamba_mimo_norm_conv": "MM",
    "m2rnn_heads": "RR",
    "moe_relu2_gate_groups": "EE",
    "moe_softmax_no_shared": "EE",
    "mlp_relu2": "FF",
    "tied": "FF",
}


@pytest.mark.parametrize("name", OPTIONS)
def test_every_option_of_a_block(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Router, "_choose", even_choice)
    model = dataclasses.replace(variants()[name], pattern=OPTIONS[name], depth=2)
    config = dataclasses.replace(config_of("A", "bf16", SELECTIVE), model=model)
    same(fake(config, 1, 0), real(config, World(0, 1, CPU)))


@pytest.mark.parametrize("tokens", [3, 16])
def test_capacity_and_soft_caps(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Router, "_choose", even_choice)
    config = config_of("AEE", "fp32", SELECTIVE)
    moe = dataclasses.replace(config.model.moe, capacity_factor=1.25, balance_loss=0.1, z_loss=0.1)
    attention = dataclasses.replace(config.model.attention, softcap=20.0)
    model = dataclasses.replace(config.model, moe=moe, attention=attention)
    config = dataclasses.replace(config, model=model, data=DataConfig(seq_len=tokens))
    same(fake(config, 1, 0), real(config, World(0, 1, CPU)))


def mesh_configs() -> dict[str, Config]:
    """Four ranks; the experts are few rows where they are exchanged."""
    meshes = {
        "fsdp": MeshConfig(dp_shard=4, reshard="always"),
        "tp": MeshConfig(dp_replicate=2, dp_shard=1, tp=2, reshard="never"),
        "ep": MeshConfig(dp_shard=4, ep=4),
        "ep per expert": MeshConfig(dp_shard=2, tp=2, ep=4, ep_dispatch="per_expert"),
        "ep padded": MeshConfig(dp_shard=4, ep=2, ep_dispatch="padded"),
        "cp": MeshConfig(dp_shard=2, cp=2),
        "cp heads": MeshConfig(
            dp_shard=1, cp=2, tp=2, cp_attention="ring", cp_mamba3="heads", cp_m2rnn="serial"
        ),
        "all": MeshConfig(dp_shard=1, cp=2, tp=2, ep=4),
    }
    policies = {"fsdp": SELECTIVE, "tp": SELECTIVE, "ep": SELECTIVE, "all": FULL, "cp": SELECTIVE}
    found = {}
    for i, (name, mesh) in enumerate(meshes.items()):
        dtype = ("bf16", "fp32")[i % 2]
        config = config_of("AMERF", dtype, policies.get(name, NONE), mesh)
        m2rnn = dataclasses.replace(config.model.m2rnn, num_heads=4)
        found[name] = dataclasses.replace(
            config, model=dataclasses.replace(config.model, m2rnn=m2rnn, vocab_size=48)
        )
    return found


def on_real_ranks(rank: int, name: str) -> tuple[Counter[Any], Counter[Any]]:
    Router._choose = even_choice  # this process is a fork
    config = mesh_configs()[name]
    found = real(config, join(config.mesh, CPU))
    _clear_sharding_prop_cache()  # it would hand groups of this mesh to the next
    return found


@functools.cache
def real_ranks() -> Together[str, list[Any]]:
    make = lambda some: on_worlds(on_real_ranks, dict.fromkeys(some, 4))  # noqa: E731
    return Together(__name__, [*mesh_configs()], make)


@pytest.mark.parametrize("name", mesh_configs())
def test_fake_ranks_keep_what_real_ones_keep(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """FSDP2, TP, EP and CP on forked gloo ranks, and on a fake process group."""
    monkeypatch.setattr(Router, "_choose", even_choice)
    same(fake(mesh_configs()[name], 4, 3), real_ranks()[name][3])


# ---- one layer of each kind ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("policy", "mesh"),
    [(NONE, MeshConfig(dp_shard=2, tp=2, ep=2)), (SELECTIVE, None)],
    ids=["tp ep", "selective"],
)
def test_one_layer_of_each_kind_is_enough(policy: CheckpointingPolicy, mesh: Any) -> None:
    config, size = config_of("AMERFEAERM", "bf16", policy, mesh), 4 if mesh else 1
    m2rnn = dataclasses.replace(config.model.m2rnn, num_heads=4)
    model = dataclasses.replace(config.model, m2rnn=m2rnn, vocab_size=48)
    config = dataclasses.replace(config, model=model)
    composed, full = (measure(config, size, size - 1, full) for full in (False, True))
    assert composed == full
    assert {part.name: part.layers for part in composed.parts} == {
        **{"embed": 1, "A": 2, "M": 1, "E": 3, "R": 2, "F": 1},
        **{"M last": 1, "norm": 1, "head": 1},
    }


def test_the_meter_counts_what_live_bytes_counts() -> None:
    """Another count of storages, of what is alive when a forward has ended."""
    model = TwoLayers()
    x = torch.ones(10, 4)
    with LiveBytes() as live:
        loss = model(x)
        alive = live.alive()
    with Meter(model) as meter:
        model(x).backward()
    assert alive == sum(alloc.bytes for alloc in meter.kept if alloc.operator != "ones_like")
    assert loss.requires_grad
