"""What a step sends on 8, 64 and 1,024 ranks, against figures that are worked out here by hand.

One process, fake process groups and fake tensors. All figures are of one optimizer step of one
rank; bytes are those of the larger side of a call: gathered, or before the sum.

Legend of the figures: n microbatches, L blocks, U bytes of the residual stream of all tokens of a
microbatch, W bytes of a parameter's part that is left by tp.
"""

from __future__ import annotations

import functools
from typing import Literal

import pytest
import torch

from megacpp.blocks.attention.config import AttentionConfig
from megacpp.blocks.dense.config import MLPConfig
from megacpp.blocks.experts.config import MoEConfig
from megacpp.blocks.mamba3.config import Mamba3Config
from megacpp.cli.dry_run import dependencies
from megacpp.config.checks.every import check, resolve
from megacpp.config.schema import (
    Config,
    DataConfig,
    MeshConfig,
    ModelConfig,
    OptimConfig,
    PrecisionConfig,
    TrainConfig,
)
from megacpp.memory.forms.accumulation import travelling
from parallel.simulate.dry_run import dry_run

B, T, D, V, HEADS, HEAD, HIDDEN, L = 2, 32, 48, 64, 8, 8, 80, 4
MESHES = {
    8: MeshConfig(tp=2),
    64: MeshConfig(tp=4),
    1024: MeshConfig(tp=8, dp_replicate=4),
}
BF16, FP32 = 2, 4
Figures = dict[tuple[str, str, str], tuple[int, int]]  # axis, kind, dtype -> calls, bytes


# Blocks are gathered for forward and backward of every microbatch, kept from the one to the other,
# or kept for the step; or gradients are reduced after every microbatch as well.
Mode = Literal["always", "never", "resident", "each"]


@functools.cache
def sent(size: int, n: int, mode: Mode, layers: int = L) -> Figures:
    reshard = "never" if mode == "never" else "always"
    sync = mode if mode in ("resident", "each") else "defer"
    config = Config(
        model=ModelConfig(
            dim=D,
            depth=layers,
            pattern="AF",
            vocab_size=V,
            attention=AttentionConfig(num_heads=HEADS, num_kv_heads=HEADS, head_dim=HEAD),
            mlp=MLPConfig(hidden_dim=HIDDEN),
        ),
        data=DataConfig(seq_len=T),
        train=TrainConfig(device_batch_size=B, grad_accum=n, gradient_sync=sync),
        mesh=MeshConfig(
            tp=MESHES[size].tp, dp_replicate=MESHES[size].dp_replicate, reshard=reshard
        ),
        optim=OptimConfig(name="adamw"),
        precision=PrecisionConfig("bf16"),
    )
    check(config, size)
    traffic = dry_run(resolve(config, size), size, 0, dependencies()).traffic
    return {
        (key.axis, key.kind, str(key.dtype).removeprefix("torch.")): (value.count, value.bytes)
        for key, value in traffic.items()
    }


