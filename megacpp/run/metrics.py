"""Step records: a line on the screen, an object in metrics.jsonl, points in sinks."""

from __future__ import annotations

import json
import math
import resource
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TextIO

import torch

from megacpp.config.schema import Config
from megacpp.data.compressors import compressor_bars
from megacpp.run.sinks import Sink, open_sinks, tagged
from megacpp.state.files import parsed, rows_by_step
from megacpp.terminal.samples import print_sample
from megacpp.terminal.screen import columns, duration, wrapped

# Dense bf16 peak of one device, FLOP/s, from the vendors' data sheets (for MFU).
PEAK_FLOPS = {"A100": 312e12, "H100": 989e12, "H200": 989e12, "B200": 2250e12, "GB200": 2500e12}

# Fields that are dropped in this order from a line wider than the screen.
DROPPED = ("seconds", "lr", "memory", "bpb", "mfu")


@dataclass(frozen=True)
class StepRecord:
    """Figures of one optimizer step; floats keep full precision in metrics.jsonl.

    Attributes:
        step: index; the first is 0.
        loss: nats per valid token.
        tokens, valid_tokens: tokens of this step over all ranks.
        peak_bytes: this rank's peak memory since the start.
        nonfinite: number of non-finite gradient values on all ranks.
        more: further figures by name, of the step or of each layer; None isn't stored.
    """

    step: int
    loss: float
    bits_per_byte: float
    grad_norm: float
    lr: float
    tokens: int
    valid_tokens: int
    tokens_per_s: float
    step_s: float
    peak_bytes: int
    grad_accum: int
    nonfinite: int
    skipped: bool
    mfu: float | None = None
    more: Mapping[str, float | Mapping[str, float] | None] = field(default_factory=dict)


class MetricsLog:
    """Writer of step records on the main rank; does nothing elsewhere.

    A resumed run drops the lines of steps that it will repeat, and their evaluations. If it was
    told from which checkpoint to go on, later checkpoints may be of these steps: then they stay in
    `metrics-before-N.jsonl` and `evaluations-before-N.jsonl`.

    Args:
        folder: folder of the run.
        config: configuration of the run.
        first_step: first step of this start.
        active: this rank writes.
    """

    def __init__(self, folder: Path, config: Config, first_step: int, active: bool) -> None:
        run = config.run
        self.steps, self.log_every, self.active = run.steps, run.log_every, active
        self.began, self.first_step = time.perf_counter(), first_step
        self._file: TextIO | None = None
        self._sinks: list[Sink] = []
        if not active:
            return
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / "metrics.jsonl"
        for one in (path, _evaluations(path)):
            if config.checkpoint.resume not in ("auto", "never"):
                _set_aside(one, first_step, config.checkpoint.resume)
            _keep_steps(one, lambda step: step < first_step)
        self._file = path.open("a")
        self._sinks = open_sinks(folder, config, first_step)

    def write(self, record: StepRecord) -> None:
        """Store a record; print its line every `run.log_every` steps and at the end."""
        if not self.active or self._file is None:
            return
        values = asdict(record)
        values |= values.pop("more")
        values = {k: v for k, v in values.items() if v is not None}
        self._file.write(_strict_json(values) + "\n")
        self._file.flush()
        points = dict(tagged({k: v for k, v in values.items() if k != "step"}, "train"))
        for sink in self._sinks:
            sink.scalars(points, record.step)
        if (record.step + 1) % self.log_every == 0 or record.step + 1 == self.steps:
            print(self.line(record), flush=True)

    def go_back(self, step: int) -> None:
        """Drop lines and evaluations of steps from `step` on, which will be made again."""
        if self._file is not None:
            self._file.close()
            path = Path(self._file.name)
            for one in (path, _evaluations(path)):
                _keep_steps(one, lambda other: other < step)
            self._file = path.open("a")

    def warn(self, lines: Iterable[str]) -> None:
        """Print lines between those of the steps."""
        for line in lines if self.active else ():
            print(line, flush=True)

    def evaluation(self, step: int, values: Mapping[str, Any], no_verdict: str = "") -> None:
        """Print validation figures and store them in the sinks and in evaluations.jsonl.

        Losses by source of a mixture also go into the line of the step.
        """
        why = no_verdict or ("" if values["complete"] else "only a part was evaluated")
        if self.active:
            first, *others = evaluation_lines(values, why)
            for text in (f"step {step + 1}: {first}", *others):
                indent = text[: len(text) - len(text.lstrip())]
                print("\n".join(wrapped(text.strip(), f"{indent}  ", indent)), flush=True)
        for sink in self._sinks:
            sink.scalars(dict(tagged(values, "validation")), step)
        if self._file is not None:
            path = _evaluations(Path(self._file.name))
            _keep_steps(path, lambda other: other < step)
            with path.open("a") as f:
                f.write(_strict_json({"step": step, **values, "no_verdict": why}) + "\n")
            if by_source := values.get("val_loss"):
                self._add(step, {"val_loss": by_source})

    def _add(self, step: int, values: Mapping[str, object]) -> None:
        """Add values to the line of a step that is written already."""
        assert self._file is not None
        self._file.close()
        path = Path(self._file.name)
        _amend(path, step, json.loads(_strict_json(values)))
        self._file = path.open("a")

    def tasks(self, step: int, figures: Mapping[str, Mapping[str, float]]) -> None:
        """Print figures by task and metric, and store them in the sinks and with their step."""
        if self._file is None:
            return
        flat = {f"{task} {m}": value for task, of in figures.items() for m, value in of.items()}
        words = ", ".join(f"{name} {value:.4g}" for name, value in flat.items())
        print("\n".join(wrapped(f"step {step + 1}: {words}", "  ")), flush=True)
        for sink in self._sinks:
            sink.scalars(dict(tagged(figures, "tasks")), step)
        self._add(step, {"tasks": json.loads(_strict_json(flat))})

    def sample(self, step: int, text: str) -> None:
        """Print generated text and store it in the sinks."""
        if not self.active:
            return
        print_sample(f"---- sample ----\n{text}\n----")
        for sink in self._sinks:
            sink.text("sample", text, step)

    def line(self, record: StepRecord) -> str:
        """Return the line of a step, with the remaining time."""
        done = record.step + 1 - self.first_step
        left_s = (time.perf_counter() - self.began) / max(1, done) * (self.steps - record.step - 1)
        width = len(str(self.steps))
        note = ["SKIPPED"] if record.skipped else ["SANITIZED"] if record.nonfinite else []
        fields = {
            "step": f"step {record.step + 1:{width}}/{self.steps}",
            "loss": f"loss {record.loss:.4f}",
            "bpb": f"bpb {record.bits_per_byte:.4f}",
            "gnorm": f"gnorm {record.grad_norm:.3f}",
            "lr": f"lr {record.lr:.2e}",
            "rate": f"{record.tokens_per_s:,.0f} tok/s",
            "seconds": f"{record.step_s:.2f} s",
            "memory": f"{record.peak_bytes / 2**20:,.0f} MiB",
            **({"mfu": f"mfu {record.mfu:.1%}"} if record.mfu is not None else {}),
            "eta": f"eta {duration(left_s)}",
        }
        for name in DROPPED:
            if len("  ".join([*fields.values(), *note])) <= columns():
                break
            del fields[name]
        return "  ".join([*fields.values(), *note])

    def close(self) -> None:
        """Close the file and the sinks."""
        if self._file is not None:
            self._file.close()
        for sink in self._sinks:
            sink.close()


