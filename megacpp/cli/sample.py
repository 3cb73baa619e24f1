"""Command `megacpp sample`: text from the weights of a run."""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

from megacpp.cli.weights import find_tokenizer, find_weights, load_model, run_folder
from megacpp.config.settings import setting
from megacpp.errors import config_error
from megacpp.state.local_copy import shown
from megacpp.terminal.samples import print_sample


@dataclass(frozen=True)
class SampleArgs:
    """Prompts and settings of samples."""

    run: str = setting(
        words="Folder or URL of the run, or of Hugging Face's format.", positional=True
    )
    prompt: str = setting("", "Text to continue (empty: the model starts a document).")
    prompts: str = setting(
        "", "File of prompts in place of --prompt: one a line, or JSONL with `prompt`."
    )
    batch: int = setting(16, "Most prompts that go on together.", "prompts", at_least=1)
    max_tokens: int = setting(200, "Most tokens of a text.", "tokens", at_least=0)
    temperature: float = setting(
        0.8, "Flattens the choice of tokens (0: always the likeliest).", at_least=0
    )
    top_k: int = setting(50, "Likeliest tokens to choose among (0: all).", "tokens", at_least=0)
    top_p: float = setting(
        1.0, "Choose among the fewest tokens with this share together.", above=0, at_most=1
    )
    min_p: float = setting(
        0.0, "Choose among tokens with this share of the likeliest's.", at_least=0, at_most=1
    )
    repetition_penalty: float = setting(
        1.0, "Makes tokens of the text so far less likely (1: off).", above=0
    )
    stop: str = setting("", "Text that ends a sample, or a JSON list of such texts.")
    seed: int = setting(
        0,
        "Seed of the choice; the same one gives the same text. Each prompt has the next.",
        at_least=0,
    )
    checkpoint: str = setting("final", "Weights: final, latest or the step of a checkpoint.")
    device: Literal["auto", "cpu", "cuda"] = setting(
        "auto", "Device of the model (auto: a GPU if there is one)."
    )
    json: bool = setting(False, "Print one JSON object for each prompt instead of text.")


def sample(args: SampleArgs) -> int:
    """Continue texts with the weights of a run, up to --max-tokens or the end of the document.

    One text is shown while it is made, several one after the other. The speed is printed to the
    error stream.
    """
    from megacpp.run.sample import Sampling
    from megacpp.run.text_stream import TextStream, continue_texts

    stops, prompts = read_stops(args.stop), read_prompts(args)
    sampling = Sampling(
        args.temperature, args.top_k, args.top_p, args.min_p, args.repetition_penalty, args.seed
    )
    run = run_folder(args.run, args.checkpoint)
    folder = shown(find_weights(run, args.checkpoint), args.run, run)
    tokenizer = find_tokenizer(run)
    model = load_model(run, args.checkpoint, args.device)
    begun = [[*tokenizer.opening, *(int(i) for i in tokenizer.encode(p))] for p in prompts]
    ids_of = [ids or [tokenizer.specials.bos] for ids in begun]
    most, longest = model.config.attention.max_seq_len, max(map(len, ids_of)) + args.max_tokens
    if longest > most and "A" in model.letters:
        text = f"note: {longest:,} tokens are more than model.attention.max_seq_len={most:,}"
        print(f"{text}: attention wasn't trained beyond", file=sys.stderr)
    live = len(prompts) == 1 and not args.json
    if live:
        print_sample(prompts[0], end="")
    began, new, fed = time.perf_counter(), 0, 0
    for first in range(0, len(prompts), args.batch):
        texts = [TextStream(tokenizer, stops) for _ in ids_of[first : first + args.batch]]
        from_here = time.perf_counter()
        made = continue_texts(
            model,
            tokenizer,
            ids_of[first : first + args.batch],
            texts,
            args.max_tokens,
            dataclasses.replace(sampling, seed=sampling.seed + first),
            partial(print_sample, end="") if live else None,
        )
        seconds = time.perf_counter() - from_here
        for row, (ids, text) in enumerate(zip(made, texts, strict=True)):
            rest = text.end()
            read = len(ids_of[first + row])
            new, fed = new + len(ids), fed + read + len(ids)
            report = {
                "weights": folder,
                "prompt": prompts[first + row],
                "text": text.text,
                "tokens": len(ids),
                "ended": text.ended or len(ids) < args.max_tokens,
                "seconds": seconds,
                "tokens_per_s": (read + len(ids)) / seconds,
            }
            if args.json:
                print(json.dumps(report), flush=True)
            elif live:
                print_sample(rest)
            else:
                print(f"---- {first + row + 1} of {len(prompts)} ----")
                print_sample(prompts[first + row] + text.text)
    if not args.json:
        speed = fed / (time.perf_counter() - began)
        line = f"{new} tokens after {fed - new}, {speed:.1f} tokens/s"
        print(f"{line} ({folder})", file=sys.stderr)
    return 0


def read_stops(words: str) -> list[str]:
    """Return the texts that end a sample.

    Raises:
        ConfigError: a JSON list of something else.
    """
    if not words.startswith("["):
        return [words] if words else []
    try:
        found = json.loads(words)
    except ValueError:
        return [words]
    if not all(isinstance(stop, str) and stop for stop in found):
        rule = "must be texts that aren't empty"
        raise config_error("stop", words, rule, """write --stop '["a", "b"]'""")
    return found


def read_prompts(args: SampleArgs) -> list[str]:
    """Return the texts to continue.

    Raises:
        ConfigError: the file can't be read, has no prompt, or a line without one.
    """
    if not args.prompts:
        return [args.prompt]
    key, path = "prompts", Path(args.prompts)
    if args.prompt:
        raise config_error(key, path, "is given beside --prompt", "give one of them")
    try:
        lines = [line for line in path.read_text(encoding="utf-8-sig").split("\n") if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "isn't UTF-8"
        raise config_error(key, path, f"can't be read ({why})", "give a text file") from None
    if not lines:
        raise config_error(key, path, "has no line", "write one prompt a line")
    if path.suffix != ".jsonl":
        return lines
    found = []
    for number, line in enumerate(lines, 1):
        try:
            prompt = json.loads(line)["prompt"]
            prompt.encode()  # not half of a surrogate pair
        except (AttributeError, LookupError, TypeError, ValueError):
            rule = f"line {number} isn't an object with a text `prompt`"
            raise config_error(key, path, rule, 'write {"prompt": "..."}') from None
        found.append(prompt)
    return found
