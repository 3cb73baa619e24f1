"""Presets that are a class of transformers, exported at full size and compared there.

    python -m bench.full_size [PRESET ...]

Weights are initial ones; norms are random, so that a wrong order of their rows would show. What
follows is `megacpp export --check`: a folder in fp32, one forward in transformers and one here.
"""

from __future__ import annotations

import contextlib
import tempfile
from pathlib import Path

import torch

from bench import parser_of
from megacpp.cli.main import main
from megacpp.config.presets import PRESETS
from megacpp.data.tokenizer import CorpusTokenizer
from megacpp.model.hybrid import HybridLM
from megacpp.model.init import initialise
from megacpp.state.export import export_weights


@torch.no_grad()
def export(preset: str) -> int:
    """Write a preset's model as a run does, export and compare it; return the exit code."""
    model = HybridLM(PRESETS[preset]().model)
    initialise(model, model.init_rules(), 0)
    draws = torch.Generator().manual_seed(0)
    for name, p in model.named_parameters():
        if name.endswith("norm.weight"):
            p.copy_(0.75 + torch.rand(p.shape, generator=draws))
    CorpusTokenizer.train([[Path(__file__).resolve().read_text()]], 300).save(
        Path("tokenizer.json")
    )
    export_weights(model, Path("final"), model.config, beside=sorted(Path().glob("tokenizer*")))
    del model
    return main(["export", "final", "--out", "hf", "--dtype", "fp32", "--check"])


if __name__ == "__main__":
    parser = parser_of(__doc__)
    parser.add_argument("presets", nargs="*", default=["dense_110m", "moe_small"])
    for name in parser.parse_args().presets:
        print(name)
        with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
            code = export(name)
        if code:
            raise SystemExit(code)
