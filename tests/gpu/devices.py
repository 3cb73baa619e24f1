"""Bodies that are right on any device: a CPU shows that they run, a GPU what they are for.

@on_any_device
def test_something(device: torch.device) -> None
"""

from __future__ import annotations

import pytest
import torch

NEEDS_CUDA = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
on_any_device = pytest.mark.parametrize(
    "device",
    [
        pytest.param(torch.device("cpu"), id="cpu"),
        pytest.param(torch.device("cuda", 0), id="cuda", marks=NEEDS_CUDA),
    ],
)
