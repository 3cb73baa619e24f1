"""Table of the meshes that tests compare with one process, by mesh axes and kind of block.

python -m tests.parallel.coverage
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from itertools import combinations

from megacpp.config.schema import MeshConfig, ModelConfig
from megacpp.lessons.mesh_models import models
from megacpp.model.pattern import block_letters
from tests.parallel import test_compositions, test_fsdp, test_tensor
from tests.parallel.test_compositions import AXES, axes_of

KINDS = ("A gqa", "A mla", "F", "M siso", "M mimo", "E", "R")


def kinds(model: ModelConfig) -> list[str]:
    """Return the kinds of a model's blocks."""
    mamba = "M mimo" if model.mamba3.mimo_rank > 1 else "M siso"
    names = {"A": "A " + model.attention.kind, "M": mamba}
    return [names.get(letter, letter) for letter in block_letters(model.pattern, model.depth)]


def proven() -> Mapping[tuple[tuple[str, ...], str], set[MeshConfig]]:
    """Return the meshes that each axis and pair of axes is compared on, by kind of block."""
    found: dict[tuple[tuple[str, ...], str], set[MeshConfig]] = defaultdict(set)
    for run in {*test_compositions.RUNS, *test_fsdp.RUNS, *test_tensor.RUNS}:
        for axes in (axes for n in (1, 2) for axes in combinations(axes_of(run), n)):
            for kind in kinds(models()[run.model]):
                found[axes, kind].add(run.mesh)
    return found


def table() -> str:
    """Return how many meshes each axis and pair of axes is compared on, by kind of block."""
    found = proven()
    lines = [" ".join([" " * 25, *(f"{kind:>6}" for kind in KINDS)])]
    for axes in (axes for n in (1, 2) for axes in combinations(AXES, n)):
        counts = (str(len(found[axes, kind]) or ".") for kind in KINDS)
        lines.append(" ".join([f"{' x '.join(axes):25}", *(f"{count:>6}" for count in counts)]))
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
