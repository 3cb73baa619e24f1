"""Describe a step of our own trainer to the time model, from a resolved configuration.

    predict(step_work(config, 64, "H100"), gpu("H100"), Rates())

Products come from the shapes of a block's parameters, memory-bound work from its trace, attention
and scans from the descriptor's FLOPs that no parameter explains, bytes on the wire from
megacpp/memory/traffic.py. No torch import here, but for a trace that the cache lacks.

Not counted: labels of experts' rows, load that differs between experts, kernels that a run chooses
by itself (`auto` is torch's form here), offload.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

from megacpp.blocks.experts.rows import expert_rows, pieces_of
from megacpp.blocks.kinds import KINDS
from megacpp.config.checks.fp8 import fp8_weights
from megacpp.config.schema import CheckpointingPolicy, Config
from megacpp.memory.budget import as_planned
from megacpp.memory.forms.local_shapes import LocalShapes
from megacpp.memory.forms.parameters import Place, held, kinds_of
from megacpp.memory.forms.traced import TracedPart, request_of
from megacpp.memory.forms.weights import LEFT_ALONE, Weight, weights
from megacpp.memory.replayed import ahead_again
from megacpp.memory.traffic import gathers_again
from megacpp.model.flops import ahead_flops, block_flops, train_flops_per_token
from megacpp.model.pattern import layer_model
from megacpp.model.regions import BLOCK, Region, layer_regions, regions_of
from megacpp.model.stage_actions import Actions
from megacpp.model.stages import as_scheduled, microbatches_through, stage_parts
from megacpp.speed.collectives import AxisSpread
from megacpp.speed.fp8 import in_fp8
from megacpp.speed.operators import Attend, Operator, Passes, Product, SerialWork
from megacpp.speed.optimizer import optimizer_step
from megacpp.speed.sent import axes, between, block_transfers
from megacpp.speed.sparse import attention_products, indexer_products
from megacpp.speed.step import BlockWork, StepWork, Transfer
from megacpp.speed.traced import moved_by

ATTENTION = {"A100": "flash2", "H100": "flash2", "B200": "flash2"}  # torch's own kernel
SPARSE = ("A.index", "A.share")  # blocks that attend to chosen keys
SCAN_TIMES = 3.0  # a chunked scan's small products take as long as 3 times their FLOPs (assumed)
TOKEN_US = 1.5  # a token's step in a recurrence whose state stays in registers (assumed)
# Of an fp32 logit: its maximum and sum of exponentials read it, the gradient is written over it.
LOGIT_BYTES = 4.0 * (1 + 1 + 2)


class MeshWork(NamedTuple):
    """Work of a step that depends on the mesh alone, not on rows or recomputation.

    Attributes:
        parts: kinds of all blocks of the model, by stage in order.
        layers: number of the first layer of each stage.
        axes: spread of each axis.
        reshard: see `fsdp_tasks`.
        optimizer: operators of the optimizer's step.
        between: collectives of it.
        flops: of a token.
    """

    parts: tuple[tuple[str, ...], ...]
    layers: tuple[int, ...]
    axes: dict[str, AxisSpread]
    reshard: bool
    optimizer: tuple[Operator, ...]
    between: tuple[Transfer, ...]
    flops: float


@lru_cache(maxsize=4096)
def _mesh_work(config: Config, size: int, per_node: int) -> MeshWork:
    """Return the work of a mesh; rows, microbatches and recompute of `config` are immaterial."""
    mesh, model = config.mesh, config.model
    own, place = LocalShapes.on_rank(config, size, 0), Place.on_rank(config, size, 0)
    stages: list[tuple[int, tuple[str, ...], int]] = []
    stored: list[str] = []
    for rank in range(mesh.pp):
        kinds = kinds_of(config, size, rank * (size // mesh.pp))
        stored += [kind for stage in kinds for kind in stage]
        if mesh.pp == 1:
            stages.append((0, kinds[0], 0))
            continue
        parts = stage_parts(model, mesh, rank)
        both = zip(parts, kinds, strict=True)
        stages += [(p.index, k, p.layers.start) for p, k in both if not p.back]
    stages.sort()
    return MeshWork(
        tuple(kinds for _, kinds, _ in stages),
        tuple(layer for _, _, layer in stages),
        axes(config, size, per_node),
        gathers_again(own, place, kinds_of(config, size, 0)),
        tuple(optimizer_step(config, place, stored)),
        between(config, size),
        train_flops_per_token(model, own.row),
    )


def step_work(
    config: Config,
    size: int,
    generation: str,
    per_node: int = 8,
    actions: Actions = (),
    least: bool = False,
) -> StepWork:
    """Return the work of an optimizer step of one rank.

    Args:
        config: resolved for `size` ranks; what is `auto` is taken as on a GPU.
        size: number of ranks.
        generation: of the GPU, which decides attention's kernel.
        per_node: GPUs of a node.
        actions: of a pipeline's schedule that splits the backward, from torch.
        least: memory-bound work is that of one rank, divided evenly; no mesh is traced.
    """
    config = as_planned(as_scheduled(config))
    mesh, train = config.mesh, config.train
    own = LocalShapes.on_rank(config, size, 0)
    plain = replace(train, device_batch_size=1, grad_accum=1, tokens_per_step=0)
    kept = CheckpointingPolicy(compress=config.recompute.compress)
    found = _mesh_work(replace(config, train=plain, recompute=kept), size, per_node)
    make = _maker(*_alone(config, size), generation, least).block
    pieces = layer_regions(config.recompute, config.model)
    eight = fp8_weights(config)
    blocks: list[BlockWork] = []
    stages: list[list[int]] = []
    for kinds, layer in zip(found.parts, found.layers, strict=True):
        stages.append([])
        for kind in kinds:
            again, fp8 = frozenset(), frozenset[str]()
            if kind[0] in KINDS:
                again, fp8, layer = pieces[layer], eight.get(layer, fp8), layer + 1
            stages[-1].append(len(blocks))
            blocks.append(make(kind, again, fp8))
    tokens = own.rows * own.row * train.grad_accum * mesh.dp_replicate * mesh.dp_shard / size
    return StepWork(
        blocks,
        found.axes,
        microbatches_through(mesh.pp_schedule, train.grad_accum),
        "fsdp" if size > mesh.pp * mesh.tp or _shares_experts(found) else "none",
        gather_bytes=own.compute,
        reduce_bytes=own.wide,
        copied=True,
        reshard=found.reshard,
        resident=train.gradient_sync == "resident",
        stage_gathers=_stage_gathers(config) if found.reshard else 1,
        reduce_each=train.gradient_sync == "each",
        stages=stages if mesh.pp > 1 else (),
        schedule=mesh.pp_schedule,
        actions=actions,
        stage_bytes=own.stream_bytes,
        optimizer=found.optimizer,
        optimizer_sent=found.between,
        tokens=tokens,
        flops=tokens * found.flops,
    )


def _shares_experts(work: MeshWork) -> bool:
    """Return whether FSDP2 shards the model's experts: over ranks of tp, too."""
    routed = any(kind[0] == "E" for kinds in work.parts for kind in kinds)
    return routed and work.axes["expert_data"].size > 1


