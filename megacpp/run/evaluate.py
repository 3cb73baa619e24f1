"""Held-out loss in bits per byte, next to gzip and xz on the same documents."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from megacpp.config.schema import Config
from megacpp.data.batches import Batch
from megacpp.data.mixture import Mixture
from megacpp.run.corpus import RunCorpus
from megacpp.run.metrics import MetricsLog, bits_per_byte
from megacpp.terminal.progress import counted


def validation_share(corpus: RunCorpus, config: Config, rank: int, size: int) -> list[Batch]:
    """Return this rank's validation batches; every rank has the same number of them.

    Batch i of b rows belongs to rank `i % size`; ranks without further rows get padding.

    Args:
        corpus: corpus of the run.
        config: configuration of the run.
        rank: index among the data ranks.
        size: number of data ranks.
    """
    b, past = config.train.device_batch_size, corpus.num_validation_rows
    rows = min(config.run.eval_rows or past, past)
    rounds = -(-rows // (b * size))
    return [
        corpus.validation_batch([r if r < rows else past for r in range(first, first + b)])
        for first in ((i * size + rank) * b for i in range(rounds))
    ]


class HeldOut:
    """Held-out rows of a run, whose loss is recorded.

    Args:
        corpus: corpus of the run.
        config: configuration of the run.
        share: index among the data ranks, and their number.
        run: the accumulation boundary's `evaluate`.
        log: records of the run; the main rank's shows the progress.
    """

    def __init__(
        self,
        corpus: RunCorpus,
        config: Config,
        share: tuple[int, int],
        run: Callable[..., Any],
        log: MetricsLog,
    ) -> None:
        self.corpus, self.run, self.log = corpus, run, log
        self.batches = validation_share(corpus, config, *share)

    def evaluate(self, step: int) -> float | None:
        """Record the figures after a step; return nats per valid token, None without any.

        Every rank calls it, and all get the same loss.
        """
        values = evaluate(self.run, self.batches, self.corpus, self.log.active)
        self.log.evaluation(step, values, self.corpus.no_verdict)
        return values["loss"]


def evaluate(
    run: Callable[..., Any], batches: Sequence[Batch], corpus: RunCorpus, shows: bool = False
) -> dict[str, Any]:
    """Return loss, bits per byte and the compressors' bits per byte; of a mixture, loss by source.

    Bits of a complete pass are divided by the bytes of the held-out text: the ids of a tokenizer
    that isn't byte-level only stand for about as many bytes.

    Args:
        run: the accumulation boundary's `evaluate`.
        batches: batches of this rank.
        corpus: corpus of the run.
        shows: show the progress on this rank.
    """
    sums = run(batches, partial(counted, name="evaluation", total=len(batches)) if shows else iter)
    nll, complete = sums.nll_sum.item(), sums.valid_tokens == corpus.validation_targets
    num_bytes = corpus.validation_text_bytes if complete else sums.target_bytes
    values = {
        "loss": nll / sums.valid_tokens if sums.valid_tokens else None,
        "bits_per_byte": bits_per_byte(nll, num_bytes) if sums.valid_tokens else None,
        "gzip_bits_per_byte": corpus.gzip_bits_per_byte(),
        "target_bytes": float(num_bytes),
        "complete": float(complete),
    }
    if (xz := corpus.xz_bits_per_byte()) is not None:
        values["xz_bits_per_byte"] = xz
    if isinstance(corpus, Mixture):
        sources = zip(corpus.names, sums.nll_by_source, sums.totals.by_source, strict=True)
        values["val_loss"] = {n: (nats / count).item() for n, nats, count in sources if count}
    return values
