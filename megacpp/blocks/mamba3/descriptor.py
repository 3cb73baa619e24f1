"""Mamba-3 (M) as other packages read it; no torch import here.

Letters: W heads * head dim, H heads, S groups * MIMO rank * state, A rotated pairs, R MIMO rank,
N state, P head dim, J taps. What a head owns is sharded by head; B, C and the angles, which heads
share, are whole on every rank.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING

from megacpp.blocks.descriptor import (
    ALL_TOKENS,
    AllocationSettings,
    BlockKind,
    ContextExchange,
    ForeignTensor,
    Parameter,
)
from megacpp.errors import ConfigError, config_error
from megacpp.model.primes import nearest_divisor

if TYPE_CHECKING:
    from torch import Tensor, nn

    from megacpp.blocks.mamba3.module import Mamba3
    from megacpp.config.schema import CheckpointingPolicy, Config, MeshConfig, ModelConfig
    from megacpp.memory.forms.local_shapes import LocalShapes
    from megacpp.model.documents import Documents
    from megacpp.model.regions import Region


def num_heads(model: ModelConfig) -> int:
    """Heads of an M block."""
    return model.mamba3.expand * model.dim // model.mamba3.headdim


def build(kind: str, model: ModelConfig, layer: int) -> Mamba3:
    """Return the mixer."""
    from megacpp.blocks.mamba3.module import Mamba3

    return Mamba3(model)


def dims(model: ModelConfig) -> dict[str, int]:
    """Sizes of the letters above."""
    m = model.mamba3
    return {
        "W": m.expand * model.dim,
        "H": num_heads(model),
        "S": m.ngroups * m.mimo_rank * m.d_state,
        "A": int(m.d_state * m.rope_fraction) // 2,
        "R": m.mimo_rank,
        "N": m.d_state,
        "P": m.headdim,
        "J": m.conv_kernel,
    }


def by_library(config: Config) -> bool:
    """Whether a kernel of mamba-ssm scans, which cuts documents into chunks of their own."""
    return config.kernels.mamba3 in ("mamba_ssm", "tilelang")


def convolves(model: ModelConfig) -> bool:
    """Return whether there is a short convolution."""
    return model.mamba3.conv_kernel > 0


def mimo(model: ModelConfig) -> bool:
    """Return whether the update has several ranks."""
    return model.mamba3.mimo_rank > 1


def out_norm(model: ModelConfig) -> bool:
    """Return whether the output is normalised before its projection."""
    return model.mamba3.out_norm


PARAMETERS = (
    Parameter(("dt_bias",), "[H_tp]", "vector", fp32=True),
    Parameter(("B_bias", "C_bias"), "[H_tp, R, N]", "vector", fp32=True),
    Parameter(("D",), "[H_tp]", "vector", fp32=True),
    Parameter(
        ("mimo_x", "mimo_z", "mimo_o"), "[H_tp, R, P]", "adamw", decay=False, fp32=True, when=mimo
    ),
    Parameter(("in_z.weight", "in_x.weight"), "[W_tp, D]", "muon", fp8=True, compress=True),
    Parameter(("in_B.weight", "in_C.weight"), "[S, D]", "muon", compress=True),
    Parameter(
        ("in_dt.weight", "in_A.weight", "in_trap.weight"), "[H_tp, D]", "adamw", compress=True
    ),
    Parameter(("in_angles.weight",), "[A, D]", "adamw", compress=True),
    Parameter(("conv_x.weight",), "[W_tp, O, J]", "adamw", decay=False, when=convolves),
    Parameter(
        ("conv_B.weight", "conv_C.weight"), "[S, O, J]", "adamw", decay=False, when=convolves
    ),
    Parameter(("B_norm.weight", "C_norm.weight"), "[N]", "vector", fp32=True),
    Parameter(("norm.weight",), "[W_tp]", "vector", fp32=True, when=out_norm),
    Parameter(("out_proj.weight",), "[D, W_tp]", "muon", fp8=True),
)


def multiply_adds(model: ModelConfig, seq_len: int) -> float:
    """Multiply-adds a token of projections and of q.k, weights.v, k.v and q.state a chunk."""
    m, d, size = model.mamba3, model.dim, dims(model)
    inner, heads, rank = size["W"], size["H"], m.mimo_rank
    projections = d * (2 * inner + 2 * size["S"] + 3 * heads + size["A"]) + inner * d
    rows = rank * min(m.chunk_size, seq_len)  # of a chunk's product, MIMO ranks side by side
    inside = rank * rows * (m.d_state + m.headdim)
    return projections + heads * (inside + 2 * rank * m.d_state * m.headdim)


def checks(config: Config) -> Iterator[ConfigError]:
    """Broken rules of `model.mamba3`."""
    m, inner = config.model.mamba3, config.model.mamba3.expand * config.model.dim
    if inner % m.headdim:
        near = nearest_divisor(inner, m.headdim)
        yield config_error(
            "model.mamba3.headdim",
            m.headdim,
            f"must divide expand * dim ({inner})",
            f"use model.mamba3.headdim={near}",
        )
        return
    heads = inner // m.headdim
    if heads % m.ngroups:
        near = nearest_divisor(heads, m.ngroups)
        yield config_error(
            "model.mamba3.ngroups",
            m.ngroups,
            f"must divide the number of heads ({heads})",
            f"use model.mamba3.ngroups={near}",
        )
    if m.rope_fraction not in (0.5, 1.0):
        yield config_error(
            "model.mamba3.rope_fraction", m.rope_fraction, "must be 0.5 or 1.0", "use 0.5"
        )
    elif m.d_state % 4:
        yield config_error(
            "model.mamba3.d_state",
            m.d_state,
            "must be a multiple of 4 (rotated pairs)",
            f"use model.mamba3.d_state={-(-m.d_state // 4) * 4}",
        )
    if not m.dt_min <= m.dt_max:
        yield config_error(
            "model.mamba3.dt_min", m.dt_min, f"must not exceed dt_max ({m.dt_max})", "swap them"
        )


def regions(policy: CheckpointingPolicy, model: ModelConfig) -> set[Region]:
    """Recompute regions: short convolution, norms, rotation and gate around the scan."""
    return {"conv_bc"} if policy.mblock == "conv_bc_only" else set()


def heads_exchanged(model: ModelConfig) -> tuple[str, int]:
    """Name and number of heads."""
    return "the number of Mamba-3 heads", num_heads(model)


def once(model: ModelConfig, mesh: MeshConfig) -> bool:
    """Whether states are folded over `cp` with parameters of MIMO."""
    return mimo(model) and mesh.cp_mamba3 == "state"


def context_traffic(own: LocalShapes) -> Iterator[tuple[str, int]]:
    """Exchanges of one layer over `cp` in a forward and a backward, with their bytes."""
    m, dim = own.config.model.mamba3, own.config.model.dim
    heads, rank = m.expand * dim // m.headdim // own.tp, m.mimo_rank
    bc, angles = 2 * m.ngroups * m.d_state * rank, int(m.d_state * m.rope_fraction) // 2
    yield "ends of chunks", own.halo_bytes(heads * m.headdim + bc, m.conv_kernel)
    groups = max(1, m.ngroups // own.tp)
    if own.config.mesh.cp_mamba3 == "state":
        numbers = heads * (m.headdim * m.d_state + angles + m.headdim + 2)
        numbers += rank * groups * m.d_state
        yield "states", 2 * own.cp * own.chunks * own.rows * numbers * own.wide
        return
    bc = bc // m.ngroups * groups
    cut = groups % own.cp == 0
    moved = heads * (3 * m.headdim + 1) + (bc if cut else 0)
    yield "heads", 2 * own.tokens * moved * own.compute
    yield "heads", 2 * own.tokens * heads * 2 * own.wide
    gathered = angles + (0 if cut else bc)
    yield "heads", 2 * own.rows * own.row * gathered * own.compute


def shared_bytes(own: LocalShapes, kinds: Collection[str], saved: bool) -> int:
    """Return bytes of the plain scan's masks of chunks, and of places of tokens."""
    mesh, m = own.config.mesh, own.config.model.mamba3
    tokens = own.row if mesh.cp > 1 and mesh.cp_mamba3 == "heads" else own.here
    chunk = m.chunk_size if own.by("mamba3") == "torch" else 0
    return own.rows * tokens * (chunk * own.wide + 6)


