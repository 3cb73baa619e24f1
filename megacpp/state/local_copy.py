"""Copy of a run, of its weights or of a folder of Hugging Face's format that is at a URL.

Only what is asked for is fetched: the settings of a model, weights of one kind, or the records of
a report. The copy has the form of a run folder, so that what reads one needs to know no URL.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from megacpp.downloads import RemoteFile, fetch_folder
from megacpp.errors import ConfigError, config_error
from megacpp.state.files import parsed
from megacpp.state.manifest import NAME as MANIFEST
from megacpp.state.published import EXTRA, step_of
from megacpp.state.remote import RemoteRun, goes_along
from megacpp.urls import NoStoreError, is_url, one_line, open_store

Part = Literal["settings", "weights", "records"]
CONFIG = "config.json"
# Files of a folder of Hugging Face's format; others there are weights in another form, or pictures.
FOREIGN = (".safetensors", ".json", ".py", ".jinja", ".txt", ".model", ".md")


def local_copy(source: str, key: str, part: Part = "weights", checkpoint: str = "") -> str:
    """Return the folder that a source names: itself, or of a URL a copy in the cache.

    Args:
        source: folder or URL.
        key: setting that names it, for messages.
        part: what is needed of it: settings are those of the weights' model.
        checkpoint: weights of a run: final, latest or a step (empty: final, else the latest).

    Raises:
        ConfigError: the URL can't be opened, lacks what is asked for, or can't be fetched.
    """
    if not is_url(source):
        return source
    url = source.rstrip("/")
    try:
        remote = RemoteRun(url, *open_store(url))
        names = {name: info for name, info in remote.below("").items() if _is_below(name)}
        wanted = _records(names) if part == "records" else _weights(remote, names, checkpoint)
        if not wanted:
            raise _lacks(remote, names, key, part, checkpoint)
        chosen = [name for name in wanted if part != "settings" or name.endswith(".json")]
        files = [RemoteFile.listed(names[name]) for name in sorted(chosen)]
        return str(fetch_folder(url, remote.system, remote.root, files))
    except ConfigError:
        raise
    except NoStoreError as error:
        raise config_error(key, source, str(error), error.fix) from None
    except Exception as error:  # each file system has errors of its own
        fix = "check the URL, the network and your rights"
        raise config_error(key, source, f"can't be fetched ({one_line(error)})", fix) from None


def _is_below(name: str) -> bool:
    """Return whether a key of a store is a path that stays below its folder."""
    return not name.startswith("/") and ".." not in name.split("/")


def shown(folder: Path, source: str, copy: Path) -> str:
    """Return a folder as messages name it: below the URL, if it is in a copy of it."""
    below = folder.relative_to(copy).parts if is_url(source) else ()
    return "/".join([source.rstrip("/"), *below]) if is_url(source) else str(folder)


def _records(names: Mapping[str, Any]) -> list[str]:
    """Return the files that a report reads; none: it isn't a run."""
    if "launch.json" not in names and "metrics.jsonl" not in names:
        return []
    return [name for name in names if goes_along(name) and not name.startswith("tensorboard/")]


def _weights(remote: RemoteRun, names: Mapping[str, Any], checkpoint: str) -> list[str]:
    """Return the files of weights, and of the run about them."""
    for file in (EXTRA, MANIFEST) if not checkpoint else ():  # a checkpoint, or final weights
        if file in names:
            return [name for name in names if "/" not in name]
    beside = [name for name in names if name == CONFIG]
    if checkpoint in ("", "final") and f"final/{MANIFEST}" in names:
        return beside + [name for name in names if name.startswith("final/")]
    if checkpoint != "final" and (saved := _checkpoint(remote, checkpoint)):
        tokenizer = [name for name in names if name.startswith("final/token")]
        files = [name for name in names if name.startswith(f"checkpoints/{saved}/")]
        return [*beside, *tokenizer, *files]
    if (
        beside
        and checkpoint in ("", "final")
        and "model_type" in parsed(remote.read(CONFIG) or b"")
    ):
        return [name for name in names if "/" not in name and name.endswith(FOREIGN)]
    return []


def _checkpoint(remote: RemoteRun, checkpoint: str) -> str:
    """Return the name of the newest complete checkpoint, or of that of a step; empty: none."""
    saved = remote.names()
    if checkpoint.isdecimal():
        name = f"step-{int(checkpoint):06d}"
        return name if name in saved else ""
    return next(iter(saved), "")


def _lacks(
    remote: RemoteRun, names: Mapping[str, Any], key: str, part: Part, checkpoint: str
) -> ConfigError:
    """Return the error for a URL without what was asked for."""
    source = remote.url
    if not names:
        return config_error(key, source, "no file is there", "check the URL")
    if part == "records":
        return config_error(key, source, "isn't the URL of a run", "give one (checkpoint.remote)")
    if checkpoint:
        saved = remote.names()
        fix = f"write --checkpoint {step_of(Path(saved[0]))}" if saved else "give another URL"
        return config_error("checkpoint", checkpoint, f"{source} has no such weights", fix)
    rule = "holds no final weights, no checkpoint and no config.json with a model_type"
    return config_error(key, source, rule, "give the URL of a run or of a folder with weights")
