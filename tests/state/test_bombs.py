"""Files that would run code if they were read as pickles or YAML objects: none ever is.

Each bomb makes a file, the canary. The scan of the source forbids what could set one off.
"""

from __future__ import annotations

import ast
import io
import json
import pickle
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from megacpp.cli import replay
from megacpp.cli.main import main
from megacpp.config.arguments import parse_run
from megacpp.data.corpus import Corpus
from megacpp.errors import MegacppError
from megacpp.interop.load import open_source
from megacpp.interop.places import locate, read_model
from megacpp.state.checkpoint import load_checkpoint, newest_sound, verify
from megacpp.state.export import load_exported
from megacpp.state.published import candidates, passed_over
from tests.figures import Record
from tests.launch import ROOT, forked
from tests.test_run import SMALL


class Bomb:
    """Object whose pickle opens a file for writing when it is read."""

    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str, str]]:
        return open, (str(self.canary), "w")


def bombs(canary: Path) -> dict[str, bytes]:
    """Return the content of files that make the canary, by the reader that they are for."""
    packed = io.BytesIO()
    torch.save({"model": Bomb(canary)}, packed)
    return {
        "text": pickle.dumps(Bomb(canary), protocol=0),
        "binary": pickle.dumps(Bomb(canary), protocol=2),
        "torch": packed.getvalue(),
        "yaml": f"run: !!python/object/apply:builtins.open [{canary}, w]\n".encode(),
    }


def test_the_bombs_are_live(tmp_path: Path) -> None:
    yaml = pytest.importorskip("yaml")
    canary = tmp_path / "canary"
    found = bombs(canary)
    for act in (
        lambda: pickle.loads(found["text"]),
        lambda: pickle.loads(found["binary"]),
        lambda: torch.load(io.BytesIO(found["torch"]), weights_only=False),
        lambda: yaml.load(found["yaml"], yaml.UnsafeLoader),
    ):
        act()
        canary.unlink()


