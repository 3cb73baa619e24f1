"""End of a run: self-contained final weights, and a sample of the trained model."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from megacpp.config.schema import Config
from megacpp.data.batches import Corpus
from megacpp.data.shards import TOKENIZER
from megacpp.data.specials import CONFIG
from megacpp.run.sample import generate
from megacpp.state.export import export_weights, load_exported

TEMPERATURE, TOP_K = 0.7, 50


def export_final(model: nn.Module, corpus: Corpus, config: Config, folder: Path, step: int) -> Path:
    """Write weights after `step` steps, model configuration and tokenizer to `folder/final`.

    Every rank calls it.

    Args:
        model: model of this rank.
        corpus: corpus of the run.
        config: configuration of the run.
        folder: folder of the run.
        step: number of steps made.
    """
    extra = {"preset": config.preset, "data_fingerprint": corpus.fingerprint}
    beside = (corpus.path / TOKENIZER, corpus.path / CONFIG)
    export_weights(model, folder / "final", config.model, extra, beside=beside, step=step)
    return folder / "final"


def write_sample(corpus: Corpus, config: Config, folder: Path, device: torch.device) -> str:
    """Continue the prompt with the exported weights and store the text in `samples/`.

    The prompt is `run.sample_prompt`, or that of the corpus. Only the main rank calls it: the
    exported model is unsharded, and decoding carries recurrent state.

    Args:
        corpus: corpus of the run.
        config: configuration of the run.
        folder: folder of the run.
        device: device that generates.
    """
    if not config.run.sample_tokens:
        return ""
    model = load_exported(folder / "final", device)
    prompt, marks = config.run.sample_prompt or corpus.sample_prompt, corpus.tokenizer.specials
    ids = generate(
        model,
        [marks.bos, *(int(i) for i in corpus.tokenizer.encode(prompt))],
        config.run.sample_tokens,
        TEMPERATURE,
        TOP_K,
        config.run.seed,
        stop_id=marks.eos,
        num_ids=corpus.vocab_size,
    )
    text = prompt + corpus.tokenizer.decode(ids)
    path = folder / "samples" / f"step-{config.run.steps:06d}.txt"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return text
