"""Styles of tensor parallelism: parameters of which a rank has a part, and what it makes of them.

A style shards a module's parameters and redistributes activations around its forward. Where a
part of a table, of the vocabulary or of a norm's width needs more, the style swaps a submodule.

Legend: B rows, T tokens of all ranks, t tokens of this rank, D model, V words, v of this rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle

from megacpp.kernels.linear_cross_entropy.chunked import (
    ShardStatistics,
    VocabularyShard,
    merge_statistics,
)
from megacpp.model.documents import Documents
from megacpp.model.head import LanguageModelHead, Table
from megacpp.model.norm import NormOverHeads
from megacpp.model.recompute import PLAIN, Recompute
from megacpp.torch_extras import wide
from parallel.collectives import all_sum, gather_plain
from parallel.notation import Array, Redistribute


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
        if self.enter is not None:
            enter, gathers = self.enter.over(device_mesh), self.enter.kind == "gather"

            def entering(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
                recompute: Recompute = getattr(module, "recompute", PLAIN)
                x = recompute("gather", enter, args[0]) if gathers else enter(args[0])
                return x, *args[1:]

            module.register_forward_pre_hook(entering)
        if self.leave is not None:
            leave = self.leave.over(device_mesh)

            def leaving(_: nn.Module, args: tuple[Any, ...], out: Tensor) -> Tensor:
                return leave(out)

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
        module.shard = words_of_rank(module, device_mesh)
        enter = None if self.enter is None else self.enter.over(device_mesh)

        def entering(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
            x, labels, *ahead = args  # hidden states for tokens further ahead come the same way
            further = [a._replace(x_NTD=enter(a.x_NTD)) for a in ahead] if enter else ahead
            return x, labels, *further

        module.register_forward_pre_hook(entering)
        return module


class ShardExpertMixer(ShardModule):
    """Style of an E mixer: router and routed experts get the documents of the rank's own tokens."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        super()._apply(module, device_mesh)
        rank, size = device_mesh.get_local_rank(), device_mesh.size()

        def own_tokens(_: nn.Module, args: tuple[Tensor, Documents]) -> tuple[Tensor, Documents]:
            x_BtD, docs = args
            t, device = docs.ids_BT.shape[1] // size, docs.ids_BT.device

            def own() -> Documents:
                return docs.take(torch.arange(rank * t, (rank + 1) * t, device=device))

            return x_BtD, docs.memo(("tokens", rank, size), own)

        module.register_forward_pre_hook(own_tokens)
        return module


class ShardNorm(ShardModule):
    """Style of an RMSNorm over all heads: each rank has some of its width, and sums squares."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        assert isinstance(module, NormOverHeads)
        super()._apply(module, device_mesh)
        module.over_ranks = NormaliseOverRanks(module.dim, device_mesh.get_group())
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


def words_of_rank(owner: nn.Module, mesh: DeviceMesh) -> VocabularyShard:
    """Return this rank's words of an unembedding, with the merge of all ranks' statistics."""
    words = owner._parameters["weight"].shape[0] // mesh.size()  # type: ignore[union-attr]
    group = mesh.get_group()

    def merge(own: ShardStatistics) -> ShardStatistics:
        all_R3n = gather_plain(torch.stack(own)[None], 0, group)
        return merge_statistics([ShardStatistics(*of_rank) for of_rank in all_R3n])

    return VocabularyShard(mesh.get_local_rank() * words, merge)
