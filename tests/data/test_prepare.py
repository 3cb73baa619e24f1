import dataclasses
import hashlib
import json
import shlex
import shutil
import subprocess
import sys
import zlib
from pathlib import Path

import numpy as np
import pytest

from megacpp.cli.main import main
from megacpp.data import prepare
from megacpp.data.document_store import DocumentStore
from megacpp.data.prepare import CorpusSpec, ensure_corpus
from megacpp.data.shard_writer import SplitWriter
from megacpp.data.shards import SPLITS, SplitReader, fingerprint, token_dtype
from megacpp.data.specials import BOS, EOS, FIM_PREFIX
from megacpp.data.tokenizer import CorpusTokenizer
from megacpp.errors import ConfigError, DataError
from tests.data.conftest import write_folder
from tests.data.reading import restore


def load(path: Path) -> dict:
    return json.loads((path / "index.json").read_text())


def split_ids(path: Path, split: str) -> list[list[int]]:
    """Documents of a split straight from the files, cut at BOS and EOS."""
    index, found = load(path), []
    for shard in index["splits"][split]["shards"]:
        ids = np.fromfile(path / shard["file"], "<u2").tolist()
        ends = [i for i, token in enumerate(ids) if token == EOS]
        assert len(ends) == shard["documents"] and len(ids) == shard["tokens"]
        for start, end in zip([0, *(e + 1 for e in ends[:-1])], ends, strict=True):
            assert ids[start] == BOS
            found.append(ids[start + 1 : end])
    return found


def split_texts(path: Path, split: str) -> list[str]:
    tokenizer = CorpusTokenizer.load(path / "tokenizer.json")
    return [tokenizer.decode(ids) for ids in split_ids(path, split)]


def test_every_document_is_in_one_split(corpus_path: Path, documents: list[str]) -> None:
    train, held_out = (split_texts(corpus_path, split) for split in SPLITS)
    assert sorted(train + held_out) == sorted(documents)
    assert not set(train) & set(held_out)
    # 60 documents at 0.2: binomial with mean 12 and standard deviation 3.1
    assert 3 <= len(held_out) <= 24
    assert len(load(corpus_path)["splits"]["train"]["shards"]) > 2


def test_index_counts_and_hashes(corpus_path: Path) -> None:
    index = load(corpus_path)
    assert index["documents"] == {
        "read": 60,
        "empty": 0,
        "invalid_utf8": 0,
        "duplicates": 0,
        "kept": 60,
    }
    for split in SPLITS:
        entry = index["splits"][split]
        texts = split_texts(corpus_path, split)
        assert entry["documents"] == len(texts)
        assert entry["text_bytes"] == sum(len(t.encode()) for t in texts)
        assert entry["tokens"] == sum(shard["tokens"] for shard in entry["shards"])
        for file in (*entry["shards"], entry["offsets"]):
            raw = (corpus_path / file["file"]).read_bytes()
            assert file["bytes"] == len(raw)
            assert file["sha256"] == hashlib.sha256(raw).hexdigest()
        lengths = [len(ids) + 2 for ids in split_ids(corpus_path, split)]
        offsets = np.fromfile(corpus_path / entry["offsets"]["file"], "<u8")
        assert offsets.tolist() == np.cumsum([0, *lengths]).tolist()
    assert set(index["special_ids"]) >= {"<bos>", "<eos>", "<fim_middle>"}
    assert sorted(f.name for f in corpus_path.iterdir()) == sorted(
        ["index.json", "tokenizer.json", "tokenizer_config.json"]
        + [f"{s}-documents.bin" for s in SPLITS]
        + [e["file"] for s in SPLITS for e in index["splits"][s]["shards"]]
    )


def test_same_spec_same_bytes(spec: CorpusSpec, corpus_path: Path, tmp_path: Path) -> None:
    ensure_corpus(spec, tmp_path / "again")
    for file in corpus_path.iterdir():
        assert file.read_bytes() == (tmp_path / "again" / file.name).read_bytes()


def test_order_and_names_of_files_do_not_matter(
    documents: list[str], spec: CorpusSpec, corpus_path: Path, tmp_path: Path
) -> None:
    source = write_folder(tmp_path / "source", documents[::-1])
    again = ensure_corpus(dataclasses.replace(spec, source=str(source)), tmp_path / "again")
    assert fingerprint(again.index) == fingerprint(load(corpus_path))


