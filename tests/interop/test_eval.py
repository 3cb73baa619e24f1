"""Tasks of lm-eval: on our weights, and on their exported twin by lm-eval's own model."""

from __future__ import annotations

import json
import math
import os
import re
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from megacpp.cli import eval as evaluation
from megacpp.cli.main import main
from megacpp.errors import ConfigError, MegacppError
from megacpp.run.harness import find_tasks
from megacpp.run.likelihood import log_likelihoods, packed_rows
from tests.interop.models import built, final_folder, model_of, tokenizer
from tests.interop.tasks import TASKS, printed_alike, write_tasks
from tests.interop.test_tokenizer import corpus_of, exported, written
from tests.model.small import small

lm_tasks = pytest.importorskip("lm_eval.tasks")
os.environ.update(HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1")

ALL_TASKS = lm_tasks.TaskManager.__init__


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the tasks, a hybrid of random weights, and its twin with code."""
    home = tmp_path_factory.mktemp("eval")
    write_tasks(home / "tasks")
    os.environ["HF_HOME"] = str(home / "cache")
    final_folder(home / "run", built(small("AEMR", dim=24, vocab_size=300)))
    command = ["export", str(home / "run"), "--out", str(home / "hf"), "--dtype", "fp32"]
    assert main(command) == 0
    return home


def by_transformers(
    home: Path, tasks: list[str], twin: Path, **settings: Any
) -> dict[str, dict[str, float]]:
    """Return the figures of lm-eval's own model of transformers, in fp64."""
    from lm_eval.models.huggingface import HFLM

    from megacpp.run.harness import figures_of, run_tasks

    model: Any = HFLM
    settings |= {"dtype": "float64", "device": "cpu", "trust_remote_code": True}
    loaded = model(pretrained=str(twin), **settings)
    files = [str(home / "tasks" / f"{task}.yaml") for task in tasks]
    return figures_of(run_tasks(loaded, files, None, None)["results"])


@pytest.fixture
def in_fp64(monkeypatch: pytest.MonkeyPatch) -> None:
    """Evaluate in fp64: sums that fp32 rounds give a perplexity of 12,060 other decimals."""
    loaded = evaluation.load_model
    monkeypatch.setattr(evaluation, "load_model", lambda *args: loaded(*args).double())


def evaluated(home: Path, tasks: list[str], capsys: Any, *more: str) -> dict[str, Any]:
    files = ",".join(str(home / "tasks" / f"{task}.yaml") for task in tasks)
    assert main(["eval", str(home / "run"), "--tasks", files, "--json", *more]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.usefixtures("in_fp64")
def test_figures_are_those_of_the_exported_twin(home: Path, capsys: Any) -> None:
    tasks = ["lines", "cloze", "answers"]
    found = evaluated(home, tasks, capsys)
    twin = by_transformers(home, tasks, home / "hf")
    assert found["results"].keys() == twin.keys() == set(tasks)
    for task, metrics in twin.items():
        for metric, value in metrics.items():
            ours = found["results"][task][metric]
            assert printed_alike(ours, value), (task, metric, ours, value)
    assert found["documents"] == {task: len(TASKS[task][1]) for task in tasks}
    report = json.loads((home / "run" / "eval" / "final.json").read_text())
    ours = [row["resps"][0][0] for row in report["samples"]["answers"]]
    assert len(set(ours)) > 3, "answers that are all alike would prove little"


@pytest.mark.usefixtures("in_fp64")
@pytest.mark.parametrize("name", ["qwen", "llama3"])
def test_a_given_tokenizer_is_that_of_the_twin(
    name: str, home: Path, tmp_path: Path, capsys: Any
) -> None:
    """Qwen's way puts nothing in front of a context, Llama 3's a start token.

    The twin has our code: classes of transformers round norms to fp32 whatever their dtype.
    """
    corpus = corpus_of(written(name, tmp_path / "came"), tmp_path)
    (tmp_path / "run").mkdir()
    exported(corpus.path, tmp_path / "run", "hf-code")
    twin = (tmp_path / "run" / "out").rename(tmp_path / name)
    (tmp_path / "tasks").symlink_to(home / "tasks")
    capsys.readouterr()
    tasks = ["lines", "cloze", "answers"]
    found = evaluated(tmp_path, tasks, capsys)["results"]
    for task, metrics in by_transformers(home, tasks, twin).items():
        for metric, value in metrics.items():
            assert printed_alike(found[task][metric], value), (task, metric, found[task], value)


@pytest.mark.parametrize("kind", ["generate_until", "multiple_choice"])
def test_an_empty_context_begins_with_the_end_of_text(
    kind: str, home: Path, tmp_path: Path, capsys: Any
) -> None:
    """A tokenizer that puts nothing in front leaves a context empty, and the evaluation goes on."""
    corpus = corpus_of(written("qwen", tmp_path / "came"), tmp_path)
    (tmp_path / "run").mkdir()
    exported(corpus.path, tmp_path / "run", "hf-code")
    metric = "exact_match" if kind == "generate_until" else "acc"
    lines = [{"start": start, "end": "a", "ends": ["a", "b"]} for start in ("", "a", " ")]
    (tmp_path / "empty.jsonl").write_text("\n".join(map(json.dumps, lines)))
    target = 'doc_to_choice: "{{ends}}"' if kind == "multiple_choice" else "generation_kwargs: {}"
    (tmp_path / "empty.yaml").write_text(
        f"""task: empty
dataset_path: json
dataset_kwargs: {{data_files: {{test: {tmp_path / "empty.jsonl"}}}}}
test_split: test
output_type: {kind}
doc_to_text: "{{{{start}}}}"
doc_to_target: "{{{{end}}}}"
target_delimiter: ""
{target}
metric_list: [{{metric: {metric}}}]
metadata: {{version: 1.0}}"""
    )
    capsys.readouterr()
    command = ["eval", str(tmp_path / "run"), "--tasks", str(tmp_path / "empty.yaml"), "--json"]
    assert main(command) == 0
    assert json.loads(capsys.readouterr().out)["documents"] == {"empty": 3}


@pytest.mark.usefixtures("in_fp64")
def test_bits_of_whole_texts(home: Path, capsys: Any) -> None:
    found = evaluated(home, ["texts"], capsys)["results"]["texts"]["bits_per_byte"]
    twin = by_transformers(home, ["texts"], home / "hf", add_bos_token=False)
    theirs = twin["texts"]["bits_per_byte"]
    assert printed_alike(found, theirs), (found, theirs)


def test_documents_that_cant_be_had_are_one_line(
    home: Path, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file that isn't there, and a data set of a hub for a program that may not ask it."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    text = (home / "tasks" / "lines.yaml").read_text()
    gone = tmp_path / "gone.jsonl"
    (tmp_path / "gone.yaml").write_text(re.sub(r"test: [^}]*}", f"test: {gone}}}", text))
    words = "dataset_path: megacpp/nowhere"
    (tmp_path / "far.yaml").write_text(
        re.sub("dataset_kwargs: .*", "", text.replace("dataset_path: json", words))
    )
    for name in ("gone", "far"):
        capsys.readouterr()
        command = ["eval", str(home / "run"), "--tasks", str(tmp_path / f"{name}.yaml")]
        assert main([*command, "--out", str(tmp_path / "out.json")]) == 3
        line = capsys.readouterr().err.splitlines()[-1]
        said = r"error: tasks=lines: the task can't be loaded \(.*\)\. Fix: check "
        assert re.match(said, line)
        assert not (tmp_path / "out.json").exists()


def test_a_task_whose_template_fails_is_one_line(home: Path, tmp_path: Path, capsys: Any) -> None:
    text = (home / "tasks" / "lines.yaml").read_text()
    wrong = tmp_path / "wrong.yaml"
    wrong.write_text(re.sub("doc_to_text: .*", 'doc_to_text: "{{ lacking.part }}"', text))
    assert main(["eval", str(home / "run"), "--tasks", str(wrong)]) == 3
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith("error: tasks=lines: the task can't be loaded (UndefinedError: ")


def test_a_full_disk_takes_the_samples_and_not_the_figures(home: Path, capsys: Any) -> None:
    evaluated(home, ["lines"], capsys)
    files, out = str(home / "tasks" / "lines.yaml"), home / "run" / "eval" / "full.json"
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 11, before[1]))
    try:
        assert main(["eval", str(home / "run"), "--tasks", files, "--out", str(out)]) == 2
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    said = capsys.readouterr()
    assert "acc_norm" in said.out and "figures and samples" not in said.out
    line = said.err.splitlines()[-1]
    assert line.startswith(f"error: out={out}: file too large. Fix: free disk space, or give "), (
        line
    )
    assert not out.exists() and not list(out.parent.glob("*.tmp"))


def test_rows_batches_and_ranks_change_nothing(home: Path, capsys: Any) -> None:
    tasks = ["lines", "answers"]
    want = evaluated(home, tasks, capsys)["results"]
    alone = evaluated(home, tasks, capsys, "--row-tokens", "1", "--batch", "1")["results"]
    files = ",".join(str(home / "tasks" / f"{task}.yaml") for task in tasks)
    words = ["eval", str(home / "run"), "--tasks", files, "--json", "--device", "cpu"]
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "megacpp"]
    done = subprocess.run(
        [sys.executable, *launch, *words],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[2],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    assert alone == want == json.loads(done.stdout)["results"]


def test_a_request_sees_no_other_of_its_row() -> None:
    model = built(model_of("llama")).double()
    draws = torch.Generator().manual_seed(0)
    lengths = [(5, 3), (1, 1), (9, 2), (2, 6), (4, 1)]
    requests = [
        (
            torch.randint(300, (context,), generator=draws).tolist(),
            torch.randint(300, (continuation,), generator=draws).tolist(),
        )
        for context, continuation in lengths
    ]
    together = log_likelihoods(model, requests, 64)
    for (context, continuation), (log, greedy) in zip(requests, together, strict=True):
        with torch.no_grad():
            ids_1T = torch.tensor([[*context, *continuation]])
            logits_TV = model.head.logits(model.hidden(ids_1T))[0, len(context) - 1 : -1]
        want = logits_TV.log_softmax(-1)[range(len(continuation)), continuation]
        assert math.isclose(log, want.sum().item(), rel_tol=1e-12)
        assert greedy == (logits_TV.argmax(-1).tolist() == continuation)


def test_equal_requests_tie_exactly() -> None:
    model = built(model_of("llama"))
    requests = [([n % 3 + 7, 8, 9], [4, n % 3]) for n in range(40)]
    found = log_likelihoods(model, requests, 16)
    assert found == found[:3] * 13 + found[:1]
    rows: list[list[int]] = []

    def seen(packed: list[list[int]]) -> list[list[int]]:
        rows.extend(packed)
        return packed

    assert log_likelihoods(model, requests, 16, seen) == found
    assert sorted(number for row in rows for number in row) == [0, 1, 2], "each is scored once"


def test_rows_are_filled_longest_first() -> None:
    assert packed_rows([3, 9, 4, 5, 1], 10) == [[1, 4], [3, 2], [0]]
    assert packed_rows([12, 2], 10) == [[0], [1]]


def few_tasks(self: Any, include_defaults: bool = True, **settings: Any) -> None:
    """Leave out the thousands of tasks that lm-eval ships: reading their names takes 11 s."""
    ALL_TASKS(self, include_defaults=False, **settings)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "tasks=: is needed. Fix: write --tasks NAME or a task's YAML file."),
        (["--tasks", "no_such_task"], "tasks=no_such_task: no such task. Fix: give a name of"),
        (["--tasks", "compile"], "tasks=compile: no such task. Fix: did you mean 'compiles'."),
        (["--tasks", "tasks/none.yaml"], "tasks=tasks/none.yaml: no such file. Fix: give a"),
        (["--tasks", "{home}/hf"], "has no YAML file. Fix: give a task's YAML file."),
        (["--tasks", "{home}/tasks/lines.jsonl"], "has no line `task: NAME`. Fix: "),
        (["--tasks", "x", "--out", "/proc/x/y"], "out=/proc/x/y: can't be written ("),
        (["--tasks", "x", "--checkpoint", "3"], "has no such weights. Fix: train it first."),
    ],
)
def test_mistakes_are_one_line(
    home: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch, words: list[str], message: str
) -> None:
    monkeypatch.setattr(lm_tasks.TaskManager, "__init__", few_tasks)
    code = main(["eval", str(home / "run"), *(word.format(home=home) for word in words)])
    captured = capsys.readouterr()
    assert code == 2 and captured.out == ""
    assert message in captured.err and captured.err.count("\n") == 1


def test_without_lm_eval_the_extra_is_named(
    home: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval.api.model", None)
    assert main(["eval", str(home / "run"), "--tasks", "x"]) == 1
    assert "pip install 'megacpp[eval]'" in capsys.readouterr().err
    assert tokenizer().vocab_size <= 300


def test_a_misspelt_task_of_ours_is_found_without_lm_eval(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval.tasks", None)
    with pytest.raises(ConfigError, match=r"tasks=compile: .*Fix: did you mean 'compiles'"):
        find_tasks(["hellaswag", "compile"], "tasks")
    with pytest.raises(MegacppError, match="lm-eval isn't installed"):
        find_tasks(["hellaswag"], "tasks")
