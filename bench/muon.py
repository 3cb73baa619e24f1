"""Muon and AdamW on shards beside other implementations, on the same matrices in one run.

    python bench/muon.py                                  # every set on 4 ranks, then AdamW
    python bench/muon.py --ranks 2 --sets tiny mixed --rounds 8
    PYTHONPATH=path/to/dion python bench/muon.py          # with microsoft/dion's Muon

Ranks are forked gloo processes of one thread; every contender steps its own copy of the same
matrices, cut by rows, with the same gradients, in turns. Columns of the first table:

    CPU ms    of all threads of all ranks for one step, the least of all rounds, without what a step
              that does nothing takes between the same barriers; wall ms likewise
    ratio     to ours; more than 1 is slower than ours
    calls     collectives of a step
    sent      MiB that a rank sends, the mean over ranks, and over P, the matrices in bf16
    FLOPs     of matrix products on all ranks / of Newton-Schulz of every matrix once
    busiest   FLOPs of the busiest rank / an equal share
    own, ours largest difference of a parameter after 3 steps to the same optimizer, and to ours, in
              one process; 0 is equal to the bit

Below it: one process without ranks, and every target with what was measured. The last table is of
AdamW on shards: ours, torch's fused one on the same DTensors, and the kernel on lists made once.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from bench import muon_contenders as contenders
from bench import parser_of
from bench.muon_contenders import Build, Contender
from bench.muon_log import StepLog
from megacpp.torch_extras import local_part
from optim.newton_schulz import newton_schulz_flops
from tests.ranks import run_ranks

AGREE_STEPS = 3  # with a new gradient each, before the measured rounds
TIMEOUT_S = 3600.0
IDLE = "nothing"
Seconds = dict[str, list[tuple[float, float]]]  # CPU and wall of each round, by contender
Values = list[list[Tensor]]  # the weights, then the gradients of each step


def say(text: str) -> None:
    """Print progress to the error stream."""
    print(text, file=sys.stderr, flush=True)


def values_of(shapes: Sequence[tuple[int, ...]], steps: int = AGREE_STEPS) -> Values:
    """Return random weights and the gradients of `steps` steps."""
    g = torch.Generator().manual_seed(0)
    return [[torch.randn(s, generator=g) * 0.02 for s in shapes] for _ in range(1 + steps)]


def rounds_of(
    steps: Mapping[str, Callable[[], Any]], rounds: int, meet: Callable[[], Any]
) -> Seconds:
    """Return CPU and wall seconds of each round of each contender, and of an idle step.

    Contenders take turns; the first one rotates.
    """
    steps = {**steps, IDLE: lambda: None}
    taken: Seconds = {name: [] for name in steps}
    names = list(steps)
    for number in range(rounds):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            meet()
            cpu, wall = time.process_time(), time.perf_counter()
            steps[name]()
            meet()
            taken[name].append((time.process_time() - cpu, time.perf_counter() - wall))
    return taken


def least(ranks: Sequence[Seconds]) -> dict[str, tuple[float, float]]:
    """Return summed CPU seconds and the slowest rank's wall seconds, least of all rounds."""
    found: dict[str, tuple[float, float]] = {}
    for name in ranks[0]:
        turns = list(zip(*(taken[name] for taken in ranks), strict=True))
        cpu = min(sum(cpu for cpu, _ in turn) for turn in turns)
        found[name] = cpu, min(max(wall for _, wall in turn) for turn in turns)
    idle_cpu, idle_wall = found.pop(IDLE)
    return {name: (cpu - idle_cpu, wall - idle_wall) for name, (cpu, wall) in found.items()}


def in_one_process(
    builds: Mapping[str, Build], values: Values, rounds: int
) -> tuple[dict[str, list[Tensor]], dict[str, float]]:
    """Return each contender's first parameters, and CPU seconds of ours and torch's."""
    after: dict[str, list[Tensor]] = {}
    timed: dict[str, Callable[[], Any]] = {}
    for name, build in builds.items():
        contender = build([nn.Parameter(w.clone()) for w in values[0]])
        for grads in values[1:]:
            contender.feed(grads)
            contender.step()
        after[name] = [p.detach().clone() for p in contender.params]
        if name in ("ours", "torch.optim.Muon"):
            timed[name] = contender.step
    seconds = least([rounds_of(timed, rounds, lambda: None)])
    return after, {name: cpu for name, (cpu, _) in seconds.items()}


