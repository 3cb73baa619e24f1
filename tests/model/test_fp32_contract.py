"""The fp32 contract: what it covers, and that nothing narrow ever reaches the Mamba scan.

Every contract parameter starts at a value that bf16 can't hold, so that a round trip through bf16
shows even where the dtype was restored afterwards.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import pytest
import torch
import torch._dynamo  # FSDP2 imports it: once here instead of once in every forked rank
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from megacpp.blocks.mamba3.module import Mamba3, Mamba3Scan
from megacpp.config.schema import Config, MeshConfig, ModelConfig, PrecisionConfig
from megacpp.kernels.mamba3.inputs import HeadWeights, ScanInputs
from megacpp.model.fp32 import Fp32Contract, contract_parameters
from megacpp.model.hybrid import HybridLM
from megacpp.model.pattern import layer_kinds
from parallel.boundary import AccumulationBoundary
from parallel.build import build_model
from parallel.fsdp import fsdp_units
from parallel.mesh import World
from parallel.start import build_meshes, join
from tests.collectives import CollectiveCounter
from tests.model.small import small, variants
from tests.ranks import run_ranks
from tests.synthetic import ragged_batch

Group = TypeVar("Group", ScanInputs, HeadWeights)
CPU = torch.device("cpu")
MIMO = variants()["mamba_mimo_norm_conv"]

# Per block letter, and what a variant adds. Everything else follows the compute dtype.
EXPECTED = {
    "A": {"norm.weight", "mixer.q_norm.weight", "mixer.k_norm.weight"},
    "M": {
        "norm.weight", "mixer.dt_bias", "mixer.D", "mixer.B_bias", "mixer.C_bias",
        "mixer.B_norm.weight", "mixer.C_norm.weight",
    },
    "E": {"norm.weight", "mixer.router.weight"},
    "R": {
        "norm.weight", "mixer.D", "mixer.state_weight", "mixer.g_norm.weight",
        "mixer.decay_gate.A_log", "mixer.decay_gate.dt_bias",
    },
    "G": {"norm.weight", "mixer.A_log", "mixer.dt_bias", "mixer.norm.weight"},
    "F": {"norm.weight"},
}  # fmt: skip
MLA_NORMS = {"norm.weight", "mixer.kv_norm.weight"}
ENGRAM_NORMS = {f"engram.{name}_norm.weight" for name in ("key", "x", "value")}
LOW_RANK_NORMS = MLA_NORMS | {"mixer.q_norm.weight"}
INDEXER = {f"mixer.indexer.{n}" for n in ("k_norm.weight", "k_norm.bias", "weights_proj.weight")}
INDEXER_BUFFERS = {"mixer.indexer.aux_scale", "mixer.indexer.loss_sums"}
CHANGED = {
    "engram": {"A+engram": EXPECTED["A"] | ENGRAM_NORMS},
    "mla": {"A": MLA_NORMS},
    "mla_sparse": {"A.index": LOW_RANK_NORMS, "A.share": LOW_RANK_NORMS},
    "mla_low_rank_queries_yarn": {"A": LOW_RANK_NORMS},
    "mamba_mimo_norm_conv": {
        "M": EXPECTED["M"] | {"mixer.mimo_x", "mixer.mimo_z", "mixer.mimo_o", "mixer.norm.weight"}
    },
}
# The scan applies the weight of the out norm itself; `check_scan` looks at that one.
INSIDE_THE_SCAN = {"blocks.1.mixer.norm.weight"}
WIDE_BUFFERS = {
    f"mixer.router.{name}" for name in ("expert_bias", "aux_scale", "loss_sums", "gradient_squares")
}
NULL_BUFFERS = {"mixer.router.null_bias", "mixer.router.null_score"}


def contract_names(model: nn.Module) -> set[str]:
    return {name for name, _ in contract_parameters(model)}


def one_process(config: ModelConfig) -> HybridLM:
    model = build_model(Config(model=config), World(0, 1, CPU))
    unround(model)
    return model


@torch.no_grad()
def unround(model: nn.Module) -> None:
    """Moves contract parameters off the bf16 grid (ones and fractions would survive a cast)."""
    for _, p in contract_parameters(model):
        local = p.to_local() if isinstance(p, DTensor) else p
        local.copy_(local * 1.001 + 1e-3)
        assert not local.numel() or not torch.equal(local, local.bfloat16().float())


# ---- which tensors ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", variants())
def test_the_declared_set(name: str) -> None:
    config = variants()[name]
    wanted = {"norm.weight"}
    for i, kind in enumerate(layer_kinds(config)):
        block = CHANGED.get(name, {}).get(kind, EXPECTED[kind[0]])
        block = block | INDEXER if kind == "A.index" else block
        wanted |= {f"blocks.{i}.{leaf}" for leaf in block}
    model = one_process(config)
    assert contract_names(model) == wanted
    narrow = model.to(torch.bfloat16)
    assert {n for n, p in narrow.named_parameters() if p.dtype == torch.float32} == wanted
    buffers = {n: b for n, b in narrow.named_buffers() if b.is_floating_point()}
    found = {n.split(".", 2)[2] for n in buffers if n.startswith("blocks.")}
    of_indexers = INDEXER_BUFFERS if config.attention.sparse.layers else set()
    of_nulls = NULL_BUFFERS if config.moe.null_rho < 1 else set()
    assert found == WIDE_BUFFERS | of_indexers | of_nulls
    assert {b.dtype for b in buffers.values()} == {torch.float32}


CASTS: dict[str, tuple[Callable[[HybridLM], Any], torch.dtype, torch.dtype]] = {
    "bfloat16": (lambda m: m.bfloat16(), torch.float32, torch.bfloat16),
    "to_bf16": (lambda m: m.to(torch.bfloat16), torch.float32, torch.bfloat16),
    "half": (lambda m: m.half(), torch.float32, torch.float16),
    "double": (lambda m: m.double(), torch.float64, torch.float64),
    "double_then_bf16": (lambda m: m.double().bfloat16(), torch.float64, torch.bfloat16),
    "double_then_float": (lambda m: m.double().float(), torch.float32, torch.float32),
    "bf16_then_float": (lambda m: m.bfloat16().float(), torch.float32, torch.float32),
    "device_and_dtype": (lambda m: m.to("cpu", torch.bfloat16), torch.float32, torch.bfloat16),
    "float8": (lambda m: m.to(torch.float8_e4m3fn), torch.float32, torch.float8_e4m3fn),
}


@pytest.mark.parametrize("name", CASTS)
def test_casts_of_a_whole_model(name: str) -> None:
    cast, wide, narrow = CASTS[name]
    model, twin = one_process(small()), one_process(small())
    cast(model)
    contract = contract_names(model)
    for (key, p), (_, before) in zip(
        model.named_parameters(), twin.named_parameters(), strict=True
    ):
        assert p.dtype == (wide if key in contract else narrow), key
        if key in contract:
            assert torch.equal(p.double(), before.double()), f"{key} made a round trip"


def test_narrowing_touches_no_contract_storage() -> None:
    """Restored from nothing, because nothing was taken: same objects, same memory."""
    model = one_process(small())
    before = {n: (p, p.data_ptr()) for n, p in contract_parameters(model)}
    model.to(torch.bfloat16)
    for name, p in contract_parameters(model):
        assert p is before[name][0] and p.data_ptr() == before[name][1]


def test_moving_and_narrowing_at_once() -> None:
    model = one_process(small()).to("meta", torch.bfloat16)
    contract = dict(contract_parameters(model))
    assert all(p.device.type == "meta" for p in model.parameters())
    assert {p.dtype for p in contract.values()} == {torch.float32}
    others = [p for n, p in model.named_parameters() if n not in contract]
    assert {p.dtype for p in others} == {torch.bfloat16}


# ---- what the scan and every other reader sees --------------------------------------------------


@dataclasses.dataclass
class Seen:
    """What a forward handed to the scan, and the contract parameters that modules read."""

    scans: list[tuple[ScanInputs, HeadWeights]]
    dtypes: dict[str, torch.dtype]
    addresses: dict[str, list[int]]
    storages: set[int]


def copied(group: Group) -> Group:
    """Its tensors cloned: gathered parameters are freed after the step."""
    copies = {k: v.detach().clone() for k, v in vars(group).items() if isinstance(v, Tensor)}
    return dataclasses.replace(group, **copies)


@contextlib.contextmanager
def watching(model: nn.Module) -> Iterator[Seen]:
    """Records scans, and dtype and address of each contract parameter when its owner runs."""
    seen, scan = Seen([], {}, {}, set()), Mamba3Scan.forward

    def spy(self: Mamba3Scan, inputs: ScanInputs, weights: HeadWeights, *rest: Any) -> Any:
        seen.scans.append((copied(inputs), copied(weights)))
        return scan(self, inputs, weights, *rest)

    def look(prefix: str) -> Callable[..., None]:
        def hook(module: nn.Module, *_: Any) -> None:
            for leaf, p in module.named_parameters(recurse=False):
                name = f"{prefix}.{leaf}"
                assert not isinstance(p, DTensor), f"{name} is read as a shard"
                seen.dtypes[name] = p.dtype
                seen.addresses.setdefault(name, []).append(p.data_ptr())
                seen.storages.add(p.untyped_storage().data_ptr())

        return hook

    hooks = [
        module.register_forward_pre_hook(look(prefix))
        for prefix, module in model.named_modules()
        if isinstance(module, Fp32Contract)
    ]
    Mamba3Scan.forward = spy  # type: ignore[method-assign]
    try:
        yield seen
    finally:
        Mamba3Scan.forward = scan  # type: ignore[method-assign]
        for hook in hooks:
            hook.remove()


def check_scan(inputs: ScanInputs, weights: HeadWeights, masters: HeadWeights) -> None:
    """dt, decay and parameters arrive in fp32 and were never rounded to bf16; the rest is bf16."""
    for name in ("DT", "ADT"):
        value = getattr(inputs, name)
        assert value.dtype == torch.float32, f"{name} is {value.dtype}"
        rounded = (value == value.bfloat16().float()).float().mean().item()
        assert rounded < 0.1, f"{rounded:.0%} of {name} are bf16 values"
    for name in ("Q", "K", "V", "Z", "Trap", "Angles"):
        assert getattr(inputs, name).dtype == torch.bfloat16, f"{name}: this run isn't in bf16"
    for field in dataclasses.fields(HeadWeights):
        value, master = getattr(weights, field.name), getattr(masters, field.name)
        if isinstance(master, Tensor):
            assert value.dtype == torch.float32, f"{field.name} is {value.dtype}"
            assert torch.equal(value, master), f"{field.name} isn't the master's value"


def mamba_of(model: HybridLM) -> Mamba3:
    return next(m for m in model.modules() if isinstance(m, Mamba3))


def forward_backward(model: HybridLM, autocast: torch.dtype | None = None) -> None:
    batch = ragged_batch([0, 1])
    with torch.autocast("cpu", autocast, enabled=autocast is not None):
        out = model(batch.ids_BT, batch.labels_BT, batch.docs)
    out.loss_sum.backward()


@pytest.mark.parametrize("config", [small(), MIMO], ids=["siso", "mimo"])
@pytest.mark.parametrize("mode", ["weights", "autocast"])
def test_the_scan_sees_fp32_on_one_process(config: ModelConfig, mode: str) -> None:
    masters = mamba_of(one_process(config)).head_weights()
    model = one_process(config)
    if mode == "weights":
        model.to(torch.bfloat16)
    with watching(model) as seen:
        forward_backward(model, torch.bfloat16 if mode == "autocast" else None)
    assert len(seen.scans) == 1
    check_scan(*seen.scans[0], masters)
    assert set(seen.dtypes.values()) == {torch.float32}
    assert seen.dtypes.keys() | INSIDE_THE_SCAN == contract_names(model) | INSIDE_THE_SCAN
    gradients = {n: p.grad for n, p in contract_parameters(model)}
    assert all(g is not None and g.dtype == torch.float32 for g in gradients.values())


class Casts(TorchDispatchMode):
    """Narrowing conversions of tensors in the given storages.

    Widening ones don't count: after the step the memory of a gathered parameter is used again,
    by sums in fp64 for example.
    """

    def __init__(self, storages: set[int]) -> None:
        super().__init__()
        self.storages, self.found = storages, []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(t, DTensor) for t in types):
            return NotImplemented
        source = args[1] if func is torch.ops.aten.copy_.default else args[0] if args else None
        out = func(*args, **(kwargs or {}))
        if func in (torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default):
            assert isinstance(source, Tensor)
            watched = source.untyped_storage().data_ptr() in self.storages
            if watched and out.dtype.itemsize < source.dtype.itemsize:
                self.found.append((str(func), tuple(source.shape), source.dtype, out.dtype))
        return out


@pytest.mark.parametrize("mode", ["weights", "autocast"])
def test_no_contract_parameter_is_converted_on_one_process(mode: str) -> None:
    model = one_process(small())
    if mode == "weights":
        model.to(torch.bfloat16)
    with watching(model) as seen, Casts(seen.storages) as casts:
        forward_backward(model, torch.bfloat16 if mode == "autocast" else None)
    assert casts.found == []


# ---- FSDP2 with bf16 mixed precision ------------------------------------------------------------


def padded_numel(model: HybridLM, names: set[str], world: int) -> int:
    """Elements that one gather of these parameters moves: dim 0 padded to the ranks."""
    return sum(
        -(-p.shape[0] // world) * world * p[0].numel()
        for n, p in model.named_parameters()
        if n in names
    )


def sharded_step(rank: int, world: int, config: ModelConfig, accum: int) -> dict[str, Any]:
    """One step of `accum` microbatches under the bf16 policy; what one rank observed."""
    precision = PrecisionConfig("bf16")
    full = Config(model=config, precision=precision)
    ranks = join(MeshConfig(dp_shard=world), CPU)
    model = build_model(full, ranks)
    unround(model)
    boundary = AccumulationBoundary(model, ranks, full)
    batches = [ragged_batch([i * world + rank]) for i in range(accum)]
    with watching(model) as seen:
        for _, p in contract_parameters(model):
            assert isinstance(p, DTensor)
            seen.storages.add(p.to_local().untyped_storage().data_ptr())
        with Casts(seen.storages) as casts, CollectiveCounter() as collectives:
            boundary.accumulate(batches)
    return {
        "scans": seen.scans,
        "dtypes": seen.dtypes,
        "addresses": seen.addresses,
        "casts": casts.found,
        "collectives": collectives.calls,
        "units": len(fsdp_units(model)),
        "gradients": {p.grad.dtype for p in model.parameters() if p.grad is not None},
        "sharded": all(isinstance(p, DTensor) for p in model.parameters()),
    }


@pytest.mark.parametrize(
    ("config", "accum"), [(small(), 4), (MIMO, 1)], ids=["siso x 4", "mimo x 1"]
)
def test_fsdp_in_bf16_keeps_the_contract(config: ModelConfig, accum: int) -> None:
    twin = one_process(config)
    contract = contract_names(twin)
    numel = padded_numel(twin, contract, 2)
    for seen in run_ranks(sharded_step, 2, config, accum):
        assert len(seen["scans"]) == accum
        for inputs, weights in seen["scans"]:
            check_scan(inputs, weights, mamba_of(twin).head_weights())
        assert seen["dtypes"] == dict.fromkeys(contract - INSIDE_THE_SCAN, torch.float32)
        assert seen["gradients"] == {torch.float32} and seen["sharded"]
        # No conversion, and the same memory in every microbatch: gathered once, never copied.
        assert seen["casts"] == []
        for addresses in seen["addresses"].values():
            assert len(addresses) == accum and len(set(addresses)) == 1
        gathers = [c for c in seen["collectives"] if c.kind == "all_gather"]
        wide = [c for c in gathers if c.dtype == torch.float32]
        assert [c.numel for c in wide] == [numel]
        assert {c.dtype for c in gathers} == {torch.float32, torch.bfloat16}
        scatters = [c for c in seen["collectives"] if c.kind == "reduce_scatter"]
        assert len(scatters) == seen["units"] and {c.dtype for c in scatters} == {torch.float32}
        assert [c.numel for c in scatters].count(numel) == 1


def naive_step(rank: int, world: int, config: ModelConfig) -> list[Any]:
    """The usual recipe: whole blocks under one bf16 policy."""
    mesh = build_meshes(MeshConfig(dp_shard=world), "cpu")["shard"]
    model = one_process(config)
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
    for module in (*model.blocks.values(), model):
        fully_shard(module, mesh=mesh, mp_policy=policy)
    with watching(model) as seen, pytest.raises(AssertionError, match=r"Mamba-3 scan: .*bfloat16"):
        forward_backward(model)
    return [seen.scans[0], set(seen.dtypes.values())]


def test_the_checks_catch_the_usual_recipe() -> None:
    """Mixed precision over whole blocks casts the contract away: the scan refuses, and so do we."""
    masters = mamba_of(one_process(small())).head_weights()
    for (inputs, weights), dtypes in run_ranks(naive_step, 2, small()):
        assert torch.bfloat16 in dtypes
        with pytest.raises(AssertionError, match=r"is torch\.bfloat16|bf16 values"):
            check_scan(inputs, weights, masters)
