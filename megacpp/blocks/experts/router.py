"""Router of a mixture of experts: choice of experts, their weights, and their balance.

Legend: B rows, T tokens (of all rows, where there is no B), D model, E experts, K experts of a
token at most (megacpp/blocks/experts/choices.py).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import reduce
from typing import Any

import torch
from torch import Tensor, nn

from megacpp.blocks.experts.choices import columns
from megacpp.blocks.experts.init import router_rules
from megacpp.blocks.experts.loads import BatchLoad, DocumentLoad
from megacpp.config.schema import ModelConfig
from megacpp.kernels.backend import PLAIN_KERNELS, Kernels
from megacpp.kernels.linears import wide_linear
from megacpp.model.auxiliary import AttachLoss, AuxiliarySource
from megacpp.model.documents import Documents, documents_of
from megacpp.model.recompute import PLAIN, Recompute, recomputing
from megacpp.torch_extras import once_differentiable

ROUTER_TERMS = ("balance", "sequence", "z")


@dataclass(frozen=True)
class Routing:
    """Result of the router for T tokens; all floating tensors in fp32 (or fp64)."""

    logits_TE: Tensor
    scores_TE: Tensor  # sigmoid or softmax of the logits, without gradient
    indices_TK: Tensor  # int64, the chosen experts; E is a null
    weights_TK: Tensor  # of the chosen experts, without the bias; 0 of nulls


class Router(AuxiliarySource):
    """Token-choice routing; sigmoid scores with a selection bias (DeepSeek-V3), or softmax.

    Sigmoid: experts are chosen by score + bias, weighted by score / sum of the chosen scores.
    Softmax: weighted by the softmax over the chosen logits (`softmax_order="post"`) or by the
    chosen part of the softmax over all (`"pre"`). With groups, only experts of the `top_k_groups`
    best groups can be chosen; a group is as good as the sum of its best two. Weights are scaled by
    `route_scale`. A single normalised weight is constant: with `top_k=1`, sigmoid and post-softmax
    routers learn from the auxiliary losses alone.

    Attributes:
        nulls: null experts among which a token may choose (null_router.py).
        expert_bias: `(E,)`, added to sigmoid scores for the choice only; moved by `update_bias`.
        tokens_per_expert: int64 `(E,)`, choices since the last `update_bias`; sum it over the
            ranks that hold different tokens before that.
        gradient_squares: for the record, the squared norms of the gradients of the logits by what
            comes after the router, and by the auxiliary losses: sums over the tokens of all
            microbatches since the last `update_bias`, so that sums over ranks are those of one
            process.
    """

    init_rules = router_rules
    expert_bias: Tensor
    tokens_per_expert: Tensor
    gradient_squares: Tensor
    nulls = 0
    recompute: Recompute = PLAIN
    kernels: Kernels = PLAIN_KERNELS

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config, self.moe = config, config.moe
        num_experts = config.moe.num_experts
        self.top_k = columns(config.moe)
        self.weight = nn.Parameter(torch.empty(num_experts, config.dim))
        self.batch_load: nn.Module = BatchLoad(num_experts)
        self.document_load: nn.Module = DocumentLoad(num_experts)
        self.register_buffer("expert_bias", torch.empty(num_experts))
        counts_E = torch.empty(num_experts, dtype=torch.int64)
        self.register_buffer("tokens_per_expert", counts_E, persistent=False)
        self.register_losses()
        self.register_buffer("gradient_squares", torch.empty(2), persistent=False)

    def forward(
        self, x_BTD: Tensor, docs: Documents | None = None, decoding: bool = False
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return weights and experts `[T, K]` of all tokens, and the tokens `[T, D]` themselves.

        Whatever reads the tokens next may read the last result, whose gradient is added inside the
        backward of the logits. Training also counts choices and records losses; decoding doesn't.
        """
        logits_TE, x_TD = wide_linear(x_BTD.flatten(0, -2), self.weight, self.kernels.experts)
        learns = self.training and not decoding
        if self._by_kernels(logits_TE):
            from megacpp.blocks.experts.fused_router import route

            return *route(self, x_BTD, logits_TE, docs, learns), x_TD
        if not learns or not torch.is_grad_enabled() or not self.auxiliary:
            routing = self.choose(logits_TE)
            weights_TK = routing.weights_TK
        else:
            logits_TE, own_TE = Fork.apply(logits_TE, self.gradient_squares)
            routing = self.choose(logits_TE)
            own = replace(routing, logits_TE=own_TE)
            losses = self.auxiliary_losses(own, documents_of(x_BTD, docs))
            if not recomputing():
                self.record(losses)
            total = reduce(torch.add, losses.values())
            weights_TK = AttachLoss.apply(routing.weights_TK, total, self.aux_scale)
        if learns and not recomputing():
            self.observe(routing)
        return weights_TK, routing.indices_TK, x_TD

    @property
    def auxiliary(self) -> tuple[str, ...]:
        """Names of its losses that are on."""
        return tuple(term for term in ROUTER_TERMS if getattr(self.moe, f"{term}_loss"))

    def route(self, x_TD: Tensor) -> Routing:
        """Scores, choices and weights: a function of the tokens and the bias, no side effect."""
        return self.choose(wide_linear(x_TD, self.weight, self.kernels.experts)[0])

    def scores(self, logits_TE: Tensor) -> Tensor:
        """Return the sigmoid or softmax of the logits."""
        return logits_TE.sigmoid() if self.moe.score == "sigmoid" else logits_TE.softmax(1)

    def choose(self, logits_TE: Tensor) -> Routing:
        """Return the K experts of each token with their weights."""
        pre = self.moe.score == "softmax" and self.moe.softmax_order == "pre"
        with torch.autocast(logits_TE.device.type, enabled=False):
            # Elsewhere the weights follow from the chosen logits: backward needs no others.
            scores_TE = self.scores(logits_TE if pre else logits_TE.detach())
            indices_TK = self.recompute.keep(self._choose, scores_TE.detach())
            nulls = self.nulls > 0
            if self.moe.score == "sigmoid":
                weights_TK = SigmoidShare.apply(logits_TE, scores_TE, indices_TK, nulls)
            else:
                weights_TK = Pick.apply(scores_TE if pre else logits_TE, indices_TK, nulls)
                weights_TK = weights_TK if pre else weights_TK.softmax(1)
                if nulls:
                    weights_TK = weights_TK.masked_fill(indices_TK == self.moe.num_experts, 0.0)
        if self.moe.route_scale != 1:
            weights_TK = weights_TK * self.moe.route_scale
        return Routing(logits_TE, scores_TE.detach(), indices_TK, weights_TK)

    def observe(self, routing: Routing) -> None:
        """Count what a training forward chose."""
        self.count(routing.indices_TK)

    @torch.no_grad()
    def count(self, indices_TK: Tensor) -> None:
        """Add choices to `tokens_per_expert`."""
        self.tokens_per_expert.scatter_(0, indices_TK.flatten(), 1, reduce="add")

    @torch.no_grad()
    def update_bias(self) -> None:
        """Update the bias once per step, after counts were summed over ranks: b += rate * sign.

        sign(mean count - count): idle experts become easier to choose, busy ones harder. The
        comparison is of integers, so that equal loads leave the bias exactly alone. A router that
        isn't trained chooses as it did.
        """
        if self.weight.requires_grad and self.moe.score == "sigmoid":
            counts_E = self.tokens_per_expert[: self.moe.num_experts]
            direction_E = torch.sign(counts_E.sum() - counts_E * len(counts_E))
            self.expert_bias.add_(direction_E, alpha=self.moe.bias_update_rate)
        self.forget()

    @torch.no_grad()
    def forget(self) -> None:
        """Zero the counts and recorded losses."""
        super().forget()
        self.tokens_per_expert.zero_()
        self.gradient_squares.zero_()

    def auxiliary_losses(self, routing: Routing, docs: Documents) -> dict[str, Tensor]:
        """Return coefficient * loss * T of every auxiliary loss that is on (sums over tokens)."""
        moe, losses = self.moe, {}
        if moe.z_loss:
            losses["z"] = moe.z_loss * z_loss(routing.logits_TE)
        if moe.balance_loss or moe.sequence_loss:
            p_TE = routing.logits_TE
            if moe.score == "sigmoid":
                p_TE = SigmoidShare.apply(p_TE, routing.scores_TE, None, False)
            else:
                p_TE = p_TE.softmax(1)
            # What plain top-k would choose, without bias and groups (Megatron-LM).
            plain_TK = self.recompute.keep(self._plain, p_TE.detach())
            if moe.balance_loss:
                # Kept: it is small, and may be a sum over ranks.
                load_E = self.recompute.keep(self.batch_load, plain_TK, self.weight.dtype)
                losses["balance"] = switch_loss(p_TE, load_E, moe.top_k, moe.balance_loss)
            if moe.sequence_loss:
                load_TE = self.document_load(plain_TK, docs, self.weight.dtype)
                losses["sequence"] = switch_loss(p_TE, load_TE, moe.top_k, moe.sequence_loss)
        return losses

    def _by_kernels(self, logits_TE: Tensor) -> bool:
        """Return whether Triton kernels take over behind the product; else torch's operators."""
        simple = self.moe.num_groups == 1 and not self.nulls and logits_TE.dtype == torch.float32
        return self.kernels.experts == "triton" and simple and not torch.compiler.is_compiling()

    def _plain(self, p_TE: Tensor) -> Tensor:
        """Return the K most probable experts."""
        return p_TE.topk(self.moe.top_k, dim=1).indices

    def _choose(self, scores_TE: Tensor) -> Tensor:
        """Return the K best experts of the best groups, bias included."""
        return self.selection(scores_TE).topk(self.top_k, dim=1).indices

    def selection(self, scores_TE: Tensor) -> Tensor:
        """Scores with the bias; -inf in closed groups."""
        moe = self.moe
        selection_TE = scores_TE + self.expert_bias if moe.score == "sigmoid" else scores_TE
        if moe.num_groups > 1:
            by_group_TGE = selection_TE.unflatten(1, (moe.num_groups, -1))
            group_TG = by_group_TGE.topk(2, dim=2).values.sum(2)
            open_groups = group_TG.topk(moe.top_k_groups, dim=1).indices
            closed_TG = torch.ones_like(group_TG, dtype=torch.bool).scatter_(1, open_groups, False)
            selection_TE = by_group_TGE.masked_fill(closed_TG[..., None], -torch.inf).flatten(1)
        return selection_TE


