"""Folder, corpus and commands of attacks on small runs."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.launch import ROOT
from tests.test_run import ADAMW, SMALL


class Yard:
    """Folder and corpus of the attacks.

    Args:
        folder: empty folder.
        seed: of random attacks.
        minutes: time for all of them.
    """

    def __init__(self, folder: Path, seed: int, minutes: float) -> None:
        self.folder, self.rng, self.minutes = folder, random.Random(seed), minutes
        self.env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        source = folder / "texts.jsonl"
        texts = [
            "".join(f"int f{i}_{j}(int a) {{ return a + {j}; }}\n" for j in range(9))
            for i in range(300)
        ]
        source.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
        out = ["--out", str(folder / "corpus"), "--vocab-size", "400"]
        self.call("-m", "megacpp", "data", "prepare", str(source), *out)

    def call(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Run Python in the checkout, to its end."""
        return subprocess.run(
            [sys.executable, *words], cwd=ROOT, env=self.env, text=True, capture_output=True
        )

    def flags(self, name: str, *more: str, small: Sequence[str] = (*SMALL, *ADAMW)) -> list[str]:
        """Return the flags of a small run, or one of another size, in a folder of its own."""
        own = ["--data.path", str(self.folder / "corpus"), "--run.dir", str(self.folder / name)]
        own += [
            "--train.device-batch-size",
            "1",
            "--memory.calibration=",
            "--run.tensorboard=false",
        ]
        return ["tiny", *small, *own, *more]

    def start(
        self, ranks: int, script: str, *words: str, restarts: int = 0
    ) -> subprocess.Popen[bytes]:
        """Start a command under torchrun; nobody reads what it prints."""
        return subprocess.Popen(
            self.under(ranks, script, *words, restarts=restarts),
            cwd=ROOT,
            env=self.env,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

    def under(self, ranks: int, script: str, *words: str, restarts: int = 0) -> list[str]:
        """Return a command under torchrun."""
        agent = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        return [sys.executable, *agent, f"--max-restarts={restarts}", script, *words]
