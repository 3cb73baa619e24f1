"""The pins resolve on a plain index, whichever supported torch and Python; nothing is downloaded.

requirements.json has what each pin and torch's CUDA builds require (refreshed by
`python -m tests.install.requirements`). A CPU build requires no Triton, so an installation with one
can't show that a pin conflicts.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterator, Mapping

import pytest
from packaging.markers import Marker
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

from megacpp import versions
from tests.install.requirements import ROOT, STORED, pins

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PYTHONS = ["3.11", "3.12", "3.13", "3.14"]
PACKAGES = {
    (canonicalize_name(name), version): content
    for key, content in json.loads(STORED.read_text())["packages"].items()
    for name, version in [key.split("==")]
}


def pinned(torch: str) -> dict[str, str]:
    """Versions that `make TORCH=…` fixes, by canonical name."""
    fixed = dict(line.split("==") for line in versions.constraints(torch, (3, 11)))
    return {canonicalize_name(name): version for name, version in (pins() | fixed).items()}


def applies(marker: Marker | None, python: str) -> bool:
    """Whether a requirement counts on Linux and that Python, without extras."""
    here = {"python_version": python, "python_full_version": f"{python}.0", "extra": ""}
    linux = {"platform_system": "Linux", "sys_platform": "linux", "platform_machine": "x86_64"}
    return marker is None or marker.evaluate(here | linux)


def conflicts(fixed: Mapping[str, str], python: str) -> Iterator[str]:
    """Requirements of pinned packages that another pin, or the Python, doesn't meet."""
    for name, version in fixed.items():
        package = PACKAGES[name, version]
        if not SpecifierSet(package["python"]).contains(f"{python}.0"):
            yield f"{name}=={version} requires Python {package['python']}"
        for requirement in map(Requirement, package["requires"]):
            pin = fixed.get(canonicalize_name(requirement.name))
            met = pin is None or requirement.specifier.contains(pin, prereleases=True)
            if applies(requirement.marker, python) and not met:
                yield f"{name}=={version} requires {requirement}, the pin is {pin}"


@pytest.mark.parametrize("torch", versions.TRITON)
def test_every_pin_has_stored_requirements(torch: str) -> None:
    missing = [pin for pin in pinned(torch).items() if pin not in PACKAGES]
    assert not missing, "run: python -m tests.install.requirements"


@pytest.mark.parametrize("python", PYTHONS)
@pytest.mark.parametrize("torch", versions.TRITON)
def test_pins_resolve(torch: str, python: str) -> None:
    assert not list(conflicts(pinned(torch), python))


@pytest.mark.parametrize(
    ("torch", "name", "version", "said"),
    [
        ("2.13.0", "triton", "3.6.0", "torch==2.13.0 requires triton==3.7.1"),
        ("2.15.0", "triton", "3.7.1", "torch==2.15.0 requires triton~=3.9.0"),
        ("2.13.0", "sympy", "1.12", "torch==2.13.0 requires sympy>=1.13.3"),
    ],
)
def test_a_conflict_is_found(
    torch: str, name: str, version: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(PACKAGES, (name, version), {"python": "", "requires": []})
    found = list(conflicts(pinned(torch) | {name: version}, "3.12"))
    assert any(line.startswith(said) and line.endswith(version) for line in found), found


@pytest.mark.parametrize("torch", versions.TRITON)
def test_the_project_and_its_extras_agree_with_the_pins(torch: str) -> None:
    fixed = pinned(torch)
    extras = PROJECT["optional-dependencies"]
    every = [*PROJECT["dependencies"], *(line for extra in extras.values() for line in extra)]
    for requirement in map(Requirement, every):
        pin = fixed.get(canonicalize_name(requirement.name))
        assert pin is None or requirement.specifier.contains(pin), f"{requirement}: pinned {pin}"
    for name in ("core", "test", "lint"):  # what make installs is pinned to its last package
        lines = PROJECT["dependencies"] if name == "core" else extras[name]
        named = {canonicalize_name(Requirement(line).name) for line in lines} - {"megacpp"}
        assert named <= set(fixed), name


def test_bounds_are_those_that_are_stated() -> None:
    supported = SpecifierSet(PROJECT["requires-python"])
    oldest, newest = versions.PYTHON
    assert [f"3.{minor}" for minor in range(oldest[1], newest[1] + 1)] == PYTHONS
    assert not supported.contains(f"3.{oldest[1] - 1}.9")
    assert not supported.contains(f"3.{newest[1] + 1}.0")
    assert all(supported.contains(f"{python}.0") for python in PYTHONS)
    assert set(versions.TESTED_PYTHON) <= set(PYTHONS)
    assert {*versions.TESTED_TORCH, versions.TORCH} <= set(versions.TRITON)
    floor = next(Requirement(d) for d in PROJECT["dependencies"] if d.startswith("torch"))
    assert floor.specifier.contains(next(iter(versions.TRITON)))
    assert not floor.specifier.contains("2.10.0")
