"""Command `megacpp sample`: text from the weights of a run."""

from __future__ import annotations

import codecs
import dataclasses
import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from megacpp.config.checks.every import check
from megacpp.config.schema import Config
from megacpp.config.settings import setting
from megacpp.errors import config_error
from megacpp.report.files import damaged, read_object

if TYPE_CHECKING:
    from megacpp.data.tokenizer import CorpusTokenizer
    from megacpp.model.hybrid import HybridLM


@dataclass(frozen=True)
class SampleArgs:
    """Prompt and settings of a sample."""

    run: str = setting(words="Folder of the run.", positional=True)
    prompt: str = setting("", "Text to continue (empty: the model starts a document).")
    max_tokens: int = setting(200, "Most tokens of the text.", "tokens", at_least=0)
    temperature: float = setting(
        0.8, "Flattens the choice of tokens (0: always the likeliest).", at_least=0
    )
    top_k: int = setting(50, "Likeliest tokens to choose among (0: all).", "tokens", at_least=0)
    seed: int = setting(0, "Seed of the choice; the same one gives the same text.", at_least=0)
    checkpoint: str = setting("final", "Weights: final, latest or the step of a checkpoint.")
    device: Literal["auto", "cpu", "cuda"] = setting(
        "auto", "Device of the model (auto: a GPU if there is one)."
    )
    json: bool = setting(False, "Print one JSON object instead of text.")

    @property
    def folder(self) -> Path:
        """Folder of the run."""
        return Path(self.run)


def sample(args: SampleArgs) -> int:
    """Continue a text with the weights of a run, up to --max-tokens or the end of the document.

    The speed is printed to the error stream.
    """
    from megacpp.run.sample import generate

    folder = find_weights(args)
    tokenizer = find_tokenizer(args.folder)
    model = load_model(args, folder)
    marks = tokenizer.specials
    prompt_ids = [marks.bos, *(int(i) for i in tokenizer.encode(args.prompt))]
    printer = Printer(tokenizer)
    if not args.json:
        print(args.prompt, end="", flush=True)
    began = time.perf_counter()
    ids = generate(
        model,
        prompt_ids,
        args.max_tokens,
        args.temperature,
        args.top_k,
        args.seed,
        stop_id=marks.eos,
        num_ids=tokenizer.vocab_size,
        stream=None if args.json else printer.show,
    )
    seconds = time.perf_counter() - began
    fed = len(prompt_ids) + len(ids)
    report = {
        "weights": str(folder),
        "prompt": args.prompt,
        "text": tokenizer.decode(ids),
        "tokens": len(ids),
        "ended": len(ids) < args.max_tokens,
        "seconds": seconds,
        "tokens_per_s": fed / seconds,
    }
    if args.json:
        print(json.dumps(report))
    else:
        printer.end()
        line = f"{len(ids)} tokens after {len(prompt_ids)}, {fed / seconds:.1f} tokens/s"
        print(f"{line} ({folder})", file=sys.stderr)
    return 0


def find_weights(args: SampleArgs) -> Path:
    """Return the folder of the requested weights.

    Raises:
        ConfigError: the run lacks them; the error names a checkpoint that it has.
    """
    if not args.folder.is_dir():
        raise config_error("run", args.run, "no such run folder", "give the folder of a run")
    saved = args.folder / "checkpoints"
    if args.checkpoint == "final":
        folder = args.folder / "final"
    elif args.checkpoint == "latest":
        from megacpp.state.checkpoint import latest_checkpoint

        folder = latest_checkpoint(saved) or saved / "latest"
    elif args.checkpoint.isdecimal():
        folder = saved / f"step-{int(args.checkpoint):06d}"
    else:
        rule = "must be final, latest or a step"
        raise config_error("checkpoint", args.checkpoint, rule, "write --checkpoint final")
    if not folder.is_dir():
        steps = [
            p.name.removeprefix("step-").lstrip("0") for p in sorted(saved.glob("step-*[0-9]"))
        ]
        has = f"write --checkpoint {steps[-1]}" if steps else "train it first"
        raise config_error("checkpoint", args.checkpoint, f"{args.run} has no such weights", has)
    return folder


def find_tokenizer(run_folder: Path) -> CorpusTokenizer:
    """Return the tokenizer beside the final weights, else that of the training corpus."""
    from megacpp.data.tokenizer import CorpusTokenizer

    return CorpusTokenizer.load(tokenizer_path(run_folder))


def tokenizer_path(run_folder: Path) -> Path:
    """Return the tokenizer.json beside the final weights, else that of the training corpus."""
    path = run_folder / "final" / "tokenizer.json"
    if path.is_file():
        return path
    return Path(_config(run_folder)["data"]["path"]) / "tokenizer.json"


def load_model(args: SampleArgs, folder: Path) -> HybridLM:
    """Return the model in eval mode on the requested device.

    Raises:
        ConfigError: there is no such device.
        CheckpointError: its files are damaged.
    """
    import torch

    from megacpp.state.export import load_exported, load_trained, read_model_config

    device = args.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda" and not torch.cuda.is_available():
        raise config_error("device", device, "there is no GPU here", "write --device auto")
    if args.checkpoint == "final":
        return load_exported(folder, device)
    model = read_model_config(_config(args.folder)["model"])
    check(dataclasses.replace(Config(), model=model), 1)
    return load_trained(folder, model, device)


def _config(run_folder: Path) -> dict:
    path = run_folder / "config.json"
    if not path.exists():
        raise config_error("run", run_folder, f"{path.name} is not there", "give a run's folder")
    found: Any = read_object(path).get("config")
    try:
        return {"model": found["model"], "data": {"path": str(found["data"]["path"])}}
    except (KeyError, TypeError):
        raise damaged(path, 1, "it has no config") from None


class Printer:
    """Printer of ids as text; bytes of an incomplete character wait for the rest of it."""

    def __init__(self, tokenizer: CorpusTokenizer) -> None:
        self.pieces = tokenizer.id_bytes
        self.decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def show(self, i: int) -> None:
        """Print an id."""
        print(self.decoder.decode(self.pieces[i]), end="", flush=True)

    def end(self) -> None:
        """Print the remaining bytes and a line break."""
        print(self.decoder.decode(b"", final=True))
