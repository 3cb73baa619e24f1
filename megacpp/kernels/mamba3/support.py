"""Reasons why a configuration can't use the kernels of Mamba-3; no torch import here.

Those of mamba-ssm compute in bf16 on a GPU. Their shapes are those that the kernels' code asserts
or that their authors test; the defects are those of the versions named.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from megacpp.config.schema import Config
from megacpp.kernels.host import Host
from megacpp.kernels.operation import Backend, Operation, definition
from megacpp.kernels.support import always, no_start, triton_in_fp32

OLDEST = "2.3.2"  # of mamba-ssm: the first on PyPI with packed rows in both kernels
# state-spaces/mamba#997 is in the source alone, behind 2.3.2.post1, the newest on PyPI. No release
# has it: 2.3.3 is the least that one could be called, an assumption to check when there is one. A
# build from newer source that still calls itself 2.3.2 is refused with the others.
SISO_RIGHT = "2.3.3"
TRITON = "3.5"  # tensor descriptors as the SISO kernels use them; compiled and interpreted by 3.6
TILELANG = "0.1.8"  # what mamba-ssm 2.3.2.post1 pins
SHARED = 64  # rows (tokens times ranks) of a chunk whose tiles fit into shared memory
MOST_BYTES = 232_448  # of shared memory that a block can have on 9.0
BF16_BYTES = 2
WARPS = 32  # rows that give each of the backward's 8 warps a tile of 16 x 8 in every product


def mamba3_siso(config: Config, host: Host) -> str | None:
    """Return why `mamba3_siso_combined`, in Triton, can't run; None: it can."""
    return next(_siso(config, host), None)


def mamba3_mimo(config: Config, host: Host) -> str | None:
    """Return why `mamba3_mimo`, in TileLang, can't run; None: it can."""
    return next(_mimo(config, host), None)


def mamba3_triton(config: Config, host: Host) -> str | None:
    """Return why our Triton kernels can't run; None: they can."""
    m = config.model.mamba3
    if m.mimo_rank > 1:
        return f"is for SISO (model.mamba3.mimo_rank={m.mimo_rank})"
    return triton_in_fp32(config, host) or _registers(m.d_state, m.headdim, host.capability)


def _registers(d_state: int, headdim: int, capability: tuple[int, int] | None) -> str | None:
    """Return that a program's registers don't hold the tiles of a state; None: they do.

    Compiled for 8.0, whose products take both operands from registers, programs keep kilobytes a
    thread elsewhere beyond 64 x 64; for 9.0 and 10.0 up to 350 bytes at 128 x 128.
    """
    by_warps = capability is not None and not (9, 0) <= capability < (12, 0)
    most = 64 if by_warps else 128
    if max(d_state, headdim) > 128 or _block(d_state) * _block(headdim) > most**2:
        there = "" if capability is None else f" on {_dotted(capability)}"
        return f"holds states of up to {most} x {most}{there}, not {d_state} x {headdim}"
    return None


def _block(size: int) -> int:
    return 1 << (size - 1).bit_length()


def _siso(config: Config, host: Host) -> Iterator[str]:
    m = config.model.mamba3
    if m.mimo_rank > 1:
        yield f"is for SISO (model.mamba3.mimo_rank={m.mimo_rank})"
    yield from _hosts(host)
    yield from _older(host, "triton", TRITON)
    if trouble := no_start(host):
        yield trouble
    if host.capability and host.capability >= (10, 0) and _below(host, "mamba-ssm", SISO_RIGHT):
        yield (
            f"mamba-ssm {host.packages['mamba-ssm']} returns wrong outputs on compute capability "
            f"{_dotted(host.capability)} without an error (state-spaces/mamba#997)"
        )
    for name in ("d_state", "headdim"):
        size = getattr(m, name)
        if not _power_of_two(size) or not 16 <= size <= 256:
            yield f"takes powers of two from 16 to 256, not model.mamba3.{name}={size}"
    if not _power_of_two(m.chunk_size) or not 16 <= m.chunk_size <= 128:
        yield f"takes chunks of 16, 32, 64 or 128 tokens, not {m.chunk_size}"
    yield from _siso_tiles(m.d_state, m.headdim, m.chunk_size, host.capability)
    angles = _angles(config)
    if not angles or angles % 2:
        yield f"takes an even number of angles, not {angles} (model.mamba3.rope_fraction)"


def _siso_tiles(
    d_state: int, headdim: int, chunk_size: int, capability: tuple[int, int] | None
) -> Iterator[str]:
    """Yield why the shared memory of a GPU is too small for the backward.

    Compiled for 9.0 without stages it asks for 131,072 bytes for (d_state, headdim, chunk_size) =
    (128, 128, 64) and (128, 64, 128), 229,376 for (256, 128, 64); there are 232,448 on 9.0 and
    166,912 on 8.0.
    """
    most = 256 * 128 if capability is None or capability >= (9, 0) else 128 * 128
    if d_state * headdim > most:
        yield f"has shared memory for d_state times headdim up to {most}, not {d_state * headdim}"
    if chunk_size > 64 and d_state * headdim > 128 * 64:
        yield f"has shared memory for chunks of 64 tokens at d_state={d_state}, headdim={headdim}"
    if capability and (8, 0) < capability < (9, 0):
        yield f"needs the shared memory of 8.0 or 9.0, here is {_dotted(capability)}"


