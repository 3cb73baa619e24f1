"""Traced parts: saved activations and moments of a part of the model, from its trace.

A kind's descriptor names the settings that its block depends on (`AllocationSettings`); others have
their defaults in the request, so that presets and meshes share traces. A microbatch whose sizes lie
between or beyond traced ones is derived from them (megacpp/memory/block_trace.py). No torch import
here: a trace that the cache lacks (megacpp/memory/trace_cache.py) is made by
megacpp/cli/block_trace.py, which imports torch.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from math import gcd
from typing import Any

from megacpp.blocks.descriptor import AllocationSettings, BlockKind
from megacpp.blocks.features import ahead_blocks, entrance, exit_parts
from megacpp.blocks.hyper_connections.groups import stream_groups
from megacpp.blocks.kinds import KINDS
from megacpp.config.checks.fp8 import fp8_blocks
from megacpp.config.schema import (
    CheckpointingPolicy,
    Config,
    DataConfig,
    KernelsConfig,
    MeshConfig,
    ModelConfig,
    PrecisionConfig,
    TrainConfig,
)
from megacpp.memory import trace_cache
from megacpp.memory.block_trace import (
    DOCUMENT,
    HOST,
    INPUT,
    BlockRequest,
    BlockTrace,
    affine_weights,
    combined,
    copies,
    kept,
    left_between,
    moments,
)
from megacpp.memory.forms.local_shapes import LocalShapes
from megacpp.memory.forms.peak_point import PeakPoint
from megacpp.model.pattern import layer_kinds, warms_up, with_kinds
from megacpp.model.regions import NOTHING, compiled_budget, regions_of

DTYPES = {2: "bf16", 4: "fp32", 8: "fp64"}
SHARED = {"rms_norm", "short_conv", "gates"}  # operations of more than one kind of block
NO_GROUP = -1  # value of `recompute.mhc_group_size` for layers whose streams are all saved


@dataclass(frozen=True, slots=True)
class TracedPart:
    """Part of a model, with those that are traced together with it.

    Attributes:
        chain: parts that run one after the other: all modules in front of the first block, all
            behind the last, layers whose streams are recomputed together, or one layer.
        place: of the part in the chain.
        last: it is the model's last layer, which recomputes nothing.
        grouped: the streams of the chain are recomputed together.
        reached: its input has a gradient; in the warm-up of sparse attention, behind an indexer.
        split: its backward may be two walks, for gradients of inputs and of weights.
        wide: its products are not in FP8, whatever its kind's are: `precision.fp8_ends`.
    """

    chain: tuple[str, ...]
    place: int = 0
    last: bool = False
    grouped: bool = False
    reached: bool = True
    split: bool = False
    wide: bool = False

    @property
    def kind(self) -> str:
        """Name from `layer_kinds`, or of a module around the layers."""
        return self.chain[self.place]

    @property
    def is_layer(self) -> bool:
        """Whether the part is a layer."""
        return self.chain[0][0] in KINDS

    @property
    def shown(self) -> str:
        """Name for people; the last layer has its own."""
        return f"{self.kind} last" if self.last else self.kind


def layer_parts(config: Config) -> list[TracedPart]:
    """Return all layers of a model, in order."""
    kinds = layer_kinds(config.model)
    narrow = set(fp8_blocks(config))
    wide = [bool(narrow) and n not in narrow for n in range(len(kinds))]
    found = [
        TracedPart((kind,), last=n + 1 == len(kinds), wide=wide[n]) for n, kind in enumerate(kinds)
    ]
    for group in stream_groups(config):
        chain = tuple(kinds[group.start : group.stop])
        for place, layer in enumerate(group):
            any_wide = any(wide[n] for n in group)  # traced together; wide ones take more
            found[layer] = TracedPart(chain, place, grouped=True, wide=any_wide)
    if warms_up(config.model):
        first = next(n for n, kind in enumerate(kinds) if "A.index" in kind)
        found[: first + 1] = [replace(part, reached=False) for part in found[: first + 1]]
    return found


def outer_parts(model: ModelConfig) -> dict[str, TracedPart]:
    """Return the modules around the layers of a model, by name."""
    chains = entrance(model), exit_parts(model)
    return {name: TracedPart(chain, i) for chain in chains for i, name in enumerate(chain)}


@lru_cache(maxsize=8)  # a part's bytes and its moments ask one after the other
def request_of(own: LocalShapes, part: TracedPart) -> BlockRequest:
    """Return the request that determines the trace of a part of this rank."""
    return _layers_request(own, part) if part.is_layer else _outer_request(own, part.chain)


def _layers_request(own: LocalShapes, part: TracedPart) -> BlockRequest:
    if part.last:
        own = own.uncompressed
    config, blocks = own.config, [KINDS[kind[0]] for kind in part.chain]
    needs = [block.allocations for block in blocks]
    apart = all(block.context is None for block in blocks)
    cp = 1 if apart else own.cp
    offloads = config.recompute.offload != "none" and not part.last
    kernels = {need.kernel for need in needs} - {""} | SHARED
    few = _config(
        _sizes_apart(own) if apart else own,
        _layers_model(config.model, part, needs),
        _layers_mesh(config.mesh, blocks, cp),
        _layers_policy(own, part, needs, offloads),
        kernels,
    )
    if not part.wide and own.fp8 & {kind[0] for kind in part.chain}:
        fp8 = replace(config.precision, dtype=few.precision.dtype, fp8_ends=0)
        few = replace(few, precision=replace(fp8, fp8_layers="".join(sorted(own.fp8))))
    pieces = [
        NOTHING if part.last else regions_of(config.recompute, config.model, kind[0])
        for kind in part.chain
    ]
    shortest = max(need.document(config) for need in needs) if own.most else 0
    counts = {name: n for need in needs for name, n in need.counts(own).items()}
    same = tuple(n for need in needs for n in need.same(own))
    if config.model.mhc.streams > 1 or offloads:
        same += (own.tokens,)  # kernels process some tokens at a time; small ones stay
    return BlockRequest(
        few,
        part.chain,
        tuple(pieces),
        own.context if cp > 1 else 0,
        own.parallel,
        tuple(counts.items()),
        same,
        shortest or DOCUMENT,
        apart,
        own.warms_up,
        part.reached,
    )


def _sizes_apart(own: LocalShapes) -> LocalShapes:
    """Return sizes for blocks in which tokens don't meet: their row doesn't matter, nor ranks'."""
    rows = 2 if own.rows > 1 and own.tokens % 2 == 0 else own.rows
    row = own.tokens // 2 if rows == 2 else own.here
    return replace(own, rows=rows, row=row, here=row)


