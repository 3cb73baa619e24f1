"""Forward of a router by Triton kernels, behind its product.

Legend: T tokens, E experts, K experts of a token.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megacpp.blocks.experts.loads import DocumentLoad
from megacpp.kernels.experts.triton_router import (
    RouterForm,
    RouterLosses,
    choose,
    count,
    weigh,
)
from megacpp.model.documents import Documents, documents_of
from megacpp.model.recompute import recomputing

if TYPE_CHECKING:
    from megacpp.blocks.experts.router import Router


def route(
    router: Router, x_BTD: Tensor, logits_TE: Tensor, docs: Documents | None, learns: bool
) -> tuple[Tensor, Tensor]:
    """Return weights and experts `[T, K]`, as `Router.forward`, which asks whether kernels can.

    Args:
        router: whose settings and buffers they are.
        x_BTD: tokens.
        logits_TE: their logits.
        docs: documents; None: every row is one.
        learns: count choices, and attach the auxiliary losses where there are gradients.
    """
    moe, keep = router.moe, router.recompute.keep
    attached = learns and torch.is_grad_enabled() and bool(router.auxiliary)
    sigmoid = moe.score == "sigmoid"
    bias_E = router.expert_bias if sigmoid else None
    plain = attached and bool(moe.balance_loss or moe.sequence_loss)
    first = not recomputing()
    load_TE = document_T = length_T = None
    if attached and moe.sequence_loss and type(router.document_load) is DocumentLoad:
        document_T, length_T = documents_of(x_BTD, docs).lengths
        # The choice writes zeros, but a recomputation doesn't choose again.
        load_TE = logits_TE.new_empty(logits_TE.shape) if first else torch.zeros_like(logits_TE)
    zeros = load_TE if first else None
    found = keep(choose, logits_TE.detach(), bias_E, moe.top_k, sigmoid, plain, zeros)
    if learns and (first or load_TE is not None):
        count(*found, router.tokens_per_expert if first else None, load_TE, document_T)
    losses = None
    if attached:
        loads = load_TE, document_T, length_T
        losses = _losses(router, found[1], documents_of(x_BTD, docs), loads)
    form = RouterForm(sigmoid, moe.softmax_order == "pre", moe.route_scale)
    return weigh(logits_TE, found[0], form, losses), found[0]


def _losses(
    router: Router,
    plain_TK: Tensor,
    docs: Documents,
    counted: tuple[Tensor | None, Tensor | None, Tensor | None],
) -> RouterLosses:
    """Return the losses that are on, with loads of what plain top-k would choose.

    Args:
        router: whose settings and buffers they are.
        plain_TK: what plain top-k would choose.
        docs: documents.
        counted: choices of documents, the row of each token's document there, and its length, where
            these are counted on this process alone.
    """
    moe, dtype = router.moe, router.weight.dtype
    load_E, (load_XE, document_T, length_T) = None, counted
    if moe.balance_loss:
        load_E = router.recompute.keep(router.batch_load, plain_TK, dtype)
    if moe.sequence_loss and load_XE is None:
        load_XE = router.document_load(plain_TK, docs, dtype)
    each = moe.num_experts / moe.top_k
    factors = moe.balance_loss * each, moe.sequence_loss * each, moe.z_loss
    sums = None if recomputing() else router.loss_sums
    loads = load_E, load_XE, document_T, length_T
    return RouterLosses(factors, *loads, router.aux_scale, router.gradient_squares, sums)
