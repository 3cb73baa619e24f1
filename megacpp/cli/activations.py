"""Command `megacpp activations`: bytes that a forward saves, by kind and tensor."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

from megacpp.blocks.kinds import KINDS
from megacpp.cli.dry_run import RankArgs, readable
from megacpp.config.arguments import flatten, parse_run
from megacpp.config.checks.every import check
from megacpp.config.schema import KEEP, CheckpointingPolicy, Config
from megacpp.config.settings import setting
from megacpp.errors import config_error
from megacpp.model.pattern import LETTERS
from megacpp.terminal.screen import table, wrapped

if TYPE_CHECKING:
    from checkpointing.tracing.activations import Activations, Kept, Part

NOTHING = dataclasses.replace(KEEP, rblock="none", mtp=False, mhc_group_size=-1)
POLICIES = {
    "none": NOTHING,
    "selective": dataclasses.replace(
        NOTHING,
        ablock="selective",
        eblock="expert_gemm_only",
        mblock="conv_bc_only",
        rblock="recurrence",
        gblock="conv_gate",
        norms=True,
        mlp=True,
    ),
    "full": dataclasses.replace(
        NOTHING,
        ablock="full",
        eblock="full",
        mblock="conv_bc_only",
        rblock="full_plus_norms",
        gblock="full",
        fblock="full",
        norms=True,
    ),
}
NAMES = {
    **LETTERS,
    "E": "experts",
    "F": "dense",
    "embed": "embedding",
    "ngram": "n-gram embedding",
    "mtp": "further tokens",
    "top": "token order",
    "spread": "streams",
    "collapse": "mean of streams",
    "norm": "last norm",
    "head": "head and loss",
    "received": "received",
}
SMALL = 0.02  # fraction of a part's bytes below which tensors are summed up


@dataclass(frozen=True)
class Report:
    """Contents of the output.

    Attributes:
        found: activations under the configured policy.
        nothing: activations without recomputation; None if `found` has none.
        levers: by name, activations with this setting alone.
        coordinates: coordinates of the rank.
        in_flight: most microbatches whose backward is still to come; None if unknown.
    """

    found: Activations
    nothing: Activations | None
    levers: dict[str, Activations]
    coordinates: dict[str, int]
    in_flight: int | None

    @property
    def base(self) -> Activations:
        """Activations without recomputation."""
        return self.nothing or self.found


@dataclass(frozen=True)
class ActivationsArgs(RankArgs):
    """Rank of a mesh, recompute policy, and level of detail."""

    policy: Literal["", "none", "selective", "full"] = setting(
        "", "A whole policy, instead of the preset's and of --recompute flags."
    )
    levers: bool = setting(False, "Show each lever of the policy by itself: saved and repeated.")
    all: bool = setting(False, "Show every tensor, also the small ones.")


def activations(args: ActivationsArgs, words: list[str]) -> int:
    """Bytes that one microbatch saves for its backward on a rank, and FLOPs of the recomputation.

    Both are shown by kind of block and by tensor. A tensor belongs to the block whose forward made
    it, the residual stream between two blocks to the first of them. The last layer, which is never
    recomputed, is listed separately. The model of train.py runs without values, so this takes
    seconds for any model and mesh. Precision `auto` is bf16 here, as on a GPU, unless
    --train.device is cpu. Blocks run by torch's operators: Triton kernels save less, which
    `megacpp memory trace` and `megacpp plan` count.
    """
    size, rank = args.place
    config = _configured(args.policy, words, size)
    report = _report(config, size, rank, args.levers)
    if args.json:
        print(json.dumps(args.as_dict(config) | _content(config, report), indent=2))
        return 0
    print("\n".join(_lines(args, config, report)))
    return 0


def _configured(name: str, arguments: list[str], size: int) -> Config:
    """Return the run's configuration with the policy that is requested by name."""
    config = parse_run(arguments, size).config
    if config.train.compile != "off":
        raise config_error(
            "train.compile",
            config.train.compile,
            "what a compiled block keeps is up to the compiler",
            "use train.compile=off to see what the policy does",
        )
    if not name:
        return config
    if any(word.startswith("--recompute") for word in arguments):
        fix = "use --policy or --recompute flags, not both"
        raise config_error("policy", name, "is a whole policy already", fix)
    config = dataclasses.replace(config, recompute=POLICIES[name])
    check(config, size)
    return config


def _report(config: Config, size: int, rank: int, levers: bool) -> Report:
    from checkpointing.tracing.activations import one_of_each
    from megacpp.cli.follow import following
    from megacpp.cli.measure import coordinates, measure, microbatches_in_flight

    def under(policy: CheckpointingPolicy) -> Activations:
        return measure(dataclasses.replace(config, recompute=policy), size, rank)

    chosen = levers_of(config)
    runs = 1 + bool(chosen) + len(chosen) * levers
    with following("activations", runs * one_of_each(config.model).depth * (1 + (size > 1))):
        return Report(
            under(config.recompute),
            under(NOTHING) if chosen else None,
            {name: under(policy) for name, policy in chosen.items()} if levers else {},
            coordinates(config.mesh, size, rank),
            microbatches_in_flight(config, size, rank),
        )


def levers_of(config: Config) -> dict[str, CheckpointingPolicy]:
    """Return each effective setting of a policy, alone in a policy; of absent kinds none."""
    values, nothing = flatten(config.recompute), flatten(NOTHING)
    present = config.model.pattern
    absent = {kind.whole for letter, kind in KINDS.items() if letter not in present}
    return {
        name if value is True else f"{name}={value}": dataclasses.replace(NOTHING, **{name: value})
        for name, value in values.items()
        if value != nothing[name] and name not in {"mtp", "mhc_group_size", *absent}
    }


