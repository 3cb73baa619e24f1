"""Custom code of a folder: the parts of this package that one model needs, as two files."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import megacpp
from megacpp.blocks import kinds
from megacpp.blocks.descriptor import BlockKind
from megacpp.blocks.features import FEATURES
from megacpp.config.model import ModelConfig
from megacpp.interop.code.bundle import Bundle
from megacpp.interop.features import letters
from megacpp.model.count import meta_model
from megacpp.model.fp32 import contract_parameters

ROOM = "megacpp.interop.code"
CONFIGURATION, MODELING = "configuration_megacpp", "modeling_megacpp"
HEADER = '''"""Model of this folder for transformers. It doesn't need megacpp.

megacpp {version} wrote it from its own modules, which the section titles name (Apache-2.0 license).
"""

from __future__ import annotations

'''
OPERATORS = """import zlib

# Operators' namespace, of this module alone: torch frees an operator when its name comes again.
OPERATORS = f"megacpp_{zlib.crc32(__name__.encode()):08x}"

"""
# Backends for GPUs, FP8, and what only training runs.
NEVER = (
    "megacpp.kernels.attention.flex",
    "megacpp.kernels.attention.varlen",
    "megacpp.kernels.experts.fp8",
    "megacpp.blocks.experts.fused_router",
    "megacpp.kernels.experts.triton",
    "megacpp.kernels.experts.triton_units",
    "megacpp.kernels.experts.triton_router",
    "megacpp.kernels.experts.triton_router_kernels",
    "megacpp.kernels.experts.triton_rows",
    "megacpp.kernels.gated_delta_rule.library",
    "megacpp.kernels.gated_delta_rule.triton",
    "megacpp.kernels.m2rnn.triton",
    "megacpp.kernels.m2rnn.triton_sums",
    "megacpp.kernels.mamba3.library",
    "megacpp.kernels.mamba3.triton",
    "megacpp.kernels.triton_causal_conv",
    "megacpp.kernels.triton_gate_kernels",
    "megacpp.kernels.triton_gates",
    "megacpp.kernels.triton_rms_norm",
    "megacpp.kernels.triton_wide_linear",
    "megacpp.blocks.attention.sparse:freeze_all_but_indexers",
)
CUT = ("megacpp.model.hybrid:HybridLM.forward", "megacpp.model.head:LanguageModelHead.forward")


def code_files(model: ModelConfig) -> dict[str, str]:
    """Return the text of each file of code by its name.

    Args:
        model: settings, without what only trains (`as_exported`).
    """
    spec = importlib.util.find_spec(f"{ROOM}.configuration")
    assert spec is not None and spec.origin is not None
    names = [
        name
        for name, kind in vars(kinds).items()
        if isinstance(kind, BlockKind) and kind.letter in letters(model)
    ]
    given = {
        "megacpp.blocks.kinds:KINDS": f"KINDS = {{k.letter: k for k in ({', '.join(names)},)}}",
        f"{ROOM}.modeling:WIDE": f"WIDE = [{', '.join(map(repr, _wide_names(model)))}]",
    }
    beside = {f"{ROOM}.configuration": f".{CONFIGURATION}"}
    made = Bundle(f"{ROOM}.modeling", (*NEVER, *_unused(model)), given, CUT, beside)
    text = made.text()
    if '"megacpp::' in text:
        text = OPERATORS + text.replace('"megacpp::', 'OPERATORS + "::')
    return {
        f"{CONFIGURATION}.py": Path(spec.origin).read_text(encoding="utf-8"),
        f"{MODELING}.py": HEADER.format(version=megacpp.__version__) + text,
    }


def _wide_names(model: ModelConfig) -> list[str]:
    """Return the last two parts of the names of parameters that stay in fp32."""
    wide = contract_parameters(meta_model(model))
    ends = (".".join(name.split(".")[-2:]) for name, _ in wide)
    return list(dict.fromkeys(ends))


def _unused(model: ModelConfig) -> Iterator[str]:
    """Yield the modules of options that a model hasn't."""
    a, blocks = model.attention, "megacpp.blocks"
    yield from (f"{one.package}.module" for one in FEATURES.values() if not one.present(model))
    if not a.sparse.layers:
        yield f"{blocks}.attention.sparse:SparseLatentAttention"
        yield f"{blocks}.attention.sparse:SparseGroupedQueryAttention"
        yield "megacpp.kernels.sparse_attention.reference"
        if a.kind == "gqa":
            yield f"{blocks}.attention.mla"
    if a.softcap is None:
        yield "megacpp.kernels.attention.softcap:softcap_attention"
