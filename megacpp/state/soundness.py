"""Finite values: the check that a state passes before it is saved or exported, and its errors."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from megacpp.config.schema import Config
from megacpp.errors import NonFiniteError
from megacpp.state.agreement import gather
from megacpp.state.checkpoint import newest_sound
from megacpp.torch_extras import is_dtensor


@torch.no_grad()
def unsound(tensors: Mapping[str, Tensor]) -> str:
    """Return where a state has values that aren't finite, over all ranks; empty: nowhere.

    Every rank calls it and gets the same text. One fused pass takes the 2-norm of each tensor,
    which is finite only if every value is; values are counted only where a norm isn't, because a
    norm may overflow.

    Args:
        tensors: this rank's tensors by name, any shape; of DTensors its shards.
    """
    mine = {name: count for name, count in _counts(tensors).items() if count}
    found = gather(mine)
    names = dict.fromkeys(name for of_rank in found for name in of_rank)
    if not names:
        return ""
    first = next(iter(names))
    rank = next(number for number, of_rank in enumerate(found) if first in of_rank)
    more = f" (and {len(names) - 1} further tensors)" if len(names) > 1 else ""
    where = f" on rank {rank}" if len(found) > 1 else ""
    return f"{first} has {found[rank][first]:,} values that are not finite{where}{more}"


def _counts(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """Return the number of non-finite values of each tensor whose norm isn't finite."""
    local = {name: t.to_local() if is_dtensor(t) else t for name, t in tensors.items()}
    held = {n: t.detach() for n, t in local.items() if t.is_floating_point() and t.numel()}
    by_kind: dict[tuple[torch.device, torch.dtype], list[str]] = {}
    for name, t in held.items():
        if t.dtype.itemsize == 1:  # torch has no norm of FP8
            held[name] = t.to(torch.bfloat16)
        by_kind.setdefault((t.device, held[name].dtype), []).append(name)
    found: dict[str, int] = {}
    for names in by_kind.values():
        norms = torch.stack(torch._foreach_norm([held[name] for name in names])).tolist()
        for name, norm in zip(names, norms, strict=True):
            if not math.isfinite(norm):
                found[name] = int((~held[name].isfinite()).sum())
    return found


def bad_state(config: Config, folder: Path, step: int, words: str) -> NonFiniteError:
    """Return the error that ends a run whose state can't be saved or exported; every rank calls it.

    Args:
        config: configuration of the run.
        folder: folder of checkpoints.
        step: steps made; a checkpoint of this step isn't named, its weights are the bad ones.
        words: when and where the state is bad.
    """
    newest = newest_sound(folder, lambda one: one < step)
    kept = f"{newest} is the newest sound checkpoint" if newest else "no sound checkpoint was saved"
    return NonFiniteError(
        f"run.dir={config.run.dir}: {words}; nothing of this state is kept, {kept}. "
        f"Fix: lower optim.lr ({config.optim.lr:g}) or raise optim.warmup_steps, and start the "
        "same command again."
    )


def corrupt_state(config: Config, folder: Path, step: int, words: str) -> NonFiniteError:
    """Return the error of a run whose ranks' copies of a tensor differ; every rank calls it.

    Args:
        config: configuration of the run.
        folder: folder of checkpoints.
        step: steps made.
        words: tensor and ranks.
    """
    newest = newest_sound(folder)
    kept = f"{newest} is the newest checkpoint" if newest else "no checkpoint was saved"
    return NonFiniteError(
        f"run.dir={config.run.dir}: after step {step} {words}: a device or its memory computed "
        f"wrongly; {kept}. Fix: take that rank's device out of service, and start the same command "
        "again; --train.rewinds 1 goes back by itself."
    )
