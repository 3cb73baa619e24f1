"""Special ids of a tokenizer: start and end of a document, padding, fill-in-the-middle."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple

import tokenizers

from megacpp.errors import DataError, did_you_mean

# Ids of the NAM56R tokenizer line. Byte-level BPE knows every byte, so <unk> is never produced; it
# only keeps the ids that follow in their place.
SPECIALS = ("<pad>", "<unk>", "<bos>", "<eos>", "<fim_prefix>", "<fim_middle>", "<fim_suffix>")
PAD, UNK, BOS, EOS, FIM_PREFIX, FIM_MIDDLE, FIM_SUFFIX = range(len(SPECIALS))
ADDED = "<|endoftext|>"  # added to a tokenizer without special tokens
CONFIG = "tokenizer_config.json"  # Hugging Face's file for the names of special tokens
OWN_KEYS = {"tokenizer_class", "bos_token", "eos_token", "pad_token", "chat_template"}  # of ours
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
        DataError: `eos` or a named token isn't a special token, or none is known to end a document.
    """
    special = {t.content: i for i, t in inner.get_added_tokens_decoder().items() if t.special}
    if eos and eos not in special:
        raise DataError(
            f"eos={eos}: {where} has no such special token. Fix: {did_you_mean(eos, special)}."
        )

    for role in ("bos", "eos"):
        name = named.get(role, "")
        if name and name not in special and not (eos and role == "eos"):
            raise DataError(
                f"{where}: has no token {name}, which {CONFIG} beside it names as {role}_token. "
                f"Fix: name one there that it has ({did_you_mean(name, special)})."
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


def config_values(text: str) -> dict[str, Any]:
    """Return the keys of a `tokenizer_config.json`; none if it is no JSON object."""
    try:
        found = json.loads(text)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def read_config(path: Path) -> str:
    """Return the text of the `tokenizer_config.json` beside a tokenizer; empty if it has none."""
    try:
        return path.with_name(CONFIG).read_bytes().decode()
    except (OSError, UnicodeDecodeError):
        return ""


def named_tokens(values: Mapping[str, Any]) -> dict[str, str]:
    """Return the special tokens that a `tokenizer_config.json` names, by role."""
    found = {role: values.get(f"{role}_token") for role in NAMES}
    plain = {r: v.get("content") if isinstance(v, dict) else v for r, v in found.items()}
    return {role: name for role, name in plain.items() if isinstance(name, str)}


def chat_template(path: Path) -> str:
    """Return the chat template beside a tokenizer at `path`; empty if there is none."""
    try:
        return path.with_name(TEMPLATE).read_text(encoding="utf-8")
    except OSError:
        return template_in(config_values(read_config(path)))


def template_in(values: Mapping[str, Any]) -> str:
    """Return the chat template in a `tokenizer_config.json`; empty if there is none."""
    try:
        found = values["chat_template"]
        if isinstance(found, list):  # several, by name
            found = {one["name"]: one["template"] for one in found}["default"]
    except (KeyError, TypeError):
        return ""
    return found if isinstance(found, str) else ""


def config_text(
    inner: tokenizers.Tokenizer, specials: Specials, template: str, given: str = ""
) -> str:
    """Return the `tokenizer_config.json` of a tokenizer: the given one where it says the same.

    Args:
        inner: tokenizer.
        specials: its special ids around documents.
        template: chat template; empty: none.
        given: text of the file that it came with.
    """
    ids = {"bos": specials.bos, "eos": specials.eos, "pad": specials.pad}
    names = {f"{role}_token": inner.id_to_token(i) for role, i in ids.items()}
    values = config_values(given)
    named = named_tokens(values)
    wrong = {"eos_token"} if named.get("eos") != names["eos_token"] else set()
    if "pad" in named and inner.token_to_id(named["pad"]) is None:
        wrong.add("pad_token")  # transformers would add an id that the weights have no row for
    if not values:
        values = {"tokenizer_class": "PreTrainedTokenizerFast", **names}
    elif not wrong and template_in(values) == template:
        return given
    values |= {key: names[key] for key in wrong}
    values.pop("chat_template", None)
    if template:
        values["chat_template"] = template
    return json.dumps(values, indent=1, ensure_ascii=False) + "\n"


def opening_ids(
    inner: tokenizers.Tokenizer, specials: Specials, values: Mapping[str, Any]
) -> tuple[int, ...]:
    """Return the ids that transformers puts in front of a text.

    A tokenizer that comes with a post-processor or with settings of its own keeps them. For one
    without either, a text begins as a document of the corpus does, unless that is an end token.
    `add_bos_token` counts for nothing where there is a tokenizer.json (transformers 5).

    Args:
        inner: tokenizer.
        specials: its special ids around documents.
        values: keys of its `tokenizer_config.json`.
    """
    if inner.post_processor is None:
        no = values.keys() - OWN_KEYS or specials.bos == specials.eos
        return () if no else (specials.bos,)
    made = inner.encode("a")
    pairs = zip(made.ids, made.special_tokens_mask, strict=True)
    return tuple(i for i, _ in takewhile(lambda pair: pair[1], pairs))


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
