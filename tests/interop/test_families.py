"""Page of the families: every model of the tests is in it, its figures within the bounds."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytest.importorskip("transformers")

from megacpp.interop.compare import WITHIN
from tests.interop.families import PAGE, FamilyFigures, figures_in, figures_out, models_of


def test_the_page_has_every_class_and_model_within_the_bounds() -> None:
    page = PAGE.read_text()
    assert re.search(r"^Run \d{4}-\d\d-\d\d, [0-9a-f]{7}\n\n\| class \|", page, re.M)
    lines = [line for line in page.splitlines() if line.startswith("|") and "ForCausalLM" in line]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert [(kind.removesuffix("ForCausalLM"), way) for kind, way, *_ in cells] == list(models_of())
    for (_, names), (_, _, models, logits, loss, argmax, equal) in zip(
        models_of().items(), cells, strict=True
    ):
        assert models.split(", ") == names
        assert float(logits) <= WITHIN and float(loss) <= WITHIN and argmax == "yes"
        assert equal in ("yes", "all but deepseek_v3_halves")


@pytest.mark.parametrize(
    ("figures", "name"), [(figures_in, "qwen2"), (figures_out, "qwen2"), (figures_out, "memories")]
)
def test_a_row_is_measured(figures: object, name: str, tmp_path: Path) -> None:
    found = figures(name, tmp_path)  # type: ignore[operator]
    assert isinstance(found, FamilyFigures)
    assert max(found[:2]) <= WITHIN and found.argmax and found.equal
    assert found.logits > 0 or name == "memories"  # our code there may round alike
