"""Estimates of multi-token prediction: what is stored, kept, needed, sent and run again.

Held to the trainer's own model on fake ranks: bytes exactly, the fullest moments within 2 %.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from megacpp.blocks.mtp.config import MTPConfig
from megacpp.cli.measure import measure
from megacpp.cli.trace import trace_step
from megacpp.config.arguments import parse_run
from megacpp.config.schema import Config, MeshConfig
from megacpp.memory.forms.local_shapes import LocalShapes
from megacpp.memory.forms.parameters import rank_bytes
from megacpp.memory.forms.step import step_bytes
from megacpp.memory.replayed import replayed_flops_per_token
from parallel.simulate.fake import as_trained
from tests.memory import test_activations, test_parameters, test_replayed, test_traffic
from tests.memory.working_cases import PHASES, WIDE, most_bytes, named_parts
from tests.memory.working_sets import working_sets

MLA = "--model.attention.kind mla --model.attention.no-qk-norm --model.attention.q-lora-rank 64"

STORED = {  # ranks, rank, flags
    "one process": (1, 0, "--model.mtp.no-shared"),
    "fp64": (1, 0, "--precision.dtype fp64 --optim.name adamw"),
    "tp": (4, 3, "--mesh.tp 2"),
    "latents": (2, 1, f"--mesh.cp 2 {MLA}"),
    "last stage": (4, 3, "--mesh.pp 2"),
    "first stage": (4, 0, "--mesh.pp 2"),
    "both ends of a V": (4, 1, "--mesh.pp 2 --mesh.pp-schedule zbv"),
    "both ends, tied": (4, 0, "--mesh.pp 2 --mesh.pp-schedule dualpipev --model.tie-embeddings"),
    "both ways": (4, 2, "--mesh.pp 2 --mesh.pp-schedule dualpipe"),
    "last stage, tied": (4, 3, "--mesh.pp 2 --model.tie-embeddings"),
}


@pytest.mark.parametrize("name", STORED)
def test_what_a_rank_stores(name: str) -> None:
    size, rank, flags = STORED[name]
    flags = f"{' '.join(test_parameters.SMALL)} --model.mtp.depths 2 {flags}"
    config = as_trained(parse_run(flags.split(), size).config)
    found = rank_bytes(config, size, rank)
    assert (found.parameters, found.gradients, found.state, found.buffers) == (
        test_parameters.in_the_model(config, size, rank)
    )


HEADS = {"num_heads": 8, "num_kv_heads": 4}
POST = MTPConfig(depths=2, hidden="post_norm", order="hidden_embedding")
KEPT = {  # type, mesh, settings, attention
    "bf16": ("bf16", {}, MTPConfig(depths=2), {}),
    "fp64": ("fp64", {}, MTPConfig(depths=3, shared=False), {}),
    "post": ("bf16", {}, POST, test_activations.MLA),
    "detached": ("bf16", {}, replace(POST, detach_trunk=True, detach_head=True), {}),
    "shards": ("bf16", {"dp_shard": 2}, POST, {}),
    "tp": ("bf16", {"tp": 2}, MTPConfig(depths=2), HEADS),
    "tp post": ("bf16", {"tp": 2}, POST, HEADS),
    "cp": ("bf16", {"cp": 2}, MTPConfig(depths=2), HEADS),
}


@pytest.mark.parametrize("again", [True, False])
@pytest.mark.parametrize("name", KEPT)
def test_what_a_forward_keeps(name: str, again: bool) -> None:
    dtype, axes, mtp, attention = KEPT[name]
    mesh = MeshConfig(**{"dp_shard": 1, **axes})  # type: ignore[arg-type]
    policy = replace(test_activations.NONE, mtp=again)
    changes = {"attention": attention} if attention else {}
    config = test_activations.config_of("AF", dtype, policy, mesh, **changes)  # type: ignore[arg-type]
    model = replace(config.model, mtp=replace(mtp, hidden_dim=24))
    test_activations.agree(replace(config, model=model))


MOMENTS = {  # ranks, flags
    "one process": (1, ""),
    "kept": (1, "--recompute.mtp false"),
    "own": (1, "--model.mtp.no-shared"),
    "three": (1, "--model.mtp.depths 3"),
    "latents": (1, f"{MLA} --model.mtp.hidden post_norm"),
    "detached": (1, "--model.mtp.detach-trunk --model.mtp.detach-head"),
    "shards": (2, "--mesh.dp-shard 2"),
    "tp": (2, "--mesh.tp 2"),
    "tp kept": (2, "--mesh.tp 2 --recompute.mtp false --model.mtp.hidden post_norm"),
    "cp": (2, "--mesh.cp 2"),
}


@pytest.mark.parametrize("name", MOMENTS)
def test_the_fullest_moments(name: str) -> None:
    size, flags = MOMENTS[name]
    flags = f"{WIDE} --model.pattern AF --model.mtp.depths 2 {flags}"
    config = parse_run(flags.split(), size).config
    stream = trace_step(config, size)
    own, parts = LocalShapes.on_rank(config, size, 0), named_parts(config)
    traced = working_sets(stream, parts=parts, casts=size == 1)
    for phase in PHASES:
        for part in ("norm", "mtp", "head"):
            most = most_bytes(own, parts[part], phase)
            found = traced[phase, part].bytes
            if (phase, part) == ("backward", "norm") and not config.model.mtp.detach_trunk:
                # The step has the embedding's first gradient by then (`Layer.waits`).
                found -= 256 // config.mesh.tp * 1536 * (4 if size == 1 else 2)
            assert most == pytest.approx(found, rel=0.007), (phase, part)


@pytest.mark.parametrize("flags", ["", "--model.tie-embeddings", "--mesh.dp-shard 2"])
def test_the_peak_of_a_step(flags: str) -> None:
    """Words and depths enough for the head's two weight gradients to be most of it."""
    size = 2 if "mesh" in flags else 1
    words = f"{WIDE} --model.pattern AF --model.vocab-size 16384 --model.mtp.depths 2 {flags}"
    words += " --optim.name adamw"
    config = as_trained(parse_run(words.split(), size).config)
    peak = trace_step(config, size, full=True).peak()[1]
    assert step_bytes(config, size, 0).most == pytest.approx(peak, rel=0.02)


