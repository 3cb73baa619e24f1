"""Reference pages of settings, commands and files of a run, made from the program itself.

    python -m bench.reference [--write]

Prints docs/reference/*.md, or writes them. Settings come from the fields of the configuration,
commands from the table of `megacpp` and its functions' docstrings. Functions are those that the
chapters import, with their docstrings' first lines. Files of a run folder are listed in FILES; a
test compares the list with a run.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from bench import asked
from megacpp.cli.main import COMMANDS
from megacpp.config.presets import preset
from megacpp.config.schema import Config
from megacpp.config.settings import Setting, flatten, sections_of, settings_of
from megacpp.errors import EXIT_CODES
from megacpp.report.files import EVALUATION, STEP

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "docs/reference"
PUBLIC = ("megacpp", "parallel", "optim", "checkpointing")
MADE = "<!-- made by python -m bench.reference -->"
FROM_0 = "`step` counts from 0: step 8 on the screen and of a checkpoint has `7` here."
KINDS = {int: "whole number", float: "number", bool: "true or false", dict: "object", str: "text"}
# File of a run folder (N: a number) -> module that writes it, its content.
FILES = {
    "config.json": ("megacpp/launch/record.py", "every setting, and who gave it"),
    "launch.json": (
        "megacpp/launch/record.py",
        "commit, versions, mesh, policy, estimate of memory and time, verdict of the gate",
    ),
    "launch-N.json": ("megacpp/launch/record.py", "the same, of a start that resumed at step N"),
    "status.json": ("megacpp/outcome.py", "running or ended, exit code, last message, host"),
    "run.lock": ("megacpp/run/lock.py", "held while a start uses the folder"),
    "metrics.jsonl": ("megacpp/run/metrics.py", "one object per step, in full precision"),
    "metrics-before-N.jsonl": (
        "megacpp/run/metrics.py",
        "lines of steps from N on that `checkpoint.resume` with a folder made again",
    ),
    "evaluations.jsonl": ("megacpp/run/metrics.py", "held-out loss of each evaluation"),
    "evaluations-before-N.jsonl": ("megacpp/run/metrics.py", "likewise, evaluations of such steps"),
    "goodput.jsonl": ("megacpp/run/goodput.py", "seconds by class: steps, data, saves, waits"),
    "digests.jsonl": ("megacpp/state/digests.py", "bits of tensors that several ranks hold"),
    "rewinds.jsonl": ("megacpp/run/rewind.py", "returns to an earlier checkpoint, with reasons"),
    "stragglers.jsonl": ("megacpp/run/straggler.py", "ranks that were slower than the others"),
    "monitor.token": ("megacpp/run/monitor.py", "token of the HTTP monitor"),
    "tensorboard/*": ("megacpp/run/sinks.py", "events for TensorBoard"),
    "wandb/*": ("megacpp/run/sinks.py", "records of Weights & Biases"),
    "uploaded.json": ("megacpp/state/remote.py", "the newest checkpoint at `checkpoint.remote`"),
    "mirror.key": ("megacpp/state/mirror.py", "names the run's copies in the nodes' memory"),
    "checkpoints/latest": (
        "megacpp/state/published.py",
        "name and digest of the newest checkpoint",
    ),
    "checkpoints/step-N/manifest.json": ("megacpp/state/manifest.py", "SHA-256 of each file"),
    "checkpoints/step-N/extra.json": (
        "megacpp/state/published.py",
        "position in the data, counters, random generators",
    ),
    "checkpoints/step-N/*.safetensors": (
        "megacpp/state/training.py",
        "weights and optimizer state, in pieces of each rank",
    ),
    "final/*": ("megacpp/state/export.py", "weights of the last step, tokenizer, configuration"),
    "samples/step-N.txt": ("megacpp/run/final.py", "text that the model continued"),
    "memory/measured.json": (
        "megacpp/run/measured.py",
        "peak of the first step beside the estimate",
    ),
    "memory/step-N.json": ("megacpp/run/forensics.py", "bytes by component of a recorded step"),
    "memory/summary.json": ("megacpp/run/forensics.py", "largest values of all recorded steps"),
    "memory/summary-rank-N.json": ("megacpp/run/forensics.py", "the same of a rank that failed"),
    "memory/error-step-N*": ("megacpp/run/forensics.py", "bytes at the moment of an error"),
    "profile/*": ("megacpp/run/profiling.py", "traces of `run.profile`, for Perfetto"),
    "failures/rank-N.txt": ("megacpp/run/failure.py", "traceback of a rank that failed"),
    "failures/hang-rank-N.txt": ("megacpp/run/hang.py", "what a rank waited for, and its stack"),
    "failures/oom-rank-N.txt": ("megacpp/run/oom.py", "what took the memory, and fixes"),
    "report.html": ("megacpp/cli/report.py", "page about the run, from `megacpp report`"),
}


def cell(text: object) -> str:
    """Return a table cell: one line, without bars that would end it."""
    return re.sub(r"\s+", " ", str(text)).replace("|", "\\|").strip()


def table(heads: Iterable[str], rows: Iterable[Iterable[object]]) -> list[str]:
    """Return the lines of a Markdown table."""
    heads = list(heads)
    lines = [heads, ["---"] * len(heads), *([cell(c) for c in row] for row in rows)]
    return [f"| {' | '.join(line)} |" for line in lines]


def shown(value: Any) -> str:
    """Return a default as it is typed."""
    if value is None:
        return "`none`"
    if isinstance(value, bool):
        return "`true`" if value else "`false`"
    return f"`{value}`" if value not in ("", ()) else ""


def setting_rows(settings: Iterable[Setting], defaults: dict[str, Any]) -> list[str]:
    """Return a table of settings with legal values, defaults and sentences."""
    rows = []
    for one in settings:
        legal = [f"`{word}`" for word in one.choices] or [one.takes.lower() or "switch"]
        legal += [str(part) for part in (one.unit, one.range) if part]
        default = "needed" if one.required else shown(defaults.get(one.key, one.default))
        name = one.key.upper() if one.positional else one.flag
        rows.append((f"`{name}`", ", ".join(legal), default, one.words))
    return table(("setting", "values", "default", "meaning"), rows)


def settings_page() -> str:
    """Return the page of all settings of a run, by section."""
    settings, defaults = settings_of(Config), flatten(preset("tiny"))
    lines = [
        "# Every setting",
        "",
        MADE,
        "",
        f"The {len(settings)} settings of a run, as flags of `train.py` and `megacpp train`.",
        "Defaults are those of the preset `tiny`; `megacpp show PRESET` prints those of another.",
        "A dotted name (`optim.lr`) is the key in a `--config` file.",
    ]
    for section, words in sections_of(Config):
        here = [one for one in settings.values() if one.key.rpartition(".")[0] == section]
        if here:
            lines += ["", f"## {section}", "", " ".join(words.split()), ""]
            lines += setting_rows(here, defaults)
    return "\n".join(lines) + "\n"


def commands_page() -> str:
    """Return the page of all commands, with their flags and exit codes."""
    lines = [
        "# Every command",
        "",
        MADE,
        "",
        *table(
            ("command", "what it does"), ((f"`megacpp {n}`", c.help) for n, c in COMMANDS.items())
        ),
        "",
        "A command that takes PRESET also takes every [setting](settings.md) of a run.",
        "",
        "## Exit codes",
        "",
        "What each one asks of you: [When it stops](../when-it-stops.md).",
        "",
        *table(("code", "meaning"), EXIT_CODES.items()),
    ]
    for name, command in COMMANDS.items():
        words = inspect.cleandoc(command.function.__doc__ or "")
        lines += ["", f"## megacpp {name}", "", words]
        if command.runs:
            of = "RUN" if "run" in command.settings() else "PRESET"
            lines += ["", f"`megacpp {name} {of} [settings of a run] [flags]`"]
        if own := command.settings():
            lines += ["", *setting_rows(own.values(), {})]
    return "\n".join(lines) + "\n"


def fields(types: dict[str, tuple[type, ...]]) -> list[str]:
    """Return a table of the values of a line of a record."""
    rows = [(f"`{name}`", KINDS[kinds[-1]]) for name, kinds in types.items()]
    return table(("value", "type"), rows)


def files_page() -> str:
    """Return the page of all files of a run folder."""
    rows = [(f"`{name}`", words, f"[code](../../{file})") for name, (file, words) in FILES.items()]
    lines = [
        "# Every file of a run folder",
        "",
        MADE,
        "",
        "`--run.dir` names the folder, by default `runs/PRESET`. N is a number. Files are written",
        "when they are needed: `failures/` exists only after a failure.",
        "",
        *table(("file", "content", "written by"), rows),
        "",
        "## metrics.jsonl",
        "",
        "Values that a step's line may have. `null` is a number that isn't finite.",
        FROM_0,
        "",
        *fields(STEP),
        "",
        "## evaluations.jsonl",
        "",
        FROM_0,
        "",
        *fields(EVALUATION),
    ]
    return "\n".join(lines) + "\n"


def imported_by_chapters() -> dict[str, dict[str, list[Path]]]:
    """Return the names that chapters import: module -> name -> chapters that do."""
    found: dict[str, dict[str, list[Path]]] = {}
    for chapter in sorted(FOLDER.parent.glob("[0-9]*.md")):
        blocks = re.findall(r"^```python\n(.*?)^```$", chapter.read_text(), re.M | re.S)
        for node in ast.walk(ast.parse("".join(blocks))):
            module = node.module or "" if isinstance(node, ast.ImportFrom) else ""
            if module.split(".")[0] in PUBLIC and not module.startswith("megacpp.lessons"):
                for alias in node.names:  # type: ignore[attr-defined]
                    chapters = found.setdefault(module, {}).setdefault(alias.name, [])
                    chapters += [chapter] if chapter not in chapters else []
    return dict(sorted(found.items()))


def functions_page() -> str:
    """Return the page of the functions and classes that chapters import, by module."""
    lines = [
        "# Every function of the book",
        "",
        MADE,
        "",
        "Functions and classes that the chapters import, with the first lines of their docstrings.",
        "`help(NAME)` has the rest: shapes, units, errors. Configurations are in",
        "[Every setting](settings.md), helpers of the chapters in `megacpp.lessons`.",
    ]
    packages: dict[str, list[tuple[str, str, str]]] = {}
    for module, names in imported_by_chapters().items():
        file = module.replace(".", "/")
        file += "/__init__.py" if (ROOT / file).is_dir() else ".py"
        for name, chapters in sorted(names.items()):
            one = getattr(importlib.import_module(module), name, None)
            if inspect.isfunction(one) or (inspect.isclass(one) and not name.endswith("Config")):
                given = ", ".join(inspect.signature(one).parameters)
                words = inspect.cleandoc(one.__doc__ or "").partition("\n\n")[0]
                links = ", ".join(f"[{int(c.name[:2])}](../{c.name})" for c in chapters)
                package = ".".join(module.split(".")[: 1 + (module.split(".")[0] == "megacpp")])
                row = f"[`{name}`](../../{file})`({given})`", words, links
                packages.setdefault(package, []).append(row)
    for package, rows in packages.items():
        lines += ["", f"## {package}", "", *table(("name", "what it does or is", "chapters"), rows)]
    return "\n".join(lines) + "\n"


PAGES = {
    "settings.md": settings_page,
    "commands.md": commands_page,
    "run-folder.md": files_page,
    "functions.md": functions_page,
}


if __name__ == "__main__":
    names, write = asked(__doc__, list(PAGES))
    for name in names:
        if write:
            FOLDER.mkdir(exist_ok=True)
            (FOLDER / name).write_text(PAGES[name]())
        else:
            print(PAGES[name]())
