"""QK-clip (MuonClip): shrink query and key weights of attention heads with too large logits.

Kimi K2 (arXiv 2507.20534, algorithm 1): if a head's largest logit S of the step is above tau, its
logits are scaled by gamma = tau / S, half by the query weights and half by the key weights. Weights
change after the optimizer's step; the next forward computes smaller logits.

Legend: L attention layers, N query heads, K key/value heads, P parts of a head dim, X heads of one
kind.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from megacpp.blocks.attention.config import AttentionConfig
from megacpp.blocks.attention.gqa import GroupedQueryAttention
from megacpp.blocks.attention.logits import LogitRecorder, Statistic
from megacpp.blocks.attention.mla import MultiHeadLatentAttention
from megacpp.blocks.attention.rope import softmax_scale
from megacpp.blocks.features import ahead_blocks
from megacpp.model.hybrid import HybridLM
from megacpp.torch_extras import is_dtensor, local_part
from optim.shard_layout import cutting_order, shard_bounds

Attention = GroupedQueryAttention | MultiHeadLatentAttention


@dataclass(frozen=True)
class ClipReport:
    """Result of a clip, over all layers of all ranks that took part in `reduce_max`.

    Attributes:
        gamma_LN: factor of each head's logits.
        numbers: `[2]`, the largest logit of the step (or the largest bound), and the number of
            heads above tau.
    """

    gamma_LN: Tensor
    numbers: Tensor

    def figures(self) -> dict[str, float]:
        """Return the values for the log; numbers on a GPU are waited for."""
        max_logit, clipped = self.numbers.tolist()
        return {
            "max_logit": max_logit,
            "n_clipped": clipped,
            "n_total": float(self.gamma_LN.numel()),
        }


@dataclass(frozen=True)
class ClippedAttention:
    """Attention layer of this rank, with its weights as the optimizer holds them.

    Attributes:
        index: index among the attention layers of the whole model.
        recorder: records the largest logits of each forward.
        w_q: weight whose rows are query heads.
        w_k: weight whose rows are key heads (MLA: keys and values).
    """

    index: int  # among the attention layers of the whole model
    recorder: LogitRecorder
    w_q: nn.Parameter
    w_k: nn.Parameter


class QKClip:
    """Records attention logits of training forwards, and scales weights by them once a step.

    Construct it after the model is built and sharded: from then on each attention layer records.
    Call `measure` before the host waits for a step's numbers, and `after_step` after each step,
    applied or skipped.

    With RMSNorm on queries and keys (attention.qk_norm) scaled weights would change no logit.

    Args:
        model: this rank's part of the model.
        tau: largest logit that is left unchanged; 100 in the paper.
        reduce_max: elementwise maximum of a tensor over all ranks that hold a part of the model,
            pipeline stages included: one call a step, of the same shape on every rank.
        statistic: logit of a head (megacpp/blocks/attention/logits.py): `bound` is at least the
            true logit, so it clips earlier, never later.
    """

    def __init__(
        self,
        model: HybridLM,
        tau: float,
        reduce_max: Callable[[Tensor], Tensor],
        statistic: Statistic = "bound",
    ) -> None:
        self.tau, self.reduce_max, self.config = tau, reduce_max, model.config.attention
        assert tau > 0, "0 is off: make no QKClip"
        assert not self.config.qk_norm, "the norm would undo any scaling"
        parts = head_parts(self.config)
        scale = softmax_scale(sum(parts), self.config)
        self.recorder = LogitRecorder(scale, parts, statistic)  # only its rules are used
        self.layers: list[ClippedAttention] = []
        self.measured: ClipReport | None = None
        names = [f"blocks.{i}.mixer" for i, letter in enumerate(model.letters) if letter == "A"]
        ahead = ahead_blocks(model.config)  # which a rank has all of, or none
        further = sum(blocks.number * blocks.letters.count("A") for blocks in ahead)
        self.num_layers, self.like = len(names) + further, next(model.parameters())
        assert self.num_layers, "a model without attention"
        here = model.mixers()
        names += [name for name, (letter, _) in here.items() if letter == "A" and name not in names]
        for index, name in enumerate(names):
            if name in here:
                mixer = here[name][1]
                assert isinstance(mixer, GroupedQueryAttention | MultiHeadLatentAttention)
                mixer.inner.recorder = LogitRecorder(scale, parts, statistic)
                self.layers.append(
                    ClippedAttention(index, mixer.inner.recorder, *query_and_key(mixer))
                )

    @torch.no_grad()
    def measure(self) -> None:
        """Compute the step's factors, and send its figures to the host, which doesn't wait."""
        found = self._measured()
        host = torch.empty_like(found.numbers, device="cpu", pin_memory=found.numbers.is_cuda)
        self.measured = replace(found, numbers=host.copy_(found.numbers, non_blocking=True))

    def after_step(self, taken: bool) -> dict[str, float]:
        """Clip after an applied step and return the figures; forget a skipped step."""
        if taken:
            return self.clip().figures()
        self.reset()
        return {}

    @torch.no_grad()
    def clip(self) -> ClipReport:
        """Scale the weights of heads above tau in place, and reset the recorders.

        Every rank scales the rows that it stores. A head below tau keeps its bits, except that a
        key head is scaled for the worst query head that shares it. A non-finite logit scales
        nothing.
        """
        found = self.measured or self._measured()
        for layer in self.layers:
            rows_q, rows_k = row_factors(found.gamma_LN[layer.index], self.config)
            scale_rows(layer.w_q, rows_q)
            scale_rows(layer.w_k, rows_k)
        self.reset()
        return found

    def reset(self) -> None:
        """Discard the recorded logits, after a step that changed no weight."""
        self.measured = None
        for layer in self.layers:
            layer.recorder.reset()

    def _measured(self) -> ClipReport:
        logits_LN = self._logits()
        above_LN = (logits_LN > self.tau) & logits_LN.isfinite()
        numbers = torch.stack((logits_LN.max(), above_LN.sum()))
        return ClipReport(torch.where(above_LN, self.tau / logits_LN, 1.0), numbers)

    def _logits(self) -> Tensor:
        """Return the logit of every head and layer of the model, `[L, N]`, by one reduction."""
        config, rule = self.config, self.recorder
        dtype, device = torch.promote_types(self.like.dtype, torch.float32), self.like.device
        all_LPX = [
            torch.full((self.num_layers, *shape), rule.least, dtype=dtype, device=device)
            for shape in rule.rows(config.num_heads, config.num_key_heads)
        ]
        for layer in self.layers:
            for all_of_kind, own_PX in zip(all_LPX, layer.recorder.maxima, strict=False):
                own = own_heads(layer.w_q, own_PX.shape[1], all_of_kind.shape[2])
                all_of_kind[layer.index, :, own] = own_PX
        flat = self.reduce_max(torch.cat([x.flatten() for x in all_LPX]))
        reduced = flat.split([x.numel() for x in all_LPX])
        return rule.logits(*(x.view_as(y) for x, y in zip(reduced, all_LPX, strict=True)))


def head_parts(config: AttentionConfig) -> tuple[int, ...]:
    """Return the sizes of the parts of a query/key head that are scaled differently."""
    if config.kind == "gqa":
        return (config.head_dim,)
    return config.qk_nope_head_dim, config.qk_rope_head_dim


def query_and_key(mixer: Attention) -> tuple[nn.Parameter, nn.Parameter]:
    """Return the weights whose rows are query heads, and key heads (MLA: keys and values)."""
    if isinstance(mixer, GroupedQueryAttention):
        modules = mixer.wq, mixer.wk
    else:
        low_rank = mixer.config.attention.q_lora_rank > 0
        modules = mixer.wq_b if low_rank else mixer.wq, mixer.wkv_b
    # Not `.weight`: under tensor parallelism it reads a local shard (parallel/styles.py).
    w_q, w_k = (module._parameters["weight"] for module in modules)
    assert w_q is not None and w_k is not None
    return w_q, w_k


def row_factors(gamma_N: Tensor, config: AttentionConfig) -> tuple[Tensor, Tensor]:
    """Return the factor of each row of the query weight and of the key weight, 1-D each.

    GQA: sqrt(gamma) of the query head, and of the worst query head that shares a key head. MLA:
    sqrt(gamma) on both sides for the dims without position. The rotary key belongs to all heads, so
    there the queries take all of gamma. Values keep their rows.

    Args:
        gamma_N: logit factor per query head.
        config: attention settings.
    """
    root_N = gamma_N.sqrt()
    if config.kind == "gqa":
        root_K = gamma_N.unflatten(0, (config.num_kv_heads, -1)).amin(1).sqrt()
        return root_N.repeat_interleave(config.head_dim), root_K.repeat_interleave(config.head_dim)

    def rows(nope_N: Tensor, other_N: Tensor, other_dim: int) -> Tensor:
        nope = nope_N[:, None].expand(-1, config.qk_nope_head_dim)
        return torch.cat((nope, other_N[:, None].expand(-1, other_dim)), dim=1).flatten()

    values = rows(root_N, torch.ones_like(root_N), config.v_head_dim)
    return rows(root_N, gamma_N, config.qk_rope_head_dim), values


def scale_rows(parameter: Tensor, factor_R: Tensor) -> None:
    """Multiply the rows that this rank stores in place; a factor of 1 changes no bit.

    Args:
        parameter: `[R, C]`, plain or a DTensor.
        factor_R: factor per global row.
    """
    local = local_part(parameter)
    if local.numel():
        local.mul_(factor_R[_stored_rows(parameter), None])


def own_heads(parameter: Tensor, heads: int, num_heads: int) -> slice:
    """Return the range of `num_heads` that a module with `heads` of them works on.

    Tensor parallelism shards heads before FSDP2 shards the rest: it is the first split of the rows.

    Args:
        parameter: `[R, C]`, the weight whose rows are heads.
        heads: number of heads of this rank's module.
        num_heads: number of heads of the model.
    """
    if heads == num_heads:
        return slice(num_heads)
    assert is_dtensor(parameter), f"{heads} of {num_heads} heads of a matrix that isn't cut"
    mesh, at = parameter.device_mesh, parameter.device_mesh.get_coordinate()
    axis, dim = cutting_order(parameter.placements, mesh.shape)[0]
    assert at is not None and dim == 0 and mesh.shape[axis] * heads == num_heads, (
        parameter.placements
    )
    return slice(at[axis] * heads, (at[axis] + 1) * heads)


def _stored_rows(parameter: Tensor) -> slice:
    if not is_dtensor(parameter):
        return slice(len(parameter))
    mesh, at = parameter.device_mesh, parameter.device_mesh.get_coordinate()
    assert at is not None, f"this rank is not in {mesh}"
    order = cutting_order(parameter.placements, mesh.shape)
    low, high = shard_bounds(parameter.shape, order, mesh.shape, at)
    return slice(low[0], high[0])
