"""Selection of the text files in a folder, by suffix and by their first bytes."""

from __future__ import annotations

import fnmatch
import json
import os
import re
from codecs import BOM_UTF8, BOM_UTF16_BE, BOM_UTF16_LE
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from megacpp.errors import DataError

LINES = (".jsonl", ".jsonl.gz", ".jsonl.zst", ".ndjson", ".ndjson.gz", ".ndjson.zst")
RECORD_SUFFIXES = (*LINES, ".parquet", ".arrow")
PACKED = {".gz": "gunzip -k", ".zst": "unzstd", ".bz2": "bunzip2 -k", ".xz": "unxz -k"}
CARD = "README.md"  # beside record files it describes them
# Words of a file's path that name its split, as hubs read them.
TRAIN = re.compile(r"(?<![a-z])train(ing)?(?![a-z])", re.IGNORECASE)
OTHERS = re.compile(
    r"(?<![a-z])(test(ing)?|eval(uation)?|val(id(ation)?)?|dev)(?![a-z])", re.IGNORECASE
)
CPP_GLOBS = ("*.h", "*.hpp", "*.cuh", "*.cpp", "*.cc", "*.cxx", "*.cu")
# Text that is rarely training data; --globs selects it.
DATA_SUFFIXES = {".json", ".csv", ".tsv", ".lock", ".log", ".svg", ".map", ".ipynb"}
SNIFFED = 4096  # bytes of a file that decide whether it is text
LINE_BYTES = 1 << 27  # of a JSON record
SHOWN = 4  # suffixes listed by name
UTF16, NO_TEXT = "UTF-16", "not text"


class Chosen(NamedTuple):
    """Selected files of a folder, with lines that name the selected and the skipped suffixes."""

    files: list[Path]
    taken: str
    skipped: list[str]


def choose_files(folder: Path, globs: Sequence[str]) -> Chosen:
    """Return files that match the globs; without globs, text and record files, none hidden.

    Raises:
        DataError: an unreadable folder, or no file selected.
    """
    try:
        files = list(_matching(folder, globs)) if globs else None
        chosen = _by_content(folder) if files is None else Chosen(files, " ".join(globs), [])
    except OSError as error:
        raise DataError(f"source={folder}: {error}. Fix: check the rights of the folder.") from None
    if chosen.files:
        return chosen
    if globs:
        raise DataError(
            f"source={folder}: no file matches {' '.join(globs)}. Fix: give other --globs."
        )
    why = f" ({'; '.join(chosen.skipped)})" if chosen.skipped else ""
    raise DataError(
        f"source={folder}: holds no text file{why}. "
        "Fix: give a folder with .txt, .jsonl or .parquet files, or name yours with --globs '*.x'."
    )