def evaluation_lines(values: Mapping[str, Any], no_verdict: str) -> list[str]:
    """Return the validation figures as lines for the screen.

    Args:
        values: figures of `evaluate`.
        no_verdict: reason why the loss can't be compared with compressors (`Corpus.no_verdict`).
    """
    over, bits = f"{values['target_bytes']:,.0f}", values["bits_per_byte"]
    if bits is None:
        return ["validation: no held-out label counts, so there is no loss"]
    part = f"all {over} held-out bytes" if values["complete"] else f"the first {over} bytes"
    bars = compressor_bars(values)
    lines = [f"validation: loss {values['loss']:.4f}, {bits:.4f} bits per byte of {part}"]
    if by_source := values.get("val_loss"):
        lines.append("  " + "  ".join(f"val_loss/{n}={loss:.4f}" for n, loss in by_source.items()))
    if no_verdict:
        alone = [f"  {name} {bar:.4f}, {how}" for name, bar, how in bars]
        return [*lines, f"  no verdict: {no_verdict}", *alone]
    for name, bar, how in bars:
        lines.append(f"  {'below' if bits < bar else 'NOT below'} {name} at {bar:.4f}, {how}")
    return lines


def bits_per_byte(nats: float, num_bytes: int) -> float:
    """Return summed nats over the bytes that they encode, in bits."""
    return nats / math.log(2) / max(1, num_bytes)


def peak_memory_bytes(device: torch.device) -> int:
    """Return the peak of this process: allocator peak on a GPU, resident set on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return peak_resident_bytes()


def peak_resident_bytes() -> int:
    """Return the peak resident set of this process alone.

    Linux's `ru_maxrss` survives exec and so may be the launcher's; VmHWM starts afresh.
    """
    status = Path("/proc/self/status")
    if status.exists():
        lines = status.read_text().splitlines()
        return next(int(x.split()[1]) * 1024 for x in lines if x.startswith("VmHWM:"))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def device_peak_flops(device: torch.device) -> float | None:
    """Return the peak bf16 FLOP/s of a known GPU, None elsewhere."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for key, peak in reversed(PEAK_FLOPS.items()) if key in name), None)


def _evaluations(path: Path) -> Path:
    """Return the file of evaluations beside that of steps."""
    return path.with_name("evaluations.jsonl")


def _amend(path: Path, step: int, values: Mapping[str, object]) -> None:
    """Add values to the line of a step, atomically."""
    lines = path.read_bytes().splitlines()
    for number, line in enumerate(lines):
        if (row := parsed(line)).get("step") == step:
            lines[number] = json.dumps({**row, **values}, allow_nan=False).encode()
    _write_lines(path, lines)


def _set_aside(path: Path, first_step: int, source: str) -> None:
    """Append the lines from `first_step` on to a file of their own, below one that says why."""
    rows = rows_by_step(path)
    cut = [json.dumps(row) for step, row in rows.items() if step >= first_step]
    if cut:
        header = json.dumps({"cut_from": path.name, "checkpoint.resume": source})
        with path.with_name(f"{path.stem}-before-{first_step:06d}.jsonl").open("a") as file:
            file.writelines(f"{line}\n" for line in (header, *cut))


def _keep_steps(path: Path, keep: Callable[[int], bool]) -> None:
    """Drop the lines of other steps, and unreadable ones, atomically."""
    if not path.exists():
        return
    lines = path.read_bytes().splitlines()
    steps = [parsed(line).get("step") for line in lines]
    _write_lines(
        path, [x for x, step in zip(lines, steps, strict=True) if type(step) is int and keep(step)]
    )


def _write_lines(path: Path, lines: Iterable[bytes]) -> None:
    """Write a file of these lines, atomically."""
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_bytes(b"".join(line + b"\n" for line in lines))
    temporary.replace(path)


def _strict_json(values: Mapping[str, object]) -> str:
    """Return one JSON line; non-finite values become null, because JSON has no NaN."""
    finite = {
        k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()
    }
    return json.dumps(finite, allow_nan=False)
