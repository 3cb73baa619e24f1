r"""Conversations as documents: a chat template writes them out, and only the answers are learned.

    messages   {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}
    text       <bos>user:\nHi\nassistant:\nHello<eos>\n
    learned                            ^^^^^^^^^^

Templates are those of Hugging Face (Jinja). Each learned part is encoded by itself, as the text in
front of it is when the model answers. Special tokens count only where the template writes them: in
a message they are text.
"""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from itertools import pairwise
from typing import Any

import numpy as np

from megacpp.data.tokenizer import CorpusTokenizer
from megacpp.errors import DataError

# For tokenizers that bring none. Every tokenizer has an id that ends a document.
SIMPLE = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ message.role + ':\\n' + message.content }}"
    "{{ eos_token if message.role == 'assistant' }}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant:\\n' }}{% endif %}"
)
MARK = "\ufdd0"  # a noncharacter, set into special tokens that a message spells
GENERATION = re.compile(r"\{%(-?)\s*(?:end)?generation\s*(-?)%\}")  # tags of transformers alone
FIX = 'Fix: write {"messages": [{"role": "user", "content": "..."}, ...]} a line'
# Fields of a message that would change what is learned.
UNREAD = ("tool_calls", "function_call", "reasoning_content")
ONLY_LAST = (
    "the chat template writes an answer another way once more follow, so only the last answer of a "
    "conversation is learned"
)
DATED = "the chat template writes today's date, so another day makes another corpus"
DROP = "Fix: write it into the content, or drop the line"

Message = dict[str, str]


def is_conversation(record: Mapping[str, Any]) -> bool:
    """Return whether a record has messages, or a prompt with its completion."""
    return "messages" in record or {"prompt", "completion"} <= record.keys()


def messages_of(record: Mapping[str, Any], where: str) -> list[Message]:
    """Return the messages of a record with `messages`, or with `prompt` and `completion`.

    Args:
        record: a JSON object.
        where: file and line, for messages.

    Raises:
        DataError: not a list of roles and texts, no answer among them, or fields that change what
            is to be learned and aren't read.
    """
    found = record.get("messages")
    if record.get("tools"):
        raise DataError(f"{where}: has tools, which aren't read. {DROP}.")
    if "messages" not in record:
        roles = {"user": record["prompt"], "assistant": record["completion"]}
        found = [{"role": role, "content": text} for role, text in roles.items()]
    if not isinstance(found, list) or not found:
        raise DataError(f"{where}: messages must be a list that isn't empty. {FIX}.")
    messages = []
    for number, one in enumerate(found, start=1):
        pair = [one.get(key) for key in ("role", "content")] if isinstance(one, dict) else [None]
        if not all(isinstance(text, str) and MARK not in text for text in pair):
            raise DataError(f"{where}: message {number} has no text `role` and `content`. {FIX}.")
        assert isinstance(one, dict)
        if more := [key for key in UNREAD if one.get(key)] + ["weight"] * (one.get("weight") == 0):
            raise DataError(f"{where}: message {number} has {more[0]}, which isn't read. {DROP}.")
        messages.append(dict(zip(("role", "content"), pair, strict=True)))
    if all(one["role"] != "assistant" for one in messages):
        raise DataError(f"{where}: has no message of the assistant to learn. Fix: drop the line.")
    return messages


def plain_text(raw: bytes) -> bytes:
    """Return the roles and texts of stored messages, for compressors and a new tokenizer."""
    parts = (f"{one['role']}:\n{one['content']}" for one in json.loads(raw))
    return "\n".join(parts).encode()


def first_question(raw: bytes) -> str:
    """Return the first text that isn't of the system or the assistant."""
    messages = json.loads(raw)
    asked = (one["content"] for one in messages if one["role"] not in ("system", "assistant"))
    return next(asked, "")


