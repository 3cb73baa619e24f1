"""Tasks on held-out code that need no further library.

    fim        a document without one of its lines: is the greedy middle that line, to the byte?
    compiles   the first half of a document's lines, continued: does a C++ compiler accept the file?

The compiler only checks (`-fsyntax-only`), in a temporary folder, with limits on time and memory;
`CXX` and `CXXFLAGS` of the environment choose it. `reference` is the share of the documents
themselves that it accepts: headers may need an include path.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megacpp.data.fim import FimParts, arrange
from megacpp.data.tokenizer import CorpusTokenizer
from megacpp.errors import config_error
from megacpp.run.sample import GREEDY
from megacpp.run.text_stream import TextStream, continue_texts

if TYPE_CHECKING:
    from megacpp.run.harness import Subject

COMPILERS = ("c++", "g++", "clang++")
LIMIT_S, LIMIT_KIB = 10, 4 << 20  # of one file
MAX_NEW = 256  # tokens of a continuation
SPARE = 4  # tokens of a middle beyond those of the line

Sample = dict[str, Any]


def check_code_tasks(names: Sequence[str], tokenizer: CorpusTokenizer, key: str = "tasks") -> None:
    """Check that tasks of this file can be evaluated.

    Raises:
        ConfigError: the tokenizer has no sentinels, or there is no compiler.
    """
    if "fim" in names and tokenizer.specials.fim is None:
        rule = "the tokenizer has no special tokens of fill-in-the-middle"
        raise config_error(key, "fim", rule, "leave fim out")
    if "compiles" in names and compiler() is None:
        rule = f"there is no C++ compiler here (CXX, {', '.join(COMPILERS)})"
        raise config_error(key, "compiles", rule, "install g++ or set CXX, or leave compiles out")


def run_code_tasks(
    names: Sequence[str], subject: Subject, documents: Iterable[str], limit: int | None
) -> dict[str, Any]:
    """Return figures by task, numbers of documents, and samples, as `run_tasks` does.

    Args:
        names: of `CODE_TASKS`.
        subject: model under evaluation.
        documents: held-out texts.
        limit: documents of each task; None: all.
    """
    found: dict[str, Any] = {"results": {}, "n-samples": {}, "samples": {}, "versions": {}}
    texts = list(itertools.islice(documents, limit))
    for name in names:
        samples = CODE_TASKS[name](subject, texts)
        figures = {
            metric: sum(sample[metric] for sample in samples) / max(1, len(samples))
            for metric in METRICS[name]
        }
        found["results"][name], found["samples"][name] = figures, samples
        found["n-samples"][name] = {"original": len(texts), "effective": len(samples)}
        found["versions"][name] = 1
    return found


def fim_samples(subject: Subject, texts: Sequence[str]) -> list[Sample]:
    """Return the middles of documents that lack a line, in the order of documents.

    A line is chosen by the document's hash; its prefix and suffix are cut to the model's length.
    """
    parts = [part for text in texts if (part := without_a_line(text))]
    prompts, most = [], 0
    tokenizer, marks = subject.tokenizer, subject.tokenizer.specials
    assert marks.fim is not None
    for part in parts:
        room = len(tokenizer.encode(part.middle)) + SPARE
        most = max(most, room)
        half = max(1, (subject.length - room - 4) // 2)
        prefix, suffix = tokenizer.encode(part.prefix), tokenizer.encode(part.suffix)
        begun = tokenizer.decode(prefix[-half:].tolist()) if len(prefix) > half else part.prefix
        rest = tokenizer.decode(suffix[:half].tolist()) if len(suffix) > half else part.suffix
        asked = FimParts(begun, "", rest, suffix_first=False)
        prompts.append([marks.bos, *arrange(asked, tokenizer.encode, marks.fim).tolist()])
    answers = _continued(subject, "fim", prompts, most)
    return [
        {"prefix": p.prefix, "suffix": p.suffix, "target": p.middle, "answer": answer}
        | {"exact_match": float(answer == p.middle)}
        for p, answer in zip(parts, answers, strict=True)
    ]


def without_a_line(text: str) -> FimParts | None:
    """Return a text in three parts, whose middle is a line with words; None: it has none."""
    lines = text.splitlines(keepends=True)
    full = [n for n, line in enumerate(lines) if any(c.isalnum() for c in line)]
    if not full:
        return None
    noise = hashlib.sha256(text.encode()).digest()
    at = full[int.from_bytes(noise[:8], "little") % len(full)]
    middle = lines[at].rstrip("\r\n")
    start = sum(map(len, lines[:at]))
    return FimParts(text[:start], middle, text[start + len(middle) :], suffix_first=False)


def compiled_samples(subject: Subject, texts: Sequence[str]) -> list[Sample]:
    """Return continued documents, and whether a compiler accepts them, in order."""
    command, tokenizer = compiler(), subject.tokenizer
    assert command is not None
    most = min(MAX_NEW, subject.length // 2)
    begun = []
    for text in texts:
        lines = text.splitlines(keepends=True)
        begun.append("".join(lines[: -(-len(lines) // 2)]))
    room = subject.length - most - 1
    ids = [tokenizer.encode(text).tolist()[-room:] for text in begun]
    prompts = [[tokenizer.specials.bos, *one] for one in ids]
    answers = _continued(subject, "compiles", prompts, most)
    return [
        {"prompt": prompt, "answer": answer}
        | {"accepted": float(accepts(command, prompt + answer))}
        | {"reference": float(accepts(command, text))}
        for text, prompt, answer in zip(texts, begun, answers, strict=True)
    ]


def compiler() -> list[str] | None:
    """Return the command of a C++ compiler with its flags, or None."""
    wanted = shlex.split(os.environ.get("CXX", ""))
    for words in [wanted] if wanted else [[name] for name in COMPILERS]:
        if path := shutil.which(words[0]):
            flags = shlex.split(os.environ.get("CXXFLAGS", "-std=c++20"))
            return [path, *words[1:], *flags]
    return None


def accepts(command: Sequence[str], text: str) -> bool:
    """Return whether a compiler accepts a text as a file of C++; too slow or too large is no."""
    with tempfile.TemporaryDirectory(prefix="megacpp-compiles-") as name:
        file = Path(name) / "sample.cpp"
        file.write_text(text, encoding="utf-8", errors="replace")
        limited = ["sh", "-c", f'ulimit -v {LIMIT_KIB}; exec "$@"', "sh", *command]
        try:
            done = subprocess.run(
                [*limited, "-fsyntax-only", "-w", "-Wfatal-errors", file.name],
                cwd=name,
                timeout=LIMIT_S,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
        except subprocess.TimeoutExpired:
            return False
        return done.returncode == 0


def _continued(
    subject: Subject, name: str, prompts: Sequence[Sequence[int]], most: int
) -> list[str]:
    """Return the greedy continuation of each prompt up to the end of its document."""
    order = sorted(range(len(prompts)), key=lambda n: -len(prompts[n]))
    batches = [order[at : at + subject.batch] for at in range(0, len(order), subject.batch)]
    mine, texts = batches[subject.rank :: subject.size], {}
    for batch in subject.follow(mine, name, len(mine)):
        streams = [TextStream(subject.tokenizer) for _ in batch]
        asked = [prompts[n] for n in batch]
        continue_texts(subject.model, subject.tokenizer, asked, streams, most, GREEDY)
        for number, stream in zip(batch, streams, strict=True):
            stream.end()
            texts[number] = stream.text
    texts = subject.merged(texts)
    return [texts[number] for number in range(len(prompts))]


CODE_TASKS: dict[str, Callable[[Subject, Sequence[str]], list[Sample]]] = {
    "fim": fim_samples,
    "compiles": compiled_samples,
}
METRICS = {"fim": ("exact_match",), "compiles": ("accepted", "reference")}
