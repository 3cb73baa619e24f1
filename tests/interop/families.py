"""Table of the families that leave and come in, from the tests' own models; `--write` redoes it.

python -m tests.interop.families --write
"""

from __future__ import annotations

import contextlib
import io
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from megacpp.cli.main import main
from megacpp.interop.compare import load_model, our_logits
from megacpp.interop.places import locate, read_model
from megacpp.launch.record import git_commit
from megacpp.state.tensors import model_tensors
from tests.interop import test_code
from tests.interop.models import CASES, built, final_folder, model_of
from tests.interop.test_import import FOLDERS, IDS, saved, tensors, transformers

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "families.md"
HEAD = f"""# Families of Hugging Face

<!-- made by python -m tests.interop.families --write -->

Each row is a class of transformers and the models that the tests send through it: out of a run
and back (`out`), and from a folder that transformers saved (`in`). Of all models of a row the
largest differences in fp32 on a CPU: of logits, relative to the largest one, and of the loss, in
nats. `equal bytes`: what comes back is equal, bit for bit. Models are small and random, with biases
and norms that aren't constant (transformers {transformers.__version__}). `deepseek_v3_halves` comes
back with its rotary rows in pairs, the class's default. `MegacppForCausalLM` is a folder with our
code, for models that no class expresses; [its test](../../tests/interop/test_code.py) also asks
for equal tokens and gradients.

{{mark}}

| class | way | models | logits | loss | argmax | equal bytes |
| --- | --- | --- | --- | --- | --- | --- |
"""


class FamilyFigures(NamedTuple):
    """Figures of one model: differences of logits and loss, equal argmax, equal bytes."""

    logits: float
    loss: float
    argmax: bool
    equal: bool


def figures_out(name: str, folder: Path) -> FamilyFigures:
    """Return the figures of a model of ours in transformers, and of its way back.

    Args:
        name: in CASES, or in those of folders with code.
        folder: empty folder.
    """
    code = name in test_code.CASES
    out = folder / name  # transformers keeps code by the name of its folder
    model = built((test_code.model_of if code else model_of)(name))
    _export(final_folder(folder / "run", model), out, "hf-code" if code else "hf")
    how = {"trust_remote_code": True} if code else {"attn_implementation": "eager"}
    auto = transformers.AutoModelForCausalLM
    theirs = auto.from_pretrained(out, dtype=torch.float32, **how)
    place = locate(str(out), "run")
    back, first = model_tensors(load_model(place, model.config)), model_tensors(model)
    equal = all(torch.equal(t, first[key]) for key, t in back.items())
    return _figures(model, theirs.eval(), equal)


def figures_in(name: str, folder: Path) -> FamilyFigures:
    """Return the figures of a model of transformers here, and of its way back.

    Args:
        name: in FOLDERS.
        folder: empty folder.
    """
    theirs = saved(name, folder / "hf")
    place = locate(str(folder / "hf"), "from")
    ours = load_model(place, read_model(place))
    _export(final_folder(folder / "run", ours), folder / "out")
    written, first = tensors(folder / "out"), tensors(folder / "hf")
    same = written.keys() == first.keys()
    return _figures(ours, theirs, same and all(torch.equal(written[k], first[k]) for k in first))


def _export(final: Path, out: Path, to: str = "hf") -> None:
    with contextlib.redirect_stdout(io.StringIO()):
        words = ["export", str(final), "--out", str(out), "--dtype", "fp32", "--to", to]
        assert main(words) == 0


@torch.no_grad()
def _figures(ours: Any, theirs: Any, equal: bool) -> FamilyFigures:
    here, there = our_logits(ours, IDS), theirs(IDS).logits
    most = ((here - there).abs().max() / there.abs().max()).item()
    loss = abs(_loss(here) - _loss(there))
    return FamilyFigures(most, loss, bool((here.argmax(-1) == there.argmax(-1)).all()), equal)


def _loss(logits_BTV: Tensor) -> float:
    logits_BTV = logits_BTV.double()  # the rounding of a sum isn't a difference
    return F.cross_entropy(logits_BTV[:, :-1].flatten(0, 1), IDS[:, 1:].flatten()).item()


def models_of() -> dict[tuple[str, str], list[str]]:
    """Return the models of each class and way."""
    found: dict[tuple[str, str], list[str]] = {}
    for way, models in (("out", CASES), ("in", FOLDERS)):
        for name, (kind, *_) in models.items():
            found.setdefault((kind, way), []).append(name)
    found["Megacpp", "out"] = list(test_code.CASES)
    return dict(sorted(found.items()))


def rows() -> Iterator[str]:
    """Yield the rows of the page."""
    for (kind, way), names in models_of().items():
        found = []
        for name in names:
            with tempfile.TemporaryDirectory() as folder:
                found.append((figures_out if way == "out" else figures_in)(name, Path(folder)))
        worst = [f"{max(f[i] for f in found):.0e}" for i in range(2)]
        flags = [_share([f[i] for f in found], names) for i in (2, 3)]
        yield f"| {' | '.join([f'{kind}ForCausalLM', way, ', '.join(names), *worst, *flags])} |"


def _share(flags: list[Any], names: list[str]) -> str:
    other = [name for flag, name in zip(flags, names, strict=True) if not flag]
    return f"all but {', '.join(other)}" if other else "yes"


if __name__ == "__main__":
    mark = f"Run {time.strftime('%Y-%m-%d')}, {(git_commit() or '')[:7]}"
    text = HEAD.format(mark=mark) + "\n".join(rows()) + "\n"
    if "--write" in sys.argv:
        PAGE.write_text(text)
    print(text)
