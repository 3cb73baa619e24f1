"""The hybrid language model: embedding, blocks in pattern order, norm, head.

Legend: B rows, T tokens of a row, D model, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn

from megacpp.config import ModelConfig
from megacpp.model.block import Block
from megacpp.model.documents import Documents
from megacpp.model.head import LanguageModelHead, LossSum
from megacpp.model.init import Normal, Rule
from megacpp.model.norm import RMSNorm
from megacpp.model.pattern import block_letters


class HybridLM(nn.Module):
    """Decoder over a pattern of A, M, E, R and F blocks.

    The same code is the single-device reference: it knows nothing of ranks. Blocks are keyed by
    their layer index, so that a pipeline stage that keeps some of them keeps their names.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.letters = block_letters(config.pattern, config.depth)
        # A given weight skips nn.Embedding's own init, which on meta costs an import of dynamo.
        table_VD = torch.empty(config.vocab_size, config.dim)
        self.embed = nn.Embedding(config.vocab_size, config.dim, _weight=table_VD)
        self.blocks = nn.ModuleDict(
            {str(i): Block(letter, config) for i, letter in enumerate(self.letters)}
        )
        self.norm = RMSNorm(config.dim, config.norm_eps)
        tied = cast(nn.Parameter, self.embed.weight) if config.tie_embeddings else None
        self.head = LanguageModelHead(config, tied=tied)

    def forward(self, ids_BT: Tensor, labels_BT: Tensor, docs: Documents | None = None) -> LossSum:
        """Summed loss of the valid labels (-100: ignored) and their number."""
        return self.head(self.hidden(ids_BT, docs), labels_BT)

    def hidden(self, ids_BT: Tensor, docs: Documents | None = None) -> Tensor:
        """Final hidden states `[B, T, D]`, after the last norm."""
        if docs is None:
            docs = Documents.rows(*ids_BT.shape, device=ids_BT.device)
        x_BTD = self.embed(ids_BT)
        for block in self.blocks.values():
            x_BTD = block(x_BTD, docs)
        return self.norm(x_BTD)

    def init_state(self, batch: int, device: torch.device, dtype: torch.dtype) -> list[Any]:
        """Decoding state of every block for `batch` empty sequences."""
        return [self._block(i).init_state(batch, device, dtype) for i in self.blocks]

    def step(self, ids_B: Tensor, state: list[Any]) -> tuple[Tensor, list[Any]]:
        """Logits `[B, V]` of the next token after feeding one token, and the next state."""
        x_BD, following = self.embed(ids_B), []
        for key, before in zip(self.blocks, state, strict=True):
            x_BD, after = self._block(key).step(x_BD, before)
            following.append(after)
        return self.head.logits(self.norm(x_BD)), following

    def init_rules(self) -> dict[str, Rule]:
        """One rule per parameter and buffer, by full name."""
        rules: dict[str, Rule] = {"embed.weight": Normal(self.config.init_std)}
        for key in self.blocks:
            block = self._block(key).init_rules().items()
            rules |= {f"blocks.{key}.{name}": rule for name, rule in block}
        rules["norm.weight"] = self.norm.init_rules()["weight"]
        if not self.config.tie_embeddings:
            rules |= {f"head.{name}": rule for name, rule in self.head.init_rules().items()}
        return rules

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> HybridLM:
        """Keeps a tied weight one tensor: leaving the meta device makes each module its own."""
        super()._apply(fn, recurse)
        self.tie()
        return self

    def tie(self) -> None:
        """Makes a tied weight one parameter again, after either module got a new one."""
        if self.config.tie_embeddings:
            self.head._parameters["weight"] = self.embed._parameters["weight"]

    def _block(self, key: str) -> Block:
        block = self.blocks[key]
        assert isinstance(block, Block)
        return block
