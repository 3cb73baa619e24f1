"""What is alive around a mixer: norm, doors of sequence parallelism, sum with the residual stream.

A mixer describes moments inside of itself (working_*.py); the frame adds to each what it reads and
what waits for it, and the moments before and after it. Not for a mixer to count:

    forward   1 / rms, the normed input (the call's argument, alive until the mixer returns) and
              its gathered copy
    backward  the gradient of the residual stream, 1 / rms, and the input that projections read

Legend: n tokens of this rank, t those of the residual stream, D model.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator

from megacpp.memory.forms.activation_blocks import normed
from megacpp.memory.forms.activation_share import Pieces, Share
from megacpp.memory.forms.activations import MIXERS as KEPT
from megacpp.memory.forms.moment import Moment
from megacpp.memory.forms.traced import TRACED, traced_kept
from megacpp.memory.forms.weights import Weight, weights
from megacpp.model.regions import BLOCK, NOTHING

# What a piece that runs again never comes to: nothing is saved any more.
AFTER_SAVES = ("scatter", "sum", "out of heads")

Inside = Callable[[Share, Pieces], Iterator[Moment]]


def framed_forward(own: Share, letter: str, pieces: Pieces, mixer: Inside) -> Iterator[Moment]:
    """Moments of a block's forward."""
    D, c, n, t = own.config.model.dim, own.compute, own.tokens, own.stream
    yield norm_forward(own)
    cut = own.tp > 1 and letter != "E"
    held = _held(own, letter, pieces)
    if cut:
        yield Moment("gather", held + copied(own) * n * D * c)
    yield from framed_inside(own, letter, pieces, mixer)
    kept = kept_bytes(own, letter, pieces)
    if cut:
        out = n * D * c * (1 + copied(own)) + t * D * c
        yield Moment("scatter", held + kept + out)
    left = held - (t * D * c if cut or pieces & {"norm", "block"} else 0)
    if "block" in pieces and cut:
        left -= n * D * c
    yield Moment("sum", left + kept + t * D * (c + own.residual))


def framed_inside(own: Share, letter: str, pieces: Pieces, mixer: Inside) -> Iterator[Moment]:
    """Moments of a mixer's forward, with what it was given."""
    held = _held(own, letter, pieces)
    for moment in mixer(own, pieces):
        yield moment.more(held)


def _held(own: Share, letter: str, pieces: Pieces) -> int:
    """1 / rms, the normed input and its gathered copy."""
    found = reads(own, letter) + (0 if pieces & {"norm", "block"} else own.stream * own.wide)
    if own.tp > 1 and letter != "E":
        found += own.stream * own.config.model.dim * own.compute
    return found


def framed_backward(
    own: Share, letter: str, pieces: Pieces, mixer: Inside, back: Inside
) -> Iterator[Moment]:
    """Moments of a block's backward, those that run again included."""
    D, c, n, t = own.config.model.dim, own.compute, own.tokens, own.stream
    grad, rms = t * D * own.residual, t * own.wide
    cut, again = own.tp > 1 and letter != "E", "norm" in pieces
    if "block" in pieces:
        waits = grad + in_hand(own, letter) + kept_bytes(own, letter, pieces)
        for moment in framed_forward(own, letter, NOTHING, mixer):
            if moment.name not in AFTER_SAVES:
                yield Moment(f"again: {moment.name}", moment.tensors + waits)
        pieces, again = NOTHING, False
    held = grad + (0 if again else rms)
    waits = 0 if again and not cut else reads(own, letter)
    if cut:
        kept = kept_bytes(own, letter, pieces) + waits
        yield Moment("gather gradient", held + kept + n * D * c * (1 + copied(own)))
    for moment in back(own, pieces):
        yield moment.more(held + (reads(own, letter) if moment.reads else waits))
    made = gradient_bytes(own, letter)
    if cut:
        yield Moment("scatter gradient", held + n * D * c * (1 + copied(own)) + t * D * c, made)
    yield norm_back(own, (2 if again else 3) * rms).more(grad, made)


