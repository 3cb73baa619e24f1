"""Log-likelihood of continuations: requests are packed into rows, a document each.

Legend: T tokens of a row, D model, V vocabulary, S scored tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from megacpp.model.documents import Documents
from megacpp.model.hybrid import HybridLM

Request = tuple[Sequence[int], Sequence[int]]  # context, continuation; neither is empty
AT_ONCE = 1024  # tokens whose logits exist at a time


@torch.no_grad()
def log_likelihoods(
    model: HybridLM,
    requests: Sequence[Request],
    row_tokens: int = 4096,
    follow: Callable[[list[list[int]]], Iterable[list[int]]] = iter,
) -> list[tuple[float, bool]]:
    """Return for each request the log-probability of its continuation, and whether it is greedy.

    Greedy: every token of the continuation is the likeliest there. Equal requests are scored once,
    so that equal choices of a question tie exactly.

    Args:
        model: whole on one device, in eval mode.
        requests: ids of contexts and continuations.
        row_tokens: most tokens of a row of several requests; a longer request has its own.
        follow: wraps the rows to show the progress.
    """
    keys = [(tuple(context), tuple(continuation)) for context, continuation in requests]
    distinct = list(dict.fromkeys(keys))
    found: dict[Request, tuple[float, bool]] = {}
    lengths = [len(context) + len(continuation) - 1 for context, continuation in distinct]
    for row in follow(packed_rows(lengths, row_tokens)):
        there = [distinct[number] for number in row]
        found.update(zip(there, _scores(model, there), strict=True))
    return [found[key] for key in keys]


def packed_rows(lengths: Sequence[int], row_tokens: int) -> list[list[int]]:
    """Return the numbers of the requests in each row: the longest first, each where it fits first.

    Args:
        lengths: tokens of each request.
        row_tokens: most tokens of a row of several requests.
    """
    rows: list[list[int]] = []
    free: list[int] = []
    for number in sorted(range(len(lengths)), key=lambda n: -lengths[n]):
        place = next((i for i, room in enumerate(free) if room >= lengths[number]), None)
        if place is None:
            rows.append([])
            free.append(row_tokens)
            place = len(rows) - 1
        rows[place].append(number)
        free[place] -= lengths[number]
    return rows


def _scores(model: HybridLM, requests: Sequence[Request]) -> list[tuple[float, bool]]:
    """Return log-probability and greediness of the continuations of one row."""
    device = model.embed.weight.device
    ids, documents, scored, targets = [], [], [], []
    for number, (context, continuation) in enumerate(requests):
        fed = [*context, *continuation][:-1]
        first = len(ids) + len(context) - 1
        scored += range(first, first + len(continuation))
        targets += continuation
        ids += fed
        documents += [number] * len(fed)
    ids_1T = torch.tensor([ids], device=device)
    docs = Documents.from_ids(torch.tensor([documents], device=device))
    hidden_SD = model.hidden(ids_1T, docs)[0, torch.tensor(scored, device=device)]
    parts = zip(hidden_SD.split(AT_ONCE), torch.tensor(targets).split(AT_ONCE), strict=True)
    both = [_of_targets(model, part_SD, target_S.to(device)) for part_SD, target_S in parts]
    logs_S = torch.cat([logs for logs, _ in both]).tolist()
    greedy_S = torch.cat([greedy for _, greedy in both]).tolist()
    out, start = [], 0
    for _, continuation in requests:
        here = slice(start, start + len(continuation))
        out.append((float(sum(logs_S[here])), all(greedy_S[here])))
        start = here.stop
    return out


def _of_targets(model: HybridLM, hidden_SD: Tensor, target_S: Tensor) -> tuple[Tensor, Tensor]:
    logits_SV = model.head.logits(hidden_SD)
    logits_SV = logits_SV.to(torch.promote_types(logits_SV.dtype, torch.float32))
    logs_S = logits_SV.log_softmax(-1).gather(1, target_S[:, None])[:, 0]
    return logs_S, logits_SV.argmax(-1) == target_S
