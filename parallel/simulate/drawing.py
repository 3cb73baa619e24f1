"""Collectives of each kind of block of a model on a mesh, in order and with bytes.

Moves are recorded, not looked up: a model with one block of each kind takes a forward and a
backward under fake tensors (parallel/simulate/fake.py). A collective of a block is drawn as the
activation layout of the plan that made it, or else by its shapes. FSDP2 gathers ahead of time, so
its moves are computed from the parameters of a block; tests/parallel/test_explain.py adds
everything up.

Legend: B rows, T tokens of a row, D model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from megacpp.blocks.engram.sizes import memory_width
from megacpp.blocks.features import FEATURES
from megacpp.blocks.kinds import KINDS
from megacpp.config.checks.fp8 import fp8_weights
from megacpp.config.schema import Config, ModelConfig
from megacpp.model.fp32 import contract_parameters
from megacpp.model.hybrid import HybridLM
from megacpp.model.pattern import layer_kinds, with_kinds
from megacpp.model.precision import compute_dtype
from megacpp.torch_extras import is_dtensor
from parallel.build import stages_of
from parallel.fsdp import RESHARD_ABOVE_BYTES
from parallel.local_shapes import local_shape, shards_of
from parallel.mesh import World
from parallel.notation import Array, Redistribute
from parallel.plans import activation_layouts, spread_modules
from parallel.simulate.collective_log import MODEL_AXES, Collective, CollectiveLog
from parallel.simulate.fake import (
    CPU,
    FakeBoundary,
    fake_batch,
    fake_tensors,
    fake_world,
    planned_model,
)

FORWARD, BACKWARD, STEP = "forward", "backward", "once a step"


@dataclass(frozen=True)
class Drawn:
    """Collective of a block.

    Attributes:
        phase: FORWARD and BACKWARD are of every microbatch, STEP of its last alone.
        picture: layouts before and after, in brackets where the plan has a row for it.
        bytes: of the larger side.
    """

    phase: str
    picture: str
    kind: str
    axis: str
    dtype: torch.dtype
    bytes: int


def draw(config: Config, size: int, rank: int, again: bool) -> dict[str, list[Drawn]]:
    """Return the collectives of each kind of block, in the order in which they happen.

    Pipeline stages are left out: a block sends the same in each of them.

    Args:
        config: resolved for `size` ranks.
        size: ranks of the run.
        rank: the one whose collectives are drawn.
        again: blocks are gathered a second time for their backward (`gathers_again`).
    """
    size, rank = size // config.mesh.pp, rank % (size // config.mesh.pp)
    once = config.train.gradient_sync == "resident"
    in_fp8 = _gathered_in_fp8(config)
    config = _one_of_each(config, again)
    with fake_world(config, size, rank) as world:
        model = planned_model(config, world)
        if not world.parallel:
            return {kind: [] for kind in model.kinds}
        with fake_tensors():
            log = _recorded(model, world, config)
        return {
            kind: _of_block(model, i, log, config, world, again, once, in_fp8.get(kind[0], set()))
            for i, kind in enumerate(model.kinds)
        }


def gathers_again(model: HybridLM, config: Config) -> bool:
    """Return whether blocks of a planned model are gathered again for their backward.

    This is `mesh.reshard`, with `auto` decided (see `shard_model`).
    """
    if config.mesh.reshard != "auto":
        return config.mesh.reshard == "always"
    dtype = compute_dtype(config.precision, CPU)
    roots: list[nn.Module] = [*stages_of(model)] or [model]
    contract = {id(p) for _, p in contract_parameters(model)}
    others = [p for p in roots[0].parameters() if id(p) not in contract]
    return sum(map(_numel_of_ranks, others)) * dtype.itemsize > RESHARD_ABOVE_BYTES


def _one_of_each(config: Config, again: bool) -> Config:
    """Return a configuration with one block of every kind, in order of appearance; one stage."""
    model = with_kinds(config.model, list(dict.fromkeys(layer_kinds(config.model))))
    mesh = replace(config.mesh, pp=1, reshard="always" if again else "never")
    return replace(config, model=model, mesh=mesh)


def _of_block(
    model: HybridLM,
    i: int,
    log: CollectiveLog,
    config: Config,
    world: World,
    again: bool,
    once: bool,
    in_fp8: set[str],
) -> list[Drawn]:
    gathers, ends = _storage(model.blocks[str(i)], config, world, in_fp8)
    layouts = _layout_pictures(model, i, config)
    drawn = [] if once else [replace(move, phase=FORWARD) for move in gathers]
    ends = [replace(move, phase=STEP) for move in gathers] + ends if once else ends
    for phase in (FORWARD, BACKWARD):
        if phase == BACKWARD and again:
            drawn += [replace(move, phase=BACKWARD) for move in gathers]
        calls = [c for c in log.select(scope=f"{i} {phase}") if not of_storage(c)]
        drawn += _pictures(calls, phase, layouts, model.kinds[i], config.model)
    return drawn + ends


def of_storage(call: Collective) -> bool:
    """Return whether FSDP2 made a call: it alone gathers and reduces into buffers of its own."""
    return call.in_place and call.kind in ("all_gather", "reduce_scatter", "all_reduce")


def _recorded(model: HybridLM, world: World, config: Config) -> CollectiveLog:
    """Run one microbatch; the scope of each recorded call is its layer and phase."""
    model.to_empty(device=CPU)
    model.train()
    boundary, batch = FakeBoundary(model, world, config), fake_batch(config)
    log = CollectiveLog(world.meshes)

    def scoped(name: str) -> Callable[[Tensor], None]:
        def enter(_: Tensor) -> None:
            log.scope = name

        return enter

    def watch(i: int) -> None:
        def before(_: nn.Module, args: tuple[Tensor, Any]) -> None:
            log.scope = f"{i} {FORWARD}"
            args[0].register_hook(scoped(""))

        def after(_: nn.Module, args: Any, out: Tensor) -> None:
            log.scope = ""
            out.register_hook(scoped(f"{i} {BACKWARD}"))

        block = model.blocks[str(i)]
        block.register_forward_pre_hook(before)
        block.register_forward_hook(after)

    for i in range(len(model.letters)):
        watch(i)
    with log:
        boundary.accumulate([batch])
    return log


def _gathered_in_fp8(config: Config) -> dict[str, set[str]]:
    """Linear layers that FSDP2 gathers in FP8, by the letter of their block."""
    if not config.precision.fp8_all_gather:
        return {}
    letters, found = layer_kinds(config.model), dict[str, set[str]]()
    for layer, names in fp8_weights(config).items():
        found.setdefault(letters[layer][0], set()).update(names - {"experts"})
    return found


def _storage(
    block: nn.Module, config: Config, world: World, in_fp8: set[str]
) -> tuple[list[Drawn], list[Drawn]]:
    """Return FSDP2's collectives for a block: gathers of a microbatch, and sums of a step.

    Args:
        block: of the planned model.
        config: resolved.
        world: of the rank.
        in_fp8: linear layers whose weights travel in FP8; ranks agree on the scale of each.
    """
    gathers, ends = [], []
    narrow = compute_dtype(config.precision, CPU)
    weights = [block.get_submodule(f"mixer.{name}").weight for name in in_fp8]
    eight = {id(weight) for weight in weights}
    wide = torch.promote_types(narrow, torch.float32)
    for what, view, parameters in _units(block, world):
        mesh = world.meshes[view]
        names, shards = tuple(mesh.mesh_dim_names or ()), mesh.size(mesh.ndim - 1)
        (*copies, axis), numel = names, sum(_padded(p, shards) for p in parameters)
        if shards == 1:
            continue  # everything is here already
        gather, scatter = f"{what}[N_{axis}] -> [N]", f"d {what}[N]{{{axis}}} -> [N_{axis}]"
        size, dtype = numel * narrow.itemsize, narrow
        if scaled := [p for p in parameters if id(p) in eight]:
            size -= sum(_padded(p, shards) for p in scaled) * (narrow.itemsize - 1)
            dtype, largest = torch.uint8, f"largest of each of {len(scaled)} weights{{{axis}}}"
            gathers.append(Drawn("", largest, "all_reduce", axis, torch.float32, 4 * len(scaled)))
        gathers.append(Drawn("", gather, "all_gather", axis, dtype, size))
        size = numel * wide.itemsize
        ends.append(Drawn(STEP, scatter, "reduce_scatter", axis, wide, size))
        for copy in copies:
            both = f"d {what}[N_{axis}]{{{copy}}} -> [N_{axis}]"
            ends.append(Drawn(STEP, both, "all_reduce", copy, wide, size // shards))
    return gathers, ends


def _units(block: nn.Module, world: World) -> Iterator[tuple[str, str, list[nn.Parameter]]]:
    """FSDP units of a block as parallel/fsdp.py makes them: name, mesh, parameters."""
    apart = world.degree("ep") > 1 or world.degree("tp") > 1
    routed = [p for m in spread_modules(block) for p in m.parameters()] if apart else []
    others = {id(p) for p in routed} | {id(p) for _, p in contract_parameters(block)}
    yield "block", "shard", [p for p in block.parameters() if id(p) not in others]
    if routed:
        yield "experts", "expert_shard", routed


def _padded(p: Tensor, shards: int) -> int:
    """Elements of a parameter in a gather: each rank's part is as long as the first's."""
    assert is_dtensor(p)
    names = p.device_mesh.mesh_dim_names or ()
    data = [i for i, name in enumerate(names) if name not in MODEL_AXES]
    first = [0 if i in data else at for i, at in enumerate(p.device_mesh.get_coordinate() or ())]
    return shards * math.prod(
        local_shape(p.shape, shards_of(p.placements), p.device_mesh.shape, first)
    )


def _numel_of_ranks(p: Tensor) -> int:
    """Elements of a parameter that the ranks which share its storage hold together."""
    if not is_dtensor(p):
        return p.numel()
    mesh, names = p.device_mesh, p.device_mesh.mesh_dim_names or ()
    cuts = tuple((i, dim) for i, dim in shards_of(p.placements) if names[i] in MODEL_AXES)
    return math.prod(local_shape(p.shape, cuts, mesh.shape, mesh.get_coordinate() or ()))


MoveKey = tuple[str, str, str, int]  # phase, kind, axis and elements of a call


def _layout_pictures(model: HybridLM, i: int, config: Config) -> dict[MoveKey, str]:
    """Return pictures of a block's activation layouts and their adjoints, by their logged call."""
    B, T = config.train.device_batch_size, config.data.seq_len // config.mesh.cp
    found: dict[MoveKey, str] = {}
    for name, _, enter, leave in activation_layouts(model):
        if not name.startswith(f"blocks.{i}."):
            continue
        for move in (enter, leave):
            if move is not None:
                numel = B * T * moved_width(name, config.model)
                if move.kind == "exchange":  # there and back are as many numbers
                    picture = _text(move.before, move.after, config).replace("->", "<->")
                    here = numel // config.mesh.tp
                    found.setdefault((FORWARD, "all_to_all", move.axis, here), picture)
                    found.setdefault((BACKWARD, "all_to_all", move.axis, here), f"d {picture}")
                    continue
                kinds = ("all_gather", "reduce_scatter")
                there, back = kinds if move.kind == "gather" else kinds[::-1]
                found[FORWARD, there, move.axis, numel] = _text(move.before, move.after, config)
                before, after = _adjoint(move)
                found[BACKWARD, back, move.axis, numel] = _text(before, after, config)
    return found


