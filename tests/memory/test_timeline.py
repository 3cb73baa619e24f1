"""The snapshot file, read by PyTorch's own viewer, and as the viewer's page reads it."""

from __future__ import annotations

import base64
import json
import pickle
import pickletools
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from torch.cuda import _memory_viz as viewer

from megacpp.memory.allocator import replay
from megacpp.memory.stream import Stream
from megacpp.memory.timeline import PROTOCOL, write_snapshot
from tests.memory.random_streams import by_chance

# Operations of pickle that torch/utils/viz/MemoryViz.js knows.
KNOWN = {
    *("APPEND", "APPENDS", "BINGET", "BINFLOAT", "BININT", "BININT1", "BININT2", "BINPUT"),
    *("BINUNICODE", "DICT", "EMPTY_DICT", "EMPTY_LIST", "EMPTY_TUPLE", "FRAME", "LIST", "LONG1"),
    *("LONG_BINGET", "LONG_BINPUT", "MARK", "MEMOIZE", "NEWFALSE", "NEWTRUE", "NONE", "PROTO"),
    *("SETITEM", "SETITEMS", "SHORT_BINUNICODE", "STOP", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3"),
}
Snapshot = dict[str, Any]


@pytest.fixture(scope="module", params=[False, True], ids=["default", "expandable"])
def expandable(request: pytest.FixtureRequest) -> bool:
    return request.param


@pytest.fixture(scope="module")
def stream() -> Stream:
    found = by_chance(seed=3, events=900)
    for index, block in enumerate(found.blocks):
        block.part, block.name = f"blocks.{index % 4}", f"mm {index}x1 bfloat16"
    return found


def written(stream: Stream, path: Path, expandable: bool, until: int | None = None) -> Snapshot:
    write_snapshot(stream, path, expandable, until)
    return pickle.loads(path.read_bytes())


def test_the_page_can_read_the_file(stream: Stream, tmp_path: Path, expandable: bool) -> None:
    written(stream, tmp_path / "step.pickle", expandable)
    data = (tmp_path / "step.pickle").read_bytes()
    assert {code.name for code, _, _ in pickletools.genops(data)} <= KNOWN
    assert data[0] == 0x80 and data[1] == PROTOCOL <= 4
    snapshot = pickle.loads(data)
    for html in (viewer.trace_plot(snapshot), viewer.segment_plot(snapshot)):
        (found,) = json.loads(_inside(html))
        assert pickle.loads(base64.b64decode(found["base64"])) == snapshot
    # It stops at a file that has categories, none of them `unknown`, and needs exact addresses.
    trace = snapshot["device_traces"][0]
    assert "unknown" in {entry["category"] for entry in trace}
    assert all(entry["addr"] + entry["size"] < 2**53 for entry in trace)


def test_the_trace_comes_to_our_peaks(stream: Stream, tmp_path: Path, expandable: bool) -> None:
    """What the page draws: bytes asked for over time, and segments."""
    snapshot = written(stream, tmp_path / "step.pickle", expandable)
    found = replay(stream, expandable)
    asked, reserved = peaks(snapshot)
    assert asked == (found.requested_bytes, stream.timeline()[-1])
    assert reserved[0] == found.reserved_bytes
    assert {"segment_map" if expandable else "segment_alloc", "alloc", "free_completed"} <= {
        entry["action"] for entry in snapshot["device_traces"][0]
    }


def test_the_trace_leads_to_the_segments(stream: Stream, tmp_path: Path, expandable: bool) -> None:
    """The page goes back in time from the segments at the end: what is alive must agree."""
    snapshot = written(stream, tmp_path / "step.pickle", expandable)
    alive: dict[int, int] = {}
    for entry in snapshot["device_traces"][0]:
        if entry["action"] == "alloc":
            assert entry["addr"] not in alive
            alive[entry["addr"]] = entry["size"]
        elif entry["action"] == "free_completed":
            assert alive.pop(entry["addr"]) == entry["size"]
    blocks = [b for segment in snapshot["segments"] for b in segment["blocks"]]
    used = [b for b in blocks if b["state"] == "active_allocated"]
    assert {b["address"]: b["requested_size"] for b in used} == alive


def test_the_viewer_counts_what_is_held(stream: Stream, tmp_path: Path, expandable: bool) -> None:
    """At the fullest moment: its flame graph by component, its sums, its list."""
    found = replay(stream, expandable)
    snapshot = written(stream, tmp_path / "full.pickle", expandable, until=found.event)
    lines = viewer.memory(snapshot, format_flamegraph=_plain).splitlines()
    by_component: Counter[str] = Counter()
    for line in lines:
        if held := re.search(r"active_allocated;of:0:(\w+);part:0:blocks\.\d;.* (\d+)$", line):
            by_component[held[1]] += int(held[2])
    assert by_component == found.by_component
    summary = viewer.segsum(snapshot)  # asserts that blocks and gaps fill the segments
    assert f"total_reserved: {viewer.Bytes(found.reserved_bytes)}\n" in summary
    assert f"segments: {found.segments}\n" in summary
    assert sum(s["total_size"] for s in snapshot["segments"]) == found.reserved_bytes
    assert {s["stream"] for s in snapshot["segments"]} == {b.stream for b in stream.blocks}
    assert viewer.trace(snapshot).startswith("Device 0")


def test_two_files_compare(stream: Stream, tmp_path: Path, capsys: Any) -> None:
    """Segments that came between a tenth of the step and its end."""
    early = written(stream, tmp_path / "early.pickle", False, until=len(stream.events) // 10)
    late = written(stream, tmp_path / "late.pickle", False)
    lines = viewer.compare(early["segments"], late["segments"], _plain)
    first, last = ({s["address"] for s in x["segments"]} for x in (early, late))
    assert first < last and lines.startswith("only_after;")
    assert "only_before = []" in capsys.readouterr().out


def peaks(snapshot: Snapshot) -> tuple[tuple[int, int], tuple[int, int]]:
    """Most bytes and bytes at last: of allocations, of segments."""
    signs = {"alloc": 1, "free_completed": -1}
    segments = {"segment_alloc": 1, "segment_map": 1, "segment_free": -1, "segment_unmap": -1}
    found = []
    for kinds in (signs, segments):
        now = most = 0
        for entry in snapshot["device_traces"][0]:
            now += kinds.get(entry["action"], 0) * entry["size"]
            most = max(most, now)
        found.append((most, now))
    return found[0], found[1]


def _plain(lines: str) -> str:
    return lines


def _inside(html: str) -> str:
    found = re.search(r"local_files = (\[.*\])", html)
    assert found is not None
    return found[1]
