"""Audit of a device's arithmetic: gradients of one microbatch, computed again and compared.

Every `run.audit_every` steps, before the step itself, the first microbatch's forward and backward
is run twice and dropped: on its own rank, and on the next rank of the batch axis, which gets its
rows. Digests of the gradients that a rank is about to give to the reduction must be equal, bit for
bit. Under ep an expert sees tokens in the order of their ranks, so rows move along `dp_replicate`
alone. Without another rank along that axis, the same rank computes twice. Where digests differ,
rows move one rank further and are run a third time: the odd one of three is at fault.

Gradients are read where FSDP2 hands them to its reduction, also where that has one shard, so an
audit holds no copy of them: nothing but the rows of a neighbour and 8 bytes a parameter.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megacpp.config.schema import Config
from megacpp.data.batches import Batch
from megacpp.run.preemption import StopRequest
from megacpp.run.step_status import StepStatus
from megacpp.state.agreement import gather
from megacpp.state.rng import rng_state, set_rng_state
from parallel.boundary import AccumulationBoundary, shortened
from parallel.mesh import World
from parallel.step_sums import StepSums

ROW = 1 << 16  # values that are multiplied at once
ODD = 0x1E3779B97F4A7C15
WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def build_boundary(
    model: Any, world: World, config: Config, leaves: StopRequest
) -> AccumulationBoundary:
    """Return the boundary of a run; only one with `run.audit_every` audits steps.

    Args:
        model: built for `world`.
        world: of the rank.
        config: of the run.
        leaves: whether this rank was told to stop.
    """
    kind = AuditedBoundary if config.run.audit_every else AccumulationBoundary
    return kind(model, world, config, leaves)


class AuditedBoundary(AccumulationBoundary):
    """Boundary that audits the first microbatch of every `run.audit_every`-th step.

    A pipeline's schedule takes all microbatches of a step, so an audit runs all of them.
    """

    def __init__(self, model: Any, world: World, config: Config, *more: Any) -> None:
        super().__init__(model, world, config, *more)
        self.every = config.run.audit_every
        self.names: list[str] = []
        self.found = torch.empty(0)  # a digest of each parameter's gradient, in an audit
        self._watches: list[Any] = []
        self._audit: dict[str, Any] = {}
        self._axis = "dp_replicate" if world.degree("ep") > 1 else "batch"
        if world.parallel:
            self._watch_units()
        else:
            self.names = [name for name, p in model.named_parameters() if p.requires_grad]

    def accumulate(self, microbatches: Iterable[Batch], step: int = 0) -> StepSums:
        """Accumulate a step; audit its first microbatch before, when it is time."""
        batches = list(microbatches)
        self._audit = {}
        if (step + 1) % self.every == 0:
            began, state = time.perf_counter(), rng_state()
            differs = self._difference(batches if self.pipeline else batches[:1], step, state)
            set_rng_state(state)
            self._audit = {"differs": differs, "audit_s": time.perf_counter() - began}
        return super().accumulate(batches, step)

    def check_step(self, sums: StepSums, norm: Tensor) -> StepStatus:
        """Return statistics of a step, with the seconds and the result of its audit.

        Args:
            sums: from `accumulate`.
            norm: 0-d.
        """
        return replace(super().check_step(sums, norm), **self._audit)

    def _difference(self, batches: Sequence[Batch], step: int, state: dict[str, Any]) -> str:
        """Return which rank's gradients differ, the same on every rank; empty: none."""
        marks = 2 * torch.arange(len(self.names), device=self.world.device) + 1
        found = [self._digests(batches, step, state)]
        moved = self._from_rank_before(batches)
        found.append(self._digests(moved, step, state))
        first, again = ((digests * marks).sum() for digests in found)
        differs = (self._of_rank_before(first) != again).long()
        if not self.world.max(differs, "world"):
            return ""
        found.append(self._digests(self._from_rank_before(moved), step, state))
        return self._named([digests.tolist() for digests in found])

    def _digests(self, batches: Sequence[Batch], step: int, state: dict[str, Any]) -> Tensor:
        """Return a digest of each gradient of this rank, int64, and leave no other trace."""
        set_rng_state(state)
        self.found = torch.zeros(len(self.names), dtype=torch.int64, device=self.world.device)
        for watch in self._watches:
            watch.begin(partial(self._see, watch))
        super().accumulate(batches, step)
        for watch in self._watches:
            watch.see = None
        if not self.world.parallel:
            trained = (p for p in self.model.parameters() if p.requires_grad)
            for place, p in enumerate(trained):
                if p.grad is not None:
                    self.found[place] += _digest(p.grad.reshape(1, -1))
        for p in self.model.parameters():
            p.grad = None
        for source in self.sources:
            source.forget()
        return self.found

    def _see(self, watch: Any, flat: Tensor) -> None:
        """Digest a unit's gradients before their reduction: all shards of each, side by side."""
        values_RX, at = flat.view(watch.shards, -1), 0
        for place, columns in watch.places:
            self.found[place] += _digest(values_RX[:, at : at + columns])
            at += columns
        assert at == values_RX.shape[1], "a parameter without a gradient"

    def _watch_units(self) -> None:
        """Put a watch on the reduction of every FSDP2 unit, in front of the guard's."""
        owners = {id(m): f"{name}." if name else "" for name, m in self.model.named_modules()}
        for unit in self.pipeline.units() if self.pipeline else self.units:
            state: Any = unit._get_fsdp_state()
            groups = getattr(state, "_fsdp_param_groups", None)  # torch before 2.12 has one at most
            for group in filter(None, [state._fsdp_param_group] if groups is None else groups):
                places = []
                for p in group.fsdp_params:
                    if not p.sharded_param.requires_grad:
                        continue  # FSDP2 reduces gradients alone
                    owner = owners.get(id(p._module_info.module), "")
                    places.append((len(self.names), p.padded_sharded_param_size.numel()))
                    self.names.append(owner + p._module_info.param_name)
                mesh = group.fsdp_params[0].mesh_info.mesh
                self._watches.append(_Watch(group._reduce_scatter_comm, mesh.shape[-1], places))
                group._reduce_scatter_comm = self._watches[-1]

    @property
    def _ring(self) -> list[int]:
        """Ranks among which rows move, this one among them."""
        if self.world.degree(self._axis) == 1:
            return [self.world.rank]
        return dist.get_process_group_ranks(self.world.group(self._axis))

    def _from_rank_before(self, batches: Sequence[Batch]) -> Sequence[Batch]:
        """Give the rows to the next rank of the ring, and return those of the rank before."""
        ring = self._ring
        if len(ring) == 1:
            return batches
        own, taken = ring.index(self.world.rank), [None]
        group, device = self.world.group(self._axis), self.world.device
        before, after = ring[own - 1], ring[(own + 1) % len(ring)]
        if own % 2:
            dist.recv_object_list(taken, before, group, device=device)
        dist.send_object_list([list(batches)], after, group, device=device)
        if not own % 2:
            dist.recv_object_list(taken, before, group, device=device)
        assert taken[0] is not None
        return taken[0]

    def _of_rank_before(self, word: Tensor) -> Tensor:
        ring = self._ring
        if len(ring) == 1:
            return word
        words = [torch.empty_like(word) for _ in ring]
        dist.all_gather(words, word, group=self.world.group(self._axis))
        return words[ring.index(self.world.rank) - 1]

    def _named(self, own: list[list[int]]) -> str:
        """Return the first gradient that is odd on each rank, by the majority of three runs.

        Args:
            own: this rank's digests of its rows, of those one rank before, and two.
        """
        odd: dict[int, list[str]] = {}
        everyone = gather((self._ring, self.names, own))
        for rank, (ring, names, _) in enumerate(everyone):
            at = ring.index(rank)
            ranks = [ring[(at + run) % len(ring)] for run in range(3)]
            for place, name in enumerate(names):
                bits = [everyone[one][2][run][place] for run, one in enumerate(ranks)]
                (common, most), *_ = Counter(bits).most_common()
                for one, found in zip(ranks, bits, strict=True):
                    if most == 1 or found != common:
                        odd.setdefault(one, []).append(name)
        words = [
            f"{names[0]} on rank {rank}"
            + (f" (and {len(set(names)) - 1} further ones)" if len(set(names)) > 1 else "")
            for rank, names in sorted(odd.items())
        ]
        return f"the gradient of {shortened(words)} differs when it is computed again"


