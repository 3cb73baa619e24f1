"""Sources of the site, without mkdocs: pages, links and navigation are complete."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from bench import site


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    patch = pytest.MonkeyPatch()
    folder = tmp_path_factory.mktemp("site")
    patch.setattr(site, "SITE", folder)
    assert site.write() > 100
    patch.undo()
    return folder


def broken(docs: Path) -> list[str]:
    """Links of all pages that lead nowhere."""
    found = []
    for page in docs.rglob("*.md"):
        if page.relative_to(docs).parts[0] == "code":
            continue
        text = site.FENCED.sub("", page.read_text())
        for _, link, _ in site.LINK.findall(text):
            if not re.match(r"[a-z]+:", link) and not (page.parent / link).is_file():
                found.append(f"{page.relative_to(docs)}: {link}")
    return found


def test_every_link_leads_to_a_page(built: Path) -> None:
    assert broken(built / "docs") == []
    (built / "docs/code/parallel/boundary.py.md").rename(built / "away.md")
    assert any("boundary.py.md" in line for line in broken(built / "docs"))
    (built / "away.md").rename(built / "docs/code/parallel/boundary.py.md")


def test_every_page_is_in_the_navigation(built: Path) -> None:
    linked = {str(page) for entry in site.navigation() for page in flat(entry)}
    assert len(linked) >= 53
    missing = [page for page in linked if not (built / "docs" / page).is_file()]
    assert missing == []
    pages = {str(p.relative_to(built / "docs")) for p in (built / "docs").rglob("*.md")}
    # The index of a folder lists these itself.
    within = {
        p
        for p in pages
        if p.startswith(("code/", "assignments/", "launch/", "reference/functions/"))
    }
    assert pages - within == linked - within


def test_pages_for_users_are_in_the_order_of_use() -> None:
    heading, pages = site.sections()[0]
    assert heading == "To train: in the order of use"
    assert [file.removesuffix(".md") for _, file in pages][:6] == [
        "install",
        "using",  # quickstart, own data, several nodes, choosing a mesh, reading a run
        "launch/README",
        "when-it-stops",
        "after-a-run",  # continue, fine-tune, evaluate, export and serve
        "faq",
    ]


def test_formulas_are_drawn(built: Path) -> None:
    """By the browser itself: MathML."""
    pages = {page.name: page.read_text() for page in (built / "docs").glob("[0-9]*.md")}
    assert sum(text.count("<math ") for text in pages.values()) >= 15
    assert not any("```math" in text for text in pages.values())
    assert "<msub><mi>p</mi><mi>v</mi></msub>" in pages["27-token-order.md"]


def test_a_listed_function_leads_to_its_docstring(built: Path) -> None:
    listed = (built / "docs/reference/functions.md").read_text()
    links = re.findall(r"^\| \[`(\w+)`\]\((functions/([\w.]+)\.md)#([\w.]+)\)", listed, re.M)
    assert len(links) > 150
    for name, page, module, anchor in links:
        assert anchor == f"{module}.{name}"
        assert f"\n::: {anchor}\n" in (built / "docs/reference" / page).read_text()


def flat(entry: object) -> list[str]:
    """Files of a part of the navigation."""
    if isinstance(entry, str):
        return [entry]
    values = entry.values() if isinstance(entry, dict) else entry
    assert not isinstance(values, str)
    return [file for value in values for file in flat(value)]  # pyright: ignore


def test_answers_fold_and_code_stays_as_it_is(built: Path) -> None:
    text = (built / "docs/16-fsdp.md").read_text()
    assert "<details markdown>" in text and "<details>" not in text
    fences = re.compile(r"^```python\n.*?^```", re.M | re.S)
    assert fences.findall(text) == fences.findall((site.DOCS / "16-fsdp.md").read_text())


def test_a_page_of_code_shows_the_file(built: Path) -> None:
    text = (built / "docs/code/parallel/boundary.py.md").read_text()
    assert (site.ROOT / "parallel/boundary.py").read_text().rstrip() in text
    folder = (built / "docs/code/tests/memory.md").read_text()
    assert "- `tests/memory/test_planner.py`" in folder


def test_a_word_of_the_notation_shows_its_meaning(built: Path) -> None:
    text = (built / "docs/22-memory.md").read_text()
    assert "\n*[NVLink]: fast link between the GPUs of a machine\n" in text
    assert "*[microbatches]: " in text and "*[" not in (built / "docs/notation.md").read_text()
