"""Bytes that a forward keeps against FLOPs that its backward repeats, for every hybrid preset.

    python bench/pareto.py
    python bench/pareto.py nam56r_base --svg docs/activation-pareto.svg

The choices of bench/choices.py on rank 0 of 8, with the rows of the preset on each rank, on fake
tensors (a minute or two each), and below them all policies that say for each kind of block what
runs again (norms always do) and that no other such policy beats: the line of the figure. FLOPs are
those of matrix products, in % of the forward. `moved` waits on the host, once out and once back.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, product
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).parents[1]))

from torch import Tensor, nn

from bench.choices import (
    BY_KIND,
    CHOICES,
    COMPRESS,
    KEEP_ALL,
    OFFLOAD,
    SELECTIVE,
    WHOLE,
    RecomputeSetup,
)
from checkpointing.apply import set_recompute
from checkpointing.recompute import Store
from checkpointing.tracing.activations import (
    Activations,
    Part,
    activations,
    one_of_each,
    standing_for,
)
from checkpointing.tracing.meter import Meter
from megacpp.cli.dry_run import readable
from megacpp.config.checks.every import resolve
from megacpp.config.presets import PER_BLOCK, PRESETS
from megacpp.config.schema import KEEP, Config
from megacpp.memory.forms.simulation import WINDOW_BYTES
from megacpp.model.hybrid import HybridLM
from megacpp.model.pattern import block_letters
from parallel.simulate.fake import (
    FakeBoundary,
    as_trained,
    fake_batch,
    fake_tensors,
    fake_world,
    planned_model,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

HYBRIDS = ("tiny", "hybrid_400m", "nam56r_base", "nam52_deep_base")
NORMS = RecomputeSetup("norms", replace(KEEP, rblock="none", norms=True))
EXPERTS = RecomputeSetup("by kind, no mlp", replace(PER_BLOCK, mlp=False))
# Values of a policy for one kind, and the setup in which blocks of the kind use them.
SAYS = {
    "A": {"": NORMS, "selective": SELECTIVE, "full": WHOLE},
    "E": {"": NORMS, "mlp": SELECTIVE, "experts": EXPERTS, "experts, mlp": BY_KIND, "full": WHOLE},
    "M": {"": NORMS, "conv": BY_KIND},
    "R": {"": NORMS, "recurrence": SELECTIVE, "full": BY_KIND},
}


@dataclass(frozen=True)
class TradeOff:
    """Cost and saving of a setup.

    Attributes:
        kept: bytes on the device, from one microbatch's forward to its backward.
        flops: FLOPs of matrix products beyond those without recomputation; fewer if negative.
        moved: bytes that wait on the host.
    """

    kept: int
    flops: int
    moved: int = 0

    def beats(self, other: TradeOff) -> bool:
        """Return whether it saves no more bytes, repeats no more, and differs."""
        least = self.kept <= other.kept and self.flops <= other.flops
        return least and (self.kept, self.flops) != (other.kept, other.flops)


@dataclass(frozen=True)
class Front:
    """Setups of a preset by name, and the policies by kind on the Pareto front."""

    forward: int
    points: dict[str, TradeOff]
    best: dict[str, TradeOff]

    def beaten(self, name: str) -> bool:
        """Return whether a policy of the front beats the setup."""
        return any(point.beats(self.points[name]) for point in self.best.values())


def main() -> None:
    """Run the benchmark from the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
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


def front(config: Config, size: int) -> Front:
    """Measure all setups, and combine the kinds of blocks."""
    found = {choice: measured(choice, config, size) for choice in (*CHOICES, NORMS, EXPERTS)}
    plain = found[KEEP_ALL].activations
    points = {choice.name: found[choice].relative_to(plain) for choice in CHOICES}
    letters = sorted(set(block_letters(config.model.pattern, config.model.depth)))
    mixed: dict[str, TradeOff] = {}
    for says in product(*(SAYS[letter] for letter in letters)):
        of = {letter: SAYS[letter][word] for letter, word in zip(letters, says, strict=True)}
        parts = tuple(
            part_of(found[of.get(p.name[0], NORMS)].activations, p.name) for p in plain.parts
        )
        words = "; ".join(f"{letter} {w}" for letter, w in zip(letters, says, strict=True) if w)
        mixed[words] = Measured(replace(plain, parts=parts)).relative_to(plain)
    first = {p: w for w, p in reversed(mixed.items())}  # one policy per point
    best = {w: p for p, w in first.items() if not any(q.beats(p) for q in first)}
    ordered = dict(sorted(best.items(), key=lambda item: item[1].flops))
    return Front(plain.flops("forward"), points, ordered)


def part_of(found: Activations, name: str) -> Part:
    """Return the part of that name."""
    return next(part for part in found.parts if part.name == name)


@dataclass(frozen=True)
class Measured:
    """Activations of a setup, and bytes of storages that it moves to the host, in order."""

    activations: Activations
    parked: Sequence[int] = ()

    def relative_to(self, plain: Activations) -> TradeOff:
        """Compare with saving everything. The forward counts too: it computes projections."""
        found, gone = self.activations, gone_bytes(self.parked)
        flops = found.repeated(plain) + found.flops("forward") - plain.flops("forward")
        return TradeOff(found.bytes - gone, flops, gone)


def gone_bytes(storages: Sequence[int]) -> int:
    """Return the bytes that have left a GPU when the backward begins: all but the last window."""
    behind = accumulate(reversed(storages))
    return sum(storages) - max((size for size in behind if size <= WINDOW_BYTES), default=0)


def measured(choice: RecomputeSetup, config: Config, size: int) -> Measured:
    """Measure one microbatch on rank 0, under fake tensors, one layer of each kind."""
    config = as_trained(choice.apply(config))
    few = replace(
        config,
        model=one_of_each(config.model),
        mesh=replace(config.mesh, reshard="always"),
        recompute=replace(config.recompute, offload="none"),  # offloaded bytes are noted
    )
    offloads, standing = choice.policy.offload != "none", standing_for(few.model, config.model)
    notes: dict[str, dict[int, int]] = {}
    with fake_world(few, size) as world:
        ac = choice.build(few)

        def prepare(model: HybridLM) -> None:
            ac(model)
            if offloads:
                stores = partial(
                    noted, names={id(m): n for n, m in model.named_modules()}, to=notes
                )
                set_recompute(model, ac.regions, few.recompute, ac.replays, stores)

        model = planned_model(few, world, prepare)
        with fake_tensors(memory=True):
            model.to_empty(device=world.device)
            model.train()
            boundary = FakeBoundary(model, world, few)
            if world.parallel:  # FSDP2 and DTensor allocate persistent buffers when they first run
                boundary.accumulate([fake_batch(few)])
                model.zero_grad()
                notes.clear()
            batch = fake_batch(few)
            with Meter(model) as meter:
                boundary.accumulate([batch])
            found = activations(meter, standing)
    return Measured(found, [n for part, _ in standing for n in notes.get(part, {}).values()])


def noted(block: nn.Module, names: dict[int, str], to: dict[str, dict[int, int]]) -> Store:
    """Return a store that leaves tensors in place and notes the bytes of storages by block."""

    def store(t: Tensor) -> Tensor:
        storage = t.untyped_storage()
        if not any(id(storage) in seen for seen in to.values()):
            to.setdefault(names[id(block)], {})[id(storage)] = storage.nbytes()
        return t

    return store


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
