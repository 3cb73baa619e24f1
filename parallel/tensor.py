"""Tensor and sequence parallelism: the plan of parallel/plans.py, applied to modules.

Between blocks every rank holds some tokens of the residual stream, inside a mixer it holds some
heads or hidden units of all tokens. Parameters are DTensors for those who store, shard and save
them; the model's own code reads their local part, as if it were the whole of a smaller model. So
no operator inside a mixer pays for DTensor dispatch, and no mixer knows of ranks.

Legend: B rows, T tokens of all ranks, t tokens of this rank, D model, G groups of heads.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
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
from megacpp.model.documents import Documents
from megacpp.model.fp32 import wide
from megacpp.model.head import LanguageModelHead
from megacpp.model.hybrid import HybridLM
from megacpp.model.norm import RMSNorm
from parallel.collectives import all_sum, gather_plain
from parallel.notation import Array, Move
from parallel.plans import doors_of, row_of
from parallel.sparse import spread_heads


class Cut(ParallelStyle):
    """Parameters of a module as its plan rows say, and the moves at its door.

    Args:
        arrays: by name below the module; parameters of other axes are left alone.
    """

    def __init__(
        self,
        arrays: Mapping[str, Array],
        enter: Move | None = None,
        leave: Move | None = None,
    ) -> None:
        self.arrays, self.enter, self.leave = arrays, enter, leave

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for leaf, array in self.arrays.items():
            cut_parameter(module, leaf, array, device_mesh)
        group, enter, leave = device_mesh.get_group(), self.enter, self.leave
        if enter is not None:

            def entering(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
                return enter(args[0], group), *args[1:]

            module.register_forward_pre_hook(entering)
        if leave is not None:

            def leaving(_: nn.Module, args: tuple[Any, ...], out: Tensor) -> Tensor:
                return leave(out, group)

            module.register_forward_hook(leaving)
        return module


class CutEmbedding(Cut):
    """A table in parts: each rank looks up the rows that it holds, zeros for the others."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        assert isinstance(module, nn.Embedding)
        module.forward = partial(_look_up, module, device_mesh.get_local_rank())  # type: ignore[method-assign]
        return super()._apply(module, device_mesh)


class CutHead(Cut):
    """A vocabulary in parts: each rank makes the logits of its words, never those of others."""

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


class CutTop(Cut):
    """The same of token order prediction; every rank finds the loss of all words, and notes it."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        assert isinstance(module, TokenOrder)
        super()._apply(module, device_mesh)
        module.shard, module.record_share = (
            _words(module.unembed, device_mesh),
            1 / device_mesh.size(),
        )
        return module


class CutHeads(Cut):
    """A mixer of heads, with what heads on several ranks share beyond the door."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        super()._apply(module, device_mesh)
        if isinstance(module, Mamba3) and module.mamba.ngroups > 1:
            _choose_groups(module, device_mesh)
        if isinstance(module, SparseAttention):
            spread_heads(module, device_mesh.get_group())
        return module


class CutNorm(Cut):
    """An RMSNorm over all heads: each rank has some of its width and the others' squares."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        assert isinstance(module, RMSNorm)
        super()._apply(module, device_mesh)
        group = device_mesh.get_group()

        def forward(x: Tensor) -> Tensor:
            x_wide = wide(x)
            square = all_sum(x_wide.square().sum(-1, keepdim=True), group) / module.dim
            return (x_wide * torch.rsqrt(square + module.eps) * module.weight).to(x.dtype)

        module.forward = forward  # type: ignore[method-assign]
        return module


class CutExperts(Cut):
    """An E mixer: router and routed experts get the documents of the rank's own tokens."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        super()._apply(module, device_mesh)
        rank, size = device_mesh.get_local_rank(), device_mesh.size()

        def own_tokens(_: nn.Module, args: tuple[Tensor, Documents]) -> tuple[Tensor, Documents]:
            x_BtD, docs = args
            return x_BtD, docs.memo(("tokens", rank, size), lambda: _tokens(docs, rank, size))

        module.register_forward_pre_hook(own_tokens)
        return module


def cut_model(model: HybridLM, tp: DeviceMesh) -> None:
    """Applies the plan over the axis `tp`, in place; the model may be on the meta device."""
    parallelize_module(model, tp, tensor_plan(model))  # type: ignore[arg-type]
    if hasattr(model, "mtp"):
        model.mtp.record_share = 1 / tp.size()  # the head tells each rank the whole loss
    model.tie()


