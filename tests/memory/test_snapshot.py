"""Synthetic snapshots: whatever grows is named, every time, through noise; files are checked."""

from __future__ import annotations

import json
import random
import re
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from megacpp.cli.doctor import OPTIONAL
from megacpp.cli.main import main
from megacpp.config.schema import Config
from megacpp.config.settings import settings_of
from megacpp.config.values import read_value
from megacpp.errors import DataError
from megacpp.memory.components import COMPONENTS
from megacpp.memory.snapshot import (
    ALSO_BY_TOKENS,
    BUCKETS,
    BY_TOKENS,
    CAUSES,
    Snapshot,
    as_text,
    bucket_of,
    cause_of,
    compare,
    file_name,
    most_by_bucket,
    read_snapshot,
    snapshots_of,
)
from megacpp.memory.stream import Stream, StreamBlock

MIB = 1 << 20
PAIRS = 150
GROWN = {
    "dispatch": ("moe_routing/dispatch",),
    "ssm_state": ("activations/M scan", "activations/R scan", "activations/M", "activations/R"),
    "convolution": ("activations/M conv", "activations/R conv", "activations/G conv"),
    "activations": ("activations/A", "activations/F", "head_loss", "activations/E"),
    "gradients": ("gradients",),
    "gathered": ("communication", "workspace"),
    "parameters": ("parameters",),
}


def random_snapshot(rng: random.Random) -> Snapshot:
    """A rank between 0.1 and 100 GiB, with or without each kind of block."""
    whole = 2 ** rng.uniform(27, 37)
    most = {name: int(whole * rng.uniform(0.01, 0.3)) for name in COMPONENTS if "_" not in name}
    most |= {name: int(whole * rng.uniform(0.01, 0.2)) for name in ("optimizer_state", "head_loss")}
    for name in BUCKETS:
        if "/" in name and rng.random() < 0.7:
            most[name] = int(whole * rng.uniform(0.01, 0.3))
    most |= {"activations/A": int(whole * 0.1), "batch": int(whole * 1e-5) + 1}
    del most["activations"]
    return Snapshot(
        step=1000,
        device=rng.choice(["cpu", "cuda"]),
        most=most,
        at_peak={"activations": int(whole)},
        peak_bytes=int(whole),
        allocated_bytes=int(whole),
        reserved_bytes=int(whole * rng.uniform(1, 1.2)),
        host_bytes=int(whole * rng.uniform(1, 2)),
        tokens=rng.choice([0, 4096]),
    )


def with_noise(s: Snapshot, rng: random.Random) -> Snapshot:
    """Each bucket a little larger or smaller: all together less than growth counts from."""
    most = {name: int(size * (1 + rng.uniform(-5e-4, 5e-4))) for name, size in s.most.items()}
    most["batch"] = s.most["batch"]
    host = int(s.host_bytes * (1 + rng.uniform(-0.01, 0.01)))
    reserved = s.reserved_bytes + int(s.peak_bytes * rng.uniform(-1e-3, 1e-3))
    return replace(s, step=1100, most=most, host_bytes=host, reserved_bytes=reserved)


def grown(cause: str, s: Snapshot, rng: random.Random) -> tuple[Snapshot, Snapshot]:
    """A pair of which the second has grown for one reason, by 4 to 60 % of the peak."""
    after, more = with_noise(s, rng), int(s.peak_bytes * rng.uniform(0.04, 0.6))
    most, peak = dict(after.most), s.peak_bytes + more
    if cause == "fragmentation":
        return s, replace(after, reserved_bytes=after.reserved_bytes + more)
    if cause == "host":
        return s, replace(after, host_bytes=after.host_bytes + more + int(0.07 * s.host_bytes))
    if cause == "leak":
        return s, replace(after, loose_bytes=more)
    if cause == "optimizer_state":  # the first snapshot was taken before it existed
        state = {k: v for k, v in s.most.items() if k != cause}
        return replace(s, most=state), replace(after, most=most | {cause: more}, peak_bytes=peak)
    if cause == "longer_rows":
        f = rng.uniform(1.3, 2)
        of_tokens = (*BY_TOKENS, *ALSO_BY_TOKENS)
        most = {k: int(v * f) if k.split("/")[0] in of_tokens else v for k, v in most.items()}
        return s, replace(after, most=most, tokens=int(s.tokens * f), peak_bytes=peak)
    bucket = rng.choice(GROWN[cause])
    return s, replace(after, most=most | {bucket: most.get(bucket, 0) + more}, peak_bytes=peak)


