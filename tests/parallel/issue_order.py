"""Order in which ranks issue collectives and messages, and whether NCCL could carry it out.

Gloo matches a message by its tag, and a collective by its number in a group: in any order. NCCL
carries out what a rank issues on one communicator strictly one after another, messages among
collectives (`ProcessGroupNCCL::pointToPoint` with a device that is known from the start), and with
kernels of several communicators at once it may be short of room. So the replay here is stricter
than either: a rank begins nothing before all that it issued earlier has ended. Only sends and
receives of one batch go on side by side. What ends in the replay can't deadlock anywhere.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from parallel.simulate.collective_log import KINDS, SPACES

# Types that NCCL sends (`ncclDataType` of torch's NCCLUtils.cpp); it has no int16 and no complex.
SENT = {torch.int8, torch.uint8, torch.int32, torch.int64, torch.bool}
SENT |= {torch.float16, torch.bfloat16, torch.float32, torch.float64}


@dataclass(frozen=True)
class Issue:
    """Collective, send or receive of a rank.

    Attributes:
        kind: of `collective_log.KINDS`.
        group: description and members of its process group.
        peer: rank of all ranks that a message goes to or comes from; -1 of a collective.
        numel: of what both sides know: of a message, or of an all-reduce or a broadcast; else 0.
        dtype: of its first tensor.
    """

    kind: str
    group: tuple[str, tuple[int, ...]]
    peer: int
    numel: int
    dtype: str


Step = tuple[Issue, ...]  # several only of a batch


class IssueOrder(TorchDispatchMode):
    """Record of what this rank issues inside the `with` block: `steps`, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[Step] = []
        self._batch: list[Issue] | None = None

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record, and take the messages of a batch together."""
        plain = dist.batch_isend_irecv

        def batched(ops: list[dist.P2POp]) -> list[dist.Work]:
            self._batch = []
            works = plain(ops)
            self.steps.append(tuple(self._batch))
            self._batch = None
            return works

        with self, patch.object(dist, "batch_isend_irecv", batched):
            yield

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if DTensor in types:
            return NotImplemented
        name = func.overloadpacket.__name__
        if func.namespace in SPACES and name in KINDS:
            self._note(KINDS[name], args)
        return func(*args, **(kwargs or {}))

    def _note(self, kind: str, args: Any) -> None:
        group = _group_of(args)
        members = tuple(dist.get_process_group_ranks(group))
        if len(members) == 1:
            return
        tensors = [leaf for leaf in pytree.tree_leaves(args) if isinstance(leaf, Tensor)]
        for t in tensors:
            assert t.dtype in SENT, f"{kind} of {t.dtype}, which NCCL doesn't know"
            assert t.is_contiguous(), f"{kind} of {tuple(t.shape)} {t.stride()}"
        peer = members[args[2]] if kind in ("send", "recv") else -1
        known = peer >= 0 or kind in ("all_reduce", "broadcast")
        numel = sum(t.numel() for t in tensors) if known else 0
        dtype = str(tensors[0].dtype) if tensors else ""
        one = Issue(kind, (group.group_desc, members), peer, numel, dtype)
        if self._batch is None:
            self.steps.append((one,))
        else:
            self._batch.append(one)


def stuck(ranks: Sequence[Sequence[Step]]) -> str:
    """Return where the ranks' replay stops, or nothing if it comes to its end.

    Args:
        ranks: steps of each rank.
    """
    at = [0] * len(ranks)
    begun = [list(steps[0]) if steps else [] for steps in ranks]
    while any(begun):
        moved = False
        for rank, issues in enumerate(begun):
            for one in [*issues]:
                if one in issues and (partners := _partners(rank, one, begun)):
                    for other, its in partners:
                        assert (its.numel, its.dtype) == (one.numel, one.dtype), (one, its)
                        begun[other].remove(its)
                    moved = True
        for rank, steps in enumerate(ranks):
            while not begun[rank] and at[rank] + 1 < len(steps):
                at[rank] += 1
                begun[rank] = list(steps[at[rank]])
        if not moved:
            return "; ".join(f"rank {r} waits in {b[0]}" for r, b in enumerate(begun) if b)
    return ""


def _partners(rank: int, one: Issue, begun: list[list[Issue]]) -> list[tuple[int, Issue]]:
    """Return what ends together with an issue, itself among it; nothing: somebody isn't there."""
    if one.peer < 0:
        found = [(member, _first(begun[member], one.kind, one.group)) for member in one.group[1]]
    else:
        other = "recv" if one.kind == "send" else "send"
        answer = _first(begun[one.peer], other, one.group, rank)
        found = [(rank, _first(begun[rank], one.kind, one.group, one.peer)), (one.peer, answer)]
    return [(r, its) for r, its in found if its] if all(its for _, its in found) else []


def _first(issues: list[Issue], kind: str, group: Any, peer: int = -1) -> Issue | None:
    return next((i for i in issues if (i.kind, i.group, i.peer) == (kind, group, peer)), None)


def _group_of(args: Any) -> dist.ProcessGroup:
    for leaf in reversed(pytree.tree_leaves(args)):
        if isinstance(leaf, torch.ScriptObject) and "ProcessGroup" in str(leaf._type()):
            return dist.ProcessGroup.unbox(leaf)
        if isinstance(leaf, str) and leaf not in ("sum", "avg", "max", "min", "product"):
            return dist.distributed_c10d._resolve_process_group(leaf)  # type: ignore[arg-type]
    raise AssertionError("a collective of no group")
