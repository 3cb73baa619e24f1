"""Gated DeltaNet layers: documents, decoding, heads, dtypes, saved bytes, recomputation."""

from __future__ import annotations

import gc
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

from checkpointing.apply import give
from checkpointing.recompute import BlockRecompute, Replays
from checkpointing.tracing.live_bytes import LiveBytes
from megacpp.blocks.gated_deltanet.config import GatedDeltaNetConfig
from megacpp.blocks.gated_deltanet.module import DeltaInputs, GatedDeltaNet
from megacpp.config.schema import KEEP, ModelConfig
from megacpp.kernels.gated_delta_rule.chunks import gated_delta_rule
from megacpp.kernels.gated_delta_rule.reference import gated_delta_step
from megacpp.model.documents import Documents
from megacpp.model.fp32 import contract_parameters
from megacpp.model.init import initialise
from megacpp.model.regions import Region, layer_regions
from megacpp.model.scan import HeadTensors
from tests.model.half_precision import check_half_precision
from tests.model.test_gated_delta_rule import (
    IDS_BT,
    B,
    H,
    K,
    N,
    T,
    V,
    assert_all_close,
    assert_close,
    gradients,
    leaves,
)

DELTA = GatedDeltaNetConfig(H, N, K, V, chunk_size=5)
CONFIG = ModelConfig(dim=20, gated_deltanet=DELTA)


def layer(delta: GatedDeltaNetConfig = DELTA, dtype: torch.dtype = torch.double) -> GatedDeltaNet:
    mixer = GatedDeltaNet(replace(CONFIG, gated_deltanet=delta))
    initialise(mixer, mixer.init_rules(), seed=7)
    return mixer.to(dtype)


def test_documents_are_isolated_exactly() -> None:
    mixer, docs = layer(dtype=torch.float32), Documents.from_ids(IDS_BT)
    x = torch.randn(B, T, 20, generator=torch.Generator().manual_seed(1))
    other = x.clone()
    other[0, 8:18] += 1.0  # the fourth document of row 0
    outside = torch.ones(B, T, dtype=torch.bool)
    outside[0, 8:18] = False
    results = []
    for row in (x, other):
        row = row.requires_grad_()
        y = mixer(row, docs)
        results.append((y.detach(), *torch.autograd.grad(y, row, torch.ones_like(y))))
    (y, dx), (y_other, dx_other) = results
    assert torch.equal(y[outside], y_other[outside]) and torch.equal(dx[outside], dx_other[outside])
    assert not torch.equal(y[0, 8:18], y_other[0, 8:18])


@pytest.mark.parametrize("gate", [True, False])
def test_packed_row_is_its_documents_one_by_one(gate: bool) -> None:
    mixer = layer(replace(DELTA, gate=gate, allow_neg_eigval=not gate))
    x = torch.randn(B, T, 20, dtype=torch.double)
    packed = mixer(x, Documents.from_ids(IDS_BT))
    for b in range(B):
        for name in IDS_BT[b].unique():
            inside = IDS_BT[b] == name
            assert_close(packed[b, inside], mixer(x[b, inside][None])[0])


@pytest.mark.parametrize("prefill", [2, 13])
def test_prefill_and_steps_are_the_row(prefill: int) -> None:
    """Chunks leave the state that single tokens go on from, also after less than the taps."""
    inputs = leaves()
    want, want_state = gated_delta_rule(*inputs[:5], chunk_size=5)
    o, state = gated_delta_rule(*(x[:, :prefill] for x in inputs[:5]), chunk_size=5)
    outputs = [*o.unbind(1)]
    for t in range(prefill, T):
        q, k, v, g, beta = (x[:, t] for x in inputs[:5])
        o, state = gated_delta_step(q, k, v, g, beta, state)
        outputs.append(o)
    assert_all_close((torch.stack(outputs, 1), state), (want, want_state))


@pytest.mark.parametrize("gate", [True, False])
def test_step_is_forward(gate: bool) -> None:
    mixer = layer(replace(DELTA, gate=gate))
    x = torch.randn(B, T, 20, dtype=torch.double)
    want, state = mixer(x), mixer.init_state(B, x.device, x.dtype)
    for t in range(T):
        y, state = mixer.step(x[:, t], state)
        assert_close(y, want[:, t])


def of_heads(mixer: GatedDeltaNet, part: int, parts: int) -> dict[str, Tensor]:
    """The weights that some of the key heads and their value heads need."""
    named = dict(mixer.named_parameters())
    cut = {n: p if n == "norm.weight" else p.chunk(parts)[part] for n, p in named.items()}
    cut["out_proj.weight"] = named["out_proj.weight"].chunk(parts, 1)[part]
    return cut


def test_some_of_the_heads_give_their_share_of_the_output() -> None:
    mixer, docs = layer(), Documents.from_ids(IDS_BT)
    x = torch.randn(B, T, 20, dtype=torch.double, requires_grad=True)
    inputs = [x, *mixer.parameters()]
    want = mixer(x, docs)
    got = sum(functional_call(mixer, of_heads(mixer, i, 2), (x, docs)) for i in range(2))
    assert isinstance(got, Tensor)
    assert_close(got, want)
    assert_all_close(gradients((got,), inputs), gradients((want,), inputs))


class NoScan(nn.Module):
    """Every token on its own."""

    def forward(self, inputs: DeltaInputs, weights: HeadTensors, docs: Documents | None) -> Tensor:
        keys = (inputs.q_BTHK * inputs.k_BTHK).sum((-1, -2))
        return inputs.v_BTNV * (inputs.g_BTN * inputs.beta_BTN + keys[..., None])[..., None]


