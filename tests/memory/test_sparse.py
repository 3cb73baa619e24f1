"""Sparse attention in estimates: stored, kept, at work, on its way and run again."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megacpp.blocks.attention.config import SparseAttentionConfig
from megacpp.cli.block_trace import trace_blocks
from megacpp.cli.measure import measure
from megacpp.cli.trace import trace_step
from megacpp.config.arguments import parse_run
from megacpp.config.schema import KEEP, CheckpointingPolicy, Config, MeshConfig
from megacpp.kernels.hyper_connections import reference
from megacpp.kernels.sparse_attention.indexer import AT_ONCE
from megacpp.memory.budget import as_run
from megacpp.memory.forms.local_shapes import LocalShapes
from megacpp.memory.forms.parameters import rank_bytes
from megacpp.memory.forms.traced import TracedPart, request_of
from megacpp.memory.replayed import replayed_flops_per_token
from megacpp.memory.traffic import traffic
from megacpp.model.sizes import layer_parameters
from parallel.simulate import stand_ins
from parallel.simulate.fake import as_trained
from tests.memory.test_activations import NONE, SELECTIVE, agree, config_of
from tests.memory.test_parameters import SMALL, in_the_model
from tests.memory.test_replayed import LEVERS, MLA, NOTHING, run_of
from tests.memory.test_traffic import AGAIN, KEPT, counted, foretold
from tests.memory.test_traffic import SMALL as SMALL_RUN
from tests.memory.test_traffic import run_of as small_run
from tests.memory.working_cases import WIDE, misses
from tests.memory.working_sets import working_sets

KEY = "--model.attention.sparse"
SPARSE = f"{KEY}.layers all {KEY}.share 2 {KEY}.top_k 8 {KEY}.head_dim 64"
LATENT = "--model.attention.kind mla --model.attention.qk_norm false"


@pytest.mark.parametrize(
    ("size", "flags"),
    [
        (1, f"{LATENT} --model.attention.q_lora_rank 32"),
        (4, "--mesh.tp 2"),
        (4, "--mesh.pp 2"),
        (2, "--recompute.compress 0.25"),
    ],
)
def test_an_indexer_is_stored_byte_for_byte(size: int, flags: str) -> None:
    words = [*SMALL, *SPARSE.split(), *flags.split()]
    config = as_trained(parse_run(words, size).config)
    found = rank_bytes(config, size, size - 1)
    stored = found.parameters, found.gradients, found.state, found.buffers
    assert stored == in_the_model(config, size, size - 1)


def small(kind: str, mesh: MeshConfig, policy: CheckpointingPolicy, rows: int = 2) -> Config:
    attention = {"kind": kind, "qk_norm": kind == "gqa", "q_lora_rank": 12}
    config = config_of("AAAF", policy=policy, mesh=mesh, rows=rows, attention=attention)
    sparse = SparseAttentionConfig(layers="all", share=2, top_k=4, num_heads=3, head_dim=8)
    attention = replace(config.model.attention, sparse=sparse)
    return replace(config, model=replace(config.model, attention=attention))


@pytest.mark.parametrize("kind", ["gqa", "mla"])
@pytest.mark.parametrize(
    ("mesh", "policy", "rows"),
    [
        (MeshConfig(dp_shard=1), NONE, 2),
        (MeshConfig(dp_shard=1), replace(KEEP, norms=True, rblock="none"), 2),
        (MeshConfig(dp_shard=1, tp=2), SELECTIVE, 2),
        (MeshConfig(dp_shard=1, cp=2, cp_order="contiguous"), SELECTIVE, 2),
        (MeshConfig(dp_shard=1, cp=2, tp=2), NONE, 1),
    ],
    ids=["one", "norms", "tp", "cp contiguous", "cp tp"],
)
def test_what_is_kept_is_what_the_meter_finds(
    kind: str, mesh: MeshConfig, policy: CheckpointingPolicy, rows: int
) -> None:
    agree(small(kind, mesh, policy, rows))


@pytest.mark.parametrize(
    ("size", "flags"),
    [
        (1, ""),
        (2, f"{LATENT} --mesh.tp 2 --recompute.ablock full"),
        (2, "--mesh.cp 2 --recompute.ablock selective"),
        (  # an indexer that weighs more than the attention
            1,
            "--model.attention.num_kv_heads 1 --model.attention.num_heads 2 --model.dim 256"
            " --data.seq_len 1024 --train.device_batch_size 1",
        ),
    ],
)
def test_working_sets_are_those_of_a_trace(size: int, flags: str) -> None:
    found = misses("AAA", f"--model.depth 3 {KEY}.layers all {KEY}.share 2 {flags}", size)
    assert set(found) > {"forward A.index", "backward A.share", "backward A.index last"}
    for name, off in found.items():
        assert -1.2 <= off <= 2, (name, off)


@pytest.mark.parametrize(
    "attention",
    [
        f"{KEY}.layers all {KEY}.share 2 {KEY}.num_heads 6",
        f"{KEY}.layers all {KEY}.share 2 {KEY}.num_heads 6 --model.attention.softcap 30",
        "--model.attention.softcap 30",
        "--model.mhc.streams 2",
        "--model.vocab_size 65536 --model.pattern F --model.depth 1 --data.seq_len 2048",
    ],
    ids=["sparse", "sparse softcap", "softcap", "hyper-connections", "logits"],
)
def test_ends_of_loops_tell_of_all(attention: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A trace runs the first blocks, heads and groups, and the last; all have the same peak."""
    monkeypatch.setattr(reference, "CHUNK", 1 << 16)
    flags = "--model.depth 3 --data.seq_len 1024 --train.device_batch_size 1"
    words = f"{WIDE} --model.pattern AAA {flags} {attention}"
    config, seen, events = parse_run(words.split(), 1).config, [], []
    for few in (stand_ins.FEW, ()):
        monkeypatch.setattr(stand_ins, "FEW", few)
        step = trace_step(config, 1)
        events.append(len(step.events))
        found = working_sets(step)
        seen.append({place: (one.bytes, one.gradients) for place, one in found.items()})
    assert seen[0] == seen[1]
    assert events[0] < 0.75 * events[1], "loops were cut"


