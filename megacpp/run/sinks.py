"""Sinks for the figures of a run: TensorBoard and Weights & Biases, by one interface.

Tags are `/`-separated words in snake_case: `train/loss`, `train/load_entropy/layer_3`,
`train/lr_groups/muon`, `validation/bits_per_byte`, `sample`.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from html import escape
from pathlib import Path
from typing import Any

from megacpp.config.arguments import flatten
from megacpp.config.schema import Config
from megacpp.errors import ConfigError, config_error

Setting = bool | int | float | str
# Metrics that TensorBoard shows with hyperparameters.
GOALS = ("train/loss", "validation/loss", "validation/bits_per_byte")


class TensorBoard:
    """Event files in `RUN/tensorboard`; settings are its hyperparameters.

    A disk that can't be written ends the charts with a warning, and not the run.

    Args:
        folder: folder of the run.
        settings: values by dotted name.
        first_step: points of an earlier start from here on are hidden.
    """

    def __init__(self, folder: Path, settings: Mapping[str, Setting], first_step: int) -> None:
        from torch.utils.tensorboard.summary import hparams
        from torch.utils.tensorboard.writer import SummaryWriter

        begin = hparams(dict(settings), dict.fromkeys(GOALS, 0.0))[:2]
        self._folder, self._board = folder / "tensorboard", None
        threading.excepthook = partial(_quiet, threading.excepthook)
        with self._written():
            self._board = SummaryWriter(str(self._folder), purge_step=first_step)
            for summary in begin:  # `add_hparams` would make a second run beside this one
                self._board._get_file_writer().add_summary(summary)

    @contextmanager
    def _written(self) -> Iterator[None]:
        """Write in a block; after an error, also one of the writer's thread, nothing more is."""
        try:
            yield
        except OSError as error:
            self._board, why = None, (error.strerror or str(error)).lower()
            print(f"warning: {self._folder}: {why}; its charts end here", flush=True)

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        """Add numbers by tag."""
        with self._written():
            if self._board:
                for tag, value in values.items():
                    self._board.add_scalar(tag, value, step)

    def text(self, tag: str, text: str, step: int) -> None:
        """Add a text, indented so that Markdown leaves it unchanged."""
        indented = "".join(f"    {line}\n" for line in text.splitlines())  # Markdown: as it stands
        with self._written():
            if self._board:
                self._board.add_text(tag, indented, step)
                self._board.flush()

    def close(self) -> None:
        """Flush and close."""
        with self._written():
            if self._board:
                self._board.close()


def _quiet(
    others: Callable[[threading.ExceptHookArgs], object], args: threading.ExceptHookArgs
) -> None:
    """Print no traceback of a chart's writer: its next write raises the error in our thread."""
    if type(args.thread).__name__ != "_AsyncWriterThread":
        others(args)


class WeightsAndBiases:
    """Run of a Weights & Biases project; a resumed run continues under its id.

    Its environment variables apply: with `WANDB_MODE=offline` everything stays in `RUN/wandb`, for
    `wandb sync`.

    Raises:
        ConfigError: the service rejects the run, or can't be reached.
    """

    def __init__(self, folder: Path, settings: Mapping[str, Setting], project: str) -> None:
        self._wandb: Any = importlib.import_module("wandb")
        place = folder / "wandb"
        place.mkdir(parents=True, exist_ok=True)
        name = place / "run-id"
        if not name.exists():
            name.write_text(os.urandom(8).hex())
        try:
            self._run = self._wandb.init(
                project=project,
                dir=str(folder),
                name=folder.name,
                id=name.read_text().strip(),
                resume="allow",
                config=dict(settings),
                settings=self._wandb.Settings(quiet=True),
            )
        except self._wandb.errors.Error as error:
            words, fix = " ".join(str(error).split())[:200], "WANDB_MODE=offline, or --run.wandb ''"
            raise config_error("run.wandb", project, words, fix) from None

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        """Add numbers by tag."""
        self._run.log(dict(values), step=step)

    def text(self, tag: str, text: str, step: int) -> None:
        """Add a text as preformatted HTML."""
        self._run.log({tag: self._wandb.Html(f"<pre>{escape(text)}</pre>")}, step=step)

    def close(self) -> None:
        """Finish the run."""
        self._run.finish()


Sink = TensorBoard | WeightsAndBiases  # steps of both count from 0


def open_sinks(folder: Path, config: Config, first_step: int) -> list[Sink]:
    """Return the sinks that the configuration enables, for the steps from the first one on."""
    found: list[Sink] = []
    settings = settings_of(config)
    if config.run.tensorboard:
        found.append(TensorBoard(folder, settings, first_step))
    if config.run.wandb:
        found.append(WeightsAndBiases(folder, settings, config.run.wandb))
    return found


def settings_of(config: Config) -> dict[str, Setting]:
    """Return dotted names and plain values of all settings."""
    return {
        name: value if isinstance(value, Setting) else str(value)
        for name, value in flatten(config).items()
    }


def check_sinks(config: Config) -> None:
    """Check before the start whether Weights & Biases can be used.

    Raises:
        ConfigError: the package is missing, or no API key is known.
    """
    project = config.run.wandb
    if not project:
        return
    if importlib.util.find_spec("wandb") is None:
        rule, fix = "the package wandb is not installed", "pip install wandb, or --run.wandb ''"
        raise ConfigError(f"run.wandb={project}: {rule}. Fix: {fix}.")
    if os.environ.get("RANK", "0") != "0" or os.environ.get("WANDB_MODE", "online") != "online":
        return
    wandb: Any = importlib.import_module("wandb")
    if not wandb.login(prompt=False):
        raise config_error(
            "run.wandb", project, "no API key is known", "wandb login, or set WANDB_MODE=offline"
        )


def tagged(values: Mapping[str, Any], above: str) -> Iterator[tuple[str, float]]:
    """Yield tags and numbers; figures by layer (`{"3": 1.0}`) become `above/name/layer_3`."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            plain = {f"layer_{k}" if k.isdecimal() else k: v for k, v in value.items()}
            yield from tagged(plain, f"{above}/{name}")
        elif value is not None:
            yield f"{above}/{name}", float(value)
