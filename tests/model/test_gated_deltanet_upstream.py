"""Gated DeltaNet beside others' code: the kernels' library, names and layers of transformers."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from megacpp.blocks.gated_deltanet.config import GatedDeltaNetConfig
from megacpp.blocks.gated_deltanet.descriptor import GATED_DELTANET
from megacpp.config.schema import Config
from megacpp.kernels.gated_delta_rule import library
from megacpp.kernels.gated_delta_rule.chunks import gated_delta_rule
from megacpp.kernels.gated_delta_rule.reference import gated_delta_sequential
from megacpp.kernels.gated_delta_rule.segments import summarize
from megacpp.kernels.gated_delta_rule.support import fla
from megacpp.kernels.host import Host
from megacpp.model.documents import Documents
from megacpp.model.upstream import from_upstream, to_upstream
from tests.model.gated_delta_library import chunk_gated_delta_rule
from tests.model.test_gated_delta_rule import (
    IDS_BT,
    B,
    H,
    K,
    N,
    V,
    assert_all_close,
    gradients,
    leaves,
)
from tests.model.test_gated_deltanet import CONFIG, DELTA, layer

PACKAGES = {"triton": "3.8.0", "flash-linear-attention": "0.6.0"}
GPU = Host("cuda", "bf16", (9, 0), "H100", PACKAGES)


@pytest.mark.parametrize("packed", [False, True], ids=["rows", "documents"])
def test_the_library_is_called_with_what_it_documents(
    packed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stand-in with fla's signature, which the definition answers sequence by sequence."""
    calls = []
    monkeypatch.setattr(library, "kernel", lambda: calls.append(packed) or chunk_gated_delta_rule)
    docs, inputs = Documents.from_ids(IDS_BT) if packed else None, leaves()
    want = gated_delta_rule(*inputs[:5], docs, inputs[5])
    got = gated_delta_rule(*inputs[:5], docs, inputs[5], 16, backend="fla")
    assert_all_close(got, want)
    assert_all_close(gradients(got, inputs), gradients(want, inputs))
    of_row = [vars(summarize(*inputs[1:5], docs, 16, backend=b)) for b in ("fla", "torch")]
    assert_all_close(of_row[0].values(), of_row[1].values())
    assert len(calls) == 2


@pytest.mark.parametrize(
    ("delta", "host", "reason"),
    [
        (DELTA, replace(GPU, device="cpu"), "needs a GPU"),
        (DELTA, replace(GPU, packages={}), "needs flash-linear-attention 0.6 (installed: none)"),
        (DELTA, replace(GPU, dtype="fp32"), "precision.dtype=fp32"),
        (DELTA, replace(GPU, packages={**PACKAGES, "triton": "3.6.0"}), "with triton 3.6.0"),
        (DELTA, replace(GPU, capability=(10, 0)), "capability 10.0"),
        (replace(DELTA, key_dim=320), GPU, "key_dim=320"),
        (DELTA, GPU, "chunk_size=5"),
        (replace(DELTA, chunk_size=64), GPU, None),
    ],
)
def test_reasons_against_the_library(
    delta: GatedDeltaNetConfig, host: Host, reason: str | None
) -> None:
    found = fla(Config(model=replace(CONFIG, gated_deltanet=delta)), host)
    assert found is None if reason is None else found is not None and reason in found


def test_names_of_qwen3_next() -> None:
    ours = layer().state_dict()
    assert set(to_upstream(GATED_DELTANET, ours, CONFIG)) == {
        *("in_proj_qkvz.weight", "in_proj_ba.weight", "conv1d.weight", "A_log", "dt_bias"),
        *("norm.weight", "out_proj.weight"),
    }
    # q of key head 0 | k | v of its three value heads | z, then key head 1
    fused = torch.arange(2 * (K + K + 6 * V))[:, None].expand(-1, 20)
    found = from_upstream(GATED_DELTANET, {"in_proj_qkvz.weight": fused}, CONFIG)
    group, first = 2 * K + 6 * V, {name: w[:, 0].tolist() for name, w in found.items()}
    assert first["in_q.weight"] == [*range(K), *range(group, group + K)]
    assert first["in_v.weight"][3 * V - 1 : 3 * V + 1] == [2 * K + 3 * V - 1, group + 2 * K]
    assert first["in_z.weight"][0] == 2 * K + 3 * V


def test_functions_of_transformers_are_ours() -> None:
    qwen = pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next")
    q, k, v, g, beta, initial = (x.detach() for x in leaves(torch.float32))
    q, k = (x.repeat_interleave(N // H, 2) for x in (q, k))
    settings = {"output_final_state": True, "use_qk_l2norm_in_kernel": True}
    for theirs in (qwen.torch_chunk_gated_delta_rule, qwen.torch_recurrent_gated_delta_rule):
        want = theirs(q, k, v, g=g, beta=beta, initial_state=initial, **settings)
        for ours in (gated_delta_sequential, gated_delta_rule):
            got = ours(q, k, v, g, beta, None, initial)
            for a, b in zip(got, want, strict=True):
                assert (a - b).abs().max() <= 2e-6 * b.abs().max()  # fp32 inside, upstream


def test_the_layer_of_transformers_is_ours() -> None:
    qwen = pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next")
    config = qwen.Qwen3NextConfig(
        hidden_size=20,
        linear_num_key_heads=H,
        linear_num_value_heads=N,
        linear_key_head_dim=K,
        linear_value_head_dim=V,
        rms_norm_eps=CONFIG.norm_eps,
        num_hidden_layers=1,
        layer_types=["linear_attention"],
    )
    theirs = qwen.Qwen3NextGatedDeltaNet(config, 0)
    ours = layer(dtype=torch.float32)
    theirs.load_state_dict(to_upstream(GATED_DELTANET, ours.state_dict(), CONFIG))
    x = torch.randn(B, 70, 20, generator=torch.Generator().manual_seed(1))
    results = []
    for mixer in (theirs, ours):
        leaf = x.clone().requires_grad_()
        y = mixer(leaf)
        y.square().sum().backward()
        grads = {n: p.grad for n, p in mixer.named_parameters()}
        if mixer is ours:
            grads = to_upstream(GATED_DELTANET, grads, CONFIG)  # type: ignore[arg-type]
        results.append({"y": y, "x": leaf.grad, **grads})
    want, got = results
    assert want.keys() == got.keys()
    for name, a in want.items():
        assert (got[name] - a).abs().max() <= (5e-6 if name == "y" else 1e-5) * a.abs().max(), name
