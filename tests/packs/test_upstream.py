"""Packs 10, 11, 12 and 16 against the sources of Megatron-LM that they model."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest

from tests.packs.upstream import DEFECTS, installed, main, state, stored


def test_each_pack_models_what_the_last_release_has() -> None:
    """A release in which one is repaired is looked at: the pack goes, or says so."""
    last = list(stored().values())[-1]
    assert last == {"10": "absent", "11": "there", "12": "there", "16": "there"}


def test_an_installed_release_is_as_stored() -> None:
    here = installed()
    if here is None:
        pytest.skip("megatron-core isn't installed")
    version, read = here
    assert version in stored(), f"megatron-core {version}: python -m tests.packs.upstream --write"
    assert state(read) == stored()[version]


@pytest.mark.parametrize(
    ("number", "text", "said"),
    [
        ("10", "raise ValueError(f'Unsupported architecture: {major}')", "there"),
        ("10", "if capability[0] == 9:", "repaired"),
        (
            "11",
            "logits = self.output_layer(x, output_cross_entropy_loss=LinearCrossEntropy)",
            "repaired",
        ),
        ("12", "index_scores = fused_scores(q, k, weights)", "changed"),
        ("16", "module.bfloat16(); restore(module, keep_in_fp32)", "repaired"),
    ],
)
def test_a_release_that_differs_is_an_error(
    number: str, text: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wheel = tmp_path / "megatron_core-9.9-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as made:
        made.writestr(DEFECTS[number].file, text)
    assert main(["--wheel", str(wheel)]) == 1
    lines = capsys.readouterr().out.splitlines()
    was = list(stored().values())[-1][number]
    assert f"megatron-core 9.9 pack {number}: {said}, was {was}: look at the pack" in lines
