"""What experts on ranks keep for the backward, and what recomputing them repeats.

Legend: D model, K experts of a token, L labels of a row, R rows that arrive, S slots.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from checkpointing.apply import give
from checkpointing.recompute import BlockRecompute, Replays
from checkpointing.tracing.live_bytes import LiveBytes
from megacpp.blocks.experts.module import MixtureOfExperts
from megacpp.config.schema import MeshConfig
from megacpp.lessons.experts import CPU, MOE, D, mixer_of, randn, spread_over
from megacpp.model.documents import Documents
from megacpp.model.regions import Region
from parallel.expert import exchange as expert_exchange
from parallel.expert.parallel import ExpertParallel, Kind
from parallel.start import join
from tests.collectives import CollectiveCounter
from tests.model.test_moe_kept_bytes import EXPERT_GEMM, calls
from tests.ranks import run_ranks

KINDS: tuple[Kind, Kind] = ("per_rank", "per_expert")
TWO = MeshConfig(dp_shard=2, ep=2)


def recomputing_rank(rank: int, _size: int) -> dict[str, Any]:
    """With and without the experts' region: gradients, collectives, and what is made again."""
    world, found = join(TWO, CPU), {}
    styles = {kind: (MOE, ExpertParallel(kind)) for kind in KINDS}
    styles["slots"] = replace(MOE, capacity_factor=1.25), ExpertParallel()
    for name, (moe, style) in styles.items():
        runs = []
        for regions in (frozenset[Region](), EXPERT_GEMM):
            mixer = mixer_of(moe, torch.float64, [])
            spread_over(mixer, world, style)
            recompute = BlockRecompute(regions, Replays())
            give(mixer, recompute)
            x, docs = randn(1, 40, D, seed=rank).requires_grad_(), Documents.rows(1, 40)
            with CollectiveCounter() as seen, calls(expert_exchange) as counts:
                recompute("block", mixer, x, docs).square().sum().backward()
            grads = [x.grad, *(p.grad for p in mixer.parameters())]
            assert mixer.router.tokens_per_expert.sum() == 40 * moe.top_k
            runs.append((grads, seen.calls, counts, recompute.replays.counts))
        (grads, sent, once, _), (again, sent_again, twice, replayed) = runs
        same = all(torch.equal(local(a), local(b)) for a, b in zip(grads, again, strict=True))
        found[name] = same, sent == sent_again, len(sent), replayed, once, twice
    return found


def local(t: Any) -> Tensor:
    return t.to_local() if hasattr(t, "to_local") else t


def test_recomputed_experts_send_nothing() -> None:
    """Bitwise the same gradients after the same collectives; gate and up alone are made again."""
    num_sent = {"per_expert": 5, "per_rank": 7, "slots": 4}
    for found in run_ranks(recomputing_rank, 2):
        for name, (same, same_calls, sent, replayed, once, twice) in found.items():
            assert same and same_calls and replayed == {"expert_gemm": 1}, name
            assert sent == num_sent[name], name
            sorts = 1 if name == "slots" else 2
            assert once == {"sort": sorts, "products": 6, "outer_products": 3}, name
            assert twice == once | {"products": 8}, name


def keeping_rank(rank: int, _size: int) -> dict[str, tuple[int, int]]:
    """Bytes that a forward keeps and gives, and what they are by hand."""
    world, found, tokens, K = join(TWO, CPU), {}, 40, 3
    styles = {kind: (MOE, ExpertParallel(kind)) for kind in KINDS}
    styles["slots"] = replace(MOE, capacity_factor=1.25), ExpertParallel()
    for name, (moe, style) in styles.items():
        mixer = mixer_of(replace(moe, num_shared=0), torch.float32, [])
        spread_over(mixer, world, style)
        x, docs = randn(1, tokens, D, seed=rank).float().requires_grad_(), Documents.rows(1, tokens)
        sizes: list[tuple[int, int]] = []

        def note(_: Any, args: tuple[Any, ...], sizes: list[tuple[int, int]] = sizes) -> None:
            sizes.append((len(args[0]), len(args[1].token_S)))

        mixer.experts.register_forward_pre_hook(note)
        with LiveBytes() as live:
            y = mixer(x, docs)
        [(R, S)] = sizes
        N, sent = tokens * K, len(trip_rows(mixer, x))
        routing = (8 + 4) * N + 4 * tokens  # choices, their scores, the sum of these
        experts = 4 * R * D + 2 * 4 * S * moe.hidden_dim  # rows that came, gate and up
        order = 8 * N + 8 * sent + 8 * S  # slots of copies, rows of slots: here, and there
        if name == "per_rank":  # up to L = 3 experts a row; labels: where they were taken from
            order += (8 + 1) * 3 * R + N  # slots of rows and whether there is one
            order += (8 + 4) * N + (8 + 1) * 3 * sent + 4 * (S + 1)
        else:  # weighed at the source: rows that came back, and weights
            order += 8 * R + 4 * N + 4 * sent * D
            order += N + 8 if name == "slots" else 0  # dropped or not; a slot for those
        want, patience = routing + experts + order + y.untyped_storage().nbytes(), 500
        while live.alive() != want and (patience := patience - 1):
            time.sleep(0.01)  # gloo's own thread lets go of what it sent a moment later
        found[name] = live.alive(), want
    return found


def trip_rows(mixer: MixtureOfExperts, x_BTD: Tensor) -> Tensor:
    """The token of each row that leaves."""
    x_TD = x_BTD.detach().flatten(0, 1)
    weights_TK, indices_TK, _ = mixer.router(x_TD, decoding=True)
    return mixer.dispatch(x_TD, indices_TK, weights_TK)[1].at_source.token_S


def test_bytes_that_stay() -> None:
    """Of rows: those that came, and where weights wait at the source those that came back."""
    for found in run_ranks(keeping_rank, 2):
        for name, (alive, by_hand) in found.items():
            assert alive == by_hand, name
