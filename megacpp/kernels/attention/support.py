"""Reasons why a configuration can't use a backend of attention; no torch import here."""

from __future__ import annotations

from megacpp.config.schema import Config
from megacpp.kernels.host import Host
from megacpp.kernels.operation import Backend, Operation, definition
from megacpp.kernels.support import always, dotted, old_gpu, old_triton, version, whole_rows

NARROW = ("bf16", "fp16")
VARLEN_TORCH = (2, 11)  # varlen_attn with a scale and a causal window
WIDEST_FLASH = 256  # head dim of torch's flash kernels, in steps of 8
# Their backward needs shared memory of these for head dims above 192.
WIDE_BACKWARD = ((8, 0), (9, 0), (10, 0))
LEAST_FLEX = 16  # head dim: the least of a Triton product


def varlen(config: Config, host: Host) -> str | None:
    """Return why flash kernels for packed rows, with one head dim, can't run; None: they can."""
    unsupported = varlen_padded(config, host)
    query, value = config.model.attention.head_dims
    if unsupported is None and query != value:
        return (
            f"takes one head dim (q and k: {query}, v: {value}; "
            "varlen_padded takes these with zero columns)"
        )
    return unsupported


def varlen_padded(config: Config, host: Host) -> str | None:
    """Return why flash kernels with zero columns in the narrower head dim can't run, if so."""
    return _parts_of_rows(config, ("heads",)) or _flash(config, host)


def merged(config: Config, host: Host) -> str | None:
    """Return why flash kernels for the parts of a ring can't run; None: they can."""
    mesh, window = config.mesh, config.model.attention.window
    if mesh.cp == 1 or mesh.cp_attention != "ring":
        cut = f"cp={mesh.cp}" if mesh.cp == 1 else f"cp_attention={mesh.cp_attention}"
        return f"is for a ring (mesh.{cut})"
    if window:
        return f"takes no window (model.attention.window={window})"
    return _flash(config, host)


def _flash(config: Config, host: Host) -> str | None:
    """Return why torch's flash kernels for segments can't run; None: they can."""
    attention, widest = config.model.attention, max(config.model.attention.head_dims)
    unsupported = _narrow_gpu(host) or _old_torch(host)
    if unsupported:
        return unsupported
    if attention.softcap is not None:
        return f"takes no soft cap (model.attention.softcap={attention.softcap:g})"
    if widest % 8 or widest > WIDEST_FLASH:
        return f"takes head dims that are a multiple of 8 and at most {WIDEST_FLASH} ({widest})"
    if widest > 192 and host.capability not in (None, *WIDE_BACKWARD):
        return f"its backward of head dims above 192 ({widest}) needs capability 8.0, 9.0 or 10.0"
    return None


def flex(config: Config, host: Host) -> str | None:
    """Return why kernels that torch compiles around masks and scores can't run; None: they can."""
    least = min(config.model.attention.head_dims)
    unsupported = _narrow_gpu(host) or _parts_of_rows(config, ("all_gather", "heads"))
    unsupported = unsupported or old_triton(host)
    if unsupported:
        return unsupported
    if least < LEAST_FLEX:
        return f"takes head dims of at least {LEAST_FLEX} ({least})"
    return None


def _narrow_gpu(host: Host) -> str | None:
    unsupported = old_gpu(host)
    if unsupported is None and host.dtype not in NARROW:
        return f"computes in bf16 or fp16 (precision.dtype={host.dtype})"
    return unsupported


def _old_torch(host: Host) -> str | None:
    found = host.packages.get("torch", "")
    if found and version(found) < VARLEN_TORCH:
        return f"needs torch {dotted(VARLEN_TORCH)} ({found})"
    return None


def _parts_of_rows(config: Config, takes: tuple[str, ...]) -> str | None:
    """Return why a backend that supports the exchanges in `takes` can't run; None: it can."""
    mesh = config.mesh
    if mesh.cp > 1 and mesh.cp_attention not in takes:
        cut = f"mesh.cp={mesh.cp}, mesh.cp_attention={mesh.cp_attention}"
        if mesh.cp_attention == "ring":
            return f"takes no parts of a ring ({cut})"
        return f"takes whole rows ({cut})"
    return None


ATTENTION = Operation(
    "softmax(q k^T) v within documents",
    "A",
    (
        Backend("varlen", "flash kernels over documents end to end", varlen),
        Backend("flex", "kernels compiled around documents and soft cap", flex),
        Backend("merged", "flash kernels for the parts of a ring, by log-sum-exp", merged),
        Backend("varlen_padded", "varlen, v in the dim of q", varlen_padded, False),
        Backend("torch", "scaled_dot_product_attention, a mask for packed rows", always),
        definition("one query after another", whole_rows),
    ),
    {
        "latent, heads of 96 and 64": {
            "model.attention.kind": "mla",
            "model.attention.qk_nope_head_dim": 64,
            "model.attention.qk_rope_head_dim": 32,
            "model.attention.v_head_dim": 64,
        },
        "soft cap": {"model.attention.softcap": 30.0},
    },
)
