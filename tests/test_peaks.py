"""Published peak memory beside forms: by hand for one row, and within bounds for all."""

from __future__ import annotations

import json
import statistics
from pathlib import Path

import pytest

from bench.peaks import GIB, compared, main, peak_bytes
from bench.published import ROWS, read

ROW = "simumax-llama3_70b_tp2_pp1_dp4_l12_mbc4_cef"


@pytest.fixture(scope="module")
def rows() -> list[dict]:
    return [row for row in read(ROWS) if row.get("peak_memory_gib")]


def test_twelve_layers_of_llama_by_hand(rows: list[dict]) -> None:
    """tp 2, dp 4: D 8192, ffn 28672, 64 heads and 8 of keys of 128, V 128256, 4,096 tokens."""
    (row,) = (row for row in rows if row["id"] == ROW)
    d, ffn, v, tokens, tp = 8192, 28672, 128256, 4096, 2
    layer = d * (64 + 2 * 8) * 128 + 64 * 128 * d + 3 * d * ffn
    state = (12 * layer + 2 * v * d) / tp * (6 + 12 / 4)
    # Two norms read and return the stream; queries, keys, values, output, 4 bytes a head; 3 ffn.
    kept = tokens / tp * (4 * 2 * d + 2 * (2 * 64 + 2 * 8) * 128 + 4 * 64 + 3 * 2 * ffn)
    ends = 2 * 2 * tokens * d / tp
    assert peak_bytes(row) == pytest.approx(
        state + 12 * kept + ends + 8 * tokens * v / tp, rel=1e-12
    )


def test_what_runs_again_is_not_kept(rows: list[dict]) -> None:
    (row,) = (row for row in rows if row["id"] == ROW)
    every, none = peak_bytes({**row, "recompute": "full"}), peak_bytes(row)
    assert every < peak_bytes({**row, "recompute": "layernorm"}) < none


def test_most_published_peaks_are_met(rows: list[dict]) -> None:
    found, out = compared(rows)
    assert len(found) == 64 and not out
    by_source: dict[str, list[float]] = {}
    for one in found:
        by_source.setdefault(one["source"], []).append(one["ratio"] - 1)
    assert all(statistics.median(map(abs, off)) <= 0.05 for off in by_source.values())
    low = [one["id"] for one in found if one["ratio"] < 0.9]
    assert all(name.startswith(("tt-70b-2d", "tt-405b")) for name in low), low


def test_the_command(tmp_path: Path, rows: list[dict], capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "rows.jsonl"
    other = {**rows[0], "id": "else", "source": "nanotron"}
    file.write_text("\n".join(map(json.dumps, [rows[0], other])))
    assert main(["--rows", str(file), "--json"]) == 0
    content = json.loads(capsys.readouterr().out)
    assert content["rows"][0]["counted"] == pytest.approx(peak_bytes(rows[0]) / GIB)
    assert content["left_out"][0]["reason"] == "no form for nanotron"
    assert main(["--rows", str(file)]) == 0
    assert "else: no form for nanotron" in capsys.readouterr().out
    assert main(["--rows", str(tmp_path / "none")]) == 2
