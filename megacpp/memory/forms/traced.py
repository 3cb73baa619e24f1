"""Blocks whose memory is traced: what the rest of an estimate asks of a kind's trace.

A kind is traced when it has an entry in `TRACED`, which names what of a configuration its block
hangs on; all else stays at its default in the request, so that presets and meshes share traces.
Traces of a microbatch of one row stand for themselves; of more rows they follow from those of two
and three (megacpp/memory/block_trace.py). No torch import here: what is missing in the cache
(megacpp/memory/trace_cache.py) is traced by megacpp/cli/block_trace.py, which imports it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

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
from megacpp.memory.block_trace import BlockRequest, BlockTrace, between, kept, moments
from megacpp.memory.forms.activation_share import Kept, Pieces, Share
from megacpp.memory.forms.moment import Moment

ANCHORS = 2, 3  # rows: one row needs no copy where tokens of several are gathered
DTYPES = {2: "bf16", 4: "fp32", 8: "fp64"}


@dataclass(frozen=True)
class TracedKind:
    """Settings that a kind's allocations hang on, by section of the configuration.

    Attributes:
        model, mesh, policy, kernels: fields that are passed on as they are.
    """

    model: tuple[str, ...] = ()
    mesh: tuple[str, ...] = ()
    policy: tuple[str, ...] = ()
    kernels: tuple[str, ...] = ()


TRACED = {
    "R": TracedKind(
        model=("dim", "m2rnn"), mesh=("cp_m2rnn",), policy=("rblock",), kernels=("m2rnn",)
    ),
    "G": TracedKind(
        model=("dim", "gated_deltanet"),
        mesh=("cp_gated_deltanet",),
        policy=("gblock",),
        kernels=("gated_delta_rule",),
    ),
}


def request_of(own: Share, kind: str, pieces: Pieces) -> BlockRequest:
    """Return what the trace of a block of this rank hangs on.

    Args:
        own: sizes of the rank.
        kind: a letter of `TRACED`.
        pieces: what the block runs again.
    """
    config, needs = own.config, TRACED[kind]
    mesh = {"tp": own.tp, "cp": own.cp, "dp_shard": 1, **_fields(config.mesh, needs.mesh)}
    if own.cp > 1:
        mesh["cp_order"] = config.mesh.cp_order
    model = _fields(config.model, needs.model) | {"pattern": kind * 2, "depth": 2}
    train = TrainConfig(
        device_batch_size=own.rows, device="cuda" if own.on_gpu else "cpu", compile="off"
    )
    few = Config(
        model=ModelConfig(vocab_size=256, **model),
        mesh=MeshConfig(**mesh),
        data=DataConfig(seq_len=own.row),
        train=train,
        precision=PrecisionConfig(dtype=DTYPES[own.compute]),  # type: ignore[arg-type]
        recompute=CheckpointingPolicy(**_fields(config.recompute, needs.policy)),
        kernels=KernelsConfig(**{name: own.by(name) for name in needs.kernels}),  # type: ignore[arg-type]
    )
    return BlockRequest(few, kind, pieces, own.context, own.parallel)


def _fields(of: object, names: tuple[str, ...]) -> dict[str, Any]:
    return {name: getattr(of, name) for name in names}


def traced_block(own: Share, kind: str, pieces: Pieces) -> BlockTrace:
    """Return the trace of a block of this rank."""
    return _at_rows(request_of(own, kind, pieces))


@lru_cache(maxsize=1024)
def _at_rows(request: BlockRequest) -> BlockTrace:
    rows = request.config.train.device_batch_size
    if rows == 1 or rows in ANCHORS:
        return _exact(request)
    first, second = (_exact(request.of_rows(n)) for n in ANCHORS)
    if not first.like(second):
        return _exact(request)
    return between(first, second, ANCHORS, rows)


@lru_cache(maxsize=1024)
def _exact(request: BlockRequest) -> BlockTrace:
    found = trace_cache.read(request)
    if found is None:
        from megacpp.cli.block_trace import trace_blocks

        (found,) = trace_blocks([request])
        trace_cache.write(request, found)
    return found


def traced_kept(own: Share, kind: str, pieces: Pieces) -> Iterator[Kept]:
    """Yield what a block keeps for its backward, by module; not what it returns."""
    for group, size in _kept(request_of(own, kind, pieces)).items():
        if group != "weights" or own.parallel:
            yield group, size, 1


def traced_moments(own: Share, kind: str, pieces: Pieces, backward: bool) -> tuple[Moment, ...]:
    """Return the fullest moments of a block's forward or backward, and its last one.

    Weights that autocast casts aren't in them.
    """
    return _moments(request_of(own, kind, pieces), backward)


@lru_cache(maxsize=1024)
def _kept(request: BlockRequest) -> dict[str, int]:
    return dict(sorted(kept(_at_rows(request)).items()))


@lru_cache(maxsize=1024)
def _moments(request: BlockRequest, backward: bool) -> tuple[Moment, ...]:
    found = list(moments(_at_rows(request), backward, request.sharded))
    most = max(found, key=lambda m: m.bytes), max(found, key=lambda m: m.added), found[-1]
    return tuple(dict.fromkeys(most))
