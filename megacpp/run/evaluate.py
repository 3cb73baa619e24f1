"""Held-out loss in bits per byte, next to what gzip -9 makes of the same documents."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from megacpp.config import Config
from megacpp.data.batches import Batch, Corpus
from megacpp.progress import counted
from megacpp.run.metrics import bits_per_byte


def validation_share(corpus: Corpus, config: Config, rank: int, size: int) -> list[Batch]:
    """This rank's validation batches; every rank has the same number of them.

    Batch i of b rows belongs to rank `i % size`; ranks that run out get rows of padding.
    """
    b, past = config.train.device_batch_size, corpus.num_validation_rows
    rows = min(config.run.eval_rows or past, past)
    rounds = -(-rows // (b * size))
    return [
        corpus.validation_batch([r if r < rows else past for r in range(first, first + b)])
        for first in ((i * size + rank) * b for i in range(rounds))
    ]


def evaluate(
    run: Callable[..., Any], batches: Sequence[Batch], corpus: Corpus, shows: bool = False
) -> dict[str, float]:
    """Loss, bits per byte and the gzip figure; `run` is the accumulation boundary's `evaluate`.

    Args:
        shows: this rank shows the progress.
    """
    sums = run(batches, partial(counted, name="evaluation", total=len(batches)) if shows else iter)
    nll = sums.nll_sum.item()
    return {
        "loss": nll / max(1, sums.valid_tokens),
        "bits_per_byte": bits_per_byte(nll, sums.target_bytes),
        "gzip_bits_per_byte": corpus.gzip_bits_per_byte(),
        "target_bytes": float(sums.target_bytes),
        "complete": float(sums.target_bytes == corpus.validation_text_bytes),
    }
