"""Command `megacpp dry-run`: bytes that a rank of a mesh stores and sends, without the mesh."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from megacpp.config.arguments import parse_run
from megacpp.config.checks.every import tokens_formula
from megacpp.config.checks.fp8 import fp8_line
from megacpp.config.environment import MOST_RANKS
from megacpp.config.schema import Config
from megacpp.config.settings import setting
from megacpp.errors import config_error
from megacpp.terminal.screen import table, wrapped

if TYPE_CHECKING:
    from parallel.simulate.dry_run import Bytes, Dependencies, DryRun

CLASSES = ("dense", "experts", "replicated")
UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


@dataclass(frozen=True)
class RankArgs:
    """Rank of a mesh."""

    world: int = setting(1, "Ranks of the mesh.", "ranks", at_least=1, at_most=MOST_RANKS)
    rank: int = setting(0, "Rank that is shown; below the world.", at_least=0)
    json: bool = setting(False, "Print one JSON object instead of text.")

    @property
    def place(self) -> tuple[int, int]:
        """World and rank, checked.

        Raises:
            ConfigError: the rank isn't below the world.
        """
        if self.rank >= self.world:
            rule = f"must be below the world ({self.world} ranks)"
            raise config_error("rank", self.rank, rule, "use --rank 0")
        return self.world, self.rank

    def as_dict(self, config: Config) -> dict[str, Any]:
        """Return preset, mesh and rank for JSON."""
        place = {"preset": config.preset, "world": self.world, "rank": self.rank}
        return place | {"mesh": asdict(config.mesh)}

    def lines(self, config: Config, coordinates: dict[str, int]) -> list[str]:
        """Return lines with the mesh, the rank by its coordinates, and the batch of one step."""
        mesh = config.mesh
        degrees = {axis: getattr(mesh, axis) for axis in coordinates}
        axes = ", ".join(f"{axis}={n}" for axis, n in degrees.items() if n > 1) or "one rank"
        at = ", ".join(f"{axis} {coordinates[axis]}" for axis, n in degrees.items() if n > 1)
        ranks, dtype = mesh.dp_replicate * mesh.dp_shard, config.precision.dtype
        on_a_gpu = dtype == "auto" and config.train.device != "cpu"
        return [
            *wrapped(f"{config.preset} on {self.world} rank(s): {axes}"),
            *wrapped(f"rank {self.rank}" + (f": {at}" if at else "")),
            *wrapped(tokens_formula(config.train, config.data.seq_len, ranks)),
            *(["precision: bf16, as on a GPU (--train.device cpu: fp32)"] if on_a_gpu else []),
            *(line for text in fp8_line(config) for line in wrapped(text)),
        ]


def dry_run(args: RankArgs, words: list[str]) -> int:
    """Optimizer step of a rank: stored bytes, collectives by mesh axis, and completeness.

    Stored are parameters, gradients and optimizer state. A collective counts with the bytes of its
    larger side. The step is complete if all ranks together hold the model. Nothing but this machine
    is used. Tensors have no values, so this takes seconds and little memory for any model and mesh.
    Precision `auto` is bf16 here, as on a GPU, unless --train.device is cpu.
    """
    size, rank = args.place
    config = parse_run(words, size).config
    if config.optim.adamw_state == "cpu_offload":
        raise config_error(
            "optim.adamw_state",
            "cpu_offload",
            "a dry run knows one memory only, not a device and its host",
            "use optim.adamw_state=fp32: the host would hold what is then shown as adamw state",
        )
    from megacpp.cli.follow import following
    from parallel.simulate import dry_run as step

    layers = config.model.depth // config.mesh.pp
    with following("dry-run", layers * sum(step.few_microbatches(config))):
        found = step.dry_run(config, size, rank, dependencies())
    if args.json:
        print(json.dumps(args.as_dict(config) | _content(config, found), indent=2))
    else:
        print("\n".join([*args.lines(config, found.coordinates), *_lines(found)]))
    return 0 if found.complete else 1


def dependencies() -> Dependencies:
    """Return the optimizer, the clipping and the recomputation of every run."""
    from checkpointing.apply import ActivationCheckpointing
    from optim.build import build_optimizer
    from optim.clip import clip_gradients
    from parallel.simulate.dry_run import Dependencies

    return Dependencies(
        optimizers=lambda model, config, groups: build_optimizer(model, config, groups),
        clip=lambda model, config, copies, along: clip_gradients(
            model.parameters(), config.optim.clip_norm, copies=copies, along=along
        ),
        prepare=ActivationCheckpointing,
    )


def _content(config: Config, found: DryRun) -> dict[str, Any]:
    """Return the report as JSON; all numbers are bytes, counts or ranks."""
    by_rank = found.shard_bytes.by_rank
    return {
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
            "sum_each_element_once": found.shard_bytes.once,
            "model": found.model_bytes,
            "equal": found.complete,
        },
        "collectives": [
            {**key._asdict(), "dtype": str(key.dtype).removeprefix("torch."), **asdict(value)}
            for key, value in found.traffic.items()
        ],
    }


def _lines(found: DryRun) -> list[str]:
    """Return the report as text."""
    return ["", *_storage(found), "", *_shard_bytes(found), "", *_collectives(found)]


def readable(count: int) -> str:
    """Return bytes in the largest unit that gives a number of at least 1, such as `1.50 GiB`."""
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


def _shard_bytes(found: DryRun) -> list[str]:
    by_rank = found.shard_bytes.by_rank
    least, most = min(by_rank.values()), max(by_rank.values())
    verdict = "equal" if found.complete else "NOT EQUAL"
    return [
        *wrapped(
            f"parameters of {len(by_rank)} rank(s): {readable(least)} to {readable(most)} each"
        ),
        *wrapped(
            f"all ranks, each element once: {found.shard_bytes.once:,} bytes; the model: "
            f"{found.model_bytes:,} bytes: {verdict}"
        ),
    ]


def _collectives(found: DryRun) -> list[str]:
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
    return [*table(rows, 3), *wrapped(f"by axis: {total}"), *note]