def norm_forward(own: Share) -> Moment:
    """x and x / rms widened, and the result; 1 / rms."""
    x, cast = own.stream * own.config.model.dim * own.wide, own.residual < own.wide
    return Moment("norm", x * (3 if cast else 2) + own.stream * own.wide)


def norm_back(own: Share, rms: int) -> Moment:
    """dy as it came and widened, x widened, products, dx; `rms`: numbers per token."""
    D, x = own.config.model.dim, own.stream * own.config.model.dim
    casts = (own.residual < own.wide) + (own.compute < own.wide)
    wide = own.wide * (norm_products(own) + 1 + casts)
    return Moment("norm", rms + x * (own.compute + wide), D * own.wide, fresh=D * own.wide)


def norm_products(own: Share) -> int:
    """Beside dx the formula makes x / rms and dy x / rms; the kernel of a GPU makes neither."""
    return 0 if own.on_gpu else 2


def reads(own: Share, letter: str) -> int:
    """What all projections of a mixer read: gathered where sequence parallelism cuts it."""
    return (own.stream if letter == "E" else own.tokens) * own.config.model.dim * own.compute


def given(own: Share, letter: str) -> int:
    """The gradient of a mixer's output where it is not the residual stream's own."""
    one = own.config.model.mhc.streams == 1
    if one and own.tp == 1 and own.residual == own.compute:
        return 0
    if one and letter == "E" and own.residual == own.compute:
        return 0
    return (own.stream if letter == "E" else own.tokens) * own.config.model.dim * own.compute


def in_hand(own: Share, letter: str) -> int:
    """Gradients of a mixer's output when its backward first asks for what was saved."""
    moe, s, w = own.config.model.moe, own.compute, own.wide
    if letter != "E" or not moe.num_shared:
        return given(own, letter)
    of_shared = own.tokens * (1 if own.tp > 1 or s < w else 0)
    wide = own.stream * (w if s < w else 0)
    return own.config.model.dim * (of_shared * s + wide) or given(own, letter)


def copied(own: Share) -> int:
    """A gather or scatter along the tokens of several rows copies what it moves."""
    return 1 if own.rows > 1 else 0


def kept_groups(own: Share, letter: str, pieces: Pieces) -> Counter[str]:
    """What a mixer keeps, by group, without copies of weights."""
    found: Counter[str] = Counter()
    for group, numbers, each in KEPT[letter](own, pieces):
        found[group] += numbers * each
    del found["weights"]
    return found


def kept_bytes(own: Share, letter: str, pieces: Pieces) -> int:
    """All of it."""
    return kept_groups(own, letter, pieces).total()


def kept_of_block(own: Share, letter: str, pieces: Pieces) -> int:
    """The same with what its norm keeps."""
    if letter in TRACED:
        parts = traced_kept(own, letter, pieces)
        return sum(count * each for group, count, each in parts if group != "weights")
    norm = () if pieces >= BLOCK else normed(own, letter, pieces)
    return kept_bytes(own, letter, pieces) + sum(count * each for _, count, each in norm)


def whole(own: Share, weight: Weight) -> int:
    """Elements of a gathered weight: cut over `tp` and `ep` alone."""
    numbers = 1
    for size in weight.shape:
        numbers *= size
    if weight.experts:
        return numbers // own.config.mesh.ep
    return numbers // own.tp if weight.tp is not None else numbers


def gradient_bytes(own: Share, letter: str, *names: str) -> int:
    """Gradients of the weights of a mixer, or of some of them, as a backward leaves them."""
    return sum(size for name, size in _gradients(own, letter) if not names or name in names)


def largest_gradient(own: Share, letter: str) -> int:
    """Of one weight."""
    return max((size for _, size in _gradients(own, letter)), default=0)


def _gradients(own: Share, letter: str) -> Iterator[tuple[str, int]]:
    narrow = own.compute if own.parallel else own.wide
    for w in weights(own.config.model, letter)[1:]:
        if not w.name.startswith("connection."):
            yield w.name, whole(own, w) * (own.wide if w.wide else narrow)
