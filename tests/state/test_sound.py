"""Only sound state is saved and kept; damage at a resume is named, and passed over by setting."""

from __future__ import annotations

import dataclasses
import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch.distributed.tensor import DTensor

from megacpp.config.arguments import parse_run
from megacpp.config.schema import CheckpointConfig, RunConfig
from megacpp.errors import CheckpointError, NonFiniteError
from megacpp.run import final
from megacpp.run.corpus import RunCorpus
from megacpp.run.health import budget_spent
from megacpp.run.metrics import MetricsLog
from megacpp.state import manifest
from megacpp.state.agreement import gather
from megacpp.state.checkpoint import is_sound, newest_sound, save_checkpoint
from megacpp.state.manifest import FileEntry, Seen, hash_file
from megacpp.state.published import candidates, latest_checkpoint, latest_text, read_extra
from megacpp.state.soundness import unsound
from tests.figures import Record
from tests.ranks import run_ranks
from tests.state.test_training import Made, config_of, make
from tests.state.toy import toy_state


def save(
    folder: Path,
    step: int,
    keep: int = 2,
    keep_every: int = 0,
    seen: Seen | None = None,
    **extra: Any,
) -> Path:
    tensors, extra = {"model.w": torch.full((3, 2), float(step))}, {"step": step, **extra}
    return save_checkpoint(folder, step, tensors, extra, keep, keep_every, seen=seen)


def flip(checkpoint: Path) -> Path:
    """Flip a bit of the last tensor, and return its file; size and time of it don't change."""
    shard = next(checkpoint.glob("*.safetensors"))
    found, content = shard.stat(), bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    os.utime(shard, ns=(found.st_atime_ns, found.st_mtime_ns))
    return shard


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name != "latest")


# ---- finite -------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_every_tensor_with_floats_is_looked_at(value: float) -> None:
    clean = toy_state(seed=1)
    assert unsound(clean) == ""
    wide = {name for name, t in clean.items() if t.is_floating_point() and t.numel()}
    assert {clean[name].dtype for name in wide} == {torch.float32, torch.float64, torch.bfloat16}
    for name in wide:
        state = toy_state(seed=1)
        state[name].detach()[-1:].fill_(value) if state[name].dim() else state[name].fill_(value)
        assert unsound(state).startswith(f"{name} has ")


def test_a_norm_that_overflows_is_no_value_that_does() -> None:
    assert (
        unsound({"w": torch.full((4,), 3e38), "v": torch.full((4,), 1e300, dtype=torch.float64)})
        == ""
    )
    narrow = torch.tensor([1.0, 2.0]).to(torch.float8_e4m3fn)
    assert unsound({"w": narrow}) == ""
    narrow.view(torch.uint8)[1] = 0x7F  # its NaN
    assert unsound({"w": narrow}) == "w has 1 values that are not finite"


def test_further_tensors_are_counted() -> None:
    bad = torch.tensor([1.0, float("nan")])
    assert unsound({"w": bad, "v": bad}).endswith(" not finite (and 1 further tensors)")
    assert unsound({"w": bad, "v": torch.ones(2)}).endswith(" not finite")


def test_a_shard_of_one_rank_is_named_on_all() -> None:
    def body(rank: int, world: int) -> str:
        state = toy_state(seed=1)
        moment = state["optim.first.weight.momentum"]
        assert isinstance(moment, DTensor)
        if rank == 1:
            moment.to_local().view(-1)[:2] = float("nan")
        return unsound(state)

    one, other = run_ranks(body, 2)
    assert one == other
    assert one == "optim.first.weight.momentum has 2 values that are not finite on rank 1"


def test_unsound_state_is_never_published(tmp_path: Path) -> None:
    run = make(tmp_path, config_of())
    run.steps(1)
    saved = run.state.save(keep=1)
    before = names(tmp_path)
    run.steps(1)
    next(run.state.model.parameters()).data.view(-1)[0] = float("inf")
    with pytest.raises(NonFiniteError) as error:
        run.state.save(keep=1)
    assert error.value.exit_code == 5 and "\n" not in str(error.value)
    assert "after step 2 model.first.weight has 1 values that are not finite" in str(error.value)
    assert f"{saved} is the newest sound checkpoint. Fix: " in str(error.value)
    assert names(tmp_path) == before and latest_checkpoint(tmp_path) == saved


