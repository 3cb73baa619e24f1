"""Command `megacpp eval`: tasks of lm-eval, and of held-out code, on the weights of a run."""

from __future__ import annotations

import json
import logging
import os
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from megacpp.cli.weights import find_tokenizer, held_out_documents, load_model, run_folder
from megacpp.config.environment import ranks_started
from megacpp.config.settings import setting
from megacpp.errors import config_error
from megacpp.state.files import PENDING, write_out
from megacpp.terminal.progress import counted
from megacpp.terminal.screen import table
from megacpp.urls import is_url

if TYPE_CHECKING:
    from megacpp.run.harness import Subject


@dataclass(frozen=True)
class EvalArgs:
    """Run, and tasks to evaluate."""

    run: str = setting(words="Folder or URL of the run.", positional=True)
    tasks: str = setting(
        "", "Tasks by commas: fim, compiles, names of lm-eval, YAML files or folders of them."
    )
    limit: int = setting(0, "Documents of each task (0: all).", "documents", at_least=0)
    fewshot: int = setting(
        -1, "Examples in front of each question (-1: as the task says).", at_least=-1
    )
    batch: int = setting(16, "Most prompts that go on together.", "prompts", at_least=1)
    row_tokens: int = setting(4096, "Tokens of a row that requests share.", "tokens", at_least=1)
    checkpoint: str = setting("final", "Weights: final, latest or the step of a checkpoint.")
    device: Literal["auto", "cpu", "cuda"] = setting(
        "auto", "Device of the model (auto: a GPU if there is one)."
    )
    out: str = setting(
        "",
        "File for figures and samples (empty: RUN/eval/WEIGHTS.json; of a URL: eval/WEIGHTS.json).",
    )
    json: bool = setting(False, "Print one JSON object instead of a table.")

    @cached_property
    def folder(self) -> Path:
        """Folder of the run, or its copy."""
        return run_folder(self.run, self.checkpoint)


def evaluate(args: EvalArgs) -> int:
    """Evaluate tasks of lm-eval (pip install 'megacpp[eval]') on the weights of a run.

    `fim` and `compiles` need no lm-eval and take held-out documents of the run's corpus: whether a
    missing line is filled in exactly, and whether a C++ compiler accepts continued files.
    Likelihoods are computed for packed rows, answers are generated several at a time. A text starts
    with the begin-of-document id, as in training. Figures and all samples are written to a file.
    Several processes share the requests: torchrun --nproc-per-node=2 -m megacpp eval ...
    """
    tasks = [task.strip() for task in args.tasks.split(",") if task.strip()]
    if not tasks:
        raise config_error("tasks", "", "is needed", "write --tasks NAME or a task's YAML file")
    out = prepared_file(args)
    # Before lm-eval's libraries are imported: local files need no network.
    os.environ.setdefault("HF_DATASETS_CACHE", str(out.parent.absolute() / "datasets"))
    from megacpp.run.harness import evaluated, figures_of

    subject = subject_of(args)
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    fewshot = None if args.fewshot < 0 else args.fewshot
    texts = partial(held_out_documents, args.folder)
    found = evaluated(subject, tasks, texts, args.limit or None, fewshot)
    if subject.rank:
        return 0
    figures = figures_of(found["results"])
    report = {
        "weights": args.checkpoint,
        "run": args.run,
        "results": figures,
        "documents": {name: n["effective"] for name, n in found["n-samples"].items()},
        "versions": found["versions"],
    }
    content = json.dumps({**report, "samples": found["samples"]}, default=str, indent=1)
    if args.json:
        print(json.dumps(report))
        write_out(out, content, "; the figures above are whole")
        return 0
    rows = [["task", "documents", "metric", "value"]]
    for name, metrics in figures.items():
        for metric, value in metrics.items():
            rows.append([name, str(report["documents"].get(name, "")), metric, f"{value:.6g}"])
    print("\n".join(table(rows, 4)))
    write_out(out, content, "; the figures above are whole")
    print(f"figures and samples: {out}")
    return 0


def prepared_file(args: EvalArgs) -> Path:
    """Return the file for the figures, whose folder exists.

    Raises:
        ConfigError: it can't be written.
    """
    near = Path() if is_url(args.run) else args.folder
    out = Path(args.out) if args.out else near / "eval" / f"{args.checkpoint}.json"
    if not args.folder.is_dir():
        raise config_error("run", args.run, "no such run folder", "give the folder of a run")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        probe = out.with_name(out.name + PENDING)
        probe.touch()
        probe.unlink(missing_ok=True)  # every process tries
    except OSError as error:
        why = error.strerror or type(error).__name__
        raise config_error("out", out, f"can't be written ({why})", "give another file") from None
    return out


def subject_of(args: EvalArgs) -> Subject:
    """Return the model of a run, its tokenizer, and how requests are batched."""
    import torch
    import torch.distributed as dist

    from megacpp.run.harness import Subject, dropless

    model, rank = dropless(load_model(args.folder, args.checkpoint, args.device)), 0
    size = ranks_started(os.environ)
    if size > 1:
        dist.init_process_group("gloo")
        rank = dist.get_rank()
        if args.device != "cpu" and torch.cuda.is_available():
            model.to(f"cuda:{os.environ['LOCAL_RANK']}")

    def gather(own: dict[int, Any]) -> list[dict[int, Any]]:
        found: list[Any] = [None] * size
        dist.all_gather_object(found, own)
        return found

    return Subject(
        model,
        find_tokenizer(args.folder),
        model.config.attention.max_seq_len,
        args.row_tokens,
        args.batch,
        counted if rank == 0 else lambda items, name, total: items,
        rank,
        size,
        gather if size > 1 else lambda own: [own],
    )
