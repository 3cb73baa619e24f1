"""Refresh requirements.json from a plain package index: `python -m tests.install.requirements`.

For every pin, every supported torch (the CUDA build that the index has for Linux) and its Triton:
the Python versions and packages that it requires. pip reads them; it downloads no wheel of an index
that serves metadata by itself.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from megacpp.versions import TRITON

ROOT = Path(__file__).parents[2]
SOURCE_ONLY = ("rouge-score", "sqlitedict", "word2number")  # of lm-eval; pure Python
STORED = Path(__file__).with_name("requirements.json")


def pins() -> dict[str, str]:
    """Versions in constraints.txt by package name."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return dict(line.split("==") for line in lines if "==" in line)


def required(packages: list[str]) -> dict[str, dict[str, object]]:
    """What each `name==version` requires, by the metadata of its wheel for Linux."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        words = "install --quiet --dry-run --ignore-installed --no-deps --only-binary :all:".split()
        words += ["--no-binary", ",".join(SOURCE_ONLY)]
        command = [sys.executable, "-m", "pip", "--isolated", *words, "--report", str(report)]
        subprocess.run([*command, *packages], check=True)
        found = [item["metadata"] for item in json.loads(report.read_text())["install"]]
    return {
        f"{one['name']}=={one['version']}": {
            "python": one.get("requires_python", ""),
            "requires": [r for r in one.get("requires_dist", []) if "extra ==" not in r],
        }
        for one in found
    }


def main() -> None:
    packages = required([f"{name}=={version}" for name, version in pins().items()])
    for torch, triton in TRITON.items():
        packages |= required([f"torch=={torch}", f"triton=={triton}"])
    content = {"taken": time.strftime("%Y-%m-%d"), "packages": packages}
    STORED.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
