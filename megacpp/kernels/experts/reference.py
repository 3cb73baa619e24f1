"""Routed experts one after another, under autograd: the definition.

Legend: R rows that the slots hold copies of, S slots (rows in expert order), D model, I hidden of
an expert, E experts.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from megacpp.kernels.experts.rows import Groups


def experts_reference(
    x_RD: Tensor, groups: Groups, weight_S: Tensor | None, *weights: Tensor
) -> Tensor:
    """Return outputs `[S, D]`, one expert after another under autograd: the definition.

    Slots that no expert owns get 0.

    Args:
        x_RD: rows.
        groups: slots that hold copies of the rows.
        weight_S: weight of each slot; None: 1.
        weights: w1, w3 and w2 of silu(w1 x) * w3 x, or w1 and w2 of relu(w1 x)^2.
    """
    *into, w2_EDI = weights
    experts, slots = len(w2_EDI), len(groups.token_S)
    counts = groups.counts_E if groups.counts_E is not None else [slots // experts] * experts
    sizes = list(counts.tolist() if isinstance(counts, Tensor) else counts)
    sizes[-1] = slots - sum(sizes[:-1])
    parts = []
    for e, rows in enumerate(x_RD[groups.token_S].split(sizes)):
        if e == experts:
            parts.append(rows * 0.0)
            continue
        hidden = [F.linear(rows, w_EID[e].to(rows.dtype)) for w_EID in into]
        act = F.silu(hidden[0]) * hidden[1] if len(hidden) == 2 else F.relu(hidden[0]).square()
        parts.append(F.linear(act, w2_EDI[e].to(rows.dtype)))
    y_SD = torch.cat(parts)
    return y_SD if weight_S is None else (y_SD * weight_S[:, None]).to(y_SD.dtype)