def test_seed_changes_the_order_and_not_the_split(
    spec: CorpusSpec, corpus_path: Path, tmp_path: Path
) -> None:
    other = ensure_corpus(dataclasses.replace(spec, seed=8), tmp_path / "other").path
    for split in SPLITS:
        one, two = split_texts(corpus_path, split), split_texts(other, split)
        assert one != two and sorted(one) == sorted(two)


def test_new_documents_leave_the_others_in_their_split(
    documents: list[str], spec: CorpusSpec, corpus_path: Path, tmp_path: Path
) -> None:
    source = write_folder(tmp_path / "source", documents[:40])
    fewer = ensure_corpus(dataclasses.replace(spec, source=str(source)), tmp_path / "fewer").path
    for split in SPLITS:
        assert set(split_texts(fewer, split)) <= set(split_texts(corpus_path, split))


def test_duplicates_empty_and_broken_documents_are_counted(tmp_path: Path) -> None:
    source = write_folder(tmp_path / "source", ["int a;", "int b;", "int a;", "", "int a;", "c"])
    (source / "bad.h").write_bytes(b"\xff\xfd")
    index = ensure_corpus(CorpusSpec(str(source), vocab_size=300), tmp_path / "out").index
    assert index["documents"] == {
        "read": 7,
        "empty": 1,
        "invalid_utf8": 1,
        "duplicates": 2,
        "kept": 3,
    }
    texts = [t for split in SPLITS for t in split_texts(tmp_path / "out", split)]
    assert sorted(texts) == ["c", "int a;", "int b;"]


@pytest.mark.parametrize("fraction", [1e-12, 1 - 1e-12])
def test_no_split_is_ever_empty(fraction: float, tmp_path: Path) -> None:
    source = write_folder(tmp_path / "source", ["one", "two", "three"])
    spec = CorpusSpec(str(source), vocab_size=300, validation_fraction=fraction)
    index = ensure_corpus(spec, tmp_path / "out").index
    assert sorted(index["splits"][s]["documents"] for s in SPLITS) == [1, 2]


