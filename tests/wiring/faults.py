"""Faults of a run: gradients that are NaN on a rank, labels that don't count, a signal.

They are patched into this process before a run is forked from it (tests/launch.py), so that its
ranks have them.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import accumulate, count
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from megacpp.data.batches import IGNORED, Batch
from megacpp.data.corpus import Corpus
from megacpp.model.block import Block
from megacpp.model.documents import Documents
from megacpp.model.recompute import PLAIN, recomputing


class NaNGradient(torch.autograd.Function):
    """Zero whose gradient is NaN."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.shape = x.shape
        return x.new_zeros(())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0].new_full(ctx.shape, torch.nan)


@contextmanager
def going_wrong(
    microbatches: Sequence[int],
    first: int = 0,
    nan: Collection[int] = (),
    rank: int = 0,
    told: int | None = None,
) -> Iterator[None]:
    """Let steps of a run go wrong on one rank.

    Args:
        microbatches: of each step from `first` on.
        first: step with which the run goes on.
        nan: steps in which this rank's gradient of the first norm is NaN.
        rank: that rank; it must hold the first layer.
        told: step in which this rank gets SIGTERM.
    """
    original, forwards = Block._forward, 0
    begins = dict(zip(accumulate(microbatches, initial=0), count(first), strict=False))
    step = first
    first_block: Block | None = None

    def forward(self: Block, x_BTD: Tensor, docs: Documents) -> Tensor:
        nonlocal first_block, forwards, step
        values = not x_BTD.is_meta and not isinstance(x_BTD, FakeTensor)  # no estimate of memory
        first_block = first_block or (self if values and self.training else None)
        y_BTD = original(self, x_BTD, docs)
        if self is first_block and self.layer == 0:
            assert self.recompute is not PLAIN, "attention's core runs again"
        here = self is first_block and int(os.environ.get("RANK", "0")) == rank
        if here and torch.is_grad_enabled() and not recomputing():
            step, forwards = begins.get(forwards, step), forwards + 1
            if step == told and begins.get(forwards, step) != step:  # after its last microbatch
                os.kill(os.getpid(), signal.SIGTERM)
            if step in nan:
                y_BTD = y_BTD + NaNGradient.apply(self.norm.weight)
        return y_BTD

    with mock.patch.object(Block, "_forward", forward):
        yield


@contextmanager
def without_labels(rows: range) -> Iterator[None]:
    """Let no label of these training rows count."""
    original = Corpus.train_batch

    def train_batch(self: Corpus, wanted: Any) -> Batch:
        batch = original(self, wanted)
        if set(wanted) & set(rows):
            assert set(wanted) <= set(rows)
            labels_BT = torch.full_like(batch.labels_BT, IGNORED)
            batch = replace(batch, labels_BT=labels_BT, num_targets=0, target_bytes=0)
        return batch

    with mock.patch.object(Corpus, "train_batch", train_batch):
        yield
