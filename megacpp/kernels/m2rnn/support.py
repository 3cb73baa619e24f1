"""Reasons why a configuration can't use the Triton kernels of M2RNN; no torch import here."""

from __future__ import annotations

from megacpp.config.schema import Config
from megacpp.kernels.host import Host
from megacpp.kernels.support import triton_kernels, wide_numbers

# A program holds 16 rows of a state; wider ones spill out of its registers
# (tests/model/test_m2rnn_triton.py compiles the largest).
MOST_VALUE_DIM = 32


def m2rnn_triton(config: Config, host: Host) -> str | None:
    """Return why kernels that hold a state in registers, in fp32, can't run; None: they can."""
    unsupported = triton_kernels(config, host) or wide_numbers(host)
    if unsupported:
        return unsupported
    r = config.model.m2rnn
    if r.value_dim > MOST_VALUE_DIM:
        state = f"{r.key_dim} x {r.value_dim}"
        return f"holds states of value_dim up to {MOST_VALUE_DIM} ({state})"
    return None
