"""Site that `make site` built, in a real browser at two widths: nothing overflows, no error.

Screenshots of a few pages are compared with those in tests/docs/looks, which
`python -m pytest tests/docs/test_built_site.py --update-docs` takes again.
"""

from __future__ import annotations

import functools
import io
import shutil
import subprocess
import threading
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from bench.site import SITE
from tests.docs.browser import ABSENT, BROWSER, Browser

HTML = SITE / "html"
LOOKS = Path(__file__).parent / "looks"
# Page, what is in the middle of the window, width and colours: each kind of content once.
SHOTS = [
    ("index", "h1", 1280, "light"),
    ("10-the-mesh", "p img", 1280, "dark"),
    ("05-mamba3", ".formula", 1280, "light"),
    ("05-mamba3", ".formula", 390, "dark"),
    ("23-planning", "details", 390, "light"),
    ("reference/functions/parallel.mesh", "h2", 1280, "dark"),
    ("notation", "table", 390, "light"),
]
GREY, SHARE = 48, 0.02  # a pixel of another grey; the most of them that a look may have
PAGES = sorted(p for p in HTML.rglob("*.html") if "code" not in p.relative_to(HTML).parts)
pytestmark = [
    pytest.mark.skipif(not BROWSER, reason=ABSENT),
    pytest.mark.skipif(
        not PAGES, reason="NO PAGE WAS LOOKED AT: `make site-check` builds the site first"
    ),
]


class Quiet(SimpleHTTPRequestHandler):
    """Server of files that prints nothing."""

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    serve = functools.partial(Quiet, directory=str(HTML))
    with ThreadingHTTPServer(("127.0.0.1", 0), serve) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.mark.parametrize("width", [1280, 390])
def test_every_page_fits_and_is_free_of_errors(address: str, width: int) -> None:
    assert len(PAGES) > 60
    wrong = {}
    with Browser() as browser:
        for page in PAGES:
            if width > 1000 and page.parent.name == "functions":
                continue  # a hundred pages made alike: narrow windows are where they may not fit
            browser.errors.clear()
            browser.open(f"{address}/{page.relative_to(HTML)}", width)
            if (wider := browser.overflow()) > 0 or browser.errors:
                wrong[str(page.relative_to(HTML))] = wider, list(browser.errors)
    assert wrong == {}


def test_a_page_follows_the_colours_of_the_system(address: str) -> None:
    """In one browser, which remembers what it showed before."""
    shown = {}
    with Browser() as browser:
        for scheme in ("light", "dark", "light"):
            browser.open(f"{address}/index.html", 1280, scheme)
            browser.overflow()
            found = browser.run("getComputedStyle(document.body).backgroundColor")
            assert shown.setdefault(scheme, found) == found
    assert shown["light"] != shown["dark"], shown


def test_code_of_100_columns_fits_beside_the_navigation(address: str) -> None:
    with Browser() as browser:
        browser.open(f"{address}/12-the-plan.html", 1280)
        browser.overflow()
        code = "[...document.querySelectorAll('.highlight pre > code:has(.kn)')]"
        assert browser.run(f"Math.max(...{code}.map(c => c.scrollWidth - c.clientWidth))") <= 0


def test_words_of_a_picture_can_be_read_on_a_phone(address: str) -> None:
    """Words of 11 and more pixels in a picture of 760 shrink to no less than 9."""
    with Browser() as browser:
        browser.open(f"{address}/17-pipeline.html", 390)
        assert browser.run("document.querySelector('p > img').offsetWidth") >= 760 * 9 / 11
        assert browser.overflow() <= 0


def drawn_by() -> str:
    """Return the browser and the font that draw a page: others draw it otherwise."""
    commands = [[BROWSER or "", "--version"]]
    commands += [["fc-match", name] for name in ("Helvetica", "sans-serif", "monospace", "math")]
    found = [
        subprocess.run(command, capture_output=True, text=True).stdout.strip()
        for command in commands
        if shutil.which(command[0])
    ]
    return "; ".join(found)


def test_pages_look_as_they_did(address: str, request: pytest.FixtureRequest) -> None:
    """Compare grey pictures of a quarter of the size, so that the edges of letters don't count."""
    pytest.importorskip("PIL", reason="needs Pillow")
    from PIL import Image, ImageChops, PngImagePlugin

    by, wrong = drawn_by(), {}
    with Browser() as browser:
        for page, middle, width, scheme in SHOTS:
            browser.open(f"{address}/{page}.html", width, scheme)
            browser.run(f"document.querySelector('{middle}').scrollIntoView({{block: 'center'}})")
            browser.overflow()
            look = Image.open(io.BytesIO(browser.picture())).convert("L").reduce(4)
            stored = LOOKS / f"{page.replace('/', '-')}-{width}-{scheme}.png"
            if request.config.getoption("--update-docs"):
                note = PngImagePlugin.PngInfo()
                note.add_text("drawn by", by)
                look.save(stored, pnginfo=note, optimize=True)
            before = Image.open(stored)
            if before.info["drawn by"] != by:
                pytest.skip(f"NO LOOK WAS COMPARED: they are of {before.info['drawn by']}")
            grey = ImageChops.difference(look, before).histogram()
            if sum(grey[GREY:]) > SHARE * sum(grey):
                wrong[stored.name] = sum(grey[GREY:]) / sum(grey)
                look.save(SITE / stored.name)
    assert wrong == {}, f"see {SITE}; --update-docs takes them again if that is meant"
