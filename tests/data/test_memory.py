"""Memory of a preparation: bounded for any amount of text, and a few bytes for each document."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from megacpp.data.document_store import DocumentStore
from megacpp.data.prepare import BATCH_BYTES
from tests.figures import Record

ROOT = Path(__file__).parents[2]
MB = 1_000_000
DOCUMENT_BYTES = 140  # of memory for each document, at the most


def peak_bytes(code: str, *arguments: object) -> int:
    """Return the peak resident bytes of a new Python that runs some code."""
    code = (
        "import re, resource; resource.setrlimit(resource.RLIMIT_AS, (1 << 31, 1 << 31))\n" + code
    )
    # The kernel's peak of this program alone: getrusage has that of the process it came from.
    ending = "\nprint(re.search(r'VmHWM:\\s*(\\d+)', open('/proc/self/status').read())[1])"
    done = subprocess.run(
        [sys.executable, "-c", code + ending, *map(str, arguments)],
        cwd=ROOT, capture_output=True, text=True, check=True, timeout=120,
        env=os.environ | {"MALLOC_ARENA_MAX": "1", "RAYON_NUM_THREADS": "1"},
    )  # fmt: skip
    return 1024 * int(done.stdout.splitlines()[-1])


PREPARE = """
import sys
from pathlib import Path
from megacpp.data.prepare import CorpusSpec, ensure_corpus
source, out = sys.argv[1:]
spec = CorpusSpec(source, vocab_size=300, tokenizer_bytes=100_000, shard_tokens=1 << 18)
ensure_corpus(spec, Path(out), workers=1)
"""


def test_more_text_takes_no_more_memory(tmp_path: Path, record_property: Record) -> None:
    """Nine times the text: a peak higher by the documents' own bytes and at most two batches.

    Freed pages stay a program's, up to a batch, and either of the two may have it at its peak.
    """
    peaks = []
    for count in (1_000, 9_000):
        path = tmp_path / f"{count}.jsonl"
        with path.open("w") as file:
            for n in range(count):
                words = " ".join(f"w{(n * i) % 4001}" for i in range(400))
                file.write(json.dumps({"text": f"{n} {words}"}) + "\n")
        peaks.append(peak_bytes(PREPARE, path, tmp_path / f"out{count}"))
    more = (tmp_path / "9000.jsonl").stat().st_size - (tmp_path / "1000.jsonl").stat().st_size
    assert more > 16 * MB
    limit = 8_000 * DOCUMENT_BYTES + 2 * BATCH_BYTES
    assert limit < more / 5
    assert peaks[1] - peaks[0] < limit
    record_property(
        "MB more at the peak of a preparation with 12 MB more", (peaks[1] - peaks[0]) / MB
    )


DOCUMENTS = """
import sys
from pathlib import Path
from megacpp.data.document_store import DocumentStore
from megacpp.data.prepare import CorpusSpec, _split
folder, count = Path(sys.argv[1]), int(sys.argv[2])
with DocumentStore(folder) as store:
    for n in range(count):
        store.add(b"%d" % n)
    train, held_out = _split(CorpusSpec(), store)
    assert len(train) + len(held_out) == count
"""


def test_bytes_of_a_document(tmp_path: Path, record_property: Record) -> None:
    """Read, deduplicated, split and shuffled: 140 bytes of memory a document at the most."""
    peaks = []
    for count in (1_000, 201_000):
        (tmp_path / str(count)).mkdir()
        peaks.append(peak_bytes(DOCUMENTS, tmp_path / str(count), count))
    each = (peaks[1] - peaks[0]) / 200_000
    assert 54 < each < DOCUMENT_BYTES
    record_property("bytes of memory a document", each)


def test_a_hash_table_that_grows_finds_every_document(tmp_path: Path) -> None:
    with DocumentStore(tmp_path) as store:
        assert all(store.add(b"%d" % n) for n in range(3_000))
        assert not any(store.add(b"%d" % n) for n in range(3_000))
        assert len(store.digests) == len(store.sizes) == 3_000
        assert [store.read(n) for n in (0, 1_500, 2_999)] == [b"0", b"1500", b"2999"]
        with pytest.raises(IndexError):
            store.read(3_000)
