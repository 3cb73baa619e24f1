"""Backends beside their definitions on this machine, and a wrong one that is found."""

from typing import Any

import pytest
import torch
from torch import Tensor

from megacpp.blocks.m2rnn import module as m2rnn
from megacpp.config.presets import tiny
from megacpp.errors import ConfigError
from megacpp.kernels.operation import Backend, Operation
from megacpp.kernels.selection import OPERATIONS, BackendSelection
from megacpp.kernels.support import always
from megacpp.run import kernel_check
from megacpp.run.kernel_check import (
    Agreement,
    agreement,
    check_backends,
    variants,
    verify_kernels,
)

CPU = torch.device("cpu")


def test_every_backend_is_compared_or_has_a_reason() -> None:
    found = list(check_backends(CPU, (1, 32)))
    assert all(one.holds or one.unsupported for _, one in found)
    assert {one.operation for _, one in found if one.holds} == set(OPERATIONS)
    asked = {(one.operation, one.backend) for _, one in found}
    every = {(name, b.name) for name, o in OPERATIONS.items() for b in o.backends}
    assert asked == {pair for pair in every if pair[1] != "reference"}
    assert len({(name, special) for name, special, _ in variants()}) == len(list(variants()))


def test_a_wrong_backend_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Change every other head by a thousandth: no loss curve would show it."""
    right = m2rnn.m2rnn_chunked

    def wrong(*args: Any, backend: str, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        y, last = right(*args, backend=backend, **kwargs)
        much = 1.001 if backend == "torch" else 1.0
        return y * torch.where(torch.arange(y.shape[2]) % 2 == 0, much, 1.0)[:, None], last

    monkeypatch.setattr(m2rnn, "m2rnn_chunked", wrong)
    backend = OPERATIONS["m2rnn"].backend("torch")
    one = agreement("m2rnn", backend, tiny(), CPU, (1, 32))
    assert one.holds is False and 1e-4 < one.output_error < 1e-2


def test_a_run_starts_with_kernels_that_agree_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Register the torch scan under another name, unchanged and with a fault in one head."""
    row = OPERATIONS["m2rnn"]
    other = Operation(row.what, row.letters, (Backend("other", "a kernel", always), *row.backends))
    monkeypatch.setitem(OPERATIONS, "m2rnn", other)
    right, fault = m2rnn.m2rnn_chunked, [1.0]

    def scan(*args: Any, backend: str, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        y, last = right(*args, **kwargs)
        much = fault[0] if backend == "other" else 1.0
        return y * torch.where(torch.arange(y.shape[2]) == 0, much, 1.0)[:, None], last

    monkeypatch.setattr(m2rnn, "m2rnn_chunked", scan)
    found = {"m2rnn": BackendSelection("m2rnn", "other", "auto", {})}
    (line,) = verify_kernels(tiny(), CPU, found, (1, 32))
    assert line.startswith("m2rnn: other agrees with its definition here, off by")
    fault[0] = 1.01
    with pytest.raises(ConfigError, match="m2rnn=other: doesn't agree with its definition"):
        verify_kernels(tiny(), CPU, found, (1, 32))
    assert (
        verify_kernels(tiny(), CPU, {"m2rnn": BackendSelection("m2rnn", "torch", "auto", {})}) == []
    )


def test_not_a_number_never_agrees() -> None:
    assert Agreement("m2rnn", "torch", None, float("nan"), 0.0, 1.0).holds is False
    assert Agreement("m2rnn", "triton", "needs a GPU").words == "needs a GPU"
    assert kernel_check.off_by([torch.ones(2)], [torch.zeros(2)]) > 1e9
