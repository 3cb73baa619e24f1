"""`megacpp dry-run`: what a rank of a mesh stores and sends, without the mesh."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from megacpp.arguments import parse_run, take_flag, take_int, wants_help
from megacpp.config import Config
from megacpp.errors import config_error
from megacpp.fp8_rules import fp8_line
from megacpp.rules import tokens_formula

if TYPE_CHECKING:
    from parallel.dry_run import Bytes, DryRun, Rooms

CLASSES = ("dense", "experts", "replicated")
WIDTH = 100
UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def dry_run(argv: Sequence[str]) -> int:
    """usage: megacpp dry-run [PRESET] --world N [--rank R] [--section.key value ...] [--json]

    One optimizer step of rank R (default 0) of N ranks, on this machine alone: its parameters,
    gradients and optimizer state, its collectives by mesh axis, and whether all ranks together
    hold the model. A collective counts with the bytes of its larger side. Tensors have no values,
    so it takes seconds and little memory, whatever the model and the mesh. Precision `auto` is
    bf16 here, as on a GPU, unless --train.device is cpu.
    """
    arguments = list(argv)
    if wants_help(arguments, dry_run):
        return 0
    as_json = take_flag(arguments, "--json")
    size, rank = take_world(arguments)
    config = parse_run(arguments, size).config
    if config.optim.adamw_state == "cpu_offload":
        raise config_error(
            "optim.adamw_state",
            "cpu_offload",
            "a dry run knows one memory only, not a device and its host",
            "use optim.adamw_state=fp32: the host would hold what is then shown as adamw state",
        )
    from parallel import dry_run as step

    found = step.dry_run(config, size, rank, rooms())
    if as_json:
        print(json.dumps(content(config, size, rank, found), indent=2))
    else:
        print("\n".join(lines(config, size, rank, found)))
    return 0 if found.complete else 1


def take_world(arguments: list[str]) -> tuple[int, int]:
    """Removes `--world N` and `--rank R` from the arguments; one rank unless N is given."""
    size, rank = take_int(arguments, "--world", 1), take_int(arguments, "--rank", 0)
    if size < 1:
        raise config_error("world", size, "must be at least 1", "use --world 1 or more")
    if not 0 <= rank < size:
        raise config_error("rank", rank, f"must be below the world ({size} ranks)", "use --rank 0")
    return size, rank


def rooms() -> Rooms:
    """The optimizer and the clipping of every run."""
    from checkpointing.apply import Keeper
    from optim.build import build_optimizer
    from optim.clip import clip_gradients
    from parallel.dry_run import Rooms

    return Rooms(
        optimizers=lambda model, config, groups: build_optimizer(model, config, groups),
        clip=lambda model, config, copies, along: clip_gradients(
            model, config.optim.clip_norm, copies=copies, along=along
        ),
        prepare=Keeper,
    )


def content(config: Config, size: int, rank: int, found: DryRun) -> dict[str, Any]:
    """The report for machines; all numbers are bytes, counts or ranks."""
    by_rank = found.census.by_rank
    return {
        "preset": config.preset,
        "world": size,
        "rank": rank,
        "mesh": asdict(config.mesh),
        "coordinates": found.coordinates,
        "grad_accum": config.train.grad_accum,
        "traced_microbatches": found.traced,
        "parameters": found.parameters,
        "gradients": found.gradients,
        "optimizer_state": found.state,
        "parameters_of_ranks": {
            "least": min(by_rank.values()),
            "most": max(by_rank.values()),
            "ranks": len(by_rank),
            "sum_each_element_once": found.census.once,
            "model": found.model_bytes,
            "equal": found.complete,
        },
        "collectives": [
            {**key._asdict(), "dtype": str(key.dtype).removeprefix("torch."), **asdict(value)}
            for key, value in found.traffic.items()
        ],
    }


def lines(config: Config, size: int, rank: int, found: DryRun) -> list[str]:
    """The report for people."""
    return [
        *mesh_lines(config, size, rank, found.coordinates),
        "",
        *_storage(found),
        "",
        *_census(found),
        "",
        *_collectives(config, found),
    ]


def mesh_lines(config: Config, size: int, rank: int, coordinates: dict[str, int]) -> list[str]:
    """Which rank of which mesh, and the batch of one step."""
    mesh = config.mesh
    degrees = {axis: getattr(mesh, axis) for axis in coordinates}
    axes = ", ".join(f"{axis}={n}" for axis, n in degrees.items() if n > 1) or "one rank"
    at = ", ".join(f"{axis} {coordinates[axis]}" for axis, n in degrees.items() if n > 1)
    ranks, dtype = mesh.dp_replicate * mesh.dp_shard, config.precision.dtype
    on_a_gpu = dtype == "auto" and config.train.device != "cpu"
    return [
        f"{config.preset} on {size} rank(s): {axes}",
        f"rank {rank}" + (f": {at}" if at else ""),
        tokens_formula(config.train, config.data.seq_len, ranks),
        *(["precision: bf16, as on a GPU (--train.device cpu: fp32)"] if on_a_gpu else []),
        *textwrap.wrap(" ".join(fp8_line(config)), WIDTH, subsequent_indent="  "),
    ]


def readable(count: int) -> str:
    """Bytes in the largest unit that leaves a number of at least 1: `1.50 GiB`."""
    value, unit = float(count), 0
    while value >= 1024 and unit < len(UNITS) - 1:
        value, unit = value / 1024, unit + 1
    return f"{count} B" if unit == 0 else f"{value:.2f} {UNITS[unit]}"


def _storage(found: DryRun) -> list[str]:
    columns: dict[str, Bytes] = {"parameters": found.parameters, "gradients": found.gradients}
    columns |= {f"{name} state": of_class for name, of_class in found.state.items()}
    columns["sum"] = {
        name: sum(of_class.get(name, 0) for of_class in columns.values()) for name in CLASSES
    }
    rows = [["stored on this rank", *columns]]
    for name in CLASSES:
        if columns["sum"][name]:
            rows.append([name, *(readable(c.get(name, 0)) for c in columns.values())])
    rows.append(["sum", *(readable(sum(c.values())) for c in columns.values())])
    return table(rows)


def _census(found: DryRun) -> list[str]:
    by_rank = found.census.by_rank
    least, most = min(by_rank.values()), max(by_rank.values())
    verdict = "equal" if found.complete else "NOT EQUAL"
    return [
        f"parameters of {len(by_rank)} rank(s): {readable(least)} to {readable(most)} each",
        f"all ranks, each element once: {found.census.once:,} bytes; the model: "
        f"{found.model_bytes:,} bytes: {verdict}",
    ]


def _collectives(config: Config, found: DryRun) -> list[str]:
    if not found.traffic:
        return ["collectives of one optimizer step: none"]
    rows = [["collectives of one optimizer step", "", "dtype", "calls", "bytes"]]
    for key, value in found.traffic.items():
        dtype = str(key.dtype).removeprefix("torch.")
        rows.append([key.axis, key.kind, dtype, f"{value.count:,}", readable(value.bytes)])
    axes: dict[str, int] = {}
    for key, value in found.traffic.items():
        axes[key.axis] = axes.get(key.axis, 0) + value.bytes
    total = ", ".join(f"{axis} {readable(size)}" for axis, size in axes.items())
    ran = " and ".join(map(str, found.traced))
    note = [] if len(found.traced) == 1 else [f"from steps of {ran} microbatches"]
    by_axis = textwrap.wrap(f"by axis: {total}", WIDTH, subsequent_indent="  ")
    return [*table(rows, 3), *by_axis, *note]


def table(rows: Sequence[Sequence[str]], left: int = 1) -> list[str]:
    """Aligned columns, the first `left` of them to the left; a rule under the first row."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    out = [
        "  ".join(
            cell.ljust(width) if i < left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
    return [out[0], "-" * max(map(len, out)), *out[1:]]
