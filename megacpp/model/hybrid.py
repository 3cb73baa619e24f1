"""Hybrid language model: embedding, blocks in pattern order, norm, head.

Legend: B rows, T tokens of a row, D model, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

from torch import Tensor, nn

from megacpp.blocks.attention.sparse import freeze_all_but_indexers
from megacpp.blocks.engram.module import look_ahead
from megacpp.blocks.hyper_connections.module import Collapse, Spread
from megacpp.blocks.mtp.module import MultiTokenPrediction, with_depths
from megacpp.blocks.ngram.module import NgramEmbedding
from megacpp.blocks.top.module import TokenOrder
from megacpp.config.schema import ModelConfig
from megacpp.model.block import Block
from megacpp.model.documents import Documents
from megacpp.model.head import LanguageModelHead, LossSum, Table
from megacpp.model.init_rules import model_rules
from megacpp.model.norm import RMSNorm
from megacpp.model.pattern import layer_kinds, warms_up


class HybridLM(nn.Module):
    """Decoder over a pattern of blocks (megacpp/blocks/kinds.py).

    The same code is the single-device reference: it knows nothing of ranks. Blocks are keyed by
    their layer index, so that a process that keeps some of them keeps their names.

    Attributes:
        begins: this process looks tokens up; else a tied `embed` is only the head's weight's name.
    """

    init_rules = model_rules

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config, self.begins = config, True
        self.kinds = layer_kinds(config)
        self.letters = "".join(kind[0] for kind in self.kinds)
        self.embed = Table(config.vocab_size, config.dim)
        if config.ngram.heads:
            self.ngram = NgramEmbedding(config)
        self.blocks = nn.ModuleDict(
            {str(i): Block(kind, config, i) for i, kind in enumerate(self.kinds)}
        )
        if config.mhc.streams > 1:
            self.spread, self.collapse = Spread(config), Collapse(config)
        self.norm = RMSNorm(config.dim, config.norm_eps)
        if config.top.loss:
            self.top = TokenOrder(config)
        if config.mtp.depths:
            self.mtp = MultiTokenPrediction(config)
        tied = cast(nn.Parameter, self.embed.weight) if config.tie_embeddings else None
        self.head = LanguageModelHead(config, tied=tied)
        self.needs_full_row = config.needs_full_row
        if warms_up(config):
            freeze_all_but_indexers(self)

    def forward(self, ids_BT: Tensor, labels_BT: Tensor, docs: Documents | None = None) -> LossSum:
        """Return the loss summed over valid labels (-100: ignored), and their number.

        A model that reads whole rows (`ModelConfig.needs_full_row`) finds ids and labels of whole
        rows in `docs`; without them, the given ids and labels are whole rows.
        """
        docs = self.documents(ids_BT, labels_BT, docs)
        return finish(self, self.trunk(ids_BT, docs), labels_BT, docs)

    def hidden(self, ids_BT: Tensor, docs: Documents | None = None) -> Tensor:
        """Return the final hidden states `[B, T, D]`, behind the last norm."""
        return self.norm(self.trunk(ids_BT, self.documents(ids_BT, ids_BT, docs)))

    def trunk(self, ids_BT: Tensor, docs: Documents) -> Tensor:
        """Return the output `[B, T, D]` of the last block."""
        if self.config.engram.layers:
            look_ahead(self.blocks.values(), docs)
        x_BTD = begin(self, ids_BT, docs)
        for block in self.blocks.values():
            x_BTD = block(x_BTD, docs)
        return collapsed(self, x_BTD)  # nothing else holds the streams, which are freed

    def documents(
        self, ids_BT: Tensor, labels_BT: Tensor, docs: Documents | None = None
    ) -> Documents:
        """Return boundaries of documents, with ids and labels where a block reads whole rows.

        Args:
            ids_BT: tokens.
            labels_BT: -100: ignored.
            docs: None: each row is one document.
        """
        if docs is None:
            docs = Documents.rows(*ids_BT.shape, device=ids_BT.device)
        if not self.needs_full_row or docs.row is not None or docs.tokens_BT is not None:
            return docs
        return docs.with_tokens(ids_BT, labels_BT)

    def mixers(self) -> dict[str, tuple[str, nn.Module]]:
        """Letter and mixer of every block by the mixer's name, those behind the trunk included."""
        blocks = ((name, m) for name, m in self.named_modules() if isinstance(m, Block))
        return {f"{name}.mixer": (block.letter, block.mixer) for name, block in blocks}

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> HybridLM:
        """Keep a tied weight one tensor: leaving the meta device makes each module its own.

        (pytorch/torchtitan#2252; no thread known of torch itself.)
        """
        super()._apply(fn, recurse)
        self.tie()
        return self

    def tie(self) -> None:
        """Make a tied weight one parameter again, after either module got a new one."""
        if self.config.tie_embeddings and hasattr(self, "head"):
            used, named = (self.embed, self.head) if self.begins else (self.head, self.embed)
            named._parameters["weight"] = used._parameters["weight"]


def begin(parts: nn.Module, ids_BT: Tensor, docs: Documents) -> Tensor:
    """Return the input `[B, T, D]` of the first block; with hyper-connections `[B, T, n, D]`.

    `parts` is a HybridLM, or the stage of one that has its embedding.
    """
    x_BTD = parts.embed(ids_BT)  # type: ignore[operator]
    if hasattr(parts, "ngram"):
        x_BTD = parts.ngram(x_BTD, docs)  # type: ignore[operator]
    return spread(parts, x_BTD)


def spread(parts: nn.Module, x: Tensor) -> Tensor:
    """Return the residual stream: `[..., D]` as it is, or n equal streams `[..., n, D]`.

    Args:
        parts: model or first stage.
        x: `[..., D]`.
    """
    return parts.spread(x) if hasattr(parts, "spread") else x  # type: ignore[operator]


def collapsed(parts: nn.Module, x: Tensor) -> Tensor:
    """Return one stream `[..., D]` behind the last block, before the last norm.

    Args:
        parts: model or last stage.
        x: residual stream, `[..., D]` or `[..., n, D]`.
    """
    return parts.collapse(x) if hasattr(parts, "collapse") else x  # type: ignore[operator]


def finish(parts: nn.Module, x_BTD: Tensor, labels_BT: Tensor, docs: Documents) -> LossSum:
    """Return the loss from the output of the last block.

    Args:
        parts: a HybridLM or its last stage.
        x_BTD: residual stream behind the last block, `collapsed`.
        labels_BT: -100: ignored.
        docs: document boundaries.
    """
    normed_BTD = parts.norm(x_BTD)  # type: ignore[operator]
    if hasattr(parts, "top"):
        normed_BTD = parts.top.attached(normed_BTD, docs)  # type: ignore[operator]
    mtp = getattr(parts, "mtp", None)
    if mtp is not None and mtp.training:  # only training uses its predictions
        ends = cast(nn.Module, parts.embed), cast(nn.Module, parts.head)
        return with_depths(mtp, *ends, x_BTD, normed_BTD, labels_BT, docs)
    return parts.head(normed_BTD, labels_BT)  # type: ignore[operator]
