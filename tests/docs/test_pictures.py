"""Pictures: drawn from today's program, embedded with alternative text, legible in both schemes."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest
import torch

from bench.pictures.draw import FOLDER, PICTURES
from bench.pictures.svg import FILLS, STYLE, Drawing
from megacpp.versions import TORCH

PAGES = [*sorted(FOLDER.parent.glob("*.md")), FOLDER.parents[1] / "README.md"]


@pytest.mark.skipif(
    not torch.__version__.startswith(TORCH), reason=f"pictures are drawn with torch {TORCH}"
)
@pytest.mark.parametrize("name", PICTURES)
def test_a_picture_shows_todays_program(name: str) -> None:
    drawn = PICTURES[name]().svg()
    assert drawn == (FOLDER / f"{name}.svg").read_text(), "python -m bench.pictures --write"


def test_every_chapter_has_a_picture() -> None:
    for chapter in FOLDER.parent.glob("[0-9]*.md"):
        assert "](pictures/" in chapter.read_text(), chapter.name


def test_each_file_is_a_picture() -> None:
    assert {path.stem for path in FOLDER.glob("*.svg")} == set(PICTURES)
    assert not list(FOLDER.parent.glob("*.svg"))


@pytest.mark.parametrize("name", PICTURES)
def test_a_picture_is_embedded_once_with_words(name: str) -> None:
    text = "\n".join(page.read_text() for page in PAGES)
    found = re.findall(rf"!\[([^\]]*)\]\((?:docs/)?pictures/{name}\.svg\)", text)
    assert len(found) == 1 and len(found[0]) > 40


@pytest.mark.parametrize("name", PICTURES)
def test_a_picture_stays_within_its_frame(name: str) -> None:
    root = ElementTree.parse(FOLDER / f"{name}.svg").getroot()
    width, height = (float(n) for n in root.attrib["viewBox"].split()[2:])
    space = "{http://www.w3.org/2000/svg}"
    assert len(root.findtext(f"{space}title") or "") > 20
    for item in root:
        if item.tag == f"{space}rect":
            x, y, w, h = (float(item.attrib[k]) for k in ("x", "y", "width", "height"))
            assert x >= 0 and y >= 0 and x + w <= width and y + h <= height, item.attrib
        elif item.tag == f"{space}text":
            x, letters = float(item.attrib["x"]), 5.2 * len(item.text or "")
            start = {"end": x - letters}.get(item.attrib.get("text-anchor", ""), x)
            if item.attrib.get("class") == "in":
                start = x - letters / 2
            assert start >= 0 and start + letters <= width, (item.text, x)
            assert 0 <= float(item.attrib["y"]) <= height


@pytest.mark.parametrize("name", PICTURES)
def test_what_a_picture_shows_is_not_pale(name: str) -> None:
    """Only lines behind a chart, which are level, may be hard to see."""
    root = ElementTree.parse(FOLDER / f"{name}.svg").getroot()
    for item in root.iter("{http://www.w3.org/2000/svg}polyline"):
        if item.attrib["class"] == "pale":
            heights = {point.split(",")[1] for point in item.attrib["points"].split()}
            assert len(heights) == 1, item.attrib["points"]


def test_both_colour_schemes_have_every_class() -> None:
    light, dark = STYLE.split("@media (prefers-color-scheme: dark)")
    for kind in ("text", ".note", ".in", ".back", ".line", ".edge", ".pale", ".off"):
        assert f"{kind} {{" in light and f"{kind} {{" in dark
    assert len(set(FILLS)) == len(FILLS)


def test_a_drawing_escapes_its_words() -> None:
    drawing = Drawing(100, "a < b")
    drawing.text(1, 1, "<script>")
    assert "<title>a &lt; b</title>" in drawing.svg() and "<script>" not in drawing.svg()
