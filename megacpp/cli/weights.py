"""Weights and tokenizer of a run, as commands ask for them; torch is imported inside functions."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megacpp.config.checks.every import check
from megacpp.config.mix import corpus_folders
from megacpp.config.schema import Config, DataConfig
from megacpp.errors import config_error
from megacpp.report.files import LAUNCH, damaged, read_object
from megacpp.state.files import read_parsed
from megacpp.state.local_copy import local_copy

if TYPE_CHECKING:
    from megacpp.data.tokenizer import CorpusTokenizer
    from megacpp.model.hybrid import HybridLM


def find_weights(run: Path, checkpoint: str) -> Path:
    """Return the folder of the requested weights: `final`, `latest` or a step.

    A Hugging Face folder has its own weights alone, `final`.

    Raises:
        ConfigError: the run lacks them; the error names a checkpoint that it has.
    """
    if not run.is_dir():
        raise config_error("run", run, "no such run folder", "give the folder of a run")
    saved = run / "checkpoints"
    if checkpoint == "final":
        folder = run if is_hf_folder(run) else run / "final"
    elif checkpoint == "latest":
        from megacpp.state.published import latest_checkpoint

        folder = latest_checkpoint(saved) or saved / "latest"
    elif checkpoint.isdecimal():
        folder = saved / f"step-{int(checkpoint):06d}"
    else:
        rule = "must be final, latest or a step"
        raise config_error("checkpoint", checkpoint, rule, "write --checkpoint final")
    if not folder.is_dir():
        steps = [
            p.name.removeprefix("step-").lstrip("0") for p in sorted(saved.glob("step-*[0-9]"))
        ]
        has = f"write --checkpoint {steps[-1]}" if steps else "train it first"
        if not steps and any((run / name).is_file() for name in ("manifest.json", "config.json")):
            has = "give the folder of its run (these are weights), or leave out --checkpoint"
        raise config_error("checkpoint", checkpoint, f"{run} has no such weights", has)
    return folder


def run_folder(source: str, checkpoint: str) -> Path:
    """Return the folder of a run; of one at a URL a copy with the requested weights.

    Raises:
        ConfigError: the URL lacks them, or can't be read.
    """
    return Path(local_copy(source, "run", "weights", checkpoint))


def is_hf_folder(folder: Path) -> bool:
    """Return whether a folder is one of Hugging Face's format, and no run."""
    path = folder / "config.json"
    return path.is_file() and "model_type" in read_object(path)


def find_tokenizer(run_folder: Path) -> CorpusTokenizer:
    """Return the tokenizer beside the final weights, else that of the training corpus."""
    from megacpp.data.tokenizer import CorpusTokenizer

    return CorpusTokenizer.load(tokenizer_path(run_folder))


def tokenizer_path(run_folder: Path) -> Path:
    """Return the tokenizer.json beside the final weights, else that of the training corpus.

    Of several corpora: the first one with a chat template, else the first.

    Raises:
        ConfigError: a Hugging Face folder has none.
    """
    beside = run_folder if is_hf_folder(run_folder) else run_folder / "final"
    path = beside / "tokenizer.json"
    if path.is_file():
        return path
    if beside == run_folder:
        fix = "fetch tokenizer.json and tokenizer_config.json too"
        raise config_error("run", run_folder, "has no tokenizer.json", fix)
    from megacpp.data.specials import chat_template

    paths = [folder / "tokenizer.json" for folder in _corpora(run_folder)]
    return next((path for path in paths if chat_template(path)), paths[0])


def held_out_documents(run_folder: Path) -> Iterator[str]:
    """Yield the held-out texts of a run's corpora.

    Raises:
        ConfigError: the folder is no run.
        DataError: they are gone, or damaged.
    """
    from megacpp.data.corpus import Corpus

    if is_hf_folder(run_folder):
        rule = "is no run, so the task has no held-out documents"
        raise config_error("run", run_folder, rule, "give the folder of a run, or other tasks")
    for folder in _corpora(run_folder):
        yield from Corpus(folder, seq_len=1).validation_documents()


def load_model(run: Path, checkpoint: str, device: str) -> HybridLM:
    """Return the model with the requested weights in eval mode.

    Args:
        run: folder of the run.
        checkpoint: see `find_weights`.
        device: `auto` is a GPU if there is one.

    Raises:
        ConfigError: there is no such device.
        CheckpointError: its files are damaged.
    """
    import torch

    from megacpp.state.export import load_exported, load_trained, read_model_config
    from megacpp.state.published import overtaken

    folder = find_weights(run, checkpoint)
    if checkpoint == "final" and (note := overtaken(run)):
        print(note, file=sys.stderr)
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda" and not torch.cuda.is_available():
        raise config_error("device", device, "there is no GPU here", "write --device auto")
    if folder == run:
        from megacpp.interop.compare import load_model as load_folder
        from megacpp.interop.places import locate, read_model

        place = locate(str(run), "run")
        return load_folder(place, read_model(place)).to(device)
    if checkpoint == "final":
        return load_exported(folder, device)
    model = read_model_config(_config(run)["model"])
    check(dataclasses.replace(Config(), model=model), 1)
    return load_trained(folder, model, device)


def _corpora(run_folder: Path) -> list[Path]:
    """Return the folders of a run's corpora from here: relative ones are below where it began."""
    data = DataConfig(**_config(run_folder)["data"])
    below = Path(str(read_parsed(run_folder / LAUNCH).get("folder") or ""))
    there = corpus_folders(data, below)
    return there if there[0].exists() else corpus_folders(data)


def _config(run_folder: Path) -> dict:
    path = run_folder / "config.json"
    if not path.exists():
        raise config_error("run", run_folder, f"{path.name} is not there", "give a run's folder")
    found: Any = read_object(path).get("config")
    try:
        data = {"path": str(found["data"]["path"]), "mix": str(found["data"].get("mix", ""))}
        return {"model": found["model"], "data": data}
    except (AttributeError, KeyError, TypeError):
        raise damaged(path, 1, "it has no config") from None