def _content(config: Config, report: Report) -> dict[str, Any]:
    """Return the report as JSON; all numbers are bytes, FLOPs, counts or ranks."""
    base = report.base
    return {
        "coordinates": report.coordinates,
        "rows": config.train.device_batch_size,
        "seq_len": config.data.seq_len,
        "recompute": asdict(config.recompute),
        "microbatches_in_flight": report.in_flight,
        **report.found.as_dict(),
        "nothing_recomputed": base.as_dict(),
        "levers": {
            name: {"saved_bytes": base.bytes - alone.bytes, "replayed_flops": alone.repeated(base)}
            for name, alone in report.levers.items()
        },
    }


def _lines(args: ActivationsArgs, config: Config, report: Report) -> list[str]:
    """Return the report as text."""
    words = [name for name in levers_of(config)] or ["nothing is recomputed"]
    return [
        *args.lines(config, report.coordinates),
        *wrapped("policy: " + ", ".join(words)),
        "",
        *_kinds(report),
        "",
        *_besides(report),
        *(["", *_levers(report)] if report.levers else []),
        *(line for part in report.found.parts for line in ("", *_tensors(part, args.all))),
    ]


def _kinds(report: Report) -> list[str]:
    """Return bytes and FLOPs by kind, compared with no recomputation."""
    base = {part.name: part for part in report.base.parts}
    rows = [["kept by one microbatch", "layers", "bytes", "unsaved", "forward", "replayed"]]
    for part in report.found.parts:
        other = base[part.name]
        rows.append(
            [
                _name(part),
                str(part.layers),
                readable(part.bytes),
                readable(other.bytes) if report.nothing else "",
                flops(part.forward),
                flops(part.repeated(other)),
            ]
        )
    found, plain = report.found, report.base
    rows.append(
        [
            "sum",
            str(sum(part.layers for part in found.parts if part.name[0] in LETTERS)),
            readable(found.bytes),
            readable(plain.bytes) if report.nothing else "",
            flops(found.flops("forward")),
            flops(found.repeated(plain)),
        ]
    )
    return _without_empty(rows)


def _besides(report: Report) -> list[str]:
    """Return lines about bytes that belong to no layer."""
    found = report.found
    lines = []
    if report.nothing and report.nothing.bytes:
        saved = report.nothing.bytes - found.bytes
        share, extra = saved / report.nothing.bytes, found.repeated(report.nothing)
        lines.append(
            f"saved {readable(saved)} ({share:.1%}) for {flops(extra)} FLOPs more, "
            f"{extra / max(1, found.flops('forward')):.1%} of the forward"
        )
    lines += [
        f"shared by all layers (places and masks of documents, the loss): {_bytes(found.batch)}",
        f"made of weights alone (gathered, cast): {_bytes(found.weights)}",
        *([f"on the host until the backward: {_bytes(found.host)}"] if found.host else []),
        f"most at once: {readable(found.forward_peak)} in the forward, "
        f"{readable(found.backward_peak)} in the backward; without weights and their gradients",
    ]
    if report.in_flight is None:
        lines.append("microbatches in flight: not worked out for this schedule")
    elif report.in_flight > 1:
        total = readable(report.in_flight * found.bytes)
        lines.append(f"microbatches in flight: {report.in_flight}, {total} together")
    return [line for text in lines for line in wrapped(text)]


def _levers(report: Report) -> list[str]:
    base = report.base
    rows = [["each lever by itself", "saves", "replays", "per TFLOP"]]
    for name, alone in report.levers.items():
        saved, extra = base.bytes - alone.bytes, alone.repeated(base)
        each = readable(round(saved / extra * 10**12)) if extra else "free"
        rows.append([name, readable(saved), flops(extra), each])
    return table(rows)


def _tensors(part: Part, every: bool) -> list[str]:
    """Return the tensors of a kind, summed over its layers, the largest first."""
    least = 0 if every else SMALL * part.bytes
    shown = [kept for kept in part.kept if kept.bytes >= least]
    rest = [kept for kept in part.kept if kept.bytes < least]
    rows = [[_name(part), "made by", "shape", "dtype", "count", "bytes"]]
    for kept in shown:
        shape = "x".join(map(str, kept.shape)) or "()"
        row = [f"  {kept.path or '.'}", kept.operator, shape, kept.dtype, str(kept.count)]
        rows.append([*row, readable(kept.bytes)])
    if rest:
        rows.append(["  smaller ones", "", "", "", str(sum(k.count for k in rest)), _bytes(rest)])
    return table(rows, 4)


def flops(count: int) -> str:
    """Return a number in powers of 1000, such as `12.3 T`."""
    value, unit = float(count), 0
    while value >= 1000 and unit < 6:
        value, unit = value / 1000, unit + 1
    return f"{value:.1f} {' KMGTPE'[unit]}".strip() if count else "0"


def _name(part: Part) -> str:
    kind, _, last = part.name.partition(" ")
    if kind in NAMES and len(kind) > 1:
        return NAMES[kind]
    special = f" {kind[1:].strip('.')}" if kind[1:] else ""
    return f"{kind[0]}  {NAMES[kind[0]]}{special}" + (", last" if last else "")


def _bytes(kept: Sequence[Kept]) -> str:
    return readable(sum(k.bytes for k in kept))


def _without_empty(rows: list[list[str]]) -> list[str]:
    """Return a table without its empty columns."""
    filled = [i for i in range(len(rows[0])) if any(row[i] for row in rows[1:])]
    return table([[row[i] for i in filled] for row in rows])
