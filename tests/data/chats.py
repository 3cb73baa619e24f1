"""A conversation, and a tokenizer with the template of ChatML."""

from __future__ import annotations

import json
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

CHATML = (
    "{% for message in messages %}\n"
    "{{ '<|im_start|>' + message.role + '\\n' }}"
    "{% if message.role == 'assistant' %}{% generation %}{{ message.content + '<|im_end|>' }}"
    "{% endgeneration %}{% else %}{{ message.content + '<|im_end|>' }}{% endif %}\n"
    "{{ '\\n' }}\n{%- endfor %}\n"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Was heißt <|im_end|> und <eos>?"},
    {"role": "assistant", "content": "Ein Zeichen."},
    {"role": "user", "content": " Danke\n"},
    {"role": "assistant", "content": "Gern, <|im_end|> 🙂"},
]


def chatml_folder(folder: Path) -> Path:
    """Write a byte-level tokenizer of ChatML, as published ones are; return its folder."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = tokenizers.Tokenizer(models.BPE(vocab={x: i for i, x in enumerate(letters)}, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    inner.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    inner.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    inner.save(str(folder / "tokenizer.json"))
    config = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "chat_template": CHATML}
    config["tokenizer_class"] = "PreTrainedTokenizerFast"
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder
