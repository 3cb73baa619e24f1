"""Mixtures: exact shares after any row, rows by global number alone, stages, what is refused."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path

import pytest
import tokenizers
import torch

from megacpp.config.mix import mix_stages, raw_sources, source_folders
from megacpp.config.schema import Config, DataConfig
from megacpp.data.batches import IGNORED
from megacpp.data.corpus import Corpus
from megacpp.data.loader import Loader
from megacpp.data.mixture import Mixture, order_of_sources
from megacpp.data.prepare import CorpusSpec, ensure_corpus
from megacpp.data.tokenizer import CorpusTokenizer
from megacpp.errors import ConfigError, DataError
from megacpp.interop.tokenizer import write_tokenizer
from megacpp.run.corpus import open_corpus, prepare_sources
from tests.data.conftest import make_document, write_folder

SEQ = 24


@pytest.fixture(scope="module")
def folders(corpus_path: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return three corpora of one tokenizer, the second one small: it ends an epoch early."""
    home, found = tmp_path_factory.mktemp("mixture"), {"code": corpus_path}
    for name, numbers in (("prose", range(100, 104)), ("more", range(200, 230))):
        source = write_folder(home / f"{name}-texts", [make_document(n) for n in numbers])
        spec = CorpusSpec(str(source), tokenizer=str(corpus_path), validation_fraction=0.2)
        found[name] = ensure_corpus(spec, home / name).path
    return found


def mixture(folders: dict[str, Path], mix: str) -> Mixture:
    names = dict.fromkeys(name for stage in mix_stages(mix) for name in stage.shares)
    return Mixture({name: Corpus(folders[name], SEQ, 5) for name in names}, mix_stages(mix))


def shares_of(mix: str) -> tuple[tuple[str, Fraction], ...]:
    return tuple(mix_stages(mix)[0].shares.items())


def random_mixes() -> list[str]:
    noise = random.Random(0)
    mixes = ["a=1", "a=0.6,b=0.4", "a=1,b=1,c=1", "a=0.999,b=0.001", "a=0.3 b=.3 c=0.3 d=0.1"]
    for sources in (2, 3, 5, 9):
        weights = [noise.randint(1, 60) for _ in range(sources)]
        mixes.append(",".join(f"s{i}={weight}" for i, weight in enumerate(weights)))
    return mixes


@pytest.mark.parametrize("mix", random_mixes())
def test_after_any_row_no_source_is_a_row_from_its_share(mix: str) -> None:
    shares = shares_of(mix)
    names, ranks, counts = order_of_sources(shares)
    done = dict.fromkeys(counts, 0)
    for n, (name, rank) in enumerate(zip(names, ranks, strict=True), start=1):
        assert rank == done[name]
        done[name] += 1
        assert all(abs(done[source] - n * share) < 1 for source, share in shares)
    assert all(done[source] == len(names) * share for source, share in shares)


def test_rows_are_those_of_the_sources_in_their_order(folders: dict[str, Path]) -> None:
    mixed, done = mixture(folders, "code=0.6,prose=0.4"), Counter[str]()
    own = {name: Corpus(path, SEQ, 5) for name, path in folders.items()}
    rows = 3 * own["prose"].rows_per_epoch + 7
    batch = mixed.train_batch(range(rows))
    for row in range(rows):
        name = ("code", "prose", "code", "code", "prose")[row % 5]
        expected = own[name].train_batch([done[name]])
        done[name] += 1
        assert torch.equal(batch.ids_BT[row], expected.ids_BT[0])
        assert torch.equal(batch.labels_BT[row], expected.labels_BT[0])
        assert torch.equal(batch.docs.ids_BT[row], expected.docs.ids_BT[0])
        assert batch.sources_SB is not None
        assert batch.sources_SB[:, row].tolist() == [name == "code", name == "prose"]
    assert done["prose"] > own["prose"].rows_per_epoch, "a source that ends begins again"
    targets = (batch.labels_BT != IGNORED).sum(1).double()
    assert batch.sources_SB is not None
    assert (batch.sources_SB @ targets).tolist() == list(batch.source_targets)
    assert sum(batch.source_targets) == batch.num_targets


