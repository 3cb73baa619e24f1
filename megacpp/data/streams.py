"""Data sets that the library `datasets` streams.

A source is `datasets:NAME:SPLIT` or `datasets:NAME:CONFIG:SPLIT`; NAME is a data set of a hub, or a
folder. Records are read as those of a .jsonl file.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any, NamedTuple

from megacpp.errors import DataError
from megacpp.urls import STREAMED, one_line


class StreamFacts(NamedTuple):
    """Bytes of a split as its data set states them (0: unknown), and the origin of its content."""

    bytes: int
    origin: str


def stream_facts(source: str) -> StreamFacts:
    """Return facts about a split.

    Raises:
        DataError: no such package, data set or split, or no split is named.
    """
    name, config, split = _parts(source)
    try:
        builder = _library(source).load_dataset_builder(name, config)
        known = builder.info.splits or {}
        files = builder.config.data_files or {}
    except Exception as error:  # hubs and builders have errors of their own
        raise _unreadable(source, error) from None
    splits = [str(one) for one in known or files]
    if split not in splits:
        found = ", ".join(splits)
        rule = f"has the splits {found}" if found else "has no splits"
        better = ":".join(
            filter(None, ("datasets", name, config, splits[0] if splits else "train"))
        )
        raise DataError(f"source={source}: {rule}. Fix: name one, {better}.")
    there = files.get(split)
    size = known[split].num_bytes if split in known else 0
    return StreamFacts(size or 0, repr((builder.hash, getattr(there, "origin_metadata", None))))


def stream_records(source: str) -> Iterator[dict[str, Any]]:
    """Yield the records of a split, each as it comes.

    Raises:
        DataError: it can't be read.
    """
    name, config, split = _parts(source)
    library = _library(source)
    try:
        yield from library.load_dataset(name, config, split=split, streaming=True)
    except DataError:
        raise
    except Exception as error:
        raise _unreadable(source, error) from None


def _parts(source: str) -> tuple[str, str | None, str]:
    """Return the name, the configuration and the split; the last is empty if none is named."""
    name, *more = source.removeprefix(STREAMED).split(":")
    return name, (more[0] if len(more) > 1 else None), (more[-1] if more else "")


def _library(source: str) -> Any:
    try:
        return importlib.import_module("datasets")
    except ImportError:
        raise DataError(
            f"source={source}: reading it needs datasets. Fix: pip install datasets."
        ) from None


def _unreadable(source: str, error: Exception) -> DataError:
    return DataError(
        f"source={source}: datasets can't read it ({one_line(error)}). "
        "Fix: check name and network, and log in if it is gated."
    )
