"""Fast forms against their plain references, side by side in one run.

    python bench/kernels.py [--rounds 5]

Chunked Mamba-3 and M2RNN against their token-by-token recurrences, fused linear cross entropy
against plain logits: forward and backward, CPU seconds (wall seconds on a GPU), the two forms in
turns, medians compared. Shapes are those of the preset `tiny`, 2 rows of 256 tokens. On a GPU also
M2RNN by Triton, against the chunks, in bf16 with a published layer's 132 heads (arXiv 2603.14360).
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from torch import Tensor

from bench import parser_of
from megacpp.config.presets import tiny
from megacpp.kernels.linear_cross_entropy.chunked import linear_cross_entropy
from megacpp.kernels.linear_cross_entropy.reference import linear_cross_entropy_plain
from megacpp.kernels.m2rnn.backends import m2rnn_chunked
from megacpp.kernels.m2rnn.reference import m2rnn_sequential
from megacpp.kernels.mamba3.chunks import mamba3_chunked
from megacpp.kernels.mamba3.inputs import HeadWeights, Pairing, ScanInputs
from megacpp.kernels.mamba3.reference import mamba3_sequential
from megacpp.model.documents import Documents

B, T = 2, 256
Run = Callable[[], Tensor]


def main() -> None:
    """Run the benchmark from the command line."""
    parser = parser_of(__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="measured rounds (default 5)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    pairs = {
        "Mamba-3 SISO": _mamba3(device, rank=1),
        "Mamba-3 MIMO 4": _mamba3(device, rank=4),
        "M2RNN": _m2rnn(device),
        "linear cross entropy": _loss(device),
    }
    if device.type == "cuda":
        pairs["M2RNN by Triton"] = _m2rnn_backends(device)
    rows = {name: _measure(*pair, options.rounds, device) for name, pair in pairs.items()}
    print(f"{device.type}, {B} rows of {T} tokens, forward and backward, 1 thread")
    print(f"{'':22}{'plain s':>10}{'fast s':>10}{'plain / fast':>14}")
    for name, (plain_s, fast_s) in rows.items():
        print(f"{name:22}{plain_s:10.4f}{fast_s:10.4f}{plain_s / fast_s:14.2f}")
    if device.type != "cuda":
        print(f"{'M2RNN by Triton':22}{'not run: no GPU':>34}")


def _measure(plain: Run, fast: Run, rounds: int, device: torch.device) -> tuple[float, float]:
    """Return median seconds of both forms, in turns; the first round warms up."""
    gpu = device.type == "cuda"
    clock = time.perf_counter if gpu else time.process_time
    taken: tuple[list[float], list[float]] = ([], [])
    for number in range(rounds + 1):
        for run, seconds in zip((plain, fast), taken, strict=True):
            began = clock()
            run().sum().backward()
            if gpu:
                torch.cuda.synchronize()
            if number:
                seconds.append(clock() - began)
    return statistics.median(taken[0]), statistics.median(taken[1])


def _leaves(
    device: torch.device, dtype: torch.dtype = torch.float32
) -> tuple[torch.Generator, Callable[..., Tensor]]:
    """Return a generator, and a function that draws leaves of given sizes from it."""
    g = torch.Generator().manual_seed(0)
    return g, lambda *shape: torch.randn(*shape, generator=g).to(device, dtype).requires_grad_()


def _mamba3(device: torch.device, rank: int) -> tuple[Run, Run]:
    m, dim = tiny().model.mamba3, tiny().model.dim
    H, N, P = m.expand * dim // m.headdim, m.d_state, m.headdim
    g, leaf = _leaves(device)
    dt = (torch.rand(B, H, T, generator=g) * 0.1).to(device).requires_grad_()
    decay = (-torch.rand(B, H, T, generator=g) * 0.1).to(device).requires_grad_()
    inputs = ScanInputs(
        Q=leaf(B, T, rank, 1, N),
        K=leaf(B, T, rank, 1, N),
        V=leaf(B, T, H, P),
        Z=leaf(B, T, H, P),
        ADT=decay,
        DT=dt,
        Trap=leaf(B, H, T),
        Angles=leaf(B, T, 1, N // 4),
    )
    x, z, o = (leaf(H, rank, P) if rank > 1 else None for _ in range(3))
    weights = HeadWeights(leaf(H, rank, N), leaf(H, rank, N), leaf(H), x, z, o)
    docs = Documents.rows(B, T, device)
    pairing: Pairing = "half" if rank > 1 else "interleaved"
    chunk = m.chunk_size // rank
    return (
        lambda: mamba3_sequential(inputs, weights, docs, pairing)[0],
        lambda: mamba3_chunked(inputs, weights, docs, pairing, chunk)[0],
    )


def _m2rnn(device: torch.device) -> tuple[Run, Run]:
    r, dim = tiny().model.m2rnn, tiny().model.dim
    N, K, V = dim // (r.key_dim + r.value_dim), r.key_dim, r.value_dim
    g, leaf = _leaves(device)
    q, k, v, w = leaf(B, T, 1, K), leaf(B, T, 1, K), leaf(B, T, N, V), leaf(N, V, V)
    f = torch.rand(B, T, N, generator=g).to(device).requires_grad_()
    return (
        lambda: m2rnn_sequential(q, k, v, f, w)[0],
        lambda: m2rnn_chunked(q, k, v, f, w, chunk_size=r.chunk_size)[0],
    )


def _m2rnn_backends(device: torch.device) -> tuple[Run, Run]:
    """Return the chunks by torch and by Triton: q, k and v narrow, f and W wide."""
    N, K, V = 132, 64, 16
    g, leaf = _leaves(device, torch.bfloat16)
    q, k, v = leaf(B, T, 1, K), leaf(B, T, 1, K), leaf(B, T, N, V)
    f = torch.rand(B, T, N, generator=g).to(device).requires_grad_()
    w = torch.eye(V).repeat(N, 1, 1).to(device).requires_grad_()
    return (
        lambda: m2rnn_chunked(q, k, v, f, w, final_states=False, backend="torch")[0],
        lambda: m2rnn_chunked(q, k, v, f, w, final_states=False, backend="triton")[0],
    )


def _loss(device: torch.device) -> tuple[Run, Run]:
    model = tiny().model
    g = torch.Generator().manual_seed(0)
    x = torch.randn(B * T, model.dim, generator=g).to(device).requires_grad_()
    weight = (torch.randn(model.vocab_size, model.dim, generator=g) * 0.02).to(device)
    weight.requires_grad_()
    target = torch.randint(model.vocab_size, (B * T,), generator=g).to(device)
    return (
        lambda: linear_cross_entropy_plain(x, weight, target).loss_sum,
        lambda: linear_cross_entropy(x, weight, target).loss_sum,
    )


if __name__ == "__main__":
    main()
