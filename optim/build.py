"""Both optimizers of a model as one object, by parameter names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megacpp.config import Config, OptimConfig
from megacpp.errors import CheckpointError
from megacpp.model.hybrid import HybridLM
from optim.adamw import AdamW
from optim.groups import Assignment, assign, table_lines
from optim.local import local_part
from optim.muon import Muon


def build_optimizers(
    model: HybridLM, config: Config, process_groups: Sequence[dist.ProcessGroup] = ()
) -> Optimizers:
    """Muon and AdamW over a materialised (and, if it will be, sharded) model.

    Args:
        process_groups: of several mesh axes, for `Muon` to choose from; see there.

    Raises:
        ConfigError: a parameter matches no row of the table in optim/groups.py, or several.
    """
    return Optimizers(assign(model, config.optim.name), config.optim, process_groups)


class Optimizers:
    """What `train.py` steps: every parameter of a model, each in one optimizer.

    State is a flat mapping from `<parameter>.momentum` (Muon) or `<parameter>.exp_avg`,
    `.exp_avg_sq` and `.step` (AdamW) to tensors, sharded like the parameters; it knows nothing of
    the order of parameters, of groups, or of the mesh.
    """

    def __init__(
        self,
        assignments: list[Assignment],
        config: OptimConfig,
        process_groups: Sequence[dist.ProcessGroup] = (),
    ) -> None:
        self.config, self.assignments = config, assignments
        muon = [a for a in assignments if a.algorithm == "muon"]
        adamw = [a for a in assignments if a.algorithm == "adamw"]
        self.parts: dict[str, torch.optim.Optimizer] = {}
        if muon:
            self.parts["muon"] = Muon(
                _groups(muon, config.muon_weight_decay),
                lr=config.muon_lr,
                momentum=config.muon_momentum,
                steps=config.muon_steps,
                scale=config.muon_scale,
                process_groups=process_groups,
            )
        if adamw:
            self.parts["adamw"] = AdamW(
                _groups(adamw, config.weight_decay),
                lr=config.lr,
                betas=(config.beta1, config.beta2),
                eps=config.eps,
            )
        self._peaks = [
            (group, group["lr"]) for part in self.parts.values() for group in part.param_groups
        ]

    def step(self, lr_multiplier: float = 1.0) -> None:
        """One update; every learning rate is its peak times `lr_multiplier`."""
        for group, peak in self._peaks:
            group["lr"] = peak * lr_multiplier
        for part in self.parts.values():
            part.step()

    def zero_grad(self) -> None:
        """Drops all gradients."""
        for a in self.assignments:
            a.parameter.grad = None

    def state_tensors(self) -> dict[str, Tensor]:
        """All state by name: the live tensors, to be saved or written into."""
        return {
            f"{a.name}.{key}": value
            for a in self.assignments
            for key, value in self.parts[a.algorithm].state[a.parameter].items()
        }

    def state_dict(self) -> dict[str, Tensor]:
        """A copy of `state_tensors`, which later steps don't change."""
        return {name: value.clone() for name, value in self.state_tensors().items()}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Copies state of the same names and shapes, sharded as here.

        Raises:
            CheckpointError: an entry is missing, unknown or of another shape; it is named.
        """
        own = self.state_tensors()
        for wrong, what in ((own.keys() - state, "missing"), (state.keys() - own, "unknown")):
            if wrong:
                raise CheckpointError(
                    f"optimizer state {min(wrong)!r} is {what} ({len(wrong)} such). "
                    "Fix: resume with the model and optim.name it was saved with."
                )
        for name, value in state.items():
            if value.shape != own[name].shape:
                raise CheckpointError(
                    f"optimizer state {name!r} has shape {tuple(value.shape)}, not "
                    f"{tuple(own[name].shape)}. Fix: resume with the model it was saved with."
                )
            local_part(own[name]).copy_(local_part(value))

    def describe(self) -> list[str]:
        """Learning rates, and the table of parameters, for the header of a run."""
        c = self.config
        lines = []
        if "muon" in self.parts:
            lines.append(
                f"muon:  lr {c.muon_lr:g}, momentum {c.muon_momentum:g}, {c.muon_steps} steps, "
                f"scale {c.muon_scale}, weight decay {c.muon_weight_decay:g}"
            )
        if "adamw" in self.parts:
            lines.append(
                f"adamw: lr {c.lr:g}, betas {c.beta1:g} {c.beta2:g}, eps {c.eps:g}, "
                f"weight decay {c.weight_decay:g}"
            )
        return lines + table_lines(self.assignments)


def _groups(assignments: list[Assignment], weight_decay: float) -> list[dict[str, Any]]:
    """Parameter groups: one per matrix view and decay."""
    groups: dict[Any, dict[str, Any]] = {}
    for a in assignments:
        decay = weight_decay if a.row.decays else 0.0
        new: dict[str, Any] = {"params": [], "weight_decay": decay}
        if a.algorithm == "muon":
            new["view"] = a.view
        groups.setdefault((a.view, decay), new)["params"].append(a.parameter)
    return list(groups.values())
