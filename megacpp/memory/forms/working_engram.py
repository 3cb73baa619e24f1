"""Working sets of n-gram memories in front of A blocks.

They come before and behind those of the block itself: while a memory runs, no tensor of the mixer
is alive. The moments follow megacpp/blocks/engram/module.py and kernels/memory_gate.py line by
line.

Legend: n tokens of this rank, M memory; s bytes of an element in compute, w of one never narrower
than fp32.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from megacpp.blocks.engram.sizes import memory_width
from megacpp.memory.forms.activation_engram import Sizes, kept_bytes
from megacpp.memory.forms.activation_share import Pieces, Share
from megacpp.memory.forms.moment import Moment
from megacpp.memory.forms.working_frame import copied, given, gradient_bytes
from megacpp.model.regions import NOTHING

KIND = "A+engram"
LOOKED_UP = ("own rows", "scatter rows", "rows")  # what no piece comes to again


def forward(own: Share, pieces: Pieces) -> Iterator[Moment]:
    """Yield moments of rows, projections and gate, norm, convolution, and sums."""
    z, n = Sizes.of(own), own.tokens
    M, s, w = memory_width(own.config.model), own.compute, own.wide
    saves = not pieces & {"block", "engram"}
    if own.tp > 1:
        x = n * M * s
        yield Moment("own rows", z.looked + 2 * x)
        yield Moment("scatter rows", z.looked + x * (1 + copied(own)) + z.memory)
    elif not own.parallel and z.narrow:
        yield Moment("rows", n * M * (w + s))
    base = z.memory + (z.looked if "block" not in pieces else 0)
    first = base + z.key + z.value
    x_copy = z.wide if own.residual < w else 0
    yield Moment("gate", first + 2 * z.numbers + 2 * z.wide + x_copy)
    yield Moment("gated", first + 3 * z.numbers + z.wide + (z.channels if z.narrow else 0))
    held = base + z.channels + ((z.key + z.value + 3 * z.numbers) if saves else 0)
    yield Moment("norm", held + z.numbers + z.wide * (3 if z.narrow else 2))
    held += z.channels + (z.numbers if saves else 0)
    if own.tp > 1:
        yield Moment("exchange", held + 3 * z.channels)
    apart = own.tp > 1 or own.cp > 1  # then the convolution reads another tensor than the norm made
    yield Moment("convolution", held + (z.convolved if apart else 0) + z.wide + z.channels)
    keeps = z.convolved if apart and saves else 0
    yield Moment("sum", held + keeps + 2 * z.channels)
    left = kept_bytes(own, pieces) - (z.stream if saves else 0)
    yield Moment("sum with the stream", left + z.channels + z.stream)


def behind(own: Share, pieces: Pieces, block: Iterable[Moment]) -> Iterator[Moment]:
    """Yield moments of the block's forward behind its memory, whose sum is alive too."""
    again = pieces & {"engram", "block"}
    held = kept_bytes(own, pieces) + (Sizes.of(own).stream if again else 0)
    for moment in block:
        yield moment.more(held)


def before(own: Share, pieces: Pieces, block: Iterable[Moment]) -> Iterator[Moment]:
    """Yield moments of the block's backward, before its memory's.

    The block's norm requests its input, the sum with the stream: recomputed tensors are alive from
    then on, or from the start if the whole block is recomputed.
    """
    z = Sizes.of(own)
    there, all_there = kept_bytes(own, pieces), kept_bytes(own, NOTHING)
    if "block" in pieces:
        waits = z.stream + given(own, "A")
        for moment in forward(own, NOTHING):
            yield Moment(f"again: {moment.name}", moment.tensors + waits)
        there = all_there
    elif "engram" in pieces:
        halo = z.convolved - z.channels
        all_there += halo + (z.channels if own.tp > 1 else 0)
        waits = z.stream + given(own, "A") + 2 * own.stream * own.wide
        for moment in forward(own, NOTHING):
            if moment.name not in LOOKED_UP:
                yield Moment(f"again: {moment.name}", moment.tensors + waits)
    for moment in block:
        asked = moment.name == "norm" or ("norm" in pieces and own.tp == 1 and moment.reads)
        yield moment.more(all_there if asked else there)


def backward(own: Share, pieces: Pieces) -> Iterator[Moment]:
    """Yield moments behind the block's own backward, with its weights' gradients alive."""
    model, z = own.config.model, Sizes.of(own)
    made = gradient_bytes(own, "A") + model.dim * own.wide
    for moment in (*_mixed_back(own, z), *_looked_up_back(own, z)):
        yield moment.more(0, made)


def _mixed_back(own: Share, z: Sizes) -> Iterator[Moment]:
    """Yield moments of the backward of convolution, norm, and gate."""
    grad = z.stream + (z.channels if own.residual != own.compute else 0)
    saved = z.memory + z.looked + z.key + z.value + 3 * z.numbers + z.channels
    conv = gradient_bytes(own, KIND, "engram.conv")
    norms = gradient_bytes(own, KIND, "engram.value_norm")
    rest = grad + saved + z.numbers + z.convolved
    if own.tp > 1:
        yield Moment("exchange gradient", rest + 2 * z.channels)
    wide_past = 2 * z.wide if z.narrow else z.wide
    again = 2 * z.channels + z.wide + wide_past + z.channels * z.narrow
    yield Moment("convolution", rest + (z.channels if own.tp > 1 else 0) + again, conv)
    casts = 2 * z.narrow
    norm = grad + saved + 3 * z.numbers + z.channels + (3 + casts) * z.wide
    yield Moment("norm", norm, conv + norms)
    gate = grad + saved + z.channels + 4 * z.wide + 4 * z.numbers
    yield Moment("gate", gate, conv + 3 * norms)
    streams = 3 * z.stream + z.key + z.value + z.memory + z.looked
    yield Moment("sum of streams", streams, conv + 3 * norms)


def _looked_up_back(own: Share, z: Sizes) -> Iterator[Moment]:
    """Yield moments of the backward of values, keys, and tables."""
    made = gradient_bytes(own, KIND, "engram.conv") + 3 * gradient_bytes(
        own, KIND, "engram.value_norm"
    )
    held = z.stream + z.looked
    # In the product, and where its gradients are widened: the product's inputs are gone by then.
    inside = {"wv": z.key + z.value + 2 * z.memory, "wk": z.key + 3 * z.memory}
    behind = {"wv": z.key + 2 * z.memory, "wk": 2 * z.memory}
    for name in inside:
        own_gradients = gradient_bytes(own, KIND, f"engram.{name}", f"engram.{name}.bias")
        if own.parallel or not z.narrow:
            made += own_gradients
            yield Moment(f"into {name}", held + inside[name], made)
        else:
            narrow = own_gradients // own.wide * own.compute
            yield Moment(f"into {name}", held + inside[name] + narrow, made)
            made += own_gradients
            yield Moment(f"gradient of {name}", held + behind[name] + narrow, made)
    yield Moment("sum of memories", held + 3 * z.memory, made)
    table = gradient_bytes(own, KIND, "engram.tables")
    e = own.tokens * memory_width(own.config.model)
    if own.tp > 1:
        all_rows = e * own.compute
        yield Moment("gather rows", held + z.memory + all_rows * (1 + copied(own)), made)
        yield Moment("own rows", held + 2 * all_rows, made)
        yield Moment("tables", held + all_rows, made + table)
        return
    cast = e * own.wide if not own.parallel and z.narrow else 0
    yield Moment("rows", z.stream + z.memory + cast, made)
    yield Moment("tables", z.stream + (cast or z.memory), made + table)
