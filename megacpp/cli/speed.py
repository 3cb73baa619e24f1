"""Commands `megacpp speed` and `megacpp hardware`: predicted time of a step, figures of GPUs."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megacpp.cli.schedule import pipeline_actions
from megacpp.config.arguments import parse_run
from megacpp.config.environment import MOST_RANKS
from megacpp.config.schema import Config
from megacpp.config.settings import setting
from megacpp.errors import config_error
from megacpp.memory.budget import BRIEF, GIB, as_planned, fullest, words
from megacpp.memory.estimate import MemoryEstimate
from megacpp.report.files import LAUNCH, read_launch
from megacpp.speed.against import MeasuredRun, compare
from megacpp.speed.cost import Cost
from megacpp.speed.hardware import GpuSpec, Rates, gpu, gpus
from megacpp.speed.pipeline import KNOWN
from megacpp.speed.step import MEASURED, NOT_MODELLED, StepTime, StepWork
from megacpp.terminal.screen import check_writable, labelled, table, wrapped


@dataclass(frozen=True)
class SpeedArgs:
    """Cluster whose step is predicted."""

    world: int = setting(1, "Ranks of the mesh.", "ranks", at_least=1, at_most=MOST_RANKS)
    gpu: str = setting("H100", "Kind of GPU (`megacpp hardware` lists them).")
    per_node: int | None = setting(
        None, "GPUs of a machine (none: the usual node of --gpu).", "GPUs", at_least=1, at_most=1024
    )
    timeline: str = setting("", "File for one rank's predicted step: .json (Perfetto) or .svg.")
    against: str = setting("", "Folder of a run, whose steps and profile are compared.")
    price: float = setting(0.0, "Price of a GPU for an hour: what training costs.", at_least=0)
    json: bool = setting(False, "Print one JSON object instead of text.")


@dataclass(frozen=True)
class HardwareArgs:
    """Form of the output."""

    json: bool = setting(False, "Print one JSON object instead of text.")


def speed(args: SpeedArgs, given: list[str]) -> int:
    """Predicted time of an optimizer step by part, tokens a second and MFU, before it is run.

    Nothing but this machine is used: blocks are run once without values, then time is computed from
    figures of the GPU, its node and its network (`megacpp hardware`). A part called "exposed" is
    communication that no compute hides; "slowed by" is what kernels lose to communication beside
    them; "copied data" is what FSDP2 copies behind a gather and before a reduction, and gradients
    of microbatches that are added up. The range is that of errors on published steps of torchtitan
    and MosaicML to which nothing was fitted (bench/published.py); it holds 4 of 5.
    """
    machine = gpu(args.gpu)
    config = as_planned(parse_run([*given, "--train.device", "cuda"], args.world).config)
    check_fp8(config, machine)
    per_node = args.per_node or int(machine.per_node)
    found = predicted(config, args.world, machine, per_node)
    memory, cost = _memory_of(config, args.world, machine), Cost(0, args.price, args.world)
    measured = compare(found, Path(args.against)) if args.against else None
    if args.timeline:
        _draw(Path(args.timeline), work_of(config, args.world, machine, per_node), machine)
    if args.json:
        content: dict[str, Any] = {"preset": config.preset, "world": args.world}
        content |= {"gpu": machine.name, "mesh": asdict(config.mesh)}
        content["predicted"] = in_words(found) | cost.as_dict(found)
        content["memory"] = memory.as_json() if memory else None
        if measured:
            content["measured"] = asdict(measured) | {"largest": measured.largest}
        print(json.dumps(content, indent=2))
        return 0
    print("\n".join(_lines(config, args.world, machine, found)))
    if memory and memory.verdict != "fits":
        print("\n".join(wrapped(misfit_words(memory, machine))))
    if args.price:
        print("\n".join(["", *wrapped(cost.words(found))]))
    if measured:
        print("\n".join(["", *beside(measured), *_unlike(Path(args.against), args.world, machine)]))
    if args.timeline:
        print(f"\ntimeline of one rank: {args.timeline}")
    return 0


def _memory_of(config: Config, size: int, machine: GpuSpec) -> MemoryEstimate | None:
    """Return the memory of the fullest rank; None: that of the machine isn't known."""
    if not machine.hbm_gib:
        return None
    budget = int(machine.hbm_gib * GIB * (1 - config.memory.headroom))
    return fullest(config, size, budget, BRIEF)[1]


def misfit_words(memory: MemoryEstimate, machine: GpuSpec) -> str:
    """Return what a run needs that doesn't fit, or may not, as text."""
    risk = memory.verdict == "at_risk"
    needed = words(memory.upper if risk else memory.point)
    fits = "may not fit: it may need" if risk else "doesn't fit: it needs"
    return (
        f"memory: {fits} {needed} of {machine.hbm_gib:g} GiB, of which {words(memory.budget or 0)} "
        "may be used (megacpp plan finds what fits)"
    )


def _draw(path: Path, work: StepWork, machine: GpuSpec) -> None:
    """Write the timeline of a step.

    Raises:
        ConfigError: another ending, a folder that doesn't exist, or a file that can't be written.
    """
    from megacpp.speed.timeline import chrome, svg, timeline

    forms = {".json": chrome, ".svg": svg}
    if path.suffix not in forms or not path.parent.is_dir():
        rule = "must be a file .json or .svg in a folder that exists"
        raise config_error("timeline", path, rule, "write --timeline step.json")
    check_writable("timeline", path)
    path.write_text(forms[path.suffix](timeline(work, machine, Rates())))


