"""Traced blocks: saved activations and moments of a kind, from its trace.

A kind's descriptor names the settings that its block depends on (`AllocationSettings`); others have
their defaults in the request, so that presets and meshes share traces. A microbatch whose sizes lie
between or beyond traced ones is derived from them (megacpp/memory/block_trace.py). No torch import
here: a trace that the cache lacks (megacpp/memory/trace_cache.py) is made by
megacpp/cli/block_trace.py, which imports torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from math import gcd
from typing import Any

from megacpp.blocks.kinds import KINDS
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
    BlockRequest,
    BlockTrace,
    affine_weights,
    combined,
    kept,
    moments,
)
from megacpp.memory.forms.activation_share import Kept, Pieces, Share
from megacpp.memory.forms.moment import Moment
from megacpp.model.pattern import with_kinds

DTYPES = {2: "bf16", 4: "fp32", 8: "fp64"}


def request_of(own: Share, kind: str, pieces: Pieces) -> BlockRequest:
    """Return the request that determines the trace of a block of this rank.

    Args:
        own: sizes of the rank.
        kind: a name from `layer_kinds`.
        pieces: regions that the block recomputes.
    """
    config, block = own.config, KINDS[kind[0]]
    needs = block.allocations
    cp, rows, row, apart = own.cp, own.rows, own.row, block.context is None
    if apart:  # tokens of other ranks don't matter, nor in which row a token is
        cp, row = 1, own.here
        if rows > 1 and own.tokens % 2 == 0:
            rows, row = 2, own.tokens // 2
    mesh = {"tp": own.tp, "cp": cp, "dp_shard": 1, **_fields(config.mesh, needs.mesh)}
    if cp > 1 and block.context is not None:
        mesh["cp_order"] = config.mesh.cp_order
        setting = block.context.setting
        mesh[setting] = getattr(config.mesh, setting)
    dense, experts = own.tp * cp, mesh.get("ep", 1)
    mesh["dp_shard"] = experts // gcd(experts, dense)
    shortest = needs.document(config) if own.most else 0
    by = {needs.kernel: own.by(needs.kernel)} if needs.kernel else {}
    model = ModelConfig(
        dim=config.model.dim, vocab_size=256, **_fields(config.model, (needs.model,))
    )
    few = Config(
        model=with_kinds(model, (*block.before(kind), kind, kind)),
        mesh=MeshConfig(**mesh),
        data=DataConfig(seq_len=row),
        train=TrainConfig(
            device_batch_size=rows, device="cuda" if own.on_gpu else "cpu", compile="off"
        ),
        precision=PrecisionConfig(dtype=DTYPES[own.compute]),  # type: ignore[arg-type]
        recompute=CheckpointingPolicy(**_fields(config.recompute, ("compress", *needs.policy))),
        kernels=KernelsConfig(**by),  # type: ignore[arg-type]
    )
    return BlockRequest(
        few,
        kind,
        pieces,
        own.context if cp > 1 else 0,
        own.parallel,
        tuple(needs.counts(own).items()),
        needs.same(own),
        shortest or DOCUMENT,
        apart,
    )


def _fields(of: object, names: tuple[str, ...]) -> dict[str, Any]:
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


def traced_kept(own: Share, kind: str, pieces: Pieces) -> Iterator[Kept]:
    """Yield tensors that a block saves for its backward, by module, without its result."""
    for group, size in _kept(request_of(own, kind, pieces)).items():
        if group != "weights" or own.parallel:
            yield group, size, 1


def traced_moments(
    own: Share, kind: str, pieces: Pieces, backward: bool, first: bool = False
) -> tuple[Moment, ...]:
    """Return the fullest moments of a block's forward or backward, and its last one.

    Weights that autocast casts aren't in them.

    Args:
        own: sizes of the rank.
        kind: a name from `layer_kinds`.
        pieces: regions that the block recomputes.
        backward: return moments of the backward; else of the forward.
        first: the layer makes the tensors that all layers of a batch share.
    """
    return _moments(request_of(own, kind, pieces), backward, first)


@lru_cache(maxsize=1024)
def _kept(request: BlockRequest) -> dict[str, int]:
    return dict(sorted(kept(trace_of(request)).items()))


@lru_cache(maxsize=1024)
def _moments(request: BlockRequest, backward: bool, first: bool) -> tuple[Moment, ...]:
    found = list(moments(trace_of(request), backward, request.sharded, first))
    most = [max(found, key=lambda m: m.bytes), max(found, key=lambda m: m.added), found[-1]]
    of_norm = [m for m in found if m.name == "norm"]
    most += [max(of_norm, key=lambda m: m.bytes)] if of_norm else []
    return tuple(dict.fromkeys(most))
