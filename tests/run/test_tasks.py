"""Tasks while a run goes on: the figures of `megacpp eval`, on any mesh, and no hang."""

from __future__ import annotations

import json
import os
import random
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from megacpp.cli.generation import generation_memory
from megacpp.cli.main import main
from megacpp.cli.memory_generate import GenerationArgs
from megacpp.config.arguments import parse_run
from megacpp.config.presets import PRESETS
from megacpp.config.schema import Config, RunConfig
from megacpp.data.corpus import Corpus
from megacpp.memory import estimate as estimates
from megacpp.report.data import gather
from megacpp.report.page import page
from megacpp.run.tasks import Tasks
from megacpp.state.rng import rng_state
from tests.launch import Done, forked
from tests.model.small import small
from tests.run.test_sample import build as initialised
from tests.test_run import ADAMW, SMALL, records

pytest.importorskip("lm_eval")
STEPS = ["--run.steps", "4", "--run.sample-tokens", "0", "--checkpoint.every", "2"]
ROWS = [
    {"start": f"int value_{n} = {n};\nreturn value_{n % 3}", "ends": ["0;", " = ", "x(", "\n\n"]}
    for n in range(12)
]


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a choice among continuations, and with short answers."""
    folder = tmp_path_factory.mktemp("tasks")
    os.environ.update(HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1", HF_HOME=str(folder / "cache"))
    data = folder / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    kinds = {
        "choice": 'output_type: multiple_choice\ndoc_to_target: 1\ndoc_to_choice: "{{ends}}"\n'
        "metric_list: [{metric: acc}, {metric: acc_norm}]",
        "answer": 'output_type: generate_until\ndoc_to_target: "x"\n'
        'generation_kwargs: {until: [";"], max_gen_toks: 4}\nmetric_list: [{metric: exact_match}]',
        "cloze": 'output_type: loglikelihood\ndoc_to_target: "{{ends[0]}}"\n'
        "metric_list: [{metric: perplexity, higher_is_better: false}]",
    }
    for name, settings in kinds.items():
        (folder / f"{name}.yaml").write_text(
            f"task: {name}\ndataset_path: json\ndataset_kwargs: {{data_files: {{test: {data}}}}}\n"
            f'test_split: test\ndoc_to_text: "{{{{start}}}}"\ntarget_delimiter: ""\n{settings}\n'
            "metadata: {version: 1.0}\n"
        )
    return folder


def start(corpus: Path, run: Path, *flags: str, ranks: int = 1) -> Done:
    paths = ["--data.path", str(corpus), "--run.dir", str(run)]
    batch = ["--train.device-batch-size", str(4 // min(ranks, 4)), "--train.tokens-per-step", "384"]
    return forked("tiny", *SMALL, *ADAMW, *STEPS, *paths, *batch, *flags, ranks=ranks)


def asked(tasks: Path, every: int = 2) -> list[str]:
    return ["--run.tasks", str(tasks), "--run.tasks-every", str(every)]


@pytest.fixture(scope="module")
def plain(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("plain") / "run"
    assert start(corpus, run).returncode == 0
    return run


@pytest.fixture(scope="module")
def evaluated(corpus: Path, tasks: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("evaluated") / "run"
    done = start(corpus, run, *asked(tasks))
    assert done.returncode == 0, done.stderr
    assert "step 2: " in done.stdout and "choice acc " in " ".join(done.stdout.split())
    return run


def test_figures_are_those_of_megacpp_eval(
    evaluated: Path, tasks: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = records(evaluated)
    assert [row["step"] for row in rows if "tasks" in row] == [1, 3]
    assert main(["eval", str(evaluated), "--tasks", str(tasks), "--json"]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])["results"]
    flat = {f"{task} {metric}": value for task, of in found.items() for metric, value in of.items()}
    assert rows[3]["tasks"] == pytest.approx(flat, rel=1e-6)
    assert rows[1]["tasks"]["cloze perplexity"] != rows[3]["tasks"]["cloze perplexity"]
    assert {name.split()[0] for name in flat} == {"choice", "answer", "cloze"}


def test_the_run_is_the_one_without_tasks(evaluated: Path, plain: Path) -> None:
    for one, other in zip(records(evaluated), records(plain), strict=True):
        assert one["loss"] == other["loss"] and one["grad_norm"] == other["grad_norm"]
    ours, theirs = ((run / "final/model.safetensors").read_bytes() for run in (evaluated, plain))
    assert ours == theirs


def test_page_and_tensorboard_show_them(evaluated: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    assert "choice acc_norm" in page(gather(evaluated))
    events: Any = EventAccumulator(str(evaluated / "tensorboard"))
    events.Reload()
    assert [e.step for e in events.Scalars("tasks/choice/acc")] == [1, 3]


@pytest.mark.parametrize(
    ("ranks", "flags"),
    [
        (2, ["--mesh.cp", "2", "--mesh.dp-shard", "1"]),
        (2, ["--mesh.pp", "2", "--train.device-batch-size", "2", "--train.num-chunks", "2"]),
        (2, ["--mesh.tp", "2", "--model.attention.num-kv-heads", "2"]),
        (2, []),
    ],
)
def test_any_mesh_finds_the_same(
    corpus: Path, tasks: Path, evaluated: Path, tmp_path: Path, ranks: int, flags: list[str]
) -> None:
    alone = evaluated
    if "--mesh.tp" in flags:
        alone = tmp_path / "alone"
        assert start(corpus, alone, *asked(tasks), *flags[2:]).returncode == 0
    done = start(corpus, tmp_path / "run", *asked(tasks), *flags, ranks=ranks)
    assert done.returncode == 0, done.stderr
    for one, other in zip(records(alone), records(tmp_path / "run"), strict=True):
        figures = one.get("tasks", {}), other.get("tasks", {})
        assert figures[0] == pytest.approx(figures[1], rel=1e-5), one["step"]
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-12)


@pytest.mark.parametrize("ranks", [1, 2])
def test_tasks_may_take_longer_than_the_limit(
    corpus: Path, tasks: Path, tmp_path: Path, ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of 12 rows takes 1 s of a limit of 10 s."""
    from megacpp.run import likelihood

    quick = likelihood._scores

    def slow(*args: Any) -> Any:
        until = time.perf_counter() + 1.0
        while time.perf_counter() < until:  # works: ranks that only wait would end the test
            pass
        return quick(*args)

    monkeypatch.setattr(likelihood, "_scores", slow)
    monkeypatch.setattr("megacpp.run.tasks.ROW_TOKENS", 1)
    limit = "--run.timeout", "start=60,step=60,save=60,evaluation=10"
    only = ["--run.tasks", str(tasks / "cloze.yaml"), "--run.steps", "1"]
    began = time.perf_counter()
    done = start(corpus, tmp_path / "run", *only, *limit, ranks=ranks)
    assert done.returncode == 0, done.stderr
    assert (
        time.perf_counter() - began > 12
        and "cloze perplexity" in records(tmp_path / "run")[0]["tasks"]
    )


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--run.tasks", "gone.yaml"], "run.tasks=gone.yaml: no such file. Fix: "),
        (["--run.tasks-every", "2"], "run.tasks_every=2: there is no run.tasks to evaluate"),
    ],
)
def test_mistakes_are_found_before_the_first_step(
    corpus: Path, tmp_path: Path, flags: list[str], said: str
) -> None:
    done = start(corpus, tmp_path / "run", *flags)
    assert done.returncode == 2 and done.stderr.startswith(f"error: {said}")
    assert len(done.stderr.strip().splitlines()) == 1


