import gzip
import re
import shutil
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch

from megacpp.data.batches import IGNORED, Batch
from megacpp.data.corpus import Corpus
from megacpp.data.order import shuffled
from megacpp.data.shards import BlockSums, read_index, write_index
from megacpp.data.specials import BOS, EOS, PAD
from megacpp.data.tokenizer import file_sha256
from megacpp.errors import DataError
from tests.figures import Record

SEQ_LEN = 37  # divides nothing here, so that rows start anywhere


@pytest.fixture(scope="module")
def corpus(corpus_path: Path) -> Corpus:
    return Corpus(corpus_path, SEQ_LEN, seed=3, verify=True)


@pytest.fixture
def damaged(corpus_path: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(corpus_path, tmp_path / "damaged"))


def stream(path: Path, split: str) -> list[int]:
    shards = read_index(path)["splits"][split]["shards"]
    return [t for shard in shards for t in np.fromfile(path / shard["file"], "<u2").tolist()]


def owners(tokens: list[int]) -> list[int]:
    """Document number of each token, counted by walking over BOS."""
    found, number = [], -1
    for token in tokens:
        number += token == BOS
        found.append(number)
    return found


def assert_same(one: Batch, two: Batch) -> None:
    assert torch.equal(one.ids_BT, two.ids_BT)
    assert torch.equal(one.labels_BT, two.labels_BT)
    assert torch.equal(one.docs.ids_BT, two.docs.ids_BT)
    assert torch.equal(one.docs.positions_BT, two.docs.positions_BT)
    assert (one.target_bytes, one.num_targets, one.rows) == (
        two.target_bytes,
        two.num_targets,
        two.rows,
    )


@pytest.mark.parametrize("seq_len", [1, 2, 5, 64, 301])
@pytest.mark.parametrize("split", ["train", "validation"])
def test_rows_by_brute_force(split: str, seq_len: int, corpus_path: Path) -> None:
    """Token by token: input, label, mask, document and position of every row."""
    corpus = Corpus(corpus_path, seq_len)
    tokens = stream(corpus_path, split)
    document = owners(tokens)
    count = corpus.rows_per_epoch if split == "train" else corpus.num_validation_rows
    for number in range(count):
        row = corpus.row(split, number)
        for t in range(seq_len):
            at = number * seq_len + t
            inside = at < len(tokens)
            has_next = at + 1 < len(tokens) and document[at] == document[at + 1]
            assert row.ids_T[t] == (tokens[at] if inside else PAD)
            assert row.labels_T[t] == (tokens[at + 1] if has_next else IGNORED)
            if inside:
                assert row.documents_T[t] == document[at]
                assert (row.labels_T[t] == IGNORED) == (tokens[at] == EOS)
    assert split == "validation" or count * seq_len + 1 <= len(tokens) < (count + 1) * seq_len + 1


def test_documents_of_a_batch(corpus: Corpus) -> None:
    batch = corpus.train_batch(range(16))
    for b, global_row in enumerate(batch.rows):
        documents = corpus.row("train", corpus.split_row(global_row)).documents_T.tolist()
        start = 0
        for t in range(SEQ_LEN):
            start = t if t == 0 or documents[t] != documents[t - 1] else start
            assert batch.docs.positions_BT[b, t] == t - start
            same = [documents[u] == documents[t] for u in range(SEQ_LEN)]
            assert (batch.docs.ids_BT[b] == batch.docs.ids_BT[b, t]).tolist() == same
    assert batch.docs.ids_BT.max() > 0


def test_targets_stay_in_their_document(corpus: Corpus) -> None:
    batch = corpus.train_batch(range(corpus.rows_per_epoch))
    assert batch.ids_BT.dtype == batch.labels_BT.dtype == torch.int64
    assert batch.num_targets == int((batch.labels_BT != IGNORED).sum())
    assert not (batch.labels_BT == BOS).any() and not (batch.labels_BT == PAD).any()
    assert torch.equal(batch.labels_BT == IGNORED, batch.ids_BT == EOS)
    sizes = [len(corpus.tokenizer.id_bytes[i]) for i in batch.labels_BT.flatten() if i >= 0]
    assert batch.target_bytes == sum(sizes)


