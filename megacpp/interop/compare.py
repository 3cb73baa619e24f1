"""Comparison of a Hugging Face folder in transformers and here: the same logits.

Legend: B rows, T tokens, V vocabulary.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megacpp.config.model import ModelConfig
from megacpp.errors import CheckpointError, MegacppError, config_error
from megacpp.interop.code.write import code_files
from megacpp.interop.hf_config import read_hf_config
from megacpp.interop.load import load_weights, open_source
from megacpp.interop.places import WeightsFolder, locate, read_model
from megacpp.model.hybrid import HybridLM
from megacpp.state.export import empty_model

WITHIN = 1e-5  # of the largest logit, in fp32
ROWS, TOKENS = 2, 48


def compared(folder: Path, key: str, asked: str = "check") -> str:
    """Return a line with the largest difference of logits between transformers and this model.

    Args:
        folder: folder of Hugging Face's format.
        key: setting that names it, for messages.
        asked: setting that asks for the comparison.

    Raises:
        ConfigError: the folder is of another format.
        MegacppError: transformers isn't installed.
        CheckpointError: the results differ.
    """
    try:
        transformers: Any = importlib.import_module("transformers")
    except ImportError:
        raise MegacppError(
            f"{asked}: transformers isn't installed. Fix: pip install 'megacpp[hf]'."
        ) from None
    place = locate(str(folder), key)
    if place.kind != "hf":
        raise config_error(
            key, folder, "isn't a Hugging Face folder", f"leave out --{asked.replace('_', '-')}"
        )
    model = read_model(place)
    draws = torch.Generator().manual_seed(0)
    ids_BT = torch.randint(model.vocab_size, (ROWS, TOKENS), generator=draws)
    here_BTV = our_logits(load_model(place, model), ids_BT)
    auto = transformers.AutoModelForCausalLM
    how: dict[str, Any] = {"dtype": torch.float32, "attn_implementation": "eager"}
    if read_hf_config(folder).one.own:
        _check_code(folder, code_files(model))
        how = {"dtype": torch.float32, "trust_remote_code": True}
    with torch.no_grad():
        other = auto.from_pretrained(folder, **how)
        there_BTV = other.eval()(ids_BT).logits
    most, size = (here_BTV - there_BTV).abs().max().item(), there_BTV.abs().max().item()
    same = (here_BTV.argmax(-1) == there_BTV.argmax(-1)).float().mean().item()
    line = (
        f"transformers {transformers.__version__}: logits up to {size:.3g} differ by at most "
        f"{most:.2g} ({most / size:.1g} relative), {same:.1%} of the likeliest tokens equal"
    )
    if not most <= WITHIN * size:
        raise CheckpointError(f"{folder}: {line}. Fix: don't use it; report it with config.json.")
    return line


def _check_code(folder: Path, files: Mapping[str, str]) -> None:
    """Raise CheckpointError unless a folder's code is the one that this program writes."""
    for name, text in files.items():
        path = folder / name
        if not path.is_file() or path.read_text(encoding="utf-8") != text:
            raise CheckpointError(f"{path}: isn't the code of this megacpp. Fix: export again.")


def load_model(place: WeightsFolder, model: ModelConfig) -> HybridLM:
    """Return the model of a folder in eval mode, in fp32 on the CPU."""
    found = empty_model(model, "cpu", torch.float32)
    load_weights(found, open_source(place, model))
    return found


@torch.no_grad()
def our_logits(model: HybridLM, ids_BT: Tensor) -> Tensor:
    """Return the logits `[B, T, V]` of rows of tokens."""
    return model.head.logits(model.hidden(ids_BT))
