"""Setting `data.mix`, a mixture of corpora: sources, exact shares, later stages; no torch here.

`code=0.6,prose=0.4`: of every 5 rows, 3 are of code and 2 of prose.
`code=1@0,code=0.5 prose=0.5@1000`: code alone, and from step 1000 on half of each.
`prose=1,code=0`: prose alone; of code only held-out rows are read.
`texts/notes=1,s3://bucket/code=3`: texts that aren't prepared are, at the start of the run.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import NamedTuple

from megacpp.config.schema import DataConfig
from megacpp.errors import ConfigError, config_error, shortened
from megacpp.urls import is_far, source_name

INDEX = "index.json"  # every corpus has one
PREPARED = ".prepared"  # ends the folder of a corpus that a run has made
MOST_PARTS = 10_000  # rows after which the order of sources repeats
SHARE = re.compile(r"(\d{1,18}(?:\.\d{1,18})?|\.\d{1,18})(?:@(\d{1,15}))?", re.ASCII)
EXAMPLE = "--data.mix code=0.6,prose=0.4, or code=1@0,code=0.5,prose=0.5@1000 to change at a step"


class MixStage(NamedTuple):
    """Shares of the sources, by name, from a step on; they sum to 1."""

    step: int
    shares: dict[str, Fraction]


def mix_stages(mix: str) -> list[MixStage]:
    """Return the stages of a mixture in order; the first begins at step 0.

    Sources of a stage follow each other, the last one has `@STEP`, which a single stage may lack.

    Raises:
        ValueError: the rule that the text breaks.
    """
    stages: list[MixStage] = []
    weights: dict[str, Fraction] = {}
    words = _words(mix)
    for number, word in enumerate(words, start=1):
        folder, _, share = word.rpartition("=")
        found = SHARE.fullmatch(share)
        if not folder or found is None:
            raise ValueError(f"{shortened(word)!r} isn't NAME=SHARE")
        name = source_name(folder)
        if not name or name in weights:
            raise ValueError(f"{shortened(word)!r} names none, or one that the stage has already")
        weights[name] = Fraction(found[1])
        if found[2] is None and number < len(words):
            continue
        if found[2] is None and stages:
            raise ValueError("its last stage has no @STEP")
        stages.append(MixStage(int(found[2] or 0), _shares(weights)))
        weights = {}
    steps = [stage.step for stage in stages]
    if steps[0] != 0 or steps != sorted(set(steps)):
        raise ValueError(f"its stages begin at steps {shortened(steps)}, which must rise from 0")
    return stages


def _shares(weights: dict[str, Fraction]) -> dict[str, Fraction]:
    total = sum(weights.values(), Fraction(0))
    if not total:
        raise ValueError(f"{shortened(', '.join(weights))} must have a share above 0")
    shares = {name: weight / total for name, weight in weights.items()}
    parts = math.lcm(*(share.denominator for share in shares.values()))
    if parts > MOST_PARTS:
        raise ValueError(
            f"its shares are exact only over {parts:,} rows (at most {MOST_PARTS:,}): "
            "round them to three decimals with the sum 1"
        )
    return shares


def source_folders(data: DataConfig, below: Path = Path()) -> dict[str, Path]:
    """Return the folder of each corpus of a mixture by its name; empty without a mixture.

    A name is the folder of that name beside `data.path`; a path or a URL has a slash, and
    `datasets:NAME:SPLIT` is a data set. The corpus of texts that aren't prepared is `NAME.prepared`
    beside `data.path`. Relative paths are `below` a folder.

    Raises:
        ValueError: two folders would have the same name.
    """
    found: dict[str, Path] = {}
    for name, folder, _ in _sources(data, below):
        if found.setdefault(name, folder) != folder:
            raise ValueError(f"{found[name]} and {folder} would have the same name")
    return found


def raw_sources(data: DataConfig) -> dict[Path, str]:
    """Return what each corpus of a mixture is made of that the run itself prepares, by folder."""
    return {folder: raw for _, folder, raw in _sources(data) if raw}


def _sources(data: DataConfig, below: Path = Path()) -> Iterator[tuple[str, Path, str]]:
    """Yield name and folder of each corpus, and what it is made of (empty: it is prepared)."""
    beside = Path(below, data.path).parent
    for word in _words(data.mix) if data.mix else ():
        source = word.rpartition("=")[0]
        path = Path(below, source) if "/" in source else beside / source
        # Texts to prepare: those from elsewhere, or what exists and is no corpus.
        far, name = is_far(source), source_name(source)
        raw = far or path.is_file() or (path.is_dir() and not (path / INDEX).is_file())
        folder = beside / f"{name}{PREPARED}" if raw else path
        yield name, folder, (source if far else str(path)) if raw else ""


def _words(mix: str) -> list[str]:
    return re.split(r"[,;\s]+", mix.strip(",; \t\n"))


def corpus_folders(data: DataConfig, below: Path = Path()) -> list[Path]:
    """Return the folders of a run's corpora: those of the mixture, else `data.path` alone.

    The tokenizer is that of the first one. Relative paths are `below` a folder.
    """
    return list(source_folders(data, below).values()) or [Path(below, data.path)]


def mix_rules(data: DataConfig) -> Iterator[ConfigError]:
    """Yield the rule that `data.mix` breaks, if it breaks one."""
    if not data.mix:
        return
    try:
        mix_stages(data.mix)
        source_folders(data)
    except ValueError as error:
        yield config_error("data.mix", data.mix, str(error), f"write {EXAMPLE}")


def data_setting(data: DataConfig) -> str:
    """Return the setting that names the corpora of a run, with its value."""
    return f"data.mix={data.mix}" if data.mix else f"data.path={data.path}"
