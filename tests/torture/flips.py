"""Flips of one bit on one of two replicas that train: how many are found, and what audits cost.

    weights, moments         flipped at some step of an interval; training goes on to its end, where
                             digests are compared
    gradients, activations   flipped in one of the two runs of an audit

A difference that training itself rounds away is gone: copies are equal again, bit for bit. So is an
activation that no gradient depends on, or by too little to change one bit of it.
"""

from __future__ import annotations

import dataclasses
import random
import statistics
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from checkpointing.tracing.live_bytes import LiveBytes
from megacpp.config.arguments import parse_run
from megacpp.config.schema import MeshConfig, RunConfig
from megacpp.state.digests import Digests
from megacpp.state.rng import rng_state
from megacpp.state.tensors import model_tensors
from megacpp.torch_extras import is_dtensor
from optim.build import build_optimizer
from optim.clip import clip_gradients
from parallel.audit import AuditedBoundary
from parallel.build import build_model
from parallel.start import join
from tests.parallel.parity import CPU, Run, batches_of, config_of, world_of
from tests.ranks import run_ranks
from tests.synthetic import ragged_batch

COST_ROWS = 4  # of the microbatch whose audit is measured
INTERVAL = 4  # steps between two comparisons
RUN = Run("plain", MeshConfig(dp_replicate=2, dp_shard=1), accum=2, dtype="fp32")
KINDS = ("weights", "moments", "gradients", "activations")


def flip(t: Tensor, place: int, bit: int) -> None:
    """Flip one bit of memory, unseen by autograd."""
    raw = (t.to_local() if is_dtensor(t) else t).data.view(-1).view(torch.uint8)
    raw[place % len(raw)] ^= 1 << bit


class Training:
    """Small run on this rank, whose state can be put back.

    Args:
        rank: of two.
        folder: where digests are recorded.
    """

    def __init__(self, rank: int, folder: Path) -> None:
        self.rank, self.world = rank, world_of(rank, RUN)
        run = RunConfig(audit_every=INTERVAL, digest_every=INTERVAL, steps=INTERVAL)
        self.config = dataclasses.replace(config_of(RUN), run=run)
        self.model = build_model(self.config, self.world)
        self.optimizer = build_optimizer(self.model, self.config, self.world.holders)
        self.boundary = AuditedBoundary(self.model, self.world, self.config)
        self.boundary.every = 10**9
        self.batches = [batches_of(step, self.world, RUN) for step in range(INTERVAL)]
        self.step(0)
        self.start = [t.clone() for t in self.tensors().values()]
        self.digests = Digests(folder, self.tensors, self.config, CPU)

    def tensors(self) -> dict[str, Tensor]:
        """Weights and moments by name, as plain tensors of this rank."""
        weights = {f"weights {n}": t for n, t in model_tensors(self.model).items()}
        moments = {f"moments {n}": t for n, t in self.optimizer.state_tensors().items()}
        both = {**weights, **moments}
        return {n: t.to_local() if is_dtensor(t) else t for n, t in both.items()}

    def restore(self) -> None:
        """Put weights and moments back."""
        with torch.no_grad():
            for t, before in zip(self.tensors().values(), self.start, strict=True):
                t.copy_(before)

    def step(self, number: int) -> None:
        """Make one step, as train.py does."""
        sums = self.boundary.accumulate(self.batches[number], number)
        norm = clip_gradients(
            self.model.parameters(), 1.0, copies=self.boundary.copies, along=sums.along
        )
        status = self.boundary.check_step(sums, norm)
        if status.healthy:
            self.optimizer.step()
        self.optimizer.zero_grad()
        self.boundary.finish_step(status)

    def interval(self, kind: str, draw: random.Random) -> str:
        """Flip a bit of weights or moments, train to the end of the interval, and compare."""
        self.restore()
        names = [n for n, t in self.tensors().items() if n.startswith(kind) and t.numel()]
        name, guilty, at = draw.choice(names), draw.randrange(2), draw.randrange(INTERVAL)
        place, bit = draw.randrange(1 << 30), draw.randrange(8)
        for number in range(INTERVAL):
            self.step(number)
            if number == at and self.rank == guilty:
                flip(self.tensors()[name], place, bit)
        return "found" if self.digests.difference(INTERVAL - 1) else "gone"

    def audit(self, kind: str, draw: random.Random) -> str:
        """Flip a bit of a gradient or an activation in one run of an audit."""
        run, guilty = draw.randrange(2), draw.randrange(2)
        place, bit = draw.randrange(1 << 30), draw.randrange(8)
        plant = _in_gradient if kind == "gradients" else _in_activation
        target, digests, calls = draw.random(), self.boundary._digests, iter(range(9))

        def spoiled(*args: Any) -> Tensor:
            if next(calls) != run or self.rank != guilty:
                return digests(*args)
            with plant(self.model, target, place, bit):
                return digests(*args)

        self.boundary._digests = spoiled  # type: ignore[method-assign]
        found = self.boundary._difference(self.batches[0][:1], 0, rng_state())
        self.boundary._digests = digests  # type: ignore[method-assign]
        return "found" if f" on rank {guilty}" in found else "WRONG" if found else "gone"


