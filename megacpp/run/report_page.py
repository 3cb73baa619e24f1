"""A run as one page of HTML: no script, nothing from elsewhere, readable by day and by night."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from html import escape
from typing import Any

from megacpp.config import CheckpointingPolicy
from megacpp.memory.budget import words
from megacpp.memory.components import COMPONENTS
from megacpp.memory.snapshot import QUIET
from megacpp.run.goodput import CLASSES
from megacpp.run.svg import Bar, Line, bars, lines, stacked

ABOUT = {
    "step": "training",
    "compile": "first step of compiled blocks",
    "data": "waiting for batches",
    "checkpoint": "saving and resuming",
    "evaluation": "held-out loss",
    "oom_retry": "attempts out of memory",
    "restart_lost": "lost by restarts",
    "idle": "all the rest",
}
CSS = """
:root { color-scheme: light dark; --ink: #1c2024; --dim: #687076; --paper: #fff; --rule: #e3e6e8;
  --c0: #2f6fde; --c1: #e0762b; --c2: #2a9d6a; --c3: #9b59c4; --c4: #d14a5c; --c5: #0f98a8;
  --c6: #a8821a; --c7: #7b8794; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e8ea; --dim: #9aa4ac; --paper: #14171a;
  --rule: #2c3238; --c0: #6ea3ff; --c1: #f59a57; --c2: #53c491; --c3: #c08be6; --c4: #f07b8a;
  --c5: #46c4d2; --c6: #d6b450; --c7: #98a4b0; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper);
  max-width: 1080px; margin: 2rem auto; padding: 0 1.2rem; }
h1 { font-size: 1.5rem; margin: 0 0 .3rem; } h2 { font-size: 1.05rem; margin: 2.2rem 0 .6rem; }
p, li { margin: .3rem 0; } .dim { color: var(--dim); } code { font-size: .87em; }
.two { display: grid; grid-template-columns: repeat(auto-fit, minmax(430px, 1fr)); gap: 1.6rem; }
figure { margin: 0; } figcaption { font-weight: 600; font-size: .9rem; margin-bottom: .3rem; }
svg { width: 100%; height: auto; display: block; } svg text { font: 11px system-ui, sans-serif; }
.axis { fill: var(--dim); } .note { fill: var(--ink); } .end { text-anchor: end; }
.middle { text-anchor: middle; } .grid { stroke: var(--rule); }
.level { stroke: var(--ink); stroke-dasharray: 4 3; } .line { fill: none; stroke-width: 1.6; }
table { border-collapse: collapse; font-size: .88rem; width: 100%; }
td, th { text-align: left; padding: .2rem .8rem .2rem 0; border-bottom: 1px solid var(--rule);
  vertical-align: top; } .n { text-align: right; font-variant-numeric: tabular-nums; }
.tiles { display: flex; flex-wrap: wrap; gap: .6rem 2.2rem; margin: 1rem 0; }
.tiles div b { display: block; font-size: 1.25rem; font-weight: 600; }
.legend { list-style: none; display: flex; flex-wrap: wrap; gap: .2rem 1.1rem; padding: 0;
  margin: .3rem 0 0; font-size: .82rem; color: var(--dim); }
