"""Command `megacpp chat`: a conversation with the weights of a run."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

from megacpp.cli.weights import find_tokenizer, load_model, run_folder
from megacpp.config.settings import setting
from megacpp.errors import config_error
from megacpp.terminal.samples import print_sample

NEW = "/new"  # a line that forgets what was said


@dataclass(frozen=True)
class ChatArgs:
    """Run, and settings of the answers."""

    run: str = setting(words="Folder or URL of the run.", positional=True)
    system: str = setting("", "Message of the system, in front of every conversation.")
    max_tokens: int = setting(256, "Most tokens of an answer.", "tokens", at_least=1)
    temperature: float = setting(
        0.7, "Flattens the choice of tokens (0: always the likeliest).", at_least=0
    )
    top_k: int = setting(50, "Likeliest tokens to choose among (0: all).", "tokens", at_least=0)
    top_p: float = setting(
        1.0, "Choose among the fewest tokens with this share together.", above=0, at_most=1
    )
    seed: int = setting(0, "Seed of the first answer; each further one has the next.", at_least=0)
    checkpoint: str = setting("final", "Weights: final, latest or the step of a checkpoint.")
    device: Literal["auto", "cpu", "cuda"] = setting(
        "auto", "Device of the model (auto: a GPU if there is one)."
    )


def chat(args: ChatArgs) -> int:
    """Answer the lines of the input with the weights of a run, which was tuned on conversations.

    An answer is shown while it is made, and stays in the conversation; a line `/new` begins another
    one. The earliest messages are left out once all don't fit into the model's rows. The input ends
    with Ctrl-D.
    """
    from megacpp.data.conversations import ChatTemplate
    from megacpp.run.sample import Sampling
    from megacpp.run.text_stream import TextStream, continue_texts

    run = run_folder(args.run, args.checkpoint)
    tokenizer = find_tokenizer(run)
    if not tokenizer.template:
        rule = "its tokenizer has no chat template"
        fix = "train on conversations (megacpp data prepare TALKS.jsonl)"
        raise config_error("run", args.run, rule, fix)
    template = ChatTemplate(tokenizer)
    model = load_model(run, args.checkpoint, args.device)
    room = model.config.attention.max_seq_len - args.max_tokens
    first = [{"role": "system", "content": args.system}] if args.system else []
    sampling = Sampling(args.temperature, args.top_k, args.top_p, seed=args.seed)
    said: list[dict[str, str]] = []
    for line in typed():
        if line == NEW:
            said = []
            continue
        said.append({"role": "user", "content": line})
        while len(ids := template.prompt_ids(first + said)) > room and len(said) > 1:
            said = said[2:]
        if len(ids) > room:
            rule = f"leaves {room} tokens for a message of {len(ids)}"
            raise config_error("max-tokens", args.max_tokens, rule, "write a shorter message")
        text, show = TextStream(tokenizer), partial(print_sample, end="")
        continue_texts(
            model, tokenizer, [ids], [text], args.max_tokens, sampling, show, template.end
        )
        print_sample(text.end())
        said.append({"role": "assistant", "content": text.text})
        sampling = replace(sampling, seed=sampling.seed + 1)
    return 0


def typed() -> Iterator[str]:
    """Yield lines of the input that aren't empty; a terminal shows a prompt for each.

    Raises:
        ConfigError: a line isn't UTF-8.
    """
    shows = sys.stdin.isatty()
    while True:
        print("> " if shows else "", end="", flush=True)
        try:
            line = sys.stdin.readline()
            line.encode()  # without a locale, bytes that aren't UTF-8 come as halves of surrogates
        except UnicodeError:
            raise config_error(
                "message", "", "isn't UTF-8", "convert it, iconv -f LATIN1 -t UTF-8"
            ) from None
        if not line:
            break
        if line.strip():
            yield line.strip()
    print(end="\n" if shows else "")