class Pick(torch.autograd.Function):
    """Choice `x_TE.gather(1, indices_TK)`, without saving `x_TE` as autograd would for it.

    Nulls (E) get the least finite number, which becomes 0 in a softmax.
    """

    @staticmethod
    def forward(ctx: Any, x_TE: Tensor, indices_TK: Tensor, nulls: bool) -> Tensor:
        """Return the chosen entries `[T, K]`.

        Args:
            ctx: autograd's context.
            x_TE: entries.
            indices_TK: chosen ones.
            nulls: whether there are nulls.
        """
        ctx.save_for_backward(indices_TK)
        ctx.num_experts, ctx.nulls = x_TE.shape[1], nulls
        return _picked(x_TE, indices_TK, nulls, torch.finfo(x_TE.dtype).min)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradient `[T, E]`, zero at entries that weren't chosen."""
        (indices_TK,) = ctx.saved_tensors
        return _put(grads[0], indices_TK, ctx.num_experts, ctx.nulls), None, None


class SigmoidShare(torch.autograd.Function):
    """Sigmoids over their sum, of all entries of a row or of chosen ones; saves both."""

    @staticmethod
    def forward(
        ctx: Any, x_TE: Tensor, sigmoid_TE: Tensor, indices_TK: Tensor | None, nulls: bool
    ) -> Tensor:
        """Return the shares, `[T, K]` or `[T, E]`; 0 of nulls (E).

        Args:
            ctx: autograd's context.
            x_TE: arguments of the sigmoids.
            sigmoid_TE: the sigmoids.
            indices_TK: chosen entries; None: all.
            nulls: whether there are nulls.
        """
        ctx.num_experts, ctx.nulls, given = x_TE.shape[1], nulls, ()
        if indices_TK is not None:
            sigmoid_TE, given = _picked(sigmoid_TE, indices_TK, nulls, 0.0), (indices_TK,)
        sum_T1 = sigmoid_TE.sum(1, keepdim=True).add_(1e-20)
        ctx.save_for_backward(sigmoid_TE, sum_T1, *given)
        return sigmoid_TE / sum_T1

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradient of x: a softmax's of these shares, times 1 - sigmoid."""
        sigmoid, sum_T1, *given = ctx.saved_tensors
        share = sigmoid / sum_T1
        grad = torch.ops.aten._softmax_backward_data(grads[0], share, 1, share.dtype)
        grad = torch.addcmul(grad, grad, sigmoid, value=-1.0)
        for indices_TK in given:
            grad = _put(grad, indices_TK, ctx.num_experts, ctx.nulls)
        return grad, None, None, None