class NoConvolution(nn.Module):
    """The tap that meets the token itself."""

    def forward(self, x_BTC: Tensor, weight_C1K: Tensor, docs: Documents | None) -> Tensor:
        return x_BTC * weight_C1K[:, 0, -1]


def test_convolution_and_scan_are_all_that_looks_back() -> None:
    mixer = layer()
    mixer.convolve, mixer.scan = NoConvolution(), NoScan()  # type: ignore[assignment]
    x = torch.randn(B, 9, 20, dtype=torch.double, requires_grad=True)
    (dx,) = torch.autograd.grad(mixer(x)[:, 4].square().sum(), x)
    assert dx[:, 4].abs().min() > 0
    dx[:, 4] = 0
    assert dx.abs().max() == 0


@pytest.mark.parametrize("autocast", [False, True], ids=["narrow weights", "autocast"])
def test_half_precision_is_near(autocast: bool) -> None:
    check_half_precision(lambda dtype: layer(dtype=dtype), autocast)


def test_contract_parameters_stay_wide() -> None:
    mixer = layer(dtype=torch.bfloat16)
    names = {name for name, _ in contract_parameters(mixer)}
    assert names == {"A_log", "dt_bias", "norm.weight"}
    for name, parameter in mixer.named_parameters():
        assert parameter.dtype == (torch.float32 if name in names else torch.bfloat16), name


def test_init_rules_cover_everything() -> None:
    mixer = layer(GatedDeltaNetConfig(32, 64, 2, 1), torch.float32)  # fails on a tensor too many
    assert 0 < mixer.A_log.exp().min() < 2 and 14 < mixer.A_log.exp().max() < 16
    dt = nn.functional.softplus(mixer.dt_bias)
    assert 0.99e-3 <= dt.min() < 2e-3 and 0.05 < dt.max() <= 0.1001
    assert torch.equal(mixer.norm.weight, torch.ones(1))
    assert 0.3 < mixer.conv_v.weight.abs().max() <= 0.5
    std = mixer.out_proj.weight.std() / mixer.in_q.weight.std()
    assert abs(std * (2 * CONFIG.depth) ** 0.5 - 1) < 0.2


def test_meta_device() -> None:
    with torch.device("meta"):
        mixer = layer(dtype=torch.bfloat16)
        y = mixer(torch.empty(B, T, 20, dtype=torch.bfloat16, requires_grad=True))
    y.sum().backward()
    assert y.is_meta and y.shape == (B, T, 20) and all(p.grad.is_meta for p in mixer.parameters())


CONV_GATE: tuple[frozenset[Region], ...] = (frozenset(), frozenset({"conv_bc"}))


def run(
    mixer: GatedDeltaNet, regions: frozenset[Region], x: Tensor, docs: Documents
) -> tuple[Tensor, Replays]:
    """The layer as the mixer of a block whose policy recomputes `regions`."""
    recompute = BlockRecompute(regions, replays := Replays())
    give(mixer, recompute)
    return recompute("block", mixer, x, docs), replays


def kept_per_token(mixer: GatedDeltaNet, regions: frozenset[Region]) -> float:
    """Bytes alive behind a forward that grow with the tokens."""
    alive = []
    for tokens in (20, 40):
        x = torch.randn(B, tokens, 20, dtype=mixer.in_q.weight.dtype, requires_grad=True)
        docs = Documents.rows(B, tokens)
        mixer(x, docs)
        gc.collect()
        with LiveBytes() as live:
            y, _ = run(mixer, regions, x, docs)
            gc.collect()
            alive.append(live.alive())
        assert y.requires_grad
    return (alive[1] - alive[0]) / (B * 20)


@pytest.mark.parametrize("gate", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_bytes_that_a_layer_keeps_per_token(dtype: torch.dtype, gate: bool) -> None:
    mixer, e, fp32 = layer(replace(DELTA, gate=gate), dtype), dtype.itemsize, 4
    channels, values = 2 * H * K + N * V, N * V
    convolved = 2 * e * channels  # in front of the convolution, and behind it for the rule
    gates = fp32 * N * 4  # a + dt_bias, its softplus, g; the sigmoid of b
    outputs = e * (values * (2 + gate) + 20)  # o, z, gated; the layer's own
    assert kept_per_token(mixer, CONV_GATE[0]) == convolved + gates + outputs
    # Recomputed: what is behind the convolution, and what is behind the gate.
    again = convolved + gates + outputs - e * (channels + values)
    assert kept_per_token(mixer, CONV_GATE[1]) == again


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_recompute_gives_the_same_bits(dtype: torch.dtype) -> None:
    x = torch.randn(B, T, 20, generator=torch.Generator().manual_seed(1)).to(dtype)
    found = []
    for regions in CONV_GATE:
        mixer, row = layer(dtype=dtype), x.clone().requires_grad_()
        y, replays = run(mixer, regions, row, Documents.from_ids(IDS_BT))
        found.append([y, *torch.autograd.grad(y.sum(), [row, *mixer.parameters()])])
        assert replays.counts == ({"conv_bc": 2} if regions else {})  # convolution; norm and gate
    assert all(map(torch.equal, *found))


def test_policies_choose_the_regions() -> None:
    model = replace(CONFIG, pattern="G", depth=2)
    wanted = {"none": set(), "conv_gate": {"conv_bc"}, "full": {"block"}}
    for gblock, regions in wanted.items():
        policy = replace(KEEP, gblock=gblock)  # type: ignore[arg-type]
        assert layer_regions(policy, model) == [regions, set()]  # the last layer keeps all
