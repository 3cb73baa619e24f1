"""Small corpus of generated C++-like documents, prepared once."""

import random
from pathlib import Path

import pytest

from megacpp.data.prepare import CorpusSpec, ensure_corpus

NUM_DOCUMENTS = 60


def make_document(number: int) -> str:
    """Return a header file; each number gives another text, some with non-ASCII comments."""
    noise = random.Random(number)
    names = [f"{noise.choice(['size', 'index', 'Tensor', 'scale'])}_{n}" for n in range(6)]
    lines = ["#pragma once", "", f"namespace n{number} {{", f"// größe ≤ {number} 🙂"]
    for name in names[: noise.randint(1, 6)]:
        kind = noise.choice(["int64_t", "float", "const std::vector<double>&"])
        lines += [
            f"inline {kind} {name}({kind} x) {{",
            f"    return x * {noise.random():.3f};",
            "}",
        ]
    return "\n".join([*lines, "}"]) + "\n" * noise.randint(0, 2)


def write_folder(folder: Path, documents: list[str]) -> Path:
    for number, text in enumerate(documents):
        path = folder / f"sub{number % 3}" / f"file{number}.h"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text.encode())
    return folder


@pytest.fixture(scope="session")
def documents() -> list[str]:
    return [make_document(number) for number in range(NUM_DOCUMENTS)]


@pytest.fixture(scope="session")
def source(documents: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("source"), documents)


@pytest.fixture(scope="session")
def spec(source: Path) -> CorpusSpec:
    """Several shards, several held-out documents."""
    return CorpusSpec(
        str(source), vocab_size=400, validation_fraction=0.2, shard_tokens=1500, seed=7
    )


@pytest.fixture(scope="session")
def corpus_path(spec: CorpusSpec, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return ensure_corpus(spec, tmp_path_factory.mktemp("made") / "corpus").path
