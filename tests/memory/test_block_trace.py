"""Traces of blocks: rows on a straight line, one file for each, torch imported once."""

from __future__ import annotations

import dataclasses
import json
import os
import random
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from megacpp.blocks.kinds import KINDS
from megacpp.cli import block_trace
from megacpp.cli.block_trace import trace_blocks
from megacpp.config.arguments import parse_run
from megacpp.config.schema import Config
from megacpp.errors import ConfigError
from megacpp.memory import trace_cache
from megacpp.memory.block_trace import (
    BlockRequest,
    BlockTrace,
    affine_weights,
    combined,
    kept,
    moments,
)
from megacpp.memory.budget import as_run
from megacpp.memory.forms import traced
from megacpp.memory.forms.local_shapes import LocalShapes
from megacpp.memory.forms.traced import TracedPart, request_of
from megacpp.model.regions import NOTHING
from parallel.simulate.fake import fake_world
from tests.memory.working_cases import misses

ROOT = Path(__file__).parents[2]
SMALL = (
    "tiny --model.depth 2 --model.dim 64 --model.m2rnn.num_heads 8 --optim.qk_clip 0"
    " --train.grad_accum 1 --train.tokens_per_step 0 --data.seq_len 256"
)
MESHES = {1: "", 2: "--mesh.tp 2", 4: "--mesh.cp 2 --mesh.tp 2"}


def config_of(kind: str, size: int, flags: str = "") -> Config:
    return parse_run(f"{SMALL} --model.pattern {kind * 2} {flags}".split(), size).config


def request(kind: str, size: int, flags: str, rows: int, device: str = "cpu") -> BlockRequest:
    config = config_of(kind, size, f"{flags} --train.device_batch_size {rows}")
    config = as_run(config, device, narrow=device == "cuda")
    return request_of(LocalShapes.on_rank(config, size, 0), TracedPart((kind,)))


@pytest.mark.parametrize("kind", [*KINDS])
@pytest.mark.parametrize("size", [*MESHES])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_bytes_are_affine_in_rows(kind: str, size: int, device: str) -> None:
    """Rows from 2 on; of an E block also the numbers of rows that experts get."""
    few, many = (100, 128) if kind == "E" else (2, 17)  # hidden units of fewer are few blocks
    asked = request(kind, size, MESHES[size], many, device)
    independent: list[BlockRequest] = []
    for rows in range(few, many):
        one = request(kind, size, MESHES[size], rows, device)
        if one.group == asked.group:
            points = [other.point for other in independent]
            independent += [one] * (affine_weights(points, one.point) is None)
    *traces, found = trace_blocks([*independent, asked])
    weights = affine_weights([one.point for one in independent], asked.point)
    assert weights is not None and combined(traces, weights) == found
    for backward in (False, True):
        assert any(m.tensors for m in moments(found, backward))


@pytest.mark.parametrize("kind", [*KINDS])
def test_all_that_is_allocated_is_freed_but_gradients(kind: str) -> None:
    whole = WHOLE.get(kind)
    flags = f"--recompute.{kind.lower()}block {whole}" if whole else ""
    (trace,) = trace_blocks([request(kind, 1, flags, 2)])
    left = set(range(len(trace.bytes)))
    for event in trace.events:
        (left.discard if event < 0 else left.add)(abs(event) - 1)
    roles = {trace.roles[n] for n in left}
    assert "g" in roles <= {"g", "b"}  # and what is the batch's
    assert {trace.roles[n] for n in trace.added} == {"g"}
    assert trace.roles.count("o") == 1
    if whole and kind != "E":  # whose choices are kept
        assert [*kept(trace)] == ["residual"]  # it runs again as a whole


def test_weights_of_points() -> None:
    assert affine_weights([], (3,)) is None
    assert affine_weights([(3,)], (3,)) == (1,)
    assert affine_weights([(3,)], (4,)) is None
    assert affine_weights([(2,), (3,)], (17,)) == (-14, 15)
    assert affine_weights([(2, 1), (3, 1), (2, 5)], (4, 9)) == (-3, 2, 2)
    assert affine_weights([(2, 4), (3, 6)], (4, 8)) == (-1, 2)
    assert affine_weights([(2, 4), (3, 6)], (4, 9)) is None


