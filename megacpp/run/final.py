"""End of a run: self-contained final weights, and a sample of the trained model."""

from __future__ import annotations

import math
import shlex
from pathlib import Path

import torch
from torch import nn

from megacpp.config.schema import Config
from megacpp.data.shards import TOKENIZER
from megacpp.data.specials import CONFIG
from megacpp.run.corpus import RunCorpus
from megacpp.run.metrics import MetricsLog
from megacpp.run.sample import Sampling, generate
from megacpp.state.export import export_weights, load_exported
from megacpp.state.soundness import bad_state, unsound
from megacpp.state.tensors import model_tensors

TEMPERATURE, TOP_K = 0.7, 50


def finish(
    model: nn.Module,
    corpus: RunCorpus,
    config: Config,
    log: MetricsLog,
    step: int,
    loss: float | None,
) -> None:
    """Export the weights after `step` steps, and on the main rank a sample of them.

    Every rank calls it.

    Args:
        model: model of this rank.
        corpus: corpus of the run.
        config: configuration of the run.
        log: records of the run.
        step: number of steps made.
        loss: held-out loss in nats per valid token, the same on every rank; None: no label counts.

    Raises:
        NonFiniteError: a weight or the held-out loss isn't finite.
    """
    folder = Path(config.run.dir)
    words = unsound(model_tensors(model))
    if not words and loss is not None and not math.isfinite(loss):
        words = f"the held-out loss is {loss:g}"
    if words:
        raise bad_state(config, folder / "checkpoints", step, f"at the end of the run {words}")
    export_final(model, corpus, config, step)
    if log.active:
        if text := write_sample(corpus, config, next(model.parameters()).device):
            log.sample(step - 1, text)
        typed = shlex.quote(str(folder))
        print(f"run folder: {folder}   more text: megacpp sample {typed} --prompt '...'")


def export_final(model: nn.Module, corpus: RunCorpus, config: Config, step: int) -> None:
    """Write weights after `step` steps, model configuration and tokenizer to `final/`.

    Every rank calls it.

    Args:
        model: model of this rank.
        corpus: corpus of the run.
        config: configuration of the run.
        step: number of steps made.
    """
    extra = {"preset": config.preset, "data_fingerprint": corpus.fingerprint}
    beside = (corpus.path / TOKENIZER, corpus.path / CONFIG)
    final = Path(config.run.dir, "final")
    export_weights(model, final, config.model, extra, beside=beside, step=step)


def write_sample(corpus: RunCorpus, config: Config, device: torch.device) -> str:
    """Continue, or answer, the prompt with the exported weights; store the text in `samples/`.

    The prompt is `run.sample_prompt`, or that of the corpus. Only the main rank calls it: the
    exported model is unsharded, and decoding carries recurrent state.
    """
    if not config.run.sample_tokens:
        return ""
    folder = Path(config.run.dir)
    model = load_exported(folder / "final", device)
    prompt, marks = config.run.sample_prompt or corpus.sample_prompt, corpus.tokenizer.specials
    if chat := corpus.chat:
        begun, end = chat.prompt_ids([{"role": "user", "content": prompt}]), chat.end
        prompt += "\n"
    else:
        begun, end = [marks.bos, *corpus.tokenizer.encode(prompt).tolist()], marks.eos
    ids = generate(
        model,
        [begun],
        config.run.sample_tokens,
        Sampling(TEMPERATURE, TOP_K, seed=config.run.seed),
        stop_id=end,
        num_ids=corpus.vocab_size,
    )[0]
    text = prompt + corpus.tokenizer.decode(ids)
    path = folder / "samples" / f"step-{config.run.steps:06d}.txt"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return text
