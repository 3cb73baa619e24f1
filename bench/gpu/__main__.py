"""Measure everything that needs a GPU, and store each row at once.

    python -m bench.gpu                             # all sections, to docs/gpu.json
    python -m bench.gpu --only models kernels       # some
    python -m bench.gpu --only models --of dense_1b
    python -m bench.gpu --tiny --device cpu         # the same code in a minute, for tests
    python -m bench.gpu --calibrate                 # this machine, for predictions of speed
    python -m bench.gpu --prepare                   # on any machine: what travels, to .gpu/
    python -m bench.gpu --plan first                # the first half hour (bench/gpu/plan.py)
    python -m bench.gpu --table                     # the section of docs/benchmarks.md
    python -m bench.gpu --table --write             # put it there

A row is in the file as soon as it is measured; what can't run is there with the reason; an error is
one line, and the next row follows. `--seconds` bounds the run: nothing new is begun after them.
"""

from __future__ import annotations

import argparse
import os
import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import torch
import torch.distributed as dist

from bench import parser_of
from bench.gpu.calibrate import calibrate
from bench.gpu.carried import CARRIED, prepare
from bench.gpu.estimator import estimator
from bench.gpu.kernels import kernels
from bench.gpu.models import models
from bench.gpu.plan import PLANS, PLANTED, SCALE, run_plan
from bench.gpu.profile import profile
from bench.gpu.recompute import recompute
from bench.gpu.record import GpuRecord, read
from bench.gpu.tables import HEADING, as_markdown, write_section
from megacpp.config.schema import Config
from megacpp.errors import ConfigError
from megacpp.launch.gate import set_allocator
from parallel.start import pick_device, world_size

STORED = Path(__file__).parents[2] / "docs/gpu.json"
SECTIONS = {
    "kernels": kernels,
    "models": models,
    "estimator": estimator,
    "recompute": recompute,
    "profile": profile,
}


def main(argv: list[str] | None = None) -> int:
    """Exit code 0: everything that was begun came to its end; 1: something failed or was left."""
    parser = parser_of(__doc__)
    parser.add_argument("--only", nargs="+", choices=SECTIONS, help="sections (default: all)")
    parser.add_argument("--of", nargs="+", default=[], help="names within the sections")
    parser.add_argument("--out", type=Path, help=f"JSON to write (default {STORED})")
    parser.add_argument("--add", action="store_true", help="keep rows of other sections in it")
    parser.add_argument("--seconds", type=float, default=3600.0, help="of the run (default 3600)")
    parser.add_argument("--device", default="auto", choices=["auto", "cpu", "cuda"])
    parser.add_argument("--tiny", action="store_true", help="small shapes, to try the code")
    parser.add_argument("--table", action="store_true", help="print the stored run, run nothing")
    parser.add_argument("--write", action="store_true", help="with --table: to docs/benchmarks.md")
    parser.add_argument("--prepare", action="store_true", help="fetch what travels to a GPU")
    parser.add_argument("--plan", choices=PLANS, help="measure in processes with time limits")
    parser.add_argument("--call", nargs="+", default=[], help="letters of the plan's calls")
    parser.add_argument("--cells", nargs="+", default=[], help="names of the plan's cells")
    parser.add_argument("--carried", type=Path, default=CARRIED, help="folder that travelled")
    parser.add_argument("--rehearse", action="store_true", help="the plan on a CPU, with faults")
    parser.add_argument("--calibrate", action="store_true", help="measure what speed depends on")
    options = parser.parse_args(argv)
    path = options.out or STORED
    if options.table:
        if options.write:
            write_section(STORED.with_name("benchmarks.md"), HEADING, as_markdown(read(path)))
        else:
            print(as_markdown(read(path)))
        return 0
    if options.prepare:
        wheels = prepare()
        print(f"{len(wheels)} wheels, {sum(w.stat().st_size for w in wheels):,} bytes")
        return 0
    try:
        device = (_asked_apart if options.plan else pick_device)(options.device)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    if options.calibrate:
        if together := world_size() > 1:
            dist.init_process_group("gloo")
        found = calibrate(device, options.out, options.tiny)
        speed = found["figures"]
        if together:
            rank = dist.get_rank()
            dist.destroy_process_group()
            if rank:
                return 0
        print(
            f"{found['device']}: products {max(row[-1] for row in found['products']):.3g} TFLOP/s, "
            f"memory {speed['hbm_gbs']:.3g} GB/s, an operator {speed['launch_us']:.2g} us"
        )
        print(f"written to {found['file']}")
        if options.tiny:
            print("warning: of small products alone, so predictions by this file will be off")
        return 0
    if device.type == "cpu" and not (options.tiny or options.rehearse):
        print("error: no GPU here. Fix: --tiny --device cpu tries the code.", file=sys.stderr)
        return 2
    if options.plan:
        return _plan(options, device)
    record = GpuRecord(path, device, options.seconds, options.tiny)
    if options.tiny and options.out is None:
        record.path = None  # figures of a CPU aren't a benchmark
    wanted = options.only or list(SECTIONS)
    if options.add:
        record.go_on()
    set_allocator(Config(), device)
    for name in wanted:
        SECTIONS[name](record, options.of)
    record.save()
    print(as_markdown(record.as_dict()))
    record.say(f"{len(record.rows)} rows, {len(record.skipped)} not run")
    return 0


def _asked_apart(wanted: str) -> torch.device:
    """Return `pick_device` of another process: a driver that was asked here is lost to forks."""
    with ProcessPoolExecutor(1, mp_context=get_context("fork")) as other:
        return other.submit(pick_device, wanted).result()


def _plan(options: argparse.Namespace, device: torch.device) -> int:
    """Run a plan, or rehearse it, and show what is in the record."""
    out = options.out or Path(os.environ.get("OUT", STORED.parent))
    calls = [c for c in PLANS[options.plan] if not options.call or c.name in options.call]
    named = {cell.name for call in calls for cell in call.cells}
    if not calls or (unknown := set(options.cells) - named):
        wrong = "call" if not calls else "cells"
        known = ", ".join(sorted(named) or [c.name for c in PLANS[options.plan]])
        given = " ".join(options.call if not calls else sorted(unknown))
        print(f"error: {wrong}={given}: not of the plan. Fix: of {known}.", file=sys.stderr)
        return 2
    faults, scale = (PLANTED, SCALE) if options.rehearse else ({}, 1.0)
    device = torch.device("cpu") if options.rehearse else device
    set_allocator(Config(), device)
    code = run_plan(calls, out, device, options.carried, options.cells, faults, scale)
    print(as_markdown(read(out / "gpu.json")))
    return code


if __name__ == "__main__":
    sys.exit(main())
