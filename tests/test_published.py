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
    row = rows["mb-26.04-deepseek-v3-b200-256-mxfp8"]
    for pp, counts in ((8, [9, *[8] * 6, 7]), (4, [17, 16, 16, 15])):
        step, _, _ = step_of({**row, "parallel": row["parallel"] | {"pp": pp, "dp": 256 // pp}})
        assert [len(stage) for stage in step.stages] == counts


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
    return [op for r in regions for op in r.forward], [op for r in regions for op in r.backward]


def test_current_scaling_reads_each_experts_rows_once_more(rows: dict[str, dict]) -> None:
    """Three kernels for each of 16 experts: one reads 3,072 rows in bf16, two are tiny."""
    row, wide, dim = rows["mb-26.04-nemotron-3-nano-30b-a3b-h100-16-fp8"], 1856, 2688
    for ops, widths in zip(_layer(row), ((dim, wide), (wide, dim)), strict=True):
        scales = [op for op in ops if isinstance(op, Passes) and op.launches == 3 * 16]
        assert scales == [Passes(2.0 * 16 * 3072 * width, 48) for width in widths]
        assert sum(op.apart for op in ops if isinstance(op, Product)) in (2, 4)


def test_an_experts_bias_is_added_in_fp32(rows: dict[str, dict]) -> None:
    """28 bytes of each element of 16 x 1,024 rows of 2,880, and 36 backward."""
    row = rows["mb-26.04-gpt-oss-120b-h100-64-bf16"]
    for ops, each in zip(_layer(row), (28, 36), strict=True):
        assert Passes(each * 16 * 1024 * 2880.0) in ops


def test_the_host_issues_what_a_layer_has_besides(rows: dict[str, dict]) -> None:
    """Operators of torch at 2.5 times `launch_us`, counted by hand for a layer of experts."""

    def issued(name: str, **changed: object) -> tuple[int, int]:
        step, _, _ = step_of({**rows[name], **changed})
        return next(b.launches for b in step.blocks if b.kind == "AE")

    # Attention 20, dispatch 30, a fused router 13, 8 experts of 2, their exchange twice.
    fused = issued("mb-skill-qwen3-30b-ep16-off")
    assert fused == (round(2.5 * 81), 5 * 81)
    # MLA 12, its rotary embeddings 26, a router 30, sizes 15, shared experts 8; tp sends 4 times.
    moonlight = 20 + 12 + 26 + 30 + 30 + 16 + 15 + 8 + 2 + 4
    assert issued("mb-skill-moonlight-none") == (round(2.5 * moonlight), 5 * moonlight)
    # One part that runs again: 4 operators forward, 12 and its own backward.
    ahead, back = issued("mb-skill-moonlight-none", recompute="moe_act")
    assert (ahead, back) == (round(2.5 * (moonlight + 4)), round(2.5 * (2 * moonlight + 12 + 1)))
    # A bias adds three operators for each of 16 experts, scales of FP8 one for each of 8.
    assert issued("mb-26.04-gpt-oss-120b-h100-64-bf16", recompute="none") == (
        round(2.5 * (20 + 30 + 13 + 16 * 5 + 15 + 2)), 5 * (20 + 30 + 13 + 16 * 5 + 15 + 2)
    )  # fmt: skip
    assert issued("mb-26.04-qwen3-30b-a3b-h100-16-fp8")[0] == round(2.5 * (81 + 8 * 2))


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