def test_a_gpu_has_several_heads_of_an_indexer_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """All 16 products of a tile of 256 queries and 1,024 keys, against one after the other."""
    words = f"dense_110m --model.pattern AA --model.depth 2 {KEY}.layers all {KEY}.num_heads 16"
    flags = "--data.seq_len 8192 --train.device_batch_size 1"
    config = as_run(parse_run(f"{words} {flags}".split(), 1).config, "cuda", narrow=True)
    request = request_of(LocalShapes.on_rank(config, 1, 0), TracedPart(("A.index",)))
    sizes: list[set[int]] = []
    for at_once in (AT_ONCE["cuda"], 0):
        monkeypatch.setitem(AT_ONCE, "cuda", at_once)
        (trace,) = trace_blocks([request])
        made = zip(trace.names, trace.bytes, strict=True)
        sizes.append({size for name, size in made if name == "mixer.inner: bmm"})
    head = 256 * 1024 * 4
    assert 16 * head in sizes[0] and 16 * head not in sizes[1]


@pytest.mark.parametrize("kind", ["gqa", "mla"])
@pytest.mark.parametrize("lever", ["selective", "full"])
def test_what_runs_again_is_counted(kind: str, lever: str) -> None:
    base = run_of(MLA if kind == "mla" else None, "AAAF")
    sparse = SparseAttentionConfig(layers="0,1", share=2, top_k=4, num_heads=3)
    attention = replace(base.model.attention, sparse=sparse)
    base = replace(base, model=replace(base.model, attention=attention))
    one = replace(base, recompute=replace(NOTHING, **LEVERS[lever]))
    repeated = measure(one, 1, 0).repeated(measure(base, 1, 0)) / (2 * base.data.seq_len)
    assert replayed_flops_per_token(one) == repeated > 0


@pytest.mark.parametrize("policy", [KEPT, AGAIN], ids=["kept", "again"])
def test_every_byte_that_travels(policy: str) -> None:
    flags = f"--mesh.cp 2 --mesh.tp 2 --model.pattern AAF --model.depth 3 {policy}"
    config = small_run(4, f"{flags} {SPARSE}")
    assert foretold(config, 4, 0)[0] == counted(config, 4, 0)[0]


# One choice for all layers. Ranks, flags, and of each stage: choices that it sends and receives,
# and those that it reads.
SENT_ON: dict[str, tuple[int, str, list[tuple[int, int]]]] = {
    "tp": (4, "--mesh.pp 2 --mesh.tp 2", [(1, 0), (1, 1)]),
    "cp, passed on": (
        *(8, "--mesh.pp 4 --mesh.cp 2 --model.pattern A|A|F|A --train.grad-accum 4"),
        [(1, 0), (2, 1), (2, 0), (1, 1)],
    ),
    "nobody shares": (4, "--mesh.pp 2 --mesh.tp 2 --model.pattern A|F", [(0, 0), (0, 0)]),
    "the bottom of a V": (
        *(4, "--mesh.pp 2 --mesh.pp-schedule zbv --model.pattern A|A|A|F --mesh.tp 2"),
        [(1, 0), (1, 2)],
    ),
}


@pytest.mark.parametrize("name", SENT_ON)
def test_a_choice_crosses_only_the_borders_that_it_must(name: str) -> None:
    """By hand: C = 8 keys of 2 bytes for each token that a rank holds between blocks, one way."""
    size, flags, stages = SENT_ON[name]
    if "pattern" not in flags:
        flags += " --model.pattern AF|AF"
    depth = len(flags.split("pattern ")[1].split()[0].replace("|", ""))
    shared = SPARSE.replace("share 2", "share 9")
    words = f"--train.device-batch-size 2 --train.grad-accum 2 {flags} {KEPT} {shared}"
    words = f"tiny {SMALL_RUN} {words} --model.depth {depth}"
    config = as_trained(parse_run(words.split(), size).config)
    mesh, micro = config.mesh, config.train.grad_accum
    for stage, (crossings, reads) in enumerate(stages):
        rank = stage * (size // mesh.pp)
        tokens = 2 * 32 // mesh.cp  # of a microbatch, on a rank of cp
        parts = traffic(config, size, rank).parts
        moved = micro * crossings * tokens // mesh.tp * 8 * 2
        assert parts.get(("pp", "choices"), 0) == moved
        gathered = micro * reads * tokens * 8 * 2 if mesh.tp > 1 else 0
        assert parts.get(("tp", "choices"), 0) == gathered
        assert foretold(config, size, rank)[0] == counted(config, size, rank)[0]


def test_an_indexer_is_part_of_its_layer_alone() -> None:
    model = small("mla", MeshConfig(dp_shard=1), NONE).model
    with_indexer, without, *_ = layer_parameters(model)
    sparse, d = model.attention.sparse, model.dim
    queries = model.attention.q_lora_rank * sparse.num_heads * sparse.head_dim
    others = (d + 2) * sparse.head_dim + d * sparse.num_heads
    assert with_indexer - without == queries + others
