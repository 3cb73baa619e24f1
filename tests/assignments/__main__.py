"""Grades an answer: `python -m tests.assignments 3 [FILE]`, or `make assignment N=3`."""

from __future__ import annotations

import importlib.util
import shutil
import sys
from pathlib import Path
from types import ModuleType

from tests.assignments.grades import ASSIGNMENTS

ROOT = Path(__file__).parents[2]
STUBS, ANSWERS = ROOT / "docs/assignments", ROOT / "runs/assignments"


def load(path: Path) -> ModuleType:
    """Import an answer from its file."""
    spec = importlib.util.spec_from_file_location(f"answer_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def grade(number: int, answer: ModuleType) -> int:
    """Print one line per check; return how many failed."""
    failed = 0
    for check in ASSIGNMENTS[number][1]:
        about = (check.__doc__ or "").rstrip(".")
        try:
            check(answer)
        except NotImplementedError:
            failed, line = failed + 1, f"todo   {about}"
        except Exception as error:
            first = (str(error).strip().splitlines() or [""])[0]
            failed, line = failed + 1, f"FAILED {about}: {type(error).__name__}: {first}"
        else:
            line = f"ok     {about}"
        print(line)
    return failed


def main(words: list[str]) -> int:
    """Grade the answer to an assignment; copy its stub where there is none yet."""
    if not words or words[0] not in map(str, ASSIGNMENTS):
        numbers = ", ".join(map(str, ASSIGNMENTS))
        given = words[0] if words else ""
        print(f"error: N={given}: must be one of {numbers}. Fix: make assignment N=1.")
        return 2
    number = int(words[0])
    name = f"{ASSIGNMENTS[number][0]}.py"
    path = Path(words[1]) if len(words) > 1 else ANSWERS / name
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(STUBS / name, path)
    statement = next(STUBS.glob(f"{number}-*.md")).relative_to(ROOT)
    print(f"assignment {number}: {statement}, your answer: {path}")
    try:
        answer = load(path)
    except Exception as error:
        print(f"FAILED your answer can be imported: {type(error).__name__}: {error}")
        return 1
    return min(1, grade(number, answer))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
