"""Saved and needed bytes of one layer of each kind, shared by meshes of equal sizes.

A planner asks for thousands of meshes whose ranks have layers of a few sizes: saved activations and
working sets of a layer depend on `tp`, `cp`, `ep`, the microbatch and the policy, not on the number
of ranks that share its weights. No torch import here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from types import MappingProxyType

from megacpp.config.schema import (
    CheckpointingPolicy,
    Config,
    KernelsConfig,
    MeshConfig,
    ModelConfig,
    PrecisionConfig,
    TrainConfig,
)
from megacpp.memory.block_trace import HOST, INPUT
from megacpp.memory.forms.local_shapes import LocalShapes
from megacpp.memory.forms.peak_point import PeakPoint
from megacpp.memory.forms.traced import (
    TracedPart,
    traced_copies,
    traced_halves,
    traced_kept,
    traced_moments,
)
from megacpp.memory.forms.weights import COPY
from megacpp.model.pattern import ENTRANCE, EXIT

OUTER = (*ENTRANCE, *EXIT, COPY)
# Modules whose tensors say, or follow, which expert a token goes to.
ROUTING = ("mixer.router", "mixer.dispatch", "mixer.combine")


@dataclass(frozen=True, slots=True)
class Form:
    """Bytes of one part.

    Attributes:
        forward, backward: fullest moments.
        kept: bytes saved for the backward, by simulation.KEPT.
        copies: bytes of copies of weights that are saved, and that only autocast remembers.
        away: bytes that wait on the host.
        takes: bytes of the residual stream in front, if they wait on the host too.
        halves: fullest moments of the two walks of a split backward, and bytes between them.
    """

    forward: tuple[PeakPoint, ...]
    backward: tuple[PeakPoint, ...]
    kept: tuple[int, int, int]
    copies: tuple[int, int]
    away: int = 0
    takes: int = 0
    halves: tuple[tuple[PeakPoint, ...], tuple[PeakPoint, ...], int] = ((), (), 0)


NO_FORM = Form((), (), (0, 0, 0), (0, 0))  # of an embedding that another part calls


def forms_of(
    own: LocalShapes, parts: tuple[tuple[TracedPart, bool], ...]
) -> Mapping[tuple[TracedPart, bool], Form]:
    """Return the forms of parts of a rank.

    Args:
        own: sizes of the rank.
        parts: each with whether it makes the tensors that all layers of a batch share.
    """
    config, mesh = own.config, own.config.mesh
    alike = replace(mesh, pp=1, dp_replicate=1, dp_shard=1, reshard="auto", pp_schedule="1f1b")
    train = TrainConfig(device=config.train.device, compile=config.train.compile)
    by = config.kernels, train, config.precision
    sizes = replace(own, config=SHAPELESS, stage=0)
    return _forms(config.model, alike, config.recompute, *by, sizes, parts)


@lru_cache(maxsize=4096)
def _forms(
    model: ModelConfig,
    mesh: MeshConfig,
    policy: CheckpointingPolicy,
    kernels: KernelsConfig,
    train: TrainConfig,
    precision: PrecisionConfig,
    sizes: LocalShapes,
    parts: tuple[tuple[TracedPart, bool], ...],
) -> Mapping[tuple[TracedPart, bool], Form]:
    config = Config(
        model=model, mesh=mesh, recompute=policy, kernels=kernels, train=train, precision=precision
    )
    own = replace(sizes, config=config)
    return MappingProxyType({(part, first): _form(own, part, first) for part, first in parts})


SHAPELESS = Config()  # stands for a configuration of which nothing is asked


def _form(own: LocalShapes, part: TracedPart, first: bool) -> Form:
    groups = traced_kept(own, part)
    away, takes, _ = (groups.pop(name, 0) for name in (HOST, INPUT, "weights"))
    kept = 0, 0, sum(groups.values())
    if part.is_layer:
        routing = sum(size for group, size in groups.items() if group.startswith(ROUTING))
        kept = kept[2] - routing, routing, 0
    forward = traced_moments(own, part, backward=False)
    if first:
        forward += traced_moments(own, part, backward=False, first=True)
    backward = traced_moments(own, part, backward=True)
    halves = traced_halves(own, part) if part.split else ((), (), 0)
    return Form(forward, backward, kept, traced_copies(own, part), away, takes, halves)
