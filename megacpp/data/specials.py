"""Special ids of a tokenizer: start and end of a document, padding, fill-in-the-middle."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import tokenizers

from megacpp.errors import DataError, did_you_mean

# Ids of the NAM56R tokenizer line. Byte-level BPE knows every byte, so <unk> is never produced; it
# only keeps the ids that follow in their place.
SPECIALS = ("<pad>", "<unk>", "<bos>", "<eos>", "<fim_prefix>", "<fim_middle>", "<fim_suffix>")
PAD, UNK, BOS, EOS, FIM_PREFIX, FIM_MIDDLE, FIM_SUFFIX = range(len(SPECIALS))
ADDED = "<|endoftext|>"  # added to a tokenizer without special tokens
CONFIG = "tokenizer_config.json"  # Hugging Face's file for the names of special tokens
TEMPLATE = "chat_template.jinja"  # and for the chat template, which may also be in CONFIG

# Spellings that published tokenizers use, each list in the order of preference.
NAMES = {
    "bos": (
        "<bos>", "<s>", "<|begin_of_text|>", "<|startoftext|>", "<｜begin▁of▁sentence｜>",
        "<SOS>", "[BOS]", "[CLS]",
    ),
    "eos": (
        "<eos>", "</s>", "<|endoftext|>", "<|end_of_text|>", "<｜end▁of▁sentence｜>",
        "<EOT>", "[EOS]", "[SEP]",
    ),
    "pad": ("<pad>", "[PAD]", "<|pad|>", "<｜▁pad▁｜>"),
}  # fmt: skip
FIM_NAMES = (  # prefix, middle, suffix
    ("<fim_prefix>", "<fim_middle>", "<fim_suffix>"),
    ("<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>"),
    ("<fim-prefix>", "<fim-middle>", "<fim-suffix>"),
    ("<｜fim▁begin｜>", "<｜fim▁end｜>", "<｜fim▁hole｜>"),
)


class FimIds(NamedTuple):
    """Sentinel ids of fill-in-the-middle."""

    prefix: int
    middle: int
    suffix: int


@dataclass(frozen=True)
class Specials:
    """Special ids around documents; `bos` equals `eos` if a tokenizer has no start token.

    Attributes:
        bos: start of a document.
        eos: end of a document.
        pad: padding.
        fim: None if the tokenizer has no sentinels.
    """

    bos: int
    eos: int
    pad: int
    fim: FimIds | None


OURS = Specials(BOS, EOS, PAD, FimIds(FIM_PREFIX, FIM_MIDDLE, FIM_SUFFIX))


def choose_specials(
    inner: tokenizers.Tokenizer, named: Mapping[str, str], eos: str, where: str
) -> Specials:
    """Choose the special tokens around documents.

    Args:
        inner: tokenizer.
        named: names by role ("bos", "eos", "pad") from `named_tokens`.
        eos: name of the end of a document, overriding all others (empty: choose).
        where: name of the tokenizer, for messages.

    Raises:
        DataError: `eos` isn't a special token, or no special token is known to end a document.
    """
    special = {t.content: i for i, t in inner.get_added_tokens_decoder().items() if t.special}
    if eos and eos not in special:
        raise DataError(
            f"eos={eos}: {where} has no such special token. Fix: {did_you_mean(eos, special)}."
        )

    def first(role: str) -> int | None:
        wanted = (named.get(role, ""), *NAMES[role])
        return next((special[name] for name in wanted if name in special), None)

    end = special[eos] if eos else first("eos")
    if end is None:
        some = " ".join(list(special)[:8])
        raise DataError(
            f"{where}: none of its special tokens ({some}) is known to end a document. "
            f"Fix: name one, --eos '{next(iter(special), '')}'."
        )
    start, pad = first("bos"), first("pad")
    sentinels = next((names for names in FIM_NAMES if all(n in special for n in names)), None)
    return Specials(
        bos=end if start is None else start,
        eos=end,
        pad=end if pad is None else pad,
        fim=FimIds(*(special[n] for n in sentinels)) if sentinels else None,
    )


def named_tokens(path: Path) -> dict[str, str]:
    """Return the special tokens named in `tokenizer_config.json` beside a tokenizer, by role."""
    try:
        values = json.loads(path.with_name(CONFIG).read_text(encoding="utf-8"))
        found = {role: values.get(f"{role}_token") for role in NAMES}
    except (OSError, ValueError, AttributeError):
        return {}
    plain = {r: v.get("content") if isinstance(v, dict) else v for r, v in found.items()}
    return {role: name for role, name in plain.items() if isinstance(name, str)}


def chat_template(path: Path) -> str:
    """Return the chat template beside a tokenizer at `path`; empty if there is none."""
    try:
        return path.with_name(TEMPLATE).read_text(encoding="utf-8")
    except OSError:
        pass
    try:
        found = json.loads(path.with_name(CONFIG).read_text(encoding="utf-8"))["chat_template"]
        if isinstance(found, list):  # several, by name
            found = {one["name"]: one["template"] for one in found}["default"]
    except (OSError, ValueError, KeyError, TypeError):
        return ""
    return found if isinstance(found, str) else ""


def write_named_tokens(
    inner: tokenizers.Tokenizer, specials: Specials, path: Path, template: str = ""
) -> None:
    """Write the `tokenizer_config.json` that belongs to a tokenizer.

    Args:
        inner: tokenizer.
        specials: its special ids around documents.
        path: its tokenizer.json.
        template: chat template; empty: none.
    """
    ids = {"bos": specials.bos, "eos": specials.eos, "pad": specials.pad}
    values = {f"{role}_token": inner.id_to_token(i) for role, i in ids.items()}
    values = {"tokenizer_class": "PreTrainedTokenizerFast", **values}
    if template:
        values["chat_template"] = template
    text = json.dumps(values, indent=1, ensure_ascii=False)
    path.with_name(CONFIG).write_text(text + "\n", encoding="utf-8")


def words(inner: tokenizers.Tokenizer, specials: Specials) -> str:
    """Return a sentence about the marks of documents."""
    start, end = inner.id_to_token(specials.bos), inner.id_to_token(specials.eos)
    if specials.bos == specials.eos:
        return f"documents begin and end with {end}"
    return f"documents begin with {start} and end with {end}"


def special_ids(inner: tokenizers.Tokenizer, more: Iterable[int] = ()) -> dict[int, str]:
    """Return the names of all special ids."""
    found = {i: t.content for i, t in inner.get_added_tokens_decoder().items() if t.special}
    return found | {i: inner.id_to_token(i) or "" for i in more}
