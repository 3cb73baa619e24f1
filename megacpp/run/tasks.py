"""Tasks of lm-eval while a run goes on, on any mesh.

    all ranks    gather the weights, one tensor at a time
    main rank    a copy of the whole model answers; a small sum over all ranks for every row
    others       take part in these sums until the main rank is done

The sums are signs of life: an evaluation may take longer than the limit of `run.timeout`, as long
as no row does. The copy is on the main rank's device, and the memory estimate counts it.
"""

from __future__ import annotations

import logging
import shlex
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from megacpp.config.schema import Config
from megacpp.run.corpus import RunCorpus
from megacpp.run.harness import Subject, dropless, evaluated, figures_of
from megacpp.state.export import whole_copy
from megacpp.state.rng import rng_state, set_rng_state
from megacpp.terminal.progress import counted
from megacpp.urls import one_line

ROW_TOKENS, BATCH = 4096, 16  # as `megacpp eval` has them


def task_names(text: str) -> list[str]:
    """Return the tasks of a comma-separated list."""
    return [name.strip() for name in text.split(",") if name.strip()]


class Tasks:
    """Tasks of a run.

    Args:
        model: model of this rank.
        corpus: corpus of the run.
        config: configuration of the run.
        is_main: this rank evaluates.
        of_sum: sums over all ranks, in place.
        alive: tells the watch over hangs that this rank makes progress.

    Attributes:
        failed: line about the error that ended the last evaluation; empty: none did.
    """

    def __init__(
        self,
        model: nn.Module,
        corpus: RunCorpus,
        config: Config,
        is_main: bool,
        of_sum: Callable[[Tensor], Tensor],
        alive: Callable[[], None],
    ) -> None:
        self.model, self.corpus, self.config = model, corpus, config
        self.is_main, self.of_sum, self.alive = is_main, of_sum, alive
        self.device, self.failed = next(model.parameters()).device, ""

    def evaluate(self) -> dict[str, dict[str, float]]:
        """Return figures by task and metric on the main rank, else nothing; every rank calls it.

        Generators of random numbers are left as they were. An error of a task is kept in `failed`.
        """
        copy = whole_copy(self.model, self.config.model, self.device)
        if copy is None:
            while self._more(False):
                self.alive()
            return {}
        state, self.failed = rng_state(), ""
        try:
            return self._figures(copy)
        except BrokenPipeError:  # of the output
            raise
        except Exception as error:  # tasks and their libraries have errors of their own
            self.failed = self._advice(one_line(error))
            return {}
        finally:
            set_rng_state(state)
            self._more(False)

    def _advice(self, why: str) -> str:
        run = self.config.run
        asks = f"megacpp eval {shlex.quote(run.dir)} --tasks {shlex.quote(run.tasks)}"
        return (
            f"run.tasks={run.tasks}: can't be evaluated ({why}); the run goes on. Fix: correct the "
            f"tasks and evaluate them afterwards, `{asks}`; --run.tasks '' leaves them out."
        )

    def _figures(self, copy: Any) -> dict[str, dict[str, float]]:
        logging.getLogger("lm_eval").setLevel(logging.ERROR)
        length = self.config.model.attention.max_seq_len
        model = dropless(copy)
        subject = Subject(model, self.corpus.tokenizer, length, ROW_TOKENS, BATCH, self._followed)
        limit = self.config.run.tasks_limit or None
        return figures_of(
            evaluated(
                subject,
                task_names(self.config.run.tasks),
                self.corpus.validation_documents,
                limit,
                None,
                "run.tasks",
            )["results"]
        )

    def _followed(self, items: Iterable[Any], name: str, total: int) -> Iterator[Any]:
        for item in counted(items, name, total):
            self._more(True)
            self.alive()
            yield item

    def _more(self, more: bool) -> bool:
        """Meet all ranks; return whether the main rank goes on."""
        told = torch.tensor([float(more and self.is_main)], device=self.device)
        return self.of_sum(told).item() > 0
