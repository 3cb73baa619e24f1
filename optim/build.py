"""Build the optimizer of a model from its parameter table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from megacpp.config.checks.optimizer import adamw_layers
from megacpp.config.schema import Config, OptimConfig
from megacpp.model.hybrid import HybridLM
from megacpp.state.agreement import gather
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
    found: dict[str, dict[str, Any]] = {}
    for a in assignments:
        if a.algorithm == "fold":
            continue
        key = _name(a)
        if key not in found:
            found[key] = {"params": [], "name": key, "algorithm": a.algorithm}
            found[key] |= {"lr": a.lr(config), "weight_decay": a.decay(config)}
            found[key] |= _settings(a, config)
        found[key]["params"].append((a.name, a.parameter))
        if a.algorithm == "muon":
            found[key].setdefault("views", []).append(a.view)
        if a.fold is not None:
            found[key].setdefault("folds", []).append(a.fold)
    return list(found.values())


def peak_rates(optimizer: torch.optim.Optimizer) -> dict[str, float]:
    """Return the rates of all pipeline stages' groups; every rank calls it, before a schedule."""
    return {name: rate for own in gather(learning_rates(optimizer)) for name, rate in own.items()}


def learning_rates(
    optimizer: torch.optim.Optimizer, peaks: Mapping[str, float] | None = None, factor: float = 1.0
) -> dict[str, float]:
    """Return the learning rate of each parameter group by name, as the optimizer has it.

    Args:
        optimizer: of this rank.
        peaks: `peak_rates`; groups of other stages have these times `factor`.
        factor: `lr_multiplier` of the update.
    """
    rates = {name: peak * factor for name, peak in (peaks or {}).items()}
    return rates | {group["name"]: float(group["lr"]) for group in optimizer.param_groups}


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


def _name(a: Assignment) -> str:
    """Return a group name such as `muon` or `adamw_embed`; pipeline stages give a group the same.

    Parameters of one name have one rate and decay.
    """
    words = [a.algorithm]
    if a.algorithm == "adamw":
        words.append("matrix" if a.row.rate == "lr" else a.row.rate.removesuffix("_lr"))
    if a.fold is not None:
        words.append("latent")
    if not a.row.decays and a.row.rate != "vector_lr":
        words.append("no_decay")
    if (factor := a.row.lr_factor * a.factor) != 1:
        words.append(f"x{factor:g}".replace(".", "_"))
    return "_".join(words)


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
