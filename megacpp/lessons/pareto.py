"""Bytes that a forward keeps against FLOPs that its backward repeats, on fake tensors.

`front` measures the setups of recompute.py on one rank, one layer of each kind, and combines the
kinds of blocks: which policies does no other beat? `bench/pareto.py` prints and draws it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, product

from torch import Tensor, nn

from checkpointing.apply import set_recompute
from checkpointing.recompute import Store
from checkpointing.tracing.activations import (
    Activations,
    Part,
    activations,
    one_of_each,
    standing_for,
)
from checkpointing.tracing.meter import Meter
from megacpp.config.presets import PER_BLOCK
from megacpp.config.schema import KEEP, Config
from megacpp.lessons.recompute import BY_KIND, CHOICES, KEEP_ALL, SELECTIVE, WHOLE, RecomputeSetup
from megacpp.memory.forms.simulation import WINDOW_BYTES
from megacpp.model.hybrid import HybridLM
from megacpp.model.pattern import block_letters
from parallel.simulate.fake import (
    FakeBoundary,
    as_trained,
    fake_batch,
    fake_tensors,
    fake_world,
    planned_model,
)

NORMS = RecomputeSetup("norms", replace(KEEP, rblock="none", norms=True))
EXPERTS = RecomputeSetup("by kind, no mlp", replace(PER_BLOCK, mlp=False))
# Values of a policy for one kind, and the setup in which blocks of the kind use them.
SAYS = {
    "A": {"": NORMS, "selective": SELECTIVE, "full": WHOLE},
    "E": {"": NORMS, "mlp": SELECTIVE, "experts": EXPERTS, "experts, mlp": BY_KIND, "full": WHOLE},
    "M": {"": NORMS, "conv": BY_KIND},
    "R": {"": NORMS, "recurrence": SELECTIVE, "full": BY_KIND},
}


@dataclass(frozen=True)
class TradeOff:
    """Cost and saving of a setup.

    Attributes:
        kept: bytes on the device, from one microbatch's forward to its backward.
        flops: FLOPs of matrix products beyond those without recomputation; fewer if negative.
        moved: bytes that wait on the host.
    """

    kept: int
    flops: int
    moved: int = 0

    def beats(self, other: TradeOff) -> bool:
        """Return whether it saves no more bytes, repeats no more, and differs."""
        least = self.kept <= other.kept and self.flops <= other.flops
        return least and (self.kept, self.flops) != (other.kept, other.flops)


@dataclass(frozen=True)
class Front:
    """Setups of a preset by name, and the policies by kind on the Pareto front."""

    forward: int
    points: dict[str, TradeOff]
    best: dict[str, TradeOff]

    def beaten(self, name: str) -> bool:
        """Return whether a policy of the front beats the setup."""
        return any(point.beats(self.points[name]) for point in self.best.values())


def front(config: Config, size: int) -> Front:
    """Measure all setups, and combine the kinds of blocks."""
    found = {choice: measured(choice, config, size) for choice in (*CHOICES, NORMS, EXPERTS)}
    plain = found[KEEP_ALL].activations
    points = {choice.name: found[choice].relative_to(plain) for choice in CHOICES}
    letters = sorted(set(block_letters(config.model.pattern, config.model.depth)))
    mixed: dict[str, TradeOff] = {}
    for says in product(*(SAYS[letter] for letter in letters)):
        of = {letter: SAYS[letter][word] for letter, word in zip(letters, says, strict=True)}
        parts = tuple(
            part_of(found[of.get(p.name[0], NORMS)].activations, p.name) for p in plain.parts
        )
        words = "; ".join(f"{letter} {w}" for letter, w in zip(letters, says, strict=True) if w)
        mixed[words] = Measured(replace(plain, parts=parts)).relative_to(plain)
    first = {p: w for w, p in reversed(mixed.items())}  # one policy per point
    best = {w: p for p, w in first.items() if not any(q.beats(p) for q in first)}
    ordered = dict(sorted(best.items(), key=lambda item: item[1].flops))
    return Front(plain.flops("forward"), points, ordered)


def part_of(found: Activations, name: str) -> Part:
    """Return the part of that name."""
    return next(part for part in found.parts if part.name == name)


@dataclass(frozen=True)
class Measured:
    """Activations of a setup, and bytes of storages that it moves to the host, in order."""

    activations: Activations
    parked: Sequence[int] = ()

    def relative_to(self, plain: Activations) -> TradeOff:
        """Compare with saving everything. The forward counts too: it computes projections."""
        found, gone = self.activations, gone_bytes(self.parked)
        flops = found.repeated(plain) + found.flops("forward") - plain.flops("forward")
        return TradeOff(found.bytes - gone, flops, gone)


def gone_bytes(storages: Sequence[int]) -> int:
    """Return the bytes that have left a GPU when the backward begins: all but the last window."""
    behind = accumulate(reversed(storages))
    return sum(storages) - max((size for size in behind if size <= WINDOW_BYTES), default=0)


def measured(choice: RecomputeSetup, config: Config, size: int) -> Measured:
    """Measure one microbatch on rank 0, under fake tensors, one layer of each kind."""
    config = as_trained(choice.apply(config))
    few = replace(
        config,
        model=one_of_each(config.model),
        mesh=replace(config.mesh, reshard="always"),
        recompute=replace(config.recompute, offload="none"),  # offloaded bytes are noted
    )
    offloads, standing = choice.policy.offload != "none", standing_for(few.model, config.model)
    notes: dict[str, dict[int, int]] = {}
    with fake_world(few, size) as world:
        ac = choice.build(few)

        def prepare(model: HybridLM) -> None:
            ac(model)
            if offloads:
                stores = partial(
                    noted, names={id(m): n for n, m in model.named_modules()}, to=notes
                )
                set_recompute(model, ac.regions, few.recompute, ac.replays, stores)

        model = planned_model(few, world, prepare)
        with fake_tensors(memory=True):
            model.to_empty(device=world.device)
            model.train()
            boundary = FakeBoundary(model, world, few)
            if world.parallel:  # FSDP2 and DTensor allocate persistent buffers when they first run
                boundary.accumulate([fake_batch(few)])
                model.zero_grad()
                notes.clear()
            batch = fake_batch(few)
            with Meter(model) as meter:
                boundary.accumulate([batch])
            found = activations(meter, standing)
    return Measured(found, [n for part, _ in standing for n in notes.get(part, {}).values()])


def noted(block: nn.Module, names: dict[int, str], to: dict[str, dict[int, int]]) -> Store:
    """Return a store that leaves tensors in place and notes the bytes of storages by block."""

    def store(t: Tensor) -> Tensor:
        storage = t.untyped_storage()
        if not any(id(storage) in seen for seen in to.values()):
            to.setdefault(names[id(block)], {})[id(storage)] = storage.nbytes()
        return t

    return store
