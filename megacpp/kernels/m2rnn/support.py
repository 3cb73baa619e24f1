"""Reasons why a configuration can't use the Triton kernels of M2RNN; no torch import here."""

from __future__ import annotations

from megacpp.config.schema import Config
from megacpp.kernels.host import Host
from megacpp.kernels.operation import Backend, Operation, definition
from megacpp.kernels.support import always, triton_kernels, whole_rows, wide_numbers

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


M2RNN = Operation(
    "the M2RNN recurrence",
    "R",
    (
        Backend("triton", "a program per row and head, its state in registers", m2rnn_triton),
        Backend("torch", "chunk by chunk, one token after another inside", always),
        definition("one token after another under autograd", whole_rows),
    ),
    {"clip of the total": {"model.m2rnn.clip_mode": "total"}},
)
