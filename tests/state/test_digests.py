"""Digests see every flipped bit, name tensor and rank, and never disagree about equal copies."""

from __future__ import annotations

import os
import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode

from megacpp.config.schema import MeshConfig, RunConfig
from megacpp.state.digests import Digests, digest, digests_on, recorded
from megacpp.state.training import TrainingState
from tests.launch import forked
from tests.ranks import run_ranks
from tests.state.meshes import CPU, config_of, fill, model_config, state_of, world_of
from tests.test_run import ADAMW, SMALL, records

FLIPS = 100
HIT = "model.blocks.0.norm.weight"


def flip(t: Tensor, place: int, bit: int) -> None:
    """Flip one bit of this rank's part of a tensor, in place."""
    local = t.to_local() if isinstance(t, DTensor) else t
    raw = local.detach().view(-1).view(torch.uint8)
    raw[place % len(raw)] ^= 1 << bit


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.uint8])
def test_any_flipped_bit_changes_a_digest(dtype: torch.dtype) -> None:
    rng, t = random.Random(0), torch.arange(511 * 137).view(7, -1, 73).to(dtype)
    before = int(digest(t))
    assert before == int(digest(t.clone())) != int(digest(t.flip(0)))
    for _ in range(200):
        place, bit = rng.randrange(t.nbytes), rng.randrange(8)
        flip(t, place, bit)
        assert int(digest(t)) != before
        flip(t, place, bit)
    assert int(digest(t)) == before
    assert int(digest(torch.empty(0))) == int(digest(torch.zeros(2, dtype=torch.float32)))


