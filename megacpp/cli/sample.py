"""`megacpp sample`: text from the weights of a run."""

from __future__ import annotations

import codecs
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from megacpp.arguments import read_value, take_flag, take_value, wants_help
from megacpp.errors import ConfigError, config_error, did_you_mean

if TYPE_CHECKING:
    from megacpp.data.tokenizer import CodeTokenizer
    from megacpp.model.hybrid import HybridLM

FLAGS = ("prompt", "max-tokens", "temperature", "top-k", "seed", "checkpoint", "device", "json")


@dataclass(frozen=True)
class SampleArgs:
    """What `megacpp sample` was asked for."""

    run: Path
    prompt: str = ""  # empty: the model starts a document of its own
    max_tokens: int = 200
    temperature: float = 0.8  # 0: always the likeliest token
    top_k: int = 50  # 0: all
    seed: int = 0
    checkpoint: str = "final"  # final | latest | a step
    device: str = "auto"  # auto | cpu | cuda
    json: bool = False


def sample(argv: Sequence[str]) -> int:
    """usage: megacpp sample RUN [--prompt TEXT] [--max-tokens N] [--temperature X] [--top-k K]
                             [--seed N] [--checkpoint final|latest|STEP] [--device auto|cpu|cuda]
                             [--json]

    Continues TEXT (nothing: starts a document) with the weights of the run folder RUN, up to N
    tokens (200) or the end of the document. Temperature 0 (default 0.8) always takes the likeliest
    token; --top-k (50) chooses among the K likeliest only, 0 among all. The same seed gives the
    same text. The speed goes to the error stream.
    """
    arguments = list(argv)
    if wants_help(arguments, sample):
        return 0
    return run(parse(arguments))


def parse(arguments: list[str]) -> SampleArgs:
    """SampleArgs of a command line; ConfigError for anything that can't be read."""
    default = SampleArgs(Path())
    as_json = take_flag(arguments, "--json")
    prompt = take_value(arguments, "--prompt", default.prompt)
    checkpoint = take_value(arguments, "--checkpoint", default.checkpoint)
    device = take_value(arguments, "--device", default.device)

    def number(kind: type, flag: str, value: float) -> float:
        return read_value(flag, kind, take_value(arguments, f"--{flag}", str(value)))

    args = SampleArgs(
        prompt=prompt,
        max_tokens=int(number(int, "max-tokens", default.max_tokens)),
        temperature=number(float, "temperature", default.temperature),
        top_k=int(number(int, "top-k", default.top_k)),
        seed=int(number(int, "seed", default.seed)),
        checkpoint=checkpoint,
        device=device,
        json=as_json,
        run=Path(_the_run(arguments)),
    )
    if device not in ("auto", "cpu", "cuda"):
        raise config_error("device", device, "must be auto, cpu or cuda", "write --device auto")
    return args


def run(args: SampleArgs) -> int:
    """Loads the weights, prints the prompt and its continuation; 0, or raises a MegacppError."""
    from megacpp.data.tokenizer import BOS, EOS
    from megacpp.run.sample import generate

    folder = find_weights(args)
    tokenizer = find_tokenizer(args.run)
    model = load_model(args, folder)
    prompt_ids = [BOS, *(int(i) for i in tokenizer.encode(args.prompt))]
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
        stop_id=EOS,
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
    """The folder of the wanted weights; ConfigError that names what the run has."""
    if not args.run.is_dir():
        raise config_error("run", args.run, "no such run folder", "give the folder of a run")
    saved = args.run / "checkpoints"
    if args.checkpoint == "final":
        folder = args.run / "final"
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


def find_tokenizer(run_folder: Path) -> CodeTokenizer:
    """The tokenizer beside the final weights, else that of the corpus the run was trained on."""
    from megacpp.data.tokenizer import CodeTokenizer

    path = run_folder / "final" / "tokenizer.json"
    if not path.is_file():
        path = Path(_config(run_folder)["data"]["path"]) / "tokenizer.json"
    return CodeTokenizer.load(path)


def load_model(args: SampleArgs, folder: Path) -> HybridLM:
    """The model in eval mode on the wanted device; CheckpointError if its files are damaged."""
    import torch

    from megacpp.state.export import load_exported, load_trained, read_model_config

    device = args.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda" and not torch.cuda.is_available():
        raise config_error("device", device, "there is no GPU here", "write --device auto")
    if args.checkpoint == "final":
        return load_exported(folder, device)
    return load_trained(folder, read_model_config(_config(args.run)["model"]), device)


def _config(run_folder: Path) -> dict:
    path = run_folder / "config.json"
    try:
        return json.loads(path.read_text())["config"]
    except (OSError, ValueError, KeyError) as error:
        what = f"{path} is unreadable ({type(error).__name__})"
        raise config_error("run", run_folder, what, "give the folder of a run") from None


class Printer:
    """Prints ids as text as they come; bytes of a cut character wait for the rest of it."""

    def __init__(self, tokenizer: CodeTokenizer) -> None:
        self.pieces = tokenizer.id_bytes
        self.decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def show(self, i: int) -> None:
        print(self.decoder.decode(self.pieces[i]), end="", flush=True)

    def end(self) -> None:
        print(self.decoder.decode(b"", final=True))


def _the_run(arguments: list[str]) -> str:
    """What is left of the command line: one folder."""
    known = [f"--{flag}" for flag in FLAGS]
    unknown = next((word for word in arguments if word.startswith("-")), None)
    if unknown is not None:
        raise ConfigError(f"{unknown}=: no such flag. Fix: {did_you_mean(unknown, known)}.")
    if len(arguments) != 1:
        raise config_error("run", " ".join(arguments), "must be one folder", "write RUN once")
    return arguments[0]
