"""Gated DeltaNet: chunks against the definition, documents, segments, decoding, saved bytes."""

from __future__ import annotations

import gc
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

from checkpointing.apply import give
from checkpointing.recompute import BlockRecompute, Replays
from checkpointing.tracing.live_bytes import LiveBytes
from megacpp.blocks.gated_deltanet.config import GatedDeltaNetConfig
from megacpp.blocks.gated_deltanet.descriptor import GATED_DELTANET
from megacpp.blocks.gated_deltanet.module import GatedDeltaNet
from megacpp.blocks.gated_deltanet.scan import DeltaInputs
from megacpp.config.schema import KEEP, Config, ModelConfig
from megacpp.kernels.gated_delta_rule import library
from megacpp.kernels.gated_delta_rule.chunks import gated_delta_rule
from megacpp.kernels.gated_delta_rule.reference import gated_delta_sequential, gated_delta_step
from megacpp.kernels.gated_delta_rule.segments import fold, summarize
from megacpp.kernels.gated_delta_rule.support import fla
from megacpp.kernels.host import Host
from megacpp.model.documents import Documents
from megacpp.model.fp32 import contract_parameters
from megacpp.model.init import initialise
from megacpp.model.regions import Region, layer_regions
from megacpp.model.scan import HeadTensors
from megacpp.model.upstream import from_upstream, to_upstream
from tests.model.gated_delta_library import chunk_gated_delta_rule

FP64 = 1e-12  # two formulas of the same thing in fp64
B, T, H, N, K, V = 2, 23, 2, 6, 5, 7
DELTA = GatedDeltaNetConfig(H, N, K, V, chunk_size=5)
CONFIG = ModelConfig(dim=20, gated_deltanet=DELTA)

# Lengths 1, several documents in a chunk, and starts that differ between the rows.
IDS_BT = torch.stack(
    [
        torch.repeat_interleave(torch.arange(5), torch.tensor([6, 1, 1, 10, 5])),
        torch.repeat_interleave(torch.arange(3), torch.tensor([1, 18, 4])),
    ]
)


def leaves(dtype: torch.dtype = torch.double, tokens: int = T, rate: float = 3.0) -> list[Tensor]:
    """q, k, v, g, beta and an initial state; some tokens keep all, write nothing or write twice."""
    torch.manual_seed(3)
    g, beta = -rate * torch.rand(B, tokens, N), 2 * torch.rand(B, tokens, N)
    g[:, 3], beta[:, 4], beta[:, 5] = 0.0, 0.0, 2.0
    made = [
        torch.randn(B, tokens, H, K),
        torch.randn(B, tokens, H, K),
        torch.randn(B, tokens, N, V),
        g,
        beta,
        torch.randn(B, N, K, V),
    ]
    return [x.to(dtype).requires_grad_() for x in made]


def gradients(outputs: tuple[Tensor, ...], inputs: list[Tensor]) -> list[Tensor]:
    """Gradients of a fixed random functional of the outputs."""
    torch.manual_seed(4)
    cotangents = [torch.randn(y.shape, dtype=torch.double).to(y.dtype) for y in outputs]
    return list(torch.autograd.grad(outputs, inputs, cotangents))


def assert_close(got: Tensor, want: Tensor, relative: float = FP64) -> None:
    error = (got - want).abs().max().item()
    assert error <= relative * max(1.0, want.abs().max().item()), f"{error:.1e}"


def assert_all_close(got: Any, want: Any) -> None:
    for a, b in zip(got, want, strict=True):
        assert_close(a, b)


def layer(delta: GatedDeltaNetConfig = DELTA, dtype: torch.dtype = torch.double) -> GatedDeltaNet:
    mixer = GatedDeltaNet(replace(CONFIG, gated_deltanet=delta))
    initialise(mixer, mixer.init_rules(), seed=7)
    return mixer.to(dtype)


@pytest.mark.parametrize("chunk_size", [1, 5, 64])
@pytest.mark.parametrize("packed", [False, True], ids=["rows", "documents"])
def test_chunks_are_the_definition(chunk_size: int, packed: bool) -> None:
    docs, inputs = Documents.from_ids(IDS_BT) if packed else None, leaves()
    want = gated_delta_sequential(*inputs[:5], docs, inputs[5])
    got = gated_delta_rule(*inputs[:5], docs, inputs[5], chunk_size)
    assert_all_close(got, want)
    assert_all_close(gradients(got, inputs), gradients(want, inputs))


@pytest.mark.parametrize("used", [0, 1], ids=["outputs", "state"])
def test_one_result_alone_is_used(used: int) -> None:
    inputs = leaves()
    want = gated_delta_sequential(*inputs[:5], None, inputs[5])[used]
    got = gated_delta_rule(*inputs[:5], None, inputs[5], 5)[used]
    wanted = inputs[1:]
    assert_all_close(gradients((got,), wanted), gradients((want,), wanted))


def test_a_row_cut_in_two_passes_its_state_on() -> None:
    inputs = leaves()
    want = gated_delta_rule(*inputs[:5], chunk_size=5)
    left, state = gated_delta_rule(*(x[:, :9] for x in inputs[:5]), chunk_size=5)
    right, state = gated_delta_rule(*(x[:, 9:] for x in inputs[:5]), None, state, 5)
    got = torch.cat([left, right], 1), state
    assert_all_close(got, want)
    assert_all_close(gradients(got, inputs[:5]), gradients(want, inputs[:5]))


