"""Pictures of a run: backends, its seconds, decoding states, waits of a hang, products, pieces."""

from __future__ import annotations

import tempfile
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import torch

from bench.pictures.charts import Axes
from bench.pictures.svg import Drawing
from megacpp.cli.measure import coordinates
from megacpp.config.arguments import parse_run
from megacpp.config.presets import tiny
from megacpp.config.schema import MeshConfig
from megacpp.kernels.host import Host
from megacpp.kernels.selection import OPERATIONS, choose
from megacpp.lessons.models import small
from megacpp.model.decoding import prefill
from megacpp.model.hybrid import HybridLM
from megacpp.model.init import initialise
from megacpp.run.blame import blame
from megacpp.run.goodput import FILE, Goodput, account, read_starts
from megacpp.speed.hardware import Rates, gpu
from megacpp.speed.operators import Product, product_seconds
from megacpp.speed.ours import step_work

VERSIONS = {"torch": "2.13.0", "triton": "3.7.1", "tilelang": "0.1.8", "einops": "0.8.2",
            "mamba-ssm": "2.3.2.post1"}  # fmt: skip
HOSTS = {
    "a CPU": Host("cpu", "fp32", packages={"torch": "2.13.0"}),
    "an H200": Host("cuda", "bf16", (9, 0), "NVIDIA H200", VERSIONS),
    "a GTX 1080": Host("cuda", "fp32", (6, 1), "NVIDIA GeForce GTX 1080", VERSIONS),
}


def backends_of_hosts() -> Drawing:
    """Draw which backend of each operation `tiny` takes on three machines, and why not others."""
    drawing = Drawing(
        760, "Backends that tiny takes on three machines, and why it passes others over"
    )
    drawing.legend(200, 12, [(3, "taken"), (4, "can't run"), ("off", "not asked")])
    columns = {
        name: (200.0 + i * 184, choose(tiny(), host))
        for i, (name, host) in enumerate(HOSTS.items())
    }
    for name, (x, _) in columns.items():
        drawing.text(x, 48, name, "head")
    y = 56.0
    for operation in next(iter(columns.values()))[1]:
        drawing.text(14, y + 14, operation.replace("_", " "), "head")
        for backend in OPERATIONS[operation].backends:
            drawing.text(192, y + 14, backend.name, "note", end=True)
            for x, found in columns.values():
                selected = found[operation]
                why = selected.passed_over.get(backend.name, "").split(" (")[0]
                kind = 3 if backend.name == selected.backend else 4 if why else "off"
                drawing.rect(x, y, 180, 17, kind, why)
            y += 19
        y += 8
    return drawing


def seconds_of_a_run() -> Drawing:
    """Draw the seconds of a run that was killed and started again, by class."""
    clock = [0.0]
    with tempfile.TemporaryDirectory() as folder:
        for first, last, kill in ((0, 5, True), (2, 6, False)):
            goodput = Goodput(
                Path(folder), began=clock[0], now=lambda: clock[0], wall=lambda: clock[0]
            )
            clock[0] += 30
            for step in range(first, last):
                goodput.step(step)
                clock[0] += 10
                if step == 1:
                    with goodput.span("checkpoint"):
                        clock[0] += 4
            if kill:
                clock[0] += 60
            else:
                goodput.close()
        starts = read_starts(Path(folder) / FILE)
    told = account(starts)
    fills = {"step": 3, "checkpoint": 2, "idle": 8, "restart_lost": 1}
    left, scale = 96.0, 640 / told.wall_s
    drawing = Drawing(760, "Seconds of a run that was killed and started again, by class")
    names = (("step", "step, kept"), ("checkpoint", "checkpoint"), ("idle", "imports, weights"),
             ("restart_lost", "lost by the kill"))  # fmt: skip
    drawing.legend(left, 12, [(fills[name], words) for name, words in names])
    for number, start in enumerate(starts):
        y, at = 44.0 + number * 34, start.began
        drawing.text(14, y + 16, f"start {number + 1}", "head")
        later = [other.first_step for other in starts[number + 1 :]]
        for line in start.lines:
            steps = line.get("steps", [-1])
            again = any(first is not None and steps[0] >= first for first in later)
            for name, spent in line["s"].items():
                own = "idle" if name == "startup" else name
                kind = fills["restart_lost" if again else own]
                words = f"{steps[0] + 1}" if name == "step" else ""
                drawing.rect(left + at * scale, y, spent * scale - 1, 24, kind, words)
                at += spent
        if number + 1 < len(starts):
            end = starts[number + 1].began
            kind = fills["restart_lost"]
            drawing.rect(left + at * scale, y, (end - at) * scale - 1, 24, kind, "until the start")
    drawing.text(14, 138, "together", "head")
    x = left
    for name, _ in names:
        wide = told.seconds[name] * scale
        words = f"{told.seconds[name]:.0f} s" if wide > 30 else ""
        drawing.rect(x, 122, wide - 1, 24, fills[name], words)
        x += wide
    drawing.text(left, 164, f"goodput {told.goodput:.0%} of {told.wall_s:.0f} s", "note")
    return drawing


