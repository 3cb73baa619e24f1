"""Command `megacpp explain`: layout of every parameter on a mesh, and the collectives."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from megacpp.cli.dry_run import RankArgs, readable
from megacpp.config.arguments import parse_run
from megacpp.config.schema import Config
from megacpp.config.settings import setting
from megacpp.model.pattern import LETTERS, layer_kinds
from megacpp.terminal.screen import table, wrapped

if TYPE_CHECKING:
    from parallel.simulate.drawing import Drawn
    from parallel.simulate.explain import Explanation

KINDS = {
    **LETTERS,
    "A.index": "attention to keys that it chooses",
    "A.share": "attention to keys that a block before it chose",
    "F": "dense",
}

FOR_ALL = (
    "Once a step for all blocks together: fp32 parameters (norms, router, ...) are gathered and "
    "their gradients scattered in fp32; gradients of parameters that tp leaves whole are summed."
)


@dataclass(frozen=True)
class ExplainArgs(RankArgs):
    """Rank of a mesh, and level of detail."""

    all: bool = setting(False, "Show every block, not one of each kind.")
    plan: bool = setting(False, "Print the rows of the plan for the model's kinds, for any mesh.")


def explain(args: ExplainArgs, words: list[str]) -> int:
    """Layout of each parameter on a mesh, seen from one rank, and the collectives by kind of block.

    A layout such as `[Q_tp·fsdp, D]` says that dim Q is sharded over tp, then over fsdp.
    Collectives are listed in the order in which they happen, with the bytes of the larger side. One
    block of each kind is shown (and one in FP8), unless --all is given. No rank is started: one
    process answers for any mesh. With --plan: the table behind this, kind by kind, as it stands in
    parallel/plans.py and in the descriptors of megacpp/blocks.
    """
    size, rank = args.place
    config = parse_run(words, size).config
    if args.plan:
        rows = plan_rows(config)
        print(json.dumps(rows, indent=2) if args.json else "\n".join(_plan(rows)))
        return 0
    from megacpp.cli.follow import following
    from parallel.simulate.explain import explain as look

    with following("explain", len(set(layer_kinds(config.model)))):
        found = look(config, size, rank)
    if args.json:
        print(json.dumps(args.as_dict(config) | _content(found), indent=2))
        return 0
    print("\n".join(args.lines(config, found.coordinates)))
    print("\n" + "\n".join(_parameters(found, args.all)))
    for letter, drawn in found.drawn.items():
        print("\n" + "\n".join(_block(letter, found, drawn)))
    if any(found.drawn.values()):
        print("\n" + "\n".join(wrapped(FOR_ALL, "")))
    return 0


def plan_rows(config: Config) -> list[dict[str, str]]:
    """Return the plan's rows that a model uses.

    Returns:
        for each row the kind of block (empty: outside of blocks), the table (`parameter`, `enters`,
        `leaves` or `context`), the name below the block's mixer, and the layout; of `context` the
        setting that selects the exchange.
    """
    from megacpp.blocks.kinds import KINDS as BLOCK_KINDS
    from parallel.plans import ACTIVATIONS, PARAMETERS

    letters = ["", *dict.fromkeys(kind[0] for kind in layer_kinds(config.model))]
    found = []
    for letter in letters:
        mine = [row for row in PARAMETERS if row.letters == letter and row.when(config.model)]
        found += [(letter, "parameter", name, row.array) for row in mine for name in row.names]
        for move in ACTIVATIONS:
            if move.letters == letter and move.when(config.model):
                ways = ("enters", move.enter), ("leaves", move.leave)
                found += [(letter, way, move.module, layout) for way, layout in ways if layout]
        context = BLOCK_KINDS[letter].context if letter else None
        if context is not None:
            found.append((letter, "context", "", f"mesh.{context.setting}"))
    return [dict(zip(("kind", "table", "name", "layout"), row, strict=True)) for row in found]


def _plan(rows: list[dict[str, str]]) -> list[str]:
    titles = {"enters": "in", "leaves": "out", "context": "over cp"}
    shown = [
        [row["kind"], titles.get(row["table"], row["table"]), row["name"] or ".", row["layout"]]
        for row in rows
    ]
    return table([["kind", "row", "name", "layout"], *shown], 4)


def _parameters(found: Explanation, every: bool) -> list[str]:
    rows = [["parameter", "shape", "here", "layout", "product", "bytes here"]]
    blocks, in_fp8 = _blocks(found), _in_fp8(found)
    shown = {
        number
        for numbers in blocks.values()
        for number in (
            *numbers[:1],
            *[n for n in numbers if n in in_fp8][:1],
            *[n for n in numbers if n not in in_fp8][:1],
        )
    }
    for line in found.parameters:
        if every or line.block is None or line.block in shown:
            shapes = ("x".join(map(str, shape)) or "()" for shape in (line.shape, line.local_shape))
            product = "FP8" if line.fp8 else ""
            rows.append([line.name, *shapes, line.brackets, product, f"{line.bytes:,}"])
    here = sum(line.bytes for line in found.parameters)
    if not in_fp8:
        rows = [[*row[:4], row[5]] for row in rows]
    out = table(rows, 4)
    if not every and blocks:
        kinds = ", ".join(f"{len(numbers)} {letter}" for letter, numbers in blocks.items())
        out += wrapped(f"one block of each kind; this rank has {kinds} (--all shows each)")
    equal = "equal" if found.all_ranks == found.model_bytes else "NOT EQUAL"
    return [
        *out,
        *wrapped(
            f"sum here {readable(here)}, all ranks (each element once) {found.all_ranks:,} B, "
            f"model {found.model_bytes:,} B: {equal}"
        ),
    ]


def _blocks(found: Explanation) -> dict[str, list[int]]:
    """Return the layers of this rank by letter."""
    blocks: dict[str, list[int]] = {}
    for line in found.parameters:
        if line.block is not None and line.block not in blocks.setdefault(line.letter, []):
            blocks[line.letter].append(line.block)
    return blocks


def _in_fp8(found: Explanation) -> set[int | None]:
    """Return the layers of this rank that multiply in FP8."""
    return {line.block for line in found.parameters if line.fp8}


def _block(letter: str, found: Explanation, drawn: list[Drawn]) -> list[str]:
    numbers = _blocks(found).get(letter, [])
    plain, *with_more = letter.split("+")
    title = f"{letter}  {', '.join([KINDS[plain], *with_more])}, {len(numbers)} here"
    if narrow := sum(number in _in_fp8(found) for number in numbers):
        title += f", {narrow} in FP8"
    if not drawn:
        return wrapped(f"{title}: nothing moves")
    rows = [[title, "", "axis", "dtype", "bytes"]]
    phase = ""
    for move in drawn:
        if move.phase != phase:
            phase = move.phase
            rows.append([phase, "", "", "", ""])
        dtype = str(move.dtype).removeprefix("torch.")
        rows.append([f"  {move.picture}", move.kind, move.axis, dtype, readable(move.bytes)])
    return table(rows, 4)


def _content(found: Explanation) -> dict[str, Any]:
    return {
        "coordinates": found.coordinates,
        "parameters": [asdict(line) for line in found.parameters],
        "bytes_here": sum(line.bytes for line in found.parameters),
        "bytes_of_all_ranks": found.all_ranks,
        "bytes_of_the_model": found.model_bytes,
        "collectives": {
            letter: [
                {**asdict(move), "dtype": str(move.dtype).removeprefix("torch.")} for move in drawn
            ]
            for letter, drawn in found.drawn.items()
        },
    }
