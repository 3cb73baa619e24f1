"""Each pack as a child process: what it says about the versions that are installed.

A pack reproduces an upstream defect by itself, so that it can be sent upstream as it is. Two ask
an installed TileLang, and which sentinel a version gives is a table; a version without a row
fails, so that an upgrade looks at it. The others model a Megatron-LM defect in a few lines and
show both sides. What the defects would be in our own code: test_ours.py.
"""

from __future__ import annotations

import ast
import functools
import importlib.metadata as metadata
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
PACKS = {path.name[5:7]: path for path in sorted(HERE.glob("pack_*.py"))}
TIMEOUT_S = 300
FIRES, FELL_BACK, HOLDS = "BUG FIRES", "FELL BACK", "FIX HOLDS"
EXIT = {FIRES: 1, FELL_BACK: 3, HOLDS: 0}

# Release: (sentinel, words of its line). All run without a GPU, apache-tvm-ffi 0.1.9 to 0.1.12.
BULK_COPY = {
    # #746 lets a copy fall back, but a swizzled layout still had to have two dimensions.
    "0.1.8": (FIRES, "(shared_layout->InputDim() == 2)"),
    # Loads became plain copies unless asked for, and there was no way to ask yet (#2401).
    "0.1.9": (FELL_BACK, "[C, R, N] has 0 of 1"),
    "0.1.10": (FELL_BACK, "[C, R, N] has 0 of 1"),
    # Asked for; a swizzled view falls back in silence.
    "0.1.11": (FELL_BACK, "MIMO, views [C, R, N] and [C, R, R] has 0 of 2"),
    "0.1.12": (HOLDS, "3 of 3"),
    "0.1.13": (HOLDS, "3 of 3"),
    "0.1.14": (HOLDS, "3 of 3"),
    "0.1.15": (HOLDS, "3 of 3"),
}
FLOORMOD = {
    **{f"0.1.{n}": (FIRES, "bias[csr % R] at N=48 divides by zero") for n in (8, 9, 10, 11)},
    # #2469 ended the division; the loop found no layout until 0.1.14 (#2398, #2883 are near it).
    **{f"0.1.{n}": (FIRES, "no available layout found") for n in (12, 13)},
    **{f"0.1.{n}": (HOLDS, "every form compiles") for n in (14, 15)},
}
BY_TILELANG = {"08": BULK_COPY, "13": FLOORMOD}
BOTH_SIDES = ("10", "11", "12", "16")


def tilelang() -> str | None:
    try:
        return metadata.version("tilelang")
    except metadata.PackageNotFoundError:
        return None


@functools.cache
def play(number: str) -> tuple[int, list[str]]:
    """Exit code and lines of a pack, started elsewhere than in the repository."""
    done = subprocess.run(
        [sys.executable, str(PACKS[number])],
        capture_output=True, text=True, cwd="/", timeout=TIMEOUT_S, check=False,
    )  # fmt: skip
    lines = done.stdout.splitlines()
    assert lines, done.stderr
    return done.returncode, lines


def sentinels(number: str) -> dict[str, str]:
    """The lines of a pack that say how it went, by what they say."""
    found: dict[str, str] = {}
    for line in play(number)[1]:
        for word in EXIT:
            if line.startswith(f"PACK {number} {word}: "):
                assert word not in found, f"twice: {line}"
                found[word] = line
    return found


def test_there_are_six() -> None:
    assert set(PACKS) == {*BY_TILELANG, *BOTH_SIDES}


@pytest.mark.parametrize("number", PACKS)
def test_a_pack_needs_nothing_of_ours(number: str) -> None:
    allowed = {"__future__", "torch", "tilelang", *sys.stdlib_module_names}
    for node in ast.walk(ast.parse(PACKS[number].read_text())):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0
            names = [node.module or ""]
        assert {name.split(".")[0] for name in names} <= allowed


@pytest.mark.parametrize("number", PACKS)
def test_the_first_line_is_the_host(number: str) -> None:
    first = play(number)[1][0]
    assert first.startswith(("host: no GPU, ", "host: capability "))
    assert f"torch {metadata.version('torch')}" in first
    if number in BY_TILELANG and tilelang():
        assert f"tilelang {tilelang()}" in first and "apache-tvm-ffi" in first


@pytest.mark.parametrize("number", BY_TILELANG)
def test_tilelang_does_what_this_version_is_known_for(number: str) -> None:
    version = tilelang()
    if version is None:
        code, lines = play(number)
        assert code == 77 and lines[1] == "SKIPPED: tilelang isn't installed"
        pytest.skip(lines[1])
    table = BY_TILELANG[number]
    assert version in table, f"tilelang {version}: run {PACKS[number].name} and add its row"
    sentinel, words = table[version]
    found = sentinels(number)
    assert list(found) == [sentinel], play(number)[1]
    assert words in found[sentinel]
    assert play(number)[0] == EXIT[sentinel]


@pytest.mark.parametrize("number", BOTH_SIDES)
def test_the_defect_and_its_repair(number: str) -> None:
    assert list(sentinels(number)) == [FIRES, HOLDS], play(number)[1]
    assert play(number)[0] == 0


@pytest.mark.parametrize("number", BY_TILELANG)
def test_without_tilelang_a_pack_says_so(number: str) -> None:
    hide = (
        "import importlib.metadata as m, runpy, sys\n"
        "of = m.version\n"
        "def version(name):\n"
        "    if name == 'tilelang': raise m.PackageNotFoundError(name)\n"
        "    return of(name)\n"
        "m.version = version\n"
        "runpy.run_path(sys.argv[1], run_name='__main__')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", hide, str(PACKS[number])],
        capture_output=True, text=True, timeout=TIMEOUT_S, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout.splitlines()[1:]) == (
        77,
        ["SKIPPED: tilelang isn't installed"],
    )
