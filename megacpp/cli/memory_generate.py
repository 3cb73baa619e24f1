"""Command `megacpp memory generate`: bytes of generation, and of evaluation without gradients.

What `--measure` finds with values is remembered apart from records of training, and widens the next
estimate. Imports torch only when it runs.
"""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from megacpp.config.arguments import parse_run
from megacpp.config.schema import Config
from megacpp.config.settings import setting
from megacpp.errors import config_error
from megacpp.memory.budget import words as size_words
from megacpp.memory.calibration import (
    Margin,
    Record,
    Situation,
    compared,
    fingerprint,
    margin,
    measures,
    read_records,
    write_record,
)
from megacpp.terminal.screen import table, wrapped

NAMES = ("weights", "cache", "working")
RECORDS = "generation"  # below the folder of training's records


@dataclass(frozen=True)
class GenerationArgs:
    """Size of a batch of prompts."""

    prompts: int = setting(16, "Prompts or rows that go on together.", "rows", at_least=1)
    prompt_tokens: int = setting(1024, "Tokens of each prompt or row.", "tokens", at_least=1)
    new_tokens: int = setting(
        256, "New tokens of each (0: evaluation, the loss of whole rows).", "tokens", at_least=0
    )
    measure: bool = setting(False, "Run it here with random weights; remember what was off.")
    json: bool = setting(False, "Print one JSON object instead of text.")


@dataclass(frozen=True)
class GenerationMemory:
    """Bytes of tensors at the fullest moment.

    Attributes:
        weights: fp32 weights, as they are loaded.
        cache: keys, values and recurrent states of all rows.
        working: all else.
    """

    weights: int
    cache: int
    working: int

    @property
    def point(self) -> int:
        """All bytes."""
        return self.weights + self.cache + self.working


def generate(args: GenerationArgs, words: list[str]) -> int:
    """Estimate the bytes that generation with a preset's model takes on one device.

    With --new-tokens 0 it is those of an evaluation: the loss of rows, without gradients. Memory
    outside of tensors isn't counted. Estimated for a GPU, unless --train.device is cpu.
    """
    config = parse_run(words, 1).config
    import torch

    from megacpp.cli.generation import generation_memory
    from megacpp.launch.record import device_name

    gpu = config.train.device != "cpu"
    here = torch.cuda.is_available()
    if args.measure and config.train.device == "cuda" and not here:
        rule = "there is no GPU here to measure on"
        raise config_error("train.device", "cuda", rule, "write --train.device cpu")
    gpu = gpu and (here or not args.measure)
    found = generation_memory(config.model, args, gpu)
    device = torch.device("cuda" if gpu else "cpu")
    name = device_name(device) if here or not gpu else "any GPU"
    where, folder = _situation(config, args, name), Path(config.memory.calibration) / RECORDS
    known = read_records(folder)[0] if config.memory.calibration else []
    learned, measured = margin(found.point, where, known, _parts(found)), None
    if args.measure:
        measured = generation_memory(config.model, args, on=device)
        if config.memory.calibration:
            record = Record(
                where.key,
                where.family,
                where.rows,
                found.point,
                measured.point,
                compared(_parts(found), _parts(measured), NAMES),
                written=time.time(),
            )
            write_record(folder, record, where)
    if args.json:
        report = {"preset": config.preset, **_parts(found), "point": found.point}
        report |= {"extra": learned.extra_bytes, "residual": learned.residual}
        report |= {"measured": None if measured is None else _parts(measured)}
        print(json.dumps(report | {"prompts": args.prompts, "gpu": gpu}))
        return 0
    print("\n".join(_lines(config, args, found, measured, learned)))
    return 0


def _situation(config: Config, args: GenerationArgs, device: str) -> Situation:
    """Return everything that the memory of a batch depends on; `device` is a name."""
    from megacpp.launch.gate import VERSIONS
    from megacpp.launch.record import all_versions

    found = all_versions()
    about = {
        "what": "generation" if args.new_tokens else "evaluation",
        "hardware": {"device": device, "count": 1, "measures": measures("cpu")},
        "versions": {name: found.get(name) for name in VERSIONS},
        "model": asdict(config.model),
        "prompt_tokens": args.prompt_tokens,
        "new_tokens": args.new_tokens,
    }
    whole = {**about, "batch": {"prompts": args.prompts}}
    return Situation(fingerprint(whole)[:20], fingerprint(about)[:20], args.prompts, whole)


def _parts(found: GenerationMemory) -> dict[str, int]:
    return {name: getattr(found, name) for name in NAMES}


def _lines(
    config: Config,
    args: GenerationArgs,
    found: GenerationMemory,
    measured: GenerationMemory | None,
    learned: Margin,
) -> list[str]:
    what = f"{args.prompts} x {args.prompt_tokens:,} tokens"
    what += f", {args.new_tokens:,} new" if args.new_tokens else ", evaluation"
    head = ["", "bytes", "estimated"] + (["measured"] if measured else [])
    rows = [head]
    for name in (*NAMES, "point"):
        size = getattr(found, name)
        row = ["in all" if name == "point" else name, f"{size:,}", size_words(size)]
        rows.append(row + ([size_words(getattr(measured, name))] if measured else []))
    extra = learned.extra_bytes
    return [
        *wrapped(f"{config.preset}: {what}, weights in fp32"),
        *table(rows, 2),
        *wrapped(learned.line() + (f"; {size_words(found.point + extra)} in all" * bool(extra))),
    ]