SENT = {  # ranks, rank, flags
    "shards": (2, 0, "--mesh.reshard always"),
    "tp": (4, 0, "--mesh.tp 2"),
    "tp kept": (2, 0, "--mesh.tp 2 --recompute.mtp false --model.mtp.detach-trunk"),
    "cp": (4, 0, "--mesh.cp 2 --model.tie-embeddings"),
    "last stage": (4, 2, "--mesh.pp 2 --mesh.reshard always"),
    "both ends of a V": (4, 0, "--mesh.pp 2 --mesh.pp-schedule zbv --model.depth 4"),
    "both ends, tied": (
        *(4, 1),
        "--mesh.pp 2 --mesh.pp-schedule zbv --model.depth 4 --model.tie-embeddings",
    ),
}


@pytest.mark.parametrize("name", SENT)
def test_what_is_sent(name: str) -> None:
    world, rank, flags = SENT[name]
    config = test_traffic.run_of(world, f"{flags} --model.pattern AF --model.mtp.depths 2")
    real, closed = (f(config, world, rank) for f in (test_traffic.counted, test_traffic.foretold))
    assert closed[0] == real[0]


def test_what_runs_again() -> None:
    config: Config = test_replayed.run_of(None, "AF")
    config = replace(config, model=replace(config.model, mtp=MTPConfig(depths=2)))
    base, again = (
        replace(config, recompute=replace(config.recompute, mtp=on)) for on in (False, True)
    )
    repeated = measure(again, 1, 0).repeated(measure(base, 1, 0)) / (2 * config.data.seq_len)
    assert replayed_flops_per_token(base) == 0
    assert replayed_flops_per_token(again) == pytest.approx(repeated, rel=1e-12)
