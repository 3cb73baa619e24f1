"""Recompute policy on a model: the regions that each block recomputes, and their counts.

One process, fp64, a hybrid of every letter.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from unittest import mock

import pytest
import torch
from torch import Tensor

from checkpointing.apply import (
    ActivationCheckpointing,
    first_layers,
    recompute_of_depths,
    set_recompute,
)
from checkpointing.recompute import BlockRecompute, Replays
from megacpp.blocks.attention.gqa import CoreAttention
from megacpp.blocks.attention.mla import MultiHeadLatentAttention
from megacpp.blocks.experts.router import Router
from megacpp.blocks.m2rnn.module import M2RNNScan
from megacpp.config.arguments import parse_run
from megacpp.config.presets import PER_BLOCK, PRESETS
from megacpp.config.schema import KEEP, CheckpointingPolicy, Config, ModelConfig, PrecisionConfig
from megacpp.model.block import Block
from megacpp.model.hybrid import HybridLM
from megacpp.model.recompute import PLAIN
from megacpp.model.regions import BLOCK, NOTHING, layer_regions
from parallel.build import build_model
from parallel.mesh import World
from tests.parallel.parity import models
from tests.synthetic import ragged_batch

ONE = World(0, 1, torch.device("cpu"))
FULL = replace(
    KEEP,
    ablock="full",
    eblock="full",
    mblock="conv_bc_only",
    rblock="full_plus_norms",
    fblock="full",
)
ALL_REGIONS = replace(PER_BLOCK, ablock="selective", rblock="recurrence")


def hybrid(name: str = "plain") -> ModelConfig:
    return replace(models()[name], pattern="AEMRFE", depth=7)


def build(
    policy: CheckpointingPolicy, model: ModelConfig | None = None
) -> tuple[HybridLM, ActivationCheckpointing]:
    config = Config(model=model or hybrid(), recompute=policy, precision=PrecisionConfig("fp64"))
    ac = ActivationCheckpointing(config)
    return build_model(config, ONE, ac), ac


def train(model: HybridLM, rows: range = range(4)) -> list[Tensor]:
    """Loss, gradients, and all that routers count and record."""
    batch = ragged_batch(list(rows), 32, model.config.vocab_size)
    loss = model(batch.ids_BT, batch.labels_BT, batch.docs).loss_sum
    loss.backward()
    routers = [m for m in model.modules() if isinstance(m, Router)]
    counted = [t for r in routers for t in (r.tokens_per_expert, r.loss_sums, r.gradient_squares)]
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    assert len(grads) == len(list(model.parameters()))
    return [loss.detach(), *grads, *counted]


POLICIES = {
    "norms": replace(KEEP, norms=True),
    "core attention": replace(KEEP, core_attn=True),
    "latents": replace(KEEP, ablock="selective"),
    "mlp": replace(KEEP, mlp=True),
    "experts": replace(KEEP, eblock="expert_gemm_only"),
    "conv": replace(KEEP, mblock="conv_bc_only"),
    "all regions": ALL_REGIONS,
    "full": FULL,
}


@pytest.mark.parametrize("name", ["plain", "options", "mla"])
def test_every_policy_gives_the_same_bits(name: str) -> None:
    """Also counts, auxiliary losses and gradient norms at the routers: nothing counts twice."""
    expected = train(build(KEEP, hybrid(name))[0])
    for policy in POLICIES.values():
        found = train(build(policy, hybrid(name))[0])
        assert len(found) == len(expected)
        assert all(map(torch.equal, found, expected)), policy


def test_states_kept_or_rebuilt_give_the_same_bits() -> None:
    model, _ = build(replace(KEEP, rblock="none"))
    assert all(m.keep_states for m in model.modules() if isinstance(m, M2RNNScan))
    expected = train(build(replace(KEEP, rblock="recurrence"))[0])
    assert all(map(torch.equal, train(model), expected))


def test_what_runs_again() -> None:
    """Check A E M R F E A: all but the last layer; norms of six blocks, and each kind's regions."""
    model, ac = build(ALL_REGIONS)
    train(model)
    counts = ac.replays.counts
    assert counts["core_attn"] == 1 and counts["expert_gemm"] == 2
    assert counts["norm"] >= 6 and counts["mlp"] == 3 and "block" not in counts
    model, ac = build(FULL)
    train(model)
    assert ac.replays.counts["block"] == 5  # A E R F E; M has its own region
    train(model)
    assert ac.replays.counts["block"] == 10


@pytest.mark.parametrize("name", [*POLICIES, "saved tensors", "block inputs"])
@pytest.mark.parametrize("streams", [False, True])
def test_the_last_layer_is_never_wrapped(name: str, streams: bool) -> None:
    """Also where every saved tensor goes to the host, and where streams of groups run again."""
    offloads = {
        "saved tensors": replace(KEEP, offload="saved_tensors"),
        "block inputs": replace(FULL, offload="block_inputs"),
    }
    model, _ = build((POLICIES | offloads)[name], hybrid("streams" if streams else "plain"))
    seams = [block.recompute for block in model.blocks.values()]
    assert len(seams) == 7 and seams[-1] is PLAIN
    assert any(isinstance(seam, BlockRecompute) for seam in seams[:-1]), "others are"


