"""Cost of importing train.py, against importing torch alone.

    python bench/imports.py [--rounds 7]

Each round is a fresh process of either kind; the ratio is the median of the rounds' own. A first
round isn't counted: it leaves compiled files, as any first run does.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
PROBE = (
    "import time, resource; t = time.process_time(); import {module}; "
    "print(time.process_time() - t, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)"
)


def main() -> None:
    """Run the benchmark from the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=7, help="processes of each kind (default 7)")
    rounds = parser.parse_args().rounds
    seconds: dict[str, list[float]] = {"torch": [], "train": []}
    memory: dict[str, float] = {}
    env = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    for number in range(rounds + 1):
        for module, taken in seconds.items():
            done = subprocess.run(
                [sys.executable, "-c", PROBE.format(module=module)],
                cwd=ROOT,
                env=env,
                capture_output=True,
                text=True,
                check=True,
            )
            cpu_s, mib = map(float, done.stdout.split())
            if number:
                taken.append(cpu_s)
                memory[module] = mib
    median = {module: statistics.median(taken) for module, taken in seconds.items()}
    for module in seconds:
        print(f"import {module:6} {median[module]:.3f} CPU s  {memory[module]:.0f} MiB")
    ratios = [b / a for a, b in zip(seconds["torch"], seconds["train"], strict=True)]
    print(f"ratio         {statistics.median(ratios):.3f}")


if __name__ == "__main__":
    main()
