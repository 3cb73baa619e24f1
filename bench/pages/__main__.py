"""Build the interactive pages: `python -m bench.pages [--write] [NAME ...]`."""

from __future__ import annotations

from bench import asked
from bench.pages.build import FOLDER, PAGES, page

if __name__ == "__main__":
    names, write = asked(__doc__, list(PAGES))
    for name in names:
        text = page(name)
        if write:
            FOLDER.mkdir(exist_ok=True)
            (FOLDER / f"{name}.html").write_text(text)
        print(f"{name}: {len(text):,} characters")