def tensor_plan(model: HybridLM) -> dict[str, ParallelStyle]:
    """Module name to style: every parameter that isn't cut over `ep`, and every door."""
    arrays: dict[str, dict[str, Array]] = {}
    for name, _ in model.named_parameters(remove_duplicate=False):
        array, (owner, _, leaf) = row_of(model, name), name.rpartition(".")
        if array.dim_on("ep") is None:
            arrays.setdefault(owner, {})[leaf] = array
    doors = {name: (enter, leave) for name, _, enter, leave in doors_of(model)}
    return {
        name: _style(name, model)(arrays.get(name, {}), *doors.get(name, (None, None)))
        for name in dict.fromkeys((*arrays, *doors, *model.mixers()))
    }


def cut_parameter(module: nn.Module, leaf: str, array: Array, mesh: DeviceMesh) -> None:
    """Makes a parameter a DTensor on the one axis of `mesh`, and its module read the local part.

    The gradient of a local part is taken as it comes: of a parameter that every rank has whole it
    is a partial sum, which the accumulation boundary completes once per step.
    """
    (axis,) = mesh.mesh_dim_names or ("",)
    whole = module._parameters[leaf]
    assert whole is not None
    cut = distribute_tensor(whole.detach(), mesh, [array.placement(axis)])
    module._parameters[leaf] = nn.Parameter(cut, whole.requires_grad)
    read_locally(module, leaf)


def read_locally(module: nn.Module, leaf: str) -> None:
    """Makes `module.<leaf>` the local part of that parameter while FSDP2 has it gathered.

    A property on a class made for this one module: the parameter itself stays where everybody
    who stores, shards, counts or saves looks for it, and outside of a forward, when it lies on a
    second axis too, it reads as itself.
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
    """Parameters that each rank of `tp` has whole, with a gradient that is only a part."""
    found = []
    for p in model.parameters():
        if isinstance(p, DTensor):
            names = p.device_mesh.mesh_dim_names or ()
            if "tp" in names and p.placements[names.index("tp")].is_replicate():
                found.append(p)
    return found


def _style(name: str, model: HybridLM) -> type[Cut]:
    last = name.rpartition(".")[2]
    if last == "mixer":
        return CutExperts if hasattr(model.get_submodule(name), "experts") else CutHeads
    styles: dict[str, type[Cut]] = {
        "embed": CutEmbedding,
        "tables": CutEmbedding,
        "top": CutTop,
        "head": CutHead,
        "g_norm": CutNorm,
    }
    return styles.get(last, Cut)


def _words(owner: nn.Module, mesh: DeviceMesh) -> VocabularyShard:
    """Those that this rank has of an unembedding, and how ranks tell each other of theirs."""
    words = owner._parameters["weight"].shape[0] // mesh.size()  # type: ignore[union-attr]
    group = mesh.get_group()

    def merge(own: ShardStatistics) -> ShardStatistics:
        all_R3n = gather_plain(torch.stack(own)[None], 0, group)
        return merge_statistics([ShardStatistics(*of_rank) for of_rank in all_R3n])

    return VocabularyShard(mesh.get_local_rank() * words, merge)


def _look_up(embedding: nn.Embedding, rank: int, ids_BT: Tensor) -> Tensor:
    """This rank's part of the embeddings `[B, T, D]`; the sum over ranks is all of them."""
    weight_vD = embedding.weight
    local_BT = ids_BT - rank * len(weight_vD)
    here_BT = (local_BT >= 0) & (local_BT < len(weight_vD))
    x_BTD = F.embedding(torch.where(here_BT, local_BT, 0), weight_vD)
    return torch.where(here_BT[..., None], x_BTD, 0)


def _tokens(docs: Documents, rank: int, size: int) -> Documents:
    """Documents of the tokens that a rank of `tp` holds between blocks."""
    t = docs.ids_BT.shape[1] // size
    return docs.take(torch.arange(rank * t, (rank + 1) * t, device=docs.ids_BT.device))


def _choose_groups(mixer: Mamba3, mesh: DeviceMesh) -> None:
    """Gives the scan the groups of B and C that the rank's heads read; all are computed."""
    G, rank, size = mixer.mamba.ngroups, mesh.get_local_rank(), mesh.size()
    first, count, scan = rank * G // size, max(1, G // size), mixer.scan

    def chosen(inputs: Any, *args: Any, **kwargs: Any) -> Any:
        groups = slice(first, first + count)
        inputs = replace(inputs, Q=inputs.Q[:, :, :, groups], K=inputs.K[:, :, :, groups])
        return scan(inputs, *args, **kwargs)

    mixer.scan = chosen  # type: ignore[method-assign]
