"""Weights that FSDP2 gathers in FP8: the same run as without, saved and exported as any other.

gloo ranks send the bytes that NCCL would. Scales are of whole weights either way and taken from
fp32 shards, so in fp32 nothing differs, to the bit; in bf16 a gathered weight is rounded once less.
"""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from checkpointing.apply import ActivationCheckpointing
from megacpp.cli.dry_run import dependencies
from megacpp.cli.trace import trace_step
from megacpp.config.arguments import parse_run
from megacpp.config.checks.every import check
from megacpp.config.schema import Config, MeshConfig
from megacpp.errors import ConfigError
from megacpp.lessons.awake import awake
from megacpp.memory.estimate import estimate
from megacpp.state.checkpoint import load_checkpoint, save_checkpoint
from megacpp.state.export import export_weights, load_exported
from megacpp.state.tensors import model_tensors
from optim.build import build_optimizer
from optim.clip import clip_gradients
from parallel.boundary import AccumulationBoundary
from parallel.build import build_model
from parallel.mesh import World
from parallel.simulate.dry_run import dry_run
from tests.checkpointing.fp8_cases import CPU, CPU_RUN, changed
from tests.checkpointing.test_fp8_experts import expert_model
from tests.parallel.parity import Run, batches_of, config_of, world_of
from tests.ranks import RankError, run_ranks
from tests.state.gathered import gather_weights
from tests.state.meshes import digests, merged

FSDP = Run("A", MeshConfig(dp_shard=2), dtype="fp32")
RUNS = {
    "fsdp": FSDP,
    "muon, kept between microbatches": dataclasses.replace(
        FSDP, accum=2, sync="resident", optimizer="muon_adamw"
    ),
    "pipeline": Run("A", MeshConfig(pp=2, dp_replicate=2, dp_shard=1), accum=2, dtype="fp32"),
    "context": Run("A", MeshConfig(dp_shard=1, cp=2), accum=2, sync="each", dtype="fp32"),
    "one rank": Run("A", dtype="fp32"),
}


def gathering(run: Run, gather: bool = True, **precision: Any) -> Config:
    base = dataclasses.replace(config_of(run), model=expert_model("AEF"))
    base = changed(base, train=vars(CPU_RUN) | {"gradient_sync": run.sync})
    own: dict[str, Any] = {"fp8": "torchao", "fp8_ends": 0, "fp8_recipe": "tensorwise"}
    own |= {"fp8_local_scales": True, "fp8_all_gather": gather}
    return changed(base, precision=own | precision)


def built(config: Config, world: World) -> tuple[Any, Any]:
    with awake():
        model = build_model(config, world, ActivationCheckpointing(config, CPU))
    return model, build_optimizer(model, config, world.holders)


def wrapped(model: Any) -> set[str]:
    found = {n: getattr(p, "_local_tensor", p) for n, p in model.named_parameters()}
    return {n for n, p in found.items() if hasattr(p, "fsdp_pre_all_gather")}


def steps(rank: int, world_size: int, run: Run, gather: bool) -> tuple[dict[str, str], list[float]]:
    """Digests of what is saved after two steps, and losses and norms."""
    world, config = world_of(rank, run), gathering(run, gather)
    model, optimizer = built(config, world)
    assert bool(wrapped(model)) == gather
    boundary, figures = AccumulationBoundary(model, world, config), []
    for step in range(2):
        sums = boundary.accumulate(batches_of(step, world, run), step)
        norm = clip_gradients(model.parameters(), 1.0, copies=boundary.copies, along=sums.along)
        status = boundary.check_step(sums, norm)
        figures += [status.loss, status.grad_norm]
        optimizer.step()
        optimizer.zero_grad()
        boundary.finish_step(status)
    weights = gather_weights(model) or {}  # whole, on the first rank, of all stages
    state = {n: t for n, t in optimizer.state_tensors().items() if not isinstance(t, DTensor)}
    assert all(type(t) is Tensor for t in state.values())
    return digests({n: t.clone() for n, t in weights.items()}), figures