@pytest.mark.parametrize(("ranks", "device_batch"), [(1, 12), (2, 3), (3, 1), (4, 3)])
def test_any_mesh_reads_the_stream_of_one_process(
    folders: dict[str, Path], ranks: int, device_batch: int
) -> None:
    mix = "code=1@0,code=1,prose=2,more=0.5@2"
    alone, seen = mixture(folders, mix), {}
    for step in range(4):
        alone.begin_step(step, 12 * step)
        one = alone.train_batch(range(12 * step, 12 * step + 12))
        seen |= {row: one.ids_BT[i] for i, row in enumerate(one.rows)}
    for rank in range(ranks):
        mixed = mixture(folders, mix)
        loader = Loader(mixed, rank, ranks, device_batch)
        for step in range(4):
            mixed.begin_step(step, loader.position)
            for batch in loader.take(12 // (ranks * device_batch)):
                assert all(
                    torch.equal(ids, seen[row])
                    for row, ids in zip(batch.rows, batch.ids_BT, strict=True)
                )


def places(mixed: Mixture, steps: Sequence[int], rows: int) -> list[tuple[str, int]]:
    found = []
    for step in steps:
        mixed.begin_step(step, step * rows)
        found += [mixed.place(row) for row in range(step * rows, (step + 1) * rows)]
    return found


def test_a_later_stage_goes_on_where_each_source_was(folders: dict[str, Path]) -> None:
    mixed = mixture(folders, "code=2,prose=1@0,code=1,more=1@3,prose=1@5")
    found = places(mixed, range(7), 7)
    by_source: dict[str, list[int]] = {}
    for name, row in found:
        by_source.setdefault(name, []).append(row)
    assert all(rows == list(range(len(rows))) for rows in by_source.values()), "none left out"
    assert Counter(name for name, _ in found[21:35]) == {"code": 7, "more": 7}
    assert {name for name, _ in found[35:]} == {"prose"}


def test_a_resumed_mixture_goes_on_whatever_its_setting_says_of_the_past(
    folders: dict[str, Path],
) -> None:
    mix = "code=2,prose=1@0,code=1,more=1@3,prose=1@5"
    straight = places(mixture(folders, mix), range(8), 7)
    for stop in range(1, 8):
        before = mixture(folders, mix)
        places(before, range(stop), 7)
        after = mixture(folders, mix)
        after.restore(before.state())
        assert places(after, range(stop, 8), 7) == straight[7 * stop :]
    before = mixture(folders, mix)
    places(before, range(4), 7)
    changed = mixture(folders, "prose=1@0,code=1@1,more=3,code=1@4")
    changed.restore(before.state())
    found = places(changed, range(4, 6), 7)
    assert [changed.place(row) for row in range(28)] == straight[:28], "rows that were read"
    assert Counter(name for name, _ in found) == {"more": 11, "code": 3}


def test_held_out_rows_are_those_of_all_sources(folders: dict[str, Path]) -> None:
    mixed = mixture(folders, "code=0.9,prose=0.1")
    own = [Corpus(folders[name], SEQ) for name in ("code", "prose")]
    rows = mixed.num_validation_rows
    batch = mixed.validation_batch(range(rows + 3))
    expected = torch.cat([c.validation_batch(range(c.num_validation_rows)).ids_BT for c in own])
    assert sorted(batch.ids_BT[:rows].tolist()) == sorted(expected.tolist())
    sizes = torch.tensor([c.num_validation_rows for c in own], dtype=torch.float64)
    assert batch.sources_SB is not None
    for n in range(1, rows + 1):  # any first part has about as much of each source
        off = batch.sources_SB[:, :n].sum(1) - n * sizes / rows
        assert off.abs().max() <= 1, n
    assert batch.num_targets == mixed.validation_targets == sum(c.validation_targets for c in own)
    weights = [c.validation_text_bytes for c in own]
    gzip = [c.gzip_bits_per_byte() * w for c, w in zip(own, weights, strict=True)]
    assert mixed.gzip_bits_per_byte() == pytest.approx(sum(gzip) / sum(weights), rel=1e-12)
    assert mixed.no_verdict.startswith("code: ")


def test_a_source_without_a_share_is_held_out_alone(folders: dict[str, Path]) -> None:
    """No row of it is trained on until a stage gives it a share; its held-out rows are there."""
    mixed = mixture(folders, "code=1,prose=0@0,code=1,prose=1@2")
    mixed.begin_step(0, 0)
    assert {mixed.place(row)[0] for row in range(40)} == {"code"}
    mixed.begin_step(2, 8)
    assert [mixed.place(row) for row in range(8, 11)] == [("code", 8), ("prose", 0), ("code", 9)]
    assert mixed.segments[-1].before == {"code": 8, "prose": 0}
    sources_SB = mixed.validation_batch(range(mixed.num_validation_rows)).sources_SB
    assert sources_SB is not None and (sources_SB.sum(1) > 0).all()


@pytest.mark.parametrize(
    ("mix", "words"),
    [
        ("code", "'code' isn't NAME=SHARE"),
        ("code=0", "code must have a share above 0"),
        ("code=1@0,code=0,prose=0@9", "code, prose must have a share above 0"),
        ("code=-1", "isn't NAME=SHARE"),
        ("code=1/3", "isn't NAME=SHARE"),
        ("=1", "isn't NAME=SHARE"),
        (",", "isn't NAME=SHARE"),
        ("code=1,code=2", "one that the stage has already"),
        ("a/code=1,b/code=2", "one that the stage has already"),
        ("code=0.12345,prose=1", "round them"),
        ("code=1@3", r"steps [3], which must rise from 0"),
        ("code=1@0,prose=1@9,code=1@9", r"steps [0, 9, 9]"),
        ("code=1@0,prose=1", "its last stage has no @STEP"),
    ],
)
def test_what_is_no_mixture_is_refused(mix: str, words: str) -> None:
    with pytest.raises(ValueError) as error:
        mix_stages(mix)
    assert words in str(error.value)


def test_a_name_is_a_folder_beside_the_path() -> None:
    found = source_folders(DataConfig("some/where", "code=1,../x/prose=1,/abs/more=2"))
    assert found == {
        "code": Path("some/code"),
        "prose": Path("../x/prose"),
        "more": Path("/abs/more"),
    }
    far = DataConfig("data/x", "s3://b/a/notes/=1,hf://datasets/o/talks=2.5@0")
    assert raw_sources(far) == {
        Path("data/notes.prepared"): "s3://b/a/notes/",
        Path("data/talks.prepared"): "hf://datasets/o/talks",
    }
    assert list(mix_stages(far.mix)[0].shares) == list(source_folders(far)) == ["notes", "talks"]
    assert source_folders(DataConfig()) == {}
    with pytest.raises(ValueError, match="would have the same name"):
        source_folders(DataConfig("data/x", "code=1@0,a/code=1@7"))


def config_of(folders: dict[str, Path], mix: str, **more: str) -> Config:
    words = (f"{(folders | more)[w.split('=')[0]]}={w.split('=')[1]}" for w in mix.split(","))
    return Config(data=DataConfig("nowhere", ",".join(words), seq_len=SEQ))


def test_another_tokenizer_and_a_missing_source_are_refused(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    texts = write_folder(tmp_path / "texts", [make_document(n) for n in range(300, 310)])
    other = ensure_corpus(CorpusSpec(str(texts), vocab_size=300), tmp_path / "other").path
    with pytest.raises(ConfigError) as error:
        open_corpus(config_of(folders, "code=1,other=1", other=str(other)))
    assert "other has another tokenizer than" in str(error.value)
    assert f"prepare {other} with --tokenizer {folders['code']} --force" in str(error.value)
    command = f"data prepare YOUR_TEXTS --out {tmp_path / 'gone'} --tokenizer {folders['code']}`"
    with pytest.raises(DataError, match=r"^data\.mix=.*gone: no such folder") as missing:
        open_corpus(config_of(folders, "code=1,gone=1", gone=str(tmp_path / "gone")))
    assert command in str(missing.value)
    assert "\n" not in str(error.value)


def test_a_tokenizer_that_was_exported_makes_the_same_ids(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    """An export puts a post-processor into the file, which changes its hash and no id."""
    (tmp_path / "exported").mkdir()
    write_tokenizer(
        CorpusTokenizer.load(folders["code"] / "tokenizer.json"), tmp_path / "exported", 64
    )
    source = write_folder(tmp_path / "texts", [make_document(n) for n in range(300, 330)])
    spec = CorpusSpec(str(source), tokenizer=str(tmp_path / "exported"))
    both = folders | {"late": ensure_corpus(spec, tmp_path / "late").path}
    hashes = {Corpus(both[name], SEQ).index["tokenizer"]["sha256"] for name in ("code", "late")}
    assert len(hashes) == 2
    assert mixture(both, "code=1,late=1").train_batch([0, 1]).num_targets
    saved = json.loads((both["late"] / "tokenizer.json").read_text())
    saved["model"]["merges"].pop()
    other = tokenizers.Tokenizer.from_str(json.dumps(saved))
    other.save(str(tmp_path / "exported" / "tokenizer.json"))
    both["other"] = ensure_corpus(spec, tmp_path / "other").path
    with pytest.raises(ConfigError, match="other has another tokenizer than code"):
        mixture(both, "code=1,other=1")


def test_texts_are_prepared_once(
    folders: dict[str, Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    texts = write_folder(tmp_path / "texts", [make_document(n) for n in range(300, 310)])
    config = config_of(folders, "code=1,texts=1", texts=str(texts))
    folder = "texts.prepared"
    prepare_sources(config)
    assert f"{texts} is being prepared for {folder}" in capsys.readouterr().out
    prepare_sources(config)
    assert f"{texts} is prepared in {folder}" in capsys.readouterr().out
    write_folder(texts, [make_document(310)])
    prepare_sources(config)
    assert f"{texts} is being prepared for {folder}" in capsys.readouterr().out


def test_a_damaged_source_is_named(folders: dict[str, Path], tmp_path: Path) -> None:
    damaged = tmp_path / "damaged"
    damaged.mkdir()
    for file in folders["prose"].iterdir():
        (damaged / file.name).write_bytes(file.read_bytes())
    shard = damaged / "train-00000.bin"
    raw = shard.read_bytes()
    shard.write_bytes(raw[:60] + bytes([raw[60] ^ 1]) + raw[61:])
    found = open_corpus(config_of(folders, "code=1,damaged=1", damaged=str(damaged)))
    with pytest.raises(DataError, match=r"source damaged: train-00000.bin block 0.*CRC-32") as it:
        found.train_batch(range(8))
    assert "\n" not in str(it.value)


def test_the_fingerprint_is_of_the_sources_alone(folders: dict[str, Path]) -> None:
    one = mixture(folders, "code=1,prose=1").fingerprint
    assert one == mixture(folders, "prose=3@0,code=1@5").fingerprint
    assert one != mixture(folders, "code=1,more=1").fingerprint
    assert one != mixture(folders, "code=1").fingerprint
