"""Tensor and sequence parallelism: the plan of parallel/plans.py, applied to modules.

Between blocks every rank holds some tokens of the residual stream, inside a mixer it holds some
heads or hidden units of all tokens. Parameters are DTensors for FSDP2, optimizer and checkpoints;
the model's own code reads their local part, as if it were the whole of a smaller model. So no
operator inside a mixer pays for DTensor dispatch, and no mixer knows of ranks.

Legend: B rows, T tokens of all ranks, t tokens of this rank, D model, G groups of heads.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module

from megacpp.blocks.attention.sparse import SparseAttention
from megacpp.blocks.mamba3.module import Mamba3
from megacpp.blocks.top.module import TokenOrder
from megacpp.kernels.linear_cross_entropy.chunked import (
    ShardStatistics,
    VocabularyShard,
    merge_statistics,
)
from megacpp.kernels.mamba3.inputs import HeadWeights, ScanInputs
from megacpp.kernels.sparse_attention.indexer_loss import HeadShard
from megacpp.model.documents import Documents
from megacpp.model.fp32 import wide
from megacpp.model.head import LanguageModelHead
from megacpp.model.hybrid import HybridLM
from megacpp.model.lookup import Table
from megacpp.model.norm import NormOverHeads
from megacpp.model.recompute import PLAIN, Recompute
from megacpp.model.scan import SequenceScan
from parallel.collectives import all_sum, all_sum_plain, gather_plain
from parallel.notation import Array, Redistribute
from parallel.plans import activation_layouts, row_of


class ShardModule(ParallelStyle):
    """Style that shards a module's parameters by their plan rows, and redistributes activations.

    Args:
        arrays: by name below the module; parameters of other axes are left alone.
        enter: redistribution of the first argument; None: none.
        leave: redistribution of the output; None: none.
    """

    def __init__(
        self,
        arrays: Mapping[str, Array],
        enter: Redistribute | None = None,
        leave: Redistribute | None = None,
    ) -> None:
        self.arrays, self.enter, self.leave = arrays, enter, leave

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for leaf, array in self.arrays.items():
            shard_parameter(module, leaf, array, device_mesh)
        group, enter, leave = device_mesh.get_group(), self.enter, self.leave
        if enter is not None:

            def entering(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
                x = args[0]
                recompute: Recompute = getattr(module, "recompute", PLAIN)
                if enter.kind == "gather":
                    return recompute("gather", enter, x, group), *args[1:]
                return enter(x, group), *args[1:]

            module.register_forward_pre_hook(entering)
        if leave is not None:

            def leaving(_: nn.Module, args: tuple[Any, ...], out: Tensor) -> Tensor:
                return leave(out, group)

            module.register_forward_hook(leaving)
        return module


class ShardTable(ShardModule):
    """Style of a sharded table: each rank looks up the rows that it holds, zeros for the others."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        assert isinstance(module, Table)
        module.lookup = LookupOfRank(device_mesh.get_local_rank())
        return super()._apply(module, device_mesh)