def _layers_mesh(mesh: MeshConfig, blocks: list[BlockKind], cp: int) -> dict[str, Any]:
    """Return the settings of a mesh that count for blocks."""
    found = _fields(mesh, {name for block in blocks for name in block.allocations.mesh})
    for block in blocks if cp > 1 else ():
        if block.context is not None:
            found |= _fields(mesh, {"cp_order", block.context.setting})
    return {**found, "cp": cp}


def _layers_model(
    given: ModelConfig, part: TracedPart, needs: list[AllocationSettings]
) -> ModelConfig:
    """Return a model of the part's kinds alone, with the settings that count."""
    kinds = (*KINDS[part.chain[0][0]].before(part.chain[0]), *part.chain, "F")
    whole, memory = with_kinds(given, kinds), any("+engram" in kind for kind in part.chain)
    sections = {need.model for need in needs} | {"mhc", "post_norm"}
    sections |= {"engram"} if memory else set()
    return ModelConfig(
        dim=whole.dim,
        vocab_size=256,
        depth=whole.depth,
        pattern=whole.pattern,
        **_fields(whole, sections),
    )


def _layers_policy(
    own: LocalShapes, part: TracedPart, needs: list[AllocationSettings], offloads: bool
) -> dict[str, Any]:
    """Return the settings of `recompute` that count, with those that decide for its place."""
    given = own.config.recompute
    found = _fields(given, {"compress", *(name for need in needs for name in need.policy)})
    if offloads:
        found |= _fields(given, {"offload", "offload_min_mib"})
    found["mhc_group_size"] = len(part.chain) if part.grouped else NO_GROUP
    if own.compiled:
        budget = 1.0 if part.last else compiled_budget(given, own.config.model)
        found["activation_memory_budget"] = budget
    return found


def _outer_request(own: LocalShapes, chain: tuple[str, ...]) -> BlockRequest:
    """Return the request of the modules in front of the layers, or behind them.

    The head's loss processes some tokens at a time, so that bytes aren't affine in rows.
    """
    config, given = own.config, own.config.model
    sections = {"mhc", *({"ngram"} if "embed" in chain else {"top", "mtp", "tie_embeddings"})}
    sections |= {"logit_softcap", "z_loss"} if "head" in chain else set()
    found = _fields(given, sections)
    mesh = {"cp": own.cp, "cp_order": config.mesh.cp_order}
    kernels = SHARED | {"cross_entropy"}
    for ahead in ahead_blocks(given) if "head" in chain else ():
        kinds = [KINDS[letter] for letter in ahead.letters]
        found |= _fields(ahead.model, {"post_norm", *(kind.allocations.model for kind in kinds)})
        kernels |= {kind.allocations.kernel for kind in kinds} - {""}
        mesh |= _fields(config.mesh, {kind.context.setting for kind in kinds if kind.context})
    words = given.vocab_size
    model = ModelConfig(dim=given.dim, vocab_size=words, pattern="F", depth=1, **found)
    few = _config(own, model, mesh, _fields(config.recompute, {"mtp"}), kernels)
    few = replace(few, train=replace(few.train, compile="off"))
    same, frozen = (own.tokens,), own.warms_up
    return BlockRequest(few, chain, (), own.context, own.parallel, same=same, frozen=frozen)


