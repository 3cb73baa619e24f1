"""A dry run says what real ranks do: forked gloo ranks take the same step with real tensors.

Figures are counts and bytes, so they are compared exactly, rank by rank. Where experts lie on
several ranks the real run chooses them evenly too. Fake process groups of up to 1,024 ranks show
that all ranks together hold the model.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from collections import Counter
from typing import Any

import pytest
from torch import Tensor
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

from megacpp.cli.dry_run import dependencies
from megacpp.cli.main import main
from megacpp.config.arguments import parse_run
from megacpp.config.checks.every import check, resolve
from megacpp.config.presets import nam56r_base
from megacpp.config.schema import Config, MeshConfig
from megacpp.model.init import initialise
from parallel.boundary import AccumulationBoundary
from parallel.fsdp import shard_slice
from parallel.local_shapes import own_shape
from parallel.mesh import World
from parallel.simulate.collective_log import CollectiveLog, group_names
from parallel.simulate.dry_run import Bytes, class_of, count_all, dry_run
from parallel.simulate.fake import fake_world, planned_model
from parallel.start import join
from tests.parallel.parity import CPU, Run, T, batches_of, config_of
from tests.ranks import run_ranks
from tests.together import Together

RUNS = [
    Run("plain", MeshConfig(dp_shard=4), accum=2, optimizer="muon_adamw"),
    Run("options", MeshConfig(dp_replicate=2, dp_shard=2), accum=2),
    Run("plain", MeshConfig(dp_shard=2, tp=2, reshard="never"), accum=4, dtype="fp32"),
    Run("tied", MeshConfig(dp_shard=2, tp=2, ep=2), accum=4, sync="resident"),
    Run("plain", MeshConfig(dp_shard=2, tp=2, ep=2), accum=2, sync="each"),
    Run("plain", MeshConfig(dp_shard=2, tp=2, ep=4, reshard="always"), 4, "fp32", "muon_adamw"),
    Run("plain", MeshConfig(dp_shard=1, tp=2, cp=2, ep=2, reshard="always"), accum=4),
    Run("plain", MeshConfig(dp_shard=2, cp=2, cp_m2rnn="serial", cp_attention="ring"), accum=4),
    Run("plain", MeshConfig(dp_shard=2, pp=2), accum=4, optimizer="muon_adamw"),
    Run("tied", MeshConfig(dp_shard=1, pp=2, tp=2, pp_schedule="gpipe"), accum=8),
]


def config_for(run: Run) -> Config:
    config = config_of(run)
    train = dataclasses.replace(
        config.train, device_batch_size=run.device_batch, grad_accum=run.accum, device="cpu"
    )
    return dataclasses.replace(
        config, train=train, data=dataclasses.replace(config.data, seq_len=T)
    )


def real_step(rank: int, _: int, runs: list[Run]) -> list[dict[str, Any]]:
    """The second step of each run, as train.py takes it, and what it sent and stored."""
    found = []
    for run in runs:
        found.append(_real_step(run))
        _clear_sharding_prop_cache()  # it would hand groups of this mesh to the next
    return found


def _real_step(run: Run) -> dict[str, Any]:
    config, world = config_for(run), join(run.mesh, CPU)
    model = planned_model(config, world)
    model.to_empty(device=CPU)
    initialise(model, model.init_rules(), 0, shard_slice)
    model.train()
    boundary = AccumulationBoundary(model, world, config)
    optimizers = dependencies().optimizers(model, config, world.holders)
    gradients: Bytes = {}
    log = CollectiveLog(world.meshes)
    for step in range(2):
        log = CollectiveLog(world.meshes)
        with log:
            sums = boundary.accumulate(batches_of(step, world, run))
            dependencies().clip(model, config, boundary.copies, sums.along)
            optimizers.step()
            grads = {name: p.grad for name, p in model.named_parameters()}
            optimizers.zero_grad()
            boundary.finish_step()
        gradients = by_class(model, grads)
    return {
        "traffic": Counter((c.axis, c.kind, c.dtype, c.bytes) for c in log.calls),
        "parameters": by_class(model, dict(model.named_parameters())),
        "gradients": gradients,
        "state": sum(
            shard_slice(t).local.numel() * t.itemsize
            for entries in optimizers.state.values()
            for t in entries.values()
        ),
    }


def by_class(model: Any, tensors: dict[str, Any]) -> Bytes:
    found: Bytes = {}
    for name, t in tensors.items():
        kind = class_of(model, name, model.get_parameter(name))
        found[kind] = found.get(kind, 0) + shard_slice(t).local.numel() * t.itemsize
    return found


@functools.cache
def real_steps() -> Together[Run, list[dict[str, Any]]]:
    def make(runs: list[Run]) -> dict[Run, list[dict[str, Any]]]:
        of_ranks = run_ranks(real_step, 4, runs)
        return {
            run: list(ranks) for run, ranks in zip(runs, zip(*of_ranks, strict=True), strict=True)
        }

    return Together(__name__, RUNS, make)


@pytest.mark.parametrize("run", RUNS, ids=str)
def test_a_dry_run_is_the_run(run: Run) -> None:
    for rank in (0, 3) if run.mesh.pp > 1 else (3,):
        real = real_steps()[run][rank]
        found = dry_run(config_for(run), 4, rank, dependencies())
        sent: Counter[Any] = Counter()
        for axis, kind, dtype, size in real["traffic"].elements():
            sent[axis, kind, dtype, "count"] += 1
            sent[axis, kind, dtype, "bytes"] += size
        expected = Counter(
            {
                (*key, what): n
                for key, value in found.traffic.items()
                for what, n in vars(value).items()
            }
        )
        assert sent == expected
        assert found.parameters == real["parameters"] and found.gradients == real["gradients"]
        assert sum(sum(of_class.values()) for of_class in found.state.values()) == real["state"]
        assert found.complete and found.shard_bytes.by_rank[rank] == sum(found.parameters.values())


def test_one_rank_sends_nothing() -> None:
    found = dry_run(config_for(Run("plain", accum=2)), 1, 0, dependencies())
    assert not found.traffic and found.complete
    assert set(found.parameters) == {"dense", "experts"}
    assert sum(found.gradients.values()) == sum(found.parameters.values()) == found.model_bytes


MESHES = {  # legal ones for nam56r_base
    8: MeshConfig(tp=2, ep=4),
    64: MeshConfig(pp=2, tp=2, ep=8, dp_replicate=2),
    1024: MeshConfig(tp=4, cp=2, ep=16),
}


@pytest.mark.parametrize("size", MESHES)
def test_all_ranks_together_hold_the_model(size: int) -> None:
    """Of 4.5 billion parameters every one, whatever the mesh; and what each rank then stores."""
    config = dataclasses.replace(nam56r_base(), mesh=MESHES[size])
    check(config, size)
    config = resolve(config, size)
    found = count_all(config, size)
    assert found.once == 4 * 4_455_295_808 and len(found.by_rank) == size
    for rank in (1, size // 2 - 1, size - 1):
        with fake_world(config, size, rank) as world:
            model = planned_model(config, world)
            for p in model.parameters():
                assert p.to_local().shape == own_shape(p)  # type: ignore[attr-defined]
            stored = sum(4 * math.prod(own_shape(p)) for p in model.parameters())
        assert stored == found.by_rank[rank]


def test_a_group_is_named_after_the_axis_that_splits_the_model() -> None:
    """The two ranks of a world are also those of its views."""
    for axis in ("tp", "cp", "pp", "ep", "dp_shard", "dp_replicate"):
        mesh = MeshConfig(**{"dp_shard": 1, axis: 2} | ({"dp_shard": 2} if axis == "ep" else {}))
        config = config_for(Run("plain", mesh, accum=2))
        with fake_world(config, 2) as world:
            (names,) = group_names(world.meshes).values()
        assert names[0] == axis and names[-1] == "world"


def test_classes_of_parameters() -> None:
    """Norms and routers are whole on every rank of tp; of a linear layer each has a part."""
    config = config_for(Run("plain", MeshConfig(tp=2, dp_shard=1), accum=2))
    with fake_world(config, 2) as world:
        model = planned_model(config, world)
        found = {n: class_of(model, n, p) for n, p in model.named_parameters()}
    kinds = {"blocks.0.norm.weight": "replicated", "head.weight": "dense", "experts.w1": "experts"}
    kinds |= {"router.weight": "replicated", "wq.weight": "dense", "shared.w2.weight": "dense"}
    for end, kind in kinds.items():
        assert {k for n, k in found.items() if n.endswith(end)} == {kind}, end


# ---- the command --------------------------------------------------------------------------------

SMALL = ["tiny", "--model.depth", "2", "--data.seq-len", "32", "--train.grad-accum", "3"]


def command(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    code = main(list(words))
    out, err = capsys.readouterr()
    return code, out, err


def test_the_command_reports(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["dry-run", *SMALL, "--world", "8", "--rank", "5", "--mesh.tp", "2", "--mesh.ep", "4"]
    code, out, _ = command(capsys, *words)
    assert code == 0 and "rank 5: dp_shard 2, tp 1, ep 1" in out
    assert ": equal" in out and "from steps of 1 and 2 microbatches" in out
    assert all(len(line) <= 100 for line in out.splitlines())
    code, out, _ = command(capsys, *words, "--json")
    found = json.loads(out)
    assert code == 0 and found["parameters_of_ranks"]["equal"] is True
    assert found["parameters_of_ranks"]["ranks"] == 8 and found["grad_accum"] == 3
    assert found["coordinates"]["tp"] == 1 and found["coordinates"]["ep"] == 1
    ep = [c for c in found["collectives"] if c["axis"] == "ep"]
    assert {c["kind"] for c in ep} == {"all_to_all"}
    # two exchanges of rows a microbatch for the one E block, and as many back
    assert sum(c["count"] for c in ep if c["dtype"] == "bfloat16") == 3 * 4


@pytest.mark.parametrize("name", ["dry-run", "memory trace"])
@pytest.mark.parametrize("mesh", ["--mesh.cp 2", "--mesh.pp 2 --train.num-chunks 2"])
def test_a_mixture_has_losses_of_its_sources(
    name: str, mesh: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """No corpus is read; a step sums the losses of two sources beside the whole one."""
    words = [*SMALL, *mesh.split(), "--data.mix", "code=2,prose=1", "--world", "2", "--json"]
    code, out, err = command(capsys, *name.split(), *words)
    assert code == 0 and json.loads(out), err


def test_what_can_not_be_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    for words, key in (
        (["nam56r_base", "--world", "7"], "train.tokens_per_step=1048576"),
        (["nam56r_base", "--world", "8", "--mesh.tp", "3"], "mesh.tp=3"),
        (["tiny", "--world", "0"], "world=0"),
        (["tiny", "--world", "4", "--rank", "4"], "rank=4"),
        (["tiny", "--world", "four"], "world=four"),
        (["tiny", "--wrld", "4"], "--wrld"),
    ):
        for name in ("dry-run", "explain"):
            code, out, err = command(capsys, name, *words)
            assert (code, out) == (2, ""), (words, err)
            assert err.startswith(f"error: {key}") and "Fix: " in err and err.count("\n") == 1


@pytest.mark.parametrize("kind", ["fp32", "8bit", "4bit"])
def test_bytes_of_packed_moments(kind: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """Codes, scales and tables as a real optimizer keeps them, not what they unpack to."""
    if kind != "fp32":
        pytest.importorskip("torchao.optim", reason="torchao isn't installed (the lowp extra)")
    words = [*SMALL, "--optim.adamw-state", kind]
    config = parse_run(words, 1).config
    model = planned_model(config, World(0, 1, CPU)).to_empty(device=CPU)
    optimizer = dependencies().optimizers(model, config, [])
    kept = 0
    for t in (t for entries in optimizer.state.values() for t in entries.values()):
        packed: Any = t
        parts = [packed.codes, packed.scale, packed.qmap] if type(t) is not Tensor else [t]
        kept += sum(part.nbytes for part in parts)
    found = dry_run(config, 1, 0, dependencies())
    assert sum(sum(of_class.values()) for of_class in found.state.values()) == kept
    code, out, err = command(capsys, "dry-run", *words, "--world", "8", "--json")
    assert code == 0 and all(line.startswith("dry-run: ") for line in err.splitlines())
    adamw = json.loads(out)["optimizer_state"]["adamw"]["dense"]
    assert adamw < sum(found.state["adamw"].values()) / 7  # of eight ranks


def test_a_dry_run_has_no_host_to_offload_to(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["dry-run", *SMALL, "--world", "8", "--optim.adamw-state", "cpu_offload"]
    code, out, err = command(capsys, *words)
    assert (code, out) == (2, "") and err.count("\n") == 1
    assert err.startswith("error: optim.adamw_state=cpu_offload: ") and "Fix: " in err


@pytest.mark.parametrize(
    "words",
    (
        "--recompute.offload saved_tensors --recompute.offload-min-mib 0",
        "--recompute.offload block_inputs --recompute.offload-min-mib 0",
        "--world 2 --recompute.compress 0.25",
        "--world 2 --mesh.pp 2 --train.num-chunks 2 --train.grad-accum 4",
    ),
)
def test_what_changes_a_step_changes_no_weight(
    words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = command(capsys, "dry-run", *SMALL, *words.split())
    assert code == 0, err
    assert "NOT EQUAL" not in out and "equal" in out