def test_tokenizer_learns_from_training_documents_only(
    spec: CorpusSpec, corpus_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []
    real = CorpusTokenizer.train

    def spy(batches, vocab_size, kind):
        batches = list(batches)
        seen.extend(text for batch in batches for text in batch)
        return real(batches, vocab_size, kind)

    monkeypatch.setattr(CorpusTokenizer, "train", staticmethod(spy))
    ensure_corpus(spec, tmp_path / "all")
    train = split_texts(corpus_path, "train")
    assert seen == train
    seen.clear()
    some = dataclasses.replace(spec, tokenizer_bytes=1000)
    index = ensure_corpus(some, tmp_path / "some").index
    sizes = np.cumsum([len(t.encode()) for t in train])
    count = int((sizes < 1000).sum()) + 1
    assert seen == train[:count]
    assert index["tokenizer"]["learned_documents"] == count
    assert index["tokenizer"]["learned_bytes"] == sizes[count - 1]


def test_fill_in_the_middle_spares_validation(
    spec: CorpusSpec, corpus_path: Path, documents: list[str], tmp_path: Path
) -> None:
    rated = dataclasses.replace(spec, fim_rate=0.5)
    made = ensure_corpus(rated, tmp_path / "fim")
    assert split_ids(made.path, "validation") == split_ids(corpus_path, "validation")
    train = split_ids(made.path, "train")
    cut = [ids for ids in train if FIM_PREFIX in ids]
    counts = made.index["fill_in_the_middle"]
    assert counts["psm"] > 0 and counts["spm"] > 0
    assert counts["psm"] + counts["spm"] == len(cut) < len(train)
    tokenizer = CorpusTokenizer.load(made.path / "tokenizer.json")
    marks = tokenizer.specials.fim
    assert marks is not None
    restored = [tokenizer.decode(restore(np.array(ids), marks).tolist()) for ids in train]
    assert restored == split_texts(corpus_path, "train")


def test_gzip_figure_by_hand(corpus_path: Path) -> None:
    def deflated(raw: bytes) -> int:
        packer = zlib.compressobj(9, zlib.DEFLATED, -zlib.MAX_WBITS)
        return len(packer.compress(raw) + packer.flush())

    held_out = [text.encode() for text in split_texts(corpus_path, "validation")]
    # A gzip member is the deflated bytes, a header of 10 bytes and a trailer of 8.
    bits = 8 * sum(deflated(raw) + 18 for raw in held_out)
    by_hand = bits / sum(map(len, held_out))
    assert load(corpus_path)["splits"]["validation"]["gzip_bits_per_byte"] == by_hand


def test_second_call_returns_at_once(
    spec: CorpusSpec, corpus_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prepare, "_build", lambda *_: pytest.fail("built again"))
    again = ensure_corpus(spec, corpus_path)
    assert not again.made and again.index["vocab_size"] == 400


def test_other_arguments_need_force(spec: CorpusSpec, tmp_path: Path) -> None:
    out = tmp_path / "out"
    ensure_corpus(spec, out)
    other = dataclasses.replace(spec, vocab_size=300)
    with pytest.raises(ConfigError, match=r"vocab_size=300: .* holds a corpus with vocab_size=400"):
        ensure_corpus(other, out)
    assert load(out)["vocab_size"] == 400
    forced = ensure_corpus(other, out, force=True)
    assert forced.made and load(out)["vocab_size"] == 300
    assert [f.name for f in tmp_path.iterdir()] == ["out"]


def test_changed_texts_need_force(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    texts = [f"int f{n}(int a) {{ return a * {n * n}; }}\n" * 9 for n in range(6)]
    source, out = write_folder(tmp_path / "texts", texts), tmp_path / "out"
    words = ["data", "prepare", str(source), "--out", str(out), "--vocab-size", "300"]
    assert main(words) == 0 and main(words) == 0
    assert f"{out} is there" in capsys.readouterr().out
    (source / "new.txt").write_text("int main() {}\n")
    assert main(words) == 2
    assert f"source={source}: {out} was made from 6 files of" in capsys.readouterr().err
    assert main([*words, "--force"]) == 0
    shutil.rmtree(source)
    assert main(words) == 0  # a corpus outlives its source


def test_the_index_has_the_command_that_makes_it_again(spec: CorpusSpec, tmp_path: Path) -> None:
    odd = dataclasses.replace(spec, globs=("*.h", "a b/*.x"), fim_rate=0.25, text_kind="prose")
    first = ensure_corpus(odd, tmp_path / "out").index
    words = [*shlex.split(first["command"]), "--out", str(tmp_path / "out"), "--force"]
    assert words[:3] == ["megacpp", "data", "prepare"]
    assert main(words[1:]) == 0
    assert load(tmp_path / "out")["arguments"] == first["arguments"]
    assert fingerprint(load(tmp_path / "out")) == fingerprint(first)


def test_a_foreign_folder_is_never_replaced(spec: CorpusSpec, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("dear")
    for force in (False, True):
        with pytest.raises(ConfigError, match=r"exists and is not a corpus\. Fix: choose another"):
            ensure_corpus(spec, tmp_path / "mine", force)
    assert (tmp_path / "mine" / "thesis.txt").read_text() == "dear"
    (tmp_path / "empty").mkdir()
    assert ensure_corpus(spec, tmp_path / "empty").made


@pytest.mark.parametrize("force", [False, True])
def test_a_failed_call_leaves_nothing_behind(
    force: bool, spec: CorpusSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    if force:
        ensure_corpus(spec, out)
    before = sorted(str(f) for f in tmp_path.rglob("*"))

    def fail(*_: object) -> None:
        raise DataError("x")

    monkeypatch.setattr(prepare, "write_index", fail)
    with pytest.raises(DataError):
        ensure_corpus(spec, out, force)
    assert sorted(str(f) for f in tmp_path.rglob("*")) == before


def test_two_processes_at_once(
    spec: CorpusSpec, corpus_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, real = tmp_path / "out", prepare._build

    def build_while_another_finishes(*args) -> None:
        real(*args)
        shutil.copytree(corpus_path, out)

    monkeypatch.setattr(prepare, "_build", build_while_another_finishes)
    late = ensure_corpus(spec, out)
    assert not late.made and late.index == ensure_corpus(spec, corpus_path).index
    assert [f.name for f in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"vocab_size": 262}, r"vocab_size=262: must be 263 \(256 bytes \+ 7 specials\) to 131072"),
        ({"vocab_size": 131_073}, r"vocab_size=131073: must be 263"),
        ({"validation_fraction": 0.0}, r"validation_fraction=0\.0: must be in \(0, 1\)"),
        ({"validation_fraction": 1.0}, r"validation_fraction=1\.0: must be in \(0, 1\)"),
        ({"validation_fraction": float("nan")}, r"validation_fraction=nan: must be in \(0, 1\)"),
        ({"fim_rate": 1.1}, r"fim_rate=1\.1: must be in \[0, 1\]"),
        ({"fim_rate": -0.1}, r"fim_rate=-0\.1: must be in \[0, 1\]"),
        ({"tokenizer_bytes": 0}, r"tokenizer_bytes=0: must be at least 1"),
        ({"shard_tokens": 0}, r"shard_tokens=0: must be at least 1"),
        ({"globs": ("",)}, r"globs=\('',\): must name a pattern"),
        ({"document_bytes": -1}, r"document_bytes=-1: must be at least 0"),
        ({"eos": "<x>"}, r"eos=<x>: a learned tokenizer has its own"),
        ({"tokenizer": "t"}, r"vocab_size=400: --tokenizer t brings its own"),
        (
            {"tokenizer": "t", "vocab_size": 0, "text_kind": "prose"},
            r"text_kind=prose: --tokenizer t brings its own",
        ),
        (
            {"tokenizer": "t", "vocab_size": 0, "tokenizer_bytes": 9},
            r"tokenizer_bytes=9: --tokenizer t brings its own",
        ),
        ({"field": "text"}, r"field=text: no file of .* has records"),
    ],
)
def test_bad_arguments(change: dict, message: str, spec: CorpusSpec, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message + r".*\. Fix: .*\.$") as caught:
        ensure_corpus(dataclasses.replace(spec, **change), tmp_path / "out")
    assert caught.value.exit_code == 2 and not (tmp_path / "out").exists()


def test_a_source_without_text(tmp_path: Path) -> None:
    source = write_folder(tmp_path / "source", ["", "same", "same"])
    with pytest.raises(DataError, match=r"1 different documents with text, a corpus needs 2"):
        ensure_corpus(CorpusSpec(str(source)), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_place_that_cannot_be_written(spec: CorpusSpec, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(DataError, match=r"cannot be written .*Fix: check disk and rights"):
        ensure_corpus(spec, tmp_path / "file" / "out")


def test_the_type_of_tokens() -> None:
    assert [token_dtype(n) for n in (263, 65_536, 65_537, 131_072)] == [
        "uint16",
        "uint16",
        "uint32",
        "uint32",
    ]


def test_wide_ids_survive_the_shards(tmp_path: Path) -> None:
    noise = np.random.default_rng(0)
    written = [noise.integers(0, 131_072, size=n).astype(np.uint32) for n in (5, 2, 9, 1, 30, 3)]
    writer = SplitWriter(tmp_path, "train", "uint32", shard_tokens=8)
    for ids in written:
        writer.add(ids)
    splits = {"train": writer.close()}
    index = {"dtype": "uint32", "vocab_size": 131_072, "splits": splits, "command": "again"}
    reader, stream = SplitReader(tmp_path, "train", index), np.concatenate(written)
    assert [len(shard) for shard in reader.shards] == [5 + 2 + 9, 1 + 30, 3]
    owners = np.repeat(np.arange(6), [len(ids) for ids in written])
    for start in range(len(stream)):
        for stop in range(start + 1, len(stream) + 1):
            assert (reader.read(start, stop, "row 0") == stream[start:stop]).all()
            assert (reader.document_ids(start, stop) == owners[start:stop]).all()
    assert all((reader.document(i) == ids).all() for i, ids in enumerate(written))


def test_documents_are_read_back_in_any_order(tmp_path: Path) -> None:
    with DocumentStore(tmp_path) as store:
        assert [store.add(raw) for raw in (b"one", b"two", b"one", b"three")] == [
            True,
            True,
            False,
            True,
        ]
        assert [store.read(i) for i in (2, 0, 1)] == [b"three", b"one", b"two"]
        assert store.add(b"four") and store.read(3) == b"four"
        assert store.total_bytes == 15 and store.digests[1] == hashlib.sha256(b"two").digest()


def test_preparing_needs_no_torch(source: Path, tmp_path: Path) -> None:
    code = (
        "import sys; from megacpp.cli.data import PrepareArgs, prepare;"
        f"prepare(PrepareArgs({str(source)!r}, vocab_size=300, out={str(tmp_path / 'out')!r}));"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, timeout=60)


def test_a_loop_of_links_is_one_line(spec: CorpusSpec, tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(DataError, match=r"out=.*loop: cannot be written \(.*\)\. Fix: check disk"):
        ensure_corpus(spec, tmp_path / "loop")
