"""Command `megacpp plan`: mesh, device batch and recompute policy for a cluster."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from megacpp.cli.dry_run import readable
from megacpp.cli.plan_order import Asked, at_other_speeds, by_speed, mesh_words, reasons
from megacpp.cli.plan_sweep import sweep
from megacpp.cli.speed import check_fp8, in_words
from megacpp.config.arguments import flatten, read_run
from megacpp.config.checks.every import broken, check
from megacpp.config.checks.fp8 import fp8_line
from megacpp.config.environment import MOST_RANKS
from megacpp.config.schema import Config, MeshConfig
from megacpp.config.settings import setting
from megacpp.config.values import flag_text
from megacpp.errors import ConfigError, config_error
from megacpp.launch.command import command_lines, node_lines, quoted, torchrun_words
from megacpp.memory.budget import as_planned
from megacpp.memory.components import COMPONENTS
from megacpp.memory.forms.detail import detail_of
from megacpp.memory.planner import REASONS, Candidate, Plan, plan
from megacpp.memory.traffic import Traffic, traffic
from megacpp.model.flops import train_flops_per_token
from megacpp.speed.cost import Cost
from megacpp.speed.hardware import GpuSpec, gpu
from megacpp.speed.step import StepTime
from megacpp.terminal.progress import counted
from megacpp.terminal.screen import columns, labelled, wrapped

if TYPE_CHECKING:
    from rich.text import Text

BARS, GIB = (10, 40), 1 << 30
MOST_MEMORY = 1 << 60  # bytes of a device
UNITS = {"": GIB, "GIB": GIB, "MIB": 1 << 20, "TIB": 1 << 40}
UNITS |= {"GB": 10**9, "MB": 10**6, "TB": 10**12}
# A letter and a colour for each component, in the order of a bar.
PAINT = dict(
    zip(
        COMPONENTS,
        (
            *(("P", "blue"), ("G", "cyan"), ("O", "magenta"), ("A", "green"), ("E", "yellow")),
            *(("H", "bright_blue"), ("F", "bright_green"), ("C", "red"), ("W", "bright_cyan")),
            *(("M", "bright_magenta"), ("B", "white"), ("R", "bright_black")),
            ("V", "bright_yellow"),
        ),
        strict=True,
    )
)


@dataclass(frozen=True)
class PlanArgs:
    """Cluster, and level of detail."""

    world: int | None = setting(
        None, "Devices of the cluster.", "devices", at_least=1, at_most=MOST_RANKS
    )
    memory: str = setting("", "Memory of a device: 141GiB, 80GB, 80 (GiB); else that of --gpu.")
    tokens_per_step: int = setting(
        0, "Tokens of a step over all ranks (0: the preset's).", "tokens", at_least=0
    )
    seq: int = setting(0, "Tokens of a row (0: the preset's).", "tokens", at_least=0)
    per_node: int | None = setting(
        None, "Devices of a machine (none: the usual node of --gpu, or 8).", "devices", at_least=1
    )
    gpu: str = setting("", "Kind of GPU: order by predicted tokens a second (megacpp hardware).")
    price: float = setting(
        0.0, "Price of a GPU for an hour, in any currency: what training costs.", at_least=0
    )
    tokens: int = setting(0, "Tokens of the whole run: how long it takes.", "tokens", at_least=0)
    sweep: str = setting("", "Cluster sizes to compare, doubled each: gpus=8..1024.")
    top: int = setting(8, "Candidates that are shown.", "candidates", at_least=1)
    explain: bool = setting(False, "Say why each candidate comes before the next.")
    json: bool = setting(False, "Print one JSON object instead of text.")


def command(args: PlanArgs, words: list[str]) -> int:
    """Best mesh, device batch, accumulation and recompute policy for a cluster, best first.

    The order of criteria: it fits, a larger device batch, no recomputation, fewer microbatches,
    less repeated work, more headroom, smaller tp, smaller ep.
    With --gpu, those that fit are ordered by predicted tokens a second instead; --price and
    --tokens then say what a run costs and how long it takes, and --sweep gpus=8..1024 compares
    sizes of the cluster.
    Given settings of mesh, device batch and recompute stay as they are; all others are chosen. No
    rank is started: memory, bytes sent and FLOPs are computed analytically.

    A bar is the memory of a device: its letters are the bytes in use at the fullest point of a
    step, and | marks where the headroom begins (--memory.headroom). "repeats" is the FLOPs that
    recompute adds to forward and backward.
    """
    machine = gpu(args.gpu) if args.gpu else None
    asked = _asked(args, words, machine)
    cost = Cost(args.tokens, args.price, args.world or 0)
    if machine is None and (args.price or args.tokens or args.sweep):
        rule = "price, tokens and sweep need the predicted speed of a GPU"
        raise config_error("gpu", args.gpu, rule, "add --gpu H100")
    if machine is not None:
        check_fp8(asked.config, machine)
    if machine and args.sweep:
        return sweep(asked, machine, args.sweep, cost, args.json)
    times: list[StepTime] = []
    if machine is not None:
        found, times = by_speed(asked, machine, args.top, _watched)
    else:
        found = plan(
            *(asked.config, asked.world, asked.budget, asked.tokens, tuple(asked.given)),
            watch=_watched,
        )
    shown = found.candidates[: args.top]
    for one in shown:
        check(one.config, asked.world)
    if args.json:
        print(json.dumps(_content(asked, found, shown, times, cost), indent=2))
    else:
        why = []
        if args.explain:
            why = reasons(shown, times, machine and at_other_speeds(asked, machine))
        if times and (words_ := cost.words(times[0])):
            why += ["", *wrapped(f"#1: {words_}")]
        _show(asked, found, shown, times, why)
    if not found.candidates:
        raise _refused(asked, found)
    return 0


def _watched(meshes: Sequence[MeshConfig]) -> Iterable[MeshConfig]:
    """Show progress over meshes."""
    return counted(meshes, "plan", len(meshes))


def _asked(args: PlanArgs, words: list[str], machine: GpuSpec | None) -> Asked:
    """Read the command line; every mistake is one line."""
    written = read_run([*words, *(["--data.seq-len", str(args.seq)] if args.seq else [])])
    if args.world is None and not args.sweep:
        raise config_error("world", "", "is needed: number of devices", "write --world 8")
    config = written.config
    check(_alone(config), 1)
    gib = config.memory.device_gib or (machine.hbm_gib if machine else 0)
    memory = memory_bytes(args.memory) if args.memory else int(gib * GIB)
    if not memory:
        rule, fix = "of a device is needed", "write --memory 141GiB, or --gpu H200"
        raise config_error("memory", args.memory, rule, fix)
    tokens = args.tokens_per_step or config.train.tokens_per_step
    if not tokens:
        raise config_error(
            "tokens_per_step", tokens, "the preset has none", "write --tokens-per-step 1048576"
        )
    per_node = args.per_node or (int(machine.per_node) if machine else 8)
    return Asked(written.base, config, written.given, args.world or 0, memory, tokens, per_node)


def _alone(config: Config) -> Config:
    """Return the configuration on one rank, to check rules that concern neither mesh nor batch."""
    mesh = replace(config.mesh, pp=1, dp_replicate=1, dp_shard=-1, cp=1, tp=1, ep=1)
    train = replace(config.train, device_batch_size=1, tokens_per_step=0, grad_accum=0)
    return replace(config, mesh=mesh, train=train)


def memory_bytes(text: str) -> int:
    """Return the bytes of `141GiB`, `80GB` or `80` (GiB).

    Raises:
        ConfigError: anything else.
    """
    match = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*([a-zA-Z]*)\s*", text)
    unit = match and UNITS.get(match[2].upper())
    if not match or not unit or not 0 < float(match[1]) * unit < MOST_MEMORY:
        rule = "must be a number above 0 and GiB, GB, MiB or TiB"
        raise config_error("memory", text, rule, "write --memory 141GiB")
    return int(float(match[1]) * unit)


def launch_words(asked: Asked, candidate: Candidate) -> list[str]:
    """Return the command that starts a candidate, with its differences from the preset."""
    before, settings = flatten(asked.base), asked.given | candidate.knobs()
    del settings["train.grad_accum"]  # follows from the tokens
    if asked.config.mesh.dp_shard == -1:
        del settings["mesh.dp_shard"]  # fills the world
    settings["train.tokens_per_step"] = asked.tokens
    flags = []
    for key, value in settings.items():
        if before.get(key) != value:
            flags += [f"--{key.replace('_', '-')}", flag_text(value)]
    where = torchrun_words(asked.world, asked.per_node, asked.config.preset)
    return ["torchrun", *where, "train.py", asked.config.preset, *flags]


def _flops(asked: Asked, candidate: Candidate) -> tuple[float, float]:
    """Return the FLOPs of a rank and step: forward and backward, and recomputation."""
    config, tokens = candidate.config, asked.tokens / asked.world
    plain = train_flops_per_token(config.model, config.data.seq_len)
    return plain * tokens, candidate.policy.replayed * tokens


def _content(
    asked: Asked, found: Plan, shown: Sequence[Candidate], times: Sequence[StepTime], cost: Cost
) -> dict[str, Any]:
    """Return the plan as JSON; all numbers are bytes, FLOPs, seconds, tokens or counts."""
    candidates = [_one(asked, candidate) for candidate in shown]
    for one, time in zip(candidates, times, strict=False):
        one["predicted"] = in_words(time) | cost.as_dict(time)
    return {
        "preset": asked.config.preset,
        "world": asked.world,
        "memory_bytes": asked.memory,
        "budget_bytes": asked.budget,
        "tokens_per_step": asked.tokens,
        "seq_len": asked.config.data.seq_len,
        "considered": found.considered,
        "legal": found.legal,
        "estimated": found.estimated,
        "fit": len(found.candidates),
        "out": found.out,
        "candidates": candidates,
        "nearest": _one(asked, found.nearest) if found.nearest else None,
    }


def _one(asked: Asked, candidate: Candidate) -> dict[str, Any]:
    sent = traffic(candidate.config, asked.world, candidate.rank)
    detail = detail_of(candidate.config, asked.world, candidate.rank)
    plain, again = _flops(asked, candidate)
    return {
        "knobs": candidate.knobs(),
        "policy": candidate.policy.name,
        "checkpointing": candidate.checkpointing,
        "device_tokens": candidate.device_tokens,
        "score": candidate.score._asdict(),
        "rank": candidate.rank,
        "estimate": candidate.estimate.as_json() | {"detail": detail},
        "traffic_bytes": sent.as_dict(),
        "flops": {"step": plain, "repeated": again},
        "command": quoted(launch_words(asked, candidate)),
    }


def _show(
    asked: Asked,
    found: Plan,
    shown: Sequence[Candidate],
    times: Sequence[StepTime],
    why: Sequence[str],
) -> None:
    from rich.console import Console

    from parallel.simulate.traced_kernels import untraced_words

    console = Console(width=columns(), highlight=False, soft_wrap=False)
    for line in _heading(asked, found):
        console.print(line, markup=False)
    if not shown:
        for line in _nothing_fits(asked, found):
            console.print(line, markup=False, style="red")
        return
    sent = [traffic(one.config, asked.world, one.rank) for one in shown]
    table = _table(asked, shown, sent, times)
    most = console.measure(table, options=console.options.update(max_width=1000)).maximum
    Console(width=max(columns(), most), highlight=False).print(table)  # its cells stay whole
    console.print(_legend(shown))
    axes = (f"{axis}\u00a0{readable(size)}" for axis, size in sent[0].by_axis.items())
    words = f"#1 sends a step: {', '.join(axes) or 'nothing'}"
    for line in wrapped(words.replace(" GiB", "\u00a0GiB")):
        console.print(line.replace("\u00a0", " "), markup=False)
    note = untraced_words(as_planned(shown[0].config))
    for line in (*why, *(wrapped(note) if note else ())):
        console.print(line, markup=False)
    by_memory = asked.world > asked.per_node and not times
    rules = " by rules of memory (--gpu orders by predicted seconds)" if by_memory else ""
    console.print(f"\nbest{rules}:", markup=False)
    for line in node_lines(asked.world, asked.per_node):
        console.print(f"  {line}", markup=False)
    for line in command_lines(launch_words(asked, shown[0])):
        console.print(f"  {line}", markup=False, soft_wrap=True)


def _heading(asked: Asked, found: Plan) -> list[str]:
    """Return lines with the input, and the numbers of rejected configurations by reason."""
    seq, number = asked.config.data.seq_len, f"{len(found.candidates):,}"
    fit = f"the {number} fastest that fit are shown" if found.out["slower"] else f"{number} fit"
    fit += "; out are" if any(found.out.values()) else ""
    lines = [
        *wrapped(
            f"{asked.config.preset} on {asked.world} device(s) of {readable(asked.memory)}, of "
            f"which {readable(asked.budget)} may be used"
        ),
        *(line for text in fp8_line(asked.config) for line in wrapped(text)),
        *wrapped(
            f"{asked.tokens:,} tokens a step in rows of {seq:,}: {found.considered:,} "
            f"configurations, {fit}"
        ),
    ]
    width = max(len(f"{n:,}") for n in found.out.values())
    for name, n in found.out.items():
        lines += labelled(f"  {n:>{width},}", REASONS[name], width + 4) if n else []
    return lines


def _refused(asked: Asked, found: Plan) -> ConfigError:
    """Return the error if nothing is legal, or nothing fits, with the memory that would suffice."""
    if found.nearest is None:
        for error in broken(asked.config, asked.world):  # a given setting may be why
            if str(error).startswith(tuple(asked.given)):
                return error
        rule = f"no configuration of {asked.tokens} tokens a step is legal"
        fix = "write another --world or --tokens-per-step"
        return config_error("world", asked.world, rule, fix)
    point = found.nearest.estimate.point
    enough = math.ceil(point / (1 - asked.config.memory.headroom) / (1 << 20))
    rule = f"nothing fits: {readable(asked.budget)} may be used, {readable(point)} are needed"
    return config_error("memory", readable(asked.memory), rule, f"write --memory {enough}MiB")


def _nothing_fits(asked: Asked, found: Plan) -> list[str]:
    if found.nearest is None:
        return ["no configuration is legal"]
    lacks = found.nearest.estimate.point - asked.budget
    words = command_lines(launch_words(asked, found.nearest))
    return [
        *wrapped(f"nothing fits; nearest, {readable(lacks)} too large:"),
        *(f"  {w}" for w in words),
    ]


def _table(
    asked: Asked, shown: Sequence[Candidate], sent: Sequence[Traffic], times: Sequence[StepTime]
) -> Any:
    """Return a table of candidates; bars fill the width of the screen."""
    from rich.table import Table

    heading = ["#", "mesh", "rows", "acc", "recompute", "GiB", "sent", "repeats"]
    rows = [
        _cells(asked, number, one, moved)
        for number, (one, moved) in enumerate(zip(shown, sent, strict=True), 1)
    ]
    if times:
        heading += ["ms", "tok/s/GPU"]
        for row, time in zip(rows, times, strict=True):
            row += [f"{1e3 * time.step_s:,.0f}", f"{time.tokens_per_s:,.0f}"]
    others = sum(max(map(len, column)) + 1 for column in zip(heading, *rows, strict=True))
    size = max(BARS[0], min(BARS[1], columns() - others - 3))
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
    at = heading.index("GiB")
    for name in (*heading[:at], "fullest rank"[: size + 2], *heading[at:]):
        side = "left" if name in ("mesh", "recompute") or name[:4] == "full" else "right"
        table.add_column(name, justify=side, no_wrap=True)
    for one, cells in zip(shown, rows, strict=True):
        drawn = bar(one.estimate.components, asked.memory, asked.budget, size)
        table.add_row(*cells[:at], drawn, *cells[at:])
    return table


def _cells(asked: Asked, number: int, one: Candidate, moved: Traffic) -> list[str]:
    """Return a candidate's row without its bar."""
    plain, again = _flops(asked, one)
    return [
        str(number),
        mesh_words(one.config.mesh),
        str(one.config.train.device_batch_size),
        str(one.config.train.grad_accum),
        one.policy.name,
        f"{one.estimate.point / GIB:.1f}{' ?' if one.score.misfit else ''}",
        readable(moved.bytes),
        f"{again / plain:.1%}" if again else "-",
    ]


