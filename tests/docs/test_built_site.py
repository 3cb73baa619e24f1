"""Site that `make site` built, in a real browser at two widths: nothing overflows, no error."""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

import pytest

from bench.site import SITE
from tests.docs.browser import BROWSER, Browser

HTML = SITE / "html"
PAGES = sorted(p for p in HTML.rglob("*.html") if "code" not in p.relative_to(HTML).parts)
pytestmark = [
    pytest.mark.skipif(not BROWSER, reason="NO PAGE WAS LOOKED AT: this machine has no Chromium"),
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
            browser.errors.clear()
            browser.open(f"{address}/{page.relative_to(HTML)}", width)
            if (wider := browser.overflow()) > 0 or browser.errors:
                wrong[str(page.relative_to(HTML))] = wider, list(browser.errors)
    assert wrong == {}
