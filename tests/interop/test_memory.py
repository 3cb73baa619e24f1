"""Export and import hold files, not models: peak of anonymous memory in a process of its own."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megacpp.config.schema import MeshConfig
from megacpp.interop.load import AT_ONCE, load_weights, open_source
from megacpp.interop.places import locate, read_model
from megacpp.model.hybrid import HybridLM
from megacpp.model.init import initialise
from megacpp.state.checkpoint import save_checkpoint
from megacpp.state.export import export_weights
from megacpp.state.tensors import model_tensors
from parallel.build import build_model, local_part
from tests.interop.models import tokenizer
from tests.model.small import small
from tests.ranks import run_ranks
from tests.state.meshes import config_of, world_of

ROOT = Path(__file__).parents[2]
FILE_BYTES = 8_000_000
# What a process uses at most beyond what it had before `work`, sampled every millisecond.
SAMPLED = """
import sys, threading, time, torch
from pathlib import Path
from megacpp.cli.main import main
from megacpp.interop import export, load, places, compare
from megacpp.model.hybrid import HybridLM
import megacpp.interop.tokenizer, tokenizers

def anonymous():
    with open("/proc/self/status") as file:
        return 1024 * next(int(x.split()[1]) for x in file if x.startswith("RssAnon"))

def peak(work):
    most, done, before = [0], threading.Event(), anonymous()
    def watch():
        while not done.is_set():
            most[0] = max(most[0], anonymous() - before)
            time.sleep(0.001)
    thread = threading.Thread(target=watch)
    thread.start()
    work()
    done.set()
    thread.join()
    return most[0]
"""
EXPORT = """
words = ["export", sys.argv[1], "--out", sys.argv[2], "--dtype", "fp32", "--file-gb", sys.argv[3]]
print(peak(lambda: main(words)))
"""
IMPORT = """
place = places.locate(sys.argv[1], "")
config = places.read_model(place)
model = compare.empty_model(config, "cpu", torch.float32)
for p in model.parameters():
    p.data.fill_(1)  # its pages are there before the weights come
print(peak(lambda: load.load_weights(model, load.open_source(place, config))))
"""


def measured(code: str, *words: str) -> int:
    done = subprocess.run(
        [sys.executable, "-c", SAMPLED + code, *words],
        cwd=ROOT,
        # Freed tensors go back to the system at once: glibc otherwise learns to keep them.
        env={**os.environ, "MALLOC_MMAP_THRESHOLD_": "131072"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return int(done.stdout.split()[-1])


@pytest.fixture(scope="module")
def final(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("wide")
    base = small("AF" * 6, dim=512, vocab_size=300)
    model = HybridLM(
        dataclasses.replace(
            base,
            attention=dataclasses.replace(base.attention, head_dim=128),
            mlp=dataclasses.replace(base.mlp, hidden_dim=2000),
        )
    )
    initialise(model, model.init_rules(), 1)
    tokenizer().save(home / "tokenizer.json")
    export_weights(model, home / "final", model.config, beside=[home / "tokenizer.json"])
    return home / "final"


@pytest.fixture(scope="module")
def checkpoint(final: Path) -> Path:
    """Return the same weights as four ranks save them, each its part of a tensor."""
    mesh = MeshConfig(dp_shard=2, tp=2)
    folder, model = final.parent / "checkpoints", read_model(locate(str(final), ""))
    config = config_of(mesh, model)

    def body(rank: int, world: int) -> None:
        there = world_of(mesh, world)
        found = build_model(config, there)
        source = open_source(locate(str(final), ""), model)
        load_weights(found, source, local_part(there))
        tensors = {f"model.{n}": t for n, t in model_tensors(found).items()}
        extra = {"step": 3, "config": {"model": dataclasses.asdict(model)}}
        save_checkpoint(folder, 3, tensors, extra, keep=1)

    run_ranks(body, 4)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        if (final / name).exists():
            shutil.copy(final / name, folder / "step-000003")
    return folder / "step-000003"


@pytest.mark.parametrize("of", ["final", "checkpoint"])
def test_memory_is_that_of_files(of: str, tmp_path: Path, request: Any) -> None:
    """Weights in one file, and in a checkpoint where four ranks have parts of each tensor."""
    source: Path = request.getfixturevalue(of)
    found = sorted(source.glob("*.safetensors"))
    assert len(found) == {"final": 1, "checkpoint": 4}[of]
    size = sum(file.stat().st_size for file in found)
    assert size > 10 * FILE_BYTES
    out = tmp_path / "hf"
    exported = measured(EXPORT, str(source), str(out), str(FILE_BYTES / 1e9))
    files = sorted(out.glob("model-*.safetensors"))
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert len(files) > 10 and max(f.stat().st_size for f in files) < 1.01 * FILE_BYTES
    assert set(index["weight_map"].values()) == {f.name for f in files}
    # The tensors of a file and their bytes while it is written; 2 MB of the allocator.
    assert exported < 2 * FILE_BYTES + 2e6 < size / 3
    imported = measured(IMPORT, str(out))
    # Rows as read, reordered and cast, however large a tensor is; 8 MB of headers and holes.
    assert imported < 3 * 4 * AT_ONCE + 8e6 < size / 3
