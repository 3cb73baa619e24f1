"""Tokenizer of a run as Hugging Face reads it: the same ids, behind the start of a document."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import processors

from megacpp.data.specials import CONFIG
from megacpp.data.tokenizer import CorpusTokenizer
from megacpp.state.files import write_text


def special_ids_of(path: Path) -> dict[str, int]:
    """Return the special ids around documents, as config.json names them."""
    marks = CorpusTokenizer.load(path).specials
    return {"bos_token_id": marks.bos, "eos_token_id": marks.eos, "pad_token_id": marks.pad}


def write_tokenizer(path: Path, folder: Path, longest: int) -> None:
    """Write tokenizer.json and tokenizer_config.json.

    Without the second file transformers takes another class's words and ids by `model_type`. A text
    gets the start of a document in front, as in training and `megacpp sample`; special tokens in a
    text are text, unless there is a chat template.

    Args:
        path: tokenizer.json.
        folder: folder to write to.
        longest: tokens of the longest row.
    """
    tokenizer = CorpusTokenizer.load(path)
    inner, marks = tokenizer.inner, tokenizer.specials
    bos = inner.id_to_token(marks.bos)
    if inner.encode("a").ids[:1] != [marks.bos]:
        begin = processors.TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A $B", special_tokens=[(bos, marks.bos)]
        )
        inner.post_processor = begin  # type: ignore[assignment]
    inner.save(str(folder / "tokenizer.json"), pretty=False)
    names = {"bos": marks.bos, "eos": marks.eos, "pad": marks.pad}
    values: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **{f"{role}_token": inner.id_to_token(i) for role, i in names.items()},
        "clean_up_tokenization_spaces": False,
        "split_special_tokens": not tokenizer.template,  # a template writes them
        "model_max_length": longest,
    }
    unknown = json.loads(inner.to_str())["model"].get("unk_token")
    if unknown or inner.token_to_id("<unk>") is not None:
        values["unk_token"] = unknown or "<unk>"
    if tokenizer.template:
        values["chat_template"] = tokenizer.template
    write_text(folder / CONFIG, json.dumps(values, indent=1, ensure_ascii=False) + "\n")
