"""Time of the optimizer's step on one rank. No torch import here."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from megacpp.config.schema import Config
from megacpp.memory.forms.parameters import Place, held
from megacpp.memory.forms.weights import weights
from megacpp.speed.operators import Operator, Passes, Product

# Of an fp32 parameter: the norm reads a gradient, clipping both, AdamW reads four, writes three.
ADAM_BYTES = 4.0 * (1 + 2 + 4 + 3)


def optimizer_step(config: Config, place: Place, kinds: Sequence[str]) -> list[Operator]:
    """Return AdamW's passes and Newton-Schulz of a rank's matrices.

    Matrices of one shape are iterated together; a rank that owns a part of one is as slow as one.

    Args:
        config: resolved.
        place: of the rank.
        kinds: of all parts that its stage stores.
    """
    passes, matrices = 0.0, defaultdict[tuple[int, int], float](float)
    pp = config.mesh.pp
    for kind in kinds:
        for w in weights(config.model, kind, config.recompute.compress):
            if w.folded:
                continue
            passes += ADAM_BYTES * held(w, place).own / pp
            if config.optim.name != "muon_adamw" or not w.muon:
                continue
            short, long = sorted(w.shape[-2:])
            count = w.shape[0] if w.experts else 1
            if w.heights:
                short, count = min(w.heights), count * len(w.heights)
                short, long = sorted((short, w.shape[-1]))
            owners = place.expert_shards * place.ep if w.experts else place.shards * place.tp
            matrices[short, long] += count / owners / pp
    found: list[Operator] = [Passes(passes, 20)]
    for (short, long), number in sorted(matrices.items()):
        count = max(1, round(number))
        found += [
            Product(short, short, long, count),
            Product(short, short, short, count),
            Product(short, long, short, count),
        ] * config.optim.muon_steps
    return found