@pytest.mark.parametrize("packed", [False, True], ids=["rows", "documents"])
def test_folded_segments_are_the_row(packed: bool) -> None:
    """Every segment is scanned from the state that the summaries on its left fold into."""
    inputs, docs = leaves(tokens=24), Documents.rows(B, 24)
    if packed:
        docs = Documents.from_ids(torch.cat([IDS_BT, IDS_BT[:, -1:]], 1))
    want = gated_delta_rule(*inputs[:5], docs, chunk_size=5)
    spans = [slice(s, s + 8) for s in (0, 8, 16)]
    parts = [[x[:, span] for x in inputs[:5]] for span in spans]
    of_parts = [docs.take(torch.arange(24)[span]) for span in spans]
    summaries = [summarize(*x[1:], d, 5) for x, d in zip(parts, of_parts, strict=True)]
    carries = torch.stack([~d.starts_BT.any(1) for d in of_parts])
    states = [s.S_BNKV for s in fold(summaries, carries)]
    outputs = []
    for part, d, state in zip(parts, of_parts, states[:-1], strict=True):
        state = torch.where((d.positions_BT[:, 0] > 0)[:, None, None, None], state, 0.0)
        outputs.append(gated_delta_rule(*part, d, state, 5)[0])
    got = torch.cat(outputs, 1), states[-1]
    assert_all_close(got, want)
    assert_all_close(gradients(got, inputs[:5]), gradients(want, inputs[:5]))


def test_summaries_compose_and_do_not_commute() -> None:
    _, k, v, g, beta, _ = leaves()
    whole = summarize(k, v, g, beta, None, 5)
    left, right = (
        summarize(*(x[:, s] for x in (k, v, g, beta)), None, 5) for s in (slice(9), slice(9, T))
    )
    assert_close(right.through_SNKK @ left.through_SNKK, whole.through_SNKK)
    assert_close(right.through_SNKK @ left.added_SNKV + right.added_SNKV, whole.added_SNKV)
    other = left.through_SNKK @ right.through_SNKK
    assert (other - whole.through_SNKK).abs().max() > 1e-3 * whole.through_SNKK.abs().max()


@pytest.mark.parametrize("rate", [0.01, 3.0, 40.0])
def test_fp32_chunks_are_as_good_as_tokens_at_every_decay(rate: float) -> None:
    """With 40 a chunk decays by 1,200 nats: exp of a sum over it overflows on its own."""
    inputs = leaves(torch.double, 96, rate)
    narrow = [x.detach().float() for x in inputs]
    want = gated_delta_sequential(*inputs[:5], None, inputs[5])
    got = gated_delta_rule(*narrow[:5], None, narrow[5])
    for a, b in zip(got, want, strict=True):
        assert (a - b).abs().max() <= 2e-6 * b.abs().max()


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


def test_narrow_inputs_are_computed_wide() -> None:
    """bf16 inputs give what their fp32 copies give, rounded once at the end."""
    narrow = leaves(torch.bfloat16)[:5]
    same = [x.detach().float().requires_grad_() for x in narrow]
    y, y_wide = (gated_delta_rule(*x, chunk_size=5)[0] for x in (narrow, same))
    assert y.dtype == torch.bfloat16 and torch.equal(y, y_wide.bfloat16())
    dy = torch.randn_like(y)
    got, want = torch.autograd.grad(y, narrow, dy), torch.autograd.grad(y_wide, same, dy.float())
    assert all(torch.equal(a, b.bfloat16()) for a, b in zip(got, want, strict=True))


def test_autocast_leaves_the_rule_alone() -> None:
    inputs = leaves(torch.float32)
    want, want_step = gated_delta_rule(*inputs[:5])[0], gated_delta_sequential(*inputs[:5])[0]
    with torch.autocast("cpu", torch.bfloat16):
        got = gated_delta_rule(*inputs[:5])[0]
        dgot = gradients((got,), inputs[:5])
        assert torch.equal(gated_delta_sequential(*inputs[:5])[0], want_step)
    assert torch.equal(got, want)
    assert all(map(torch.equal, dgot, gradients((want,), inputs[:5])))


@pytest.mark.parametrize("how", ["narrow weights", "autocast"])
def test_half_precision_is_near(how: str) -> None:
    """Six roundings to 8 bits lie on the way of a value; 6 * 2^-8 of the largest bounds them."""
    x = torch.randn(B, T, 20, generator=torch.Generator().manual_seed(1)).bfloat16()
    want = layer(dtype=torch.float32)(x.float())
    if how == "autocast":
        with torch.autocast("cpu", torch.bfloat16):
            got = layer(dtype=torch.float32)(x.float())
        assert got.dtype == torch.float32
    else:
        mixer = layer(dtype=torch.bfloat16)
        got = mixer(x)
        got.sum().backward()
        assert got.dtype == torch.bfloat16
        assert all(p.grad is not None and p.grad.dtype == p.dtype for p in mixer.parameters())
        state = mixer.init_state(B, x.device, x.dtype)
        assert state.S_BNKV.dtype == torch.float32
        assert mixer.step(x[:, 0], state)[0].dtype == torch.bfloat16
    assert_close(got.float() / want.abs().max(), want / want.abs().max(), 6 * 2.0**-8)


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


def saved_bytes(run: Any) -> int:
    """Bytes of all storages that autograd keeps for backward."""
    saved: dict[int, int] = {}

    def pack(t: Tensor) -> Tensor:
        saved[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        run()
    return sum(saved.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_rule_keeps_its_inputs_alone(dtype: torch.dtype) -> None:
    inputs = leaves(dtype)[:5]
    own = sum(x.numel() * x.element_size() for x in inputs)
    assert saved_bytes(lambda: gated_delta_rule(*inputs, chunk_size=5)) == own
    assert saved_bytes(lambda: summarize(*inputs[1:], None, 5)) < own + 4 * B * N * K * (K + V) + 1


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


PACKAGES = {"triton": "3.8.0", "flash-linear-attention": "0.6.0"}
GPU = Host("cuda", "bf16", (9, 0), "H100", PACKAGES)


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
