"""GPU benchmarks, small on a CPU: every section, and errors that end nothing."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.gpu import steps
from bench.gpu.__main__ import SECTIONS, main
from bench.gpu.clock import median_s
from bench.gpu.models import MODES, config_of, models
from bench.gpu.profile import slowest
from bench.gpu.recompute import mark
from bench.gpu.record import GpuRecord
from bench.gpu.shapes import MODELS, hybrid, ready
from bench.gpu.steps import (
    GIB,
    CapturedSteps,
    Steps,
    graph_unsupported_reason,
    in_use,
    made_up,
)
from bench.gpu.tables import COLUMNS, GOALS, as_markdown, reached
from megacpp.blocks.mtp.config import MTPConfig
from megacpp.config.checks.every import check, resolve
from megacpp.config.presets import preset
from megacpp.config.schema import KEEP, Config, PrecisionConfig
from megacpp.kernels.chosen import host_of
from megacpp.kernels.selection import OPERATIONS
from megacpp.memory.estimate import MemoryEstimate
from megacpp.model.flops import train_flops_per_token

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.fixture(scope="module")
def tiny_run(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """All sections on a CPU."""
    path = tmp_path_factory.mktemp("bench") / "gpu.json"
    assert main(["--tiny", "--device", "cpu", "--out", str(path)]) == 0
    return json.loads(path.read_text())


def test_every_section_has_rows_and_nothing_failed(tiny_run: dict[str, Any]) -> None:
    skipped = {(row["section"], row["name"], row["mode"]) for row in tiny_run["skipped"]}
    config = ready(hybrid(12), True)
    host = host_of(config, CPU)
    backends = [(name, b) for name, o in OPERATIONS.items() for b in o.backends]
    refused = {
        ("kernels", n, b.name)
        for n, b in backends
        if b.unsupported_reason(config, host) is not None
    }
    assert skipped == refused
    assert {row["section"] for row in tiny_run["rows"]} == set(SECTIONS)
    assert {row["mode"] for row in tiny_run["rows"] if row["section"] == "models"} == set(MODES)
    named = {row["name"] for row in tiny_run["rows"] if row["section"] == "kernels"}
    assert named == set(OPERATIONS)


def test_rows_hold_what_their_tables_show(tiny_run: dict[str, Any]) -> None:
    """On a CPU there is neither an allocator nor a peak of the data sheet."""
    on_gpu = {"mfu", "allocated_gib", "reserved_gib", "total_gib"}
    on_gpu |= {"estimate_off", "tensors_off", "upper_held"}
    for section, columns in ((name, COLUMNS[name]) for name in SECTIONS):
        own = [row for row in tiny_run["rows"] if row["section"] == section]
        missing = {c[0] for c in columns if all(row.get(c[0]) is None for row in own)}
        assert missing <= on_gpu, section


def test_backends_agree_with_their_references(tiny_run: dict[str, Any]) -> None:
    """fp32: sums of some hundred products in another order."""
    rows = [row for row in tiny_run["rows"] if "output_error" in row]
    assert len(rows) >= len(OPERATIONS)
    for row in rows:
        assert row["output_error"] <= 1e-5 and row["gradient_error"] <= 1e-4, row


def test_rates_follow_from_counted_flops(tiny_run: dict[str, Any]) -> None:
    row = next(r for r in tiny_run["rows"] if r["name"] == "dense_1b" and r["mode"] == "eager")
    model = ready(MODELS["dense_1b"](), True).model
    flops = train_flops_per_token(model, row["seq_len"]) * row["tokens_per_s"]
    assert row["tflops"] == pytest.approx(flops / 1e12)
    assert sum(r["share"] for r in tiny_run["rows"] if r["section"] == "profile") <= 1.0


def test_a_model_is_fitted_to_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """dense_3b takes fewer rows on a device where 4 may not fit, and is left out where none do."""
    upper = {4: 80.6, 2: 70.0, 1: 60.0}
    estimate = steps.expected(ready(MODELS["dense_3b"](), True), CPU)

    def expected(config: Config, device: torch.device) -> MemoryEstimate:
        point = int(upper[config.train.device_batch_size] * GIB)
        return replace(estimate, point=point - 5 * GIB, upper=point, budget=budget)

    monkeypatch.setattr(steps, "expected", expected)
    for gib, rows in ((90, 4), (79, 2), (61, 1)):
        budget = gib * GIB
        assert config_of("dense_3b", GpuRecord(None, CPU, 1.0)).train.device_batch_size == rows
    budget = 50 * GIB
    record = GpuRecord(None, CPU, 1.0)
    models(record, ["dense_3b"])
    assert "may not fit (60.0 of 50.0 GiB)" in record.skipped[0]["why"] and not record.rows


def test_a_step_of_the_hybrid_has_the_tokens_of_a_real_one() -> None:
    """Newton-Schulz is then a part of the step's FLOPs as it is in training, and is printed."""
    config, quarter = ready(hybrid(13), False), preset("nam56r_quarter")
    tokens = config.train.device_batch_size * config.train.grad_accum * config.data.seq_len
    assert tokens >= resolve(quarter, 1).train.tokens_per_step == 131_072


def test_flops_of_newton_schulz(tiny_run: dict[str, Any]) -> None:
    row = next(r for r in tiny_run["rows"] if r["name"] == "dense_1b" and r["mode"] == "eager")
    model = ready(MODELS["dense_1b"](), True).model
    a, wide, heads = model.attention, model.dim, model.attention.head_dim
    # Two A and two F blocks: Q, K, V, output; gate, up and down.
    sides = [(wide, a.num_heads * heads)] * 2 + [(wide, a.num_kv_heads * heads)] * 2
    sides += [(wide, model.mlp.hidden_dim)] * 3
    muon = 2 * sum(5 * (4 * min(s) ** 2 * max(s) + 2 * min(s) ** 3) for s in sides)
    whole = row["flops_per_token"] * row["rows"] * row["seq_len"] * row["grad_accum"]
    assert row["muon_share"] == pytest.approx(muon / (muon + whole))