def test_each_epoch_is_another_permutation(corpus: Corpus) -> None:
    n = corpus.rows_per_epoch
    epochs = [[corpus.split_row(e * n + i) for i in range(n)] for e in range(4)]
    assert all(sorted(rows) == list(range(n)) for rows in epochs)
    assert len({tuple(rows) for rows in epochs}) == 4 and list(range(n)) not in epochs
    other = Corpus(corpus.path, SEQ_LEN, seed=4)
    assert [other.split_row(i) for i in range(n)] != epochs[0]
    across = corpus.train_batch(range(n - 2, n + 2))  # one batch may hold the end and the start
    expected = [*epochs[0][-2:], *epochs[1][:2]]
    for b, row in enumerate(expected):
        assert across.ids_BT[b].tolist() == corpus.row("train", row).ids_T.tolist()


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 16, 17, 63, 1000])
def test_order_is_one_to_one(count: int) -> None:
    assert sorted(shuffled(i, count, 1, 2) for i in range(count)) == list(range(count))


def test_order_never_changes() -> None:
    """Pinned: a resumed run must meet the rows that it would have met."""
    assert [shuffled(i, 10, 42, 0) for i in range(10)] == [2, 5, 1, 0, 9, 7, 8, 4, 6, 3]
    assert [shuffled(i, 10, 42, 1) for i in range(10)] == [2, 0, 5, 6, 9, 7, 8, 1, 4, 3]
    assert shuffled(123_456_789, 10**12, 7, 3) == 556_525_232_464


def test_order_is_even() -> None:
    """Each of 20 rows comes first, and each comes last, about equally often."""
    first, last = np.zeros(20), np.zeros(20)
    for epoch in range(4000):
        first[shuffled(0, 20, 5, epoch)] += 1
        last[shuffled(19, 20, 5, epoch)] += 1
    # Chi-square with 19 degrees of freedom exceeds 50.8 once in 10,000 times.
    for seen in (first, last):
        assert ((seen - 200) ** 2 / 200).sum() < 50.8


