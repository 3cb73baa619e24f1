"""Tokens a second of reading a prompt and of decoding, side by side on this machine.

    python -m bench.generate [PRESET] [--prompt 1000] [--tokens 64]

A prompt is read in one forward, and token by token as decoding does; then rows are decoded alone
and together. Weights are random: they don't change the work.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch

from megacpp.config.presets import PRESETS
from megacpp.model.hybrid import HybridLM
from megacpp.model.init import initialise
from megacpp.run.sample import generate


def seconds(run: Callable[[], object], times: int = 3) -> float:
    """Return the shortest time of some runs."""
    found = []
    for _ in range(times):
        began = time.perf_counter()
        run()
        found.append(time.perf_counter() - began)
    return min(found)


@torch.no_grad()
def main() -> None:
    """Print tokens a second, and the ratios."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("preset", nargs="?", default="tiny", choices=sorted(PRESETS))
    parser.add_argument("--prompt", type=int, default=1000)
    parser.add_argument("--tokens", type=int, default=64)
    args = parser.parse_args()
    config = PRESETS[args.preset]().model
    model = HybridLM(config).eval()
    initialise(model, model.init_rules(), 0)
    ids_1T = torch.randint(3, config.vocab_size, (1, args.prompt))

    def one_by_one() -> None:
        state = model.init_state(1, torch.device("cpu"), torch.float32)
        for ids_1 in ids_1T.unbind(1):
            _, state = model.step(ids_1, state)

    at_once, stepped = seconds(lambda: model.prefill(ids_1T)), seconds(one_by_one, 1)
    print(f"{args.preset}, {torch.get_num_threads()} threads, prompt of {args.prompt} tokens")
    print(f"read at once      {args.prompt / at_once:10,.0f} tokens/s")
    slower = stepped / at_once
    print(f"token by token    {args.prompt / stepped:10,.0f} tokens/s, {slower:.1f}x slower")
    base = 0.0
    for rows in (1, 4, 16):
        prompts = [ids_1T[0, : 32 + row].tolist() for row in range(rows)]
        reading = seconds(lambda prompts=prompts: generate(model, prompts, 1))
        spent = seconds(lambda prompts=prompts: generate(model, prompts, args.tokens + 1)) - reading
        rate = rows * args.tokens / spent
        base = base or rate
        print(f"decode {rows:2} together{rate:10,.0f} tokens/s, {rate / base:.1f}x one alone")


if __name__ == "__main__":
    main()
