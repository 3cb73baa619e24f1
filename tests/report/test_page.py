"""Page of a run: everything in its folder, no external resources, and what is missing."""

from __future__ import annotations

import json
import re
import resource
import shutil
import xml.etree.ElementTree as ET
from dataclasses import asdict
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from megacpp.cli.main import main
from megacpp.config.checks.every import resolve
from megacpp.config.presets import tiny
from megacpp.memory.snapshot import Snapshot, as_text, file_name
from megacpp.report.compare import comparison, differences
from megacpp.report.data import gather
from megacpp.report.page import page

MIB = 1 << 20
SECTIONS = (
    "Curves, by step",
    "The machine, by step",
    "Samples",
    "Memory, predicted against measured",
    "Memory over the run",
    "Communication by axis",
    "Where the seconds went",
    "Attempts of memory.fit=auto",
    "Events",
)


def step(number: int, **more: Any) -> dict[str, Any]:
    return {
        "step": number,
        "loss": 8.0 - number / 10,
        "bits_per_byte": 3.0,
        "grad_norm": 1.5,
        "lr": 1e-3,
        "tokens": 256,
        "valid_tokens": 250,
        "tokens_per_s": 1000.0 + number,
        "step_s": 0.25,
        "lr_groups": {"muon": 2e-2, "adamw_embed": 1e-3},
        "load_max_over_mean": {"1": 1.5, "3": 2.5},
        "peak_bytes": 90 * MIB,
        "grad_accum": 1,
        "nonfinite": 0,
        "skipped": False,
        **more,
    }


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a run of two ranks with every record."""
    run = tmp_path / "run"
    (run / "memory").mkdir(parents=True)
    (run / "failures").mkdir()
    config = asdict(resolve(tiny(), 2))
    launch = {
        "started": "2026-01-02T03:04:05+0000",
        "command": ["train.py", "tiny", "--data.path", "<script>alert(1)</script>"],
        "git_commit": "0123456789abcdef",
        "config_hash": "cafe",
        "device": "cpu",
        "world_size": 2,
        "mesh": {"dp_shard": 2, "tp": 1},
        "versions": {"torch": "2.13.0"},
        "parameters": {"total": 6_160_144, "active": 3_948_304},
        "config": config,
        "first_step": 0,
        "traffic": {"fsdp": {"gradients": 3 * MIB, "parameters": 5 * MIB}},
        "memory": {
            "gate": "on",
            "budget": 100 * MIB,
            "estimate": {
                "components": {"parameters": 40 * MIB, "activations": 30 * MIB},
                "point": 70 * MIB,
                "upper": 80 * MIB,
                "moment": "backward of layer 3 (M)",
                "verdict": "fits",
            },
        },
        "attempts": [
            {"attempt": 1, "changed": {}, "outcome": "oom", "detail": "rank 1: no memory",
             "predicted_bytes": 90 * MIB, "peak_bytes": None, "median_step_s": None},
        ],
    }  # fmt: skip
    (run / "launch.json").write_text(json.dumps(launch))
    rows = [step(n) for n in range(30)]
    rows[7] = step(7, skipped=True, nonfinite=3, loss=None)
    rows[9] = step(9, grad_norm_ratio=12.5, loss_sigma=7.25)
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (run / "metrics.jsonl").write_text(text + '{"step": 30, "lo')
    held_out = {"step": 9, "loss": 6.0, "bits_per_byte": 2.5, "gzip_bits_per_byte": 2.33}
    held_out |= {"xz_bits_per_byte": 1.0876, "no_verdict": ""}
    (run / "evaluations.jsonl").write_text(json.dumps(held_out) + "\n")
    (run / "samples").mkdir()
    (run / "samples/step-000030.txt").write_text("int main() { return <b>0</b>; }")
    events = [
        {"start": 100.0},
        {"from": 100.0, "to": 105.0, "s": {"startup": 5.0}},
        {"from": 105.0, "to": 115.0, "s": {"step": 9.0, "data": 1.0}, "steps": [0, 29]},
        {"end": 115.0},
    ]
    (run / "goodput.jsonl").write_text("".join(json.dumps(e) + "\n" for e in events))
    for number, experts in ((10, 5), (20, 5), (30, 9)):
        parts = {"parameters": 40 * MIB, "moe_routing/dispatch": experts * MIB}
        at_peak = {"parameters": 40 * MIB, "moe_routing": experts * MIB}
        one = Snapshot(number, most=parts, at_peak=at_peak, peak_bytes=sum(parts.values()))
        (run / "memory" / file_name(number)).write_text(as_text(one))
    (run / "failures" / "oom-rank-1.txt").write_text("out of memory\n  no room for 5 MiB\n")
    (run / "failures" / "rank-0.txt").write_text("Traceback\n  ...\nValueError: bad shape\n")
    return run


class Tags(HTMLParser):
    """Everything that is not plain text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.names: set[str] = set()
        self.attributes: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names.add(tag)
        self.attributes |= {name for name, _ in attrs}
        if tag not in ("meta", "input"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names.add(tag)
        self.attributes |= {name for name, _ in attrs}

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def svgs(text: str) -> list[ET.Element]:
    return [ET.fromstring(found) for found in re.findall(r"<svg.*?</svg>", text, re.S)]


def test_the_page_stands_alone_and_has_every_section(folder: Path) -> None:
    text = page(gather(folder))
    tags = Tags(text)
    assert not tags.names & {"link", "img", "iframe", "object"}
    assert text.count("<script>") == 1 and text.endswith("</script>\n</body></html>\n")
    assert not tags.attributes & {"src", "href", "onload", "srcset"}
    assert "url(" not in text and "@import" not in text
    assert {u for u in re.findall(r"https?://[^\"'<> ]+", text)} == {"http://www.w3.org/2000/svg"}
    assert "&lt;script&gt;alert(1)" in text
    assert [name for name in SECTIONS if f"<h2>{name}</h2>" not in text] == []
    assert "Not in this report" not in text
    assert "int main() { return &lt;b&gt;0&lt;/b&gt;; }" in text
    captions = re.findall(r"<figcaption>(.*?)</figcaption>", text)
    assert captions[:9] == [
        "loss, nats a token",
        "bits per byte",
        "gradient norm",
        "learning rate by parameter group",
        "busiest expert over the mean of its layer",
        "tokens read",
        "tokens a second",
        "seconds a step",
        "peak memory so far, rank 0 (resident set), MiB",
    ]
    assert len(svgs(text)) == 10
    for drawing in svgs(text):
        _, _, width, height = map(float, str(drawing.get("viewBox")).split())
        for part in drawing:
            for name, most in (("x", width), ("x1", width), ("y", height), ("y2", height)):
                assert 0 <= float(part.get(name, "0")) <= most


def test_figures_of_the_page_are_those_of_the_records(folder: Path) -> None:
    data = gather(folder)
    assert data["missing"] == [] and data["totals"]["steps"] == 30
    assert data["totals"]["skipped"] == 1 and data["totals"]["tokens"] == 30 * 256
    assert data["goodput"]["goodput"] == 9 / 15 and data["goodput"]["seconds"]["idle"] == 5
    assert data["memory"]["measured"] == {"parameters": 40 * MIB, "moe_routing": 5 * MIB}
    growth = data["growth"]["difference"]
    assert growth["cause"] == "dispatch" and growth["steps"] == [10, 30]
    assert [(e["step"], e["kind"]) for e in data["events"]] == [
        (0, "start"),
        (8, "skipped"),
        (10, "warning"),
        (10, "warning"),
        (30, "growth"),
        (None, "oom"),
        (None, "failure"),
        (None, "attempt"),
    ]
    words = [e["words"] for e in data["events"]]
    assert words[5] == "oom-rank-1.txt: no room for 5 MiB"
    assert words[6] == "rank-0.txt: ValueError: bad shape"
    text = page(data)
    assert "6.16M / 3.95M" in text and "60.0%" in text and "40.0 MiB / 40.0 MiB" in text


@pytest.mark.parametrize("why", ["", "8 held-out documents are too few"])
def test_compressors_are_drawn_with_how_they_were_used(folder: Path, why: str) -> None:
    path = folder / "evaluations.jsonl"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"no_verdict": why}))
    figure = page(gather(folder)).split("<figcaption>bits per byte</figcaption>")[1]
    figure = figure.split("</figure>")[0]
    (drawing,) = svgs(figure)
    assert [p.text for p in drawing if "note" in str(p.get("class"))] == ["gzip -9", "xz -9"]
    heights = [float(str(p.get("y1"))) for p in drawing if p.get("class") == "level"]
    assert len(heights) == 2 and heights[0] < heights[1], "less is lower"
    assert "dashed: gzip -9 at 2.3300, each document compressed alone" in figure
    assert "dashed: xz -9 at 1.0876, all documents as one stream" in figure
    assert ("no verdict" in figure) == bool(why) and (why or "at") in figure