def _on_ranks(
    rank: int,
    size: int,
    builds: Mapping[str, Build],
    values: Values,
    after: Mapping[str, list[Tensor]],
    rounds: int,
) -> tuple[dict[str, dict[str, Any]], Seconds]:
    """Return what this rank counted for every contender, and its seconds.

    `after` are the parameters after the first steps in one process.
    """
    mesh = init_device_mesh("cpu", (size,))

    def shards(tensors: Sequence[Tensor]) -> list[Tensor]:
        return [distribute_tensor(t, mesh, [Shard(0)], src_data_rank=None) for t in tensors]

    grads = [shards(some) for some in values[1:]]
    found: dict[str, dict[str, Any]] = {}
    steps: dict[str, Callable[[], Any]] = {}
    for name, build in builds.items():
        contender = build([nn.Parameter(w.clone()) for w in shards(values[0])])
        for number, some in enumerate(grads):
            contender.feed(some)
            if number == 1:
                with StepLog() as log:
                    contender.step()
                found[name] = {"calls": log.count(), "sent": log.sent, "flops": log.flops}
            else:
                contender.step()
        for column, whom in (("own", name), ("ours", "ours")):
            found[name][column] = _difference(contender, shards(after[whom]))
        steps[name] = contender.step
        if rank == 0:
            say(f"  {name}: {AGREE_STEPS} steps, {found[name]['calls']} collectives each")
    if rank == 0:
        say(f"  {rounds} rounds of {', '.join(steps)}")
    return found, rounds_of(steps, rounds, dist.barrier)


def _difference(contender: Contender, reference: Sequence[Tensor]) -> float:
    pairs = zip(contender.params, reference, strict=True)
    parts = [(local_part(p.detach()), local_part(r)) for p, r in pairs]
    apart = [float((p - r).abs().max()) for p, r in parts if p.numel()]
    return torch.tensor([0.0, *apart]).max().item()  # NaN if one is; Python's max may drop it


def _measure_set(
    kinds: Sequence[tuple[int, tuple[int, ...]]],
    builds: Mapping[str, Build],
    size: int,
    rounds: int,
) -> dict[str, Any]:
    """Measure every contender on one set, in one process and on ranks."""
    shapes = contenders.shapes_of(kinds)
    values = values_of(shapes)
    load = [os.getloadavg()[0]]
    after, single = in_one_process(builds, values, rounds)
    ranks = run_ranks(_on_ranks, size, builds, values, after, rounds, timeout_s=TIMEOUT_S)
    load.append(os.getloadavg()[0])
    ideal = sum(newton_schulz_flops(*s[-2:]) * (s[0] if len(s) == 3 else 1) for s in shapes)
    parameters = sum(t.numel() for t in values[0])
    rows: dict[str, dict[str, Any]] = {}
    for name, (cpu_s, wall_s) in least([seconds for _, seconds in ranks]).items():
        of_ranks = [found[name] for found, _ in ranks]
        flops = [found["flops"] for found in of_ranks]
        rows[name] = {
            "cpu_s": cpu_s,
            "wall_s": wall_s,
            "calls": max(found["calls"] for found in of_ranks),
            "sent_bytes": sum(found["sent"] for found in of_ranks) / size,
            "flops": sum(flops) / ideal,
            "busiest": max(flops) * size / ideal,
            "own": max(found["own"] for found in of_ranks),
            "ours": max(found["ours"] for found in of_ranks),
        }
    wire = 2 * (size - 1) / size**2 * parameters * 4  # torchtitan: there and back, in fp32
    return {
        "parameters": parameters,
        "load": load,
        "rows": rows,
        "single_cpu_s": single,
        "torchtitan_sent_bytes": 0.0 if len(shapes[0]) == 3 else wire,
    }


