"""Bytes that a forward saves for its backward, per block kind and group of tensors.

No model is built. Saved activations of each kind of block were traced once (traced.py); the sums
equal those of `megacpp activations`, which runs the model without values, byte for byte. As there,
the residual stream between two blocks belongs to the first of them, and tensors that all layers
share (ids, masks and places of documents) belong to none. (Activation memory.)
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

from megacpp.blocks.features import entrance, exit_parts
from megacpp.config.schema import Config
from megacpp.memory.block_trace import HOST, INPUT
from megacpp.memory.forms.local_shapes import LocalShapes
from megacpp.memory.forms.traced import TracedPart, layer_parts, outer_parts, traced_kept

Saved = tuple[TracedPart, bool]  # and whether its output waits on the host
RECEIVED = "received"  # the residual stream that another stage sent


@dataclass(frozen=True)
class PartBytes:
    """Saved activations of all layers of a kind.

    Attributes:
        name: a kind (`layer_kinds`), a kind with ` last`, `embed`, `norm`, `head`, or `received`
            (by a stage).
        layers: number of layers.
        groups: bytes by group of tensors.
        upper: bytes at most, for any choice of the routers.
        weights: bytes of weights put together for one product, on a mesh; besides `bytes`.
    """

    name: str
    layers: int
    groups: dict[str, int]
    upper: int
    weights: int

    @property
    def bytes(self) -> int:
        """Bytes of all groups."""
        return sum(self.groups.values())


@dataclass(frozen=True)
class ActivationBytes:
    """Saved activations of one microbatch on one rank.

    Attributes:
        parts: in the order in which a token first meets them.
        in_flight: microbatches that are kept at once, at most (None: not worked out).
    """

    parts: tuple[PartBytes, ...]
    in_flight: int | None

    @property
    def bytes(self) -> int:
        """Bytes of one microbatch; dropless experts get as many tokens each."""
        return sum(part.bytes for part in self.parts)

    @property
    def upper(self) -> int:
        """Bytes of one microbatch at most, for any choice of the routers."""
        return sum(part.upper for part in self.parts)

    @property
    def weights(self) -> int:
        """Bytes of copies of weights on a mesh, which don't depend on tokens."""
        return sum(part.weights for part in self.parts)

    def as_dict(self) -> dict[str, Any]:
        """Return bytes by part, for JSON."""
        return {
            "bytes": self.bytes,
            "upper_bytes": self.upper,
            "weights_bytes": self.weights,
            "microbatches_in_flight": self.in_flight,
            "parts": [
                {"name": p.name, "layers": p.layers, "bytes": p.bytes, "groups": dict(p.groups)}
                for p in self.parts
            ],
        }


def activation_bytes(config: Config, size: int = 1, rank: int = 0) -> ActivationBytes:
    """Return activations that one microbatch saves on a rank; `config` is for `size` ranks.

    Precision `auto` is bf16, as on a GPU, unless the run is on a CPU. Kernels are those of a CPU,
    as in
    `megacpp activations`: a GPU pads the slots of experts less, and keeps keys and values for every
    query head where rows are packed (megacpp/kernels/attention/causal.py).
    """
    own, most = (LocalShapes.on_rank(config, size, rank, most) for most in (False, True))
    alike: dict[str, Counter[Saved]] = {}  # a kind's layers, by their places in groups
    found = _parts(own)
    for part, behind in zip(found, [*found[1:], None], strict=True):
        taken = behind is not None and (INPUT in _saved(own, behind) or not behind.reached)
        alike.setdefault(part.shown, Counter())[part, taken] += 1
    parts = []
    for shown, layers in alike.items():
        groups, at_most = (_together(share, layers) for share in (own, most))
        weights = groups.pop("weights", 0)
        upper = sum(at_most.values()) - weights
        parts.append(PartBytes(shown, layers.total(), groups, upper, weights))
    return ActivationBytes(tuple(parts), _in_flight(config, own))


def _together(own: LocalShapes, parts: Counter[Saved]) -> dict[str, int]:
    """Return bytes by group, over the given number of each part."""
    groups: Counter[str] = Counter()
    for (part, taken), layers in parts.items():
        for group, each in _saved(own, part).items():
            if group not in (HOST, INPUT) and not (taken and group == "residual"):
                groups[group] += layers * each
    return dict(+groups)


def _saved(own: LocalShapes, part: TracedPart) -> dict[str, int]:
    return {RECEIVED: own.stream_bytes} if part.kind == RECEIVED else traced_kept(own, part)


def _parts(own: LocalShapes) -> list[TracedPart]:
    """Return the parts of this rank in order, with what each stage receives."""
    model, mesh = own.config.model, own.config.mesh
    layers, outer = layer_parts(own.config), outer_parts(model)
    first, last = ([outer[name] for name in of(model)] for of in (entrance, exit_parts))
    if mesh.pp == 1:
        return [*first, *layers, *last]
    found = [TracedPart((RECEIVED,)) for stage in own.stage_parts if not stage.first]
    for stage in own.stage_parts:
        found += first if stage.first else []
        found += [layers[layer] for layer in stage.layers]
        found += last if stage.last else []
    return found


def _in_flight(config: Config, own: LocalShapes) -> int | None:
    mesh, total = config.mesh, config.train.grad_accum
    if mesh.pp == 1:
        return 1
    return {"1f1b": min(total, mesh.pp - own.stage), "gpipe": total}.get(mesh.pp_schedule)