def drawn(kind: str, count: int) -> list[tuple[int, str]]:
    """Legal settings that no other test lists: the same ones for a count."""
    draw, found = random.Random(f"traces of {kind}"), []
    while len(found) < count:
        size = draw.choice((1, 2, 4))
        tp = draw.choice([n for n in (1, 2) if n <= size])
        cp = draw.choice([n for n in (1, 2) if tp * n <= size])
        flags = (
            f"--mesh.tp {tp} --mesh.cp {cp} --train.device_batch_size {draw.choice((1, 4, 5))}"
            f" --data.seq_len {draw.choice((256, 384, 1024))}"
            f" --model.dim {draw.choice((768, 1280))}"
            f" --recompute.norms {draw.choice(('true', 'false'))}"
            f" --recompute.{kind.lower()}block {draw.choice(POLICIES[kind])}"
            f" --precision.dtype {draw.choice(('bf16', 'fp32'))}"
            f" --mesh.cp_order {draw.choice(('head_tail', 'contiguous'))}"
        )
        try:
            parse_run(
                f"nam52_deep_base --optim.qk_clip 0 --model.pattern {kind} {flags}".split(), size
            )
        except ConfigError:
            continue
        found.append((size, flags))
    return found


POLICIES = {
    "A": ("none", "selective", "full"),
    "E": ("none", "expert_gemm_only", "full"),
    "F": ("none", "full"),
    "G": ("none", "conv_gate", "full"),
    "M": ("none", "conv_bc_only"),
    "R": ("none", "recurrence", "full", "full_plus_norms"),
}
# The value that recomputes a whole block.
WHOLE = {"A": "full", "E": "full", "F": "full", "R": "full_plus_norms", "G": "full"}


@pytest.mark.parametrize("kind", [*POLICIES])
def test_settings_that_no_test_lists(kind: str) -> None:
    """The fullest moment of a block within 1 % of a traced step's, never under by 0.5 %."""
    for size, flags in drawn(kind, 6):
        found = misses(kind * 2, flags, size, rank=size - 1)
        assert all(-0.5 < miss < 1.0 for miss in found.values()), (flags, found)


def test_a_trace_is_stored_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEGACPP_CACHE", str(tmp_path))
    asked, runs = request("R", 1, "", 1), []

    def counted(requests: Sequence[BlockRequest]) -> list[BlockTrace]:
        runs.extend(requests)
        return trace_blocks(requests)

    monkeypatch.setattr(block_trace, "trace_blocks", counted)
    found = [_anew(asked), _anew(asked)]
    assert found[0] == found[1] and len(runs) == 1
    (file,) = tmp_path.rglob("*.json")
    file.write_text(file.read_text()[:100])  # cut short: traced again
    assert _anew(asked) == found[0] and len(runs) == 2
    file.write_text(json.dumps(found[0].as_dict() | {"added": None}))  # JSON, and no trace
    assert _anew(asked) == found[0] and len(runs) == 3
    monkeypatch.setattr(trace_cache, "sources_hash", lambda: "edited")
    assert _anew(asked) == found[0] and len(runs) == 4
    assert len([*tmp_path.rglob("*.json")]) == 2
    other = dataclasses.replace(asked, pieces=(NOTHING | {"norm"},))
    assert other.key() != asked.key()


def test_a_folder_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("MEGACPP_CACHE", str(tmp_path / "file"))
    assert _anew(request("R", 1, "", 1)).roles


def test_folders_of_old_sources_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEGACPP_CACHE", str(tmp_path))
    asked = request("R", 1, "", 1)
    trace = _anew(asked)
    for number in range(8):
        monkeypatch.setattr(trace_cache, "sources_hash", lambda n=number: f"of {n}")
        trace_cache.write(asked, trace)
        assert trace_cache.read(asked) == trace
    assert len([*(tmp_path / "blocks").iterdir()]) == trace_cache.FOLDERS + 1