.legend i { display: inline-block; width: .7rem; height: .7rem; margin-right: .35rem; }
""" + "".join(
    f".s{n} {{ fill: var(--c{n}); background: var(--c{n}); }} "
    f".line.s{n} {{ fill: none; stroke: var(--c{n}); }}\n"
    for n in range(8)
)


def page(data: Mapping[str, Any]) -> str:
    """The whole page of what `report_data.gather` found."""
    name = data["header"].get("preset") or "run"
    parts = [
        f"<h1>{escape(str(name))}</h1>",
        *_header(data),
        *_curves(data),
        *_memory(data["memory"]),
        *_growth(data["growth"]),
        *_traffic(data["traffic"]),
        *_goodput(data["goodput"]),
        *_attempts(data["attempts"]),
        *_events(data["events"]),
        *_missing(data["missing"]),
    ]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(str(name))}: {escape(data['folder'])}</title>"
        f"<style>{CSS}</style></head>\n<body>\n" + "\n".join(parts) + "\n</body></html>\n"
    )


def _header(data: Mapping[str, Any]) -> list[str]:
    h, totals = data["header"], data["totals"]
    count = h["parameters"]
    tiles = []
    if totals:
        of = f" of {totals['of']}" if totals.get("of") else ""
        tiles += [("steps", f"{totals['steps']}{of}"), ("tokens", _short(totals["tokens"]))]
        if totals.get("last_loss") is not None:
            tiles.append(("loss", f"{totals['last_loss']:.4f}"))
        tiles.append(("tokens/s, median", _short(totals["median_tokens_per_s"])))
    if data["evaluations"]:
        tiles.append(("bits per byte, held out", f"{data['evaluations'][-1]['bits_per_byte']:.4f}"))
    if count:
        tiles.append(("parameters, active", " / ".join(_short(n) for n in count.values())))
    if data["goodput"]:
        tiles.append(("goodput", f"{data['goodput']['goodput']:.1%}"))
    mesh = " x ".join(f"{axis} {n}" for axis, n in h["mesh"].items() if n > 1) or "one rank"
    plain = asdict(CheckpointingPolicy())
    policy = {k: v for k, v in h["policy"].items() if v != plain.get(k)}
    rows = {
        "folder": data["folder"],
        "started": h["started"],
        "commit": h["git_commit"],
        "config hash": h["config_hash"],
        "device": f"{h['world_size']} x {h['device']}" if h["device"] else None,
        "mesh": mesh if h["device"] else None,
        "model": f"{h['pattern']} x {h['depth']}" if h["pattern"] else None,
        "precision, optimizer": f"{h['precision']}, {h['optimizer']}" if h["optimizer"] else None,
        "batch": _pairs(h["batch"]),
        "recompute": _pairs(policy) or ("as by default" if h["policy"] else None),
        "versions": _pairs({k: v for k, v in h["versions"].items() if v}),
        "command": " ".join(h["command"]) if h["command"] else None,
    }
    said = [(name, escape(str(value))) for name, value in rows.items() if value]
    shown = "".join(f"<div><b>{escape(b)}</b>{escape(a)}</div>" for a, b in tiles)
    return [f'<div class="tiles">{shown}</div>', _table(said)]


def _curves(data: Mapping[str, Any]) -> list[str]:
    """Loss, bits per byte, throughput, gradient norm."""
    steps, evaluations = data["steps"], data["evaluations"]
    if not steps:
        return []
    at = [step + 1 for step in steps["step"]]

    def points(name: str) -> list[tuple[float, float]]:
        return [(x, y) for x, y in zip(at, steps.get(name, []), strict=False) if y is not None]

    def held_out(name: str) -> list[tuple[float, float]]:
        return [(row["step"] + 1, row[name]) for row in evaluations if name in row]

    gzip = [row.get("gzip_bits_per_byte") for row in evaluations]
    level = (gzip[-1], "gzip -9") if gzip and gzip[-1] else None
    two = [Line("training", points("loss")), Line("held out", held_out("loss"), dots=True)]
    bits = [
        Line("training", points("bits_per_byte")),
        Line("held out", held_out("bits_per_byte"), dots=True),
    ]
    speed = [Line("", points("tokens_per_s"))]
    drawn = [
        ("loss, nats a token", lines(two if evaluations else two[:1], _plain)),
        ("bits per byte", lines(bits if evaluations else bits[:1], _plain, level)),
        ("tokens a second", lines(speed, _short, from_zero=True)),
        ("gradient norm", lines([Line("", points("grad_norm"))], _plain)),
    ]
    return ["<h2>Curves, by step</h2>", _figures(drawn)]


def _memory(memory: Mapping[str, Any]) -> list[str]:
    """The waterfall: each component begins where the one above it ended."""
    predicted, measured = memory["predicted"], memory["measured"]
    if not predicted and not measured:
        return []
    rows, was, now = [], 0.0, 0.0
    for name in COMPONENTS:
        a, b = predicted.get(name, 0), measured.get(name, 0)
        if not a and not b:
            continue
        pieces = [(was, a, "s0")] if predicted else []
        pieces += [(now, b, "s1")] if measured else []
        said = " / ".join(words(n) for n, there in ((a, predicted), (b, measured)) if there)
        rows.append(Bar(name, pieces, said))
        was, now = was + a, now + b
    pieces = [(0.0, was, "s0")] if predicted else []
    pieces += [(0.0, now, "s1")] if measured else []
    both = " / ".join(words(n) for n in (was, now) if n)
    rows.append(Bar("all", pieces, both))
    budget = memory["budget_bytes"]
    near = budget if budget and budget < 4 * max(was, now) else None
    drawn = bars(rows, words, (near, "may be used") if near else None, ["predicted", "measured"])
    facts = {
        "predicted": f"{words(memory['predicted_bytes'])}, at most {words(memory['upper_bytes'])}"
        + (f", in {memory['moment']}" if memory["moment"] else "")
        + f", rank {memory['rank']}"
        if memory["predicted_bytes"] is not None
        else None,
        "may be used": words(budget) if budget else None,
        "gate": f"{memory['gate']}: {memory['verdict']}" if memory["gate"] else None,
        "measured": f"{words(memory['measured_bytes'])}: {memory['measured_from']}"
        if measured
        else None,
        "off by": _off(memory),
    }
    peaks = memory["peaks"]
    for name in ("peak_reserved_bytes", "peak_resident_bytes"):
        if peaks.get(name) and max(peaks[name]):
            facts[name.replace("_bytes", "").replace("_", " ")] = _of_ranks(peaks[name])
    said = [(name, escape(str(value))) for name, value in facts.items() if value]
    figure = _figures([("bytes of a rank at the fullest moment of a step", drawn)])
    return ["<h2>Memory, predicted against measured</h2>", figure, _table(said)]


def _off(memory: Mapping[str, Any]) -> str | None:
    """What the estimate was off by, by the calibration or by a snapshot."""
    record = memory["calibration"]
    if record:
        measured, predicted = record["measured_bytes"], record["predicted_bytes"]
        return (
            f"{record['residual']:+.1%} after the first step ({words(measured)} measured for "
            f"{words(predicted)}, with all that is not tensors)"
        )
    if memory["predicted_bytes"] and memory["measured_bytes"]:
        return f"{memory['measured_bytes'] / memory['predicted_bytes'] - 1:+.1%}"
    return None


def _growth(growth: Mapping[str, Any]) -> list[str]:
    """From the first to the last followed step."""
    found, record = growth.get("difference"), growth.get("record")
    if not found and not record:
        return []
    parts = ["<h2>Memory over the run</h2>"]
    if len(growth["peaks"]) > 2:
        most = max(peak for _, peak in growth["peaks"])
        unit = 2.0**30 if most >= 2**30 else 2.0**20
        peaks = lines([Line("", growth["peaks"])], words, height=150, unit=unit, from_zero=True)
        parts.append(_figures([("peak of a step, rank 0", peaks)]))
    if record:
        a, b = record["steps"]
        parts.append(
            f"<p>Largest growth over all ranks, from step {a} to {b}: "
            f"<b>{escape(record['bucket'])}</b> by {words(record['grown_bytes'])} on rank "
            f"{record['rank']} ({escape(record['cause'])}).</p>"
        )
    if found:
        steps = found["steps"]
        parts.append(
            f"<p>Rank {found['rank']}, from step {steps[0]} to {steps[1]}: "
            f"{escape(found['diagnosis'])}. {escape(_fix(found))}</p>"
        )
        seen = QUIET * max(found["peak_bytes"])
        top = [row for row in found["buckets"] if abs(row["grown"]) > seen][:8]
        cells = [
            [row["bucket"], words(row["before"]), words(row["after"]), _signed(row["grown"])]
            for row in top
        ]
        if cells:
            parts.append(_rows(["component", "before", "after", "grown"], cells))
    return parts


def _fix(found: Mapping[str, Any]) -> str:
    return "" if found["cause"] == "steady" else f"Fix: {found['fix']}."


def _traffic(found: Mapping[str, Mapping[str, int]]) -> list[str]:
    """Bytes of a step by axis; pieces of a bar are what travels."""
    if not found:
        return []
    kinds = sorted({what for parts in found.values() for what in parts})
    rows = []
    for axis, parts in found.items():
        start, pieces = 0.0, []
        for what, sent in parts.items():
            pieces.append((start, float(sent), f"s{kinds.index(what) % 8}"))
            start += sent
        rows.append(Bar(axis, pieces, words(start), joined=True))
    drawn = bars(rows, words, legend=kinds)
    caption = "larger side of each collective, rank 0, one optimizer step, in closed form"
    return ["<h2>Communication by axis</h2>", _figures([(caption, drawn)])]


def _goodput(found: Mapping[str, Any] | None) -> list[str]:
    if not found:
        return []
    wall = found["wall_s"] or 1.0
    parts = [
        (name, found["seconds"][name], f"{found['seconds'][name] / wall:.1%}")
        for name in CLASSES
        if found["seconds"][name]
    ]
    cells = [[name, ABOUT[name], f"{spent:,.1f}", said] for name, spent, said in parts]
    cells.append(["all", f"{found['starts']} starts", f"{found['wall_s']:,.1f}", "100.0%"])
    notes = [f"{found['startup_s']:,.1f} s of idle were before first steps"]
    if found["redone_s"]:
        notes.append(f"{found['redone_s']:,.1f} s of what restarts lost were steps done again")
    return [
        "<h2>Where the seconds went</h2>",
        _figures([("", stacked(parts))]),
        _rows(["", "", "seconds", "of the wall"], cells),
        f'<p class="dim">{"; ".join(notes)}.</p>',
    ]


def _attempts(found: Sequence[Mapping[str, Any]]) -> list[str]:
    if not found:
        return []
    cells = [
        [
            a.get("attempt"),
            _pairs(a.get("changed") or {}) or "as asked",
            a.get("outcome"),
            words(a["predicted_bytes"]) if a.get("predicted_bytes") is not None else "",
            words(a["peak_bytes"]) if a.get("peak_bytes") is not None else "",
            f"{a['median_step_s']:.3f} s" if a.get("median_step_s") else a.get("detail") or "",
        ]
        for a in found
    ]
    names = ["attempt", "changed", "outcome", "predicted", "peak", "median step"]
    return ["<h2>Attempts of memory.fit=auto</h2>", _rows(names, cells)]


def _events(found: Sequence[Mapping[str, Any]]) -> list[str]:
    cells = [["" if e["step"] is None else e["step"], e["kind"], e["words"]] for e in found]
    return ["<h2>Events</h2>", _rows(["step", "", ""], cells)] if cells else []


def _missing(found: Sequence[str]) -> list[str]:
    if not found:
        return []
    items = "".join(f"<li>{escape(line)}</li>" for line in found)
    return ["<h2>Not in this report</h2>", f'<ul class="dim">{items}</ul>']


# ---- pieces of HTML -----------------------------------------------------------------------------


def _figures(drawn: Sequence[tuple[str, str]]) -> str:
    found = [
        f"<figure>{f'<figcaption>{escape(name)}</figcaption>' if name else ''}{svg}</figure>"
        for name, svg in drawn
        if svg
    ]
    inside = "".join(found)
    return f'<div class="two">{inside}</div>' if len(found) > 1 else inside


def _table(rows: Sequence[tuple[str, str]]) -> str:
    """Names and values; values are HTML."""
    body = "".join(
        f'<tr><td class="dim">{escape(name)}</td><td>{value}</td></tr>' for name, value in rows
    )
    return f"<table>{body}</table>"


def _rows(names: Sequence[str], cells: Sequence[Sequence[Any]]) -> str:
    head = "".join(f"<th>{escape(name)}</th>" for name in names)
    body = "".join(
        "<tr>" + "".join(f"<td>{escape(str(cell))}</td>" for cell in row) + "</tr>" for row in cells
    )
    return f"<table><tr>{head}</tr>{body}</table>"


def _pairs(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in values.items())


def _of_ranks(values: Sequence[int]) -> str:
    """Of many ranks the least and the most."""
    if len(values) <= 8:
        return ", ".join(words(n) for n in values)
    return f"{words(min(values))} to {words(max(values))} on {len(values)} ranks"


def _plain(value: float) -> str:
    return f"{value:g}"


def _short(value: float) -> str:
    """`950`, `12.3K`, `4.73B`."""
    for unit, name in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "K")):
        if abs(value) >= unit:
            return f"{value / unit:.3g}{name}"
    return f"{value:.3g}"


def _signed(n: int) -> str:
    return f"{'+' if n >= 0 else '-'}{words(abs(n))}"
