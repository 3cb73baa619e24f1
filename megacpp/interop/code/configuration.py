"""Settings of an exported model in transformers: those of megacpp as they are."""

from __future__ import annotations

from typing import Any

from transformers import PretrainedConfig


class MegacppConfig(PretrainedConfig):
    """Settings of the model under the key `megacpp`; the other keys are transformers' own."""

    model_type = "megacpp"

    def __init__(self, megacpp: dict[str, Any] | None = None, **keys: Any) -> None:
        self.megacpp = megacpp or {}
        super().__init__(**keys)