def test_only_blocks_of_experts_go_without_the_shape_check() -> None:
    for policy in (ALL_REGIONS, FULL):
        model, _ = build(policy)
        for key, block in model.blocks.items():
            assert isinstance(block, Block)
            if isinstance(block.recompute, BlockRecompute):
                expected = "none" if block.letter == "E" else "default"
                assert block.recompute.check == expected, key
            for module in block.modules():
                assert getattr(module, "recompute", block.recompute) is block.recompute


def test_experts_run_again_without_router_permutation_or_scan() -> None:
    """Calls in a forward and backward: what must not run again runs once a layer."""
    import megacpp.blocks.experts.module as moe
    import megacpp.kernels.mamba3.chunks as chunks

    calls: Counter[str] = Counter()

    def counted(module: object, name: str) -> mock._patch[object]:
        original = getattr(module, name)

        def call(*args: object, **kwargs: object) -> object:
            calls[name] += 1
            return original(*args, **kwargs)

        return mock.patch.object(module, name, call)

    model, _ = build(ALL_REGIONS)
    with (
        counted(moe, "group_rows"),
        counted(Router, "choose"),
        counted(moe.Dispatch, "forward"),
        counted(chunks, "chunk_scan"),
        counted(chunks, "bias_and_rotate"),
    ):
        train(model)
    assert calls["group_rows"] == calls["forward"] == 2
    assert calls["chunk_scan"] == 1 and calls["bias_and_rotate"] == 2
    assert calls["choose"] == 2


def test_keys_and_values_are_rebuilt_from_the_latent() -> None:
    """Compute the latent once; its expansion and that of the queries are recomputed."""
    calls: Counter[str] = Counter()

    def counted(name: str, kind: type = MultiHeadLatentAttention) -> mock._patch[object]:
        original = getattr(kind, name)

        def call(*args: object, **kwargs: object) -> object:
            calls[name] += 1
            return original(*args, **kwargs)

        return mock.patch.object(kind, name, call)

    latent = replace(hybrid("mla"), pattern="AF", depth=2)
    model, _ = build(replace(KEEP, mla_kv=True, mla_q_upproj=True), latent)
    core = counted("attend", CoreAttention)
    with counted("expand_kv"), counted("latent"), counted("queries"), core:
        train(model)
    assert calls == {"latent": 1, "attend": 1, "expand_kv": 2, "queries": 2}


def test_a_router_that_would_choose_otherwise_is_not_asked() -> None:
    """Recompute a whole E block after its bias has changed: its experts are the former ones."""
    found = []
    for policy in (KEEP, FULL):
        model, _ = build(policy)
        batch = ragged_batch([0, 1], 32, model.config.vocab_size)
        loss = model(batch.ids_BT, batch.labels_BT, batch.docs).loss_sum
        for module in model.modules():
            if isinstance(module, Router):
                module.expert_bias.copy_(torch.randn(len(module.expert_bias)).double() * 10)
        loss.backward()
        found.append([p.grad for p in model.parameters()])
    for a, b in zip(*found, strict=True):
        assert a is not None and b is not None and torch.equal(a, b)


def test_every_preset_says_what_it_keeps() -> None:
    for make in PRESETS.values():
        config = make()
        regions = layer_regions(config.recompute, config.model)
        assert len(regions) == config.model.depth and regions[-1] == NOTHING
        if "M" in config.model.pattern:
            assert config.recompute == PER_BLOCK


def test_slot_for_depths() -> None:
    """Recompute a chain of steps, each as a whole."""
    policy, replays = KEEP, Replays()
    linear = torch.nn.Linear(8, 8).double()

    def steps(recompute: object, x: Tensor) -> Tensor:
        for _ in range(4):
            x = recompute("block", lambda x: linear(x).tanh(), x)  # type: ignore[operator]
        return x

    found = []
    for recompute in (PLAIN, recompute_of_depths(policy, replays)):
        linear.zero_grad()
        steps(recompute, torch.ones(3, 8).double()).sum().backward()
        assert linear.weight.grad is not None
        found.append(linear.weight.grad.clone())
    assert torch.equal(*found) and replays.counts == {"block": 4}
    off = recompute_of_depths(replace(policy, mtp=False), replays)
    assert isinstance(off, BlockRecompute) and off.regions == NOTHING


def test_a_global_switch_for_comparison() -> None:
    """Recompute every block as a whole, the scan too, which no policy offers."""
    model, _ = build(KEEP)
    replays = Replays()
    set_recompute(model, [BLOCK] * 7, KEEP, replays)
    expected = train(build(KEEP)[0])
    assert all(map(torch.equal, train(model), expected)) and replays.counts == {"block": 7}


@pytest.mark.parametrize(
    ("words", "layers"),
    [
        ("", [0]),
        ("--mesh.pp 2 --train.grad-accum 4", [0, 6]),
        ("--mesh.pp 2 --train.grad-accum 4 --mesh.pp-schedule zbv", [0, 2, 6, 10]),
    ],
    ids=["one process", "two stages", "a V of four"],
)
def test_each_stage_begins_a_forward(words: str, layers: list[int]) -> None:
    """Copies on the host are counted from there on; the 12 blocks of `tiny` are cut between."""
    config = parse_run(["tiny", "--train.device-batch-size", "1", *words.split()], 2).config
    assert sorted(first_layers(config)) == layers


def test_one_process_prepares_its_model_too() -> None:
    seen: list[HybridLM] = []
    model = build_model(Config(), World(0, 1, torch.device("cpu")), seen.append)
    assert len(seen) == 1 and seen[0] is model
