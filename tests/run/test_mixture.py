"""Runs over a mixture: losses by source, any mesh, kill and resume, shares that change, damage."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from megacpp.cli.main import main
from megacpp.cli.weights import held_out_documents, tokenizer_path
from megacpp.data.mixture import Mixture
from megacpp.data.prepare import CorpusSpec, ensure_corpus
from megacpp.report.data import gather
from megacpp.report.page import page
from tests.launch import Done, forked
from tests.test_run import ADAMW, SMALL, records

MIX = "corpus=2,other=1@0,other=1@3,corpus=1,other=3@5"
STEPS = ["--run.steps", "7", "--checkpoint.every", "4", "--run.sample-tokens", "0"]


@pytest.fixture(scope="module")
def home(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with two corpora of one tokenizer."""
    home = tmp_path_factory.mktemp("mix")
    shutil.copytree(corpus, home / "corpus")
    texts = [f"Value {i} is {i * i % 97}; " * (3 + i % 7) for i in range(80)]
    (home / "texts.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts))
    spec = CorpusSpec(str(home / "texts.jsonl"), tokenizer=str(corpus), validation_fraction=0.1)
    ensure_corpus(spec, home / "other")
    return home


def start(home: Path, name: str, *flags: str, ranks: int = 1, mix: str = MIX) -> Done:
    paths = ["--data.path", str(home / "corpus"), "--run.dir", str(home / name)]
    batch = ["--train.device-batch-size", str(4 // min(ranks, 4)), "--train.tokens-per-step", "384"]
    return forked(
        "tiny", *SMALL, *ADAMW, *STEPS, *paths, *batch, "--data.mix", mix, *flags, ranks=ranks
    )


@pytest.fixture(scope="module")
def straight(home: Path) -> Path:
    done = start(home, "straight")
    assert done.returncode == 0, done.stderr
    assert "from step 3: other 1" in done.stdout
    return home / "straight"


def same(one: Path, other: Path, limit: float) -> None:
    pairs = list(zip(records(one), records(other), strict=True))
    assert len(pairs) == 7
    for a, b in pairs:
        for key in ("loss", "grad_norm"):
            assert a[key] == pytest.approx(b[key], rel=limit or 0, abs=0), (key, a["step"])
        assert a["loss_by_source"] == pytest.approx(b["loss_by_source"], rel=limit or 0, abs=0)


def test_losses_are_recorded_by_source(straight: Path) -> None:
    rows = records(straight)
    assert [sorted(row["loss_by_source"]) for row in rows] == [
        *[["corpus", "other"]] * 3, *[["other"]] * 2, *[["corpus", "other"]] * 2
    ]  # fmt: skip
    for row in rows:
        low, high = min(row["loss_by_source"].values()), max(row["loss_by_source"].values())
        assert low * (1 - 1e-14) <= row["loss"] <= high * (1 + 1e-14)
    alone = rows[3]
    assert alone["loss_by_source"]["other"] == pytest.approx(alone["loss"], rel=1e-14)
    assert rows[0]["loss_by_source"]["corpus"] != rows[0]["loss_by_source"]["other"]
    assert "loss by source of the mixture" in page(gather(straight))
    tags = (straight / "metrics.jsonl").read_text()
    assert "NaN" not in tags


@pytest.mark.parametrize(
    ("ranks", "flags"),
    [
        (2, ["--mesh.cp", "2", "--mesh.dp-shard", "1"]),
        (2, ["--mesh.pp", "2", "--train.device-batch-size", "2", "--train.num-chunks", "2"]),
        (2, ["--mesh.tp", "2", "--model.attention.num-kv-heads", "2"]),
    ],
)
def test_any_mesh_is_the_same_run(home: Path, straight: Path, ranks: int, flags: list[str]) -> None:
    name = "-".join(flags).replace(".", "")
    alone = straight
    if "--mesh.tp" in flags:
        alone = home / "two-kv-heads"
        assert start(home, alone.name, *flags[2:]).returncode == 0
    done = start(home, name, *flags, ranks=ranks)
    assert done.returncode == 0, done.stderr
    same(alone, home / name, 1e-12)


def half_way(home: Path, run: Path, name: str) -> None:
    """Copy a run as a kill after step 4 leaves it, between two changes of the shares."""
    shutil.copytree(run, home / name)
    shutil.rmtree(home / name / "checkpoints/step-000007")
    shutil.rmtree(home / name / "final")
    (home / name / "checkpoints/latest").write_text("step-000004")


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_killed_run_goes_on_at_every_source(home: Path, straight: Path, ranks: int) -> None:
    half_way(home, straight, f"killed-{ranks}")
    done = start(home, f"killed-{ranks}", ranks=ranks)
    assert done.returncode == 0, done.stderr
    same(straight, home / f"killed-{ranks}", 0.0 if ranks == 1 else 1e-12)


def test_a_resumed_run_may_change_the_mixture_and_says_so(home: Path, straight: Path) -> None:
    half_way(home, straight, "changed")
    done = start(home, "changed", mix="other=1,corpus=1")
    assert done.returncode == 0, done.stderr
    assert f"data.mix changed from {MIX} to other=1,corpus=1 on resume" in " ".join(
        done.stdout.split()
    )
    extra = json.loads((home / "changed/checkpoints/step-000007/extra.json").read_text())
    starts = [one["first_row"] for one in extra["extra"]["others"]["mixture"]["segments"]]
    assert starts == [0, 3 * 8, 4 * 8]


def test_held_out_losses_are_recorded_by_source(straight: Path) -> None:
    *_, last = records(straight)
    one = json.loads((straight / "evaluations.jsonl").read_text().splitlines()[-1])
    assert last["val_loss"] == one["val_loss"] and sorted(one["val_loss"]) == ["corpus", "other"]
    low, high = min(one["val_loss"].values()), max(one["val_loss"].values())
    assert low < one["loss"] < high
    assert "corpus, held out" in page(gather(straight))


@pytest.mark.parametrize("ranks", [1, 2])
def test_texts_are_prepared_once_at_the_start(home: Path, ranks: int) -> None:
    """A folder of texts and a file of records beside a corpus; changed texts are another corpus."""
    texts = home / f"raw-{ranks}" / "notes"
    texts.mkdir(parents=True)
    for i in range(70):
        (texts / f"{i}.txt").write_text(f"Note {i} says {i * i % 89} or less.\n" * 9)
    mix = f"corpus=1,{texts}=1,{home / 'texts.jsonl'}=1"
    flags = ["--run.steps", "2"]
    begun = start(home, f"of-texts-{ranks}", *flags, ranks=ranks, mix=mix)
    assert begun.returncode == 0, begun.stderr
    folder = home / "notes.prepared"
    assert f"{texts} is being prepared for {folder}" in begun.stdout
    for name in ("corpus", "notes", "texts.jsonl"):
        assert f"val_loss/{name}=" in begun.stdout
    made = (folder / "index.json").stat().st_mtime_ns
    index = json.loads((folder / "index.json").read_text())
    assert index["tokenizer"]["given"].startswith(str(home / "corpus"))
    again = start(home, f"of-texts-{ranks}", "--run.steps", "3", ranks=ranks, mix=mix)
    assert again.returncode == 0 and f"{texts} is prepared in {folder}" in again.stdout
    assert (folder / "index.json").stat().st_mtime_ns == made
    (texts / "70.txt").write_text("One more.\n" * 9)
    other = start(home, f"of-texts-{ranks}", "--run.steps", "4", ranks=ranks, mix=mix)
    assert other.returncode == 4 and "the corpus [" in other.stderr
    assert len(other.stderr.strip().splitlines()) == 1
    shutil.rmtree(folder)


def test_texts_at_a_url_are_a_source(home: Path, tmp_path: Path) -> None:
    """They are fetched and prepared once, again when they have changed; a wrong URL is one line."""
    texts = tmp_path / "far"
    texts.mkdir()
    for i in range(70):
        (texts / f"{i}.txt").write_text(f"Word {i} is {i * i % 89} or less.\n" * 9)
    url = f"file://{texts}"
    mix, flags = f"corpus=1@0,corpus=1,{url}=1@1", ["--run.steps", "2"]
    begun = start(home, "of-a-url", *flags, mix=mix)
    assert begun.returncode == 0 and "val_loss/far=" in begun.stdout, begun.stderr
    assert f"{url} is being prepared for {home / 'far.prepared'}" in begun.stdout
    assert records(home / "of-a-url")[-1]["loss_by_source"].keys() == {"corpus", "far"}
    (texts / "70.txt").write_text("One more.\n" * 9)
    other = start(home, "of-a-url", "--run.steps", "3", mix=mix)
    assert other.returncode == 4 and "the corpus [" in other.stderr
    gone = start(home, "of-nowhere", mix=f"corpus=1,{url}er=1")
    assert gone.returncode == 3 and len(gone.stderr.strip().splitlines()) == 1, gone.stderr
    assert gone.stderr.startswith(f"error: data.mix: source={url}er: ") and "Fix: " in gone.stderr
    shutil.rmtree(home / "far.prepared")


def test_a_data_set_is_a_source(home: Path, tmp_path: Path) -> None:
    """A split that `datasets` streams is prepared once, with the tokenizer of the first source."""
    datasets = pytest.importorskip("datasets")
    texts = [f"Word {i} is {i * i % 89} or less.\n" * 9 for i in range(70)]
    (tmp_path / "served").mkdir()
    datasets.Dataset.from_dict({"text": texts}).to_parquet(tmp_path / "served/train.parquet")
    source = f"datasets:{tmp_path / 'served'}:train"
    mix, flags = f"corpus=1,{source}=1", ["--run.steps", "2"]
    begun = start(home, "of-a-set", *flags, mix=mix)
    assert begun.returncode == 0 and "val_loss/served-train=" in begun.stdout, begun.stderr
    folder = home / "served-train.prepared"
    assert f"{source} is being prepared for {folder}" in begun.stdout
    again = start(home, "of-a-set-again", *flags, mix=mix)
    assert f"{source} is prepared in {folder}" in again.stdout, again.stderr
    gone = start(home, "of-no-set", mix=f"corpus=1,{source}ing=1")
    assert gone.returncode == 3 and len(gone.stderr.strip().splitlines()) == 1, gone.stderr
    assert "has the splits train" in gone.stderr


def test_texts_that_cannot_be_prepared_are_one_line(home: Path) -> None:
    empty = home / "empty/texts"
    empty.mkdir(parents=True)
    done = start(home, "of-nothing", mix=f"corpus=1,{empty}=1")
    assert done.returncode == 3 and len(done.stderr.strip().splitlines()) == 1, done.stderr
    assert done.stderr.startswith("error: data.mix: ") and "Fix: " in done.stderr


def test_another_source_is_another_corpus(home: Path, straight: Path) -> None:
    half_way(home, straight, "fewer")
    done = start(home, "fewer", mix="corpus=1")
    assert done.returncode == 4 and done.stderr.startswith("error: data.mix=corpus=1: the corpus [")
    assert len(done.stderr.strip().splitlines()) == 1


def test_a_damaged_source_ends_the_run(home: Path) -> None:
    damaged = Path(shutil.copytree(home / "other", home / "damaged"))
    shard = damaged / "train-00000.bin"
    raw = shard.read_bytes()
    shard.write_bytes(raw[:8] + bytes([raw[8] ^ 1]) + raw[9:])
    done = start(home, "of-damaged", mix="corpus=1,damaged=1")
    assert done.returncode == 3 and len(done.stderr.strip().splitlines()) == 1, done.stderr
    assert "source damaged: train-00000.bin block 0" in done.stderr


def test_a_run_without_final_weights_has_the_tokenizer_of_its_first_source(tmp_path: Path) -> None:
    data = {"path": "data/elsewhere", "mix": "code=1,prose=1"}
    config = {"config": {"model": {}, "data": data}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert tokenizer_path(tmp_path) == Path("data/code/tokenizer.json")
    del data["mix"]  # of an older run
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert tokenizer_path(tmp_path) == Path("data/elsewhere/tokenizer.json")


def test_validate_names_the_mixture(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["tiny", "--data.path", str(home / "corpus"), "--data.mix", "corpus=1,other=1"]
    assert main(["validate", *flags, *SMALL, "--data"]) == 0
    assert "the corpus of data.mix=corpus=1,other=1" in " ".join(capsys.readouterr().out.split())


def test_the_position_is_saved_by_source(straight: Path, home: Path) -> None:
    extra = json.loads((straight / "checkpoints/step-000004/extra.json").read_text())["extra"]
    mixture = Mixture.__new__(Mixture)
    mixture.restore(extra["others"]["mixture"])
    assert mixture.segments[-1].rows_before(extra["rows"]) == {"corpus": 16, "other": 8 + 8}


def test_relative_sources_are_found_from_any_folder(
    home: Path, straight: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are below the folder in which the run was started; one has its name, one its path."""
    folder = tmp_path / "run"
    shutil.copytree(straight, folder)
    shutil.rmtree(folder / "final")
    for name in ("launch", "config"):
        content = json.loads((folder / f"{name}.json").read_text())
        content["config"]["data"] |= {"path": "nowhere/else"}
        content["config"]["data"] |= {"mix": MIX.replace("other", f"{home.name}/other")}
        content["folder"] = str(home.parent)
        (folder / f"{name}.json").write_text(json.dumps(content))
    monkeypatch.chdir(tmp_path)
    (home.parent / "nowhere").mkdir()
    (home.parent / "nowhere/corpus").symlink_to(home / "corpus")
    there = home.parent / "nowhere/corpus/tokenizer.json"
    assert tokenizer_path(folder) == there
    texts = list(held_out_documents(folder))
    assert 0 < sum(text.startswith("Value ") for text in texts) < len(texts)
    assert main(["replay", str(folder), "--from", "4", "--steps", "2"]) == 0