def decoding_states() -> Drawing:
    """Draw the bytes that each kind of block keeps while a text grows."""
    kinds = {"A": "s1", "A, window 64": "s2", "M": "s0", "R": "s3", "G": "edge"}
    lengths = [1, *range(16, 257, 16)]
    lines: dict[str, list[tuple[float, float]]] = {}
    for name in kinds:
        model_config = small(name[0])
        if "window" in name:
            attention = replace(model_config.attention, window=64)
            model_config = replace(model_config, attention=attention)
        model = HybridLM(model_config).eval()
        initialise(model, model.init_rules(), seed=0)
        lines[name] = []
        for tokens in lengths:
            with torch.no_grad():
                _, state = prefill(model, torch.ones(1, tokens, dtype=torch.int64))
            lines[name].append((tokens, held(state) / 1024))
    drawing, ticks = (
        Drawing(760, "Decoding state of each kind of block, by tokens of the text"),
        range(0, 33, 8),
    )
    axes = Axes(drawing, 60.0, 62.0, 670.0, 230.0, (0, lengths[-1]), (0, ticks[-1]))
    axes.frame(range(0, lengths[-1] + 1, 64), ticks, ("tokens of the text", "KiB"))
    for name, kind in kinds.items():
        axes.line(lines[name], kind)
    drawing.legend(60, 12, [(kind, name) for name, kind in kinds.items()])
    return drawing


def held(state: Any) -> int:
    """Return the bytes of all tensors in a decoding state."""
    if isinstance(state, torch.Tensor):
        return state.nbytes
    if isinstance(state, (list, tuple)):
        return sum(map(held, state))
    if is_dataclass(state):
        return sum(held(getattr(state, one.name)) for one in fields(state))
    return 0


def waits_of_a_hang() -> Drawing:
    """Draw how the wait for one rank spreads over a mesh of eight, collective by collective."""
    mesh, size, late, stops = MeshConfig(dp_shard=4, tp=2), 8, 5, 2
    where = [coordinates(mesh, size, rank) for rank in range(size)]
    axes = ("tp", "dp_shard") * 3
    begun = [0] * size  # collectives that each rank has begun

    def members(rank: int, number: int) -> list[int]:
        axis = axes[number - 1]
        other = "dp_shard" if axis == "tp" else "tp"
        return [one for one in range(size) if where[one][other] == where[rank][other]]

    def goes_on(rank: int) -> bool:
        done = begun[rank] == 0 or all(begun[m] >= begun[rank] for m in members(rank, begun[rank]))
        return done and begun[rank] < len(axes) and (rank, begun[rank]) != (late, stops)

    while moving := [rank for rank in range(size) if goes_on(rank)]:
        for rank in moving:
            begun[rank] += 1
    states: dict[int, dict[str, Any]] = {}
    for rank in range(size):
        number = begun[rank]
        group = members(rank, number)
        waits = [] if rank == late else [
            {"seq": number, "key": f"{axes[number - 1]} {group}", "group": axes[number - 1],
             "op": "all_reduce", "members": group}]  # fmt: skip
        reached = {f"{axes[n - 1]} {members(rank, n)}": n for n in range(1, number + 1)}
        states[rank] = {"waits": waits, "reached": reached, "step": 2, "phase": "step"}
    said = blame(states, range(size), {})
    drawing, left, cell = Drawing(760, "Waits that one late rank of eight causes"), 96.0, 66.0
    drawing.legend(left, 12, [(0, "complete"), (2, "waits in it"), (1, "did not arrive"),
                              ("off", "not begun")])  # fmt: skip
    for number, axis in enumerate(axes):
        drawing.text(left + number * cell, 48, axis, "note")
    for rank in range(size):
        y = 56.0 + rank * 28
        drawing.text(14, y + 17, f"rank {rank}", "head")
        behind = [m for m in members(rank, begun[rank]) if begun[m] < begun[rank]]
        for number in range(1, len(axes) + 1):
            waits_here = number == begun[rank] and bool(behind)
            stopped = rank == late and number == stops + 1
            kind = 2 if waits_here else 1 if stopped else 0 if number <= begun[rank] else "off"
            words = (
                f"for {', '.join(map(str, behind))}" if waits_here else "late" if stopped else ""
            )
            drawing.rect(left + (number - 1) * cell, y, cell - 3, 24, kind, words)
        if waits := states[rank]["waits"]:
            drawing.text(
                left + len(axes) * cell + 12, y + 17, f"group {waits[0]['members']}", "note"
            )
    drawing.text(left, 56 + size * 28 + 18, said.split(",")[0] + ".", "note")
    return drawing


def products_under_roofs() -> Drawing:
    """Draw the speed of each product of dense_110m on an H100, by its FLOPs for a byte."""
    card = gpu("H100")
    drawing = Drawing(760, "Products of dense_110m on an H100: FLOP/s by FLOPs for each byte")
    axes = Axes(drawing, 60.0, 62.0, 670.0, 260.0, (1, 10_000), (1, 2_000), log="xy")
    axes.frame(
        (1, 10, 100, 1000, 10_000), (1, 10, 100, 1000), ("FLOPs for each byte moved", "TFLOP/s")
    )
    ridge = card.bf16_tflops * 1e3 / card.hbm_gbs
    axes.line(
        [(1, card.hbm_gbs / 1e3), (ridge, card.bf16_tflops), (10_000, card.bf16_tflops)], "edge"
    )
    names: list[tuple[int | str, str]] = [("edge", "the larger floor")]
    for fill, flags in enumerate(("--train.device-batch-size 1 --data.seq-len 16", "")):
        config = parse_run(f"dense_110m --model.depth 2 {flags}".split(), 1).config
        tokens = config.train.device_batch_size * config.data.seq_len
        names.append((fill, f"{tokens:,} tokens at once"))
        work = step_work(config, 1, card.generation)
        ops = {op for block in work.blocks for op in (*block.forward, *block.backward)}
        for op in sorted(op for op in ops if isinstance(op, Product) and op.flops):
            moved = 2 * op.count * (op.m * op.k + op.n * op.k + op.m * op.n)
            axes.dot(
                op.flops / moved, op.flops / product_seconds(op, card, Rates()) / 1e12, fill, 6
            )
    drawing.legend(60, 12, names)
    return drawing
