"""Comparison of two models on text of the default corpus: headers of torch."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megacpp.interop.compare import our_logits
from megacpp.model.hybrid import HybridLM
from tests.interop.models import tokenizer

ROWS, TOKENS = 4, 49
WITHIN = 1e-5  # nats, in fp32


@functools.cache
def text_ids() -> Tensor:
    """Return rows of ids of four headers, by a tokenizer of at most 300 ids."""
    headers = sorted((Path(torch.__file__).parent / "include" / "c10" / "util").glob("*.h"))
    encode = tokenizer().encode
    rows = [encode(path.read_text()[:2000])[100 : 100 + TOKENS] for path in headers[:ROWS]]
    return torch.tensor([[int(i) for i in row] for row in rows])


@torch.no_grad()
def assert_equal_on_text(ours: HybridLM, theirs: Any) -> None:
    """Assert that the loss of real text is equal, and every likeliest token.

    Args:
        ours: model of ours.
        theirs: model of transformers.
    """
    ids_BT = text_ids()
    logits = our_logits(ours, ids_BT), theirs(ids_BT).logits
    # The rounding of a sum of losses isn't a difference.
    here, there = (
        F.cross_entropy(x[:, :-1].double().flatten(0, 1), ids_BT[:, 1:].flatten()).item()
        for x in logits
    )
    assert abs(here - there) <= WITHIN, (here, there)
    assert torch.equal(logits[0].argmax(-1), logits[1].argmax(-1))