@pytest.mark.parametrize("name", RUNS)
def test_a_gathered_weight_is_the_weight(name: str) -> None:
    run = RUNS[name]
    found = []
    for gather in (False, True):
        body = functools.partial(steps, run=run, gather=gather)
        found.append(run_ranks(body, run.world)[0] if run.world > 1 else body(0, 1))
    assert found[0] == found[1] and len(found[0][0]) > 20


def test_in_bf16_a_rounding_less() -> None:
    """2^-8 of a weight, once: of a loss of some 4.5 nats far less."""
    run = dataclasses.replace(FSDP, dtype="bf16")
    (wide,), (narrow,) = (
        [run_ranks(functools.partial(steps, run=run, gather=gather), 2)[0][1][0]]
        for gather in (False, True)
    )
    assert 0 < abs(wide - narrow) <= 2.0**-8 * wide


# ---- state --------------------------------------------------------------------------------------


def test_saved_loaded_and_exported_as_any_other(tmp_path: Path) -> None:
    """Two ranks that gather in FP8 save; one process without resumes, and the other way round."""
    alone = dataclasses.replace(FSDP, mesh=MeshConfig(dp_shard=1))

    def tensors(model: Any, optimizer: Any) -> dict[str, Tensor]:
        found = {f"model.{n}": t for n, t in model_tensors(model).items()}
        return found | {f"optim.{n}": t for n, t in optimizer.state_tensors().items()}

    def saves(rank: int, world_size: int) -> dict[str, str]:
        world, config = world_of(rank, FSDP), gathering(FSDP)
        model, optimizer = built(config, world)
        boundary = AccumulationBoundary(model, world, config)
        boundary.accumulate(batches_of(0, world, FSDP))
        optimizer.step()
        held = tensors(model, optimizer)
        save_checkpoint(tmp_path, 1, held, {}, 0)
        export_weights(model, tmp_path / "final", config.model)
        return digests(held)

    def loads(rank: int, world_size: int, run: Run, gather: bool) -> dict[str, str]:
        config = gathering(run, gather)
        model, optimizer = built(config, world_of(rank, run))
        held = tensors(model, optimizer)
        load_checkpoint(tmp_path / "step-000001", held)
        return digests(held)

    saved = merged(run_ranks(saves, 2))
    assert loads(0, 1, alone, False) == loads(0, 1, alone, True) == saved
    for gather in (False, True):
        assert merged(run_ranks(functools.partial(loads, run=FSDP, gather=gather), 2)) == saved
    exported = {
        f"model.{n}": t for n, t in model_tensors(load_exported(tmp_path / "final")).items()
    }
    assert digests(exported) == {n: d for n, d in saved.items() if n.startswith("model.")}


# ---- bytes --------------------------------------------------------------------------------------

TINY = (
    "tiny --model.depth 4 --train.device cpu --train.grad_accum 1 --precision.fp8 torchao "
    "--precision.fp8_recipe tensorwise --precision.fp8_ends 0 --precision.fp8_layers AEFMR "
    "--precision.fp8_local_scales true --precision.dtype bf16 --mesh.reshard always"
)


def tiny(pattern: str, gather: bool, *more: str) -> Config:
    flags = [*TINY.split(), f"--model.pattern={pattern}", *more]
    return parse_run([*flags, *["--precision.fp8_all_gather", "true"] * gather], 2).config


def test_half_the_bytes_travel() -> None:
    """And a number of each weight, to agree on its scale, whenever it is gathered."""
    found = [
        dry_run(tiny("AFFA", gather), 2, 0, dependencies()).traffic for gather in (False, True)
    ]
    gathers = [{str(k.dtype): v for k, v in x.items() if k.kind == "all_gather"} for x in found]
    in_fp8 = gathers[1]["torch.uint8"]
    wide = gathers[0]["torch.bfloat16"].bytes - gathers[1]["torch.bfloat16"].bytes
    assert in_fp8.count == 2 * 4 and in_fp8.bytes * 2 == wide
    scales = [
        sum(v.count for k, v in x.items() if k.kind == "all_reduce" and k.dtype == torch.float32)
        for x in found
    ]
    assert scales[1] - scales[0] == 2 * (4 + 3 + 3 + 4)


