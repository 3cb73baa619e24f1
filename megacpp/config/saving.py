"""Settings of saved training state; no torch import."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megacpp.config.settings import setting


@dataclass(frozen=True)
class CheckpointConfig:
    """Saved training state: when, how many, and what to resume from."""

    every: int = setting(
        500, "Steps from one save to the next (0: only at the end).", "steps", at_least=0
    )
    keep: int = setting(2, "Newest sound checkpoints kept (0: all).", "checkpoints", at_least=0)
    keep_every: int = setting(
        0, "Checkpoints at multiples of so many steps are kept for ever.", "steps", at_least=0
    )
    async_: bool = setting(
        False, "Hold a step up only for a copy to host memory (its size: header); write it behind."
    )
    mirror_every: int = setting(
        0, "Steps between copies of the state in two nodes' memory (0: none).", "steps", at_least=0
    )
    resume: str = setting(
        "auto", "Checkpoint to go on from: auto (the newest, if any), never, or a folder."
    )
    damaged: Literal["stop", "older"] = setting(
        "stop", "A damaged checkpoint at the start: stop, or go on from the newest sound one."
    )
    remote: str = setting(
        "", "URL that saves are copied to, and that an empty run folder goes on from (empty: none)."
    )
    init: str = setting(
        "",
        "Weights to start from: a run, final/, checkpoint or Hugging Face folder, or a URL of one.",
    )
    init_check: bool = setting(
        False,
        "Compare logits of these weights with those of transformers, on the first rank.",
    )
