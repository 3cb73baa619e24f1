"""Random generator states of this process as JSON."""

from __future__ import annotations

import base64
import random
from typing import Any

import numpy as np
import torch
from torch import Tensor


def rng_state() -> dict[str, Any]:
    """Return the states of Python's, numpy's, torch's CPU and, if present, this GPU's generator."""
    version, words, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state()
    state: dict[str, Any] = {
        "python": [version, list(words), gauss],
        "numpy": [name, np.asarray(keys).tolist(), int(position), int(has_gauss), float(cached)],
        "torch": _to_text(torch.get_rng_state()),
    }
    if torch.cuda.is_available():
        state["cuda"] = _to_text(torch.cuda.get_rng_state())
    return state


def seed_generators(seed: int) -> None:
    """Seed the generators of Python, numpy and torch, which start anywhere in a new process."""
    import rich.style  # noqa: F401 - it draws a number where it is first imported

    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def set_rng_state(state: dict[str, Any]) -> None:
    """Restore a state from `rng_state`; without a GPU its GPU state is ignored."""
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, np.array(keys, np.uint32), *rest))
    torch.set_rng_state(_from_text(state["torch"]))
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(_from_text(state["cuda"]))


def _to_text(state: Tensor) -> str:
    return base64.b64encode(state.numpy().tobytes()).decode()


def _from_text(text: str) -> Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