def why_eager(mixer: nn.Module) -> str | None:
    """Return the reason why a block can't be one compiled graph, or None."""
    from megacpp.blocks.mamba3.module import Mamba3Scan
    from megacpp.model import compiled

    return compiled.why_eager(mixer, Mamba3Scan, "mamba3", ("torch", "triton"))


def graph_inputs(mixer: Mamba3, docs: Documents, x_BTD: Tensor) -> Documents:
    """Return the documents with the cached values that a scan and a convolution need."""
    from megacpp.kernels.mamba3.ops import Chunks
    from megacpp.model.compiled import graph_documents

    size, dtype = min(mixer.mamba.chunk_size, docs.ids_BT.shape[1]), mixer.dt_bias.dtype
    taps = mixer.mamba.conv_kernel
    if mixer.kernels.mamba3 == "triton":
        from megacpp.kernels.mamba3.triton import runs

        return graph_documents(docs, ("mamba3",), taps, runs)
    key = "mamba3", size, dtype
    return graph_documents(docs, key, taps, lambda read: Chunks.for_documents(read, size, dtype))


MAMBA3 = BlockKind(
    letter="M",
    name="Mamba-3",
    build=build,
    parameters=PARAMETERS,
    dims=dims,
    checks=checks,
    tensor_dims=lambda model: {"the number of Mamba-3 heads": num_heads(model)},
    layouts=(ALL_TOKENS,),
    multiply_adds=multiply_adds,
    allocations=AllocationSettings(
        "mamba3",
        kernel="mamba3",
        document=lambda config: config.model.mamba3.chunk_size if by_library(config) else 0,
    ),
    shared_bytes=shared_bytes,
    why_eager=why_eager,
    graph_inputs=graph_inputs,
    regions=regions,
    recurrent=True,
    context=ContextExchange(
        "cp_mamba3",
        heads_exchanged,
        "state",
        context_traffic,
        gathers=lambda m, kind, heads: ("B, C, angles" if heads else "state", "S"),
        taps=lambda model: model.mamba3.conv_kernel,
        once=once,
    ),
    groups=lambda model: {"model.mamba3.ngroups": model.mamba3.ngroups},
    upstream=(
        ForeignTensor(
            "in_proj.weight",
            tuple(
                f"in_{part}.weight" for part in ("z", "x", "B", "C", "dt", "A", "trap", "angles")
            ),
        ),
        ForeignTensor("conv1d.weight", ("conv_x.weight", "conv_B.weight", "conv_C.weight")),
    ),
)