def beside(measured: MeasuredRun) -> list[str]:
    """Return predicted and measured times as text."""
    ahead, real = measured.step_ms
    found = wrapped(
        f"measured ({measured.source}): {real:,.1f} ms, predicted {ahead:,.1f} ms, "
        f"{ahead / real - 1:+.0%}"
    )
    for name, mine, theirs in measured.largest:
        found += wrapped(f"  {name}: predicted {mine:,.1f} ms, measured {theirs:,.1f} ms")
    if not measured.parts:
        found += wrapped("  no profile: start the run with --run.profile 10:12 to see its parts")
    return found


def _unlike(folder: Path, size: int, machine: GpuSpec) -> list[str]:
    """Return a line about a run that was made on another kind of device, or on other ranks.

    Raises:
        DataError: its launch record is damaged.
    """
    launch = read_launch(folder / LAUNCH)
    device, ranks = launch.get("device") or machine.name, launch.get("world_size") or size
    if (device == "cpu") == machine.on_host and ranks == size:
        return []
    rule = f"measured on {ranks} x {device}, predicted for {size} x {machine.name}"
    return wrapped(f"  warning: {rule}: the difference says nothing about the prediction")


def check_fp8(config: Config, machine: GpuSpec) -> None:
    """Check that a GPU has the FP8 products of a configuration.

    Raises:
        ConfigError: it has none.
    """
    fp8 = config.precision.fp8
    if fp8 != "off" and not machine.on_host and not machine.fp8_tflops:
        rule = f"{machine.name} has no FP8 products"
        raise config_error("precision.fp8", fp8, rule, "use precision.fp8=off, or --gpu H100")


def predicted(config: Config, size: int, machine: GpuSpec, per_node: int = 8) -> StepTime:
    """Return the predicted step of a resolved configuration.

    Args:
        config: resolved for `size` ranks.
        size: number of ranks.
        machine: GPU of each.
        per_node: GPUs of a node.
    """
    from megacpp.speed.step import predict

    return predict(work_of(config, size, machine, per_node), machine, Rates())


def work_of(config: Config, size: int, machine: GpuSpec, per_node: int = 8) -> StepWork:
    """Return the work of a step of a resolved configuration.

    Args:
        config: resolved for `size` ranks.
        size: number of ranks.
        machine: GPU of each.
        per_node: GPUs of a node.
    """
    from megacpp.speed.ours import step_work

    mesh = config.mesh
    actions = pipeline_actions(config) if mesh.pp > 1 and mesh.pp_schedule not in KNOWN else ()
    return step_work(config, size, machine.generation, per_node, actions)


def in_words(found: StepTime) -> dict[str, Any]:
    """Return the keys of `predicted` in JSON; seconds, tokens and fractions."""
    least, most = (found.step_s * x for x in MEASURED)
    return {
        "step_s": found.step_s,
        "step_s_range": [least, most],
        "tokens_per_s_per_gpu": found.tokens_per_s,
        "mfu": found.mfu,
        "not_modelled": NOT_MODELLED,
        "parts_s": found.parts,
        "blocks_s": found.blocks,
        "launches": found.launches,
    }


def _lines(config: Config, size: int, machine: GpuSpec, found: StepTime) -> list[str]:
    """Return the prediction as text."""
    from parallel.simulate.traced_kernels import traced_words

    least, most = (found.step_s * x for x in MEASURED)
    rows = [["part of the step", "ms", "of the step"]]
    shares = sorted(found.parts.items(), key=lambda part: -part[1])
    rows += [[name, f"{1e3 * time:,.1f}", f"{time / found.step_s:.1%}"] for name, time in shares]
    kinds = [["forward and backward of", "launches", "ms"]]
    kinds += [
        [
            kind,
            f"{found.launches[kind]:,}" if found.launches.get(kind) else "-",
            f"{1e3 * time:,.1f}",
        ]
        for kind, time in found.blocks.items()
    ]
    gpus_ = "GPU" if size == 1 else "GPUs"
    return [
        *wrapped(f"{config.preset} on {size} {gpus_} ({machine.name}), predicted, not measured:"),
        *wrapped(f"step {found.step_s:.4g} s ({least:.4g} to {most:.4g}), "
                 f"{found.tokens_per_s:,.0f} tokens/s per GPU, MFU {found.mfu:.1%}"),
        "",
        *table(rows),
        "",
        *table(kinds),
        "",
        *wrapped(f"kernels: {traced_words(config)}"),
        *wrapped(f"not modelled: {NOT_MODELLED}"),
    ]  # fmt: skip


def hardware(args: HardwareArgs) -> int:
    """GPUs that the time model knows, with each figure's unit and source.

    Figures called "reached" are fractions of a peak that software reaches. "assumed" marks those
    that nobody measured.
    """
    if args.json:
        known = {n: {k: f._asdict() for k, f in gpu(n).figures.items()} for n in gpus()}
        print(json.dumps(known, indent=2))
        return 0
    for name in gpus():
        print(name)
        for key, figure in gpu(name).figures.items():
            words = f"{figure.value:g} {figure.unit}".strip()
            print("\n".join(labelled(f"  {key}", f"{words} ({figure.source})", 22)))
    return 0
