"""Notation page: its letters are those of the chapters, its words are taught where it says."""

from __future__ import annotations

import re
from itertools import combinations, pairwise
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"
NOTATION = (DOCS / "notation.md").read_text()
ROW = re.compile(r"^\| \*\*([^|]+) \| ([^|]+) \| ([^|]+) \|$", re.M)
LETTER = re.compile(r"^\| ([A-Za-z]) \|.*$", re.M)
CHAPTER = re.compile(r"\]\((\d\d-[^)#]+\.md)")
# Chapters in reading order.
CONTENTS = (DOCS / "README.md").read_text()
ORDER = re.findall(r"^- \d+ · \[[^\]]+\]\(([^)]+)\)", CONTENTS, re.M)


def words() -> dict[str, tuple[list[str], list[str]]]:
    """Return the forms of each term, and the chapters that teach it in reading order."""
    found = {}
    for forms, _, chapters in ROW.findall(NOTATION):
        names = forms.replace("*", "").split(", ")
        found[names[0]] = names, sorted(CHAPTER.findall(chapters), key=ORDER.index)
    return found


def prose(chapter: str) -> str:
    """Return the prose of a chapter: no code, figures and flags; words in backticks stay.

    Questions are left out, too: they may be about later chapters.
    """
    text = re.sub(r"^```.*?^```$", "", (DOCS / chapter).read_text(), flags=re.M | re.S)
    text = re.sub(r"^## Questions$.*?(?=^## )", "", text, flags=re.M | re.S)
    return re.sub(r"`([^`]*)`", lambda span: span[1] if span[1].isalnum() else "", text)


def uses(forms: list[str]) -> re.Pattern[str]:
    """Return a pattern of a term's forms; a word without capitals may begin a sentence."""
    said = [
        re.escape(form) if form != form.lower() else f"(?i:{re.escape(form)}s?)" for form in forms
    ]
    spaced = "|".join(said).replace(r"\ ", r"\s+")
    return re.compile(rf"(?<![\w.\-])(?:{spaced})(?![\w=])")


def early(forms: list[str], taught: str) -> list[str]:
    """Return the chapters before `taught` that use a term and haven't linked it or the page yet.

    Headings, pictures and lists of code are left out: the paragraphs beside them explain the words.
    """
    found = []
    for chapter in ORDER[: ORDER.index(taught)]:
        text = prose(chapter)
        paragraphs = [p for p in re.split(r"\n\s*\n", text) if not p.startswith(NO_PROSE)]
        for number, paragraph in enumerate(paragraphs):
            if uses(forms).search(re.sub(r"\]\([^)]*\)", "]", paragraph)):
                known = "".join(paragraphs[: number + 1])
                if f"({taught}" not in paragraph and "(notation.md" not in known:
                    found.append(chapter[:2])
                break
    return found


def legend(chapter: str) -> set[str]:
    """Return the letters that a chapter declares."""
    found = re.findall(r"Letters: (.*?)\.\s", (DOCS / chapter).read_text(), re.S)
    said = re.sub(r"`[^`]*`", "", " ".join(found))
    return set(re.findall(r"\b[A-Za-z]\b", said)) - {"a", "x"}  # "a rank", "P x N"


def of_formulas(text: str) -> set[str]:
    """Return the capital letters of a chapter's formulas; words are left out."""
    formulas = " ".join(re.findall(r"^```math\n(.*?)^```", text, re.M | re.S))
    return set(re.findall(r"[A-Z]", re.sub(r"\\mathrm\{[^}]*\}|\\[A-Za-z]+", "", formulas)))


NO_PROSE = ("#", "![", "Code: ")
TERMS = words()


def bold(text: str) -> set[str]:
    """Return the terms that a chapter defines, in lower case and without a plural's s."""
    text = re.sub(r"^```.*?^```$|`[^`]*`", "", text, flags=re.M | re.S)
    terms = (" ".join(term.lower().split()) for term in re.findall(r"\*\*([^*]+)\*\*", text))
    return {re.sub(r"(?<=[^s])s$", "", term) for term in terms}


