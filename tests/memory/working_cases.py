"""Closed forms of working sets against traced steps of a few wide layers."""

from __future__ import annotations

from megacpp.cli.trace import trace_step
from megacpp.config.arguments import parse_run
from megacpp.memory.budget import as_run
from megacpp.memory.forms import working
from megacpp.memory.forms.activation_share import Share
from megacpp.model.pattern import layer_kinds
from tests.memory.working_sets import working_sets

# Widths of a preset, for what is small beside them to be so here; short rows, one microbatch.
WIDE = (
    "nam52_deep_base --model.depth 2 --model.vocab_size 256 --optim.qk_clip 0 --data.seq_len 256"
    " --train.device_batch_size 8 --train.grad_accum 1 --train.tokens_per_step 0"
)


def misses(
    pattern: str, flags: str, size: int, rank: int = 0, gpu: bool = False
) -> dict[str, float]:
    """Per cent that the fullest moment of each layer in each direction is above the trace's.

    Args:
        gpu: of a launch on one, whose kernels are those of a host that nobody has looked at.
    """
    config = parse_run([*f"{WIDE} --model.pattern {pattern} {flags}".split()], size).config
    config = as_run(config, "cuda", narrow=True) if gpu else config
    traced = working_sets(trace_step(config, size, rank))
    own, found = Share.of(config, size, rank), {}
    for layer, kind in enumerate(layer_kinds(config.model)):
        name = kind + (" last" if layer + 1 == len(pattern) else "")
        for phase, form in (("forward", working.forward), ("backward", working.backward)):
            most = max(moment.bytes for moment in form(own, name))
            found[f"{phase} {name}"] = (most / traced[phase, f"blocks.{layer}"].bytes - 1) * 100
    return found
