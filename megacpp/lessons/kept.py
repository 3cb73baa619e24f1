"""Bytes that blocks keep for backward, as written and compiled.

Counted: storages alive after a forward while only the graph is held, made inside of it or the
block's input. Not counted: parameters, and what all layers share.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

import torch
from torch import Tensor

from checkpointing.apply import give
from checkpointing.compile import Compiled, compile_blocks
from checkpointing.recompute import BlockRecompute, Replays
from checkpointing.tracing.live_bytes import LiveBytes
from megacpp.blocks.attention.config import AttentionConfig
from megacpp.blocks.dense.config import MLPConfig
from megacpp.config.schema import Config, ModelConfig, PrecisionConfig
from megacpp.lessons.models import small
from megacpp.model.block import Block
from megacpp.model.documents import Documents
from megacpp.model.fp32 import contract_parameters
from megacpp.model.hybrid import HybridLM
from megacpp.model.regions import Region
from parallel.build import build_model
from parallel.mesh import World

ONE = World(0, 1, torch.device("cpu"))
B, T, D = 2, 64, 256
GQA = AttentionConfig(num_heads=4, num_kv_heads=1, head_dim=64)
MODEL = ModelConfig(dim=D, attention=GQA, mlp=MLPConfig(hidden_dim=7 * D // 2))
WIDE = replace(
    small("AFF"),
    dim=64,
    attention=replace(small().attention, head_dim=16, qk_norm=False),
    mlp=MLPConfig(hidden_dim=256),
)


def kept_per_token(
    letters: str, model: ModelConfig, dtype: torch.dtype, regions: Iterable[Region] = ()
) -> float:
    """Return bytes per token that the backward of these blocks, one after another, holds on to.

    Args:
        letters: kinds of the blocks.
        model: sizes.
        dtype: of weights and stream.
        regions: recompute regions, which run again in backward.
    """
    blocks = [Block(letter, model).to(dtype) for letter in letters]
    for block in blocks:
        assert all(p.dtype == torch.float32 for _, p in contract_parameters(block))
        for p in block.parameters():
            torch.nn.init.normal_(p, std=0.1)
        give(block, BlockRecompute(frozenset(regions), Replays()))
    docs = Documents.rows(B, T)
    for live in (LiveBytes(), LiveBytes()):  # the first forward makes the rotary table
        with live:
            x_BTD = torch.randn(B, T, D).to(dtype).requires_grad_()
            y_BTD = x_BTD
            for block in blocks:
                y_BTD = block(y_BTD, docs)
            graph = y_BTD.grad_fn
            del x_BTD, y_BTD
            alive = live.alive()
        assert graph is not None
    return alive / (B * T)


def pair(model: ModelConfig, budget: float) -> tuple[HybridLM, HybridLM, Compiled]:
    """Return a model and the same model compiled."""
    config = Config(model=model, precision=PrecisionConfig("fp64"))
    found: list[Compiled] = []
    compiled = build_model(
        config, ONE, lambda m: found.append(compile_blocks(m, "aot_eager", budget))
    )
    return build_model(config, ONE), compiled, found[0]


def kept_bytes(model: HybridLM, layer: int, x_BTD: Tensor, docs: Documents) -> int:
    """Return the bytes that a block saves, without parameters and tensors that layers share.

    Args:
        model: model of the block.
        layer: its number.
        x_BTD: inputs.
        docs: documents of the rows.
    """
    kept: dict[int, int] = {}

    def pack(t: Tensor) -> Tensor:
        kept[t.untyped_storage()._cdata] = t.untyped_storage().nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        y_BTD = model.blocks[str(layer)](x_BTD, docs)
    for t in (*model.parameters(), *remembered(docs)):
        kept.pop(t.untyped_storage()._cdata, None)
    y_BTD.sum().backward()
    return sum(kept.values())


def remembered(docs: Documents) -> Iterator[Tensor]:
    """Yield the tensors that layers made of the documents and share."""
    for value in vars(docs)["_memo"].values():
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, Documents):
            yield from remembered(value)
