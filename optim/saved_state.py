"""State of an optimizer by names that no mesh changes, and in torch's standard form."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from megacpp.errors import CheckpointError
from optim.low_bit import plain, write


class SavedState(torch.optim.Optimizer):
    """Optimizer whose state exists from the start, and is loaded into the live tensors."""

    def resumed(self) -> None:
        """Restore what follows from loaded state."""

    def state_tensors(self) -> dict[str, Tensor]:
        """Return all state as `<parameter>.<entry>`, to save, or to fill for `load_state_tensors`.

        The names are independent of the order of parameters, of groups and of the mesh. 8- and
        4-bit moments are unpacked copies in host memory; all others are the live tensors.
        """
        return {name: plain(value) for name, value in self._entries().items()}

    @torch.no_grad()
    def load_state_tensors(self, state: Mapping[str, Tensor]) -> None:
        """Load state with the names and shapes of `state_tensors`, sharded like the live state.

        Raises:
            CheckpointError: an entry is missing, unknown or of another shape; the error names it.
        """
        own = self._entries()
        for wrong, what in ((own.keys() - state, "missing"), (state.keys() - own, "unknown")):
            if wrong:
                raise CheckpointError(
                    f"optimizer state {min(wrong)!r} is {what} ({len(wrong)} such). "
                    "Fix: resume with the model, optim.name and recompute.compress it was saved "
                    "with."
                )
        for name, value in state.items():
            _write(name, own[name], value)
        self.resumed()

    def state_dict(self) -> dict[str, Any]:
        """Return torch's standard form; 8- and 4-bit moments are unpacked as in `state_tensors`."""
        found = super().state_dict()
        state = {
            key: {entry: plain(value) for entry, value in entries.items()}
            for key, entries in found["state"].items()
        }
        return {**found, "state": state}

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load torch's standard form into the live tensors, which keep their dtype and device.

        Raises:
            CheckpointError: an entry is missing, unknown or of another shape.
        """
        handle = self.register_load_state_dict_pre_hook(_take_state)  # after other hooks
        try:
            super().load_state_dict(state_dict)
        finally:
            handle.remove()
        self.resumed()

    def __setstate__(self, state: dict[str, Any]) -> None:
        kept = self.__dict__.get("state", {})
        super().__setstate__(state)
        for parameter, entries in kept.items():
            self.state.setdefault(parameter, entries)

    def _entries(self) -> dict[str, Tensor]:
        """Return all state in its stored form, by the names of `state_tensors`."""
        return {
            f"{name}.{key}": value
            for group in self.param_groups
            for name, p in zip(group["param_names"], group["params"], strict=True)
            for key, value in self.state[p].items()
        }


def _take_state(optimizer: torch.optim.Optimizer, given: dict[str, Any]) -> dict[str, Any]:
    """Copy the state of a `state_dict` into the optimizer's; return the rest for torch to load.

    torch would copy the state itself, in the parameters' dtype and on their device (pytorch#43706).
    """
    saved = [key for group in given["param_groups"] for key in group["params"]]
    params = [p for group in optimizer.param_groups for p in group["params"]]
    if len(saved) != len(params):
        return given  # torch raises the error
    both = zip(saved, params, strict=True)
    entries = [(key, optimizer.state[p], given["state"].get(key, {})) for key, p in both]
    for key, own, new in entries:
        if own.keys() != new.keys():
            raise CheckpointError(
                f"optimizer state of parameter {key} has {sorted(new)}, not {sorted(own)}. "
                "Fix: load what state_dict() returned, for a model with the same groups."
            )
    for key, own, new in entries:
        for entry, value in new.items():
            _write(f"{key}.{entry}", own[entry], value)
    return {**given, "state": {}}


def _write(name: str, own: Tensor, value: Tensor) -> None:
    """Copy one entry of state into the live tensor of the same shape and sharding."""
    if value is own:
        return
    if value.shape != own.shape:
        raise CheckpointError(
            f"optimizer state {name!r} has shape {tuple(value.shape)}, not {tuple(own.shape)}. "
            "Fix: resume with the model it was saved with."
        )
    write(own, value)