def _adamw_on_ranks(rank: int, size: int, values: Values, rounds: int) -> tuple[Seconds, bool]:
    """Return seconds of our AdamW, torch's and the bare kernel, and whether bits agree."""
    mesh = init_device_mesh("cpu", (size,))
    weights, grads = (
        [distribute_tensor(t, mesh, [Shard(0)], src_data_rank=None) for t in some]
        for some in values
    )
    steps: dict[str, Callable[[], Any]] = {}
    optimizers: list[torch.optim.Optimizer] = []
    copies: list[list[nn.Parameter]] = []
    for name in ("ours", "torch fused", "bare kernel"):
        params = [nn.Parameter(w.clone()) for w in weights]
        for p, g in zip(params, grads, strict=True):
            p.grad = g
        copies.append(params)
        if name == "bare kernel":
            steps[name] = contenders.bare_adamw(params)
            continue
        build = contenders.ours_adamw if name == "ours" else contenders.torch_adamw
        optimizers.append(build(params))
        steps[name] = optimizers[-1].step
    rounds_of(steps, 2, dist.barrier)  # torch makes its state in the first step
    taken = rounds_of(steps, rounds, dist.barrier)
    equal = all(
        torch.equal(local_part(a), local_part(b))
        for p, q in zip(*copies[:2], strict=True)
        for a, b in (
            (p.detach(), q.detach()),
            *((optimizers[0].state[p][k], optimizers[1].state[q][k]) for k in _MOMENTS),
        )
    )
    return taken, equal


_MOMENTS = ("exp_avg", "exp_avg_sq")


def measure_adamw(
    kinds: Sequence[tuple[int, tuple[int, ...]]], size: int, rounds: int
) -> dict[str, Any]:
    """Measure the AdamW contenders on one set."""
    values = values_of(contenders.shapes_of(kinds), steps=1)
    ranks = run_ranks(_adamw_on_ranks, size, values, rounds, timeout_s=TIMEOUT_S)
    cpu = {name: cpu for name, (cpu, _) in least([seconds for seconds, _ in ranks]).items()}
    wanted = [
        ("CPU / torch.optim.AdamW's, fused", cpu["ours"] / cpu["torch fused"], 0.4),
        ("ranks whose bits differ from its", sum(not equal for _, equal in ranks), 0.0),
    ]
    return {"cpu_s": cpu, "targets": wanted}


def targets(name: str, found: Mapping[str, Any]) -> list[tuple[str, float, float]]:
    """Return the targets of one set: name, measured value, upper limit."""
    rows, single = found["rows"], found["single_cpu_s"]
    mine = rows["ours"]
    out = [
        ("largest difference to one process", mine["own"], 0.0),
        ("FLOPs / every matrix once", mine["flops"], 1.0),
        ("busiest rank / equal share", mine["busiest"], 1.05),
    ]
    if found["torchtitan_sent_bytes"]:
        ratio = mine["sent_bytes"] / found["torchtitan_sent_bytes"]
        out.append(("bytes / torchtitan's (formula)", ratio, 0.5))
    theirs = rows.get("torch.optim.Muon")
    if theirs and theirs["sent_bytes"]:
        ratio = mine["sent_bytes"] / theirs["sent_bytes"]
        out.append(("bytes / torch.optim.Muon's", ratio, 1 / 15))
    if "dion" in rows:
        dion = rows["dion"]
        if dion["sent_bytes"]:
            out.append(("bytes / dion's", mine["sent_bytes"] / dion["sent_bytes"], 1.0))
        limit = 0.9 if name == "mixed" else 1.0
        out.append(("CPU / dion's", mine["cpu_s"] / dion["cpu_s"], limit))
    if "torch.optim.Muon" in single:
        ratio = single["ours"] / single["torch.optim.Muon"]
        limit = 0.1 if name == "experts" else 1.0
        out.append(("CPU / torch.optim.Muon's, one process", ratio, limit))
    return out


