"""HTML page about several runs: their curves together, and settings that differ."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from megacpp.memory.budget import words
from megacpp.model.count import short
from megacpp.report.charts import ChartLine, lines
from megacpp.report.html import columns, document, figures, plain, power
from megacpp.report.style import SLIDER

ASIDE = ("run.dir",)  # settings that don't describe a run


def differences(runs: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Return settings that differ between runs, a value for each run; None if a run lacks it."""
    names = dict.fromkeys(name for run in runs for name in run["settings"] if name not in ASIDE)
    found = {name: [run["settings"].get(name) for run in runs] for name in names}
    return {name: values for name, values in found.items() if any(v != values[0] for v in values)}


def comparison(runs: Sequence[Mapping[str, Any]]) -> str:
    """Return the whole page about runs that `data.gather` has read."""
    names = run_names(runs)
    return document(
        f"{len(runs)} runs: {', '.join(names)}",
        [
            f"<h1>{len(runs)} runs side by side</h1>",
            *_totals(runs, names),
            "<h2>Curves, by step</h2>",
            SLIDER,
            figures(_curves(runs, names)),
            *_settings(runs, names),
        ],
    )


def run_names(runs: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the shortest last parts of the folders' names that are unique."""
    folders = [run["folder"].rstrip("/").split("/") for run in runs]
    for size in range(1, max(map(len, folders)) + 1):
        names = ["/".join(parts[-size:]) for parts in folders]
        if len(set(names)) == len(names):
            return names
    return [f"{number}: {run['folder']}" for number, run in enumerate(runs, start=1)]


def _totals(runs: Sequence[Mapping[str, Any]], names: Sequence[str]) -> list[str]:
    cells = []
    for name, run in zip(names, runs, strict=True):
        totals, header = run["totals"], run["header"]
        held = [row.get("bits_per_byte") for row in run["evaluations"]]
        ranks = f"{header['world_size']} x {header['device']}" if header["device"] else ""
        cells.append(
            [
                name,
                header["preset"] or "",
                ranks,
                totals.get("steps", ""),
                _as(short, totals.get("tokens")),
                _as(lambda x: f"{x:.4f}", totals.get("last_loss")),
                _as(lambda x: f"{x:.4f}", held[-1] if held else None),
                _as(short, totals.get("median_tokens_per_s")),
                _as(words, totals.get("peak_bytes")),
                (header["git_commit"] or "")[:10],
            ]
        )
    head = ["run", "preset", "ranks", "steps", "tokens", "loss", "bits a byte, held out"]
    return [columns([*head, "tokens/s", "peak memory", "commit"], cells)]


def _curves(runs: Sequence[Mapping[str, Any]], names: Sequence[str]) -> list[tuple[str, str]]:
    def series(name: str, noisy: bool = True) -> list[ChartLine]:
        found = []
        for label, run in zip(names, runs, strict=True):
            steps = run["steps"]
            both = zip(steps.get("step", []), steps.get(name, []), strict=False)
            points = [(step + 1, y) for step, y in both if y is not None]
            found.append(ChartLine(label, points, noisy=noisy))
        return found

    held_out = [
        ChartLine(
            label, [(row["step"] + 1, row["bits_per_byte"]) for row in _held_out(run)], marks=True
        )
        for label, run in zip(names, runs, strict=True)
    ]
    return [
        ("loss, nats a token", lines(series("loss"), plain)),
        ("bits per byte, held out", lines(held_out, plain)),
        ("bits per byte", lines(series("bits_per_byte"), plain)),
        ("gradient norm", lines(series("grad_norm"), plain)),
        ("learning rate", lines(series("lr", noisy=False), power)),
        ("tokens read", lines(series("tokens_read", noisy=False), short, from_zero=True)),
        ("tokens a second", lines(series("tokens_per_s"), short, from_zero=True)),
        ("seconds a step", lines(series("step_s"), plain, from_zero=True)),
    ]


def _held_out(run: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [row for row in run["evaluations"] if row.get("bits_per_byte") is not None]


def _settings(runs: Sequence[Mapping[str, Any]], names: Sequence[str]) -> list[str]:
    title = "<h2>Settings that differ</h2>"
    found = differences(runs)
    if not found:
        return [title, '<p class="dim">None: the runs were asked for the same.</p>']
    cells = [[name, *("" if v is None else v for v in values)] for name, values in found.items()]
    return [title, columns(["setting", *names], cells)]


def _as(said: Callable[[Any], str], value: object) -> str:
    return "" if value is None else said(value)
