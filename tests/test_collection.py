"""Tests are collected where only torch and the core packages are: a GPU's image has no more."""

from __future__ import annotations

import ast
import tomllib
from pathlib import Path

import pytest

from tests.conftest import SAMPLED, of_part
from tests.together import Together

ROOT = Path(__file__).parents[1]
# Modules of packages whose names differ.
MODULES = {"pyyaml": "yaml", "lm-eval": "lm_eval", "transformer-engine": "transformer_engine"}
PACKAGED = {"pytest", "packaging"}  # what runs the tests, and what it brings


def optional() -> set[str]:
    """Modules of the packages that only an extra installs."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    core = {name_of(words) for words in project["dependencies"]}
    extras = {name_of(w) for words in project["optional-dependencies"].values() for w in words}
    return {MODULES.get(n, n.replace("-", "_")) for n in extras - core} - PACKAGED - {"megacpp"}


def name_of(requirement: str) -> str:
    for end in "[<>=! ;":
        requirement = requirement.partition(end)[0]
    return requirement


def imported_at_once(text: str) -> set[str]:
    """Modules that a file imports when it is collected, those of `if` and `with` left out."""
    found = set()
    for node in ast.parse(text).body:
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add((node.module or "").partition(".")[0])
    return found


def test_no_test_imports_an_optional_package_when_it_is_collected() -> None:
    names = optional()
    assert names >= {"transformers", "yaml", "mamba_ssm", "triton"}
    for path in sorted((ROOT / "tests").glob("**/test_*.py")):
        wrong = imported_at_once(path.read_text()) & names
        assert not wrong, f"{path.relative_to(ROOT)}: {wrong}: use pytest.importorskip"


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("import yaml", {"yaml"}),
        ("from transformers.models import x", {"transformers"}),
        ('x = pytest.importorskip("yaml")', set()),
        ("def f():\n    import yaml", set()),
    ],
)
def test_imports_are_seen(text: str, found: set[str]) -> None:
    assert imported_at_once(text) == found


def test_no_extra_and_no_pin_brings_flash_linear_attention() -> None:
    """On a machine without a GPU transformers' own layers prefer its kernels, and fail."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = [w for words in extras["optional-dependencies"].values() for w in words]
    lines += [*extras["dependencies"], *(ROOT / "constraints.txt").read_text().split()]
    names = {name_of(line).lower().replace("_", "-") for line in lines}
    assert {"transformers", "torch"} <= names
    assert not names & {"fla", "fla-core", "flash-linear-attention"}


def test_parts_have_each_test_once() -> None:
    tests = [f"{folder}test_x.py::test_y{n}" for folder in SAMPLED[:1] for n in range(300)]
    short = "tests/test_words.py::test_x"
    parts = [of_part([*tests, short], f"{k}/6") for k in range(6)]
    assert all(len(part) == 51 and short in part for part in parts)
    assert set.union(*parts) == of_part([*tests, short], "0/1") == {*tests, short}


def test_tests_of_one_case_are_in_one_part() -> None:
    tests = [f"{SAMPLED[0]}test_x.py::test_{x}[{n}-a]" for x in "yz" for n in range(12)]
    parts = [of_part(tests, f"{k}/6") for k in range(6)]
    assert [len({test.partition("[")[2] for test in part}) for part in parts] == [2] * 6
    assert all(len(part) == 4 for part in parts) and set.union(*parts) == set(tests)


def test_what_is_sampled_exists() -> None:
    assert all((ROOT / name).exists() for name in SAMPLED)


@pytest.mark.parametrize("case", [1, 2])
def test_results_of_chosen_cases_are_made_together(case: int) -> None:
    """Once, with what they are compared with; a case that no test was chosen of is made alone."""
    made: list[list[int]] = []

    def make(cases: list[int]) -> dict[int, int]:
        made.append(cases)
        return {case: 10 * case for case in cases}

    results = Together(__name__, [1, 2, 3], make, lambda case: [-case])  # 3 is of no test
    assert results[case] == 10 * case and results[-case] == -10 * case and results[3] == 30
    assert made[0][0] == case and -case in made[0] and 3 not in made[0] and made[1:] == [[3, -3]]