@pytest.mark.parametrize("edited", ["megacpp/kernels/file.py", "megacpp/torch_extras.py"])
def test_an_edited_source_has_another_hash(tmp_path: Path, edited: str) -> None:
    for name in trace_cache.SOURCES:
        path = tmp_path / name if name.endswith(".py") else tmp_path / name / "file.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("1")
    before = trace_cache.sources_hash.__wrapped__(tmp_path)
    (tmp_path / edited).write_text("2")
    assert trace_cache.sources_hash.__wrapped__(tmp_path) != before


@pytest.mark.parametrize("package", ["torch", "triton", "mamba-ssm", "torchao"])
def test_another_version_of_a_library_has_another_hash(
    monkeypatch: pytest.MonkeyPatch, package: str
) -> None:
    found = []
    for number in ("1", "2"):
        given = {package: number}
        monkeypatch.setattr(trace_cache, "version", lambda name, of=given: of.get(name, "0"))
        found.append(trace_cache.sources_hash.__wrapped__())
    assert found[0] != found[1]


def _twice(code: str, cache: Path) -> list[str]:
    """Return what two processes print, of which the second finds what the first has stored."""
    env = {**os.environ, "MEGACPP_CACHE": str(cache), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", code]
    return [subprocess.check_output(command, env=env, text=True) for _ in range(2)]


def test_a_warm_estimate_imports_no_torch(tmp_path: Path) -> None:
    code = (
        "import sys; from megacpp.config.arguments import parse_run;"
        "from megacpp.memory.estimate import estimate;"
        "words = 'tiny --model.pattern RF --model.depth 2 --optim.qk_clip 0'.split();"
        "found = estimate(parse_run(words, 1).config, 1);"
        "print(found.tensors, 'torch' in sys.modules)"
    )
    said = [out.split() for out in _twice(code, tmp_path)]
    assert said[0][0] == said[1][0]
    assert [imported for _, imported in said] == ["True", "False"]


def test_a_warm_plan_and_a_warm_prediction_import_no_torch(tmp_path: Path) -> None:
    code = (
        "import sys; from megacpp.cli.main import main;"
        "model = ['tiny', '--model.pattern', 'RF', '--model.depth', '2'];"
        "plan = ['--world', '1', '--memory', '8GiB', '--tokens-per-step', '4096'];"
        "ended = main(['plan', *model, *plan]), main(['speed', *model, '--gpu', 'H100']);"
        "print(*ended, 'torch' in sys.modules)"
    )
    said = _twice(code, tmp_path)
    assert [out.splitlines()[-1] for out in said] == ["0 0 True", "0 0 False"]
    assert [out.splitlines()[:-1] for out in said[1:]] == [said[0].splitlines()[:-1]]


def test_a_launch_on_a_gpu_is_another_request() -> None:
    config = config_of("R", 1)
    own = [
        LocalShapes.on_rank(as_run(config, device, narrow=True), 1, 0) for device in ("cpu", "cuda")
    ]
    assert len({request_of(one, TracedPart(("R",))).key() for one in own}) == 2


def test_a_rank_of_a_run_traces_elsewhere() -> None:
    """Its process group stays as it is."""
    asked = request("R", 2, MESHES[2], 1)
    alone = trace_blocks([asked])
    with fake_world(config_of("R", 2), 2) as world:
        assert trace_blocks([asked]) == alone
        assert world.group("fsdp").size() == 2


def test_a_process_that_dies_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """It begins with the program's file, which isn't there: the rank must not wait for it."""
    program = sys.modules["__main__"]
    monkeypatch.setattr(program, "__file__", "no-such-folder/program.py", raising=False)
    monkeypatch.setattr(program, "__spec__", None)
    asked = request("R", 2, MESHES[2], 1)
    with fake_world(config_of("R", 2), 2), pytest.raises(RuntimeError, match="died"):
        trace_blocks([asked])


def _anew(asked: BlockRequest) -> BlockTrace:
    """Ask as a new process does."""
    return traced._exact.__wrapped__(asked)
