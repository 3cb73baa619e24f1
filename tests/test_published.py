"""Published runs through the time model: any row has a prediction or a reason."""

from __future__ import annotations

import copy
import json
import re
from itertools import combinations, product
from pathlib import Path

import pytest

from bench.dispatch import chosen, sent_once
from bench.others import moe_layer
from bench.published import FITTED, ROWS, compare, fit, main, rank_correlation, read, report
from bench.recipes import RECIPES, completed
from bench.rows import sizes_of, step_of
from megacpp.speed.hardware import Rates
from megacpp.speed.operators import Passes, Product

KINDS = {
    "mpt-7b-s2048-h100_80gb-8": 0.2,  # GPT with ALiBi, FSDP
    "tt-8b-fsdp8-compile": 0.2,  # Llama, FSDP2, compiled
    "tt-405b-3d-1f1b": 0.3,  # tp, pp
    "vtrain-175b-g512-t8d8p8-mb2-95": 0.2,  # 1F1B, unfused attention
    "simumax-llama3_70b_l12_tp4_pp1_dp2_mbc32_cef": 0.2,
    "mb-26.04.01-deepseek-v3-b200-256-mxfp8": 0.2,  # MLA, experts
    "mb-26.04.01-gpt-oss-120b-b200-64-bf16": 0.2,  # windows
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
    nano = completed(rows["mb-26.04-nemotron-3-nano-30b-a3b-h100-16-fp8"])
    assert nano["recompute"] == "moe, layernorm, core_attn, moe_act"
    for recipe in RECIPES:
        assert any(completed(row) != row and re.match(recipe.model, row["model"]["name"])
                   for row in rows.values())  # fmt: skip


def test_a_recipe_keeps_layers_from_the_stage_of_the_loss(rows: dict[str, dict]) -> None:
    """61 layers in 16 stages: 15 times 4, then one with the MTP layer and the head."""
    step, _, _ = step_of(rows["mb-26.04-deepseek-v3-b200-256-mxfp8"])
    assert [len(stage) for stage in step.stages] == [5, *[4] * 14, 3]
    assert [step.blocks[n].kind for n in step.stages[-1]] == ["AE", "mtp", "head"]


def test_copies_of_a_token_are_those_of_all_choices() -> None:
    """Two of four groups of experts are kept; three choices fall into them evenly."""
    for places in (2, 4, 8):
        found = tries = 0
        for kept in combinations(range(4), 2):
            here = [n for n in range(8) if n // 2 in kept]  # eighths of the experts
            for choices in product(here, repeat=3):
                found += any(n * places // 8 == 0 for n in choices)
                tries += 1
        assert chosen(3, places, 4, 2) == pytest.approx(found / tries)
    assert chosen(8, 8) == chosen(8, 8, 1, 1) == pytest.approx(1 - (7 / 8) ** 8)
    # Eight ranks of one node: each that is chosen; of four nodes: three others, of 24 of 32 ranks.
    assert sent_once(8, 8, 8) == pytest.approx(8 * (1 - (7 / 8) ** 8))
    assert sent_once(8, 32, 8) == pytest.approx(3 * (1 - (3 / 4) ** 8) * 32 / 24)


def _layer(row: dict) -> tuple[list, list]:
    """Return the operators of the forward and of the backward of a row's experts."""
    regions = list(moe_layer(sizes_of(completed(row), [])))
    ahead, back = ([op for r in regions for op in r[n]] for n in (1, 2))
    return ahead, back


def test_current_scaling_reads_each_experts_rows_once_more(rows: dict[str, dict]) -> None:
    """Three kernels for each of 16 experts: one reads 3,072 rows in bf16, two are tiny."""
    row, wide, dim = rows["mb-26.04-nemotron-3-nano-30b-a3b-h100-16-fp8"], 1856, 2688
    for ops, widths in zip(_layer(row), ((dim, wide), (wide, dim)), strict=True):
        scales = [op for op in ops if isinstance(op, Passes) and op.launches == 3 * 16]
        assert scales == [Passes(2.0 * 16 * 3072 * width, 48) for width in widths]
        assert sum(op.apart for op in ops if isinstance(op, Product)) in (2, 4)


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
