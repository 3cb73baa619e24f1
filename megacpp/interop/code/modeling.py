"""Model of an exported folder in transformers: forward, and generation from decoding states.

Legend: B rows, T tokens of a row, V vocabulary.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import GenerationMixin, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from megacpp.interop.code.configuration import MegacppConfig
from megacpp.model.decoding import decode, read_prompts
from megacpp.model.documents import Documents
from megacpp.model.hybrid import HybridLM

WIDE: list[str] = []  # ends of names of parameters that stay in fp32


class Settings:
    """Settings of the model by name, sections within sections."""

    ngram: Any
    engram: Any

    def __init__(self, values: dict[str, Any]) -> None:
        for name, value in values.items():
            setattr(self, name, Settings(value) if isinstance(value, dict) else value)

    @property
    def needs_full_row(self) -> bool:
        """Whether a part of the model reads tokens of a row beside its own."""
        return bool(self.ngram.heads or self.engram.layers)


class MegacppForCausalLM(PreTrainedModel, GenerationMixin):
    """Hybrid language model; `past_key_values` is the decoding state of every block."""

    config_class = MegacppConfig
    _no_split_modules: ClassVar = ["Block"]
    _keep_in_fp32_modules_strict: ClassVar = WIDE
    _tied_weights_keys: ClassVar = {"model.head.weight": "model.embed.weight"}
    _is_stateful = True  # a state can't be cut back to fewer tokens

    def __init__(self, config: MegacppConfig) -> None:
        super().__init__(config)
        self.model = HybridLM(Settings(config.megacpp["model"]))  # type: ignore[arg-type]
        self.post_init()

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        return False

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        past_key_values: Any = None,
        labels: Tensor | None = None,
        use_cache: bool = False,
        logits_to_keep: int = 0,
        **more: Any,
    ) -> CausalLMOutputWithPast:
        """Return logits `[B, T, V]`, the loss of `labels` and, with `use_cache`, the state.

        Args:
            input_ids: ids `[B, T]`; behind a state one for each row.
            attention_mask: 0 at padding, in front of a row or behind it, `[B, T]`.
            past_key_values: state that an earlier call returned.
            labels: ids, -100: ignored; they are shifted here.
            use_cache: return the state behind the rows.
            logits_to_keep: of the last tokens only (0: of all).
            more: further arguments of the loss.
        """
        state: Any = None
        if past_key_values is not None:
            logits_BV, state = decode(self.model, input_ids[:, -1], past_key_values)
            return CausalLMOutputWithPast(logits=logits_BV[:, None], past_key_values=state)
        logits_BTV = loss = None
        if use_cache:
            logits_BV, state = read_prompts(self.model, _prompts(input_ids, attention_mask))
            logits_BTV = logits_BV[:, None]
        if labels is not None or not use_cache or logits_to_keep != 1:
            docs = None if attention_mask is None else _documents(attention_mask)
            hidden_BTD = self.model.hidden(input_ids, docs)[:, -logits_to_keep:]
            logits_BTV = self.model.head.logits(hidden_BTD)
        if labels is not None:
            size = self.config.vocab_size
            loss = self.loss_function(logits=logits_BTV, labels=labels, vocab_size=size, **more)
        return CausalLMOutputWithPast(loss=loss, logits=logits_BTV, past_key_values=state)

    def prepare_inputs_for_generation(
        self,
        input_ids: Tensor,
        past_key_values: Any = None,
        attention_mask: Tensor | None = None,
        use_cache: bool | None = None,
        **more: Any,
    ) -> dict[str, Any]:
        """Return the arguments of `forward` for the next token.

        Args:
            input_ids: ids so far, `[B, T]`; behind a state only the last of each row is used.
            past_key_values: state behind all ids but the last.
            attention_mask: 0 at padding, `[B, T]`.
            use_cache: False: no state is kept.
            more: settings of `generate` that nothing here needs.
        """
        return {
            "input_ids": input_ids if past_key_values is None else input_ids[:, -1:],
            "attention_mask": attention_mask,
            "past_key_values": past_key_values,
            "use_cache": use_cache is not False,
            "logits_to_keep": 1,
        }

    def get_input_embeddings(self) -> nn.Module:
        """Return the table of embeddings."""
        return self.model.embed

    def get_output_embeddings(self) -> nn.Module:
        """Return the head, which has the weight `[V, D]`."""
        return self.model.head

    def _init_weights(self, module: nn.Module) -> None:
        """Zero counters, which no file holds."""
        for name in module._non_persistent_buffers_set:
            getattr(module, name).zero_()


def _documents(mask_BT: Tensor) -> Documents | None:
    """Return documents of rows in which padding is one of its own; None: there is no padding."""
    return None if bool(mask_BT.all()) else Documents.from_ids(mask_BT.to(torch.int64))


def _prompts(ids_BT: Tensor, mask_BT: Tensor | None) -> list[list[int]]:
    """Return the ids of each row behind its padding."""
    if mask_BT is None:
        return ids_BT.tolist()
    if not bool(mask_BT[:, -1].all()):
        raise ValueError("attention_mask: a prompt ends in padding. Fix: padding_side='left'.")
    rows = zip(ids_BT, mask_BT.bool(), strict=True)
    return [ids_T[mask_T].tolist() for ids_T, mask_T in rows]