class _in_gradient:
    """Flip a bit of one parameter's gradient as FSDP2 reads it, before its reduction."""

    def __init__(self, model: nn.Module, target: float, place: int, bit: int) -> None:
        from torch.distributed.fsdp._fully_shard import _fsdp_param

        self.owner: Any = _fsdp_param.FSDPParam
        self.read, names = self.owner.unsharded_grad_data, [n for n, _ in model.named_parameters()]
        name = names[int(target * len(names))]
        module, _, leaf = name.rpartition(".")
        hit = (model.get_submodule(module), leaf)

        def spoiled(param: Any) -> Tensor:
            grad, info = self.read.fget(param), param._module_info
            if (info.module, info.param_name) == hit:
                flip(grad, place, bit)
            return grad

        self.spoiled = property(spoiled)

    def __enter__(self) -> None:
        self.owner.unsharded_grad_data = self.spoiled

    def __exit__(self, *_: object) -> None:
        self.owner.unsharded_grad_data = self.read


class _in_activation:
    """Flip a bit of what one module returns."""

    def __init__(self, model: nn.Module, target: float, place: int, bit: int) -> None:
        modules = [m for n, m in model.named_modules() if ".norm" in n or n.endswith("mixer")]

        def spoiled(_: nn.Module, given: object, out: Any) -> None:
            flip(out[0] if isinstance(out, tuple) else out, place, bit)

        self.hook = modules[int(target * len(modules))].register_forward_hook(spoiled)

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        self.hook.remove()


def flipped(rank: int, size: int, kind: str, count: int, folder: Path) -> Counter[str]:
    """Count what became of some flips."""
    training, draw = Training(rank, folder), random.Random(f"flip {kind}")
    attack = training.interval if kind in ("weights", "moments") else training.audit
    return Counter(attack(kind, draw) for _ in range(count))


def cost(rank: int, size: int) -> tuple[float, int, int]:
    """Return an audit's CPU seconds in microbatches, and peak bytes without and with an audit."""
    config = parse_run(["tiny", "--mesh.dp-replicate", "2", "--train.device", "cpu"], 2).config
    config = dataclasses.replace(config, run=dataclasses.replace(config.run, audit_every=1))
    world = join(config.mesh, CPU)
    boundary = AuditedBoundary(build_model(config, world), world, config)
    rows, seconds, peaks = range(rank * COST_ROWS, (rank + 1) * COST_ROWS), [], []
    batches = [ragged_batch(rows, config.data.seq_len, config.model.vocab_size)]
    for every in (10**9, 1):
        boundary.every, taken = every, []
        for _ in range(5):
            began = time.process_time()
            boundary.accumulate(batches, 0)
            taken.append(time.process_time() - began)
        with LiveBytes() as live:
            boundary.accumulate(batches, 0)
        seconds.append(statistics.median(taken))
        peaks.append(live.peak)
    return seconds[1] / seconds[0] - 1, *peaks


def figures(count: int = 100) -> str:
    """Return how many of `count` flips of each kind are found, and what an audit costs."""
    words = []
    with tempfile.TemporaryDirectory() as name:
        for kind in KINDS:
            seen = run_ranks(flipped, 2, kind, count, Path(name))[0]
            gone = f" ({seen['gone']} changed nothing)" if seen["gone"] else ""
            wrong = f" ({seen['WRONG']} WRONG)" if seen["WRONG"] else ""
            words.append(f"{kind} {seen['found']} of {count}{gone}{wrong}")
    took, before, after = run_ranks(cost, 2)[0]
    more = after / before - 1
    return f"{', '.join(words)}; an audit takes {took:.1f} microbatches, memory {more:+.1%}"


if __name__ == "__main__":
    print(figures(int(sys.argv[1])))
