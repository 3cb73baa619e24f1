"""Bytes that a forward keeps against FLOPs that its backward repeats, for every hybrid preset.

    python bench/pareto.py
    python bench/pareto.py nam56r_base --svg docs/activation-pareto.svg

The choices of megacpp/lessons/recompute.py on rank 0 of 8, with the rows of the preset on each
rank, on fake tensors (a minute or two each), and below them all policies that say for each kind of
block what runs again (norms always do) and that no other such policy beats: the line of the figure.
FLOPs are those of matrix products, in % of the forward. `moved` waits on the host, once out and
once back.
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench import parser_of
from megacpp.cli.dry_run import readable
from megacpp.config.checks.every import resolve
from megacpp.config.presets import PRESETS
from megacpp.lessons.pareto import Front, TradeOff, front
from megacpp.lessons.recompute import (
    BY_KIND,
    CHOICES,
    COMPRESS,
    KEEP_ALL,
    OFFLOAD,
    SELECTIVE,
    WHOLE,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

HYBRIDS = ("tiny", "hybrid_400m", "nam56r_base", "nam52_deep_base")


def main() -> None:
    """Run the benchmark from the command line."""
    parser = parser_of(__doc__)
    parser.add_argument("presets", nargs="*", default=HYBRIDS, metavar="PRESET")
    parser.add_argument("--world", type=int, default=8, help="ranks (default 8)")
    parser.add_argument("--svg", type=Path, help="figure to write")
    options = parser.parse_args()
    fronts = {}
    for name in options.presets:
        config = resolve(PRESETS[name](), options.world)
        fronts[name] = front(config, options.world)
        print(table(name, fronts[name]), flush=True)
    if options.svg:
        draw(fronts, options.svg)


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


COLORS = {KEEP_ALL: "black", WHOLE: "tab:red", SELECTIVE: "tab:orange", BY_KIND: "tab:blue"}
COLORS |= {OFFLOAD: "tab:green", COMPRESS: "tab:purple"}


LABELS = {BY_KIND: (6, 6), COMPRESS: (6, 17), WHOLE: (6, -3)}  # points to the right, and up


def draw(fronts: dict[str, Front], image: Path) -> None:
    """Draw a panel for each preset."""
    import matplotlib

    matplotlib.use("agg")
    matplotlib.rcParams["svg.hashsalt"] = "megacpp"  # the same figures give the same file
    matplotlib.rcParams["svg.fonttype"] = "none"
    from matplotlib import pyplot

    columns = min(2, len(fronts))
    rows = -(-len(fronts) // columns)
    size = (4.2 * columns, 2.9 * rows)
    figure, grid = pyplot.subplots(rows, columns, figsize=size, layout="constrained", squeeze=False)
    for axes, (name, of) in zip(grid.flat, fronts.items(), strict=False):
        panel(axes, name, of)
    for axes in grid.flat[len(fronts) :]:
        axes.set_visible(False)
    figure.supxlabel("matrix products repeated, % of the forward", fontsize=9)
    figure.supylabel("kept by one microbatch, %", fontsize=9)
    figure.savefig(image, metadata={"Date": None} if image.suffix == ".svg" else None)


def panel(axes: Axes, name: str, of: Front) -> None:
    """Draw the setups and the front of one preset."""
    every = of.points[KEEP_ALL.name].kept

    def place(p: TradeOff) -> tuple[float, float]:
        return 100 * p.flops / of.forward, 100 * p.kept / every

    x, y = zip(*map(place, of.best.values()), strict=True)
    axes.step(x, y, where="post", color=COLORS[BY_KIND], linewidth=1)
    label = partial(axes.annotate, textcoords="offset points", fontsize=8)
    label("any by kind", (x[-1], y[-1]), (5, -3), color=COLORS[BY_KIND])
    for choice in CHOICES:
        if choice == OFFLOAD and not of.points[choice.name].moved:
            continue
        at, color = place(of.points[choice.name]), COLORS[choice]
        axes.plot(*at, "o", color=color, markersize=5)
        label(choice.name, at, LABELS.get(choice, (6, 4)), color=color)
    axes.set_title(f"{name}: all is {readable(every)}", fontsize=9)
    axes.set(xlim=(-4, 90), ylim=(0, 110))
    axes.tick_params(labelsize=8)
    axes.spines[["top", "right"]].set_visible(False)


if __name__ == "__main__":
    main()
