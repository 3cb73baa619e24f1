"""Stores at a URL (s3://, gs://, hf://, file://), by fsspec: open one, try again, name an error."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from pathlib import PurePosixPath
from typing import Any, TypeVar

Result = TypeVar("Result")
ATTEMPTS, WAIT_S = 5, 1.0  # of a transfer; the wait doubles
STREAMED = "datasets:"  # begins a source that the library `datasets` streams
# Protocol -> package of its file system; the extra `remote` has them all.
PACKAGES = {
    "s3": "s3fs",
    "gs": "gcsfs",
    "gcs": "gcsfs",
    "hf": "huggingface_hub",
    "http": "aiohttp",
    "https": "aiohttp",
}


class NoStoreError(Exception):
    """URL that can't be opened: no such protocol, or no package for it.

    Args:
        rule: what is wrong.
        fix: what to do.
    """

    def __init__(self, rule: str, fix: str) -> None:
        super().__init__(rule)
        self.fix = fix


def is_url(source: str) -> bool:
    """Return whether a source is a URL and no path."""
    return re.match(r"[a-z][a-z0-9+.-]*://", source) is not None


def is_far(source: str) -> bool:
    """Return whether a source is a URL or a data set that `datasets` streams, and no path."""
    return is_url(source) or source.startswith(STREAMED)


def source_name(source: str) -> str:
    """Return the last part of a path, of a URL or of `datasets:NAME:SPLIT` (`NAME-SPLIT`)."""
    return PurePosixPath(source).name.removeprefix(STREAMED).replace(":", "-")


def open_store(url: str) -> tuple[Any, str]:
    """Return the file system of a URL, and the path in it; nothing is read yet.

    Raises:
        NoStoreError: fsspec or its package for the protocol isn't installed, or there is none.
    """
    protocol = url.partition("://")[0]
    try:
        import fsspec

        fsspec.get_filesystem_class(protocol)
    except ImportError as error:
        package = "fsspec" if error.name == "fsspec" else PACKAGES.get(protocol)
        if package is None:
            raise NoStoreError(one_line(error), "install the package that it names") from None
        rule = f"{protocol}:// needs the package {package}, which can't be imported"
        raise NoStoreError(rule, "pip install 'megacpp[remote]'") from None
    except ValueError as error:
        raise NoStoreError(one_line(error), "check the URL") from None
    more = {"auto_mkdir": True} if protocol in ("file", "local") else {}
    return fsspec.core.url_to_fs(url, **more)


def retried(act: Callable[[], Result]) -> Result:
    """Return the result of `act`, which is tried `ATTEMPTS` times; raise its last error."""
    for attempt in range(1, ATTEMPTS):
        try:
            return act()
        except Exception:  # each file system has errors of its own
            time.sleep(WAIT_S * 2 ** (attempt - 1))
    return act()


def one_line(error: BaseException | None) -> str:
    """Return type and first line of an error."""
    lines = str(error).splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
