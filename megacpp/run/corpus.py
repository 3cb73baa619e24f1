"""Corpus of a run: open it, check it against the model, and name the command that makes it."""

from __future__ import annotations

import hashlib
import math
import shlex
from pathlib import Path

from megacpp.config.mix import (
    corpus_folders,
    data_setting,
    mix_stages,
    raw_sources,
    source_folders,
)
from megacpp.config.schema import Config
from megacpp.data.corpus import Corpus
from megacpp.data.mixture import Mixture
from megacpp.data.shards import INDEX, TOKENIZER, again
from megacpp.data.sources import TORCH_HEADERS, find_source
from megacpp.data.specials import CONFIG, config_values, read_config
from megacpp.errors import DataError, config_error
from megacpp.urls import is_far

STAMP = "source.sha256"  # of the files that a run has prepared
RunCorpus = Corpus | Mixture


def open_corpus(config: Config, verify: bool = False) -> RunCorpus:
    """Open `data.path` or `data.mix`; the error for a missing corpus names what makes it.

    Args:
        config: configuration of the run.
        verify: hash every file now.

    Raises:
        DataError: there is no corpus, or it is damaged.
        ConfigError: the corpora of a mixture have different tokenizers.
    """
    folders = source_folders(config.data)
    if not folders:
        return _open(config, Path(config.data.path), verify)
    corpora = {name: _open(config, path, verify) for name, path in folders.items()}
    return Mixture(corpora, mix_stages(config.data.mix), config.data.mix)


def prepare_sources(config: Config) -> None:
    """Prepare sources of a mixture that are no corpora, or whose files have changed.

    The first source's tokenizer is that of all; if it isn't a corpus, it learns one.

    Raises:
        DataError: a source can't be read.
    """
    for folder, raw in raw_sources(config.data).items():
        from megacpp.data.prepare import ensure_corpus  # seldom needed
        from megacpp.data.spec import CorpusSpec

        first = corpus_folders(config.data)[0]
        spec = CorpusSpec(raw, vocab_size=config.model.vocab_size)
        if folder != first:
            spec = CorpusSpec(raw, tokenizer=str(first))
        try:
            stamp, now = folder / STAMP, _stamp(raw)
            same = stamp.is_file() and stamp.read_text() == now
            print(f"data.mix: {raw} is {'prepared in' if same else 'being prepared for'} {folder}")
            ensure_corpus(spec, folder, force=not same and folder.exists())
        except DataError as error:
            raise DataError(f"data.mix: {error}") from None
        stamp.write_text(now)


def _stamp(raw: str) -> str:
    """Return a digest of names, sizes, and times or tags of a source's files."""
    if is_far(raw):
        facts = list(find_source(raw).facts())
    else:
        files = sorted(path for path in Path(raw).rglob("*") if path.is_file()) or [Path(raw)]
        facts = [(str(f), f.stat().st_size, f.stat().st_mtime_ns) for f in files]
    return hashlib.sha256(repr(facts).encode()).hexdigest()


def _open(config: Config, path: Path, verify: bool) -> Corpus:
    if not (path / INDEX).is_file():
        found = f"holds no {INDEX}, so it is not a corpus" if path.is_dir() else "no such folder"
        found = "is a file, and a corpus is a folder" if path.is_file() else found
        where = f"{data_setting(config.data)}: {path}" if config.data.mix else f"data.path={path}"
        then = f" and give --data.path {shlex.quote(str(_made_of(path)))}" if _is_raw(path) else ""
        raise DataError(f"{where}: {found}. Fix: run `{prepare_command(config, path)}`{then}.")
    corpus = Corpus(path, config.data.seq_len, config.run.seed, verify)
    if not config_values(read_config(path / TOKENIZER)):  # which no hash is kept of
        raise DataError(f"{path / CONFIG}: is missing or damaged. {again(corpus.index, path)}.")
    return corpus


def prepare_command(config: Config, path: Path) -> str:
    """Return the command that makes a corpus, from headers or from own texts.

    Sources of a mixture get the tokenizer of the first one, any corpus that of given weights.
    """
    made = _made_of(path) if _is_raw(path) else path
    out = shlex.quote(str(made))
    if path.name == TORCH_HEADERS:
        default = made == Path("data", TORCH_HEADERS)
        return "megacpp data prepare" + ("" if default else f" --out {out}")
    first = corpus_folders(config.data)[0]
    words = (
        f"--vocab-size {config.model.vocab_size}"
        if path == first
        else f"--tokenizer {shlex.quote(str(first))}"
    )
    for name in ("tokenizer.json", "final/tokenizer.json") if config.checkpoint.init else ():
        if (given := Path(config.checkpoint.init, name)).is_file():
            # The ids of the weights that the run starts from.
            words = f"--tokenizer {shlex.quote(str(given))}"
    known = str(path) if _is_raw(path) else "YOUR_TEXTS"
    texts = shlex.quote(raw_sources(config.data).get(path, known))
    return f"megacpp data prepare {texts} --out {out} {words}"


def _is_raw(path: Path) -> bool:
    """Return whether a path that is to be a corpus has texts, which a corpus can't replace."""
    return path.is_file() or (
        path.is_dir() and not (path / INDEX).is_file() and any(path.iterdir())
    )


def _made_of(path: Path) -> Path:
    """Return the folder for the corpus of texts at a path."""
    return path.with_name(f"{path.name}.prepared")


def check_corpus(config: Config, corpus: RunCorpus) -> None:
    """Check the configuration against its corpus.

    Raises:
        ConfigError: the model's vocabulary is smaller than the corpus's.
    """
    if corpus.vocab_size > config.model.vocab_size:
        raise config_error(
            "model.vocab_size",
            config.model.vocab_size,
            f"the corpus {config.data.mix or config.data.path} has {corpus.vocab_size} ids",
            f"use model.vocab_size={_rows(config, corpus)} or prepare the corpus with fewer",
        )


def vocabulary_lines(config: Config, corpus: RunCorpus) -> list[str]:
    """Return a line about rows of the embedding that no id of the corpus uses, if there are any."""
    ids, rows = corpus.vocab_size, config.model.vocab_size
    if ids >= rows:
        return []
    fewer = _rows(config, corpus)
    given = config.checkpoint.init  # whose rows can't be left out
    hint = f" (--model.vocab-size {fewer})" if fewer < rows and not given else ""
    return [f"  the corpus has {ids:,} ids, the model {rows:,}: {rows - ids:,} rows unused{hint}"]


def _rows(config: Config, corpus: RunCorpus) -> int:
    """Return the fewest rows that hold all ids and divide over tensor-parallel ranks."""
    return math.ceil(corpus.vocab_size / config.mesh.tp) * config.mesh.tp