@pytest.mark.parametrize(("ranks", "accumulate"), [(1, 1), (1, 12), (2, 3), (3, 2), (4, 1), (6, 2)])
def test_steps_do_not_know_ranks_or_accumulation(
    ranks: int, accumulate: int, corpus: Corpus
) -> None:
    rows_per_step, seen = 12, []
    per_micro = rows_per_step // (ranks * accumulate)
    for step in range(corpus.rows_per_epoch // rows_per_step):
        rows = range(step * rows_per_step, (step + 1) * rows_per_step)
        whole = corpus.train_batch(rows)
        pieces = [rows[i : i + per_micro] for i in range(0, rows_per_step, per_micro)]
        batches = [corpus.train_batch(piece) for piece in pieces]
        assert len(batches) == ranks * accumulate
        assert torch.equal(torch.cat([b.ids_BT for b in batches]), whole.ids_BT)
        assert torch.equal(torch.cat([b.labels_BT for b in batches]), whole.labels_BT)
        assert sum(b.target_bytes for b in batches) == whole.target_bytes
        seen += [r for b in batches for r in b.rows]
    assert seen == list(range(len(seen)))


def test_batches_keep_no_position(corpus: Corpus) -> None:
    first = corpus.train_batch([5, 900, 2])
    corpus.train_batch(range(7))
    list(corpus.validation_batches(3))
    again = Corpus(corpus.path, SEQ_LEN, seed=3).train_batch([5, 900, 2])
    assert_same(first, corpus.train_batch([5, 900, 2]))
    assert_same(first, again)
    assert_same(first, first.to("cpu"))


@pytest.mark.parametrize("device_batch", [1, 4, 7])
def test_validation_predicts_each_target_once(device_batch: int, corpus: Corpus) -> None:
    batches = list(corpus.validation_batches(device_batch))
    assert {b.ids_BT.shape for b in batches} == {(device_batch, SEQ_LEN)}
    labels = torch.cat([b.labels_BT.flatten() for b in batches])
    tokens = stream(corpus.path, "validation")
    assert labels[labels != IGNORED].tolist() == [t for t in tokens if t != BOS]
    text_bytes = corpus.index["splits"]["validation"]["text_bytes"]
    assert sum(b.target_bytes for b in batches) == text_bytes
    assert sum(b.num_targets for b in batches) == len(tokens) - corpus.validation.documents


def test_validation_may_stop_early(corpus: Corpus) -> None:
    batches = list(corpus.validation_batches(4, max_rows=6))
    assert [b.ids_BT.shape[0] for b in batches] == [4, 4]
    assert batches[1].rows[:2] == (4, 5)
    assert (batches[1].labels_BT[2:] == IGNORED).all() and (batches[1].ids_BT[2:] == PAD).all()
    assert (batches[1].labels_BT[:2] != IGNORED).any()
    everything = list(corpus.validation_batches(4, max_rows=10**9))
    assert len(everything) == -(-corpus.num_validation_rows // 4)


def test_rows_past_the_end_are_empty(corpus: Corpus) -> None:
    empty = corpus.validation_batch([corpus.num_validation_rows, 10**6])
    assert empty.num_targets == empty.target_bytes == 0
    assert (empty.labels_BT == IGNORED).all()


def test_validation_documents_and_gzip(corpus: Corpus, documents: list[str]) -> None:
    texts = list(corpus.validation_documents())
    assert len(texts) == corpus.validation.documents and set(texts) < set(documents)
    packed = sum(len(gzip.compress(text.encode(), 9)) for text in texts)
    size = sum(len(text.encode()) for text in texts)
    assert corpus.gzip_bits_per_byte() == 8 * packed / size


def test_header_lines(corpus: Corpus, corpus_path: Path) -> None:
    text = "\n".join(corpus.describe())
    for shown in (corpus.fingerprint, f"{corpus.train.tokens:,} tokens", f"rows of {SEQ_LEN}"):
        assert shown in text
    assert len(corpus.fingerprint) == 12
    assert corpus.token_bytes_V.shape == (corpus.vocab_size,)


def test_fingerprint_follows_the_content(corpus: Corpus, damaged: Path) -> None:
    index = read_index(damaged)
    shard = index["splits"]["train"]["shards"][0]
    ids = np.fromfile(damaged / shard["file"], "<u2")
    ids[5] ^= 1
    ids.tofile(damaged / shard["file"])
    shard["sha256"] = file_sha256(damaged / shard["file"])
    write_index(damaged, index)
    assert Corpus(damaged, SEQ_LEN, verify=True).fingerprint != corpus.fingerprint


def refused(path: Path, message: str, verify: bool = False, seq_len: int = SEQ_LEN) -> None:
    with pytest.raises(DataError, match=message) as caught:
        Corpus(path, seq_len, verify=verify)
    line = str(caught.value)
    assert caught.value.exit_code == 3 and "\n" not in line and ". Fix: " in line


def test_nothing_there(tmp_path: Path) -> None:
    refused(tmp_path / "none", r"data\.path=.*none: no such folder\. Fix: run `megacpp data prep")
    refused(tmp_path, r"data\.path=.*: holds no index\.json, so it is not a corpus")


def test_truncated_and_missing_shards(damaged: Path, record_property: Record) -> None:
    shard = damaged / "train-00001.bin"
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-2])
    refused(damaged, rf"train-00001\.bin: truncated \({len(whole) - 2} bytes, index says")
    shard.write_bytes(whole + b"\0\0")
    refused(damaged, r"train-00001\.bin: too long")
    shard.unlink()
    refused(damaged, r"train-00001\.bin: missing, the index lists it")
    record_property("truncated, lengthened and missing shards refused", 3)


def flip(path: Path, at: int) -> None:
    """Inverts one byte."""
    raw = bytearray(path.read_bytes())
    raw[at] ^= 0xFF
    path.write_bytes(raw)