def _picked(x_TE: Tensor, indices_TK: Tensor, nulls: bool, fill: float) -> Tensor:
    if not nulls:
        return x_TE.gather(1, indices_TK)
    x_TK = x_TE.gather(1, indices_TK.clamp(max=x_TE.shape[1] - 1))
    return x_TK.masked_fill_(indices_TK == x_TE.shape[1], fill)


def _put(grad_TK: Tensor, indices_TK: Tensor, num_experts: int, nulls: bool) -> Tensor:
    """Return the adjoint of `_picked`, `[T, E]`."""
    zeros = grad_TK.new_zeros(len(grad_TK), num_experts + nulls)
    return zeros.scatter_(1, indices_TK, grad_TK)[:, :num_experts]


class Fork(torch.autograd.Function):
    """Two views of a tensor; backward adds the squared norm of each one's gradient to `squares`.

    So the share of the auxiliary losses in a router's gradient is known without a second backward.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, squares: Tensor) -> tuple[Tensor, Tensor]:
        """Return two views of `x` `[T, E]`; `squares` `[2]` collects the squared norms."""
        ctx.squares = squares
        return x.view_as(x), x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        """Return the sum of both gradients."""
        for slot, grad in enumerate(grads):
            norm = torch.linalg.vector_norm(grad)
            ctx.squares[slot].addcmul_(norm, norm)
        return grads[0] + grads[1], None


def z_loss(logits_TE: Tensor) -> Tensor:
    """Sum over tokens of logsumexp(logits)^2 (ST-MoE, arXiv 2202.08906)."""
    return logits_TE.logsumexp(1).square().sum()


def switch_loss(p_TE: Tensor, load: Tensor, top_k: int, factor: float = 1.0) -> Tensor:
    """Sum over tokens of factor * E / K * sum_e load_e p_te (Switch Transformer, 2101.03961).

    `load` `(E,)` or `[T, E]` is the part of the tokens (of the batch, of a document) that chose
    expert e: its sum is K, it has no gradient, and even load gives exactly 1 per token. Divided
    by T this is E / (K T^2) * sum_e count_e sum_t p_te.

    Args:
        p_TE: probabilities.
        load: `(E,)` or `[T, E]`.
        top_k: K.
        factor: weight of the loss.
    """
    return (p_TE * load).sum() * (factor * p_TE.shape[1] / top_k)
