"""Reasons why Triton kernels can't do the gated delta rule; no torch import here."""

from __future__ import annotations

from megacpp.config.schema import Config
from megacpp.kernels.host import Host
from megacpp.kernels.operation import Backend, Operation, definition
from megacpp.kernels.support import always, dotted, old_gpu, triton_in_fp32, version

PACKAGE = "flash-linear-attention"
OLDEST = (0, 6)  # the release that megacpp/kernels/gated_delta_rule/library.py was written for
HOPPER, BLACKWELL = (9, 0), (10, 0)
WRONG_ON_HOPPER = (3, 4), (3, 7)  # of triton: fla-org/flash-linear-attention#640
MOST_KEY_DIM = 256
CHUNKS = (16, 32, 64)
MOST_OF_OURS = 128  # dims of a key whose tiles a program's registers hold


def fla(config: Config, host: Host) -> str | None:
    """Return why the Triton kernels of `chunk_gated_delta_rule` can't run; None: they can."""
    g, unsupported = config.model.gated_deltanet, old_gpu(host)
    if unsupported:
        return unsupported
    found = host.packages.get(PACKAGE)
    if found is None or version(found) < OLDEST:
        return f"needs {PACKAGE} {dotted(OLDEST)} (installed: {found or 'none'})"
    if host.dtype not in ("bf16", "fp16"):
        return f"computes in bf16 or fp16 (precision.dtype={host.dtype})"
    triton = host.packages.get("triton", "0.0")
    first, last = WRONG_ON_HOPPER
    if host.capability == HOPPER and first <= version(triton) <= last:
        return (
            f"returns wrong gradients of g and beta with triton {triton} on compute capability 9.0"
        )
    if host.capability is not None and host.capability >= BLACKWELL:
        there = dotted(host.capability)
        return f"reads out of bounds on compute capability {there} (flash-linear-attention#913)"
    if g.key_dim > MOST_KEY_DIM:
        return f"takes keys of up to {MOST_KEY_DIM} dims (key_dim={g.key_dim})"
    if g.chunk_size not in CHUNKS:
        return f"takes chunks of 16, 32 or 64 tokens (chunk_size={g.chunk_size})"
    return None


def delta_rule_triton(config: Config, host: Host) -> str | None:
    """Return why our own Triton kernels can't run; None: they can."""
    key_dim = config.model.gated_deltanet.key_dim
    if key_dim > MOST_OF_OURS:
        return f"takes keys of up to {MOST_OF_OURS} dims (key_dim={key_dim})"
    return triton_in_fp32(config, host)


GATED_DELTA_RULE = Operation(
    "the gated delta rule",
    "G",
    (
        Backend("fla", "the Triton kernels of flash-linear-attention", fla, traced=False),
        Backend("triton", "a program for each chunk and head", delta_rule_triton),
        Backend("torch", "matrix products and a triangular solve, chunk by chunk", always),
        definition("one token after another under autograd"),
    ),
)