def test_data_of_tasks_are_loaded_before_the_first_step(
    corpus: Path, tasks: Path, tmp_path: Path
) -> None:
    text = (tasks / "cloze.yaml").read_text()
    lost = tmp_path / "lost.yaml"
    lost.write_text(text.replace("rows.jsonl", "gone.jsonl"))
    done = start(corpus, tmp_path / "run", "--run.tasks", str(lost), ranks=2)
    assert done.returncode == 3 and "step 1/4" not in done.stdout
    line = done.stderr.strip().splitlines()[-1]
    assert line.startswith("error: run.tasks=cloze: the task can't be loaded (FileNotFoundError: ")
    assert not (tmp_path / "run/metrics.jsonl").exists()


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_task_that_fails_ends_no_run(
    corpus: Path,
    tasks: Path,
    plain: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    ranks: int,
) -> None:
    """Its line comes again at the next evaluation; a start that has one to make goes on as well."""

    def fails(*_: Any) -> dict[str, Any]:
        raise KeyError("answer")

    monkeypatch.setattr("megacpp.run.tasks.evaluated", fails)
    files = str(tasks / "cloze.yaml")
    flags = ["--run.tasks", files, "--run.tasks-every", "2"]
    run = tmp_path / "run"
    for resumed in (False, True):
        done = start(corpus, run, *flags, ranks=ranks)
        assert done.returncode == 0, done.stderr
        said = [line for line in done.stdout.splitlines() if "can't be evaluated" in line]
        assert len(said) == 2 and all(
            line.startswith(
                f"step {step}: warning: run.tasks={files}: can't be evaluated (KeyError"
            )
            and f"megacpp eval {run} --tasks {files}" in line
            for step, line in zip((2, 4), said, strict=True)
        )
        assert not any("tasks" in row for row in records(run))
        if not resumed:  # as if a stop had come before the evaluation of step 2
            (run / "checkpoints/latest").unlink()
            shutil.rmtree(run / "checkpoints/step-000004")
    if ranks == 1:
        ours, theirs = (folder / "final/model.safetensors" for folder in (run, plain))
        assert ours.read_bytes() == theirs.read_bytes()


def test_random_numbers_are_left_as_they_were(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def found(*_: Any) -> dict[str, Any]:
        torch.manual_seed(int(time.time()))
        random.random()
        return {"results": {"choice": {"acc,none": 0.5, "acc_stderr,none": 0.1}}}

    config = Config(model=small("AF"), run=RunConfig(dir=str(tmp_path), tasks="choice"))
    model = initialised(config.model, seed=0)
    monkeypatch.setattr("megacpp.run.tasks.evaluated", found)
    before, signs = rng_state(), list[int]()
    of_run = Corpus(corpus, seq_len=32)
    tasks = Tasks(model, of_run, config, True, lambda x: x, lambda: signs.append(1))
    assert tasks.evaluate() == {"choice": {"acc": 0.5}} and rng_state() == before


@pytest.mark.parametrize("preset", ["tiny", "dense_110m", "moe_small"])
def test_the_estimate_counts_the_copy(preset: str) -> None:
    flags = [preset, "--train.device-batch-size", "1", "--data.seq-len", "64"]
    config = parse_run(flags, 1).config
    asked = parse_run([*flags, "--run.tasks", "arc_easy"], 1).config
    without, found = (estimates.estimate(one, 1) for one in (config, asked))
    args = GenerationArgs(prompts=1, prompt_tokens=4096, new_tokens=0)
    traced = generation_memory(PRESETS[preset]().model, args, gpu=False)
    need = without.resting + traced.weights + traced.working
    assert found.point >= need and sum(found.components.values()) == found.point
    assert found.moment == estimates.TASKS
    copy = found.components["parameters"] - without.components["parameters"]
    assert copy == pytest.approx(traced.weights, rel=0.02)  # which has buffers as well
    assert found.upper >= found.point and found.moment in found.moments
