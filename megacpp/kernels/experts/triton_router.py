"""Router behind its product, by Triton kernels: choice, weights and auxiliary losses.

    choose      the K best experts by score and bias, and the K most probable ones
    count       choices of each expert, of all tokens and by document
    weigh       weights of the chosen experts, and sums of the auxiliary losses
    d logits    gradient of the logits by the weights and by the losses, and their squared norms
    add up      what the programs summed, to a buffer

One launch each. No probability is written: forward and backward compute them from the logits, in
fp32. Of equal scores the expert of the lower number is chosen; torch doesn't say which it takes. A
score that is no number counts as the largest, as torch's do. Atomic additions are of whole numbers,
whose sums are exact; all other sums have one order.

Legend: T tokens, E experts, K experts of a token, X rows of loads (one of each document or token),
P programs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megacpp.kernels.experts.triton_router_kernels import (
    add_up_kernel,
    choose_kernel,
    count_kernel,
    gradient_kernel,
    weights_kernel,
)
from megacpp.kernels.strides import launch
from megacpp.torch_extras import once_differentiable

TILE = 512  # logits at a time: 4 for each thread of 4 warps
COPIES = 256  # counted at a time
PROGRAMS = 512  # at most, of kernels that sum up
OPTIONS = {"maxnreg": 128}  # else ptxas leaves most registers free, and spills
LOSSES = 3  # balance, sequence, z: the first of megacpp/model/auxiliary.py


@dataclass(frozen=True)
class RouterForm:
    """Functions of a router's logits.

    Attributes:
        sigmoid: scores are sigmoids, not a softmax.
        pre: weights are the chosen part of the softmax over all, not a softmax over the chosen.
        scale: factor on the weights.
    """

    sigmoid: bool
    pre: bool
    scale: float


@dataclass(frozen=True)
class RouterLosses:
    """Auxiliary losses, which are sums over tokens.

    Attributes:
        factors: of sum load * p of the batch, of the same of documents, and of the z-loss.
        load_E: loads of the batch; None: its loss is off.
        load_XE: loads of documents; None: their loss is off.
        document_T: row of `load_XE` of each token; None: one row for each token.
        length_T: by which that row is divided, with `document_T`.
        scale: 0-d, the gradient of the losses.
        squares: `[2]`, to which the backward adds the squared norms of both gradients.
        sums: the losses are added to its first three numbers; None: to none.
    """

    factors: tuple[float, float, float]
    load_E: Tensor | None
    load_XE: Tensor | None
    document_T: Tensor | None
    length_T: Tensor | None
    scale: Tensor
    squares: Tensor
    sums: Tensor | None


def choose(
    logits_TE: Tensor,
    bias_E: Tensor | None,
    top_k: int,
    sigmoid: bool,
    plain: bool,
    zeros_TE: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the chosen experts and the most probable ones, int64 `[T, K]`; the best is first.

    Args:
        logits_TE: logits.
        bias_E: added to the scores for the choice; None: 0, and both results are one tensor.
        top_k: K.
        sigmoid: scores are sigmoids, not a softmax.
        plain: make the second result; else it is empty, where there is a bias.
        zeros_TE: memory that is set to zeros on the way; None: there is none.
    """
    tokens, experts = logits_TE.shape
    chosen_TK = torch.empty(tokens, top_k, dtype=torch.int64, device=logits_TE.device)
    biased = bias_E is not None
    plain_TK = chosen_TK if not biased else chosen_TK.new_empty(tokens if plain else 0, top_k)
    zeros = logits_TE if zeros_TE is None else zeros_TE
    given = logits_TE, bias_E if biased else logits_TE, chosen_TK, plain_TK, zeros, tokens
    _launch(
        choose_kernel,
        -(-tokens // _rows(experts)),
        *given,
        K=top_k,
        SIGMOID=sigmoid,
        BIASED=biased,
        PLAIN=plain and biased,
        ZEROS=zeros_TE is not None,
        **_shape(experts),
    )
    return chosen_TK, plain_TK


def count(
    chosen_TK: Tensor,
    plain_TK: Tensor,
    totals_E: Tensor | None,
    counts_TE: Tensor | None,
    document_T: Tensor | None,
) -> None:
    """Add choices to those of all tokens, and other choices to those of each document.

    Args:
        chosen_TK: chosen experts.
        plain_TK: the other choices.
        totals_E: int64, to which `chosen_TK` is added; None: to nothing.
        counts_TE: fp32, to which `plain_TK` is added, in the row of the document; None: to nothing.
        document_T: number of each token's document, with `counts_TE`.
    """
    chosen_TK, plain_TK = chosen_TK.contiguous(), plain_TK.contiguous()
    totals = chosen_TK if totals_E is None else totals_E
    counts = totals if counts_TE is None else counts_TE
    document = chosen_TK if document_T is None else document_T
    width = counts.shape[-1] if totals_E is None else len(totals_E)
    block = _power(width)
    rows = max(1, COPIES * 8 // block)
    _launch(
        count_kernel,
        -(-chosen_TK.numel() // rows),
        *(chosen_TK, plain_TK, document, totals, counts, chosen_TK.numel()),
        K=chosen_TK.shape[1],
        TOTALS=totals_E is not None,
        COUNTS=counts_TE is not None,
        E=width,
        ROWS=rows,
        BLOCK=block,
    )


def weigh(
    logits_TE: Tensor, chosen_TK: Tensor, form: RouterForm, losses: RouterLosses | None
) -> Tensor:
    """Return the weights of the chosen experts, `[T, K]`, whose gradient is that of losses as well.

    Args:
        logits_TE: logits.
        chosen_TK: chosen experts.
        form: functions of the logits.
        losses: auxiliary losses; None: there are none.
    """
    return _Weights.apply(logits_TE, chosen_TK, form, losses)  # type: ignore[return-value]


class _Weights(torch.autograd.Function):
    """Weights and losses, of which logits and loads are saved."""

    @staticmethod
    def forward(ctx: Any, logits_TE: Tensor, chosen_TK: Tensor, *rest: Any) -> Tensor:
        form, losses = rest
        weights_TK = torch.empty(chosen_TK.shape, dtype=torch.float32, device=logits_TE.device)
        loads = () if losses is None else (losses.load_E, losses.load_XE, losses.scale)
        ctx.save_for_backward(logits_TE, chosen_TK, *loads)
        ctx.form, ctx.losses = form, None
        programs, constants = _programs(logits_TE), _constants(logits_TE, chosen_TK, form, losses)
        summed = losses is not None and losses.sums is not None
        constants["SUMMED"] = summed
        parts_P3 = logits_TE.new_empty(programs if summed else 0, LOSSES)
        given = logits_TE, chosen_TK, weights_TK, *_loads(logits_TE, losses), parts_P3
        sizes = len(logits_TE), programs, form.scale, *_factors(losses)
        _launch(weights_kernel, programs, *given, *sizes, **constants)
        if losses is not None:
            # Loads are saved tensors; documents belong to the batch.
            ctx.losses = (losses.factors, losses.document_T, losses.length_T, losses.squares)
            if losses.sums is not None:
                _add_up(parts_P3, losses.sums)
        return weights_TK

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        logits_TE, chosen_TK, *rest = ctx.saved_tensors
        losses = None
        if rest:
            (load_E, load_XE, scale), (factors, document_T, length_T, squares) = rest, ctx.losses
            loads = load_E, load_XE, document_T, length_T
            losses = RouterLosses(factors, *loads, scale, squares, None)
        programs = _programs(logits_TE)
        grad_TE = torch.empty_like(logits_TE)
        parts_P2 = logits_TE.new_empty(programs if rest else 0, 2)
        scale = grad_TE if losses is None else losses.scale
        given = logits_TE, chosen_TK, grads[0].contiguous(), scale, *_loads(logits_TE, losses)
        sizes = len(logits_TE), programs, ctx.form.scale, *_factors(losses)
        constants = _constants(logits_TE, chosen_TK, ctx.form, losses)
        _launch(gradient_kernel, programs, *given, grad_TE, parts_P2, *sizes, **constants)
        if losses is not None:
            _add_up(parts_P2, losses.squares)
        return grad_TE, None, None, None


def _add_up(parts_PC: Tensor, sums: Tensor) -> None:
    """Add the sum of each column to as many numbers of a buffer."""
    block = _power(max(1, len(parts_PC)))
    _launch(add_up_kernel, 1, parts_PC, sums, len(parts_PC), C=parts_PC.shape[1], BLOCK=block)


def _launch(kernel: Any, programs: int, *given: Any, **constants: Any) -> None:
    launch(kernel, (programs,), *given, **constants, **OPTIONS)


def _rows(experts: int) -> int:
    return max(1, TILE // _power(experts))


def _power(number: int) -> int:
    """Return the least power of two that isn't smaller."""
    return 1 << (number - 1).bit_length()


def _shape(experts: int) -> dict[str, int]:
    return {"E": experts, "ROWS": _rows(experts), "BLOCK": _power(experts)}


def _programs(logits_TE: Tensor) -> int:
    return min(PROGRAMS, -(-len(logits_TE) // _rows(logits_TE.shape[1])))


def _loads(logits_TE: Tensor, losses: RouterLosses | None) -> list[Tensor]:
    """Return the tensors of `losses`; in place of those that aren't read, the logits."""
    found = [None] * 4
    if losses is not None:
        found = [losses.load_E, losses.load_XE, losses.document_T, losses.length_T]
    return [logits_TE if x is None else x for x in found]


def _factors(losses: RouterLosses | None) -> tuple[float, float, float]:
    return (0.0, 0.0, 0.0) if losses is None else losses.factors


def _constants(
    logits_TE: Tensor, chosen_TK: Tensor, form: RouterForm, losses: RouterLosses | None
) -> dict[str, Any]:
    """Return the constants that both kernels have."""
    top_k = chosen_TK.shape[1]
    found = {
        "K": top_k,
        "KB": _power(top_k),
        "SIGMOID": form.sigmoid,
        "PRE": form.pre and not form.sigmoid,
        "LOSSES": losses is not None,
        "BATCH": losses is not None and losses.load_E is not None,
        "DOCUMENTS": losses is not None and losses.load_XE is not None,
        "INDIRECT": losses is not None and losses.document_T is not None,
        "Z": losses is not None and losses.factors[2] != 0,
    }
    return found | _shape(logits_TE.shape[1])
