"""Figures of the interactive pages, computed by the program and put into one HTML file each."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megacpp.cli.measure import coordinates
from megacpp.cli.speed import work_of
from megacpp.config.arguments import parse_run
from megacpp.config.schema import Config
from megacpp.memory.budget import as_planned
from megacpp.memory.estimate import NO_TENSOR, MemoryEstimate, estimate
from megacpp.memory.traffic import traffic
from megacpp.speed.hardware import Rates, gpu
from megacpp.speed.streams import COMPUTE
from megacpp.speed.timeline import BEHIND, timeline

HERE = Path(__file__).parent
FOLDER = HERE.parents[1] / "docs/pages"
WORLD, AXES = 8, ("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep")
# Preset, and settings of the meshes of eight ranks that a reader can choose.
MESHES = {
    "tiny": ("", "dp_replicate=2", "cp=2", "tp=2", "ep=4", "tp=2 ep=4", "pp=2"),
    "dense_110m": ("", "dp_replicate=2", "cp=2", "tp=2", "pp=2"),
}
STEPS = {"hybrid_400m": ("", "tp=2")}
# Kinds of bytes in the order of the page; all others are `other`.
KINDS = ("parameters", "gradients", "optimizer_state", "activations", "moe_routing", "head_loss",
         "workspace", "communication")  # fmt: skip


def config_of(preset: str, mesh: str) -> Config:
    """Return a preset on eight GPUs with as few microbatches as the mesh allows."""
    words = [preset, "--train.device=cuda", *(f"--mesh.{word}" for word in mesh.split())]
    if preset == "tiny":
        accum = 2 if "pp=" in mesh else 1
        return parse_run([*words, f"--train.grad-accum={accum}"], WORLD).config
    train = parse_run(words, WORLD).config.train
    fewest = 2 if "pp=" in mesh else 1
    tokens = train.tokens_per_step * fewest // train.grad_accum
    return parse_run([*words, f"--train.tokens-per-step={tokens}"], WORLD).config


def mesh_explorer() -> list[dict[str, Any]]:
    """Return what each rank of each mesh holds at its fullest moment, and sends in a step."""
    found = []
    for preset, meshes in MESHES.items():
        for mesh in meshes:
            config = config_of(preset, mesh)
            held: dict[int, MemoryEstimate] = {}
            ranks = []
            for rank in range(WORLD):
                stage = rank // (WORLD // config.mesh.pp)  # ranks of a stage hold the same bytes
                if stage not in held:
                    held[stage] = estimate(as_planned(config), WORLD, rank, detail=False)
                place = coordinates(config.mesh, WORLD, rank)
                at = {axis: [place[axis], getattr(config.mesh, axis)] for axis in AXES}
                sent = traffic(config, WORLD, rank).parts
                ranks.append(
                    {
                        "at": at,
                        "moment": held[stage].moment,
                        "held": by_kind(held[stage].components),
                        "sent": [[axis, what, size] for (axis, what), size in sorted(sent.items())],
                    }
                )
            found.append({"preset": preset, "mesh": words_of(config), "ranks": ranks})
    return found


def by_kind(components: dict[str, int]) -> dict[str, int]:
    """Return bytes of tensors by the page's kinds."""
    tensors = {kind: size for kind, size in components.items() if kind not in NO_TENSOR}
    found = {kind: components.get(kind, 0) for kind in KINDS}
    return found | {"other": sum(tensors.values()) - sum(found.values())}


def words_of(config: Config) -> str:
    """Return the axes of a mesh that have several ranks, with their degrees."""
    degrees = {axis: getattr(config.mesh, axis) for axis in AXES}
    return " x ".join(f"{axis} {degree}" for axis, degree in degrees.items() if degree > 1)


def step_timeline() -> list[dict[str, Any]]:
    """Return the predicted spans of a step by stream, with most bytes of each span of compute."""
    found = []
    for preset, meshes in STEPS.items():
        for mesh in meshes:
            config = config_of(preset, mesh)
            moments = estimate(as_planned(config), WORLD, detail=False).moments
            spans = timeline(work_of(config, WORLD, gpu("H100")), gpu("H100"), Rates())
            # Moments of a pass are named in the order of its spans.
            names = [name for name in moments if name.split()[0] in ("forward", "backward")]
            names = sorted(names, key=lambda name: name.startswith("backward"))
            rows, left, size = [], iter([*names, "optimizer step"]), 0
            for span in spans:
                behind = span.name in BEHIND  # in the memory of the last pass
                moment = next(left) if span.stream == COMPUTE and not behind else ""
                assert span.name.split()[0] == (moment or span.name).split()[0], (span, moment)
                size = moments[moment] if moment else size * behind
                start, end = (round(1e6 * at) for at in (span.start, span.start + span.seconds))
                rows.append([span.stream, moment or span.name, start, end, size])
            assert next(left, None) is None
            rest = moments["between steps"]
            found.append({"preset": preset, "mesh": words_of(config), "rest": rest, "spans": rows})
    return found


PAGES: dict[str, Callable[[], list[dict[str, Any]]]] = {
    "mesh-explorer": mesh_explorer,
    "step-timeline": step_timeline,
}


def page(name: str) -> str:
    """Return a page as HTML that needs no other file."""
    text = (HERE / f"{name}.html").read_text()
    text = text.replace("/*STYLE*/", (HERE / "style.css").read_text())
    return text.replace("/*DATA*/", json.dumps(PAGES[name](), separators=(",", ":")))