class _Watch:
    """Reduce-scatter of an FSDP2 unit that shows its flat input first, while an audit asks.

    FSDP2 asks for the memory of the input, fills it, and asks for that of the output. With one
    shard it then calls no reduction, so the input is shown when the output is asked for.

    Args:
        inner: what reduces.
        shards: ranks over which it scatters.
        places: number of each parameter, and its values on one rank.
    """

    def __init__(self, inner: Any, shards: int, places: list[tuple[int, int]]) -> None:
        self.inner, self.shards, self.places = inner, shards, places
        self.see: Any = None
        self._input: Tensor | None = None

    def begin(self, see: Any) -> None:
        """Show inputs to `see` from now on."""
        self.see, self._input = see, None

    def allocate(self, *size: Any, **more: Any) -> Tensor:
        """Return memory of the input or, once that is filled, of the output."""
        made = self.inner.allocate(*size, **more)
        if self.see is not None:
            if self._input is None:
                self._input = made
            else:
                self.see(self._input)
                self._input = None
        return made

    def __call__(self, *args: Any, **more: Any) -> Any:
        return self.inner(*args, **more)


@torch.no_grad()
def _digest(values_RX: Tensor) -> Tensor:
    """Return the sum of a matrix's words, each times an odd number of its place, 0-d int64."""
    words_RX = values_RX.detach().view(WORDS[values_RX.itemsize])
    total = torch.zeros((), dtype=torch.int64, device=words_RX.device)
    odd = torch.arange(1, 2 * ROW, 2, device=words_RX.device) * ODD
    rows, number = max(1, ROW // max(1, words_RX.shape[1])), 0
    for some_RX in words_RX.split(rows):
        for part_RX in some_RX.split(ROW, 1):
            row = part_RX.long().flatten()
            total += (row * odd[: len(row)]).sum() * (2 * number + 1)
            number += 1
    return total
