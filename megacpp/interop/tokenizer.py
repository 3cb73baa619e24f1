"""Tokenizer of a run as Hugging Face reads it: a given one as it came, ours made complete."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

from tokenizers import processors

from megacpp.data.conversations import ChatTemplate
from megacpp.data.specials import CONFIG, OWN_KEYS, config_values
from megacpp.data.tokenizer import CorpusTokenizer
from megacpp.errors import DataError
from megacpp.state.files import write_text


def special_ids_of(tokenizer: CorpusTokenizer) -> dict[str, int]:
    """Return the special ids around documents, as config.json names them."""
    marks = tokenizer.specials
    return {"bos_token_id": marks.bos, "eos_token_id": marks.eos, "pad_token_id": marks.pad}


def end_ids(tokenizer: CorpusTokenizer) -> int | list[int]:
    """Return the id that ends a text, or two if a chat template ends answers by another one.

    Without the other one generation goes on behind an answer.
    """
    end = eos = tokenizer.specials.eos
    if tokenizer.template:
        with contextlib.suppress(DataError):  # a template that refuses a question with its answer
            end = ChatTemplate(tokenizer).end
    return eos if end == eos else [end, eos]


def write_tokenizer(tokenizer: CorpusTokenizer, folder: Path, longest: int) -> None:
    """Write tokenizer.json and tokenizer_config.json.

    Without the second file transformers takes another class's words and ids by `model_type`. If
    only our own program wrote it, it gets what transformers asks for besides: special tokens in a
    text are text, unless there is a chat template, and a text without a post-processor gets the
    start of a document in front, as in training and `megacpp sample`.

    Args:
        tokenizer: tokenizer of the run.
        folder: folder to write to.
        longest: tokens of the longest row.
    """
    tokenizer.save(folder / "tokenizer.json")
    values: dict[str, Any] = config_values((folder / CONFIG).read_text(encoding="utf-8"))
    if values.keys() - OWN_KEYS:
        return
    inner = tokenizer.inner
    if tokenizer.opening and inner.post_processor is None:
        (first,) = tokenizer.opening
        bos = inner.id_to_token(first)
        begin = processors.TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A $B", special_tokens=[(bos, first)]
        )
        inner.post_processor = begin  # type: ignore[assignment]
        inner.save(str(folder / "tokenizer.json"), pretty=False)
    template = values.pop("chat_template", "")
    values |= {
        "clean_up_tokenization_spaces": False,
        "split_special_tokens": not template,  # a template writes them
        "model_max_length": longest,
    }
    unknown = json.loads(inner.to_str())["model"].get("unk_token")
    if unknown or inner.token_to_id("<unk>") is not None:
        values["unk_token"] = unknown or "<unk>"
    if template:
        values["chat_template"] = template
    write_text(folder / CONFIG, json.dumps(values, indent=1, ensure_ascii=False) + "\n")
