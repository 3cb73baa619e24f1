"""Build the optimizer of a model from its parameter table."""

from __future__ import annotations

import itertools
from collections.abc import Container, Sequence
from typing import Any

import torch
import torch.distributed as dist

from megacpp.config.checks.optimizer import adamw_layers
from megacpp.config.schema import Config, OptimConfig
from megacpp.model.hybrid import HybridLM
from optim.groups import Assignment, assign, table_lines
from optim.muon_adamw import MuonAdamW


def build_optimizer(
    model: HybridLM, config: Config, process_groups: Sequence[dist.ProcessGroup] = ()
) -> MuonAdamW:
    """Return Muon and AdamW over a materialised model, after sharding if it is sharded at all.

    Args:
        model: materialised model.
        config: configuration of the run.
        process_groups: groups that span several mesh axes (`World.holders`), for Muon to search.

    Raises:
        ConfigError: a parameter matches no row of the table in optim/groups.py, or several.
    """
    c = config.optim
    return MuonAdamW(
        groups(_assigned(model, c), c),
        muon_width=c.muon_dtype,
        momentum_width=c.muon_momentum_dtype,
        bucket_bytes=c.muon_bucket_mib << 20,
        adamw_state=c.adamw_state,
        process_groups=process_groups,
        redraw_every=config.recompute.compress_redraw,
    )


def groups(assignments: Sequence[Assignment], config: OptimConfig) -> list[dict[str, Any]]:
    """Return parameter groups, one per algorithm, rate and decay, with the parameters' names.

    Latents form groups of their own; the weights that they update belong to no group.
    """
    found: dict[Any, dict[str, Any]] = {}
    for a in assignments:
        if a.algorithm == "fold":
            continue
        lr, decay = a.lr(config), a.decay(config)
        key = (a.algorithm, a.row.rate, lr, decay, a.fold is None)
        if key not in found:
            found[key] = {"params": [], "lr": lr, "weight_decay": decay, "algorithm": a.algorithm}
            found[key] |= _settings(a, config)
            found[key]["name"] = _name(a, {group.get("name") for group in found.values()})
        found[key]["params"].append((a.name, a.parameter))
        if a.algorithm == "muon":
            found[key].setdefault("views", []).append(a.view)
        if a.fold is not None:
            found[key].setdefault("folds", []).append(a.fold)
    return list(found.values())


def learning_rates(optimizer: torch.optim.Optimizer) -> dict[str, float]:
    """Return the learning rate of each parameter group of this rank, by the group's name."""
    return {group["name"]: float(group["lr"]) for group in optimizer.param_groups}


def describe(model: HybridLM, config: Config) -> list[str]:
    """Return the settings and the parameter table as lines for the header of a run."""
    c, assignments = config.optim, _assigned(model, config.optim)
    lines = []
    if any(a.algorithm == "muon" for a in assignments):
        lines.append(
            f"muon:  lr {c.muon_lr:g}, momentum {c.muon_momentum:g}, {c.muon_steps} steps "
            f"({c.muon_coefficients}), scale {c.muon_scale}, weight decay {c.muon_weight_decay:g}"
        )
    lines.append(
        f"adamw: lr {c.lr:g}, betas {c.beta1:g} {c.beta2:g}, eps {c.eps:g}, "
        f"weight decay {c.weight_decay:g}, moments {c.adamw_state}"
    )
    return lines + table_lines(assignments, c)


def _assigned(model: HybridLM, config: OptimConfig) -> list[Assignment]:
    return assign(model, config.name, by_adamw=adamw_layers(config.adamw_layers))


def _name(a: Assignment, taken: Container[str | None]) -> str:
    """Return a group name such as `muon` or `adamw_embed`; a number distinguishes equal names."""
    words = [a.algorithm]
    if a.algorithm == "adamw":
        words.append("matrix" if a.row.rate == "lr" else a.row.rate.removesuffix("_lr"))
    if a.fold is not None:
        words.append("latent")
    name = "_".join(words)
    more = (f"{name}_{n}" for n in itertools.count(2))
    return name if name not in taken else next(other for other in more if other not in taken)


def _settings(a: Assignment, config: OptimConfig) -> dict[str, Any]:
    cautious = {"cautious": config.cautious_weight_decay}
    if a.algorithm == "adamw":
        return cautious | {"betas": (config.beta1, config.beta2), "eps": config.eps}
    return cautious | {
        "momentum": config.muon_momentum,
        "nesterov": config.muon_nesterov,
        "steps": config.muon_steps,
        "coefficients": config.muon_coefficients,
        "scale": config.muon_scale,
    }
