"""Bytes that a forward keeps against FLOPs that its backward repeats, for every hybrid preset.

    python bench/pareto.py
    python bench/pareto.py nam56r_base --json docs/activation-pareto.json

The choices of megacpp/lessons/recompute.py on rank 0 of 8, with the rows of the preset on each
rank, on fake tensors (a minute or two each), and below them all policies that say for each kind of
block what runs again (norms always do) and that no other such policy beats: the line of the figure.
FLOPs are those of matrix products, in % of the forward. `moved` waits on the host, once out and
once back.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench import parser_of
from megacpp.cli.dry_run import readable
from megacpp.config.checks.every import resolve
from megacpp.config.presets import PRESETS
from megacpp.lessons.pareto import Front, TradeOff, front
from megacpp.lessons.recompute import CHOICES, KEEP_ALL, OFFLOAD

HYBRIDS = ("tiny", "hybrid_400m", "nam56r_base", "nam52_deep_base")


def main() -> None:
    """Run the benchmark from the command line."""
    parser = parser_of(__doc__)
    parser.add_argument("presets", nargs="*", default=HYBRIDS, metavar="PRESET")
    parser.add_argument("--world", type=int, default=8, help="ranks (default 8)")
    parser.add_argument("--json", type=Path, help="file for what the picture shows of a preset")
    options = parser.parse_args()
    fronts = {}
    for name in options.presets:
        config = resolve(PRESETS[name](), options.world)
        fronts[name] = front(config, options.world)
        print(table(name, fronts[name]), flush=True)
    if options.json:
        name = options.presets[-1]
        options.json.write_text(json.dumps(plotted(name, fronts[name])) + "\n")


# ---- what is shown ------------------------------------------------------------------------------


def table(name: str, of: Front) -> str:
    """Return a line for each setup, then one for each policy of the front."""
    every = of.points[KEEP_ALL.name].kept
    lines = [
        f"{name}, all kept: {readable(every)}",
        f"{'':54}{'kept':>12}{'of all':>9}{'FLOPs':>9}",
    ]
    for choice, p in of.points.items():
        words = f"  {readable(p.moved)} moved" if p.moved else ""
        words += "  beaten" if of.beaten(choice) else ""
        lines.append(_line(choice, p, every, of.forward) + words)
    lines += [_line("  " + (w or "norms"), p, every, of.forward) for w, p in of.best.items()]
    return "\n".join(lines)


def _line(words: str, p: TradeOff, every: int, forward: int) -> str:
    kept = f"{readable(p.kept):>12}{p.kept / every:9.1%}"
    return f"{words:54}{kept}{p.flops / forward:+9.1%}"


def plotted(name: str, of: Front) -> dict[str, object]:
    """Return what docs/pictures/activation-pareto.svg shows, in % of the forward and of all."""
    every = of.points[KEEP_ALL.name].kept

    def place(p: TradeOff) -> tuple[float, float]:
        return round(100 * p.flops / of.forward, 2), round(100 * p.kept / every, 2)

    setups = {
        choice.name: place(of.points[choice.name])
        for choice in CHOICES
        if choice != OFFLOAD or of.points[choice.name].moved
    }
    front = [place(p) for p in of.best.values()]
    return {"preset": name, "all": readable(every), "setups": setups, "front": front}


if __name__ == "__main__":
    main()
