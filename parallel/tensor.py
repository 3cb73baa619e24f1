"""Tensor and sequence parallelism: the plan of parallel/plans.py, applied to modules.

Between blocks every rank holds some tokens of the residual stream, inside a mixer it holds some
heads or hidden units of all tokens. Parameters are DTensors for FSDP2, optimizer and checkpoints;
the model's own code reads their local part, as if it were the whole of a smaller model. So no
operator inside a mixer pays for DTensor dispatch, and no mixer knows of ranks.

Legend: B rows, T tokens, h heads of this rank, P numbers of a head.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module

from megacpp.blocks.attention.sparse import SparseAttention
from megacpp.blocks.mamba3.module import Mamba3
from megacpp.blocks.top.module import TokenOrder
from megacpp.kernels.mamba3.inputs import HeadWeights, ScanInputs
from megacpp.kernels.sparse_attention.indexer_loss import HeadShard
from megacpp.model.auxiliary import AuxiliarySource
from megacpp.model.documents import Documents
from megacpp.model.hybrid import HybridLM
from megacpp.model.norm import NormOverHeads
from megacpp.model.scan import SequenceScan
from parallel.collectives import all_sum_plain
from parallel.notation import Array
from parallel.plans import activation_layouts, row_of
from parallel.styles import (
    ShardExpertMixer,
    ShardHead,
    ShardModule,
    ShardNorm,
    ShardTable,
    words_of_rank,
)


class ShardTop(ShardModule):
    """Style of sharded token order prediction, whose weight has the rank's words."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        assert isinstance(module, TokenOrder)
        super()._apply(module, device_mesh)
        module.shard = words_of_rank(module.unembed, device_mesh)
        return module


class ShardMixer(ShardModule):
    """Style of a mixer of heads, and of its parts that heads on several ranks share."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        super()._apply(module, device_mesh)
        if isinstance(module, Mamba3) and module.mamba.ngroups > 1:
            module.scan = GroupsOfRank(module.scan, module.mamba.ngroups, device_mesh)
        if isinstance(module, SparseAttention):
            _spread_heads(module, device_mesh.get_group())
        return module


class GroupsOfRank(nn.Module):
    """Mamba-3 scan with the groups of B and C that the rank's heads read; all are computed."""

    def __init__(self, scan: SequenceScan, groups: int, mesh: DeviceMesh) -> None:
        super().__init__()
        rank, size = mesh.get_local_rank(), mesh.size()
        self.scan, self.first, self.count = scan, rank * groups // size, max(1, groups // size)

    def forward(self, inputs: ScanInputs, weights: HeadWeights, docs: Documents) -> Tensor:
        """Return outputs `[B, T, h, P]` of this rank's heads."""
        own = slice(self.first, self.first + self.count)
        inputs = replace(inputs, Q=inputs.Q[:, :, :, own], K=inputs.K[:, :, :, own])
        return self.scan(inputs, weights, docs)


def shard_heads_and_rows(model: HybridLM, tp: DeviceMesh) -> None:
    """Apply the plan over the axis `tp`, in place; the model may be on the meta device."""
    parallelize_module(model, tp, tensor_plan(model))  # type: ignore[arg-type]
    for source in model.modules():
        if isinstance(source, AuxiliarySource) and source.of_vocabulary:
            source.record_share = 1 / tp.size()
    model.tie()


def tensor_plan(model: HybridLM) -> dict[str, ParallelStyle]:
    """Return styles by module name: parameters that `ep` doesn't shard, and activation layouts."""
    arrays: dict[str, dict[str, Array]] = {}
    for name, _ in model.named_parameters(remove_duplicate=False):
        array, (owner, _, leaf) = row_of(model, name), name.rpartition(".")
        if array.dim_on("ep") is None:
            arrays.setdefault(owner, {})[leaf] = array
    layouts = {name: (enter, leave) for name, _, enter, leave in activation_layouts(model)}
    return {
        name: _style(name, model)(arrays.get(name, {}), *layouts.get(name, (None, None)))
        for name in dict.fromkeys((*arrays, *layouts, *model.mixers()))
    }


def partial_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Return parameters that each rank of `tp` has whole, whose gradients are only partial sums."""
    found = []
    for p in model.parameters():
        if isinstance(p, DTensor):
            names = p.device_mesh.mesh_dim_names or ()
            if "tp" in names and p.placements[names.index("tp")].is_replicate():
                found.append(p)
    return found


def _style(name: str, model: HybridLM) -> type[ShardModule]:
    last = name.rpartition(".")[2]
    if last == "mixer":
        return ShardExpertMixer if hasattr(model.get_submodule(name), "experts") else ShardMixer
    styles: dict[str, type[ShardModule]] = {
        "embed": ShardTable,
        "tables": ShardTable,
        "top": ShardTop,
        "head": ShardHead,
    }
    if isinstance(model.get_submodule(name), NormOverHeads):
        return ShardNorm
    return styles.get(last, ShardModule)


def _spread_heads(mixer: SparseAttention, group: dist.ProcessGroup) -> None:
    """Give a sparse mixer with some of the heads the sums over all heads that it needs, in place.

    Every rank has all of the indexer and all tokens, so all make the same choice and the same
    gradient, of which each gives its share. The indexer's target, a sum over heads, is added up
    block by block.
    """
    heads = mixer.config.attention.num_heads
    mixer.inner.heads = HeadShard(heads, partial(all_sum_plain, group=group))
    if mixer.indexer is not None:
        mixer.indexer.gradient_share = mixer.indexer.record_share = 1 / group.size()
