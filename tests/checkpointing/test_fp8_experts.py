"""FP8 of experts: the rounding, products and gradients, any mesh, which layers, refusals."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from checkpointing.fp8 import to_fp8
from megacpp.blocks.dense.config import MLPConfig
from megacpp.config.checks.fp8 import fp8_blocks, fp8_layers
from megacpp.config.schema import Config, KernelsConfig, MeshConfig, ModelConfig
from megacpp.errors import ConfigError
from megacpp.kernels.experts.fp8 import (
    E4M3,
    LARGEST,
    Fp8Products,
    outer_sums,
    rounded,
    rows_times,
    scales,
)
from megacpp.kernels.experts.mlp import into_experts, out_of_experts
from megacpp.kernels.experts.rows import group_rows, sum_rows
from megacpp.launch.recompute_table import layer_rows, table_lines
from megacpp.model.fp32 import contract_parameters
from megacpp.model.hybrid import HybridLM
from megacpp.model.precision import check_fp8_device
from parallel.boundary import AccumulationBoundary
from parallel.build import build_model
from tests.checkpointing.fp8_cases import (
    CPU,
    CPU_RUN,
    broken_keys,
    built,
    changed,
    config_with,
    gradients_of,
    same,
    te_config,
)
from tests.model.small import SMALL_MOE, small, variants
from tests.parallel.parity import Run, Slices, batches_of, config_of, error, gradients, world_of
from tests.ranks import run_ranks

EMULATED = Fp8Products(emulated=True)


def expert_model(pattern: str = "AEMRF") -> ModelConfig:
    base = small(pattern, dim=32, mlp=MLPConfig(hidden_dim=48), init_std=0.1)
    sizes = SMALL_MOE | {"hidden_dim": 32, "shared_hidden_dim": 48}
    return dataclasses.replace(base, moe=dataclasses.replace(base.moe, **sizes))  # type: ignore[arg-type]


def noise(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


# ---- the rounding -------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rounding_is_torchaos(dtype: torch.dtype) -> None:
    """To the bit, scales and numbers: what it does for linear layers (its recipe `rowwise`)."""
    from torchao.float8.config import ScalingGranularity
    from torchao.float8.float8_utils import tensor_to_scale, to_fp8_saturated

    x = noise(64, 48, dtype=dtype) * torch.logspace(-6, 6, 64)[:, None].to(dtype)
    x[3] = 0
    x[4] = LARGEST * 2.0 ** torch.arange(-40, 8).to(dtype)
    for dim in (0, 1):
        theirs = tensor_to_scale(
            x,
            E4M3,
            scaling_granularity=ScalingGranularity.AXISWISE,
            axiswise_dim=dim,
            round_scales_to_power_of_2=True,
        )
        assert torch.equal(scales(x, dim), theirs)
        as_fp8 = to_fp8_saturated(x.float() * theirs, E4M3)
        assert torch.equal(rounded(x, dim), (as_fp8.float() / theirs).to(dtype))


def test_rounding_errs_by_a_sixteenth_at_most() -> None:
    """Three bits behind the point: half of the last, 2^-4, of what is not too small for its row.

    The largest lies in (224, 448] and normal numbers reach down to 2^-6: 2^13.8 below it at least.
    """
    x = noise(512, 256)
    normal = x.abs() >= x.abs().amax(1, keepdim=True) * 2.0**-13
    wrong = ((rounded(x, 1) - x) / x).abs()[normal].max()
    assert 2.0**-5 < wrong <= 2.0**-4
    assert torch.equal(rounded(rounded(x, 1), 1), rounded(x, 1))


def test_a_row_does_not_know_of_others() -> None:
    x, w = noise(96, 32), [noise(4, 32, 48, seed=1)]
    x[40:] *= 100
    whole = rows_times(x, w, [48, 0, 48, 0], EMULATED)[0]
    first = rows_times(x[:48], w, [48, 0, 0, 0], EMULATED)[0]
    assert torch.equal(whole[:48], first)
    assert rows_times(x[:0], w, [0, 0, 0, 0], EMULATED)[0].shape == (0, 48)


# ---- gradients ----------------------------------------------------------------------------------


def reference(x: Tensor, w1: Tensor, w3: Tensor, w2: Tensor, expert: Tensor, wide: bool) -> Tensor:
    """Compute token by token and expert by expert, rounding by hand, straight-through."""

    class Product(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
            ctx.save_for_backward(x, w)
            return rounded(x, 1) @ rounded(w, 1).T

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
            (x, w), dy = ctx.saved_tensors, grads[0]
            left, right = (dy, x) if wide else (rounded(dy, 0), rounded(x, 0))
            return rounded(dy, 1) @ rounded(w, 0), left.T @ right

    y = torch.zeros_like(x)
    for e in range(len(w1)):
        mine = (expert == e).nonzero()[:, 0]
        if len(mine):
            h = nn.functional.silu(Product.apply(x[mine], w1[e])) * Product.apply(x[mine], w3[e])
            y = y.index_add(0, mine, Product.apply(h, w2[e]))  # type: ignore[arg-type]
    return y


@pytest.mark.parametrize("wide", [True, False], ids=["gw_hp", "rowwise"])
def test_gradients_are_those_of_the_definition(wide: bool) -> None:
    """fp32 sums in another order: 1e-5 of the largest, where nothing lies at a rounding border."""
    x = noise(40, 32).requires_grad_()
    shapes = [(4, 48, 32), (4, 48, 32), (4, 32, 48)]
    w1, w3, w2 = (noise(*s, seed=i).requires_grad_() for i, s in enumerate(shapes, 1))
    expert = torch.randint(3, (40, 1), generator=torch.Generator().manual_seed(1))
    groups, fp8 = group_rows(expert, 4), Fp8Products(True, wide)
    *hidden, _ = into_experts(x, groups, w1, w3, fp8=fp8)
    y = sum_rows(out_of_experts(tuple(hidden), w2, None, groups, fp8), groups)
    expected = reference(x, w1, w3, w2, expert[:, 0], wide)
    found = torch.autograd.grad(y, [x, w1, w3, w2], noise(40, 32, seed=9))
    theirs = torch.autograd.grad(expected, [x, w1, w3, w2], noise(40, 32, seed=9))
    for a, b in zip([y, *found], [expected, *theirs], strict=True):
        assert (a - b).abs().max() <= 1e-5 * b.abs().max()


def test_even_groups_are_counted_groups() -> None:
    """Give all experts the same number of slots; sums of a batched product have another order."""
    x, w, dy = noise(64, 32), noise(4, 32, 48, seed=1), noise(64, 48, seed=2)
    for fp8 in (EMULATED, Fp8Products(True, wide_gradients=False)):
        for even, counted in (
            (rows_times(x, [w], None, fp8)[0], rows_times(x, [w], [16] * 4, fp8)[0]),
            (outer_sums(dy, x, None, 4, fp8), outer_sums(dy, x, [16] * 4, 4, fp8)),
        ):
            assert (even - counted).abs().max() <= 1e-5 * counted.abs().max()


# ---- a model ------------------------------------------------------------------------------------


def test_which_layers_of_all_kinds() -> None:
    config = changed(config_with(model=expert_model()), precision={"fp8_layers": "AEFMR"})
    model, ac = built(config)
    layers = ac.fp8
    assert layers is not None and layers.experts == ("blocks.1.mixer.experts",)
    mixers = {0: "wq wk wv wo", 1: "shared.w1 shared.w2 shared.w3", 2: "in_z in_x out_proj"}
    mixers |= {4: "w1 w2 w3"}
    names = {f"blocks.{i}.mixer.{n}" for i, leaves in mixers.items() for n in leaves.split()}
    assert set(layers.converted) == names
    assert {n.split(".")[1] for n in layers.left} == {"3"}, "12 values of R are no multiple of 16"
    assert [m.fp8 for m in model.modules() if hasattr(m, "fp8")] == [EMULATED]
    assert ac.words()[0].startswith("13 linear layers and 1 stacks of experts of AEFMR blocks")
    assert not any("embed" in n or "head" in n or "router" in n for n in layers.converted)


@pytest.mark.parametrize("name", variants())
def test_what_never_turns(name: str) -> None:
    """Embeddings, heads, routers, norms, fp32-contract parameters, in no kind and at no size."""
    with torch.device("meta"):
        model = HybridLM(variants()[name])
    inside = tuple(
        f"blocks.{i}.mixer.{leaf}."
        for i, letter in enumerate(model.letters)
        for leaf in (*fp8_layers(model.config)[letter], *["experts"] * (letter == "E"))
    )
    turning = {n for n, _ in model.named_parameters() if n.startswith(inside)}
    never = {n for n, _ in contract_parameters(model)}
    never |= {n for n, _ in model.named_parameters() if not n.startswith("blocks.")}
    never |= {n for n, _ in model.named_parameters() if "router" in n or "norm" in n}
    assert turning and not turning & never


def test_ends_stay_wide() -> None:
    model = expert_model("AEFAEF")
    for ends, blocks in ((0, [0, 1, 2, 3, 4, 5]), (2, [2, 3])):
        config = changed(config_with(model=model), precision={"fp8_ends": ends})
        assert fp8_blocks(config) == blocks
        layers = to_fp8(HybridLM(model), config, CPU)
        found = {int(n.split(".")[1]) for n in (*layers.converted, *layers.experts)}
        assert sorted(found) == blocks
    rows = layer_rows(config, {})
    assert [row["fp8"] for row in rows] == [False, False, True, True, False, False]
    assert any(line.endswith("keeps all (FP8)") for line in table_lines(config, {}))
    assert "fp8" not in layer_rows(config_with("off", model=model), {})[0]
    some = changed(config_with(model=model), precision={"fp8_layers": "E"})
    assert fp8_blocks(some) == [1, 4]
    assert "first and last 2 layers" in layers.words(config.precision)[0]


@pytest.mark.parametrize(
    "policy",
    [
        {"eblock": "expert_gemm_only"},
        {"eblock": "full"},
        {"eblock": "expert_gemm_only", "mlp": True, "norms": True},
        {"rblock": "full_plus_norms", "mblock": "conv_bc_only"},
    ],
    ids=str,
)
def test_experts_that_run_again_find_the_same_scales(policy: dict[str, Any]) -> None:
    """Bitwise."""
    model = expert_model("EMERE")
    precision = {"fp8_layers": "EMR"}
    plain, _ = built(changed(config_with(model=model), precision=precision))
    again, ac = built(changed(config_with(model=model, **policy), precision=precision))
    wide, _ = built(config_with("off", model=model))
    expected = gradients_of(plain)
    assert same(gradients_of(again), expected) and sum(ac.replays.counts.values()) >= 1
    assert not same(gradients_of(wide), expected), "FP8 rounds"


MESHES = {
    "fsdp": (MeshConfig(dp_shard=2), "EF"),
    "ep": (MeshConfig(dp_shard=2, ep=2), "EF"),
    "tp": (MeshConfig(tp=2, dp_shard=1), "EF"),
    "tp, heads": (MeshConfig(tp=2, dp_shard=1), "AM"),
    "tp, ep": (MeshConfig(tp=2, dp_shard=1, ep=2), "EE"),
    "tp 2, ep 4": (MeshConfig(tp=2, dp_shard=2, ep=4), "EE"),
    "dropped": (MeshConfig(dp_shard=2, ep=2, ep_dispatch="padded"), "EF"),
    "pipeline": (MeshConfig(pp=2, dp_shard=1), "EE"),
}


@pytest.mark.parametrize("name", MESHES)
def test_every_mesh_rounds_alike(name: str) -> None:
    """Compare with one rank's gradients, in fp32: no mesh divides the row or column of a scale.

    A sum in another order could move a number over a border of FP8, which would show as 2^-4 of one
    product; the seeds here have no such number, so 1e-5 covers fp32 sums.
    """
    mesh, pattern = MESHES[name]
    own = expert_model(pattern)
    if mesh.tp > 1:  # whose parts are multiples of 16 too
        own = dataclasses.replace(
            own,
            mlp=MLPConfig(hidden_dim=64),
            attention=dataclasses.replace(own.attention, head_dim=16),
            moe=dataclasses.replace(own.moe, shared_hidden_dim=64),
        )

    if name == "dropped":  # copies of all ranks' tokens compete: one rank takes them at once
        own = dataclasses.replace(own, moe=dataclasses.replace(own.moe, capacity_factor=1.0))

    def body(rank: int, world_size: int, run: Run) -> Slices:
        base = config_of(run)
        precision = dataclasses.replace(
            base.precision, fp8="torchao", fp8_ends=0, fp8_layers="AEFM"
        )
        config = dataclasses.replace(base, model=own, precision=precision, train=CPU_RUN)
        world = world_of(rank, run)
        model = build_model(config, world, lambda m: to_fp8(m, config, CPU))
        AccumulationBoundary(model, world, config).accumulate(batches_of(0, world, run))
        return gradients(model)

    accum = 1 if name == "dropped" else 2 if mesh.pp == 1 else 4
    spread = Run("A", mesh, accum=1 if mesh.pp == 1 else accum, dtype="fp32")
    expected = body(0, 1, dataclasses.replace(spread, mesh=MeshConfig(dp_shard=1), accum=accum))
    for found in run_ranks(functools.partial(body, run=spread), spread.world):
        assert error(found, expected)[0] <= 1e-5


# ---- refusals -----------------------------------------------------------------------------------

TENSORWISE = {"fp8_recipe": "tensorwise", "fp8_all_gather": True}
MODEL = expert_model()
EXPERTS = config_with(model=MODEL)
RULES: dict[str, tuple[Config, list[str]]] = {
    "experts run again": (config_with(model=expert_model(), eblock="expert_gemm_only"), []),
    "wrapper of experts": (
        config_with(model=expert_model(), eblock="expert_gemm_only", fp8_wrapper="te_checkpoint"),
        ["recompute.fp8_wrapper"],
    ),
    "wrapper of shared experts": (
        config_with(model=expert_model(), mlp=True, fp8_wrapper="te_checkpoint"),
        ["recompute.fp8_wrapper"],
    ),
    "all axes but tp": (changed(EXPERTS, mesh={"pp": 2, "cp": 2, "dp_shard": 4, "ep": 2}), []),
    "a row per expert": (
        changed(EXPERTS, mesh={"ep": 2, "ep_dispatch": "per_expert"}),
        ["mesh.ep_dispatch"],
    ),
    "capacity": (
        changed(
            config_with(
                model=dataclasses.replace(
                    MODEL, moe=dataclasses.replace(MODEL.moe, capacity_factor=2.0)
                )
            ),
            mesh={"ep": 2},
        ),
        ["model.moe.capacity_factor"],
    ),
    "no expert in FP8": (
        changed(
            EXPERTS, mesh={"ep": 2, "ep_dispatch": "per_expert"}, precision={"fp8_layers": "AF"}
        ),
        [],
    ),
    "tp": (changed(EXPERTS, mesh={"tp": 2}), ["mesh.tp"]),
    "unknown kind": (changed(EXPERTS, precision={"fp8_layers": "AX"}), ["precision.fp8_layers"]),
    "no kind": (changed(EXPERTS, precision={"fp8_layers": ""}), ["precision.fp8_layers"]),
    "ends meet": (changed(EXPERTS, precision={"fp8_ends": 3}), ["precision.fp8"]),
    "another kernel": (
        dataclasses.replace(EXPERTS, kernels=KernelsConfig(experts="reference")),
        ["kernels.experts"],
    ),
    "all-gather by row": (
        changed(EXPERTS, precision={"fp8_all_gather": True}),
        ["precision.fp8_all_gather"],
    ),
    "all-gather": (changed(EXPERTS, precision=TENSORWISE), []),
    "recipe of te": (
        changed(te_config(), precision={"fp8_recipe": "rowwise"}),
        ["precision.fp8_recipe"],
    ),
}


@pytest.mark.parametrize("name", RULES)
def test_rules(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    config, keys = RULES[name]
    assert broken_keys(config) == keys


def test_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: (8, 9))
    cuda = torch.device("cuda")
    with pytest.raises(ConfigError, match=r"^precision.fp8_layers=AFE: .* 9.0 .*8.9.*layers AF"):
        check_fp8_device(EXPERTS, cuda)
    check_fp8_device(changed(EXPERTS, precision={"fp8_layers": "AF"}), cuda)