def test_unsound_weights_are_never_exported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The end of a run looks at the weights itself: its last step may have ruined them."""
    made = make(tmp_path, config_of())
    exported: list[int] = []
    monkeypatch.setattr(final, "export_final", lambda *given: exported.append(given[-1]))
    config = dataclasses.replace(config_of(), run=RunConfig(dir=str(tmp_path)))
    corpus, log = cast(RunCorpus, None), cast(MetricsLog, SimpleNamespace(active=False))
    final.finish(made.state.model, corpus, config, log, step=3, loss=1.0)
    assert exported == [3]
    next(made.state.model.parameters()).data.view(-1)[1] = float("nan")
    with pytest.raises(NonFiniteError) as error:
        final.finish(made.state.model, corpus, config, log, step=4, loss=1.0)
    words = "at the end of the run first.weight has 1 values that are not finite"
    assert words in str(error.value) and exported == [3]


def test_unsound_state_of_an_older_version_is_not_resumed(tmp_path: Path) -> None:
    run = make(tmp_path, config_of())
    next(run.state.model.parameters()).data.fill_(float("nan"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("megacpp.state.training.unsound", lambda tensors: "")
        run.state.save(keep=1)
    with pytest.raises(CheckpointError, match=r"20 values that are not finite. Fix: start anew"):
        make(tmp_path, config_of()).state.resume("auto")


# ---- retention ----------------------------------------------------------------------------------


def test_some_stay_for_ever(tmp_path: Path) -> None:
    for step in range(1, 12):
        save(tmp_path, step, keep=2, keep_every=4)
    assert names(tmp_path) == [f"step-{step:06d}" for step in (4, 8, 10, 11)]


def test_steps_order_checkpoints_whatever_a_clock_says(tmp_path: Path) -> None:
    """Folders' dates order nothing: the clock of a node that takes over may be days behind."""
    for step in range(1, 4):
        saved = save(tmp_path, step, keep=0)
        os.utime(saved, (10**9 - 10**5 * step,) * 2)
    assert latest_checkpoint(tmp_path) == saved
    assert candidates(tmp_path)[0] == saved
    save(tmp_path, 4, keep=2)
    assert names(tmp_path) == ["step-000003", "step-000004"]


def test_a_run_has_its_checkpoints_stay_for_ever(tmp_path: Path) -> None:
    config = dataclasses.replace(config_of(), checkpoint=CheckpointConfig(keep_every=2))
    run = make(tmp_path, config)
    for _ in range(4):
        run.steps(1)
        run.state.save(keep=1)
    assert names(tmp_path) == ["step-000002", "step-000004"]


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_short_disk_loses_what_retention_gives_up(tmp_path: Path, ranks: int) -> None:
    """Before the save, behind as many earlier sound ones as are kept; those for good stay."""
    usage = shutil.disk_usage(tmp_path)

    def body(rank: int, world: int) -> None:
        def full(_: Path) -> object:
            here = len([*tmp_path.glob("step-*")])
            return usage._replace(free=10**6 if here <= most else 0)

        for number, keep in ((1, 0), (2, 0), (3, 0), (4, 0)):
            save(tmp_path, number, keep)
        gather(None)
        if rank == 0:
            flip(tmp_path / "step-000004")
        gather(None)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(shutil, "disk_usage", full)
            most = 3  # 2 and 4 stay for good, and 4 isn't sound
            save(tmp_path, 5, keep=1, keep_every=2)
            assert names(tmp_path) == [f"step-{n:06d}" for n in (2, 4, 5)]
            most = 0
            with pytest.raises(CheckpointError) as error:
                save(tmp_path, 7, keep=1)
            assert names(tmp_path) == ["step-000005"]
            said = str(error.value)
        assert "needs 26 bytes, the disk has 0 free. Fix: free disk space or choose" in said

    run_ranks(body, ranks)


def test_a_full_disk_offers_fewer_checkpoints_where_there_are_some(tmp_path: Path) -> None:
    usage = shutil.disk_usage(tmp_path)
    for number in (1, 2, 3):
        save(tmp_path, number, keep=0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=0))
        said = {}
        for keep, keep_every in ((0, 0), (2, 0), (2, 1), (1, 0)):
            with pytest.raises(CheckpointError) as error:
                save(tmp_path, 4, keep, keep_every)
            said[keep, keep_every] = "lower --checkpoint.keep or choose" in str(error.value)
    assert said == {(0, 0): True, (2, 0): True, (2, 1): False, (1, 0): False}
    assert names(tmp_path) == ["step-000003"] and is_sound(tmp_path / "step-000003")