@pytest.fixture(scope="module")
def home(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a corpus and of a run on it."""
    folder = tmp_path_factory.mktemp("home")
    shutil.copytree(corpus, folder / "corpus")
    flags = ["--data.path", str(folder / "corpus"), "--run.dir", str(folder / "run")]
    flags += ["--run.steps", "2", "--checkpoint.every", "1", "--train.device-batch-size", "2"]
    done = forked("tiny", *SMALL, *flags)
    assert done.returncode == 0, done.stderr
    return folder


def readers(home: Path) -> Iterator[Callable[[], Any]]:
    """Yield whatever reads files of a run or a corpus, but tensors that are on no disk."""
    run, saved = home / "run", home / "run/checkpoints"
    yield lambda: main(["watch", str(run), "--once"])
    yield lambda: main(["report", str(run), "--json"])
    yield lambda: main(["replay", str(run)])
    yield lambda: main(["show", "--run.dir", str(run)])
    yield lambda: main(["export", str(run), "--out", str(home / "exported")])
    yield lambda: parse_run(["--config", str(run / "config.json")], 1, resumes=True)
    yield lambda: [passed_over(saved, path) + verify(path) for path in candidates(saved)]
    yield lambda: newest_sound(saved)
    yield lambda: load_checkpoint(saved / "step-000002", {})
    yield lambda: load_exported(run / "final")
    yield lambda: read_model(locate(str(run), "checkpoint.init"))
    yield lambda: Corpus(home / "corpus", 48, verify=True).train_batch([0])


def told(act: Callable[[], Any]) -> str:
    """Return the error that reading ended with, if it isn't one of ours."""
    try:
        act()
    except (MegacppError, SystemExit):
        pass
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


@pytest.mark.slow
def test_no_file_of_a_run_or_a_corpus_runs_code(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, record_property: Record
) -> None:
    """Each file in turn, and strangers that other programs load."""
    monkeypatch.setattr(replay, "_run", lambda *_: 0)
    canary, tried, wrong = tmp_path / "canary", 0, []
    strangers = ["run/checkpoints/step-000002/.metadata", "run/final/pytorch_model.bin"]
    strangers += ["run/checkpoints/step-000002/__0_0.distcp", "run/rewinds.jsonl"]
    files = [str(path.relative_to(home)) for path in home.rglob("*") if path.is_file()]
    for name in sorted({*files, *strangers}):
        path = home / name
        before = path.read_bytes() if path.exists() else None
        for kind in ("text", "torch"):
            path.write_bytes(bombs(canary)[kind])
            wrong += [f"{name}: {said}" for act in readers(home) if (said := told(act))]
            assert not canary.exists(), name
            tried += 1
        path.unlink() if before is None else path.write_bytes(before)
    assert wrong == []
    record_property("pickles and YAML objects in place of a file, none run", tried)


@pytest.mark.slow
def test_no_file_from_elsewhere_runs_code(tmp_path: Path, record_property: Record) -> None:
    """Folders of weights, files of settings, and sources of a corpus."""
    canary, wrong, tried = tmp_path / "canary", [], 0
    weights, sources = tmp_path / "weights", tmp_path / "sources"
    weights.mkdir()
    sources.mkdir()
    init = ["--checkpoint.init", str(weights), "--run.dir", str(tmp_path / "run")]
    names = ["model.safetensors", "model.safetensors.index.json", "config.json"]
    names += ["pytorch_model.bin", "tokenizer.json", "tokenizer_config.json"]
    ends = [".jsonl", ".json", ".txt", ".parquet", ".arrow", ".jsonl.gz", ".jsonl.zst", ".pkl"]
    for kind, content in bombs(canary).items():
        for name in names:
            shutil.rmtree(weights)
            weights.mkdir()
            (weights / "config.json").write_text(json.dumps({"model_type": "llama"}))
            (weights / name).write_bytes(content)
            for act in (
                lambda: parse_run(["tiny", *init], 1),
                lambda: open_source(found := locate(str(weights), ""), read_model(found)),
                lambda: main(["sample", str(weights), "--prompt", "x"]),
            ):
                wrong += [f"{kind} {name}: {said}"] if (said := told(act)) else []
        for end in (".json", ".toml", ".yaml"):
            (path := tmp_path / f"settings{end}").write_bytes(content)
            said = told(lambda path=path: parse_run(["tiny", "--config", str(path)], 1))
            wrong += [f"{kind} {end}: {said}"] if said else []
        for end in ends:
            (path := sources / f"{kind}{end}").write_bytes(content)
            out = ["--out", str(tmp_path / "made"), "--workers", "1"]
            said = told(lambda path=path, out=out: main(["data", "prepare", str(path), *out]))
            wrong += [f"{kind} {end}: {said}"] if said else []
        tried += len(names) + 3 + len(ends)
        assert not canary.exists(), kind
    assert wrong == []
    record_property("pickles and YAML objects in place of a file, none run", tried)


# ---- the source ---------------------------------------------------------------------------------

# Pickles between processes that this program started, through pipes; and one that is written.
PIPES = {"megacpp/lessons/ranks.py", "megacpp/data/workers.py"}
WRITES = {"megacpp/memory/timeline.py": {"pickle.dumps"}}
PACKAGES = ("megacpp", "parallel", "optim", "checkpointing", "bench", "train.py")
MODULES = {"pickle", "_pickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}
CALLS = {"eval", "exec", "torch.load", "yaml.load", "yaml.unsafe_load", "yaml.full_load"}


def dangers(text: str) -> list[str]:
    """Return the lines of a source that may run code of a file, with their reasons."""
    found = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            names = {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names = {(node.module or "").partition(".")[0]}
        elif isinstance(node, ast.Call):
            name, given = ast.unparse(node.func), {k.arg: k.value for k in node.keywords}
            safe = isinstance(only := given.get("weights_only"), ast.Constant) and only.value
            if name in CALLS and not (name == "torch.load" and safe is True):
                found.append(f"{node.lineno}: {name}")
            for key in ("allow_pickle", "trust_remote_code"):
                value = given.get(key, ast.Constant(False))
                if not isinstance(value, ast.Constant) or value.value:
                    found.append(f"{node.lineno}: {key}")
            continue
        else:
            continue
        found += [f"{node.lineno}: {name}" for name in sorted(names & MODULES)]
    return found


@pytest.mark.parametrize(
    "line",
    [
        "import pickle",
        "from pickle import loads",
        "import dill as d",
        "torch.load(path)",
        "torch.load(path, weights_only=False)",
        "torch.load(path, weights_only=some)",
        "yaml.load(text, Loader)",
        "eval(text)",
        "exec(text)",
        "np.load(path, allow_pickle=True)",
        "AutoModel.from_pretrained(path, trust_remote_code=trusted)",
    ],
)
def test_the_scan_sees_what_runs_code(line: str) -> None:
    assert dangers(f"def f():\n    {line}\n")


def test_nothing_in_the_source_runs_code_of_a_file() -> None:
    fine = "torch.load(path, weights_only=True); np.load(path); model.eval(); yaml.safe_load(text)"
    assert dangers(fine) == []
    found: dict[str, set[str]] = {}
    for package in PACKAGES:
        for path in [ROOT / package] if package.endswith(".py") else (ROOT / package).rglob("*.py"):
            name = str(path.relative_to(ROOT))
            if lines := dangers(path.read_text()):
                found[name] = {line.split(": ")[1] for line in lines}
    assert found == {name: {"pickle"} for name in [*PIPES, *WRITES]}
    for name, calls in WRITES.items():
        assert set(re.findall(r"\bpickle\.\w+", (ROOT / name).read_text())) == calls
