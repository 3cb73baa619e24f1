"""What `make` installs, into which folder, with which pins; what it says of a wrong version."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

import pytest

from megacpp import versions

ROOT = Path(__file__).parents[2]


def make(*words: str) -> subprocess.CompletedProcess[str]:
    """Run make without the settings of a make that runs this test."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("MAKE", "MFLAGS", "TORCH"))}
    return subprocess.run(
        ["make", *words], cwd=ROOT, capture_output=True, text=True, env=clean, timeout=60
    )


def installs(tmp_path: Path, target: str) -> list[str]:
    """What pip would be asked for in a fresh clone."""
    done = make("--no-print-directory", "-n", target, f"VENV={tmp_path / 'venv'}")
    assert done.returncode == 0, done.stderr
    return re.findall(r"pip install .* -e '?(\S+?)'?$", done.stdout, re.M)


@pytest.mark.parametrize(
    ("target", "asked"),
    [
        ("setup", ["."]),
        ("train", ["."]),
        ("check", [".", ".[test]"]),
        ("test", [".", ".[test]"]),
        ("lint", [".", ".[test]", ".[lint]"]),
        ("kernels", [".", ".[kernels]"]),
    ],
)
def test_a_target_installs_what_it_needs(tmp_path: Path, target: str, asked: list[str]) -> None:
    assert installs(tmp_path, target) == asked


def test_another_torch_has_its_own_folder() -> None:
    plain, other = make("-n", "-B", "test").stdout, make("-n", "-B", "test", "TORCH=2.15.0").stdout
    assert ".venv/bin/python -m pytest" in plain and ".venv-" not in plain
    assert ".venv-2.15.0/bin/python -m pytest" in other and ".venv/" not in other


def test_the_fast_part_of_the_suite_touches_every_room() -> None:
    words = re.findall(r" tests/(\S+)", make("-n", "check").stdout)
    assert len(words) > 10 and all((ROOT / "tests" / word).exists() for word in words)
    rooms = "model data state memory launching run report parallel checkpointing optim"
    assert {word.partition("/")[0] for word in words} >= set(rooms.split())


def test_another_torch_runs_tests_that_exist() -> None:
    words = re.findall(r" tests/(\S+)", make("-n", "other-torch", "TORCH=2.11.0").stdout)
    assert len(words) >= 4
    for word in words:
        path, _, name = word.partition("::")
        assert f"def {name or 'test_'}" in (ROOT / "tests" / path).read_text(), word


def test_continuous_integration_takes_every_other_torch() -> None:
    script = (ROOT / ".ci" / "run").read_text()
    found = re.search(r"python -c '(.*)'", script[: script.index("make other-torch")])
    assert found
    done = subprocess.run(
        [sys.executable, "-c", found[1]], cwd=ROOT, capture_output=True, text=True
    )
    assert done.stdout.split() == sorted({*versions.TRITON} - {versions.TORCH}), done.stderr


def test_help_lists_every_target() -> None:
    listed = make("help").stdout
    phony = re.search(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.M)
    assert phony
    for target in phony[1].split():
        assert re.search(rf"^{target}\t \S", listed, re.M), target


@pytest.mark.parametrize(
    ("torch", "python", "said"),
    [
        ("2.10.0", (3, 11), r"^TORCH=2.10.0: must be one of 2.11.0, .* Fix: use TORCH=2.13.0\.$"),
        ("2.13.0", (3, 10, 2), r"^PYTHON=\S+: must be Python 3.11 to 3.14 \(it is 3.10\)\. Fix: "),
        ("2.13.0", (3, 15), r"^PYTHON=\S+: must be Python 3.11 to 3.14 \(it is 3.15\)\. Fix: "),
    ],
)
def test_another_version_is_refused(torch: str, python: tuple[int, ...], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        versions.constraints(torch, python)


def test_make_says_so_before_it_installs(tmp_path: Path) -> None:
    done = make("setup", "TORCH=1.9", f"VENV={tmp_path / 'venv'}", f"PYTHON={sys.executable}")
    assert done.returncode == 2 and not (tmp_path / "venv").exists()
    assert [line for line in done.stderr.splitlines() if line.startswith("error: ")] == [
        "error: TORCH=1.9: must be one of 2.11.0, 2.12.1, 2.13.0, 2.14.1, 2.15.0. "
        "Fix: use TORCH=2.13.0."
    ]


def test_an_old_python_reads_the_check() -> None:
    """Written for any Python 3, or the line that explains would be a SyntaxError."""
    source = (ROOT / "megacpp" / "versions.py").read_text()
    ast.parse(source, feature_version=(3, 6))
    assert re.findall(r"^ *(?:import|from) .*", source, re.M) == ["import sys"]


@pytest.mark.skipif(not find_spec("uv"), reason="uv is not installed")
@pytest.mark.skipif(
    int(metadata.version("setuptools").split(".")[0]) < 77, reason="setuptools 77 is not installed"
)
def test_uv_installs_and_runs_the_checkout(tmp_path: Path) -> None:
    """`uv pip install -e .` and `uv run` in a clone; dependencies are those that are here."""
    from uv import find_uv_bin

    clone, folder = tmp_path / "clone", tmp_path / "clone" / ".venv"
    for name in ("megacpp", "parallel", "optim", "checkpointing"):
        shutil.copytree(ROOT / name, clone / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, clone)

    def uv(*words: str) -> str:
        clean = {
            k: v
            for k, v in os.environ.items()
            if not k.startswith(("UV_", "VIRTUAL_ENV", "PYTHONPATH"))
        }
        command = [find_uv_bin(), *words]
        done = subprocess.run(command, cwd=clone, capture_output=True, text=True, env=clean)
        assert done.returncode == 0, done.stderr
        return done.stdout

    uv("venv", "--offline", "--python", sys.executable)
    packages = next(folder.glob("lib/python*/site-packages"))
    (packages / "shared.pth").write_text("\n".join(p for p in sys.path if "site-packages" in p))
    uv("pip", "install", "--offline", "--no-deps", "--no-build-isolation", "-e", ".")
    code = "import sys, megacpp, parallel, torch; print(megacpp.__file__, parallel.__file__)"
    found = uv("run", "--offline", "--no-sync", "python", "-P", "-c", code).split()
    assert found == [str(clone / name / "__init__.py") for name in ("megacpp", "parallel")]
    assert "megacpp" in uv("run", "--offline", "--no-sync", "megacpp", "--help")