def moved_width(name: str, model: ModelConfig) -> int:
    """Return the numbers of a token that an activation layout moves."""
    if name.endswith("engram.tables"):
        return memory_width(model)
    return model.stream_width if name.endswith("engram.conv") else model.dim


def _adjoint(move: Redistribute) -> tuple[Array, Array]:
    """Return the layouts of the gradient before and after the adjoint of a move."""
    before, after, axis = move.before, move.after, move.axis
    name = f"d{before.name}"
    if move.kind == "gather":
        return replace(after, name=name, partial=axis), replace(before, name=name)
    return replace(after, name=name), replace(before, name=name, partial=None)


def _text(before: Array, after: Array, config: Config) -> str:
    """Return a move as text, with the tokens that `cp` has sharded already."""
    return f"{_with_context(before, config)} -> {_with_context(after, config)}"


def _with_context(array: Array, config: Config) -> Array:
    if config.mesh.cp == 1:
        return array
    axes = tuple(
        ("cp" if axis is None else f"cp·{axis}") if dim == "T" else axis
        for dim, axis in zip(array.dims, array.axes, strict=True)
    )
    return replace(array, axes=axes)


def _pictures(
    calls: Sequence[Collective],
    phase: str,
    layouts: dict[MoveKey, str],
    kind: str,
    model: ModelConfig,
) -> Iterator[Drawn]:
    """Yield the calls of a block drawn as activation layouts, as context moves, or by shapes."""
    letter = kind[0]
    rows = 0  # exchanges of whole rows so far: to the experts, and back
    turns = [call for call in calls if call.axis == "cp" and call.kind == "all_to_all"]
    for call in calls:
        picture = layouts.get((phase, call.kind, call.axis, call.numel))
        if letter == "E" and call.kind == "all_to_all":  # ep may be the very ranks of cp
            call = replace(call, axis="ep")
        if picture is None and call.axis == "cp":
            back = bool(turns) and call is turns[-1 if phase == FORWARD else 0]
            picture = _context_move(call, phase, kind, model, bool(turns), back)
        if picture is None:
            whole = call.axis == "ep" and call.shapes[0][-1:] == (model.dim,)
            shapes = " -> ".join(f"[{', '.join(map(str, shape))}]" for shape in call.shapes)
            picture = f"{_word(call, phase, whole, rows, letter)}{shapes}"
            rows += whole
        yield Drawn(phase, picture, call.kind, call.axis, call.dtype, call.bytes)