ADVICE = [cause.fix for cause in CAUSES] + [words for pair in OPTIONAL.values() for words in pair]


@pytest.mark.parametrize("advice", ADVICE)
def test_advice_can_be_typed(advice: str) -> None:
    """Settings are flags, and a value that is given is one that the flag takes."""
    assert not re.search(r"(?<![-.\w])(model|recompute|optim|train|mesh|precision|data)\.", advice)
    for flag, value in re.findall(r"--([a-z0-9-]+\.[a-z0-9.-]+)(?: (\w[\w.]*\d|\w+_\w+))?", advice):
        key = flag.replace("-", "_")
        assert key in settings_of(Config), flag
        if value:
            read_value(key, settings_of(Config)[key].kind, value)


@pytest.mark.parametrize("cause", [cause.name for cause in CAUSES])
def test_every_cause_is_found_every_time(cause: str) -> None:
    rng = random.Random(cause)
    for _ in range(PAIRS):
        before, after = grown(cause, random_snapshot(rng), rng)
        found = compare(before, after)
        assert found.cause.name == cause, (found.by_cause, before, after)
        own = cause_of(found.largest.bucket).name
        assert own == cause or cause == "longer_rows"


def test_noise_alone_is_steady() -> None:
    rng = random.Random(0)
    for _ in range(PAIRS):
        before = random_snapshot(rng)
        assert compare(before, with_noise(before, rng)).cause.name == "steady"
        assert compare(before, replace(before, step=2)).by_cause == {}


def test_of_two_reasons_the_larger_is_first_and_both_are_said() -> None:
    before = replace(random_snapshot(random.Random(1)), tokens=0, device="cuda")
    most = before.most | {"moe_routing/dispatch": before.most.get("moe_routing/dispatch", 0)}
    unit = before.peak_bytes // 100
    for dispatch, state in ((9, 4), (4, 9)):
        more = {"moe_routing/dispatch": dispatch * unit, "activations/M scan": state * unit}
        after = replace(before, most=most | {k: most.get(k, 0) + v for k, v in more.items()})
        found = compare(before, after)
        assert found.by_cause == {
            name: size * unit
            for name, size in sorted(
                {"dispatch": dispatch, "ssm_state": state}.items(), key=lambda x: -x[1]
            )
        }
        assert next(iter(found.by_cause)) == ("dispatch" if dispatch > state else "ssm_state")


def test_rows_twice_as_long_and_a_hot_expert_are_told_apart() -> None:
    most = {"activations/A": 100 * MIB, "moe_routing/dispatch": 50 * MIB, "batch": MIB}
    before = Snapshot(1, most=most, peak_bytes=151 * MIB)
    twice = {name: 2 * size for name, size in most.items()}
    after = replace(before, step=2, most=twice | {"moe_routing/dispatch": 400 * MIB})
    found = compare(before, after)
    assert found.by_cause == {"dispatch": 300 * MIB, "longer_rows": 151 * MIB}


def test_without_a_followed_step_only_what_rests_is_compared() -> None:
    before = Snapshot(1, most={"parameters": 100, "activations/A": 900}, peak_bytes=1000)
    after = Snapshot(2, followed=False, most={"parameters": 200}, peak_bytes=200)
    assert [row.bucket for row in compare(before, after).rows] == ["parameters", "host"]


def test_every_bucket_has_a_cause_and_a_component() -> None:
    for bucket in BUCKETS:
        if bucket != "runtime_reserved":  # no snapshot sees it grow
            assert cause_of(bucket)


