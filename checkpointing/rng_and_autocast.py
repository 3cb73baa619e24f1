"""State that a recomputed region depends on besides its arguments: autocast and random numbers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class RngAndAutocastState:
    """Autocast state of a region's first run, and the random state if the region drew numbers.

    Attributes:
        autocast: (device type, enabled, dtype) of the CPU and of the arguments' device.
        cache: whether autocast caches casts of weights.
        devices: accelerators whose random state counts; none while a CUDA graph is captured.
        captured: whether a CUDA graph is captured.
        random: states of the CPU and of `devices`; None if the region draws nothing.
    """

    autocast: list[tuple[str, bool, torch.dtype]]
    cache: bool
    devices: list[torch.device]
    captured: bool = False
    random: list[Tensor] | None = None

    @staticmethod
    def now(args: Sequence[object]) -> RngAndAutocastState:
        """Return the current autocast state for the devices of `args`."""
        found = dict.fromkeys(a.device for a in args if isinstance(a, Tensor))
        devices = [device for device in found if device.type not in ("cpu", "meta")]
        kinds = dict.fromkeys(["cpu", *(device.type for device in devices)])
        autocast = [
            (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
            for kind in kinds
        ]
        captured = bool(devices) and torch.cuda.is_current_stream_capturing()
        cache = torch.is_autocast_cache_enabled()
        return RngAndAutocastState(autocast, cache, [] if captured else devices, captured)

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Save the random states if the context draws from them."""
        before = self._states()
        yield
        if not all(map(torch.equal, before, self._states())):
            self.random = before

    @contextmanager
    def again(self) -> Iterator[None]:
        """Restore autocast and random numbers inside the context, and the caller's afterwards."""
        with ExitStack() as stack:
            for kind, enabled, dtype in self.autocast:
                stack.enter_context(
                    torch.autocast(kind, dtype, enabled=enabled, cache_enabled=self.cache)
                )
            if self.random is None:
                yield
                return
            before = self._states()
            self._set(self.random)
            try:
                yield
            finally:
                self._set(before)

    def _states(self) -> list[Tensor]:
        of_devices = [torch.get_device_module(d).get_rng_state(d) for d in self.devices]
        return [torch.get_rng_state(), *of_devices]

    def _set(self, states: Sequence[Tensor]) -> None:
        torch.set_rng_state(states[0])
        for device, state in zip(self.devices, states[1:], strict=True):
            torch.get_device_module(device).set_rng_state(state, device)
