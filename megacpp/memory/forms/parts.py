"""Saved and needed bytes of one layer of each kind, shared by meshes of equal sizes.

A planner asks for thousands of meshes whose ranks have layers of a few sizes: saved activations and
working sets of a layer depend on `tp`, `cp`, `ep`, the microbatch and the policy, not on the number
of ranks that share its weights. No torch import here.
"""

from __future__ import annotations

from collections import Counter
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
    TrainConfig,
)
from megacpp.memory.forms import working
from megacpp.memory.forms.activation_share import Share
from megacpp.memory.forms.activations import layer_groups
from megacpp.memory.forms.moment import Moment
from megacpp.memory.forms.weights import COPY
from megacpp.model.pattern import ENTRANCE, EXIT

OUTER = (*ENTRANCE, *EXIT, COPY)
# Modules whose tensors say, or follow, which expert a token goes to.
ROUTING = ("mixer.router", "mixer.dispatch", "mixer.combine")


@dataclass(frozen=True, slots=True)
class Form:
    """Bytes of one part: a letter, a letter with ` last`, `embed`, `norm`, `head`, or `received`.

    Attributes:
        forward, backward: fullest moments.
        kept: bytes saved for the backward, by walk.KEPT.
        copies: bytes of copies of weights, for one product.
    """

    forward: tuple[Moment, ...]
    backward: tuple[Moment, ...]
    kept: tuple[int, int, int]
    copies: int


def forms_of(own: Share, names: tuple[str, ...]) -> Mapping[str, Form]:
    """Return the forms of parts of a rank, by name."""
    config, mesh = own.config, own.config.mesh
    alike = replace(mesh, pp=1, dp_replicate=1, dp_shard=1, reshard="auto", pp_schedule="1f1b")
    by = config.kernels, TrainConfig(device=config.train.device)
    sizes = replace(own, config=SHAPELESS, stage=0)
    return _forms(config.model, alike, config.recompute, *by, sizes, names)


@lru_cache(maxsize=4096)
def _forms(
    model: ModelConfig,
    mesh: MeshConfig,
    policy: CheckpointingPolicy,
    kernels: KernelsConfig,
    train: TrainConfig,
    sizes: Share,
    names: tuple[str, ...],
) -> Mapping[str, Form]:
    config = Config(model=model, mesh=mesh, recompute=policy, kernels=kernels, train=train)
    own = replace(sizes, config=config)
    return MappingProxyType({name: _form(own, name) for name in names})


SHAPELESS = Config()  # stands for a configuration of which nothing is asked


def _form(own: Share, name: str) -> Form:
    groups = Counter(layer_groups(own, name))
    copies = groups.pop("weights", 0)
    if name in OUTER:
        kept = 0, 0, sum(groups.values())
    else:
        routing = sum(size for group, size in groups.items() if group.startswith(ROUTING))
        kept = sum(groups.values()) - routing, routing, 0
    forward, backward = working_sets(own, name)
    return Form(forward, backward, kept, copies)


def working_sets(own: Share, name: str) -> tuple[tuple[Moment, ...], tuple[Moment, ...]]:
    """Return the fullest moment of a part in the forward and in the backward.

    One process gets two of the backward: if its gradients are added to others at once, another
    moment may be the fullest.
    """
    forward, backward = working.forward(own, name), working.backward(own, name)
    most = fullest(backward)
    if not own.parallel and backward:
        most += (max(backward, key=lambda m: m.added),)
    return fullest(forward), tuple(dict.fromkeys(most))


def fullest(moments: tuple[Moment, ...]) -> tuple[Moment, ...]:
    """Return the moment with most bytes, in a tuple; empty if there are no moments."""
    return (max(moments, key=lambda m: m.bytes),) if moments else ()