class LookupOfRank(nn.Module):
    """Look-up in this rank's rows of a table; the sum over ranks is the whole look-up."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rank = rank

    def forward(self, ids: Tensor, weight_vD: Tensor) -> Tensor:
        """Return rows `[..., D]` of ids from the rows r v to (r + 1) v that rank r has, else zeros.

        Args:
            ids: `[...]`, of the whole table.
            weight_vD: `[v, D]`, this rank's rows.
        """
        local = ids - self.rank * len(weight_vD)
        here = (local >= 0) & (local < len(weight_vD))
        x_D = F.embedding(torch.where(here, local, 0), weight_vD)
        return torch.where(here[..., None], x_D, 0)


class ShardHead(ShardModule):
    """Style of a sharded vocabulary: each rank makes the logits of its words alone."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        assert isinstance(module, LanguageModelHead)
        super()._apply(module, device_mesh)
        module.shard, enter = _words(module, device_mesh), self.enter
        group = device_mesh.get_group()

        def entering(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
            x, labels, *ahead = args  # hidden states for tokens further ahead come the same way
            further = [a._replace(x_NTD=enter(a.x_NTD, group)) for a in ahead] if enter else ahead
            return x, labels, *further

        module.register_forward_pre_hook(entering)
        return module


class ShardTop(ShardModule):
    """Style of sharded token order prediction; every rank computes and records the whole loss."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        assert isinstance(module, TokenOrder)
        super()._apply(module, device_mesh)
        module.shard, module.record_share = (
            _words(module.unembed, device_mesh),
            1 / device_mesh.size(),
        )
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


class ShardNorm(ShardModule):
    """Style of an RMSNorm over all heads: each rank has some of its width, and sums squares."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        assert isinstance(module, NormOverHeads)
        super()._apply(module, device_mesh)
        module.normalise = NormaliseOverRanks(module.dim, device_mesh.get_group())
        return module


class NormaliseOverRanks(nn.Module):
    """RMSNorm over a last dim of which each rank of a group has a part."""

    def __init__(self, dim: int, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.dim, self.group = dim, group

    def forward(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Return this rank's part of the RMS norm over `dim`, in the dtype of `x`.

        Args:
            x: `[..., dim / ranks]`.
            weight: `[dim / ranks]`.
            eps: added to the mean square.
        """
        x_wide = wide(x)
        square = all_sum(x_wide.square().sum(-1, keepdim=True), self.group) / self.dim
        return (x_wide * torch.rsqrt(square + eps) * weight).to(x.dtype)


class ShardExpertMixer(ShardModule):
    """Style of an E mixer: router and routed experts get the documents of the rank's own tokens."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        super()._apply(module, device_mesh)
        rank, size = device_mesh.get_local_rank(), device_mesh.size()

        def own_tokens(_: nn.Module, args: tuple[Tensor, Documents]) -> tuple[Tensor, Documents]:
            x_BtD, docs = args
            return x_BtD, docs.memo(("tokens", rank, size), lambda: _tokens(docs, rank, size))

        module.register_forward_pre_hook(own_tokens)
        return module


def shard_heads_and_rows(model: HybridLM, tp: DeviceMesh) -> None:
    """Apply the plan over the axis `tp`, in place; the model may be on the meta device."""
    parallelize_module(model, tp, tensor_plan(model))  # type: ignore[arg-type]
    if hasattr(model, "mtp"):
        model.mtp.record_share = 1 / tp.size()  # the head tells each rank the whole loss
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


def shard_parameter(module: nn.Module, leaf: str, array: Array, mesh: DeviceMesh) -> None:
    """Make a parameter a DTensor on the one axis of `mesh`; its module reads the local part.

    The gradient of a local part is taken as it comes: of a parameter that every rank has whole it
    is a partial sum, which the accumulation boundary completes once per step.

    Args:
        module: that owns the parameter.
        leaf: its name in the module.
        array: its dims and axes.
        mesh: of one axis.
    """
    (axis,) = mesh.mesh_dim_names or ("",)
    whole = module._parameters[leaf]
    assert whole is not None
    cut = distribute_tensor(whole.detach(), mesh, [array.placement(axis)])
    module._parameters[leaf] = nn.Parameter(cut, whole.requires_grad)
    read_locally(module, leaf)


def read_locally(module: nn.Module, leaf: str) -> None:
    """Make `module.<leaf>` the local part of that parameter while FSDP2 has it gathered.

    This is a property on a class made for this one module: the parameter itself stays in
    `_parameters`, where FSDP2, optimizer and checkpoints look for it. Outside of a forward, when it
    is sharded over a second axis too, it reads as itself.
    """
    kind = type(module)
    if not getattr(kind, "reads_locally", False):
        kind = type(kind.__name__, (kind,), {"reads_locally": True, "__module__": kind.__module__})
        module.__class__ = kind

    def read(self: nn.Module) -> Tensor | None:
        value = self._parameters[leaf]
        if not isinstance(value, DTensor) or value.device_mesh.ndim > 1:
            return value
        return value.to_local(grad_placements=value.placements)

    setattr(kind, leaf, property(read))


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


def _words(owner: nn.Module, mesh: DeviceMesh) -> VocabularyShard:
    """Return this rank's words of an unembedding, with the merge of all ranks' statistics."""
    words = owner._parameters["weight"].shape[0] // mesh.size()  # type: ignore[union-attr]
    group = mesh.get_group()

    def merge(own: ShardStatistics) -> ShardStatistics:
        all_R3n = gather_plain(torch.stack(own)[None], 0, group)
        return merge_statistics([ShardStatistics(*of_rank) for of_rank in all_R3n])

    return VocabularyShard(mesh.get_local_rank() * words, merge)


def _tokens(docs: Documents, rank: int, size: int) -> Documents:
    """Documents of the tokens that a rank of `tp` holds between blocks."""
    t = docs.ids_BT.shape[1] // size
    return docs.take(torch.arange(rank * t, (rank + 1) * t, device=docs.ids_BT.device))


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