@pytest.mark.parametrize("name", MODELS)
def test_models_of_a_gpu_are_legal(name: str) -> None:
    config = ready(MODELS[name](), False)
    check(config, 1)
    assert config.data.seq_len == 4096 and graph_unsupported_reason(config, CPU) is None


def test_what_can_not_be_one_cuda_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check one line per rule; the models of the benchmark may be captured in bf16."""
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda **_: True)
    config = ready(MODELS["moe_1b"](), False)
    model, odd = config.model, replace(config.model.moe, hidden_dim=1020)
    refused = {
        "offloaded": replace(config, recompute=replace(KEEP, offload="saved_tensors")),
        "projections": replace(config, recompute=replace(KEEP, compress=0.25)),
        "rows each expert": replace(config, precision=PrecisionConfig("fp32")),
        "how many rows": replace(config, model=replace(model, moe=odd)),
        "around a token": replace(config, model=replace(model, mtp=MTPConfig(depths=1))),
        "loss scale": replace(
            ready(MODELS["dense_1b"](), False), precision=PrecisionConfig("fp16")
        ),
        "keeps scales": replace(config, precision=replace(config.precision, fp8="te")),
        "maxima": replace(config, optim=replace(config.optim, qk_clip=100.0)),
    }
    for words, each in refused.items():
        why = graph_unsupported_reason(each, CUDA)
        assert why is not None and words in why and "\n" not in why, (words, why)
        assert graph_unsupported_reason(each, CPU) is None, "no graph, nothing to refuse"
    for name in MODELS:
        assert graph_unsupported_reason(ready(MODELS[name](), False), CUDA) is None, name


def test_an_error_is_a_line_and_the_next_row_follows(tmp_path: Path) -> None:
    record = GpuRecord(tmp_path / "x.json", CPU, 60.0)

    def broken() -> Iterator[dict[str, Any]]:
        yield {"tflops": 600.0}
        raise RuntimeError("out of\n luck")

    assert not record.attempt("models", "dense_1b", "eager", broken)
    assert record.attempt("models", "dense_1b", "graph", lambda: [{"tflops": float("nan")}])
    found = json.loads((tmp_path / "x.json").read_text())
    assert [row["tflops"] for row in found["rows"]] == [600.0, None]
    assert found["rows"][1]["not_finite"] == ["tflops"]
    assert [row["why"] for row in found["skipped"]] == ["RuntimeError: out of luck"]


def test_nothing_is_begun_when_the_time_is_over() -> None:
    record = GpuRecord(None, CPU, 0.0)
    assert not record.attempt("models", "dense_1b", "eager", lambda: [{}])
    assert not record.rows and "were over" in record.skipped[0]["why"]


def test_goals() -> None:
    rows = [
        {"section": "models", "name": "dense_1b", "tflops": 400.0, "estimate_off": -0.04},
        {"section": "models", "name": "dense_3b", "tflops": 570.0, "upper_held": True},
        {"section": "models", "name": "hybrid", "tflops": 200.0, "upper_held": False},
    ]
    assert [ok for _, _, ok in reached(rows)] == [True, False, False, False, None, None]
    assert len(reached([])) == len(GOALS) and all(ok is None for *_, ok in reached([]))
    assert "not run" in as_markdown(None) and "| hybrid | " in as_markdown({**STORED, "rows": rows})


STORED = {
    **dict.fromkeys(("device", "capability", "driver", "torch", "triton", "commit", "date"), "x"),
    "skipped": [{"section": "models", "name": "moe_1b", "mode": "graph", "why": "for a reason"}],
}


def test_the_front_and_the_slowest() -> None:
    figures = {"keep all": (1.0, 9.0), "every block": (2.0, 4.0), "worse": (2.5, 5.0)}
    rows = [{"mode": name, "pass_s": s, "peak_gib": g} for name, (s, g) in figures.items()]
    mark(rows)
    assert [row["front"] for row in rows] == [True, True, False]
    assert [row["time_ratio"] for row in rows] == [1.0, 2.0, 2.5]
    assert slowest([]) == "hybrid"


def test_a_captured_step_is_the_step() -> None:
    """On a CPU its body runs as it is: the same weights, to the rounding of the divisor."""
    config = ready(hybrid(12), True)
    weights = []
    for made in (Steps(config, CPU, packed=False), CapturedSteps(config, CPU)):
        made.step()
        weights.append([p.detach().clone() for p in made.model.parameters()])
    for a, b in zip(*weights, strict=True):
        assert (a - b).abs().max() <= 1e-6


def test_made_up_rows() -> None:
    config = ready(MODELS["dense_1b"](), True)
    packed, whole = made_up(config, True), made_up(config, False)
    assert not packed.docs.whole and whole.docs.whole
    assert packed.docs.starts_BT.sum() == 4 * len(packed.rows)
    assert in_use(CPU) == {}


def test_a_median_of_calls() -> None:
    calls = []
    assert median_s(lambda: calls.append(1), CPU, warm=2, repeats=5) < 1.0
    assert len(calls) == 7


def test_without_a_gpu_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is one")
    assert main([]) == 2 and "Fix: --tiny --device cpu" in capsys.readouterr().err
    assert main(["--device", "cuda"]) == 2
