"""Software families of published runs: how each fuses, overlaps and steps.

    family_named("torchtitan 2024-12", compiled=True, kernel="SDPA flash")

A family states habits of the software, taken from its code and documents; its constants per GPU
(bench/published.py) are fitted on few rows. Bytes are those read and written per element.
"""

from __future__ import annotations

from typing import NamedTuple


class Fusion(NamedTuple):
    """Bytes that element-wise kernels move per element, forward and backward.

    Attributes:
        norm: of the residual stream.
        residual: an addition to it, dropout included.
        plain: an activation, per hidden element.
        gated: a gated activation, per hidden element.
        rope: rotary embedding, per element of queries and keys.
        copies: splitting and joining of heads, per element of queries, keys and values.
        logits: cross entropy, per logit, forward and backward together.
        launches: the host's time for a block's forward, against `LAUNCHES` operators of torch.
    """

    norm: tuple[float, float]
    residual: tuple[float, float]
    plain: tuple[float, float]
    gated: tuple[float, float]
    rope: tuple[float, float]
    copies: tuple[float, float]
    logits: float
    launches: float


# fp32 intermediates of each operator are written and read.
EAGER = Fusion((4, 8), (6, 6), (4, 6), (10, 18), (20, 20), (2, 4), 36, 1.5)
# RMSNorm of separate fp32 operators, as torchtitan's models had it in eager mode.
SEPARATE = EAGER._replace(norm=(34, 60))
# The host takes 13.5 us for torch's Linear on a DGX H100, where `launch_us` has 10, and 2.7 times
# as long for Transformer Engine's (NVIDIA/TransformerEngine#2053), which is some of the operators.
FUSED = Fusion((4, 8), (6, 4), (4, 8), (6, 10), (4, 4), (4, 4), 24, 2.5)
COMPILED = Fusion((4, 8), (2, 4), (4, 6), (6, 10), (6, 6), (0, 2), 14, 0.5)
OLD = Fusion((4, 8), (7, 5), (4, 8), (6, 10), (4, 4), (6, 6), 30, 1.5)


class Family(NamedTuple):
    """Habits of a training stack.

    Attributes:
        name: by which constants are kept.
        fusion: of element-wise work.
        attention: kernel of hardware.json, by generation of GPU; `unfused`: separate products.
        data: policy of the data axes where no row states another.
        overlapped: data communication runs beside compute.
        reduce_bytes: of a gradient that is reduced.
        adam_bytes: read and written by the optimizer per parameter that a rank holds.
        copied: bytes per parameter that FSDP1 copies around a gather and a reduction.
        fsdp2: parameters and gradients are copied as FSDP2 does (`StepWork.copied`).
        added: gradients of weights are added to fp32 sums by the product.
    """

    name: str
    fusion: Fusion
    attention: dict[str, str]
    data: str = "fsdp"
    overlapped: bool = True
    reduce_bytes: float = 4.0
    adam_bytes: float = 40.0
    copied: float = 0.0
    fsdp2: bool = False
    added: bool = False


FLASH2 = {"A100": "flash2", "H100": "flash2", "B200": "cudnn"}
FAMILIES = {
    "llm-foundry": Family(
        "llm-foundry", EAGER, {"A100": "triton", "H100": "triton", "B200": "flash2"},
        reduce_bytes=2.0, adam_bytes=70.0, copied=26.0,
    ),
    "torchtitan-eager": Family("torchtitan-eager", SEPARATE, FLASH2, fsdp2=True),
    "torchtitan-compile": Family("torchtitan-compile", COMPILED, FLASH2, fsdp2=True),
    "megatron-2021": Family(
        "megatron-2021", OLD, {"A100": "unfused", "H100": "unfused", "B200": "unfused"},
        data="ddp", overlapped=False, reduce_bytes=2.0, adam_bytes=46.0, added=True,
    ),
    "megatron-serial": Family(
        "megatron-serial", FUSED, {"A100": "cudnn", "H100": "cudnn", "B200": "cudnn"},
        data="zero1", overlapped=False, added=True,
    ),
    "megatron": Family(
        "megatron", FUSED, {"A100": "cudnn", "H100": "cudnn", "B200": "cudnn"},
        data="zero1", added=True,
    ),
    "nanotron": Family("nanotron", EAGER._replace(norm=(4, 8)), FLASH2, data="zero1"),
    "nanochat": Family(
        "nanochat", COMPILED, {"A100": "flash2", "H100": "flash3", "B200": "flash3"},
        data="zero1", reduce_bytes=2.0,
    ),
}  # fmt: skip


def family_named(source: str, compiled: bool, kernel: str) -> Family:
    """Return the family of a row by its source, or by how it computes where that says nothing.

    Args:
        source: of the row.
        compiled: whether the run compiled its blocks.
        kernel: text about its attention.
    """
    text, kernel = source.lower(), kernel.lower()
    if "mosaic" in text or "llm-foundry" in text or "foundry" in text:
        return FAMILIES["llm-foundry"]
    if "simumax" in text:
        return FAMILIES["megatron-serial"]
    if "unfused" in kernel or "vtrain" in text or "sc21" in text:
        return FAMILIES["megatron-2021"]
    for name in ("nanotron", "nanochat"):
        if name in text:
            return FAMILIES[name]
    if any(word in text for word in ("megatron", "dgxc", "nemo", "nvidia", "llama 3 paper")):
        return FAMILIES["megatron"]
    if "te" in kernel.replace(",", " ").split() or "transformerengine" in kernel:
        return FAMILIES["megatron"]
    return FAMILIES["torchtitan-compile" if compiled else "torchtitan-eager"]