@pytest.mark.parametrize("pattern", ["AEFE", "MRFE"])
def test_no_estimate_is_below_a_trace(pattern: str) -> None:
    config = tiny(pattern, True)
    trace = trace_step(config, 2)
    _, peak = trace.peak()
    assert estimate(config, 2).tensors >= peak
    plain, _ = (trace_step(tiny(pattern, gather), 2) for gather in (False, True))
    assert peak < plain.peak()[1], "a gathered weight has one byte"
    weights = {"AEFE": 4 + 3 + 3 + 3, "MRFE": 3 + 3 + 3 + 3}[pattern]
    resting = [trace.timeline()[-1], plain.timeline()[-1]]
    assert resting[0] == resting[1] + 4 * weights, "FSDP2 keeps the last scale of each"
    stored = [x.by_component(x.peak()[0])["parameters"] for x in (trace, plain)]
    assert stored[0] == stored[1], "also those in torchao's wrapper"


# ---- refusals -----------------------------------------------------------------------------------


def test_gloo_has_no_collective_for_fp8() -> None:
    """Once it has one (pytorch#113557 was for bf16), `_as_bytes` in parallel/fsdp.py can go."""

    def body(rank: int, world_size: int) -> None:
        mine = torch.ones(4).to(torch.float8_e4m3fn)
        dist.all_gather_into_tensor(mine.new_empty(4 * world_size), mine)

    with pytest.raises(RankError, match="Invalid scalar type"):
        run_ranks(body, 2)


def test_shards_must_be_as_long() -> None:
    """32 rows on three ranks; on four they are eight each."""
    config = gathering(FSDP)
    with pytest.raises(ConfigError, match=r"^precision.fp8_all_gather=True: .* 3 shards .*Fix: "):
        check(changed(config, mesh={"dp_shard": 3}), 3)
    check(changed(config, mesh={"dp_shard": 4}), 4)


LOCAL: dict[str, tuple[dict[str, Any], dict[str, Any], int, str]] = {
    "rows, wide gradients": ({"fp8_recipe": "rowwise_with_gw_hp"}, {}, 4, ""),
    "one microbatch": ({"fp8_recipe": "tensorwise"}, {}, 1, ""),
    "ranks": ({"fp8_recipe": "tensorwise"}, {}, 2, "precision.fp8_recipe=tensorwise"),
    "microbatches": (
        {"fp8_recipe": "rowwise"},
        {"train": {"grad_accum": 2}},
        1,
        "precision.fp8_recipe=rowwise",
    ),
    "a row's ranks": (
        {"fp8_recipe": "rowwise"},
        {"mesh": {"cp": 2, "dp_shard": 1}},
        2,
        "precision.fp8_recipe=rowwise",
    ),
    "agreed": ({"fp8_recipe": "rowwise", "fp8_local_scales": True}, {}, 2, ""),
}


@pytest.mark.parametrize("name", LOCAL)
def test_scales_of_a_microbatch_are_agreed_to_or_refused(name: str) -> None:
    precision, parts, ranks, refused = LOCAL[name]
    mesh = {"mesh": {"dp_shard": ranks}} | parts
    wanted = {"fp8_local_scales": False, "fp8_all_gather": False} | precision
    config = changed(gathering(FSDP, **wanted), **mesh)
    if not refused:
        return check(config, ranks)
    with pytest.raises(
        ConfigError, match=rf"^{refused}: .* the mesh. Fix: .*--precision.fp8-local-scales"
    ):
        check(config, ranks)
