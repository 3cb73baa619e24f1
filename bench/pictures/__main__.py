"""Draws all pictures: `python -m bench.pictures [--write] [NAME ...]`."""

from __future__ import annotations

import sys

import torch

from bench.pictures.draw import FOLDER, PICTURES

if __name__ == "__main__":
    torch.set_num_threads(1)  # as in tests: how many there are decides how a CPU step allocates
    wanted = [word for word in sys.argv[1:] if not word.startswith("-")] or list(PICTURES)
    for name in wanted:
        text = PICTURES[name]().svg()
        if "--write" in sys.argv:
            FOLDER.mkdir(exist_ok=True)
            (FOLDER / f"{name}.svg").write_text(text)
        print(f"{name}: {len(text):,} characters")