def flipped(rank: int, size: int, mesh: MeshConfig, folder: Path) -> list[tuple[str, str, int]]:
    """Flip one bit after another on one rank; return tensor, what was found, and the rank."""
    config = config_of(mesh, model_config(tied=True))
    config = replace(config, run=RunConfig(digest_every=1, steps=10))
    tensors = state_of(config, world_of(mesh, size))
    fill(tensors, 3)
    digests, rng, seen = Digests(folder, lambda: tensors, config, CPU), random.Random(1), []
    assert digests.difference(0) == ""
    with CommDebugMode() as sent:
        assert digests.difference(0) == ""
    assert sent.get_total_counts() == 1, "one all-reduce"
    shared = sorted(digests._sets)
    for _ in range(FLIPS // 4):
        name, place, bit, guilty = (
            rng.random(),
            rng.randrange(10**6),
            rng.randrange(8),
            rng.randrange(size),
        )
        tensor = shared[int(name * len(shared))]
        if rank == guilty:
            flip(tensors[tensor], place, bit)
        found = digests.difference(0)
        if rank == guilty:
            flip(tensors[tensor], place, bit)
            seen.append((tensor, found, rank))
    assert digests.difference(0) == ""
    return seen


def test_tensors_of_two_devices_have_digests_on_one() -> None:
    """Moments of AdamW in few bits are in host memory; meta stands for a GPU."""
    meta = torch.device("meta")
    found = digests_on(meta, [torch.zeros(3, device=meta), torch.zeros(5)])
    assert found.device == meta and found.shape == (2,)


@pytest.mark.parametrize(
    "mesh",
    [
        MeshConfig(dp_replicate=2, dp_shard=1),
        MeshConfig(dp_replicate=2, dp_shard=2),
        MeshConfig(dp_shard=1, tp=2, dp_replicate=2),
        MeshConfig(pp=2, dp_shard=1),
        MeshConfig(dp_replicate=2, dp_shard=2, ep=2),
        MeshConfig(dp_replicate=2, dp_shard=1, cp=2),
        MeshConfig(dp_shard=2, ep=2, tp=2),
    ],
    ids=["ddp", "hsdp", "tp", "pp", "ep", "cp", "tp_ep"],
)
def test_flips_on_one_rank_are_found_and_named(tmp_path: Path, mesh: MeshConfig) -> None:
    ranks = mesh.pp * mesh.dp_replicate * mesh.dp_shard * mesh.cp * mesh.tp
    found = [one for of_rank in run_ranks(flipped, ranks, mesh, tmp_path) for one in of_rank]
    assert len(found) == FLIPS // 4
    for name, said, _ in found:
        assert said.startswith(f"{name} differs between ranks ") or said.startswith(f"{name} on ")
    if mesh.dp_replicate * mesh.tp == 4:
        assert any(f"on rank {rank} differs from its copies" in said for _, said, rank in found)


def test_the_recorded_digest_is_of_all_ranks(tmp_path: Path) -> None:
    """A bit of a shard that the second rank alone holds."""

    def body(rank: int, size: int) -> list[str]:
        mesh = MeshConfig(dp_shard=2)
        config = replace(config_of(mesh, model_config()), run=RunConfig(digest_every=1, steps=10))
        tensors = state_of(config, world_of(mesh, size))
        fill(tensors, 3)
        digests = Digests(tmp_path, lambda: tensors, config, CPU)
        said = [digests.difference(0), digests.difference(1)]
        if rank == 1:
            flip(tensors[HIT], 5, 2)
        return [*said, digests.difference(2)]

    assert run_ranks(body, 2) == [["", "", ""]] * 2
    before, again, after = (recorded(tmp_path)[step] for step in range(3))
    assert before == again != after


@pytest.mark.parametrize(
    ("ranks", "flags"),
    [(4, "--mesh.dp-replicate 2"), (2, "--mesh.pp 2 --train.grad-accum 2")],
    ids=["hsdp", "pp"],
)
def test_equal_copies_stay_equal_in_training(
    corpus: Path, tmp_path: Path, ranks: int, flags: str
) -> None:
    own = ["--data.path", str(corpus), "--run.dir", str(tmp_path), *flags.split()]
    own += "--run.steps 6 --run.digest-every 2 --train.device-batch-size 1".split()
    own += "--model.depth 2 --model.pattern ME --run.sample-tokens 0 --run.eval-rows 4".split()
    done = forked("tiny", *SMALL, *own, "--model.tie-embeddings", "true", ranks=ranks)
    assert done.returncode == 0, done.stderr
    assert list(recorded(tmp_path)) == [1, 3, 5]


def test_a_flip_in_training_ends_the_run_or_rewinds_it(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    advance = TrainingState.advance

    def hit(self: TrainingState, updated: bool, good: bool | None = None) -> None:
        advance(self, updated, good)
        if self.step == 5 and os.environ["RANK"] == "1" and not (tmp_path / "hit").exists():
            (tmp_path / "hit").touch()
            flip(self.tensors()[HIT], 11, 3)

    monkeypatch.setattr(TrainingState, "advance", hit)
    flags = [*SMALL, *ADAMW, "--data.path", str(corpus), "--mesh.tp", "2"]
    flags += "--model.depth 1 --model.pattern F --run.steps 8 --run.digest-every 3".split()
    flags += "--checkpoint.every 2 --train.device-batch-size 1".split()
    whole, again, ends = (tmp_path / name for name in ("whole", "again", "ends"))
    done = forked("tiny", *flags, "--run.dir", str(ends), ranks=2)
    assert done.returncode == 5, done.stderr
    assert f"after step 6 {HIT} differs between ranks 0 and 1" in done.stderr
    (tmp_path / "hit").unlink()
    done = forked("tiny", *flags, "--run.dir", str(again), "--train.rewinds", "1", ranks=2)
    assert done.returncode == 0 and "no row is skipped" in done.stdout, done.stdout + done.stderr
    assert f"step 6: {HIT} differs between ranks 0 and 1: back to " in done.stdout
    assert forked("tiny", *flags, "--run.dir", str(whole), ranks=2).returncode == 0
    for one, two in zip(records(again), records(whole), strict=True):
        assert (one["loss"], one["grad_norm"]) == (two["loss"], two["grad_norm"])
    assert recorded(again) == recorded(whole)