def bar(components: dict[str, int], memory: int, budget: int, size: int = 30) -> Text:
    """Return a device's memory as `size` letters, with `|` where the headroom begins.

    Args:
        components: bytes by component.
        memory: bytes of the device.
        budget: bytes that may be used.
        size: number of letters.
    """
    from rich.text import Text

    text, total, at = Text(), 0, 0
    for name, (letter, colour) in PAINT.items():
        total += components.get(name, 0)
        until = min(size, round(total / memory * size))
        text.append(letter * (until - at), colour)
        at = max(at, until)
    text.append("." * (size - at), "dim")
    line = min(size, round(budget / memory * size))
    return Text("[") + text[:line] + Text("|", "bold") + text[line:] + Text("]")


def _legend(shown: Sequence[Candidate]) -> Text:
    """Return the letters that occur."""
    from rich.text import Text

    used = {n for one in shown for n, size in one.estimate.components.items() if size}
    entries = [(letter, name, colour) for name, (letter, colour) in PAINT.items() if name in used]
    if any(one.score.misfit for one in shown):
        entries.append(("?", "unless routing is uneven", "bold"))
    text, width = Text("bar:"), len("bar:")
    for letter, name, colour in entries:
        words = name.replace("_", " ")
        if width + len(words) + 4 > columns():
            text.append("\n    ")
            width = 4
        text.append("  ").append(letter, colour).append(f" {words}")
        width += len(words) + 4
    return text