def test_a_term_is_bold_in_one_chapter() -> None:
    """Check that a term is bold in the first chapter that defines it; later ones link there."""
    chapters: dict[str, list[str]] = {}
    for chapter in ORDER:
        for term in bold((DOCS / chapter).read_text()):
            chapters.setdefault(term, []).append(chapter)
    assert {term: found for term, found in chapters.items() if len(found) > 1} == {}
    late = {
        term: chapters[name][0]
        for term, (forms, taught) in TERMS.items()
        for name in {re.sub(r"(?<=[^s])s$", "", form.lower()) for form in forms} & chapters.keys()
        if chapters[name][0] not in taught
    }
    assert late == {}, "the notation lists the chapter that defines a term"


def test_bold_terms_are_found() -> None:
    assert bold("**Two\nbubbles**, `2**3`\n```\n**code**\n```\n**loss**") == {"two bubble", "loss"}


def test_letters_are_those_of_the_chapters() -> None:
    declared = {(letter, c) for c in ORDER for letter in legend(c)}
    listed = {(row[1], c) for row in LETTER.finditer(NOTATION) for c in CHAPTER.findall(row[0])}
    assert len(declared) > 80 and listed == declared


def read_together() -> set[tuple[str, str]]:
    """Return pairs of chapters: neighbours in reading order or by number, and those of a part.

    The features of Part VI can be read alone: of these only neighbours count.
    """
    found = {*pairwise(ORDER), *pairwise(sorted(ORDER))}
    for part in re.split(r"^## ", CONTENTS, flags=re.M):
        if not part.startswith("Part VI:"):
            found |= set(combinations([c for c in ORDER if f"({c})" in part], 2))
    return found


def clashes(notation: str) -> list[tuple[str, str, str]]:
    """Return each letter that means two things in two chapters that are read together."""
    meanings: dict[str, dict[str, str]] = {}
    for letter, meaning, chapters in re.findall(r"^\| (\w) \| ([^|]+) \| (.+) \|$", notation, re.M):
        for chapter in CHAPTER.findall(chapters):
            assert letter not in meanings.setdefault(chapter, {}), (letter, chapter)
            meanings[chapter][letter] = meaning
    return [
        (letter, *pair)
        for pair in sorted(read_together())
        for letter, meaning in meanings.get(pair[0], {}).items()
        if meanings.get(pair[1], {}).get(letter, meaning) != meaning
    ]


def test_letters_of_chapters_that_are_read_together_do_not_clash() -> None:
    assert len(read_together()) > 120 and clashes(NOTATION) == []


def test_a_letter_with_two_meanings_is_found() -> None:
    table = "| K | heads | [4](04-attention.md) |\n| K | experts | [{0:02}]({0:02}-{1}.md) |\n"
    assert clashes(table.format(6, "mixture-of-experts"))  # of one part
    assert clashes(table.format(3, "same-weights-anywhere"))  # neighbours by number
    assert clashes(table.format(40, "failures"))  # neighbours in reading order
    assert not clashes(table.format(26, "multi-token-prediction"))


@pytest.mark.parametrize("chapter", ORDER)
def test_capitals_of_formulas_are_explained(chapter: str) -> None:
    """By the chapter's letters, or by name in a paragraph or in a table of symbols."""
    text = (DOCS / chapter).read_text()
    outside = re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S)
    said = set(re.findall(r"(?<![A-Za-z])[A-Z](?![A-Za-z])", outside))
    assert of_formulas(text) <= said


def test_capitals_of_formulas_are_found() -> None:
    text = "```math\nS_t = \\mathrm{RMS}(x) K \\Theta\n```\nV"
    assert of_formulas(text) == {"S", "K"}


def test_there_are_terms() -> None:
    assert len(TERMS) >= 60


@pytest.mark.parametrize("term", TERMS)
def test_a_term_is_used_where_it_is_taught(term: str) -> None:
    forms, chapters = TERMS[term]
    assert chapters
    for chapter in chapters:
        assert uses(forms).search(prose(chapter)), chapter


@pytest.mark.parametrize("term", TERMS)
def test_a_term_is_linked_before_it_is_taught(term: str) -> None:
    forms, chapters = TERMS[term]
    assert not early(forms, chapters[0])