class ChatTemplate:
    """Chat template of a tokenizer: text and ids of conversations.

    Args:
        tokenizer: its `template`, or `SIMPLE` if it has none.

    Attributes:
        end: id that ends an answer.
        last_only: it writes an answer another way once more follow, without its thoughts. Only the
            last answer of a conversation is then learned.
        notes: lines about it for who prepares a corpus.

    Raises:
        DataError: the template isn't valid.
    """

    def __init__(self, tokenizer: CorpusTokenizer) -> None:
        self.tokenizer, marks = tokenizer, tokenizer.specials
        names = tokenizer.special_names
        self._ids = {name: i for i, name in names.items() if name}
        longest_first = sorted(self._ids, key=len, reverse=True)
        self._special = re.compile("(" + "|".join(map(re.escape, longest_first)) + ")")
        self._words = {"eos_token": names[marks.eos]}
        self._words |= {"tools": None, "documents": None}  # as transformers: defined, and none
        if tokenizer.names_bos:
            self._words["bos_token"] = names[marks.bos]
        self._jinja: Any = importlib.import_module("jinja2")  # of torch's own requirements
        sandbox: Any = importlib.import_module("jinja2.sandbox")
        environment = sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.globals["raise_exception"] = self._refuse
        environment.filters["tojson"] = _json
        source = GENERATION.sub(r"{#\1 \2#}", tokenizer.template or SIMPLE)
        # Templates that ask whether it is defined have a date of their own, every day the same.
        dated = "strftime_now" in source and not re.search(r"strftime_now\s+is\s+defined", source)
        if dated:
            environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        try:
            self._template = environment.from_string(source)
        except self._jinja.TemplateError as error:
            raise DataError(
                f"chat_template: isn't valid Jinja ({error}). Fix: repair it."
            ) from None
        probe = [{"role": "user", "content": "1"}, {"role": "assistant", "content": "2"}]
        asked, whole = self.render(probe[:1], prompt=True), self.render(probe)
        found = self._special.search(whole, whole.find("2", len(asked)) + 1)
        self.end = marks.eos if found is None else self._ids[found[0]]
        self.last_only = not self.render([*probe, *probe]).startswith(whole)
        self.notes = [ONLY_LAST] * self.last_only + [DATED] * dated

    def render(self, messages: Sequence[Message], prompt: bool = False) -> str:
        """Return the text of messages, and of the start of an answer for a prompt.

        Special tokens in the messages are broken by `MARK`.

        Raises:
            DataError: the template refuses these messages.
        """
        shown = [{**one, "content": self._special.sub(_broken, one["content"])} for one in messages]
        try:
            return self._template.render(
                messages=shown, add_generation_prompt=prompt, **self._words
            )
        except (self._jinja.TemplateError, TypeError, ValueError) as error:
            said = " ".join(str(error).split())
            raise DataError(
                f"chat_template: refuses {_named(messages)} ({said}). "
                "Fix: give messages as the template wants them, or another one."
            ) from None

    def prompt_ids(self, messages: Sequence[Message]) -> list[int]:
        """Return the ids in front of the answer to messages."""
        return self._encoded([self.render(messages, prompt=True)])[0].tolist()

    def encode(self, conversations: Sequence[Sequence[Message]]) -> list[tuple[np.ndarray, ...]]:
        """Return for each conversation its uint32 ids, and 1 for each that is learned, uint8.

        Raises:
            DataError: the template refuses it, or changes what came before an answer.
        """
        pieces: list[str] = []
        learned: list[list[int]] = []
        for messages in conversations:
            text, spans = self._answers(messages)
            cuts = sorted({0, len(text), *(end for span in spans for end in span)})
            pieces += [text[begin:end] for begin, end in pairwise(cuts)]
            learned.append([int(any(a <= begin < b for a, b in spans)) for begin in cuts[:-1]])
        ids, found = iter(self._encoded(pieces)), []
        for flags in learned:
            parts = [next(ids) for _ in flags]
            mask = [
                np.full(len(part), flag, np.uint8) for part, flag in zip(parts, flags, strict=True)
            ]
            found.append((np.concatenate(parts), np.concatenate(mask)))
        return found

    def _answers(self, messages: Sequence[Message]) -> tuple[str, list[tuple[int, int]]]:
        """Return the text of a conversation, and where each answer begins and ends in it."""
        text, spans = self.render(messages), []
        for number, one in enumerate(messages):
            if one["role"] != "assistant":
                continue
            before, until = (
                self.render(messages[:number], True),
                self.render(messages[: number + 1]),
            )
            if not (until.startswith(before) and text.startswith(until)):
                if self.last_only and any(m["role"] == one["role"] for m in messages[number + 1 :]):
                    continue
                raise DataError(
                    f"chat_template: writes message {number + 1} of {_named(messages)} another way "
                    "once more follow. Fix: end the conversation there."
                )
            marks = (mark.end() for mark in self._special.finditer(until, len(before)))
            ends = (end for end in marks if not until[end:].strip())  # white space isn't learned
            spans.append((len(before), next(ends, len(until))))
        return text, spans

    def _encoded(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Return the ids of texts, in which special tokens count."""
        parts = [self._special.split(text) for text in texts]
        plain = [part.replace(MARK, "") for one in parts for part in one[::2]]
        ids, found = iter(self.tokenizer.encode_many(plain)), []
        for one in parts:
            special = [np.array([self._ids[name]], np.uint32) for name in one[1::2]]
            both = [next(ids)]
            for mark in special:
                both += [mark, next(ids)]
            found.append(np.concatenate(both))
        return found

    def _refuse(self, message: str) -> None:
        raise self._jinja.TemplateError(message)


def _broken(spelled: re.Match[str]) -> str:
    return spelled[0][0] + MARK + spelled[0][1:]


def _named(messages: Sequence[Message]) -> str:
    """Return the beginning of a conversation, to find it in its file."""
    begin = " ".join(messages[0]["content"].split())[:40] if messages else ""
    return f"the conversation {begin!r}"


def _json(value: Any, indent: int | None = None, **_: Any) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)
