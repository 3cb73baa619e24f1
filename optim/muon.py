"""Muon: momentum SGD whose update is orthogonalised matrix by matrix (Keller Jordan).

It works on plain parameters and on DTensors of any mesh. A sharded run equals the unsharded one:
whole matrices are orthogonalised on one rank (optim/ownership.py), and the update is rounded to the
dtype of the iteration before it is sent, or used locally.

Legend: R rows, C columns of a matrix, K matrices of a batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from megacpp.torch_extras import local_part, local_parts
from optim.exchange import AsyncAllToAll, CommBucket, JobSlice, LocalJobs, PackedBuffer, SolveBatch
from optim.muon_plan import Exchange, MuonPlan
from optim.newton_schulz import newton_schulz, update_scale


class MuonStep:
    """Update of all matrices that have a gradient, in three phases.

    The constructor decays the weights and starts the first bucket's exchange. `here` solves the
    local matrices while that bucket travels. `finish` processes all buckets.

    Args:
        plan: assignment of matrices to ranks.
        groups: parameter groups of the optimizer.
        momenta: momentum per matrix, in the order of `plan.matrices`.
    """

    def __init__(
        self, plan: MuonPlan, groups: Sequence[dict[str, Any]], momenta: Sequence[Tensor]
    ) -> None:
        self.groups, self.plan = groups, plan
        # foreach operations take factors as numbers, so a rate on a GPU is read once per group.
        self.rates = {n: float(groups[n]["lr"]) for n in {m.group for m in plan.matrices}}
        grads = [m.parameter.grad for m in plan.matrices]
        self.grads = [None if g is None else local_part(g) for g in grads]
        self.weights = local_parts(m.parameter for m in plan.matrices)
        self.momenta = local_parts(momenta)
        self._decay()
        self.buckets = [(e, bucket) for e in plan.exchanges for bucket in e.buckets]
        self.flying = self._send(0)

    def here(self) -> None:
        """Solve the matrices that are whole on this rank, while the first bucket travels."""
        for exchange in self.plan.exchanges:
            for stay in exchange.staying:
                self._solve_here(exchange, stay)

    def finish(self) -> None:
        """Process each bucket: send the next, solve this one, return it, apply the previous."""
        behind: tuple[CommBucket, AsyncAllToAll] | None = None
        for k, (exchange, bucket) in enumerate(self.buckets):
            coming, self.flying = self.flying, self._send(k + 1)
            assert coming is not None
            arrived = coming.wait()
            back = bucket.solve(arrived, self._solve)
            del arrived
            returning = AsyncAllToAll(back, bucket.returned, bucket.arriving, exchange.group)
            del back
            self._land(behind)
            behind = bucket, returning
        self._land(behind)

    def _send(self, k: int) -> AsyncAllToAll | None:
        if k == len(self.buckets):
            return None
        exchange, bucket = self.buckets[k]
        packed = self._pack(bucket.sent.cells, bucket.blocks, exchange.wire)
        transfer = AsyncAllToAll(packed, bucket.sent, bucket.received, exchange.group)
        for block in bucket.aside:
            self._move(block)
        return transfer

    def _solve_here(self, exchange: Exchange, stay: LocalJobs) -> None:
        """Solve matrices that are whole on this rank."""
        packed = self._pack(stay.cells, stay.blocks, exchange.wire)
        for section, alike, updates in stay.solve(packed, self._solve):
            self._apply(section.pieces, alike, updates)
            del updates  # free it before the next batch is solved

    def _solve(self, batch: SolveBatch, x_KRC: Tensor) -> Tensor:
        steps, coefficients = batch.solver
        return newton_schulz(x_KRC, steps, x_KRC.dtype, coefficients)

    def _land(self, sent: tuple[CommBucket, AsyncAllToAll] | None) -> None:
        """Apply the results of a bucket."""
        if sent is not None:
            bucket, transfer = sent
            section = bucket.arriving
            self._apply(section.pieces, bucket.alike, section.views(transfer.wait()))

    def _decay(self) -> None:
        """Apply decoupled weight decay to all matrices that have a gradient."""
        for number, group in enumerate(self.groups):
            if group["weight_decay"] and not group["cautious"] and number in self.rates:
                found = zip(self.plan.matrices, self.weights, self.grads, strict=True)
                weights = [w for m, w, g in found if m.group == number and g is not None]
                if weights:
                    torch._foreach_mul_(weights, 1 - self.rates[number] * group["weight_decay"])

    def _pack(self, cells: int, blocks: Sequence[PackedBuffer], wire: torch.dtype) -> Tensor:
        """Update the momenta of blocks and return the matrices to orthogonalise, `[cells]`."""
        packed = torch.empty(cells, dtype=wire, device=self.weights[0].device)
        for block in blocks:
            self._move(block, block.view(packed))
        return packed

    def _move(self, block: PackedBuffer, target: Tensor | None = None) -> None:
        """Update momenta m <- lerp(m, g, 1 - mu); write m, or its Nesterov lookahead, to `target`.

        All operations are elementwise in the gradient's dtype, so the partition changes no bit. A
        momentum without a gradient stays, and zeros replace its update: other ranks may wait for
        it.
        """
        pieces = [p for p in block.pieces if not self._lacks(p)]
        if not pieces:
            if target is not None:
                target.zero_()
            return
        group = self.groups[self.plan.matrices[pieces[0].job.parameter].group]
        grads = [p.take(g) for p in pieces if (g := self.grads[p.job.parameter]) is not None]
        momenta = [p.take(self.momenta[p.job.parameter]) for p in pieces]
        wide, whole = grads[0].new_empty(block.cells), len(pieces) == len(block.pieces)

        def views(cells: Tensor) -> list[Tensor]:
            """Return the views of slices that have a gradient."""
            found = block.views(cells)
            pairs = zip(found, block.pieces, strict=True)
            return found if whole else [view for view, p in pairs if not self._lacks(p)]

        if not whole:
            wide.zero_()
        moving, weight = views(wide), 1 - group["momentum"]
        torch._foreach_copy_(moving, momenta)
        torch._foreach_lerp_(moving, grads, weight)
        rounded = wide.to(momenta[0].dtype)
        torch._foreach_copy_(momenta, views(rounded))
        if target is None:
            return
        if group["nesterov"]:
            if rounded is not wide:
                wide.copy_(rounded)
                del rounded
            torch._foreach_lerp_(moving, grads, weight)
            target.copy_(wide)
        else:
            target.copy_(rounded)

    def _lacks(self, piece: JobSlice) -> bool:
        """Return whether the slice's parameter has no gradient."""
        return self.grads[piece.job.parameter] is None

    def _apply(
        self, pieces: Sequence[JobSlice], alike: Sequence[Sequence[int]], updates: Sequence[Tensor]
    ) -> None:
        """Apply w <- w - lr * scale * update, and cautious decay, where there is a gradient."""
        for numbers in alike:
            members = [i for i in numbers if not self._lacks(pieces[i])]
            if not members:
                continue
            job, some = pieces[members[0]].job, [updates[i] for i in members]
            weights = [pieces[i].take(self.weights[pieces[i].job.parameter]) for i in members]
            number = self.plan.matrices[job.parameter].group
            group, lr = self.groups[number], self.rates[number]
            if group["weight_decay"] and group["cautious"]:
                keep = 1 - lr * group["weight_decay"]
                for w, u in zip(weights, some, strict=True):
                    w.copy_(torch.where(u * w >= 0, w * keep, w))
            factor = -lr * update_scale(group["scale"], job.rows, job.cols)
            torch._foreach_add_(weights, some, alpha=factor)
