"""Traced parts against traced steps of a few wide layers."""

from __future__ import annotations

from megacpp.cli.trace import trace_step
from megacpp.config.arguments import parse_run
from megacpp.config.schema import Config
from megacpp.memory.budget import as_run
from megacpp.memory.forms.batch import ids_bytes, mask_bytes
from megacpp.memory.forms.local_shapes import LocalShapes
from megacpp.memory.forms.traced import TracedPart, layer_parts, outer_parts, traced_moments
from megacpp.model.pattern import block_letters
from tests.memory.working_sets import working_sets

# Widths of a preset, for what is small beside them to be so here; short rows, one microbatch.
WIDE = (
    "nam52_deep_base --model.depth 2 --model.vocab_size 256 --optim.qk_clip 0 --data.seq_len 256"
    " --train.device_batch_size 8 --train.grad_accum 1 --train.tokens_per_step 0"
)


PHASES = {"forward": False, "backward": True}


def named_parts(config: Config) -> dict[str, TracedPart]:
    """Parts of a model by the names that a traced step gives them."""
    layers = {f"blocks.{i}": part for i, part in enumerate(layer_parts(config))}
    return layers | outer_parts(config.model)


def most_bytes(own: LocalShapes, part: TracedPart, phase: str, first: bool = False) -> int:
    """Bytes at the fullest moment of a part."""
    most = max(m.bytes for m in traced_moments(own, part, PHASES[phase], first))
    model = own.config.model
    if part.kind == "embed" and phase == "backward" and model.tie_embeddings:
        table = model.vocab_size // own.tp * model.dim * (own.compute if own.parallel else own.wide)
        return max(most, 2 * table)  # a sum with the head's gradient
    return most


def ratios(config: Config, size: int) -> dict[tuple[str, str], float]:
    """Bytes at the fullest moment of each phase and part over those of a traced step."""
    own, parts = LocalShapes.on_rank(config, size, 0), named_parts(config)
    letters = block_letters(config.model.pattern, config.model.depth)
    stream = trace_step(config, size)
    traced = working_sets(stream, parts=parts, casts=size == 1)
    found = {
        (phase, part): most_bytes(own, parts[part], phase) / at.bytes
        for (phase, part), at in traced.items()
    }
    makes_mask = "forward", f"blocks.{letters.find('A')}"
    if makes_mask in traced:
        batch = ids_bytes(own) + mask_bytes(own, letters)
        most = batch + most_bytes(own, parts[makes_mask[1]], "forward", first=True)
        found[makes_mask] = (
            most / working_sets(stream, batch=True, parts=parts, casts=size == 1)[makes_mask].bytes
        )
    return found


def misses(
    pattern: str, flags: str, size: int, rank: int = 0, gpu: bool = False
) -> dict[str, float]:
    """Per cent that the fullest moment of each layer in each direction is above the trace's.

    Args:
        gpu: of a launch on one, whose kernels are those of a host that nobody has looked at.
    """
    config = parse_run([*f"{WIDE} --model.pattern {pattern} {flags}".split()], size).config
    config = as_run(config, "cuda", narrow=True) if gpu else config
    traced = working_sets(trace_step(config, size, rank), casts=size == 1)
    own, found = LocalShapes.on_rank(config, size, rank), {}
    for layer, part in enumerate(layer_parts(config)):
        for phase in PHASES:
            most = most_bytes(own, part, phase)
            miss = most / traced[phase, f"blocks.{layer}"].bytes - 1
            found[f"{phase} {part.shown}"] = miss * 100
    return found