def _mimo(config: Config, host: Host) -> Iterator[str]:
    m = config.model.mamba3
    R, N, P, C = m.mimo_rank, m.d_state, m.headdim, m.chunk_size
    if R == 1:
        yield "is for MIMO (model.mamba3.mimo_rank=1)"
    yield from _hosts(host)
    if host.packages.get("tilelang") != TILELANG:
        found = host.packages.get("tilelang", "none")
        yield f"mamba-ssm is written for tilelang {TILELANG}, here is {found}"
    if host.capability == (12, 1):
        yield "the first kernel of a process may return zeros here (tile-ai/tilelang#3071)"
    if host.capability and host.capability != (9, 0):
        yield (
            "its tiles are sized for the shared memory of compute capability 9.0, here is "
            f"{_dotted(host.capability)}"
        )
    if R not in (2, 4, 8):
        yield f"takes 2, 4 or 8 ranks, not model.mamba3.mimo_rank={R}"
    if N not in (16, 32, 64, 128, 256) or P not in (32, 64, 128):
        yield f"takes d_state of 16 to 256 and headdim of 32 to 128 (powers of two), not {N}, {P}"
    if (N, P) in ((16, 32), (256, 128)):
        yield f"may not compile for d_state={N} with headdim={P}"
    most = 8 if N == 256 or (N, P) == (128, 128) else SHARED // R
    least = max(8, (64 if N == 16 else WARPS) // R)
    if not _power_of_two(C) or not least <= C <= most:
        yield (
            f"takes chunks of {least} to {most} tokens (a power of two) for mimo_rank={R}, "
            f"d_state={N}, headdim={P}: model.mamba3.chunk_size={C}"
            if least <= most
            else f"has no chunk size for mimo_rank={R}, d_state={N}, headdim={P}"
        )
    asks = _mimo_bytes(R, N, P, C, _angles(config))
    if asks > MOST_BYTES:
        yield f"asks for {asks:,} bytes of shared memory, there are {MOST_BYTES:,}"
    if _angles(config) * 2 not in (N, N // 2):
        yield f"turns all or half of d_state={N}, not rope_fraction={m.rope_fraction:g} of it"
    if config.data.seq_len // config.mesh.cp < 2:
        yield "fails on rows of one token (state-spaces/mamba#985)"


def mimo_cost(config: Config) -> str:
    """Return what B and C cost that are repeated for all heads of their group; empty: nothing.

    The kernel takes one group of heads, or one for each head.
    """
    m, mesh = config.model.mamba3, config.mesh
    heads = m.expand * config.model.dim // m.headdim // mesh.tp
    groups = max(1, m.ngroups // mesh.tp)
    if groups in (1, heads):
        return ""
    tokens = config.train.device_batch_size * config.data.seq_len // mesh.cp
    more = 2 * BF16_BYTES * tokens * m.mimo_rank * m.d_state * (heads - groups)
    return (
        f"B and C of {groups} groups repeated for {heads} heads, {more / 2**20:,.1f} MiB more a "
        "layer and microbatch"
    )


def _mimo_bytes(R: int, N: int, P: int, C: int, angles: int) -> int:
    """Shared memory of the backward, bytes: its tiles one after another, and sums over threads.

    Compiled for 9.0 it asks for 223,904 bytes for (4, 128, 64, 16, 32), 146,080 for
    (4, 64, 64, 16, 16), of packed rows too, and 78,112 for (2, 64, 64, 16, 16). The other kernels
    ask for less than half of it.
    """
    rows = R * C
    of_rows = rows * (14 * N + 6 * P + 8 * rows + 4 * angles)
    return of_rows + 4 * N * P + C * (4 * P + 2 * R**2 + 10) + 6 * 1024


def _hosts(host: Host) -> Iterator[str]:
    """Yield requirements of both kernels that a host doesn't meet."""
    if host.device != "cuda":
        yield "needs a GPU"
    yield from _older(host, "mamba-ssm", OLDEST)
    yield from _older(host, "einops", "0")  # which its modules import
    if host.dtype != "bf16":
        yield f"computes in bf16, not in {host.dtype}"
    if host.capability and host.capability < (8, 0):
        yield f"needs compute capability 8.0 for bf16, here is {_dotted(host.capability)}"


def _older(host: Host, package: str, least: str) -> Iterator[str]:
    if package not in host.packages:
        yield f"{package} is not installed (make kernels)"
    elif _below(host, package, least):
        yield f"needs {package} {least}, here is {host.packages[package]}"


def _below(host: Host, package: str, version: str) -> bool:
    return _release(host.packages[package]) < _release(version)


def _release(version: str) -> tuple[int, ...]:
    """Return the numbers of a version; what comes after a release counts as the release."""
    found = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(n) for n in found[0].split(".")) if found else ()


def _angles(config: Config) -> int:
    m = config.model.mamba3
    return int(m.d_state * m.rope_fraction) // 2


def _power_of_two(n: int) -> bool:
    return n > 0 and n & (n - 1) == 0


def _dotted(capability: tuple[int, int]) -> str:
    return f"{capability[0]}.{capability[1]}"


MAMBA3 = Operation(
    "the Mamba-3 scan",
    "M",
    (
        Backend("mamba_ssm", "SISO: the Triton kernels of mamba-ssm", mamba3_siso),
        Backend("tilelang", "MIMO: the TileLang kernels of mamba-ssm", mamba3_mimo, cost=mimo_cost),
        Backend("triton", "SISO: a program for each chunk and head", mamba3_triton),
        Backend("torch", "matrix products over chunks", always),
        definition("one token after another"),
    ),
    {"MIMO of rank 4": {"model.mamba3.mimo_rank": 4, "model.mamba3.chunk_size": 16}},
)