def test_bytes_that_travel_are_computed_where_none_are_recorded(folder: Path) -> None:
    path = folder / "launch.json"
    launch = json.loads(path.read_text())
    del launch["traffic"]
    path.write_text(json.dumps(launch))
    assert sum(gather(folder)["traffic"]["fsdp"].values()) > 0
    launch["config"]["model"]["gone"] = 1
    path.write_text(json.dumps(launch))
    data = gather(folder)
    assert data["traffic"] == {} and "not of this version" in data["missing"][0]


@pytest.mark.parametrize(
    ("name", "section"),
    [
        ("launch.json", "launch record"),
        ("metrics.jsonl", "steps"),
        ("goodput.jsonl", "goodput"),
        ("memory/*", "snapshots"),
    ],
)
def test_a_run_that_lacks_a_file_is_reported_all_the_same(
    folder: Path, name: str, section: str
) -> None:
    for path in folder.glob(name):
        path.unlink()
    data = gather(folder)
    assert section in [line.split(":")[0] for line in data["missing"]]
    assert "Not in this report" in page(data)
    json.dumps(data, allow_nan=False)


def test_an_old_launch_record_has_no_memory(folder: Path) -> None:
    path = folder / "launch.json"
    launch = json.loads(path.read_text())
    for name in ("memory", "traffic", "attempts", "config_hash", "versions", "parameters"):
        del launch[name]
    path.write_text(json.dumps(launch | {"world_size": 1}))
    data = gather(folder)
    assert [m.split(":")[0] for m in data["missing"]] == ["estimate", "communication"]
    page(data)


