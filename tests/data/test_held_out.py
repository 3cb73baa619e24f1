"""Which documents are held out, when that is too few, and the figures of compressors."""

import hashlib
import json
import lzma
from pathlib import Path

import pytest

from megacpp.data import compressors
from megacpp.data.compressors import compressor_lines, xz_bits_per_byte
from megacpp.data.corpus import Corpus
from megacpp.data.held_out import choose_held_out, sample_prompt, shortfall
from megacpp.data.prepare import CorpusSpec, ensure_corpus


def digests(count: int) -> list[bytes]:
    return [hashlib.sha256(b"%d" % i).digest() for i in range(count)]


@pytest.mark.parametrize(
    ("documents", "fraction", "least", "most"),
    [
        (80, 0.02, 8, 8),  # a tenth
        (1000, 0.02, 64, 64),  # 64 documents
        (100_000, 0.02, 1860, 2140),  # the fraction: binomial, 3.2 standard deviations
        (100_000, 0.001, 1000, 1000),  # 1 % of the bytes
        (100, 0.5, 34, 66),  # more than a tenth, because it was asked for
        (2, 0.02, 1, 1),
    ],
)
def test_how_many_are_held_out(documents: int, fraction: float, least: int, most: int) -> None:
    found = choose_held_out(digests(documents), [100] * documents, fraction)
    assert least <= len(found) <= most


def test_a_document_of_most_bytes_is_not_added() -> None:
    names = digests(700)
    order = sorted(range(700), key=names.__getitem__)
    sizes = [100] * 700
    sizes[order[30]] = 17_500  # a fifth of all; it would be among the first 64
    found = choose_held_out(names, sizes, 1e-9)
    assert order[30] not in found and len(found) == 64
    assert found == {i for i in order[:65] if i != order[30]}


def test_what_is_held_out_stays_so_while_the_fraction_rules() -> None:
    """Documents that are added leave the others in their split."""
    few = choose_held_out(digests(20_000), [100] * 20_000, 0.02)
    many = choose_held_out(digests(40_000), [100] * 40_000, 0.02)
    assert {i for i in many if i < 20_000} == few


@pytest.mark.parametrize(
    ("held", "words"),
    [
        ((64, 1000, 6400, 100_000), ""),
        (
            (8, 800, 80, 8000),
            "few held-out documents: 8 of 80 with 10.0% of the bytes (64 and 1% are wanted): "
            "no verdict against gzip. Fix: prepare more documents.",
        ),
        (
            (20, 2000, 200, 20_000),
            "few held-out documents: 20 of 200 with 10.0% of the bytes (64 and 1% are wanted): "
            "no verdict against gzip. "
            "Fix: prepare more documents, or --validation-fraction 0.34.",
        ),
        (
            (1, 1 << 20, 10, 10 << 20),
            "few held-out documents: 1 of 10 with 10.0% of the bytes (64 and 1% are wanted): "
            "no verdict against gzip. "
            "Fix: prepare more documents, or cut long ones: --document-bytes 65536.",
        ),
        (
            (70, 50, 700, 10_000),
            "few held-out documents: 70 of 700 with 0.5% of the bytes (64 and 1% are wanted). "
            "Fix: prepare more documents, or --validation-fraction 0.12.",
        ),
    ],
)
def test_too_few_is_said_with_numbers(held: tuple[int, int, int, int], words: str) -> None:
    assert shortfall(*held) == words


def test_the_fraction_of_the_fix_is_enough() -> None:
    for count in (200, 400, 639):
        words = shortfall(count // 10, 10 * count, count, 100 * count)
        fraction = float(words.rpartition(" ")[2].rstrip("."))
        assert len(choose_held_out(digests(count), [100] * count, fraction)) >= 50


def test_xz_is_that_of_the_program() -> None:
    """To the frame: the same filter in a window that is no wider than the text needs."""
    texts = [b"int f%d(int x) { return x + %d; }\n" % (i, i) for i in range(4000)]
    whole = b"".join(texts)
    figure, taken = xz_bits_per_byte(texts, len(whole))
    assert taken == len(whole) and figure is not None
    program = 8 * len(lzma.compress(whole, preset=9)) / len(whole)
    assert abs(figure - program) <= 8 * 8 / len(whole)


def test_xz_of_a_large_text_is_of_its_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compressors, "STREAM_BYTES", 1000)
    figure, taken = xz_bits_per_byte([b"ab" * 300, b"cd" * 300, b"ef"], 1202)
    entry = {"gzip_bits_per_byte": 2.0, "xz_bits_per_byte": figure, "xz_bytes": taken}
    assert taken == 1000
    assert compressor_lines(entry | {"text_bytes": 1202}) == [
        "gzip -9 2.000 bits per byte, each document compressed alone",
        f"xz -9 {figure:.3f}, all documents as one stream, first 1,000 bytes",
    ]
    assert compressor_lines(entry | {"text_bytes": 1000})[1].endswith("one stream")


def test_a_python_without_xz(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "lzma", None)
    assert xz_bits_per_byte([b"a"], 1) == (None, 0)
    assert len(compressor_lines({"gzip_bits_per_byte": 2.0, "xz_bits_per_byte": None})) == 1


@pytest.mark.parametrize(
    ("documents", "prompt"),
    [
        (["#pragma once\n\n#include <a>", "#pragma once\n\n#include <b>",
          "Chapter one. It was a dark night"],
         "Chapter one. It was a dark night"),
        (["Permission is hereby granted, free of charge, to any person"] * 2,
         "Permission is hereby granted, free of"),
        (["short text\n"], "short text"),
        (["语言模型根据前面的文字预测后面的文字训练需要大量的数据也需要很长的时间和很多的耐心来完成"],
         "语言模型根据前面的文字预测后面的文字训练"),
    ],
)  # fmt: skip
def test_a_sample_begins_as_a_held_out_document(documents: list[str], prompt: str) -> None:
    raw = [text.encode() for text in documents]
    assert sample_prompt(raw.__getitem__, range(len(raw))) == prompt


def test_the_corpus_knows_its_prompt_and_figures(tmp_path: Path) -> None:
    path = tmp_path / "texts.jsonl"
    texts = [f"Letter {i}: " + "yours sincerely, " * (1 + i % 7) for i in range(700)]
    path.write_text("".join(json.dumps({"text": t}) + "\n" for t in texts))
    corpus = Corpus(ensure_corpus(CorpusSpec(str(path)), tmp_path / "out").path, 32)
    held_out = list(corpus.validation_documents())
    assert len(held_out) == 64 and corpus.no_verdict == ""
    assert any(t.startswith(corpus.sample_prompt) for t in held_out)
    figure = xz_bits_per_byte((t.encode() for t in held_out), sum(map(len, held_out)))
    assert corpus.xz_bits_per_byte() == figure[0]
    assert f"  xz -9 {figure[0]:.3f}, all documents as one stream" in corpus.describe()