def by_hand(size: int, n: int, mode: Mode) -> Figures:
    tp, replicas = MESHES[size].tp, MESHES[size].dp_replicate
    shards = size // tp // replicas

    # Sequence parallelism. Every block gathers its input and scatters its output, and does the
    # reverse with their gradients: 4 moves of U a block, so 8 U an A + F pair. The embedding
    # scatters out and gathers back, the head gathers in and scatters back: as one block more.
    U = B * T * D * BF16
    moves = n * 2 * (L + 1)
    # Softmax over a vocabulary in parts: maximum, sum and correct logit of each token, in fp32.
    statistics = 3 * B * T * tp * FP32
    # Norms are whole on all ranks of tp, their gradients partial: one all-reduce a step of this
    # rank's shard of each (two a block kind, plus the last), nothing per layer.
    norms = (L + 1) * -(-D // shards) * FP32

    # FSDP2. One unit a block, one for the embedding, one for the head; the root has the norms.
    def rows(total: int) -> int:
        """Rows of dim 0 in a gather, after tp, padded to as many on each rank."""
        return -(-total // shards) * shards

    attention = 3 * rows(HEADS * HEAD // tp) * D + rows(D) * HEADS * HEAD // tp
    dense = 2 * rows(HIDDEN // tp) * D + rows(D) * HIDDEN // tp
    blocks = L // 2 * (attention + dense)
    ends = 2 * rows(V // tp) * D
    root = (L + 1) * rows(D)
    gathers, gathered = {
        "always": (n * (2 * L + 2), n * (2 * blocks + ends)),  # blocks again for their backward
        "never": (n * (L + 2), n * (blocks + ends)),
        "resident": (L + 2, blocks + ends),
        "each": (n * (2 * L + 2), n * (2 * blocks + ends)),
    }[mode]
    reduced = blocks + ends + root
    times = n if mode == "each" else 1
    found: Figures = {
        ("tp", "all_gather", "bfloat16"): (moves, moves * U),
        ("tp", "reduce_scatter", "bfloat16"): (moves, moves * U),
        ("tp", "all_gather", "float32"): (n, n * statistics),
        ("tp", "all_reduce", "float32"): (1, norms),
        ("fsdp", "all_gather", "bfloat16"): (gathers, gathered * BF16),
        ("fsdp", "all_gather", "float32"): (1, root * FP32),
        ("fsdp", "reduce_scatter", "float32"): (times * (L + 3), times * reduced * FP32),
        # Labels and bytes before; after, two losses, then the squared norm, values and losses that
        # aren't finite, who leaves, six auxiliary losses, two gradients of routers.
        ("batch", "all_reduce", "int64"): (1, 2 * 8),
        ("loss", "all_reduce", "float64"): (1, 2 * 8),
        ("world", "all_reduce", "float64"): (1, 12 * 8),
    }
    if replicas > 1:  # HSDP: each rank's shard of the sums, once more over the replicas
        found["dp_replicate", "all_reduce", "float32"] = (L + 3, reduced * FP32 // shards)
    return found


@pytest.mark.parametrize("mode", ["always", "never", "resident", "each"])
@pytest.mark.parametrize("n", [1, 8])  # all figures are linear in n
@pytest.mark.parametrize("size", MESHES)
def test_dense_blocks_by_hand(size: int, n: int, mode: Mode) -> None:
    assert sent(size, n, mode) == by_hand(size, n, mode)


@pytest.mark.parametrize(
    ("mode", "bytes_a_parameter"), [("always", 36), ("never", 20), ("each", 64), ("resident", 6)]
)
@pytest.mark.parametrize("size", [8, 1024])
def test_bytes_a_parameter_and_step(size: int, mode: Mode, bytes_a_parameter: int) -> None:
    """Of the matrices of a block in 8 microbatches: bf16 gathers, one fp32 reduction or eight.

    What a pair of blocks more adds to the traffic, over the elements of its gathered matrices.
    """
    long, short = sent(size, 8, mode, L + 2), sent(size, 8, mode)
    tp, shards = MESHES[size].tp, size // MESHES[size].tp // MESHES[size].dp_replicate

    def rows(total: int) -> int:
        return -(-total // shards) * shards

    attention = 3 * rows(HEADS * HEAD // tp) * D + rows(D) * HEADS * HEAD // tp
    pair = attention + 2 * rows(HIDDEN // tp) * D + rows(D) * HIDDEN // tp
    norms = 2 * rows(D) * FP32 * (8 if mode == "each" else 1)  # reduced with the root, in fp32
    added = {
        key: long[key][1] - short[key][1]
        for key in (("fsdp", "all_gather", "bfloat16"), ("fsdp", "reduce_scatter", "float32"))
    }
    assert sum(added.values()) - norms == bytes_a_parameter * pair
    sync = mode if mode in ("resident", "each") else "defer"
    formula = travelling(sync, 8, gathered_again=mode != "never")
    assert formula.total == bytes_a_parameter


def test_a_pair_of_dense_blocks_moves_8_U() -> None:
    """Counted again from the figures above, per microbatch and without embedding and head."""
    U = B * T * D * torch.bfloat16.itemsize
    found = sent(8, 8, "always")
    moved = sum(found["tp", kind, "bfloat16"][1] for kind in ("all_gather", "reduce_scatter"))
    assert moved / 8 == (L // 2 + 0.5) * 8 * U


def test_what_the_number_of_microbatches_changes() -> None:
    """Gradients are reduced once a step; resident parameters are gathered once a step."""
    one, eight = sent(64, 1, "resident"), sent(64, 8, "resident")
    assert {key for key in one if one[key] != eight[key]} == {
        ("tp", "all_gather", "bfloat16"),
        ("tp", "all_gather", "float32"),
        ("tp", "reduce_scatter", "bfloat16"),
    }


# ---- the state handoff of Mamba-3, and experts ---------------------------------------------------


def layers_sent(size: int, n: int, mesh: MeshConfig, model: ModelConfig, tokens: int) -> Figures:
    """The traffic of one step of `n` microbatches of two rows."""
    config = Config(
        model=model,
        data=DataConfig(seq_len=tokens),
        train=TrainConfig(device_batch_size=B, grad_accum=n),
        mesh=mesh,
        optim=OptimConfig(name="adamw"),
        precision=PrecisionConfig("bf16"),
    )
    check(config, size)
    traffic = dry_run(resolve(config, size), size, 0, dependencies()).traffic
    return {
        (key.axis, key.kind, str(key.dtype).removeprefix("torch.")): (value.count, value.bytes)
        for key, value in traffic.items()
    }


@pytest.mark.parametrize(
    ("size", "cp", "tokens"), [(8, 2, 128), (64, 4, 128), (64, 4, 512), (1024, 8, 128)]
)
def test_a_mamba_block_hands_its_state_on(size: int, cp: int, tokens: int) -> None:
    """One gather forward, one scatter backward; H P N numbers a boundary whatever the length.

    Beside the state a chunk hands on, per head, A turns, P values of its last token, its decay and
    the step behind it, and R G N keys of its last token: the one-token halo.
    """
    N, P, heads, angles, layers, n = 16, 8, 2 * D // 8, 4, 2, 2
    mamba = Mamba3Config(d_state=N, headdim=P, chunk_size=16)
    model = ModelConfig(dim=D, depth=layers, pattern="M", vocab_size=V, mamba3=mamba)
    found = layers_sent(size, n, MeshConfig(cp=cp), model, tokens)
    state, halo = heads * P * N, heads * (angles + P + 2) + N
    chunks = 2 * cp  # head and tail
    all_chunks = chunks * B * (state + halo) * FP32
    assert found["cp", "all_gather", "float32"] == (layers * n, layers * n * all_chunks)
    assert found["cp", "reduce_scatter", "float32"] == (layers * n, layers * n * all_chunks)
    # What a rank is sent by the others: no more than a state and a halo for every boundary.
    received = all_chunks * (cp - 1) // cp
    assert received <= (chunks - 1) * B * (state + halo) * FP32
    assert not {key for key in found if key[0] == "cp" and key[1] == "all_to_all"}


@pytest.mark.parametrize(("size", "ep", "tp"), [(8, 4, 2), (64, 8, 1), (1024, 16, 4)])
def test_experts_by_hand(size: int, ep: int, tp: int) -> None:
    """One copy per chosen expert there and back, forward and backward: 4 T K D numbers a layer."""
    experts, top_k, hidden, layers, n = 16, 2, 32, 2, 2
    moe = MoEConfig(
        num_experts=experts,
        top_k=top_k,
        hidden_dim=hidden,
        num_shared=0,
        bias_update_rate=0.0,
        score="softmax",
    )
    model = ModelConfig(dim=D, depth=layers, pattern="E", vocab_size=V, moe=moe)
    mesh = MeshConfig(tp=tp, ep=ep, ep_dispatch="per_expert")
    found = layers_sent(size, n, mesh, model, T)
    rows = B * T // tp * top_k  # evenly chosen: as many arrive as leave
    calls = layers * n
    assert found["ep", "all_to_all", "bfloat16"] == (4 * calls, 4 * calls * rows * D * BF16)
    counts = found["ep", "all_to_all", "int64"]
    assert counts == (calls, calls * experts * 8), "how many rows come, before the rows"
    # Experts are reduced over the ranks that hold the same ones: a unit a layer, once a step.
    units, _ = found["efsdp", "reduce_scatter", "float32"]
    assert units == layers
