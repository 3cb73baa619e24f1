"""Resolve the project on a plain package index, as a table: `python -m tests.install.resolve`.

uv reads metadata only and resolves for a Python that isn't installed. Rows: what is asked for;
columns: Python; entries: number of packages. The pins of each torch are those of the Makefile.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
import tomllib
from pathlib import Path

from megacpp.versions import PYTHON, TORCH, TRITON, constraints
from tests.install.requirements import ROOT

PYTHONS = [f"3.{minor}" for minor in range(PYTHON[0][1], PYTHON[1][1] + 1)]


def resolve(extra: str, torch: str, python: str) -> str:
    """Number of packages, or the resolver's words."""
    from uv import find_uv_bin

    lines = [(ROOT / "constraints.txt").read_text(), *constraints(torch)]
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("UV_", "PIP_"))}
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as pins:
        pins.write("\n".join(lines))
        pins.flush()
        command = [find_uv_bin(), "pip", "compile", "--no-config", "--quiet", "--no-annotate"]
        command += ["--no-header", "-c", pins.name, "--python-version", python]
        command += ["--python-platform", "x86_64-manylinux_2_28", "pyproject.toml"]
        command += ["--extra", extra] if extra else []
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=clean)
    return done.stderr if done.returncode else str(len(done.stdout.splitlines()))


def main() -> None:
    project = tomllib.loads((Path(ROOT) / "pyproject.toml").read_text())["project"]
    print("| torch | asked for | " + " | ".join(PYTHONS) + " |")
    print("|---|---|" + "---|" * len(PYTHONS))
    rows = [(torch, extra) for torch in TRITON for extra in ("", "test")]
    rows += [(TORCH, extra) for extra in project["optional-dependencies"] if extra != "test"]
    for torch, extra in rows:
        found = [resolve(extra, torch, python) for python in PYTHONS]
        asked = f".[{extra}]" if extra else "."
        print(f"| {torch} | `{asked}` | " + " | ".join(found) + " |", flush=True)


if __name__ == "__main__":
    main()