def main() -> None:
    """Run the benchmark from the command line."""
    parser = parser_of(__doc__)
    builds, absent = contenders.present()
    names = list(contenders.SETS)
    parser.add_argument("--ranks", type=int, choices=[2, 4, 8], default=4, help="default 4")
    parser.add_argument("--sets", nargs="+", choices=names, default=names, help="default: all")
    parser.add_argument("--rounds", type=int, default=5, help="measured steps each (default 5)")
    parser.add_argument("--only", choices=["muon", "adamw"])
    options = parser.parse_args()
    torch.set_num_threads(1)
    found: dict[str, Any] = {"torch": torch.__version__, "ranks": options.ranks, "absent": absent}
    found |= {"cores": os.cpu_count(), "sets": {}, "adamw": {}}
    for name in options.sets if options.only != "adamw" else ():
        say(f"{name}, load {os.getloadavg()[0]:.1f}")
        kinds = contenders.SETS[name]
        found["sets"][name] = _measure_set(kinds, builds, options.ranks, options.rounds)
        found["sets"][name]["targets"] = targets(name, found["sets"][name])
    for name, kinds in contenders.ADAMW_SETS.items() if options.only != "muon" else ():
        say(f"AdamW, {name}, load {os.getloadavg()[0]:.1f}")
        found["adamw"][name] = measure_adamw(kinds, options.ranks, 4 * options.rounds)
    print("\n\n".join(_tables(found)))


def _tables(found: Mapping[str, Any]) -> list[str]:
    head = f"{found['ranks']} ranks of one thread on {found['cores']} cores, torch {found['torch']}"
    tables = ["\n".join([head, *(f"without {n}: {why}" for n, why in found["absent"].items())])]
    tables += [_set_table(name, result) for name, result in found["sets"].items()]
    if found["adamw"]:
        lines = [f"{'AdamW, CPU ms':14}{'ours':>9}{'fused':>9}{'bare':>9}{'fused / ours':>14}"]
        for name, result in found["adamw"].items():
            mine, theirs, bare = (1e3 * s for s in result["cpu_s"].values())
            lines.append(f"{name:14}{mine:9.2f}{theirs:9.2f}{bare:9.2f}{theirs / mine:14.2f}")
            lines += _verdicts(result["targets"])
        tables.append("\n".join(lines))
    return tables


def _set_table(name: str, found: Mapping[str, Any]) -> str:
    before, after = found["load"]
    parts = f"{found['parameters'] / 1e6:.1f}M parameters, load {before:.1f} to {after:.1f}"
    lines = [
        f"{name}: {parts}",
        f"{'':18}{'CPU ms':>10}{'ratio':>8}{'wall ms':>9}{'ratio':>8}{'calls':>7}{'sent':>9}"
        f"{'/ P':>7}{'FLOPs':>7}{'busiest':>9}{'own':>10}{'ours':>10}",
    ]
    mine, whole = found["rows"]["ours"], 2 * found["parameters"]
    for who, row in found["rows"].items():
        lines.append(
            f"{who:18}{1e3 * row['cpu_s']:10.1f}{row['cpu_s'] / mine['cpu_s']:8.2f}"
            f"{1e3 * row['wall_s']:9.1f}{row['wall_s'] / mine['wall_s']:8.2f}{row['calls']:7}"
            f"{row['sent_bytes'] / 2**20:9.2f}{row['sent_bytes'] / whole:7.3f}{row['flops']:7.2f}"
            f"{row['busiest']:9.3f}{row['own']:10.1e}{row['ours']:10.1e}"
        )
    if found["torchtitan_sent_bytes"]:
        wire = found["torchtitan_sent_bytes"]
        lines.append(f"{'torchtitan':18}{wire / 2**20:51.2f}{wire / whole:7.3f}  (formula)")
    single = ", ".join(f"{who} {1e3 * s:.1f}" for who, s in found["single_cpu_s"].items())
    lines.append(f"one process, CPU ms: {single}")
    return "\n".join(lines + _verdicts(found["targets"]))


def _verdicts(wanted: Sequence[tuple[str, float, float]]) -> list[str]:
    marks = ["reached" if found <= most * (1 + 1e-9) else "MISSED" for _, found, most in wanted]
    return [
        f"  {mark:8} {what}: {found:.4g}, at most {most:.3g}"
        for mark, (what, found, most) in zip(marks, wanted, strict=True)
    ]


if __name__ == "__main__":
    main()