def _config(
    own: LocalShapes,
    model: ModelConfig,
    mesh: dict[str, Any],
    policy: dict[str, Any],
    kernels: set[str],
) -> Config:
    """Return a configuration of which all but the given settings have their defaults."""
    mesh = {**mesh, "tp": own.tp}
    experts = mesh.get("ep", 1)
    mesh["dp_shard"] = experts // gcd(experts, own.tp * mesh["cp"])
    dtype = "fp16" if own.config.precision.dtype == "fp16" else DTYPES[own.compute]
    device, compile = "cuda" if own.on_gpu else "cpu", own.config.train.compile
    return Config(
        model=model,
        mesh=MeshConfig(**mesh),
        data=DataConfig(seq_len=own.row),
        train=TrainConfig(device_batch_size=own.rows, device=device, compile=compile),
        precision=PrecisionConfig(dtype=dtype),  # type: ignore[arg-type]
        recompute=CheckpointingPolicy(**policy),
        kernels=KernelsConfig(**{name: own.by(name) for name in sorted(kernels)}),  # type: ignore[arg-type]
    )


def _fields(of: object, names: set[str]) -> dict[str, Any]:
    return {name: getattr(of, name) for name in names}


@lru_cache(maxsize=4096)
def trace_of(request: BlockRequest) -> BlockTrace:
    """Return a trace, derived from others of its group, or a new one."""
    known = _known(request.group)
    weights = affine_weights([*known], request.point)
    found = None if weights is None else combined([*known.values()], weights)
    if found is None:
        found = _exact(request)
        if weights is None and all(found.like(other) for other in known.values()):
            known[request.point] = found
    return found


@lru_cache(maxsize=1024)
def _known(group: BlockRequest) -> dict[tuple[int, ...], BlockTrace]:
    """Return traces of a group by their points, which are affinely independent."""
    return {}


@lru_cache(maxsize=1024)
def _exact(request: BlockRequest) -> BlockTrace:
    found = trace_cache.read(request)
    if found is None:
        from megacpp.cli.block_trace import trace_blocks

        (found,) = trace_blocks([request])
        trace_cache.write(request, found)
    return found


def traced_kept(own: LocalShapes, part: TracedPart) -> dict[str, int]:
    """Return bytes that a part saves for its backward, by module.

    The residual stream behind a part belongs to it, unless the model's last norm reads only a mean.
    `HOST` and `INPUT` (megacpp/memory/block_trace.py) are bytes that left the device: the second
    ones are part of the residual stream behind the part in front.
    """
    found = dict(_kept(request_of(own, part), part.place))
    if not own.parallel and not own.compiled:
        found.pop("weights", None)
    if part.last and own.config.model.mhc.streams > 1:
        found.pop("residual")
    return found


def traced_copies(own: LocalShapes, part: TracedPart) -> tuple[int, int]:
    """Return bytes of copies and casts of weights of a part; see `copies` of block_trace.py."""
    return _copies(request_of(own, part), part.place)


def traced_moments(
    own: LocalShapes, part: TracedPart, backward: bool, first: bool = False
) -> tuple[PeakPoint, ...]:
    """Return the fullest moments of a part's forward or backward.

    Of a backward, the second is the fullest if earlier microbatches have left gradients, to which
    each is added as soon as it is made.

    Args:
        own: sizes of the rank.
        part: of the model.
        backward: return moments of the backward; else of the forward.
        first: the part makes the tensors that all layers of a batch share.
    """
    return _moments(request_of(own, part), backward, first, part.place)


@lru_cache(maxsize=1024)
def traced_halves(
    own: LocalShapes, part: TracedPart
) -> tuple[tuple[PeakPoint, ...], tuple[PeakPoint, ...], int]:
    """Return the fullest moment of each walk of a part's backward, and bytes between them.

    Of the bytes between the walks, those that the forward saved aren't counted.
    """
    request = replace(request_of(own, part), split=True)
    trace, at = trace_of(request), part.place
    walks = [[*moments(trace, True, place=at, walk=walk)] for walk in ("inputs", "weights")]
    groups = kept(trace, at)
    result = groups.pop("residual", 0)  # saved until the end: no walk of the next part frees it
    saved = sum(n for name, n in groups.items() if name not in (HOST, INPUT, "weights"))
    fullest = [max(walk, key=lambda m: m.bytes).more(result) for walk in walks if walk]
    return tuple(fullest[:1]), tuple(fullest[1:]), left_between(trace, at) - saved


@lru_cache(maxsize=1024)
def _kept(request: BlockRequest, place: int) -> dict[str, int]:
    return dict(sorted(kept(trace_of(request), place).items()))


@lru_cache(maxsize=1024)
def _copies(request: BlockRequest, place: int) -> tuple[int, int]:
    return copies(trace_of(request), place)


@lru_cache(maxsize=2048)
def _moments(
    request: BlockRequest, backward: bool, first: bool, place: int
) -> tuple[PeakPoint, ...]:
    found = list(moments(trace_of(request), backward, first, place))
    if not found:
        return ()
    most = [max(found, key=lambda m: m.bytes)]
    at_once = not request.sharded or request.config.precision.dtype in ("fp32", "fp64")
    if backward and at_once:
        most.append(max(found, key=lambda m: m.added))
    return tuple(dict.fromkeys(most))
