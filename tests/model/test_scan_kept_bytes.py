"""M and R blocks: what their forward keeps, byte by byte, and what runs again instead of it.

Legend: B rows, D model, T tokens; of M: H heads, P head dim, W = H P, N state size, R MIMO rank,
G groups, A angles, S channels B | C; of R: N heads, K key, V value, X = N V, Y channels q | k;
C tokens of a chunk.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product

import pytest
import torch
from torch import Tensor

from checkpointing.apply import give
from checkpointing.recompute import BlockRecompute, Replays
from checkpointing.tracing.live_bytes import LiveBytes
from megacpp.blocks.m2rnn.config import M2RNNConfig
from megacpp.blocks.m2rnn.module import M2RNN
from megacpp.blocks.mamba3.config import Mamba3Config
from megacpp.blocks.mamba3.module import Mamba3
from megacpp.config.schema import ModelConfig
from megacpp.kernels.m2rnn import chunks as m2rnn_chunks
from megacpp.kernels.m2rnn.backends import m2rnn_chunked
from megacpp.kernels.m2rnn.chunks import StateClip
from megacpp.kernels.mamba3 import chunks as mamba3_chunks
from megacpp.model.documents import Documents
from megacpp.model.regions import Region
from tests.model.mamba3_cases import packed

B, D, T, C = 2, 24, 32, 8
MAMBA = {
    "siso": Mamba3Config(),
    "siso_conv": Mamba3Config(conv_kernel=4),
    "siso_groups_outnorm": Mamba3Config(ngroups=2, out_norm=True, a_activation="softplus"),
    "mimo4": Mamba3Config(mimo_rank=4),
    "mimo4_conv_groups_outnorm": Mamba3Config(
        mimo_rank=4, conv_kernel=3, ngroups=2, out_norm=True, rope_fraction=1.0
    ),
}
CONV_BC: tuple[frozenset[Region], ...] = (frozenset(), frozenset({"conv_bc"}))
DTYPES = torch.float32, torch.bfloat16
FP32 = 4  # bytes


def mamba(name: str, dtype: torch.dtype, chunk: int = C) -> Mamba3:
    small = {"d_state": 16, "headdim": 6, "chunk_size": chunk}
    config = Mamba3Config(**{**vars(MAMBA[name]), **small})
    layer = Mamba3(ModelConfig(dim=D, mamba3=config))
    fill(layer)
    return layer.to(dtype)


def m2rnn(dtype: torch.dtype, keep_states: bool = False) -> M2RNN:
    config = M2RNNConfig(num_heads=4, num_q_heads=2, key_dim=6, value_dim=3, chunk_size=C)
    layer = M2RNN(ModelConfig(dim=D, m2rnn=config))
    fill(layer)
    layer.scan.keep_states = keep_states
    return layer.to(dtype)


def fill(layer: torch.nn.Module) -> None:
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in layer.parameters():
            p.copy_(0.4 * torch.randn(p.shape, generator=generator))


def dtype_of(layer: torch.nn.Module) -> torch.dtype:
    """That of the matrices; what is under the fp32 contract is no narrower."""
    return min((p.dtype for p in layer.parameters()), key=lambda dtype: dtype.itemsize)


def documents(kind: str, tokens: int) -> Documents:
    return packed(B, tokens) if kind == "packed" else Documents.rows(B, tokens)


def run(
    layer: Mamba3 | M2RNN, regions: frozenset[Region], x_BTD: Tensor, docs: Documents
) -> tuple[Tensor, Replays]:
    """The layer as the mixer of a block whose policy runs `regions` again."""
    recompute = BlockRecompute(regions, replays := Replays())
    give(layer, recompute)
    return recompute("block", layer, x_BTD, docs), replays


def kept(
    layer: Mamba3 | M2RNN, regions: frozenset[Region], kind: str, tokens: int
) -> tuple[int, int]:
    """Bytes that are alive after a forward, and those of the largest storage among them.

    The input, parameters and what documents remember are older.
    """
    x_BTD = torch.randn(B, tokens, D, dtype=dtype_of(layer)).requires_grad_()
    docs = documents(kind, tokens)
    layer(x_BTD, docs)
    gc.collect()
    with LiveBytes() as live:
        y_BTD, _ = run(layer, regions, x_BTD, docs)
        gc.collect()
        sizes = [storage.nbytes() for r in live._alive.values() if (storage := r()) is not None]
        assert y_BTD.requires_grad and sum(sizes) == live.alive()
        return live.alive(), max(sizes)


def per_token(layer: Mamba3 | M2RNN, regions: frozenset[Region], kind: str) -> float:
    """Kept bytes that grow with the tokens; weights side by side and such do not."""
    (short, _), (long, _) = (kept(layer, regions, kind, tokens) for tokens in (T, 2 * T))
    return (long - short) / (B * T)


def expected_of_mamba(layer: Mamba3, dtype: torch.dtype, again: bool) -> float:
    m, e = layer.mamba, dtype.itemsize
    H, P, N, R, G, A = (
        len(layer.D), m.headdim, m.d_state, m.mimo_rank, m.ngroups,
        layer.in_angles.out_features
    )  # fmt: skip
    W, S = H * P, 2 * R * G * N
    projections = e * (W + W + S + 3 * H + A)  # z, x and the thin ones in one product
    scan = FP32 * H * R * P + FP32 * H * N * P / C  # y, states between chunks
    output = e * D
    if again:
        return projections + scan + output
    if not m.conv_kernel:
        projections -= e * W  # of x only its copy by chunks is kept
    conv = e * S if m.conv_kernel else 0  # B | C behind it, for their norms; x as V below
    norms = FP32 * 2 * R * G
    # dt: what softplus is taken of and what it gives. A: what softplus gives, or relu, 1 / (1 - a)
    # and their sum; and the rate.
    rates = 2 + {"softplus": 2, "heavy_tail": 4}[m.a_activation]
    rates += dtype == torch.bfloat16 and m.a_activation == "softplus"  # a in FP32
    weights = 7  # both sigmoids, gamma, scale, that above 0, its logarithm, sums of log decays
    angles = FP32 * (2 * A + H * A)  # tanh, that by chunks, the running sum of each head
    q_k = 2 * e * H * R * N
    v = e * W + (e * R * W if R > 1 else 0)  # by chunks, of every rank
    gated = e * W
    kept = conv + norms + FP32 * H * (rates + weights) + angles + q_k + v + gated
    return projections + kept + scan + output


@pytest.mark.parametrize("kind", ["whole", "packed"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", MAMBA)
def test_what_mamba_keeps(name: str, dtype: torch.dtype, kind: str) -> None:
    layer = mamba(name, dtype)
    for regions in CONV_BC:
        assert per_token(layer, regions, kind) == expected_of_mamba(layer, dtype, bool(regions))


def expected_of_m2rnn(layer: M2RNN, dtype: torch.dtype, again: bool) -> float:
    e, N, K, V = dtype.itemsize, len(layer.state_weight), layer.key_dim, layer.value_dim
    X, Y = N * V, layer.in_q.out_features + layer.in_k.out_features
    projections = e * (Y + N + X + X)  # q, k and forget in one product, v, gate
    forget = FP32 * 3 * N  # what softplus is taken of, what it gives, the value
    states = 2 * FP32 * N * K * V if layer.scan.keep_states else FP32 * N * K * V / C
    out = e * X + FP32 + e * X + e * D  # y, 1 / rms, normed, output
    between = 0 if again else e * (Y + X) + FP32 * X  # behind the convolution, in front of the norm
    return projections + forget + states + out + between


@pytest.mark.parametrize("keep_states", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_m2rnn_keeps(dtype: torch.dtype, keep_states: bool) -> None:
    layer = m2rnn(dtype, keep_states)
    for regions in CONV_BC:
        expected = expected_of_m2rnn(layer, dtype, bool(regions))
        assert per_token(layer, regions, "packed") == expected


@pytest.mark.parametrize("name", MAMBA)
def test_nothing_kept_has_a_row_of_a_chunk_for_every_token(name: str) -> None:
    """With 32 tokens of a chunk and as many rows, pairs would be the largest by far."""
    layer = mamba(name, torch.float32, chunk=T)
    R, H, N, P = layer.mamba.mimo_rank, len(layer.D), layer.mamba.d_state, layer.mamba.headdim
    widest = max(N, P) * R * H * FP32
    assert widest < T * H * FP32 * R
    for regions in CONV_BC:
        assert kept(layer, regions, "whole", 2 * T)[1] <= B * 2 * T * widest


def results(
    layer: Mamba3 | M2RNN, regions: frozenset[Region], kind: str, tokens: int = 29
) -> tuple[list[Tensor], Replays]:
    """Output and every gradient."""
    generator = torch.Generator().manual_seed(1)
    dtype = dtype_of(layer)
    x_BTD = torch.randn(B, tokens, D, generator=generator).to(dtype).requires_grad_()
    y_BTD, replays = run(layer, regions, x_BTD, documents(kind, tokens))
    leaves = [x_BTD, *layer.parameters()]
    return [y_BTD, *torch.autograd.grad(y_BTD.float().square().sum(), leaves)], replays


@contextmanager
def counted(monkeypatch: pytest.MonkeyPatch, owner: object, name: str) -> Iterator[list[str]]:
    """Calls of a function while the context is open."""
    calls, original = [], getattr(owner, name)

    def counting(*args: object, **kwargs: object) -> object:
        calls.append(name)
        return original(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, counting)
        yield calls


@pytest.mark.parametrize("kind", ["whole", "packed"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", MAMBA)
def test_mamba_runs_again_to_the_same_bits_and_never_its_scan(
    name: str, dtype: torch.dtype, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = mamba(name, dtype)
    want, nothing = results(layer, CONV_BC[0], kind)
    with counted(monkeypatch, mamba3_chunks, "chunk_scan") as scans:
        got, replays = results(layer, CONV_BC[1], kind)
    assert all(map(torch.equal, got, want)) and len(scans) == 1
    # Convolutions of x and of B | C; norms and steps; rotation; gate: each once more.
    assert nothing.counts == {} and replays.counts == {
        "conv_bc": 5 if layer.mamba.conv_kernel else 3
    }


@pytest.mark.parametrize("kind", ["whole", "packed"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_m2rnn_runs_again_to_the_same_bits(
    dtype: torch.dtype, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs, chunks = [], -(-29 // C)
    for keep_states, regions in product((False, True), CONV_BC):
        layer = m2rnn(dtype, keep_states)
        with counted(monkeypatch, m2rnn_chunks._Chunk, "_run") as recurrences:
            found, replays = results(layer, regions, kind)
        assert len(recurrences) == (chunks if keep_states else 2 * chunks)
        assert replays.counts == ({"conv_bc": 3} if regions else {})
        runs.append(found)
    for found in runs[1:]:
        assert all(map(torch.equal, found, runs[0]))


CLIPS = None, StateClip(0.05, "total"), StateClip(0.05, "carried")


@pytest.mark.parametrize("clip", CLIPS, ids=["no clip", "total", "carried"])
@pytest.mark.parametrize("kind", ["whole", "packed"])
def test_kept_states_give_the_gradients_of_the_recurrence(
    kind: str, clip: StateClip | None
) -> None:
    """Documents, initial states and gradients of final ones; twice through one graph."""
    torch.manual_seed(2)
    docs = documents(kind, 23)
    num_docs = int(docs.starts_BT.sum())
    shapes = (B, 23, 2, 6), (B, 23, 1, 6), (B, 23, 4, 3), (B, 23, 4), (4, 3, 3), (num_docs, 4, 6, 3)
    leaves = [torch.rand(shape).requires_grad_() for shape in shapes]
    found = []
    for keep_states in (False, True):
        q, k, v, f, w, initial = leaves
        y, final = m2rnn_chunked(
            q, k, v, f, w, docs, initial, clip, chunk_size=5, keep_states=keep_states
        )
        assert final is not None
        loss = y.square().sum() + final.sin().sum()
        first = torch.autograd.grad(loss, leaves, retain_graph=True)
        found.append([y, final, *first, *torch.autograd.grad(loss, leaves)])
    assert all(map(torch.equal, found[0], found[1]))
    assert all(map(torch.equal, found[1][2:8], found[1][8:]))
