"""Published runs through the time model: any row has a prediction or a reason."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest

from bench.published import FITTED, ROWS, compare, fit, main, rank_correlation, read, report
from bench.recipes import RECIPES, completed
from megacpp.speed.hardware import Rates

KINDS = {
    "mpt-7b-s2048-h100_80gb-8": 0.2,  # GPT with ALiBi, FSDP
    "tt-8b-fsdp8-compile": 0.2,  # Llama, FSDP2, compiled
    "tt-405b-3d-1f1b": 0.3,  # tp, pp
    "vtrain-175b-g512-t8d8p8-mb2-95": 0.2,  # 1F1B, unfused attention
    "simumax-llama3_70b_l12_tp4_pp1_dp2_mbc32_cef": 0.2,
    "mb-26.04.01-deepseek-v3-b200-256-mxfp8": 0.5,  # MLA, experts
    "mb-26.04.01-gpt-oss-120b-b200-64-bf16": 0.5,  # windows
    "dgxc-nemotronh56b-fp8-64": 0.3,  # Mamba-2
    "nanochat-run1-d24": 0.3,  # Muon
}


@pytest.fixture(scope="module")
def rows() -> dict[str, dict]:
    return {row["id"]: row for row in read(ROWS)}


def test_each_kind_of_model_is_predicted(rows: dict[str, dict]) -> None:
    for name, off in KINDS.items():
        found = compare(rows[name], {})
        assert found.time is not None, (name, found.reason)
        assert abs(found.ratio - 1) < off, (name, found.ratio)
        assert sum(found.time.parts.values()) == pytest.approx(found.time.step_s)


def test_a_recipe_adds_what_a_row_leaves_out(rows: dict[str, dict]) -> None:
    row = rows["mb-26.04-qwen3-235b-a22b-h100-256-fp8"]
    assert completed(row)["parallel"] == row["parallel"] | {"ep_overlap": True}
    said = row | {"parallel": row["parallel"] | {"ep_overlap": False}}
    assert completed(said)["parallel"] == said["parallel"]
    assert abs(compare(row, {}).ratio - 1) < 0.1 < compare(said, {}).ratio - 1
    whole = rows["mb-25.09-qwen3-30b-a3b-b200-8-fp8-drop"]
    assert completed(whole)["notes"].endswith("cuda_graph_scope: [full_iteration]")
    for recipe in RECIPES:
        assert any(completed(row) != row and row["model"]["name"] == recipe.model
                   for row in rows.values())  # fmt: skip


def test_a_broken_row_has_a_reason(rows: dict[str, dict]) -> None:
    for row in map(copy.deepcopy, [rows[name] for name in KINDS]):
        for place, names in ((row, list(row)), (row["model"], list(row["model"]))):
            for name in names:
                kept = place.pop(name)
                for value in (None, "text", -1, 0, []):
                    compare(row, {})
                    place[name] = value
                found = compare(row, {})
                assert (found.time is None) == bool(found.reason)
                place[name] = kept
    assert compare({**rows["nanochat-run1-d24"], "gpu": "TPU"}, {}).reason == (
        "GPU TPU isn't in hardware.json"
    )
    assert compare({}, {}).reason == "no measured step"


def test_constants_come_from_few_rows_alone(rows: dict[str, dict]) -> None:
    few = [row for name, row in rows.items() if name in KINDS]
    found = fit(few)
    assert set(found) == {("H100", "llm-foundry"), ("H100-500W", "torchtitan-compile")}
    assert len(Rates._fields) == 3 and FITTED == ("mpt-7b-", "mpt-13b-", "tt-8b-fsdp8-")
    slower = [
        row if row["id"].startswith(FITTED) else {**row, "step_s": 3 * row["step_s"]} for row in few
    ]
    assert fit(slower) == found


def test_the_command_compares_a_file(
    tmp_path: Path, rows: dict[str, dict], monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    file = tmp_path / "rows.jsonl"
    wanted = [rows[name] for name in KINDS]
    file.write_text("\n".join(map(json.dumps, [*wanted, {"id": "odd"}])))
    monkeypatch.setattr("bench.published.ROWS", file)
    assert main(["--rows", str(file), "--json"]) == 0
    content = json.loads(capsys.readouterr().out)
    assert [row["id"] for row in content["rows"]] == list(KINDS)
    assert content["rows"][0]["predicted"]["step_s"] > 0
    assert content["left_out"] == [{"id": "odd", "reason": "no measured step"}]
    assert main(["--rows", str(file)]) == 0
    assert "odd: no measured step" in capsys.readouterr().out
    assert main(["--rows", str(tmp_path / "none")]) == 2


def test_rank_correlation_is_spearmans() -> None:
    assert rank_correlation([1, 2, 3, 4], [10, 20, 30, 40]) == pytest.approx(1)
    assert rank_correlation([1, 2, 3, 4], [4, 3, 2, 1]) == pytest.approx(-1)
    assert rank_correlation([1, 2, 3], [1, 3, 2]) == pytest.approx(0.5)
    assert rank_correlation([1, 2], [1, 2]) is None


def test_a_summary_counts_every_row(rows: dict[str, dict]) -> None:
    content = report([rows[name] for name in KINDS], [])
    assert sum(s["rows"] for s in content["sources"].values()) == len(KINDS)
    assert content["constants"] == []
