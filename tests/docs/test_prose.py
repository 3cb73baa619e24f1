"""Prose of chapters, pages and README: short sentences that open with what they are about."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"
ROOT = DOCS.parent
# Made from the program: docs/reference.
BOOK = sorted(p for p in DOCS.rglob("*.md") if p.parent.name != "reference")
PAGES = [*BOOK, *sorted(ROOT.glob("*.md"))]
# Lines of a list in docs/README.md are entries of the site's navigation.
FILLED = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")),
    *(
        DOCS / f"{name}.md"
        for name in ("after-a-run", "faq", "install", "notation", "using", "when-it-stops")
    ),
    *(DOCS / f"{name}.md" for name in ("architecture", "benchmarks", "contracts", "torture")),
    *(
        page
        for folder in ("assignments", "launch")
        for page in sorted((DOCS / folder).glob("*.md"))
    ),
    DOCS / "README.md",
]
COLUMNS = 100
WORDS = 30  # of a sentence, at the 95th percentile
# "One" and "Some" may stand before their noun, "the same" too.
OPENING = re.compile(
    r"(?:Of|What|Who|As|Beside"
    r"|(?:One|Some) (?:of|is|are|has|have|can|can't|could|would|asks|ends|says|whose)"
    r"|The same (?:for|from|of|on|with|is|holds|would))\b"
)
RIDDLE = re.compile(r"\b(?:nobody|somebody|for ever|what is said|what there is)\b", re.I)


def sentences(text: str) -> list[str]:
    """Return the sentences of Markdown: no headings, tables, figures; a code span is one word."""
    text = re.sub(r"^```.*?^```|^!\[.*?$|</?\w[^>]*>", "\n\n", text, flags=re.M | re.S)
    text = re.sub(r"`[^`]*`", "code", re.sub(r"\]\([^)]*\)", "]", text))
    items = re.split(r"\n\s*\n|\n(?=\s*(?:[-*]|\d+\.) |#|\|)", text)
    kept = [item.strip() for item in items if not item.strip().startswith(("#", "|"))]
    plain = [" ".join(re.sub(r"^(?:[-*]|\d+\.) ", "", item).split()) for item in kept]
    return [said for item in plain for said in re.split(r"(?<=[.?!])[\])*\"]* ", item) if said]


def length(sentence: str) -> int:
    """Return the words of a sentence; numbers and signs are none."""
    return len(re.findall(r"\S*[A-Za-z]\S*", sentence))


def long(text: str) -> int:
    """Return the 95th percentile of the sentences' lengths."""
    lengths = sorted(map(length, sentences(text)))
    return lengths[-(-95 * len(lengths) // 100) - 1]


def riddles(text: str) -> list[str]:
    """Return the sentences that open with a word that points at nothing, or speak of nobody."""
    said = [s for s in sentences(text) if not s.endswith("?")]
    return [s for s in said if OPENING.match(s) or RIDDLE.search(s)]


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_sentences_are_short(page: Path) -> None:
    text = page.read_text()
    longest = sorted(sentences(text), key=length)[-3:]
    assert long(text) <= WORDS, longest


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_sentences_open_with_their_subject(page: Path) -> None:
    assert riddles(page.read_text()) == []


@pytest.mark.parametrize("page", FILLED, ids=name)
def test_lines_of_a_page_are_filled(page: Path) -> None:
    """Tables, pictures and blocks may be wider; chapters are held in tests/docs/test_docs.py."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.M | re.S)
    free = ("|", "![", "- ") if page == DOCS / "README.md" else ("|", "![")
    assert [x for x in text.splitlines() if len(x) > COLUMNS and not x.startswith(free)] == []


def test_a_sentence_is_counted_and_judged() -> None:
    long_one = "The " + "word " * 30 + "ends.\n\n- Item (see [here](x.md)). `a b c` is one.\n"
    assert [length(s) for s in sentences(long_one)] == [32, 3, 3]
    assert long(long_one) == 32 and long("Short. " * 19 + long_one) == 3
    assert riddles("# Of\n\nOf two one goes.\n\n| What |\n\nWhat goes? One whose key goes.") == [
        "Of two one goes.",
        "One whose key goes.",
    ]
    assert riddles("The router chooses nobody.") and not riddles("One rank goes.")