def test_the_rank_that_was_estimated_is_the_one_that_is_shown(folder: Path) -> None:
    path = folder / "launch.json"
    launch = json.loads(path.read_text())
    launch["memory"]["rank"] = 1
    path.write_text(json.dumps(launch))
    assert gather(folder)["memory"]["measured_from"].endswith("rank 0")
    other = Snapshot(20, rank=1, at_peak={"parameters": 7}, most={"parameters": 7}, peak_bytes=7)
    (folder / "memory" / file_name(20, 1)).write_text(as_text(other))
    found = gather(folder)["memory"]
    assert found["measured"] == {"parameters": 7}
    assert found["measured_from"] == "the allocations of step 20, rank 1"


def test_only_the_last_start_of_a_run_is_compared(folder: Path) -> None:
    launch = json.loads((folder / "launch.json").read_text())
    (folder / "launch-000015.json").write_text(json.dumps(launch | {"first_step": 15}))
    data = gather(folder)
    assert data["growth"]["difference"]["steps"] == [20, 30]
    assert (15, "restart") in [(e["step"], e["kind"]) for e in data["events"]]


def test_the_command(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(folder)]) == 0
    assert capsys.readouterr().out.strip() == str(folder / "report.html")
    assert (folder / "report.html").read_text() == page(gather(folder))
    out = tmp_path / "other.html"
    assert main(["report", str(folder), "--out", str(out)]) == 0 and out.exists()
    capsys.readouterr()
    assert main(["report", str(folder), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == gather(folder)
    for command in ("report", "sample"):
        assert main([command, str(tmp_path / "none")]) == 2
        said = capsys.readouterr().err
        assert said.startswith(f"error: run={tmp_path / 'none'}: no such run folder. Fix: ")
    assert main(["report", str(tmp_path)]) == 2
    assert "neither launch.json nor metrics.jsonl" in capsys.readouterr().err
    assert main(["report"]) == 2 and main(["report", str(folder), "--out"]) == 2
    assert main(["report", str(folder), "--out", str(tmp_path / "no/such/x.html")]) == 2


@pytest.mark.parametrize("older", ["", "an older page"])
def test_a_full_disk_leaves_the_older_page(
    folder: Path, capsys: pytest.CaptureFixture[str], older: str
) -> None:
    """A limit on the size of files stands for the full disk."""
    out, before = folder / "report.html", resource.getrlimit(resource.RLIMIT_FSIZE)
    if older:
        out.write_text(older)
    there = sorted(folder.iterdir())
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 12, before[1]))
    try:
        assert main(["report", str(folder)]) == 2
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    said = capsys.readouterr().err
    assert (
        said == f"error: out={out}: file too large. Fix: free disk space, or give another --out.\n"
    )
    assert sorted(folder.iterdir()) == there and (not older or out.read_text() == older)
    assert main(["report", str(folder), "--out", "/dev/null"]) == 0
    assert not Path("/dev/null").is_file()


