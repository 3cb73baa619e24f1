"""Pages in a real browser: nothing is wider than the window, no script fails."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from megacpp.report.compare import comparison
from megacpp.report.data import gather
from megacpp.report.page import page
from tests.report.test_page import folder as folder

BROWSER = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), ""
)
FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-sync "
    "--disable-background-networking --disable-component-update --disable-dev-shm-usage"
).split()
# A page of the width of a telephone is a frame in a page: a window can't be made that narrow.
LOOK = """<!doctype html><body><script>
const found = [];
const look = async (width, text) => {
  const frame = document.createElement('iframe');
  frame.style.cssText = `width:${width}px;height:900px;border:0`;
  document.body.append(frame);
  const inside = frame.contentWindow, errors = [];
  inside.addEventListener('error', e => errors.push(e.message));
  inside.document.open(); inside.document.write(text); inside.document.close();
  inside.addEventListener('error', e => errors.push(e.message));
  const root = inside.document.documentElement;
  const wide = [...inside.document.querySelectorAll('body *')].filter(e =>
    e.getBoundingClientRect().right > width + 1 && !e.closest('.scroll'));
  const input = inside.document.querySelector('.smooth input');
  const line = inside.document.querySelector('.line'), before = line.getAttribute('points');
  const shown = !input.closest('.smooth').hidden;
  input.dispatchEvent(new inside.Event('input'));
  const same = line.getAttribute('points').split(/[ ,]/).every(
    (x, i) => Math.abs(x - before.split(/[ ,]/)[i]) <= 0.11);
  input.value = 0;
  input.dispatchEvent(new inside.Event('input'));
  const numbers = text => text.split(/[ ,]/).map(Number).join();
  const raw = numbers(inside.document.querySelector('.raw').getAttribute('points'))
    == numbers(line.getAttribute('points'));
  found.push({width, scroll: root.scrollWidth, client: root.clientWidth, errors, shown, same, raw,
    wide: wide.map(e => e.outerHTML.slice(0, 90))});
};
(async () => {
  for (const text of PAGES) for (const width of [420, 800, 1400]) await look(width, text);
  const said = document.createElement('pre');
  said.id = 'found'; said.textContent = JSON.stringify(found);
  document.body.replaceChildren(said);
})();
</script>"""


@pytest.mark.skipif(not BROWSER, reason="no chromium is installed")
def test_nothing_overflows_and_no_script_fails(folder: Path, tmp_path: Path) -> None:
    other = tmp_path / "a-run-with-a-name-that-is-long-enough-to-be-wide/run"
    shutil.copytree(folder, other)
    launch = json.loads((other / "launch.json").read_text())
    launch["config"]["optim"]["lr"] = 0.5
    (other / "launch.json").write_text(json.dumps(launch))
    runs = [gather(folder), gather(other)]
    pages = json.dumps([page(runs[0]), comparison(runs)]).replace("<", "\\u003c")
    (tmp_path / "look.html").write_text(LOOK.replace("PAGES", pages))
    done = subprocess.run(
        [
            BROWSER,
            *FLAGS,
            f"--user-data-dir={tmp_path / 'user'}",
            "--window-size=1500,1000",
            "--virtual-time-budget=10000",
            "--dump-dom",
            (tmp_path / "look.html").as_uri(),
        ],
        capture_output=True,
        text=True,
        timeout=120,
    )
    text = re.search(r'<pre id="found">(.*?)</pre>', done.stdout, re.S)
    assert text is not None, done.stderr[-2000:]
    found = json.loads(html.unescape(text[1]))
    assert [one["width"] for one in found] == [420, 800, 1400] * 2
    for one in found:
        assert one["scroll"] <= one["client"], one
        assert not one["wide"] and not one["errors"], one
        assert one["shown"], "the script ran to its end"
        assert one["same"], "the script smooths as the page was drawn"
        assert one["raw"], "without smoothing the line is its values"