def test_damaged_and_bad_ones_rotate_no_sound_one_out(
    tmp_path: Path, record_property: Record
) -> None:
    for step in (1, 2, 3):
        save(tmp_path, step, keep=0)
    shard = next((tmp_path / "step-000003").glob("*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-1])
    save(tmp_path, 4, keep=2, bad_steps=3)
    assert names(tmp_path) == [f"step-{step:06d}" for step in (1, 2, 3, 4)]
    assert not is_sound(tmp_path / "step-000003") and not is_sound(tmp_path / "step-000004")
    assert newest_sound(tmp_path) == tmp_path / "step-000002"
    save(tmp_path, 5, keep=2)
    assert names(tmp_path) == [f"step-{step:06d}" for step in (2, 3, 4, 5)]
    record_property("damaged or bad checkpoints rotated no sound one out", 1)


def test_one_behind_spikes_is_gone_back_to_where_there_is_no_other(tmp_path: Path) -> None:
    """They may have passed since; bad steps may not have."""
    config = {"train": {"max_spikes": 3}}
    for step in (1, 2):
        save(tmp_path, step, others={"health": {"spikes": 1}}, config=config)
    save(tmp_path, 3, bad_steps=1)
    assert newest_sound(tmp_path) == tmp_path / "step-000002"
    flip(tmp_path / "step-000002")
    assert newest_sound(tmp_path) == tmp_path / "step-000001"
    save(tmp_path, 4)
    save(tmp_path, 5, others={"health": {"spikes": 2}}, config=config)
    assert newest_sound(tmp_path) == tmp_path / "step-000004"


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_flipped_bit_rotates_no_sound_one_out(
    tmp_path: Path, ranks: int, record_property: Record
) -> None:
    """It is met by the save that would count the checkpoint, verified before or not."""

    def body(rank: int, world: int) -> None:
        seen: Seen = {}

        def step(number: int, keep: int, flips: int = 0, **extra: int) -> list[str]:
            if flips and not rank:
                flip(tmp_path / f"step-{flips:06d}")
            gather(None)
            save(tmp_path, number, keep, seen=seen, **extra)
            return names(tmp_path)

        for number in (1, 2, 3):
            step(number, keep=0)
        assert step(4, keep=2, flips=3) == [f"step-{n:06d}" for n in (2, 3, 4)]
        assert step(5, keep=3) == [f"step-{n:06d}" for n in (2, 3, 4, 5)]
        # Step 4 was sound in the save before.
        assert step(6, keep=3, flips=4) == [f"step-{n:06d}" for n in (2, 3, 4, 5, 6)]
        assert step(7, keep=1, flips=6, bad_steps=1) == [f"step-{n:06d}" for n in (5, 6, 7)]
        assert newest_sound(tmp_path) == tmp_path / "step-000005"

    run_ranks(body, ranks)
    record_property("damaged or bad checkpoints rotated no sound one out", 4)


def test_a_checkpoint_is_read_once_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A save reads old files once; it reads them all again if the new checkpoint is not sound."""
    read: list[str] = []

    def counted(path: Path) -> FileEntry:
        if path.suffix == ".safetensors":
            read.append(path.parent.name)
        return hash_file(path)

    monkeypatch.setattr(manifest, "hash_file", counted)
    seen: Seen = {}
    for step in range(1, 6):
        save(tmp_path, step, keep=4, seen=seen)
    assert read == [f"step-{step:06d}" for step in (1, 2, 3, 4)]
    read.clear()
    save(tmp_path, 6, keep=2, seen=seen, bad_steps=1)
    assert read == ["step-000005", "step-000004"]


def test_a_flipped_bit_is_neither_named_nor_gone_back_to(three: Path, tmp_path: Path) -> None:
    flip(three / "step-000003")
    assert latest_checkpoint(three) == three / "step-000003"  # until it is read
    assert newest_sound(three) == three / "step-000002"
    said = str(budget_spent(config_of(), three))
    assert f"{three / 'step-000002'} is from before them" in said
    assert resumed(three, "older").state.step == 2
    run = resumed(three, source=str(three / "step-000002"))
    run.steps(2)
    next(run.state.model.parameters()).data.view(-1)[0] = float("inf")
    with pytest.raises(NonFiniteError, match="step-000002 is the newest sound checkpoint"):
        run.state.save(keep=1)


# ---- damage at a resume -------------------------------------------------------------------------


@pytest.fixture
def three(tmp_path: Path) -> Path:
    run = make(tmp_path, config_of())
    for _ in range(3):
        run.steps(1)
        run.state.save(keep=0)
    return tmp_path


def resumed(folder: Path, damaged: str = "stop", source: str = "auto") -> Made:
    config = dataclasses.replace(config_of(), checkpoint=CheckpointConfig(damaged=damaged))  # type: ignore[arg-type]
    run = make(folder, config, seed=2)
    run.state.resume(source)
    return run


@pytest.mark.parametrize("file", ["extra.json", "manifest.json", "shard"])
def test_damage_falls_back_by_setting_and_names_both(three: Path, file: str) -> None:
    newest = three / "step-000003"
    path = next(newest.glob("*.safetensors")) if file == "shard" else newest / file
    path.write_bytes(path.read_bytes()[:-2] + b"??")
    with pytest.raises(CheckpointError, match=f"{path.name}: .*resume {three}/step-000002"):
        resumed(three)
    run = resumed(three, "older")
    assert run.state.step == 2 and run.loader.position == 16
    (line,) = run.state.changed
    assert str(path) in line and line.endswith(f": the run goes on from {three / 'step-000002'}")
    for step in (1, 2):
        shutil.rmtree(three / f"step-{step:06d}")
    with pytest.raises(CheckpointError, match=path.name):  # starts never anew by itself
        resumed(three, "older")


def test_a_run_never_goes_back_to_a_damaged_one(three: Path) -> None:
    run = resumed(three)
    shard = next((three / "step-000002").glob("*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-2] + b"??")
    with pytest.raises(CheckpointError, match=shard.name):
        run.state.go_back(three / "step-000002")


def test_every_flip_of_latest_is_said(three: Path, record_property: Record) -> None:
    """All of its 29 bytes: the newest is resumed, or a line names what is passed over."""
    latest = three / "latest"
    content = latest.read_bytes()
    for bit in range(8 * len(content)):
        flipped = bytearray(content)
        flipped[bit // 8] ^= 1 << bit % 8
        latest.write_bytes(flipped)
        assert candidates(three)[0] == three / "step-000003"
    latest.write_text("step-000001\n")  # written without a digest, as once
    assert resumed(three).state.changed == [
        f"{three / f'step-{step:06d}'} is passed over: latest names step-000001" for step in (2, 3)
    ]
    latest.write_bytes(b"\xff\n")
    run = resumed(three)
    assert run.state.step == 3
    assert run.state.changed == [
        f"{latest} is damaged: {three / 'step-000003'} has the latest step"
    ]
    record_property("flipped bits of `latest` resumed past", 8 * len(content))


def test_no_flip_of_extra_blames_a_setting(three: Path, tmp_path: Path) -> None:
    """Read before ranks meet, for the tokens of a step, and at the resume."""
    path = three / "step-000003/extra.json"
    home = tmp_path / "run"
    home.mkdir()
    shutil.copytree(three / "step-000003", home / "checkpoints/step-000003")
    copied = home / "checkpoints/step-000003/extra.json"
    content = path.read_bytes()
    start = content.index(b'"seed"') - 120
    for bit in range(8 * start, 8 * (start + 250), 7):
        flipped = bytearray(content)
        flipped[bit // 8] ^= 1 << bit % 8
        path.write_bytes(flipped)
        copied.write_bytes(flipped)
        with pytest.raises(CheckpointError, match=r"extra.json: is corrupt \(SHA-256 differs\)"):
            read_extra(path.parent)
        if bit % 35 == 0:  # the tokens of a step are in these bytes
            parse_run(["--run.dir", str(home)], 1, resumes=True)
    path.write_bytes(flipped)
    with pytest.raises(CheckpointError, match=r"extra.json: is corrupt \(SHA-256 differs\)"):
        resumed(three)


def test_a_latest_that_is_gone_orders_nothing(tmp_path: Path) -> None:
    """The latest step is then the newest checkpoint."""
    for step in (1, 3):
        (tmp_path / f"step-{step:06}").mkdir()
        (tmp_path / f"step-{step:06}/manifest.json").touch()
    (tmp_path / "latest").write_text(latest_text("step-000002"))
    assert [path.name for path in candidates(tmp_path)] == ["step-000003", "step-000001"]