def saved_files(folder: Path) -> list[Path]:
    """Return the Arrow files of a data set that `datasets` saved to a folder; none: it isn't one.

    Raises:
        DataError: it has several splits, or its description can't be read.
    """
    try:
        if (folder / "dataset_dict.json").is_file():
            splits = json.loads((folder / "dataset_dict.json").read_text())["splits"]
            raise DataError(
                f"source={folder}: a data set with the splits {', '.join(splits)}. "
                f"Fix: give one of them, {folder / splits[0]}."
            )
        if not (folder / "state.json").is_file():
            return []
        state = json.loads((folder / "state.json").read_text())
        return [folder / file["filename"] for file in state.get("_data_files", ())]
    except (ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
        raise DataError(
            f"source={folder}: its description isn't that of a saved data set ({error!r}). "
            "Fix: save it again (Dataset.save_to_disk)."
        ) from None


def of_other_splits(names: Sequence[str]) -> list[str]:
    """Return the record files that a data set holds out, by their paths in it.

    Their names or folders have a word such as `test` or `validation`, and another's has `train`.
    """
    records = [name for name in names if name.lower().endswith(RECORD_SUFFIXES)]
    if not any(TRAIN.search(name) for name in records):
        return []
    return [name for name in records if OTHERS.search(name) and not TRAIN.search(name)]


def suffix(path: Path) -> str:
    """Return a suffix such as `.txt` or `.jsonl.gz`, lower-case, or the name of a file without."""
    name = path.name.lower()
    whole = next((s for s in RECORD_SUFFIXES if name.endswith(s)), path.suffix.lower())
    return whole or path.name


@contextmanager
def readable(path: Path) -> Iterator[None]:
    """Name a file in the error of reading it.

    Raises:
        DataError: in place of an OSError.
    """
    try:
        yield
    except OSError as error:
        why = error.strerror or error
        raise DataError(f"{path}: cannot be read ({why}). Fix: check the file.") from None


def json_records(path: Path) -> str:
    """Return `array` or `lines` for a `.json` file that holds records, else nothing.

    An array begins with an object; of lines the first is a whole object, and more follow.
    """
    if suffix(path) != ".json":
        return ""
    with readable(path), path.open("rb") as file:
        first = file.read(SNIFFED).removeprefix(BOM_UTF8).lstrip()
        if first[:1] == b"[":
            return "array" if first[1:].lstrip()[:1] == b"{" else ""
        file.seek(0)
        line, more = file.readline(LINE_BYTES).removeprefix(BOM_UTF8), file.read(SNIFFED)
    try:
        return "lines" if more.strip() and isinstance(json.loads(line), dict) else ""
    except (ValueError, RecursionError):
        return ""


def is_records(path: Path) -> bool:
    """Return whether a file holds records with fields, as a `.json` that is still far away may."""
    if suffix(path) == ".json" and path.is_file():
        return bool(json_records(path))
    return suffix(path) in (*RECORD_SUFFIXES, ".json")


def _by_content(folder: Path) -> Chosen:
    files: list[Path] = []
    taken: Counter[str] = Counter()
    reasons = "data", "packed", UTF16, NO_TEXT
    skipped: dict[str, Counter[str]] = {why: Counter() for why in reasons}
    hidden = 0
    for path in _walk(folder):
        kind = suffix(path)
        if any(part.startswith(".") for part in path.relative_to(folder).parts):
            hidden += 1
        elif kind in DATA_SUFFIXES:
            skipped["data"][kind] += 1
        elif kind in PACKED:
            skipped["packed"][kind] += 1
        elif kind not in RECORD_SUFFIXES and (why := no_text(path)):
            skipped[why][kind] += 1
        else:
            files.append(path)
            taken[kind] += 1
    if any(suffix(path) in RECORD_SUFFIXES for path in files):
        cards = [path for path in files if path.name == CARD]
        files = [path for path in files if path.name != CARD]
        taken[".md"] -= len(cards)
        taken += Counter()  # drops what is left without one
        skipped["card"] = Counter({CARD: len(cards)} if cards else {})
    below = {path.relative_to(folder).as_posix(): path for path in files}
    if out := [below[name] for name in of_other_splits(list(below))]:
        skipped["split"] = Counter(map(suffix, out))
        taken -= skipped["split"]
        files = [path for path in files if path not in out]
    tool = PACKED.get(next(iter(skipped["packed"]), ""), "")
    fixes = {
        UTF16: "UTF-16, convert them (iconv -f UTF-16 -t UTF-8)",
        "packed": f"packed, unpack them first ({tool})",
        "card": "describes the records, --globs takes it",
        "split": "of another split than train, --globs takes it",
        "data": f"data, --globs '*{next(iter(skipped['data']), '')}' takes it",
    }
    lines = [
        f"skipped {_counted(kinds)}: {fixes.get(why, why)}"
        for why, kinds in skipped.items()
        if kinds
    ]
    if hidden:
        lines.append(f"skipped {hidden:,} hidden")
    return Chosen(files, f"{_counted(taken)} file{'s' * (taken.total() != 1)}", lines)


def _counted(kinds: Counter[str]) -> str:
    """Return suffixes with counts, most frequent first, such as `80 .txt, 5 .md`."""
    shown = [f"{n:,} {kind}" for kind, n in kinds.most_common(SHOWN)]
    rest = kinds.total() - sum(n for _, n in kinds.most_common(SHOWN))
    return ", ".join(shown) + (f" and {rest:,} other" if rest else "")


def no_text(path: Path) -> str:
    """Return why a file is no text, by its beginning: `UTF16` or `NO_TEXT`, else nothing.

    UTF-8 is checked when the file is read.
    """
    with readable(path), path.open("rb") as file:
        first = file.read(SNIFFED)
    return UTF16 if first.startswith((BOM_UTF16_LE, BOM_UTF16_BE)) else NO_TEXT * (b"\0" in first)


def _matching(folder: Path, globs: Sequence[str]) -> Iterator[Path]:
    """Yield files whose name (or path below `folder`, for a glob with a slash) matches, sorted."""
    for path in _walk(folder):
        below = path.relative_to(folder).as_posix()
        if any(fnmatch.fnmatchcase(below if "/" in g else path.name, g) for g in globs):
            yield path


def _walk(folder: Path) -> Iterator[Path]:
    """Yield all files below a folder, sorted, without dead links and pipes."""

    def unreadable(error: OSError) -> None:  # os.walk would skip the folder silently
        raise error

    for parent, folders, names in os.walk(folder, onerror=unreadable):
        folders.sort()
        yield from (path for name in sorted(names) if (path := Path(parent, name)).is_file())
