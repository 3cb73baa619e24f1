"""Headers of safetensors files from elsewhere: any is read, or refused in one line.

Of the format itself `safetensors` reads; what is made of it here is offsets of pieces, names of
files, and lengths.
"""

from __future__ import annotations

import json
import os
import random
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save, save_file

from megacpp.errors import CheckpointError
from megacpp.interop.load import _hf_files
from megacpp.interop.stored import OFFSETS, StoredTensors
from megacpp.state.checkpoint import load_checkpoint, save_checkpoint
from megacpp.state.export import INDEX
from tests.figures import Record
from tests.state.test_hostile import one_line, rehashed

MUTATIONS = int(os.environ.get("MEGACPP_MUTATIONS", "3000"))
HUGE = 100 << 30
VALUES: list[Any] = [-1, 2**63, 2**64, 1e300, "x", None, True, [], {}, [[]], [-1], ["x"], [0] * 9]


def content_of(header: bytes, body: bytes) -> bytes:
    return len(header).to_bytes(8, "little") + header + body


def mutated(rng: random.Random, raw: bytes) -> bytes:
    """Return a file with bytes of its header changed, moved or cut, or one of its values."""
    size = int.from_bytes(raw[:8], "little")
    header, body = bytearray(raw[8 : 8 + size]), raw[8 + size :]
    kind, at = rng.randrange(6), rng.randrange(size)
    if kind == 0:
        header[at] ^= 1 << rng.randrange(8)
    elif kind == 1:
        header[at] = rng.randrange(256)
    elif kind == 2:
        del header[at : at + rng.randrange(1, 20)]
    elif kind == 3:
        header[at:at] = header[rng.randrange(size) :][: rng.randrange(20)]
    elif kind == 4:
        length = rng.choice([rng.randrange(2 * size), HUGE, 2**63, 2**64 - 1])
        return length.to_bytes(8, "little") + raw[8:]
    else:
        return content_of(json.dumps(with_another_value(rng, json.loads(header))).encode(), body)
    return content_of(bytes(header), body)


def with_another_value(rng: random.Random, header: dict[str, Any]) -> dict[str, Any]:
    """Return a header with another value at a random place, also in the offsets of pieces."""
    saved = json.loads(header["__metadata__"][OFFSETS])
    owner: Any = rng.choice([header, header["w"], header["v"], saved, saved["w"], saved["w"]])
    key = rng.choice([*owner, "more"])
    owner[key] = rng.choice(VALUES)
    if rng.randrange(4) == 0:
        saved = rng.choice(VALUES)
    if isinstance(metadata := header.get("__metadata__"), dict):
        metadata[OFFSETS] = rng.choice([json.dumps(saved), json.dumps(saved)[:-3], "[" * 2000])
    return header


def test_a_mutated_header_is_read_or_refused(tmp_path: Path, record_property: Record) -> None:
    offsets = {"w": {"saved_offsets": [2, 0]}, "v": {"saved_offsets": [0]}}
    tensors = {"w": torch.ones(3, 4), "v": torch.arange(5)}
    raw = save(tensors, {OFFSETS: json.dumps(offsets), "format": "pt"})
    rng, path, refused = random.Random(0), tmp_path / "model.safetensors", 0
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _ in range(MUTATIONS):
        path.write_bytes(mutated(rng, raw))
        try:
            stored = StoredTensors(tmp_path, [path.name])
        except CheckpointError as error:
            refused += 1
            assert "\n" not in str(error) and ". Fix: " in str(error) and len(str(error)) < 600
            continue
        for shape in stored.shapes.values():
            assert all(type(size) is int and size >= 0 for size in shape)
        stored.close()
    assert MUTATIONS / 2 < refused < MUTATIONS
    grown_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown_kib < 200 << 10, f"{grown_kib >> 10} MiB"
    record_property("mutated headers read or refused in one line", MUTATIONS)


def test_pieces_of_different_dims_are_refused(tmp_path: Path) -> None:
    save_file({"w": torch.ones(3, 4)}, tmp_path / "a.safetensors")
    save_file({"w": torch.ones(3)}, tmp_path / "b.safetensors")
    said = one_line(lambda: StoredTensors(tmp_path, ["a.safetensors", "b.safetensors"]))
    assert "b.safetensors: can't be read (the pieces of w have different numbers of dims)" in said


@pytest.mark.parametrize("offset", [1.5, -1, True, "0", None])
def test_offsets_of_pieces_are_whole_numbers(tmp_path: Path, offset: object) -> None:
    saved = json.dumps({"w": {"saved_offsets": [0, offset]}})
    save_file({"w": torch.ones(3, 4)}, tmp_path / "a.safetensors", {OFFSETS: saved})
    said = one_line(lambda: StoredTensors(tmp_path, ["a.safetensors"]))
    assert "a.safetensors: can't be read" in said and "is no whole number from 0" in said


def huge(content: bytes) -> bytes:
    return HUGE.to_bytes(8, "little") + content[8:]


def deep(content: bytes) -> bytes:
    return content_of(b'{"w":' * 50_000, b"")


def empty(content: bytes) -> bytes:
    return b""


@pytest.mark.parametrize("change", [huge, deep, empty])
def test_a_forged_shard_of_a_checkpoint_is_refused(
    tmp_path: Path, change: Callable[[bytes], bytes]
) -> None:
    """Its manifest has the hashes of the forged file; torch's own reader opens it."""
    path = save_checkpoint(tmp_path, 1, {"w": torch.zeros(2)}, {}, 1)
    shard = next(path.glob("*.safetensors"))
    shard.write_bytes(change(shard.read_bytes()))
    rehashed(path)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    one_line(lambda: load_checkpoint(path, {"w": torch.zeros(2)}))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200 << 10


@pytest.mark.parametrize(
    "text",
    [
        "",
        "7",
        "[" * 100_000,
        '{"weight_map": 7}',
        '{"weight_map": {"w": 7}}',
        '{"weight_map": {"w": "../secret.safetensors"}}',
        '{"weight_map": {"w": "/etc/passwd"}}',
        '{"weight_map": {"w": ".."}}',
    ],
)
def test_an_index_of_anything_else(tmp_path: Path, text: str) -> None:
    (tmp_path / INDEX).write_text(text)
    assert f"{INDEX}: can't be read (" in one_line(lambda: _hf_files(tmp_path))