@pytest.mark.parametrize("name", ["train-00000.bin", "validation-00000.bin"])
def test_one_inverted_byte_is_found_by_verify(
    name: str, damaged: Path, record_property: Record
) -> None:
    flip(damaged / name, (damaged / name).stat().st_size // 2)
    Corpus(damaged, SEQ_LEN)  # sizes are right
    refused(damaged, rf"{name}: SHA-256 differs from the index \(corrupt\)", verify=True)
    record_property("inverted bytes found by verify", 1)


def test_damaged_boundaries_are_found_at_once(damaged: Path) -> None:
    flip(damaged / "train-documents.bin", 99)
    refused(damaged, r"train-documents\.bin: SHA-256 differs from the index \(corrupt\)")


@pytest.mark.parametrize("at", [0, 2 * 800 + 1, -1])
def test_a_damaged_block_is_found_when_it_is_first_read(
    at: int, damaged: Path, monkeypatch: pytest.MonkeyPatch, record_property: Record
) -> None:
    """Every row of the block is refused, every other row is what it was."""
    sound = Corpus(damaged, SEQ_LEN)
    shard = read_index(damaged)["splits"]["train"]["shards"][1]
    before = [sound.row("train", r) for r in range(sound.rows_per_epoch)]
    flip(damaged / shard["file"], at % shard["bytes"])
    corpus = Corpus(damaged, SEQ_LEN)
    first = int(corpus.train.starts[1])
    last = first + shard["tokens"]
    line = (
        rf"train-00001\.bin block 0 \(bytes 0 to {shard['bytes']:,}, "
        r"documents \d+ to \d+ of train\): its CRC-32 differs from the index "
        r"\(corrupt\)\. Fix: run `megacpp data prepare "
    )
    for number, row in enumerate(before):
        if number * SEQ_LEN + SEQ_LEN + 1 <= first or number * SEQ_LEN >= last:
            assert (corpus.row("train", number).ids_T == row.ids_T).all()
            continue
        with pytest.raises(DataError, match=line) as caught:
            corpus.row("train", number)
        assert caught.value.exit_code == 3
    record_property("damaged blocks found on first read, shard named", 1)


def test_files_that_change_under_their_reader_are_named(damaged: Path) -> None:
    """A truncated memory map would be a SIGBUS; the mended file is read by the same command."""
    shard, places = damaged / "train-00001.bin", damaged / "train-documents.bin"
    whole, offsets = shard.read_bytes(), places.read_bytes()
    before, corpus = Corpus(damaged, SEQ_LEN), Corpus(damaged, SEQ_LEN)
    rows = [before.row("train", r).ids_T for r in range(before.rows_per_epoch)]
    shard.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(
        DataError, match=r"train-00001\.bin: block 0 .*truncated while in use"
    ) as one:
        for row in range(corpus.rows_per_epoch):
            corpus.row("train", row)
    assert one.value.exit_code == 3
    shard.write_bytes(whole)
    places.write_bytes(np.frombuffer(offsets, "<u8")[::-1].tobytes())
    with pytest.raises(DataError, match=r"train-documents\.bin: documents .* are out of order"):
        for row in range(corpus.rows_per_epoch):
            corpus.row("train", row)
    places.write_bytes(offsets)
    for number, row in enumerate(rows):
        assert (Corpus(damaged, SEQ_LEN).row("train", number).ids_T == row).all()


def test_each_block_is_summed_once(damaged: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With blocks of 100 bytes: a row sums the blocks that it lies in, an epoch each block once."""
    monkeypatch.setattr("megacpp.data.shards.BLOCK_BYTES", 100)
    index = read_index(damaged)
    for split in ("train", "validation"):
        for shard in index["splits"][split]["shards"]:
            sums = BlockSums()
            raw = (damaged / shard["file"]).read_bytes()
            for start in range(0, len(raw), 7):  # pieces end anywhere in a block
                sums.update(raw[start : start + 7])
            whole = [raw[i : i + 100] for i in range(0, len(raw), 100)]
            assert sums.hexdigests() == "".join(f"{zlib.crc32(b):08x}" for b in whole)
            shard["blocks"] = sums.hexdigests()
    write_index(damaged, index)
    corpus = Corpus(damaged, SEQ_LEN)
    corpus.row("train", 5)
    begin, end = 2 * 5 * SEQ_LEN, 2 * (6 * SEQ_LEN + 1)  # bytes: two a token, and the last label
    assert corpus.train.checked == -(-end // 100) - begin // 100
    for _ in range(2):
        for number in range(corpus.rows_per_epoch):
            corpus.row("train", number)
    read = corpus.rows_per_epoch * SEQ_LEN + 1
    shards = index["splits"]["train"]["shards"]
    left = sum(s["tokens"] for s in shards) - read  # tokens that no row needs
    total = [-(-s["bytes"] // 100) for s in shards]
    total[-1] = -(-(shards[-1]["bytes"] - 2 * left) // 100)
    assert corpus.train.checked == sum(total)
    flip(damaged / "train-00001.bin", 250)
    broken = Corpus(damaged, SEQ_LEN)
    with pytest.raises(DataError, match=r"block 2 \(bytes 200 to 300, documents") as caught:
        broken.train.read(int(broken.train.starts[1]), int(broken.train.starts[2]), "all")
    one, two = map(int, re.findall(r"documents (\d+) to (\d+)", str(caught.value))[0])
    tokens = range(int(broken.train.starts[1]) + 100, int(broken.train.starts[1]) + 150)
    ids = broken.train.document_ids(tokens[0], tokens[-1] + 1)
    assert (one, two) == (ids[0], ids[-1])


def test_foreign_tokenizer(damaged: Path) -> None:
    raw = bytearray((damaged / "tokenizer.json").read_bytes())
    raw[-3] ^= 1
    (damaged / "tokenizer.json").write_bytes(raw)
    refused(damaged, r"tokenizer\.json: SHA-256 differs from the index")


def test_index_damage(damaged: Path) -> None:
    path = damaged / "index.json"
    text = path.read_text()
    path.write_text(text.replace('"vocab_size": 400', '"vocab_size": 401', 2))
    refused(damaged, r"index\.json: its content does not match its own hash")
    path.write_text(text.replace('"format_version": 2', '"format_version": 1'))
    refused(
        damaged,
        r"index\.json: made by another edition of megacpp \(format 1, this one reads 2 and 3\)\. "
        rf"Fix: run `megacpp data prepare \S+ --out {damaged} --force`",
    )
    for broken in (text[:100], "[]", "{}", "[" * 100_000):
        path.write_text(broken)
        refused(damaged, r"index\.json: cannot be read as an index")


def test_index_cannot_point_outside(damaged: Path) -> None:
    index = read_index(damaged)
    index["splits"]["train"]["shards"][0]["file"] = "../train-00000.bin"
    write_index(damaged, index)
    refused(damaged, r"the index points outside \(\.\./train-00000\.bin\)")


def test_counts_that_disagree(damaged: Path) -> None:
    index = read_index(damaged)
    index["splits"]["train"]["tokens"] += 1
    write_index(damaged, index)
    refused(damaged, r"train shards and index disagree on counts")


def test_an_id_outside_the_vocabulary_names_shard_and_row(
    damaged: Path, record_property: Record
) -> None:
    first = read_index(damaged)["splits"]["train"]["shards"][0]["tokens"]
    ids = np.fromfile(damaged / "train-00001.bin", "<u2")
    ids[3] = 60_000
    ids.tofile(damaged / "train-00001.bin")
    sums = BlockSums()
    sums.update(ids.tobytes())  # written like that, not damaged
    index = read_index(damaged)
    index["splits"]["train"]["shards"][1]["blocks"] = sums.hexdigests()
    write_index(damaged, index)
    corpus = Corpus(damaged, SEQ_LEN)
    row = (first + 3) // SEQ_LEN
    global_row = next(g for g in range(corpus.rows_per_epoch) if corpus.split_row(g) == row)
    message = (
        rf"train-00001\.bin row {row}: token {first + 3} of the split has id 60000, "
        rf"not below vocab_size 400\. Fix: "
    )
    with pytest.raises(DataError, match=message):
        corpus.train_batch([global_row])
    record_property("ids outside the vocabulary, shard and row named", 1)


def test_rows_longer_than_the_data(corpus_path: Path, corpus: Corpus) -> None:
    tokens = corpus.train.tokens
    assert Corpus(corpus_path, tokens - 1).rows_per_epoch == 1
    refused(
        corpus_path,
        rf"data\.seq_len={tokens}: .* has only {tokens} tokens, one row needs {tokens + 1}\. "
        rf"Fix: use --data\.seq-len {tokens - 1} or less",
        seq_len=tokens,
    )