def test_what_was_not_measured_is_not_zero(folder: Path) -> None:
    path = folder / "launch.json"
    launch = json.loads(path.read_text())
    launch["memory"]["calibration"] = {"key": "abc"}
    path.write_text(json.dumps(launch))
    record = {
        "key": "abc", "step": 1, "rank": 0, "measures": "tensors",
        "predicted_bytes": 70 * MIB, "measured_bytes": 71 * MIB,
        "components": {
            "parameters": {"predicted": 40 * MIB, "measured": 41 * MIB},
            "activations": {"predicted": 30 * MIB, "measured": None},
        },
    }  # fmt: skip
    (folder / "memory/measured.json").write_text(json.dumps(record))
    data = gather(folder)
    assert data["memory"]["measured"] == {"parameters": 41 * MIB}
    text = page(data)
    assert "40.0 MiB / 41.0 MiB" in text and "30.0 MiB / not measured" in text
    assert "70.0 MiB / not measured" in text, "nor is their sum known"
    assert "+1.4%: 71.0 MiB measured for 70.0 MiB (of tensors" in text
    assert "not predicted" in text and "resident set" in text
    record["key"] = "of another start"
    (folder / "memory/measured.json").write_text(json.dumps(record))
    assert gather(folder)["memory"]["measured_from"].startswith("the allocations of step 10")


def test_several_runs_side_by_side(
    folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    other = tmp_path / "deep/run"
    shutil.copytree(folder, other)
    launch = json.loads((other / "launch.json").read_text())
    launch["config"]["optim"]["lr"], launch["config"]["run"]["dir"] = 0.5, "elsewhere"
    (other / "launch.json").write_text(json.dumps(launch))
    monkeypatch.chdir(tmp_path)
    assert main(["report", str(folder), str(other)]) == 0
    assert capsys.readouterr().out.strip() == "compare.html"
    text = (tmp_path / "compare.html").read_text()
    runs = [gather(folder), gather(other)]
    assert text == comparison(runs) and differences(runs) == {"optim.lr": [0.003, 0.5]}
    Tags(text)
    assert "<td>optim.lr</td><td>0.003</td><td>0.5</td>" in text
    assert text.count(">deep/run</li>") == 8, "a legend of each drawing"
    for drawing in svgs(text)[:1]:
        kinds = [str(part.get("class")) for part in drawing if part.tag.endswith("polyline")]
        assert kinds == ["s0 raw", "s0 line", "s1 raw", "s1 line"]
    assert main(["report", str(folder), str(other), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["differences"] == {"optim.lr": [0.003, 0.5]}
    (tmp_path / "calibration").mkdir()  # as `runs/*` names it
    capsys.readouterr()
    assert main(["report", str(folder), str(tmp_path / "calibration"), "--json"]) == 0
    told = capsys.readouterr()
    assert json.loads(told.out)["folder"] == str(folder) and "holds no run" in told.err
    assert main(["report", str(tmp_path / "calibration")]) == 2
    assert main(["report", str(folder), str(tmp_path / "gone")]) == 2