def test_blocks_find_their_buckets() -> None:
    letters = "AEMRF"
    cases = {
        ("activations", "blocks.0", "mixer.wq: mm 4x4 float32"): "activations/A",
        ("activations", "blocks.1", "mixer.experts: mm 4x4 float32"): "moe_routing/dispatch",
        ("activations", "blocks.1", "mixer.router: mm 4x4 float32"): "moe_routing/router",
        ("activations", "blocks.1", "add 4x4 float32"): "activations/E",
        ("activations", "blocks.2", "mixer.scan: cumsum 4x4 float32"): "activations/M scan",
        ("activations", "blocks.2", "mixer.convolve: mul 4x4 float32"): "activations/M conv",
        ("activations", "blocks.2", "mixer: mul 4x4 float32"): "activations/M",
        ("activations", "blocks.2", "mixer.in_x: mm 4x4 float32"): "activations/M",
        ("activations", "blocks.3", "mixer.scan: bmm 4x4 float32"): "activations/R scan",
        ("activations", "blocks.3", "mixer.scan.inner: bmm 4 float32"): "activations/R scan",
        ("activations", "blocks.4", "mixer.w1: mm 4x4 float32"): "activations/F",
        ("activations", "", "arange 4 int64"): "activations",
        ("moe_routing", "blocks.1", "dispatch: index 4x4 float32"): "moe_routing/dispatch",
        ("communication", "blocks.1", "empty 4 float32"): "communication",
    }
    for (component, part, name), bucket in cases.items():
        assert bucket_of(StreamBlock(4, component, part, name), letters) == bucket
        assert bucket in BUCKETS


def test_most_of_a_bucket_is_its_own_fullest_moment() -> None:
    stream = Stream()
    first = stream.allocate(StreamBlock(10, "workspace"))
    stream.allocate(StreamBlock(5, "parameters"))
    stream.free(first)
    stream.allocate(StreamBlock(7, "workspace"))
    stream.allocate(StreamBlock(4, "workspace"))
    assert most_by_bucket(stream, "") == {"parameters": 5, "workspace": 11}


def test_a_snapshot_survives_its_file(tmp_path: Path) -> None:
    one = random_snapshot(random.Random(3))
    for rank, step in ((0, 200), (0, 1000), (3, 200)):
        path = tmp_path / file_name(step, rank)
        path.write_text(as_text(replace(one, step=step, rank=rank)))
        assert read_snapshot(path) == replace(one, step=step, rank=rank)
    (tmp_path / "step-7.json").write_text("{")
    assert [s.step for s in snapshots_of(tmp_path)] == [200, 1000]
    assert [s.rank for s in snapshots_of(tmp_path, 3)] == [3]


@pytest.mark.parametrize(
    "damage",
    [
        {"step": "1"},
        {"most": {"parameters": -1}},
        {"most": {"nonsense": 1}},
        {"most": {"parameters": 1.5}},
        {"unheard_of": 1},
        {"step": None},
    ],
    ids=str,
)
def test_a_damaged_snapshot_is_refused(tmp_path: Path, damage: dict[str, object]) -> None:
    path = tmp_path / "step-1.json"
    path.write_text(json.dumps({"megacpp_snapshot": 1, **asdict(Snapshot(1)), **damage}))
    with pytest.raises(DataError, match="damaged"):
        read_snapshot(path)


def test_a_pickle_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "snapshot.pickle"
    path.write_bytes(b"\x80\x04\x95cos\nsystem\n.")
    with pytest.raises(DataError, match="not read"):
        read_snapshot(path)


def test_the_command_shows_who_grew(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = Snapshot(1000, most={"parameters": 90 * MIB, "moe_routing/dispatch": 10 * MIB})
    before = replace(before, peak_bytes=100 * MIB)
    after = replace(before, step=1100, most=before.most | {"moe_routing/dispatch": 35 * MIB})
    names = []
    for s in (before, after):
        names.append(str(tmp_path / file_name(s.step)))
        Path(names[-1]).write_text(as_text(s))
    assert main(["memory", "diff", *names]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert shown[0].split()[-5:] == ["step", "1000", "step", "1100", "grown"]
    assert shown[1].split() == [
        "moe_routing/dispatch",
        "10.0",
        "MiB",
        "35.0",
        "MiB",
        "+25.0",
        "MiB",
    ]
    assert any(line.startswith("diagnosis:  dispatch: ") for line in shown)
    assert main(["memory", "diff", *names, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["cause"] == "dispatch" and found["by_cause"] == {"dispatch": 25 * MIB}
    assert found["buckets"][0]["grown"] == 25 * MIB
    assert main(["memory", "diff", names[0]]) == 2
    assert main(["memory", "diff", names[0], str(tmp_path / "none.json")]) == 3
