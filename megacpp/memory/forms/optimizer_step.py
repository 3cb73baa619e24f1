"""Temporaries of an optimizer step: whole matrices of Muon, and AdamW's; no torch import here."""

from __future__ import annotations

from collections.abc import Iterable

from megacpp.config.schema import OptimConfig
from megacpp.memory.forms.muon import muon_transient_bytes
from megacpp.memory.forms.parameters import Place, Storage, held, mover, packs
from megacpp.memory.forms.weights import Weight

PIECE = 1 << 22  # entries of packed moments that are unpacked at a time (optim/low_bit.py)
PACKING_BYTES = 49  # of each of them: six fp32 values, three int64 codes, and a bool
RATES = {"embed.weight": "embed", "head.weight": "head", "top.unembed.weight": "head"}

Layers = Iterable[tuple[Weight, int]]  # and how many layers have it


def optimizer_bytes(
    found: Layers,
    optim: OptimConfig,
    storage: Storage,
    place: Place,
    on_cpu: bool,
    batch_bytes: int,
) -> int:
    """Return peak bytes of an optimizer step's temporaries, beyond state and gradients.

    Args:
        found: weights, each with the number of layers that have it.
        optim: optimizer settings.
        storage: bytes of stored elements.
        place: rank's coordinates on the axes that cut parameters.
        on_cpu: the run is on a CPU.
        batch_bytes: of matrices that are orthogonalised together (optim/newton_schulz.py).
    """
    found = list(found)
    muon = [(w, layers) for w, layers in found if mover(w, optim) == "muon"]
    adamw = [(w, layers) for w, layers in found if mover(w, optim) == "adamw"]
    beside = _adamw(adamw, optim, storage, place)
    return max(beside, _muon(muon, optim, storage, place, on_cpu, batch_bytes, beside))


def _muon(
    found: Layers,
    optim: OptimConfig,
    storage: Storage,
    place: Place,
    on_cpu: bool,
    batch_bytes: int,
    beside: int,
) -> int:
    sides, staying = list[tuple[int, int]](), list[tuple[int, int]]()
    for w, layers in found:
        if w.experts:
            here, (rows, cols) = held(w, place), w.shape[1:]
            whole = place.holders > 1 and not here.across
            count = here.own // (rows * cols) if whole else w.shape[0]
            (staying if whole else sides).extend([(rows, cols)] * (count * layers))
        else:
            sides += [(height, w.shape[-1]) for height in w.heights or w.shape[:1]] * layers
    wide = optim.muon_dtype == "fp32" or (optim.muon_dtype == "auto" and on_cpu)
    wire = max(4, storage.store) if wide or storage.store == 8 else 2
    return muon_transient_bytes(
        sides,
        place.holders,
        optim.muon_bucket_mib,
        wire,
        storage.momentum,
        storage.store,
        batch_bytes,
        beside,
        staying,
    )


def _adamw(found: Layers, optim: OptimConfig, storage: Storage, place: Place) -> int:
    sizes = [(w, held(w, place).own, layers) for w, layers in found]
    if optim.adamw_state == "cpu_offload":  # the host computes
        return 0
    packed = [packs(optim.adamw_state, numel) for _, numel, _ in sizes]
    largest = max((x[1] for x, narrow in zip(sizes, packed, strict=True) if narrow), default=0)
    pieces = min(PIECE, largest) * PACKING_BYTES
    if not (optim.cautious_weight_decay and optim.weight_decay):
        return pieces
    groups: dict[str, list[tuple[int, int]]] = {}  # each is updated by one call
    for (w, numel, layers), narrow in zip(sizes, packed, strict=True):
        if len(w.shape) > 1 and "tables" not in w.name and not narrow:
            groups.setdefault("latent" if w.latent else RATES.get(w.name, ""), []).append(
                (numel, layers)
            )
    lists = (
        2 * storage.store * sum(numel * layers for numel, layers in members)
        + (storage.store + 1) * max(numel for numel, _ in members)
        for members in groups.values()
    )
    return max(pieces, *lists) if groups else pieces
