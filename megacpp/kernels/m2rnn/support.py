"""Reasons why a configuration can't use the Triton kernels of M2RNN; no torch import here."""

from __future__ import annotations

from megacpp.config.schema import Config
from megacpp.kernels.host import Host
from megacpp.kernels.support import triton_kernels, wide_numbers

# Of a padded state, as a program holds it: more spills out of its registers
# (tests/model/test_m2rnn_triton.py compiles the largest).
MOST_NUMBERS, MOST_VALUE_DIM = 4096, 32


def m2rnn_triton(config: Config, host: Host) -> str | None:
    """Return why kernels that hold a state in registers, in fp32, can't run; None: they can."""
    unsupported = triton_kernels(config, host) or wide_numbers(host)
    if unsupported:
        return unsupported
    r = config.model.m2rnn
    K, V = (max(16, 1 << (size - 1).bit_length()) for size in (r.key_dim, r.value_dim))
    if V > MOST_VALUE_DIM or K * V > MOST_NUMBERS:
        return (
            "holds states of up to key_dim=256, value_dim=16 or key_dim=128, value_dim=32 "
            f"(key_dim={r.key_dim}, value_dim={r.value_dim})"
        )
    return None
