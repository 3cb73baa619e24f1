"""Checkpoints of the recurrent blocks' authors: their fused projections, and our parts of them.

Upstream keeps all projections of a block's input in one matrix, and all channels of the short
convolution in one more. Here every part is a module of its own, so that tensor parallelism can
shard each by its heads. Same rows, same order: splitting and joining are exact, for gradients as
well. `BlockKind.upstream` says which parts a fused tensor has: state-spaces mamba for Mamba-3,
lm-engine for M2RNN, Qwen3-Next for Gated DeltaNet, which repeats the order per key head.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from megacpp.blocks.descriptor import BlockKind
from megacpp.config.schema import ModelConfig


def from_upstream(
    kind: BlockKind, state: Mapping[str, Tensor], model: ModelConfig
) -> dict[str, Tensor]:
    """Return our tensors of an upstream mixer; names that aren't fused stay.

    Raises:
        AssertionError: a fused tensor hasn't the rows of `model`.
    """
    fused, sizes = {one.name: one for one in kind.upstream}, kind.rows(model)
    ours = {name: t for name, t in state.items() if name not in fused}
    for name in state.keys() & fused.keys():
        names, groups = fused[name].ours, fused[name].groups(model)
        rows = [sizes[part] // groups for part in names]
        whole = sum(rows) * groups
        assert whole == len(state[name]), f"{name}: {len(state[name])} rows, not {whole}"
        parts = state[name].unflatten(0, (-1, sum(rows))).split(rows, 1)
        ours |= {part: t.flatten(0, 1) for part, t in zip(names, parts, strict=True)}
    return ours


def to_upstream(
    kind: BlockKind, state: Mapping[str, Tensor], model: ModelConfig
) -> dict[str, Tensor]:
    """Return tensors, or gradients, under upstream names: the inverse of `from_upstream`."""
    parts = {part for one in kind.upstream for part in one.ours}
    theirs = {name: t for name, t in state.items() if name not in parts}
    for one in kind.upstream:
        if one.ours[0] in state:
            heads = one.groups(model), -1
            rows = [state[part].unflatten(0, heads) for part in one.ours]
            theirs[one.name] = torch.cat(rows, 1).flatten(0, 1)
    return theirs
