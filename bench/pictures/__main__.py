"""Draw all pictures: `python -m bench.pictures [--write] [NAME ...]`."""

from __future__ import annotations

import torch

from bench import asked
from bench.pictures.draw import FOLDER, PICTURES

if __name__ == "__main__":
    torch.set_num_threads(1)  # as in tests: how many there are decides how a CPU step allocates
    names, write = asked(__doc__, list(PICTURES))
    for name in names:
        text = PICTURES[name]().svg()
        if write:
            FOLDER.mkdir(exist_ok=True)
            (FOLDER / f"{name}.svg").write_text(text)
        print(f"{name}: {len(text):,} characters")
