"""Hyper-connections in closed form: saved activations beside a mixer's, and fullest moments.

A layer of a group (megacpp/blocks/hyper_connections/groups.py) is named by its kind and by its
place there:

    A inside 2     two layers of its group are in front of it; its output streams are recomputed
    A closes 3     the last of its group: its output streams are saved

Legend: t tokens of the residual streams, n streams, D model; r bytes of an element in them, s in
compute, w of one never narrower than fp32.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from megacpp.blocks.hyper_connections.groups import InGroup, places_in_groups
from megacpp.config.schema import Config
from megacpp.memory.forms.activation_share import Kept, Pieces, Share
from megacpp.memory.forms.moment import Moment
from megacpp.model.pattern import layer_kinds
from megacpp.model.regions import NOTHING, regions_of

CHUNK = 1 << 24  # numbers that are wide at once (megacpp/kernels/hyper_connections/reference.py)


@dataclass(frozen=True)
class Layered:
    """Parsed name of a layer: its kind, whether it is the last one, its place in a group if any."""

    kind: str
    last: bool
    group: InGroup | None

    @staticmethod
    def of(name: str) -> Layered:
        """Parse a name."""
        kind, _, rest = name.partition(" ")
        word, _, place = rest.partition(" ")
        return Layered(
            kind, word == "last", InGroup(int(place), word == "closes") if place else None
        )

    def sizes(self, own: Share) -> tuple[Share, Pieces]:
        """Return a rank's sizes for the layer, and the regions of its mixer that it recomputes."""
        if self.last:
            return own.uncompressed, NOTHING
        return own, regions_of(own.config.recompute, own.config.model, self.kind[0])

    @property
    def shown(self) -> str:
        """Name of the part without its place in a group."""
        return f"{self.kind} last" if self.last else self.kind


def layer_names(config: Config) -> list[str]:
    """Return the names of all layers of the model, in order."""
    kinds, found = layer_kinds(config.model), []
    for kind, place in zip(kinds, places_in_groups(config), strict=True):
        word = "" if place is None else f" {'closes' if place.closes else 'inside'} {place.place}"
        found.append(kind + word)
    return [*found[:-1], f"{kinds[-1]} last"]


def streams(own: Share) -> int:
    """Return n, the number of residual streams."""
    return own.config.model.mhc.streams


def kept_by_connection(own: Share, layer: Layered, pieces: Pieces) -> Iterator[Kept]:
    """Yield a layer's input, its coefficients, and its mixer's output."""
    t, D, n = own.stream, own.config.model.dim, streams(own)
    if layer.group is None:
        yield "streams", t * D, own.residual
        yield "streams", t * numbers(n), own.wide
    if layer.group is not None or "block" not in pieces:
        yield "mixed", t * D, own.compute


def numbers(n: int) -> int:
    """Return the number of wide elements per token: products of phi, 1 / rms, post and res."""
    return (n * n + 2 * n + 1) + (n * n + n)


def stream_bytes(own: Share) -> int:
    """Return bytes of all streams of this rank, between two layers."""
    return own.stream * streams(own) * own.config.model.dim * own.residual


def wide_bytes(own: Share, width: int = 1) -> int:
    """Return bytes of `width` wide streams, for the tokens that a kernel processes at once."""
    n, D = streams(own), own.config.model.dim
    return min(own.stream, max(1, CHUNK // (n * D))) * width * D * own.wide


def connected_forward(own: Share, layer: Layered, inner: Iterator[Moment]) -> Iterator[Moment]:
    """Yield moments of a layer's forward: its input, its mixer's moments, its output streams."""
    n, u, few = streams(own), _read_bytes(own), own.stream * numbers(streams(own)) * own.wide
    cast = own.residual < own.wide
    yield Moment("read streams", u + few + wide_bytes(own, n) * cast + wide_bytes(own))
    for moment in inner:
        if moment.name != "sum":
            yield moment.more(u + few)
            continue
        left = moment.tensors - u + few  # without the sum, which is as wide as one stream
        narrow = wide_bytes(own) * (own.compute < own.wide)
        made = stream_bytes(own) + wide_bytes(own, n) * (1 + cast) + narrow * (not cast)
        yield Moment("mix streams", left + u + max(made, stream_bytes(own)))


def connected_backward(
    own: Share, layer: Layered, pieces: Pieces, inner: Iterator[Moment], made: int, kept: int
) -> Iterator[Moment]:
    """Yield moments of a layer's backward, with the streams that are mixed again.

    Args:
        own: sizes of the rank.
        layer: whose place says which streams are recomputed.
        pieces: regions that the block recomputes.
        inner: moments of the mixer's backward.
        made: bytes of gradients of the mixer's and the norm's weights.
        kept: bytes that both save.
    """
    n, u, few = streams(own), _read_bytes(own), own.stream * numbers(streams(own)) * own.wide
    all_streams, cast = stream_bytes(own), own.residual < own.wide
    again = _again(own, layer)
    y = own.stream * own.config.model.dim * own.compute
    phi = connection_numbers(own) * own.wide
    waits = again + u + few
    both = 2 * all_streams + wide_bytes(own, n) * (1 + cast)
    both += own.stream * (n * n + n) * own.wide  # gradients of post and res
    yield Moment("streams in front", waits + kept + 2 * y + both)
    for moment in inner:
        yield moment.more(waits + all_streams - u)
    du = u + wide_bytes(own) * cast
    last = again + few + 2 * all_streams + du + wide_bytes(own, n) * (1 + cast)
    yield Moment("read gradient", last, made + phi)


def connection_numbers(own: Share) -> int:
    """Return the number of parameters of one connection."""
    n, D = streams(own), own.config.model.dim
    return (n * n + 2 * n) * (n * D + 1) + 3


def _read_bytes(own: Share) -> int:
    return own.stream * own.config.model.dim * own.residual


def _again(own: Share, layer: Layered) -> int:
    """Return bytes of recomputed streams, and their inputs, of a group's layers up to this one."""
    if layer.group is None:
        return 0
    read = _read_bytes(own) + own.stream * numbers(streams(own)) * own.wide
    return layer.group.place * (stream_bytes(own) + read)
