"""What M blocks have alive while a kernel of mamba-ssm scans: moments inside the mixer.

In front of the scan and behind its backward it is working_mamba3.py. Of the kernels' own Python it
follows what they allocate (2.3.2.post1: mamba3_siso_fwd.py and _bwd.py, mamba3_mimo_bwd.py), not
what runs inside them; tests/model/test_mamba3_interpreted.py and test_mamba3_mimo_interpreted.py
hold them to that.

Legend: as working_mamba3.py.
"""

from __future__ import annotations

from collections.abc import Iterator

from megacpp.memory.forms.activation_mamba3 import by_kernel, folded, mamba3
from megacpp.memory.forms.activation_share import Pieces, Share
from megacpp.memory.forms.moment import Moment
from megacpp.memory.forms.working_desk import Desk, returned
from megacpp.memory.forms.working_frame import given
from megacpp.memory.forms.working_mamba3 import (
    Walk,
    carried,
    convolution_back,
    gate_back,
    kept_bytes,
    projections_back,
    summed,
    with_gate,
)


def forward(own: Share, pieces: Pieces) -> Iterator[Moment]:
    """From projections to the output."""
    k, desk = Walk.of(own, pieces), Desk(own)
    n, z, c, w = own.tokens, k.z, k.c, k.w
    if own.parallel:
        desk.put(weights=z.thin * own.config.model.dim * c)
    desk.put(thin=n * z.thin * c, gate=k.W * c, x=k.W * c)
    if own.config.model.mamba3.conv_kernel:
        yield desk.moment("convolution", summed(k, k.convolved[0]))
        desk.put(convolved=sum(k.convolved) * c)
    desk.put(steps=n * z.H * (2 if z.again else 6) * w, norms=n * z.S * c)
    if z.states_travel:  # K of each head, turned; V weighed, and by heads; turns and angles
        summary = k.qk * w + 2 * k.W * w + 2 * k.angles * w + k.shared * w + 4 * k.T * w
        borrowed = 0 if z.again or not z.past else k.convolved[1] * c  # B | C with their past, kept
        yield desk.moment("summary", summary, k.first, borrowed)
        desk.put(carried=carried(k))
    # All that is kept, variables in front of it, and what the kernel makes contiguous.
    variables = ("convolved", "steps", "norms") if z.again else ()
    in_front = sum(desk.alive.get(name, 0) for name in (*variables, "carried"))
    desk.alive = {"kept": kept_bytes(own, pieces) - _entering(k), "in front": in_front}
    final = k.states * w if z.kernel == "tilelang" else 0
    yield desk.moment("kernel", k.T * (2 * w + c), final)
    if own.config.model.mamba3.out_norm or (z.kernel == "tilelang" and z.states_travel):
        ranks = k.W * k.R
        yield desk.moment("gate", k.widened(ranks), 3 * ranks * w)
    if z.by_heads:
        yield desk.moment("exchange", (2 + own.chunks) * k.W * c)
    yield desk.moment("output", n * own.config.model.dim * c)
    yield from returned(own, mamba3(own, pieces))


def backward(own: Share, pieces: Pieces) -> Iterator[Moment]:
    """From the output's gradient to those of the projections."""
    k, desk = Walk.of(own, pieces), Desk(own, given=given(own, "M"))
    z, c = k.z, k.c
    gate, scanned = (
        with_gate(k),
        sum(count * each for _, count, each in by_kernel(z, z.kernel_chunks)),
    )
    desk.put(gate=gate, scanned=scanned, rest=kept_bytes(own, pieces) - gate - scanned)
    desk.put(dy=k.W * c)
    yield desk.moment("output", desk.learn(own.config.model.dim * z.W))
    desk.drop("given")
    if own.config.model.mamba3.out_norm or (z.kernel == "tilelang" and z.states_travel):
        read = k.W * c if z.kernel == "mamba_ssm" else 0  # by the projection alone: it is gone
        desk.put(scanned=-read, outputs=k.widened(k.W * k.R))
        yield from gate_back(k, desk)
        desk.drop("outputs")
        copies = 2 if z.kernel == "tilelang" else 1  # in the order of ranks that it wrote them in
        desk.alive["dy"] = copies * k.W * k.R * c
    else:
        desk.put(dz=k.W * c)
    if z.again:  # what lies in front of the scan runs again
        found = kept_bytes(own, pieces - {"conv_bc"}) - kept_bytes(own, pieces)
        found += k.W * c if z.past else 0  # without the piece nobody reads x behind its copy
        desk.put(again=max(0, found))
    if z.kernel == "mamba_ssm":
        yield from _siso_back(k, desk)
    else:
        yield from _mimo_back(k, desk)
    desk.drop("scanned", "dy", "gate")
    if z.states_travel:
        yield _summary_again(k, desk)
    yield from convolution_back(k, desk)
    desk.drop("again")
    yield from projections_back(k, desk)


def _summary_again(k: Walk, desk: Desk) -> Moment:
    """Return the moment in which chunk summaries are recomputed (kernels/mamba3/segments.py).

    K of each head, turned, and its gradient; V widened, weighed, and its gradient; turns and
    angles, their cosines and sines; weights of tokens, one of them in fp64.
    """
    # What states were folded of is gone by then; gradients of the states are there, twice.
    desk.put(rest=-_entering(k))
    values = k.widened(k.W) + 2 * k.W * k.w + 3 * k.first
    return desk.moment("summary", 3 * k.qk * k.w, values, 4 * k.angles * k.w, 12 * k.T * k.w)


def _entering(k: Walk) -> int:
    """What is kept of the states that enter chunks, beside what the kernel keeps of them."""
    return sum(numbers * each for _, numbers, each in folded(k.z)) if k.z.states_travel else 0


def _siso_back(k: Walk, desk: Desk) -> Iterator[Moment]:
    """Gradients of q and k of each head, then those of Q and K, angles and steps."""
    c, w = k.c, k.w
    desk.put(scaled=k.W * c)  # the output's gradient times the gate
    desk.put(dheads=2 * k.qk * c, dv=k.W * c, small=2 * k.T * w)
    if k.z.states_travel:
        desk.put(dentering=2 * k.z.documents * k.first // k.z.segments)
    yield desk.moment("gradients of q and k")
    desk.put(dQ=2 * k.shared * c, dangles=k.angles * c)
    chunks = k.z.segments * k.z.chunks
    biases = 2 * chunks * k.z.heads * k.own.config.model.mamba3.d_state * w
    yield desk.moment("rotation", 4 * k.T * w, biases)
    yield desk.moment("angles", k.angles * c, 3 * k.T * w)
    desk.drop("dheads", "scaled", "dangles", "small", "dentering")


def _mimo_back(k: Walk, desk: Desk) -> Iterator[Moment]:
    """States and products of tokens with themselves run again; then the gradients of all inputs."""
    c, w, square = k.c, k.w, k.square * k.w
    desk.put(states=2 * k.states * c, own=k.T * k.R**2 * c, segments=square, small=2 * k.T * w)
    yield desk.moment("states again")
    desk.put(dheads=2 * k.qk * c, dv=k.W * c, dangles=k.angles * w, dsegments=square)
    yield desk.moment("gradients of inputs", 6 * k.T * w)
    desk.put(dQ=2 * k.shared * c)
    yield desk.moment("sums over heads", k.qk * c)
    desk.drop("states", "own", "segments", "dsegments", "dheads")
    yield desk.moment("angles", k.angles * w)
    desk.drop("dangles", "small")
