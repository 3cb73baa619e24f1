"""Sparse blocks that run again: the same bits, the same choice, nothing recorded twice."""

from __future__ import annotations

from dataclasses import replace
from unittest import mock

import pytest
import torch

from checkpointing.apply import ActivationCheckpointing
from checkpointing.compile import compile_blocks
from megacpp.blocks.attention import sparse
from megacpp.blocks.attention.compiled import CHOSEN
from megacpp.blocks.attention.sparse import SparseAttention
from megacpp.config.schema import KEEP, CheckpointingPolicy
from tests.model.sparse_cases import build, sparse_model, train

POLICIES = {
    "full": replace(KEEP, ablock="full"),
    "selective": replace(KEEP, ablock="selective", norms=True),
    "core attention": replace(KEEP, core_attn=True),
    "full, inputs offloaded": replace(
        KEEP, ablock="full", offload="block_inputs", offload_min_mib=0
    ),
    "all offloaded": replace(KEEP, offload="saved_tensors", offload_min_mib=0),
    "all offloaded, full": replace(KEEP, ablock="full", offload="saved_tensors", offload_min_mib=0),
}


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
@pytest.mark.parametrize("name", ["sparse_stages", "sparse_gqa", "sparse_mla_warmup"])
def test_every_policy_gives_the_same_bits(name: str, policy: CheckpointingPolicy) -> None:
    model = sparse_model(name)
    expected = train(build(model))
    acs: list[ActivationCheckpointing] = []

    def prepare(config):  # type: ignore[no-untyped-def]
        acs.append(ActivationCheckpointing(config))
        return acs[-1]

    built = build(model, policy, prepare)
    indexed = sum(kind == "A.index" for kind in built.kinds)
    with mock.patch.object(sparse, "choose_keys", wraps=sparse.choose_keys) as chooses:
        found = train(built)
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        assert torch.equal(found[key], value), key
    assert chooses.call_count == (0 if "warmup" in name else indexed), "never chosen again"
    if policy.ablock != "none" or policy.core_attn:
        assert sum(acs[0].replays.counts.values()) > 0


def test_sparse_blocks_stay_eager_and_say_why() -> None:
    model = build(sparse_model("sparse_mla"))
    found = compile_blocks(model, "aot_eager", budget=0.5)
    layers = [i for i, kind in enumerate(model.kinds) if kind.startswith("A.")]
    assert [found.eager.get(i) for i in layers] == [CHOSEN] * len(layers)
    assert found.words(layers[0]) == f"eager: {CHOSEN}"
    assert found.graphs[0] == "block", "the one that attends to all keys is compiled"
    assert all(
        isinstance(model.get_submodule(f"blocks.{i}.mixer"), SparseAttention) for i in layers
    )
