"""Picture of a run: parts of `train.py`, what each takes from which package, files written."""

from __future__ import annotations

import ast
import re
from functools import partial
from textwrap import wrap

from bench.architecture import ROOT, package_of
from bench.pictures.svg import Drawing
from bench.reference import FILES

wrapped = partial(wrap, break_long_words=False, break_on_hyphens=False)


def parts() -> list[tuple[str, list[tuple[str, str]]]]:
    """Return the parts of `train.py` by their headings: imported names that each uses first.

    A name comes with its module.
    """
    text = (ROOT / "train.py").read_text()
    modules = {}
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and node.module and package_of(node.module):
            modules |= {alias.name: node.module for alias in node.names}
    main = text.partition("def main(")[2]
    heads = re.split(r"\n    # -{4} (.*?) -+\n", main)
    found, seen = [], set()
    for title, body in zip(heads[1::2], heads[2::2], strict=True):
        words = re.findall(r"\w+", body.partition("\nif __name__")[0])
        used = [w for w in dict.fromkeys(words) if w in modules and w not in seen]
        seen.update(used)
        found.append((title.partition(":")[0], [(word, modules[word]) for word in used]))
    return found


def the_run() -> Drawing:
    """Draw the parts of a run from top to bottom, and the files of its folder beside them."""
    drawing = Drawing(
        760, "A run: parts of train.py, functions of the packages, files of the folder"
    )
    y, left, middle, right = 40.0, 14.0, 206.0, 540.0
    for x, words in ((left, "train.py"), (middle, "takes from"), (right, "run folder")):
        drawing.text(x, 24, words, "head")
    for number, (title, used) in enumerate(parts()):
        high = 18.0 * max(len(used), 2) + 8
        drawing.rect(left, y, 180, high, number)
        for i, line in enumerate(wrapped(title, 29)):
            drawing.text(left + 90, y + 18 + 16 * i, line, "in")
        for i, (name, module) in enumerate(used):
            drawing.text(middle, y + 16 + 18 * i, name)
            drawing.text(middle + 155, y + 16 + 18 * i, module.removeprefix("megacpp."), "note")
        if number:
            drawing.path([(left + 90, y - 10), (left + 90, y)], "line")
        y += high + 10
    folders: dict[str, list[str]] = {}
    for name in FILES:
        folder, slash, file = name.partition("/")
        folders.setdefault(folder + slash, []).append(file)
    y = 40.0
    for folder, files in sorted(folders.items(), key=lambda item: item[0].endswith("/")):
        drawing.text(right, y + 14, folder)
        for i, line in enumerate(wrapped(", ".join(filter(None, files)), 20) or [""]):
            y += 15 * (i > 0)
            drawing.text(right + 82, y + 14, line, "note")
        y += 17
    return drawing
