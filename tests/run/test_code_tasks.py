"""Tasks on held-out code: filled-in lines, files that compile; alone and while a run goes on."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from megacpp.cli.main import main
from megacpp.cli.weights import held_out_documents
from megacpp.config.arguments import read_run
from megacpp.config.checks.every import OWN_TASKS, broken
from megacpp.errors import ConfigError
from megacpp.run import code_tasks, harness
from megacpp.run.code_tasks import accepts, compiler, run_code_tasks, without_a_line
from megacpp.run.harness import Subject
from megacpp.run.text_stream import TextStream
from tests.launch import forked
from tests.test_run import ADAMW, SMALL, records

needs_compiler = pytest.mark.skipif(compiler() is None, reason="no C++ compiler")


@pytest.fixture(scope="module")
def run(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run that evaluated the tasks after its second step and at its end."""
    folder = tmp_path_factory.mktemp("code") / "run"
    flags = ["--run.steps", "4", "--run.sample-tokens", "0", "--run.tasks-every", "2"]
    flags += ["--run.tasks", "fim,compiles" if compiler() else "fim", "--run.tasks-limit", "3"]
    paths = ["--data.path", str(corpus), "--run.dir", str(folder)]
    done = forked("tiny", *SMALL, *ADAMW, *flags, *paths, "--train.device-batch-size", "4")
    assert done.returncode == 0, done.stderr
    assert "fim exact_match 0" in " ".join(done.stdout.split())
    return folder


@needs_compiler
def test_figures_are_those_of_the_run(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", str(run), "--tasks", "fim,compiles", "--limit", "3", "--json"]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["documents"] == {"fim": 3, "compiles": 3}
    flat = {f"{task} {m}": v for task, of in found["results"].items() for m, v in of.items()}
    assert flat.keys() == {"fim exact_match", "compiles accepted", "compiles reference"}
    assert [row["tasks"] for row in records(run) if "tasks" in row][-1] == flat
    samples = json.loads((run / "eval/final.json").read_text())["samples"]
    texts = list(held_out_documents(run))[:3]
    for text, fim, file in zip(texts, samples["fim"], samples["compiles"], strict=True):
        assert fim["prefix"] + fim["target"] + fim["suffix"] == text
        assert text.startswith(file["prompt"]) and 0 < len(file["prompt"]) < len(text)


def test_they_need_no_lm_eval(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def absent(module: str) -> Any:
        raise AssertionError(module)

    monkeypatch.setattr(harness, "_imported", absent)
    assert main(["eval", str(run), "--tasks", "fim", "--limit", "1"]) == 0
    assert "exact_match" in capsys.readouterr().out


def test_a_run_needs_lm_eval_for_its_tasks_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    assert set(OWN_TASKS) == code_tasks.CODE_TASKS.keys()
    monkeypatch.setattr("importlib.util.find_spec", lambda name, *rest: None)
    own, others = (
        list(broken(read_run(["tiny", "--run.tasks", tasks]).config, 1))
        for tasks in ("fim,compiles", "fim,piqa")
    )
    assert not own
    assert [str(error).partition(". Fix")[0] for error in others] == [
        "run.tasks=fim,piqa: lm-eval, which piqa needs, isn't installed"
    ]


def test_a_model_that_knows_the_lines_fills_them_in(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The prompt has all that training with fill-in-the-middle has before a middle."""
    from megacpp.cli.weights import find_tokenizer, load_model

    tokenizer, texts = find_tokenizer(run), list(held_out_documents(run))[:4]
    parts = [part for text in texts if (part := without_a_line(text))]
    fim = tokenizer.specials.fim
    assert fim is not None and len(parts) == 4

    def known(
        model: object,
        _: object,
        prompts: Sequence[list[int]],
        streams: list[TextStream],
        *more: Any,
    ) -> None:
        for ids, stream in zip(prompts, streams, strict=True):
            assert ids[:2] == [tokenizer.specials.bos, fim.prefix] and ids[-1] == fim.middle
            suffix = tokenizer.decode(ids[ids.index(fim.suffix) + 1 : -1])
            part = next(part for part in parts if part.suffix == suffix)
            assert tokenizer.decode(ids[2 : ids.index(fim.suffix)]) == part.prefix
            right = part is not parts[0]
            for i in tokenizer.encode(part.middle if right else part.middle + ";"):
                stream.feed(int(i))

    monkeypatch.setattr(code_tasks, "continue_texts", known)
    model = load_model(run, "final", "cpu")
    subject = Subject(model, tokenizer, 1 << 20, 64, 3, lambda items, name, total: items)
    found = run_code_tasks(["fim"], subject, texts, None)
    assert found["results"] == {"fim": {"exact_match": 0.75}}
    assert [one["exact_match"] for one in found["samples"]["fim"]] == [0.0, 1.0, 1.0, 1.0]


def test_a_long_document_is_cut_to_the_model(run: Path) -> None:
    from megacpp.cli.weights import find_tokenizer, load_model

    text = "".join(f"int value_{n} = {n};\n" for n in range(400))
    model, tokenizer = load_model(run, "final", "cpu"), find_tokenizer(run)
    subject = Subject(model, tokenizer, 96, 64, 3, lambda items, name, total: items)
    found = run_code_tasks(["fim"], subject, [text, "\n\n"], None)
    assert found["n-samples"]["fim"] == {"original": 2, "effective": 1}


@needs_compiler
@pytest.mark.parametrize(
    ("text", "fine"),
    [
        ("int twice(int a) { return 2 * a; }\n", True),
        ("#include <vector>\nstd::vector<int> empty() { return {}; }\n", True),
        ("int twice(int a) { return 2 * a;\n", False),
        ("ünïcode 🙂", False),
        ('#include "/dev/zero"\n', False),
    ],
)
def test_a_compiler_judges(text: str, fine: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    command = compiler()
    assert command is not None and accepts(command, text) == fine


def test_a_slow_compiler_accepts_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slow = tmp_path / "slow"
    slow.write_text("#!/bin/sh\nexec sleep 60\n")
    slow.chmod(0o755)
    monkeypatch.setenv("CXX", f"{slow} --flag")
    monkeypatch.setattr(code_tasks, "LIMIT_S", 0.2)
    command = compiler()
    assert command == [str(slow), "--flag", "-std=c++20"] and not accepts(command, "int a;")


def test_what_cannot_be_evaluated_is_one_line(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CXX", "/nowhere/c++")
    assert main(["eval", str(run), "--tasks", "compiles"]) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: tasks=compiles: there is no C++ compiler here")
    assert err.count("\n") == 1 and "Fix: install g++" in err


def test_a_folder_that_is_no_run_has_no_held_out_documents(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    with pytest.raises(ConfigError, match="is no run, so the task has no held-out documents"):
        next(held_out_documents(tmp_path))
