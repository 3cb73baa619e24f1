"""Size of the house: files and lines of a training step, of each block kind, and in all.

    python -m bench.house

A step is the loop's body of train.py on one rank of a fake process group, with real tensors of a
CPU: after a first step, the second one's calls of our own functions are followed.
"""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from bench import parser_of
from checkpointing.apply import ActivationCheckpointing
from megacpp.blocks.features import FEATURES
from megacpp.blocks.kinds import KINDS
from megacpp.config.arguments import parse_run
from megacpp.run.preemption import StopRequest
from optim.build import build_optimizer
from optim.clip import clip_gradients
from parallel.boundary import AccumulationBoundary
from parallel.build import build_model
from parallel.simulate.fake import fake_batch, fake_world

ROOT = Path(__file__).parents[1]
# Pattern and mesh of a step, and what it should stay under: files, lines in them, switches.
STEPS = {
    "dense": ("AF", "--mesh.tp 2 --mesh.dp_shard 2", (30, 5_000, None)),
    "hybrid": ("AEMR", "--mesh.tp 2 --mesh.dp_shard 2", (45, 8_000, 2_000)),
}
FEW_FILES, ALL_LINES = 12, 44_000  # of a kind outside its folders; of everything but tests


@dataclass(frozen=True)
class StepPath:
    """Our own code that a step runs through.

    Attributes:
        files: below the root, in the order in which they are met.
        lines: of these files, in all.
        switches: calls of a function in another file than the last call's.
    """

    files: tuple[str, ...]
    lines: int
    switches: int


def step_path(name: str) -> StepPath:
    """Return what the second step of a small model runs through.

    Args:
        name: of `STEPS`.
    """
    pattern, mesh, _ = STEPS[name]
    words = f"tiny --model.pattern {pattern} --model.depth {len(pattern)} --data.seq_len 64 {mesh}"
    config = parse_run(words.split(), 4).config
    with fake_world(config, 4) as world:
        torch.manual_seed(0)
        model = build_model(config, world, ActivationCheckpointing(config))
        optimizer = build_optimizer(model, config, world.holders)
        boundary = AccumulationBoundary(model, world, config, StopRequest())
        followed = _Calls()
        for step in range(2):
            batches = [fake_batch(config) for _ in range(max(1, config.train.grad_accum))]
            sys.setprofile(followed if step else None)
            try:
                sums = boundary.accumulate(batches, step)
                norm = clip_gradients(
                    model.parameters(),
                    config.optim.clip_norm,
                    copies=boundary.copies,
                    along=sums.along,
                )
                status = boundary.check_step(sums, norm)
                optimizer.step()
                optimizer.zero_grad()
                boundary.finish_step(status)
            finally:
                sys.setprofile(None)
    lines = sum(len((ROOT / file).read_text().splitlines()) for file in followed.files)
    return StepPath(tuple(followed.files), lines, followed.switches)


class _Calls:
    """Profile function that notes files of our own functions."""

    def __init__(self) -> None:
        self.files: dict[str, None] = {}
        self.switches, self._last = 0, ""
        self._ours: dict[str, str] = {}

    def __call__(self, frame: FrameType, event: str, arg: Any) -> None:
        if event != "call":
            return
        path = frame.f_code.co_filename
        if path not in self._ours:
            inside = path.startswith(f"{ROOT}/") and ".venv" not in path
            self._ours[path] = str(Path(path).relative_to(ROOT)) if inside else ""
        file = self._ours[path]
        if file and not file.startswith(("bench/", "parallel/simulate/")):
            self.files[file] = None
            self.switches += file != self._last
            self._last = file


def tracked(*patterns: str) -> list[str]:
    """Return tracked files of ours that aren't tests."""
    found = subprocess.run(
        ["git", "ls-files", *patterns], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return [file for file in found.stdout.split() if not file.startswith("tests/")]


def files_that_name(module: str, section: str) -> list[str]:
    """Return files outside the folders of a module's room and of a section's kernels."""
    own = module.split(".")[2]
    words = re.compile(rf"\bblocks[./]{own}\b|\bmodel\.{section}\b")
    folders = f"megacpp/blocks/{own}/", f"megacpp/kernels/{section}/", f"megacpp/kernels/{own}/"
    return [
        file
        for file in tracked("*.py")
        if not file.startswith((*folders, "bench/")) and words.search((ROOT / file).read_text())
    ]


def main() -> None:
    """Print every figure beside its aim."""
    parser_of(__doc__).parse_args()
    print(f"{'':24}{'here':>10}{'aim':>10}")
    for name, (_, _, aims) in STEPS.items():
        path = step_path(name)
        for what, here, aim in zip(
            ("files", "lines", "switches"),
            (len(path.files), path.lines, path.switches),
            aims,
            strict=True,
        ):
            print(f"{f'{name} step: {what}':24}{here:10,}{f'{aim:,}' if aim else '-':>10}")
    named = [(k, kind.build.__module__, kind.allocations.model) for k, kind in KINDS.items()]
    named += [(name, feature.lines.__module__, name) for name, feature in FEATURES.items()]
    for name, module, section in named:
        files = files_that_name(module, section)
        print(f"{f'files that name {name}':24}{len(files):10,}{FEW_FILES:10,}")
    lines = sum(len((ROOT / file).read_text().splitlines()) for file in tracked("*.py"))
    print(f"{'lines, tests apart':24}{lines:10,}{ALL_LINES:10,}")


if __name__ == "__main__":
    main()
