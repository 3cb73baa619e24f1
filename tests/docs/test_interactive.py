"""Interactive pages: built from today's program, and right in a real browser at two widths."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from bench.pages.build import FOLDER, PAGES, config_of, page
from megacpp.memory.traffic import traffic
from megacpp.versions import TORCH
from tests.docs.browser import BROWSER, Browser

WIDTHS = (1280, 390)


def data_of(name: str) -> list[dict[str, Any]]:
    text = (FOLDER / f"{name}.html").read_text()
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.S)
    assert found
    return json.loads(found[1])


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    if not BROWSER:
        pytest.skip("no Chromium on this machine")
    with Browser() as found:
        yield found


@pytest.mark.slow
@pytest.mark.skipif(not torch.__version__.startswith(TORCH), reason=f"built with torch {TORCH}")
@pytest.mark.parametrize("name", PAGES)
def test_a_page_is_todays_program(name: str) -> None:
    assert page(name) == (FOLDER / f"{name}.html").read_text(), "python -m bench.pages --write"


@pytest.mark.parametrize("name", PAGES)
def test_a_page_needs_no_other_file(name: str) -> None:
    text = (FOLDER / f"{name}.html").read_text()
    assert not re.findall(r"""(?:src|href)=["'](?:https?:)?//""", text)
    assert "<noscript>" in text and "prefers-color-scheme: dark" in text


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", PAGES)
def test_a_page_fits_and_is_free_of_errors(
    browser: Browser, name: str, width: int, scheme: str
) -> None:
    browser.errors.clear()
    browser.open(FOLDER / f"{name}.html", width, scheme)
    assert browser.overflow() <= 0 and browser.errors == []
    dark = browser.run("getComputedStyle(document.body).backgroundColor") == "rgb(22, 27, 34)"
    assert dark == (scheme == "dark")


def test_the_mesh_explorer_says_what_the_program_says(browser: Browser) -> None:
    config = config_of("tiny", "pp=2")
    browser.open(FOLDER / "mesh-explorer.html", 1280)
    browser.run(
        """at("mesh").value = "pp 2 x dp_shard 4"; at("mesh").dispatchEvent(new Event("input"))"""
    )
    browser.run("""at("rank").focus()""")
    for rank in (0, 7):
        if rank:
            browser.press("End")
        assert browser.run("""at("number").textContent""") == str(rank)
        shown = browser.run("""[...at("sends").rows].map(row => +row.cells[2].dataset.bytes)""")
        assert shown == [size for _, size in sorted(traffic(config, 8, rank).parts.items())]
    last = next(one for one in data_of("mesh-explorer") if "pp 2" in one["mesh"])["ranks"]
    held = """[...at("kinds").rows].map(row => +row.cells[1].dataset.bytes)"""
    assert browser.run(held) == list(last[7]["held"].values()) != list(last[0]["held"].values())


def test_the_timeline_follows_its_slider(browser: Browser) -> None:
    browser.open(FOLDER / "step-timeline.html", 390)
    spans = data_of("step-timeline")[0]["spans"]
    browser.run("""at("time").focus()""")
    browser.press("End")
    assert browser.run("""+at("time").value""") == max(span[3] for span in spans)
    for span in (spans[len(spans) // 3], spans[len(spans) // 2]):
        now = (span[2] + span[3]) // 2
        browser.run(f"""at("time").value = {now}; at("time").dispatchEvent(new Event("input"))""")
        runs = {of: what for of, what, start, stop, _ in spans if start <= now < stop}
        assert browser.run("""at("compute").textContent""") == runs.get("compute", "waits")
        assert browser.run("""at("link").textContent""") == runs.get("link", "idle")
        size = next((s[4] for s in spans if s[0] == "compute" and s[2] <= now < s[3]), None)
        if size:
            assert browser.run("""at("memory").textContent""") == f"{size / 2**30:.2f} GiB"
    assert browser.run("""at("spans").rows.length""") == len(spans)
    fills = browser.run(
        """[...document.querySelectorAll("#picture rect")].map(r => r.getAttribute("fill"))"""
    )
    assert "undefined" not in fills and len({f for f in fills if f}) > 5


def test_words_of_the_explorer_stay_whole_on_a_phone(browser: Browser) -> None:
    browser.open(FOLDER / "mesh-explorer.html", 390)
    heights = browser.run(
        """[...at("kinds").rows].map(row => [row.cells[0].textContent, row.offsetHeight])"""
    )
    lines = {kind: height // 24 for kind, height in heights}  # of 24 pixels
    assert "communication" in lines
    assert {kind for kind, lines in lines.items() if lines > 1} <= {k for k in lines if " " in k}