def _context_move(
    call: Collective, phase: str, kind: str, model: ModelConfig, by_heads: bool, back: bool
) -> str | None:
    """Return the picture of an exchange over `cp`: T tokens, J chunks of a row, heads Q.

    Args:
        call: the collective.
        phase: FORWARD or BACKWARD.
        kind: of the block.
        model: its settings.
        by_heads: the mixer exchanges tokens for heads.
        back: this exchange turns heads into tokens again.
    """
    d = "" if phase == FORWARD else "d "
    if call.kind == "all_to_all":
        cut, whole = "heads[B, T_cp, Q]", "heads[B, T, Q_cp]"
        there = (whole, cut) if back == (phase == FORWARD) else (cut, whole)
        return f"{d}{there[0]} -> {there[1]}"
    exchange = KINDS[kind[0]].context
    if call.kind not in ("all_gather", "reduce_scatter") or exchange is None:
        return None
    taps = [exchange.taps(model), *(one.taps(model) for n, one in FEATURES.items() if n in kind)]
    halo = len(call.shapes[0]) == 4 and call.shapes[0][2] + 1 in taps
    what, dims = ("halo", "C") if halo else exchange.gathers(model, kind, by_heads)
    along = "J" if what in ("halo", "state") else "T"
    cut, whole = f"{what}[B, {along}_cp, {dims}]", f"{what}[B, {along}, {dims}]"
    if phase == FORWARD:
        return f"{cut} -> {whole}"
    return f"d {whole}{{cp}} -> d {cut}"


def _word(call: Collective, phase: str, whole_rows: bool, before: int, letter: str) -> str:
    """Return the purpose of an exchange that no activation layout of the plan describes."""
    if letter == "A" and call.kind == "all_reduce":
        return "attention of all heads "  # that the indexer is to resemble
    if call.kind == "all_gather" and not call.dtype.is_floating_point:
        return "choices " if call.dtype == torch.uint8 else "places "
    if call.axis == "ep":
        if not call.dtype.is_floating_point:
            return "counts "
        if not whole_rows:
            return "weights and ids " if phase == FORWARD else "d weights "
        there = ("dispatch ", "combine ") if phase == FORWARD else ("d combine ", "d dispatch ")
        return there[min(before, 1)]
    return ""
