"""Cases of Triton kernels in a process of their own: the interpreter is chosen at import."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
INTERPRETED = {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}


def run_cases(cases: str, *flags: str, interpreted: bool) -> None:
    """Run a file of cases in Triton's interpreter, or on a GPU; fail with what it prints."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-x", "-p", "no:cacheprovider", cases, *flags],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"} | (INTERPRETED if interpreted else {}),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def interpreted(module: str, *arguments: object) -> list[str]:
    """Run a module in Triton's interpreter; return the lines that it prints."""
    done = subprocess.run(
        [sys.executable, "-m", module, *map(str, arguments)],
        cwd=ROOT,
        env=os.environ | INTERPRETED,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout.splitlines()
