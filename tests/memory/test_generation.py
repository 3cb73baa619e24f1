"""Memory of generation and evaluation: the estimate against real runs, and its own calibration."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from checkpointing.tracing.live_bytes import LiveBytes
from megacpp.cli.generation import generation_memory
from megacpp.cli.main import main
from megacpp.cli.memory_generate import GenerationArgs
from megacpp.config.presets import tiny
from megacpp.model.hybrid import HybridLM
from megacpp.run.sample import GREEDY, generate
from tests.model.small import variants

CPU = torch.device("cpu")


@pytest.mark.parametrize("new", [0, 1, 30], ids=["evaluation", "one token", "tokens"])
@pytest.mark.parametrize("name", [name for name in variants() if "sparse" not in name])
def test_the_estimate_is_what_tensors_with_values_take(name: str, new: int) -> None:
    """To the byte, but for the rows of experts, which routers decide."""
    config = variants()[name]
    args = GenerationArgs(prompts=3, prompt_tokens=20, new_tokens=new)
    found, real = generation_memory(config, args), generation_memory(config, args, on=CPU)
    assert (found.weights, found.cache) == (real.weights, real.cache)
    assert found.working == pytest.approx(real.working, rel=0.05)


@pytest.mark.parametrize("window", [0, 16, 40])
@pytest.mark.parametrize("pattern", ["AEMR", "A"])
def test_generation_itself_takes_as_much(pattern: str, window: int) -> None:
    """`generate` from prompt to last token, its caches made once."""
    base = tiny().model
    attention = replace(base.attention, window=window)
    config = replace(base, pattern=pattern, attention=attention, vocab_size=64)
    model = HybridLM(config).eval()
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.02)
    args = GenerationArgs(prompts=3, prompt_tokens=10, new_tokens=40)
    weights = sum(t.nbytes for t in (*model.parameters(), *model.buffers()))
    with LiveBytes() as live:
        generate(model, [[5] * 10] * 3, 40, GREEDY)
    found = generation_memory(config, args, gpu=False)
    assert found.weights == weights
    # Beside the last step stands the choice of tokens.
    assert found.cache + found.working == pytest.approx(live.peak, rel=0.02)


def said(capsys: pytest.CaptureFixture[str], folder: Path, *flags: str) -> dict[str, Any]:
    words = "memory generate tiny --train.device cpu --prompt-tokens 20 --new-tokens 0 --json"
    capsys.readouterr()
    assert main([*words.split(), "--memory.calibration", str(folder), *flags]) == 0
    return json.loads(capsys.readouterr().out)


def test_what_was_measured_widens_the_next_estimate(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Records of generation lie apart from those of training."""
    first = said(capsys, tmp_path, "--prompts", "4")
    assert first["residual"] is None and first["measured"] is None
    measured = said(capsys, tmp_path, "--prompts", "4", "--measure")["measured"]
    assert measured["weights"] == first["weights"]
    (path,) = (tmp_path / "generation").glob("*.json")
    assert list(tmp_path.glob("*.json")) == []
    again = said(capsys, tmp_path, "--prompts", "4")
    assert abs(again["residual"]) < 0.05 and again["extra"] == 0
    record = json.loads(path.read_text())
    record["measured_bytes"] = int(1.5 * first["point"])
    path.write_text(json.dumps(record))
    assert said(capsys, tmp_path, "--prompts", "4")["extra"] == pytest.approx(
        0.5 * first["point"], abs=1
    )
    assert said(capsys, tmp_path, "--prompts", "8")["extra"] > 0.5 * first["point"], "a neighbour"


def test_a_gpu_is_estimated_without_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert main("memory generate nam56r_quarter --prompts 2 --new-tokens 8".split()) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "nam56r_quarter: 2 x 1,024 tokens, 8 new, weights in fp32"
    assert any(line.startswith("in all") for line in lines)


def test_a_gpu_that_is_not_there_is_not_measured(capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is one")
    assert main("memory generate tiny --measure --train.device cuda".split()) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: train.device=cuda: there is no GPU") and error.count("\n") == 1
