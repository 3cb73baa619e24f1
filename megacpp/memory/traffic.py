"""Bytes that a rank sends and receives in an optimizer step, by mesh axis, in closed form.

A collective counts with the bytes of its larger side, as in `megacpp dry-run`, against which
tests/memory/test_traffic.py checks this file; a ring of n ranks moves (n - 1) / n of those bytes.
Tensors whose size doesn't depend on the model (counts, sums of losses) are left out. Routers are
assumed to choose evenly.

Legend: U bytes of the residual stream of a microbatch that one tp group holds together.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain

from megacpp.blocks.features import FEATURES, ahead_blocks
from megacpp.blocks.kinds import KINDS
from megacpp.config.checks.fp8 import fp8_weights
from megacpp.config.schema import Config
from megacpp.memory.forms.accumulation import travelling
from megacpp.memory.forms.local_shapes import LocalShapes
from megacpp.memory.forms.parameters import Held, Place, held, kinds_of, mover
from megacpp.memory.forms.traced import layer_parts
from megacpp.memory.forms.weights import COPY, Weight, weights
from megacpp.model.regions import BLOCK, NOTHING, Region, regions_of
from megacpp.model.sizes import copied_parameters
from megacpp.model.stages import (
    BOTH_WAYS,
    SPLIT_BACKWARD,
    as_scheduled,
    choice_bytes,
    microbatches_through,
)

RESHARD_ABOVE_BYTES = 1 << 30  # as parallel/fsdp.py has it
Sent = tuple[str, str, int]  # axis, what, bytes
Stages = Sequence[Sequence[str]]  # parts of each stage of a rank


@dataclass(frozen=True)
class Traffic:
    """Bytes that one rank moves in an optimizer step.

    Attributes:
        parts: bytes by (axis, name of what travels).
    """

    parts: dict[tuple[str, str], int]

    @property
    def bytes(self) -> int:
        """Bytes over all axes."""
        return sum(self.parts.values())

    @property
    def by_axis(self) -> dict[str, int]:
        """Bytes of each axis with any traffic."""
        found: Counter[str] = Counter()
        for (axis, _), size in self.parts.items():
            found[axis] += size
        return dict(found)

    def as_dict(self) -> dict[str, dict[str, int]]:
        """Return bytes by axis, then by what travels, for JSON."""
        found: dict[str, dict[str, int]] = {}
        for (axis, what), size in self.parts.items():
            found.setdefault(axis, {})[what] = size
        return found


def traffic(config: Config, size: int, rank: int = 0) -> Traffic:
    """Return bytes that rank `rank` of `size` moves in an optimizer step of a resolved `config`."""
    config = _of_each_stage(as_scheduled(config))
    parts: Counter[tuple[str, str]] = Counter()
    if size > 1:
        own, place = LocalShapes.on_rank(config, size, rank), Place.on_rank(config, size, rank)
        stages = kinds_of(config, size, rank)
        kinds = [kind for stage in stages for kind in stage]
        for axis, what, count in chain(
            _data_axes(own, place, stages),
            _of_blocks(own, place, kinds),
            _stages(own, place, stages),
            _optimizer(own, place, kinds),
        ):
            parts[axis, what] += count
    return Traffic(dict(+parts))


def carried(config: Config, size: int) -> Counter[tuple[str, str]]:
    """Return bytes of a step that the blocks of rank 0 send themselves, by axis and name.

    Args:
        config: resolved; its schedule's stages are known.
        size: number of ranks.
    """
    config = _of_each_stage(config)
    own, place = LocalShapes.on_rank(config, size, 0), Place.on_rank(config, size, 0)
    kinds = [kind for stage in kinds_of(config, size, 0) for kind in stage]
    parts: Counter[tuple[str, str]] = Counter()
    for axis, what, count in _of_blocks(own, place, kinds):
        parts[axis, what] += count
    return parts


def _of_blocks(own: LocalShapes, place: Place, kinds: Sequence[str]) -> Iterator[Sent]:
    """Yield what the parts of a rank send themselves."""
    recomputed = _recomputed(own, kinds)
    again = [regions >= BLOCK for regions in recomputed]
    yield from _tensor_axis(own, place, kinds, recomputed)
    yield from _scales(own, kinds, again)
    yield from _own_exchanges(own, kinds, again)
    yield from _context_axis(own, kinds, again)


def _of_each_stage(config: Config) -> Config:
    """Return the configuration with as many microbatches as each stage runs."""
    through = microbatches_through(config.mesh.pp_schedule, config.train.grad_accum)
    return replace(config, train=replace(config.train, grad_accum=through))


def _in_fp8(own: LocalShapes) -> list[frozenset[str]]:
    """Return, for each layer of a rank in order, the names of weights that multiply in FP8."""
    found = fp8_weights(own.config)
    return [found.get(layer, frozenset()) for layer in own.layers]


def _data_axes(own: LocalShapes, place: Place, stages: Stages) -> Iterator[Sent]:
    """Yield parameters that FSDP2 gathers, and gradients that it reduces."""
    layers = iter(_in_fp8(own))
    config, mesh = own.config, own.config.mesh
    times = config.train.grad_accum if config.train.gradient_sync == "each" else 1
    again = gathers_again(own, place, stages)
    for kind in (kind for stage in stages for kind in stage):
        eight = next(layers) if kind[0] in KINDS and config.precision.fp8_all_gather else ()
        if kind == "head" and config.model.tie_embeddings and any("embed" in s for s in stages):
            continue
        for weight in weights(config.model, kind, config.recompute.compress):
            experts = weight.experts and place.apart
            shards = place.expert_shards if experts else place.shards
            if shards == 1:
                continue
            one = mesh.dp_shard * mesh.cp * (mesh.tp if experts else 1) == (
                mesh.ep if experts else 1
            )  # a single shard: replicas take its place
            axis = "dp_replicate" if one else "efsdp" if experts else "fsdp"
            numbers = held(weight, place).padded * shards
            gathers = 1 if weight.wide else _gathers(config, kind, again, weight)
            itemsize = own.wide if weight.wide else 1 if weight.name in eight else own.compute
            yield axis, "parameters", numbers * gathers * itemsize
            yield axis, "gradients", numbers * times * own.wide
            if mesh.dp_replicate > 1 and not one:
                yield "dp_replicate", "gradients", numbers // shards * own.wide


def _gathers(config: Config, kind: str, again: bool, weight: Weight) -> int:
    """Return how often a step gathers a weight of a part.

    A pipeline keeps gathered weights between microbatches, or frees them after each forward; those
    of the last forward's backward then stay for all others. No backward reads the weight of the
    embedding or of another unembedding, and the head's backward follows its forward at once.
    """
    sync, micro = config.train.gradient_sync, config.train.grad_accum
    twice = again and kind not in ("embed", "ngram", "top", "head", COPY)
    if kind == "embed" and config.mesh.pp == 1 and ahead_blocks(config.model):
        twice = again  # tokens further ahead are looked up in a second forward
    if config.mesh.pp > 1:
        stays = kind == "head" or weight.name == "ngram.proj.weight"
        return 1 if not again or stays or sync == "resident" else micro + twice
    return travelling(sync, micro, twice, compute_bytes=1).gathered


def gathers_again(own: LocalShapes, place: Place, stages: Stages) -> bool:
    """Return whether weights are resharded between a forward and its backward."""
    config = own.config
    wanted = config.mesh.reshard
    if config.mesh.pp > 1 and config.mesh.pp_schedule in SPLIT_BACKWARD:
        return False
    if wanted != "auto":
        return wanted == "always"
    numbers = max(
        sum(
            held(w, place).whole
            for kind in stage
            for w in weights(config.model, kind, config.recompute.compress)
            if not w.wide
        )
        for stage in stages
    )
    return numbers * own.compute > RESHARD_ABOVE_BYTES


def _recomputed(own: LocalShapes, kinds: Sequence[str]) -> list[frozenset[Region]]:
    """Return the recomputed regions of each part.

    The last layer of the model is never recomputed. It is the layer in front of the last norm, or
    of the mean of the streams.
    """
    policy, model = own.config.recompute, own.config.model
    following = [*kinds[1:], ""]
    return [
        regions_of(policy, model, kind[0])
        if kind[0] in KINDS and after not in ("norm", "collapse")
        else NOTHING
        for kind, after in zip(kinds, following, strict=True)
    ]


def _tensor_axis(
    own: LocalShapes, place: Place, kinds: Sequence[str], recomputed: Sequence[frozenset[Region]]
) -> Iterator[Sent]:
    """Yield activations of mixers: gathered and summed in the forward, reversed in the backward.

    What a mixer gathered is gathered again where it wasn't kept.
    """
    if own.tp == 1:
        return
    config, model = own.config, own.config.model
    micro, stream = config.train.grad_accum, own.tokens * model.dim * own.compute
    # What a mixer returned is made again too, where a norm follows it or, outside of groups, a mix
    # of streams does.
    several = model.stream_width > model.dim
    mixed = several and not any(part.grouped for part in layer_parts(config))
    returned = model.post_norm or mixed
    partial = 0
    for kind, regions in zip(kinds, recomputed, strict=True):
        again = regions >= BLOCK
        if kind in ("embed", "top", "head"):
            yield "tp", "activations", micro * 2 * stream
        elif kind[0] in KINDS and KINDS[kind[0]].tensor_dims(model):
            anew = "gather" in regions and config.train.compile == "off"
            more = 1 + returned if again else anew
            yield "tp", "activations", micro * (4 + more) * stream
        if kind in ("top", "head"):
            yield "tp", "loss", micro * own.tokens * own.tp * 3 * own.wide
        for weight in weights(model, kind, config.recompute.compress):
            if weight.tp is None and not weight.experts and not weight.folded:
                partial += held(weight, place).own
    yield "tp", "gradients", partial * own.wide


def _scales(own: LocalShapes, kinds: Sequence[str], again: Sequence[bool]) -> Iterator[Sent]:
    """Yield maxima that ranks of `tp` agree on, for scales of rows and columns in FP8.

    They are of tokens and of the weight's other dim: in the forward where the weight's columns are
    sharded, in the backward where its rows are. But the backward of `rowwise_with_gw_hp` has one
    scale for the whole weight.
    """
    precision, micro = own.config.precision, own.config.train.grad_accum
    if own.tp == 1 or precision.fp8_recipe == "tensorwise":
        return
    layers, wide = iter(_in_fp8(own)), precision.fp8_recipe == "rowwise_with_gw_hp"
    for kind, anew in zip(kinds, again, strict=True):
        eight = next(layers) if kind[0] in KINDS else ()
        for weight in weights(own.config.model, kind):
            if weight.name in eight and weight.tp is not None:
                other = own.tokens + weight.shape[1 - weight.tp]
                forward = other * weight.tp * (1 + anew)
                backward = (own.tokens if wide else other) * (1 - weight.tp) + wide
                yield "tp", "scales", micro * (forward + backward) * own.compute


def _own_exchanges(
    own: LocalShapes, kinds: Sequence[str], run_again: Sequence[bool]
) -> Iterator[Sent]:
    """Yield what kinds and features send themselves, as rows to the experts and back."""
    layers = list(zip(kinds, run_again, strict=True))
    for one in (*KINDS.values(), *FEATURES.values()):
        for axis, what, count in one.sends(own, layers):
            if count:
                yield axis, what, own.config.train.grad_accum * count


def _context_axis(
    own: LocalShapes, kinds: Sequence[str], run_again: Sequence[bool]
) -> Iterator[Sent]:
    """Yield keys and values, states, ends of chunks, or heads for tokens."""
    if own.cp == 1:
        return
    micro = own.config.train.grad_accum
    for kind, again in zip(kinds, run_again, strict=True):
        exchange = KINDS[kind[0]].context if kind[0] in KINDS else None
        for what, count in exchange.traffic(own) if exchange else ():
            yield "cp", what, micro * count * (2 + again) // 2  # forward and backward alike


def _stages(own: LocalShapes, place: Place, stages: Stages) -> Iterator[Sent]:
    """Yield the residual stream between stages, its gradient, and that of a tied weight.

    A shared choice of keys goes forward only, for the tokens that a rank holds between blocks; a
    stage that reads it gathers it over `tp`.
    """
    config, mesh, micro = own.config, own.config.mesh, own.config.train.grad_accum
    if mesh.pp == 1:
        return
    parts = own.stage_parts
    both = mesh.pp_schedule in BOTH_WAYS
    # The two at the bottom of a V send each other nothing.
    here = set() if both else {part.index for part in parts}
    left = [part for part in parts if part.index - 1 not in here and not part.first]
    right = [part for part in parts if part.index + 1 not in here and not part.last]
    yield "pp", "activations", micro * 2 * (len(left) + len(right)) * own.stream_bytes
    of_token = choice_bytes(config.model, own.row)
    moved = sum(p.takes is not None for p in left) + sum(p.hands is not None for p in right)
    yield "pp", "choices", micro * moved * own.stream * of_token
    if own.tp > 1:
        yield "tp", "choices", micro * sum(p.reads for p in parts) * own.tokens * of_token
    ends = sum(part in stage for stage in stages for part in ("embed", "head"))
    if ends == 1 and (config.model.tie_embeddings or copied_parameters(config.model)):
        (weight,) = weights(config.model, "embed")  # two copies, whose gradients are summed
        yield "pp", "gradients", 2 * held(weight, place).own * own.wide
    if both:
        stored = [kind for stage in stages for kind in stage]
        if config.model.tie_embeddings and "embed" in stored:
            stored.remove("head")
        for kind in stored:
            for weight in weights(config.model, kind, config.recompute.compress):
                yield "pp", "gradients", 2 * held(weight, place).own * own.wide


def _optimizer(own: LocalShapes, place: Place, kinds: Sequence[str]) -> Iterator[Sent]:
    """Yield cells of matrices that no rank holds whole: to their owners and back."""
    config = own.config
    if config.optim.name != "muon_adamw":
        return
    wire = {"fp32": 4, "bf16": 2}.get(config.optim.muon_dtype, own.compute)
    for kind in kinds:
        for weight in weights(config.model, kind, config.recompute.compress):
            if mover(weight, config.optim) != "muon":
                continue
            cells = held(weight, place)
            if _stays(weight, cells, own.tp):
                continue
            copies = config.mesh.dp_replicate
            if not weight.experts and weight.tp is None:
                copies *= own.tp
            yield "muon", "updates", cells.own * wire // copies + cells.own * wire


def _stays(weight: Weight, cells: Held, tp: int) -> bool:
    """Return whether each matrix of a weight lies whole on one rank."""
    heights = set(weight.heights or weight.shape[-2:-1])
    rows = cells.own // weight.shape[-1]
    columns = weight.tp == 1 and tp > 1
    return not columns and len(heights) == 1 and rows % heights.pop() == 0
