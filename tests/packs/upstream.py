"""State of the defects of packs 10, 11, 12 and 16 in releases of megatron-core, from its sources.

    python -m tests.packs.upstream            look at the newest: exit 1 if a pack is out of date
    python -m tests.packs.upstream --write    and store what was found (upstream.json)

A wheel is downloaded without what it requires, and read without importing it: the code that each
pack models is counted by a pattern. An installed megatron-core is read in the same way.
"""

from __future__ import annotations

import argparse
import importlib.metadata as metadata
import json
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

PACKAGE = "megatron-core"
STORED = Path(__file__).with_name("upstream.json")
Read = Callable[[str], str | None]


@dataclass(frozen=True)
class Defect:
    """Place of a defect in Megatron's sources.

    Attributes:
        file: path in the package.
        pattern: occurs in the file while the defect is there.
        repair: occurs in the file when it is repaired; "": nothing marks the repair.
    """

    file: str
    pattern: str
    repair: str = ""


DEFECTS = {
    "10": Defect(
        "megatron/core/fusions/fused_linear_cross_entropy.py",
        r"Unsupported architecture",
        r"capability.*\b9\b|== 9\b",
    ),
    "11": Defect(
        "megatron/core/models/mamba/mamba_model.py",
        r"self\.output_layer\(",
        r"linear_cross_entropy|LinearCrossEntropy",
    ),
    "12": Defect(
        "megatron/core/transformer/experimental_attention_variant/dsa.py",
        r"einsum\(\s*['\"]sbhd,tbd->sbht",
    ),
    "16": Defect(
        "megatron/core/transformer/module.py",
        r"module\.(bfloat16|half)\(\)",
        r"keep_in_fp32|fp32_param|_keep_fp32",
    ),
}


def state(read: Read) -> dict[str, str]:
    """Return each pack's state: `absent` (no such file), `there`, `repaired` or `changed`.

    Args:
        read: text of a file of the package, None if there is no such file.
    """
    found = {}
    for number, defect in DEFECTS.items():
        text = read(defect.file)
        if text is None:
            found[number] = "absent"
        elif defect.repair and re.search(defect.repair, text):
            found[number] = "repaired"
        else:
            found[number] = "there" if re.search(defect.pattern, text) else "changed"
    return found


def installed() -> tuple[str, Read] | None:
    """Return version and reader of an installed megatron-core."""
    try:
        package = metadata.distribution(PACKAGE)
    except metadata.PackageNotFoundError:
        return None

    def read(name: str) -> str | None:
        path = Path(str(package.locate_file(name)))
        return path.read_text() if path.exists() else None

    return package.version, read


def of_wheel(path: Path) -> tuple[str, Read]:
    """Return version and reader of a wheel."""
    wheel = zipfile.ZipFile(path)
    names = set(wheel.namelist())
    return path.name.split("-")[
        1
    ], lambda name: wheel.read(name).decode() if name in names else None


def stored() -> dict[str, dict[str, str]]:
    """Return states by release, oldest first."""
    return json.loads(STORED.read_text())


def main(argv: list[str] | None = None) -> int:
    """Look at the newest release, or at a given wheel; return 1 if a pack is out of date."""
    parser = argparse.ArgumentParser("python -m tests.packs.upstream", description=__doc__)
    parser.add_argument("--write", action="store_true", help="store what was found")
    parser.add_argument("--wheel", type=Path, help="a wheel that is there instead of the newest")
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        if args.wheel is None:
            fetch = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
            done = subprocess.run(
                [*fetch, "--dest", folder, PACKAGE], capture_output=True, text=True
            )
            if done.returncode != 0:
                parser.error(f"no release of {PACKAGE} can be fetched: {done.stderr.strip()}")
        version, read = of_wheel(args.wheel or next(Path(folder).glob("*.whl")))
        found = state(read)
    before = stored()
    last = before.get(version) or list(before.values())[-1]
    changed = [number for number in DEFECTS if found[number] != last[number]]
    for number in DEFECTS:
        moved = f", was {last[number]}: look at the pack" if number in changed else ""
        print(f"{PACKAGE} {version} pack {number}: {found[number]}{moved}")
    if args.write:
        STORED.write_text(json.dumps(before | {version: found}, indent=2) + "\n")
    return 1 if changed else 0


if __name__ == "__main__":
    sys.exit(main())
