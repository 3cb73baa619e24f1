"""Tokens a second of reading a prompt and of decoding, side by side on this machine.

    python -m bench.generate [PRESET] [--prompt 1000] [--tokens 64]

A prompt is read in one forward, and token by token as decoding does; a token is written behind it
with a cache, and by reading all again; then rows are decoded alone and together. Operators that are
no view, and bytes of their arguments and results, are counted; seconds are those of one CPU thread.
Weights are random: they don't change the work.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from bench import parser_of
from bench.launches import Count, LaunchCounter
from megacpp.config.presets import PRESETS
from megacpp.model.decoding import decode, init_state, prefill
from megacpp.model.hybrid import HybridLM
from megacpp.model.init import initialise
from megacpp.run.sample import generate


def seconds(run: Callable[[], object], times: int = 3) -> float:
    """Return the shortest CPU time of some runs."""
    found = []
    for _ in range(times):
        began = time.process_time()
        run()
        found.append(time.process_time() - began)
    return min(found)


@torch.no_grad()
def work(run: Callable[[], object]) -> Count:
    """Return operators and their bytes."""
    with LaunchCounter() as counter:
        run()
    return counter.now


def _line(title: str, count: Count, spent: float, tokens: int) -> str:
    """Return a line with the operators and bytes of each of some tokens, and their rate."""
    operators, size = (total / tokens for total in (count.launches, count.bytes))
    counts = f"{operators:7,.1f} operators {size / 1e6:7.2f} MB"
    return f"{title:20}{counts} {tokens / spent:7,.0f} tokens/s"


@torch.no_grad()
def main() -> None:
    """Print tokens a second, and the ratios."""
    parser = parser_of(__doc__)
    parser.add_argument("preset", nargs="?", default="tiny", choices=sorted(PRESETS))
    parser.add_argument("--prompt", type=int, default=1000)
    parser.add_argument("--tokens", type=int, default=64)
    args = parser.parse_args()
    config = PRESETS[args.preset]().model
    model = HybridLM(config).eval()
    initialise(model, model.init_rules(), 0)
    ids_1T = torch.randint(3, config.vocab_size, (1, args.prompt))

    def one_by_one() -> None:
        state = init_state(model, 1, torch.device("cpu"), torch.float32)
        for ids_1 in ids_1T.unbind(1):
            _, state = decode(model, ids_1, state)

    torch.set_num_threads(1)
    at_once, stepped = seconds(lambda: prefill(model, ids_1T)), seconds(one_by_one, 1)
    _, state = prefill(model, ids_1T)

    def step() -> None:
        decode(model, ids_1T[:, 0], state)  # the same place again

    reading, writing = work(lambda: prefill(model, ids_1T)), work(step)
    print(f"{args.preset}, prompt of {args.prompt:,} tokens: work of a token")
    print(_line("read at once", reading, at_once, args.prompt))
    print(_line("read one by one", work(one_by_one), stepped, args.prompt))
    print(_line("write with a cache", writing, seconds(step, 20), 1))
    print(_line("write without", reading, at_once, 1))
    base = 0.0
    for rows in (1, 4, 16):
        prompts = [ids_1T[0, : 32 + row].tolist() for row in range(rows)]
        first = seconds(lambda prompts=prompts: generate(model, prompts, 1))
        spent = seconds(lambda prompts=prompts: generate(model, prompts, args.tokens + 1)) - first
        rate = rows * args.tokens / spent
        base = base or rate
        print(f"write {rows:2} together{rate:10,.0f} tokens/s, {rate / base:.1f}x one alone")


if __name__ == "__main__":
    main()