def _stage_gathers(config: Config) -> int:
    """Return how often a pipeline gathers weights that it frees after each forward.

    Those of the last forward's backward stay for all other backwards.
    """
    train = config.train
    return 1 if config.mesh.pp == 1 or train.gradient_sync == "resident" else train.grad_accum + 1


def _alone(config: Config, size: int) -> tuple[Config, int]:
    """Return the smallest run whose blocks do the same, and its ranks.

    Neither replicas, shards nor stages change what a block does with one microbatch.
    """
    m = config.mesh
    shards = m.ep // math.gcd(m.ep, m.cp * m.tp)
    if size > m.pp:
        shards = max(shards, 2 // min(2, m.cp * m.tp))
    mesh = replace(m, pp=1, dp_replicate=1, dp_shard=shards)
    train = replace(config.train, grad_accum=1, tokens_per_step=0)
    return replace(config, mesh=mesh, train=train), shards * m.cp * m.tp


@lru_cache(maxsize=4096)
def _maker(config: Config, size: int, generation: str, least: bool) -> _Maker:
    return _Maker(config, size, generation, least)


class _Maker:
    """Makes each kind of block once.

    Args:
        config: resolved.
        size: number of ranks.
        generation: of the GPU.
        least: see `step_work`.
    """

    def __init__(self, config: Config, size: int, generation: str, least: bool) -> None:
        self.config, self.generation, self.least = config, generation, least
        self.own, self.place = LocalShapes.on_rank(config, size, 0), Place.on_rank(config, size, 0)
        self.sent = block_transfers(config, self.own, size)
        self.made: dict[tuple[str, frozenset[Region], frozenset[str]], BlockWork] = {}

    def block(self, kind: str, pieces: frozenset[Region], fp8: frozenset[str]) -> BlockWork:
        """Return a block with weights in FP8 by name, an end of the model, or another part."""
        if (kind, pieces, fp8) not in self.made:
            mixer = kind[0] in KINDS
            made = self._mixer(kind, pieces, fp8) if mixer else self._end(kind)
            self.made[kind, pieces, fp8] = made
        return self.made[kind, pieces, fp8]

    def _products(self, w: Weight, fp8: frozenset[str]) -> tuple[list[Operator], list[Operator]]:
        """Return the products of a matrix, forward and backward."""
        shape, count, tokens = list(w.shape), 1, self.own.tokens
        if w.experts:
            shape, count = shape[1:], shape[0] // self.place.ep
            tokens = max(1, expert_rows(self.own).slots // max(1, count))
        elif w.tp is not None:
            shape[w.tp] //= self.own.tp
        n, k = shape
        pieces = pieces_of(self.own, tokens) if w.experts else 1
        rows = math.ceil(tokens / pieces)
        one = Product(rows, n, k, count * pieces)
        back = one._replace(n=k, k=n, layout="NN"), Product(n, k, tokens, count, "NT")
        if ("experts" if w.experts else w.name) in fp8:
            return in_fp8([one], back, self.config, w.experts)
        return [one], [*back]

    def _mixer(self, kind: str, pieces: frozenset[Region], fp8: frozenset[str]) -> BlockWork:
        own, model = self.own, self.config.model
        forward: list[Operator] = []
        backward: list[Operator] = []
        explained, dense, experts = 0.0, 0.0, 0.0
        for w in weights(model, kind, self.config.recompute.compress):
            if not w.folded and not w.wide:
                whole = held(w, self.place).whole
                experts += whole * w.experts
                dense += whole * (not w.experts)
            matrix = len(w.shape) == 2 + w.experts and "tables" not in w.name
            if matrix and not w.folded:
                ahead, back = self._products(w, fp8)
                forward += ahead
                backward += back
                share = model.moe.top_k / w.shape[0] if w.experts else 1.0
                n, k = w.shape[-2:]
                explained += 2.0 * n * k * share
        mixed = max(0.0, block_flops(kind, model, own.row) - explained)
        attended, back = self._between_tokens(kind, mixed)
        forward, backward = [*forward, *attended], [*backward, *back]
        if kind.startswith(SPARSE[0]):
            forward += indexer_products(layer_model(model, kind), own)
        moved, issued, replayed = self._moved(kind, pieces)
        issued = issued[0] + _launches(forward), issued[1] + _launches(backward)
        again: list[Operator] = []
        if replayed is not None:
            again = [self._equal(replayed)] if replayed else []
        elif pieces >= BLOCK:
            again = forward
        else:
            apart = self._chooses(kind) and "core_attn" in pieces
            rest = pieces - {"core_attn"} if apart else pieces
            per_token = 2.0 * sum(
                KINDS[kind[0]].region_multiply_adds(p, layer_model(model, kind), own.row)
                for p in rest
            )
            again = [self._equal(per_token)] if per_token else []
            again += attended if apart else ()
        sent = self.sent.get(kind, ())
        return BlockWork(
            kind,
            (*forward, moved[0]),
            (*backward, *again, moved[1]),
            sent,
            sent,
            dense,
            experts,
            issued,
        )

    def _moved(
        self, kind: str, pieces: frozenset[Region]
    ) -> tuple[tuple[Passes, Passes], tuple[int, int], float | None]:
        """Return memory-bound work of a block, operators that the host issues, and `replayed`.

        The last are FLOPs of a token through the whole block; None: the policy decides.
        """
        usual = regions_of(self.config.recompute, self.config.model, kind[0])
        wide = self.config.precision.fp8 != "off"
        part = TracedPart((kind.removesuffix(LEFT_ALONE),), last=pieces != usual, wide=wide)
        if not self.least:
            moved, issued, again = moved_by(request_of(self.own, part))
            return moved, issued, again and again * self.own.tp / self.own.tokens
        mesh = replace(self.config.mesh, tp=1, cp=1, ep=1)
        alone = LocalShapes.on_rank(replace(self.config, mesh=mesh), self.config.mesh.dp_shard, 0)
        moved, _, again = moved_by(request_of(alone, part))
        among = self.own.tp * self.own.cp
        return (
            (
                moved[0]._replace(bytes=moved[0].bytes / among),
                moved[1]._replace(bytes=moved[1].bytes / among),
            ),
            (0, 0),
            again and again / alone.tokens,
        )  # a mesh may issue fewer operators

    def _equal(self, per_token: float) -> Product:
        """Return one product of as many FLOPs as `per_token` on this rank's tokens."""
        dim = self.config.model.dim
        return Product(self.own.tokens, max(1, round(per_token / (2 * dim * self.own.tp))), dim)

    def _chooses(self, kind: str) -> bool:
        """Return whether a kind of block attends to chosen keys."""
        return kind.startswith(SPARSE) and not self.own.warms_up

    def _between_tokens(
        self, kind: str, mixed: float
    ) -> tuple[Sequence[Operator], Sequence[Operator]]:
        """Return attention, a scan or a recurrence; `mixed`: its FLOPs a token."""
        own, model = self.own, self.config.model
        if not mixed or KINDS[kind[0]].context is None:
            return [], []
        if self._chooses(kind):
            return attention_products(layer_model(model, kind), own)
        if kind[0] == "A":
            a = layer_model(model, kind).attention
            heads = own.rows * max(1, a.num_heads // own.tp)
            kernel = ATTENTION[self.generation]
            # SDPA hides what is outside of a window, the other kernels skip it.
            reach = own.row
            if a.window and own.attends_by != "torch":
                reach = min(a.window, own.row)
            keys = reach - reach**2 / (2 * own.row)  # a row's first queries see fewer
            one = Attend(heads, own.here, keys, sum(a.head_dims), kernel)
            return [one], [one._replace(backward=True)]
        flops = SCAN_TIMES * mixed * own.tokens / own.tp
        serial = own.row if kind[0] == "R" else 0
        scan = SerialWork(serial, TOKEN_US, 0.0, flops)
        return [scan], [scan._replace(steps=2 * serial, flops=2.5 * flops)]

    def _end(self, kind: str) -> BlockWork:
        """Return the work of embedding, head or another part beside the blocks."""
        own, model = self.own, self.config.model
        stream = Passes(4.0 * own.stream * model.dim * own.compute)
        dense = sum(
            held(w, self.place).whole for w in weights(model, kind) if not w.wide
        ) * (kind != "head" or not model.tie_embeddings)  # fmt: skip
        if kind in ("head", "top"):
            width = model.vocab_size // own.tp
            moved = LOGIT_BYTES
            if own.by("cross_entropy") == "triton":  # reads a row twice, whole ones from the cache
                moved = own.compute * (2.0 + (own.tp > 1))
            logits = Passes(moved * own.tokens * width / 2)
            one = Product(own.tokens, width, model.dim)
            across = Product(own.tokens, model.dim, width, 1, "NN")
            down = Product(width, model.dim, own.tokens, 1, "NT")
            return BlockWork(kind, (one, logits), (across, down, logits), dense=dense)
        if kind == "mtp":
            one = self._equal(ahead_flops(model, own.row))
            replayed = ahead_again(self.config)
            again = [self._equal(replayed)] if replayed else []
            return BlockWork(kind, (one, stream), (one, one, *again, stream), dense=dense)
        return BlockWork(kind, (stream,), (stream,), dense=dense)


def _launches(ops: Sequence[Operator]) -> int:
    """Return the kernels of memory-bound work that no trace has."""
    return sum(op.launches for op in ops if isinstance(op, Passes))
