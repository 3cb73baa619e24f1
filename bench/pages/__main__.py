"""Build the interactive pages: `python -m bench.pages [--write]`."""

from __future__ import annotations

import sys

from bench.pages.build import FOLDER, PAGES, page

if __name__ == "__main__":
    for name in PAGES:
        text = page(name)
        if "--write" in sys.argv:
            FOLDER.mkdir(exist_ok=True)
            (FOLDER / f"{name}.html").write_text(text)
        print(f"{name}: {len(text):,} characters")
