"""Bytes that a forward saves for its backward, per block kind and group of tensors.

No model is built. Saved activations of each kind of block were traced once (traced.py); the sums
equal those of `megacpp activations`, which runs the model without values, byte for byte. As there,
the residual stream between two blocks belongs to the first of them, and tensors that all layers
share (ids, masks and places of documents) belong to none. (Activation memory.)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from megacpp.config.schema import Config
from megacpp.memory.forms import activation_engram
from megacpp.memory.forms.activation_around import ngram, top
from megacpp.memory.forms.activation_share import Kept, Share, residual
from megacpp.memory.forms.fp8 import kept_product
from megacpp.memory.forms.mtp import handed_back, mtp
from megacpp.memory.forms.streams import Layered, kept_by_connection, layer_names
from megacpp.memory.forms.traced import traced_kept
from megacpp.memory.forms.weights import COPY
from megacpp.model.pattern import entrance, exit_parts
from megacpp.model.stages import stage_parts


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
        not_counted: settings that change saved activations and that the closed forms ignore.
    """

    parts: tuple[PartBytes, ...]
    in_flight: int | None
    not_counted: tuple[str, ...]

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
            "not_counted": list(self.not_counted),
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
    query head where rows are packed (megacpp/kernels/attention/reference.py).
    """
    own, most = (Share.of(config, size, rank, most) for most in (False, True))
    alike: dict[str, Counter[str]] = {}  # a kind's layers, by their places in groups
    for name in _names(own):
        alike.setdefault(Layered.of(name).shown, Counter())[name] += 1
    parts = []
    for shown, names in alike.items():
        groups, at_most = (_together(share, names) for share in (own, most))
        weights = groups.pop("weights", 0)
        upper = sum(at_most.values()) - weights
        parts.append(PartBytes(shown, names.total(), groups, upper, weights))
    return ActivationBytes(tuple(parts), _in_flight(config, own), not_counted(config))


def _together(own: Share, names: Counter[str]) -> dict[str, int]:
    """Return bytes by group, over the given number of layers of each name."""
    groups: Counter[str] = Counter()
    for name, layers in names.items():
        for group, each in layer_groups(own, name).items():
            groups[group] += layers * each
    return dict(groups)


def not_counted(config: Config) -> tuple[str, ...]:
    """Return settings in use that the closed forms ignore; `bytes` is as without them."""
    policy = config.recompute
    found = {
        "train.compile": config.train.compile != "off",
        "recompute.offload": policy.offload != "none",
        "model.attention.sparse.stage": config.model.attention.sparse.stage == "dense",
    }
    return tuple(name for name, is_set in found.items() if is_set)


def _names(own: Share) -> list[str]:
    """Return names of parts in order, one for every layer of this rank."""
    model, mesh = own.config.model, own.config.mesh
    blocks = layer_names(own.config)
    if mesh.pp == 1:
        return [*entrance(model), *blocks, *exit_parts(model)]
    stages = stage_parts(model, mesh, own.stage)
    found = ["received" for stage in stages if not stage.first]
    for stage in stages:
        found += entrance(model) if stage.first else []
        found += [blocks[layer] for layer in stage.layers]
        found += exit_parts(model) if stage.last else []
    return found


def layer_groups(own: Share, name: str) -> dict[str, int]:
    """Return bytes of one layer of a part, by group; empty groups are left out."""
    groups: Counter[str] = Counter()
    for group, numbers, each in _form(own, name):
        groups[group] += numbers * each
    return dict(+groups)


def _form(own: Share, name: str) -> list[Kept]:
    """Return the tensors that one layer of a part saves."""
    layer = Layered.of(name)
    kind, model = layer.kind, own.config.model
    if kind in ENDS:
        return list(ENDS[kind](own))
    letter, mixer = kind[0], kind.partition("+")[0]
    own, pieces = layer.sizes(own)
    kept = [residual(own)]
    if model.mhc.streams > 1:
        if layer.last or (layer.group is not None and not layer.group.closes):
            kept = []  # they run again, or only their mean is read
        kept += kept_by_connection(own, layer, pieces)
    if "+engram" in kind:
        kept += activation_engram.kept(own, pieces)
    kept.append(("hidden units", kept_product(own, letter, pieces), 1))
    return [*kept, *traced_kept(own, mixer, pieces)]


def embed(own: Share) -> Iterable[Kept]:
    """Yield the first residual stream; with a cut vocabulary, also the mask of this rank's ids."""
    model = own.config.model
    if not model.ngram.heads and model.mhc.streams == 1:  # which make others
        yield residual(own)
    if own.tp > 1:
        yield "words", own.tokens, 8 + 1


def received(own: Share) -> Iterable[Kept]:
    """Yield the residual stream that another stage sent."""
    model = own.config.model
    yield "residual", own.stream * model.mhc.streams * model.dim, own.compute


def spread(own: Share) -> Iterable[Kept]:
    """Yield copies of the first residual stream."""
    yield residual(own)


def collapse(own: Share) -> Iterable[Kept]:
    """Yield the collapsed stream, which the last norm reads."""
    yield "residual", own.stream * own.config.model.dim, own.residual


def last_norm(own: Share) -> Iterable[Kept]:
    """Yield 1 / rms, and the output if multi-token prediction reads it.

    The head makes its gradients in the forward and reads nothing later.
    """
    yield "normed", own.stream, own.wide
    yield "normed", handed_back(own), 1


def head(own: Share) -> Iterable[Kept]:
    """Yield gradients of the head's input and weight, and sums: loss, valid tokens, its report."""
    model = own.config.model
    weight = own.compute if own.parallel else own.wide
    yield "head", own.tokens * model.dim, own.compute
    yield "head", model.vocab_size // own.tp * model.dim, weight
    yield "head", 1, 8 + own.wide * (1 if model.mtp.depths else 2)
    if depths := model.mtp.depths:  # all in one call
        yield "head", depths * own.tokens * model.dim, own.compute
        yield "head", model.vocab_size // own.tp * model.dim * (not model.mtp.detach_head), weight


def copy(own: Share) -> Iterable[Kept]:
    """Return no tensors: a last stage's embedding saves none by itself."""
    return ()


ENDS = {
    "embed": embed,
    "ngram": ngram,
    "spread": spread,
    "collapse": collapse,
    "norm": last_norm,
    "top": top,
    "mtp": mtp,
    "head": head,
    "received": received,
    COPY: copy,
}


def _in_flight(config: Config, own: Share) -> int | None:
    mesh, total = config.mesh, config.train.grad_accum
    if mesh.pp == 1:
        return 1
    return {"1f1b": min(total, mesh.pp - own.stage), "gpipe": total}.get(mesh.pp_schedule)
