"""M2RNN: the chunked form against the definition, what it keeps, where documents end, decoding."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

from megacpp.blocks.m2rnn.config import M2RNNConfig
from megacpp.blocks.m2rnn.module import M2RNN
from megacpp.config.schema import ModelConfig
from megacpp.kernels.m2rnn.backends import m2rnn_chunked, sequences_of
from megacpp.kernels.m2rnn.chunks import StateClip
from megacpp.kernels.m2rnn.reference import m2rnn_sequential
from megacpp.model.documents import Documents
from megacpp.model.fp32 import contract_parameters
from megacpp.model.init import initialise
from tests.model.half_precision import check_half_precision

FP64 = 1e-12  # two formulas of the same thing in fp64
CLIPS = [None, StateClip(0.05, "total"), StateClip(0.05, "carried")]
CLIP_NAMES = ["no clip", "total", "carried"]

# Two rows of 23 tokens; lengths 1, several at once, and starts that differ between the rows.
IDS_BT = torch.stack(
    [
        torch.repeat_interleave(torch.arange(5), torch.tensor([6, 1, 1, 10, 5])),
        torch.repeat_interleave(torch.arange(3), torch.tensor([1, 18, 4])),
    ]
)
CONFIG = ModelConfig(
    dim=20, m2rnn=M2RNNConfig(num_heads=4, num_q_heads=2, key_dim=6, value_dim=3, chunk_size=5)
)


def inputs(
    heads: tuple[int, ...] = (1, 2, 4, 4, 4),
    num_tokens: int = 23,
    dtype: torch.dtype = torch.double,
) -> list[Tensor]:
    """Leaves q, k, v, f, W of two rows with these head counts; K 6, V 3."""
    torch.manual_seed(3)
    q, k, v, f, w = heads
    made = [
        torch.randn(2, num_tokens, q, 6),
        torch.randn(2, num_tokens, k, 6),
        torch.randn(2, num_tokens, v, 3),
        torch.rand(2, num_tokens, f),
        torch.randn(w, 3, 3),
    ]
    return [x.to(dtype).requires_grad_() for x in made]


def gradients(outputs: list[Tensor], leaves: list[Tensor]) -> list[Tensor]:
    """Gradients of a fixed random functional of the outputs."""
    torch.manual_seed(4)
    cotangents = [torch.randn(y.shape, dtype=torch.double).to(y.dtype) for y in outputs]
    return list(torch.autograd.grad(outputs, leaves, cotangents))


def assert_close(got: Tensor, want: Tensor, relative: float) -> None:
    error = (got - want).abs().max().item()
    assert error <= relative * max(1.0, want.abs().max().item()), f"{error:.1e}"


def layer(config: ModelConfig = CONFIG, dtype: torch.dtype = torch.double) -> M2RNN:
    mixer = M2RNN(config)
    initialise(mixer, mixer.init_rules(), seed=7)
    return mixer.to(dtype)


@pytest.mark.parametrize("clip", CLIPS, ids=CLIP_NAMES)
@pytest.mark.parametrize("chunk_size", [1, 5, 64])
@pytest.mark.parametrize("packed", [False, True], ids=["rows", "documents"])
def test_chunked_is_sequential(clip: StateClip | None, chunk_size: int, packed: bool) -> None:
    docs = Documents.from_ids(IDS_BT) if packed else None
    initial = torch.randn(8 if packed else 2, 4, 6, 3, dtype=torch.double, requires_grad=True)
    leaves = [*inputs(), initial]
    want = m2rnn_sequential(*leaves[:5], docs, initial, clip)
    got = m2rnn_chunked(*leaves[:5], docs, initial, clip, chunk_size)
    assert got[1] is not None
    for a, b in zip(got, want, strict=True):
        assert a is not None
        assert_close(a, b, FP64)
    pairs = zip(gradients([*got], leaves), gradients([*want], leaves), strict=True)
    for a, b in pairs:
        assert_close(a, b, FP64)


@pytest.mark.parametrize("heads", [(4, 1, 2, 1, 1), (2, 4, 1, 4, 2), (1, 1, 1, 1, 3)])
def test_fewer_heads_are_shared_by_neighbours(heads: tuple[int, ...]) -> None:
    leaves = inputs(heads)
    num_heads = max(heads)
    shared = [x.repeat_interleave(num_heads // x.shape[2], 2) for x in leaves[:4]]
    shared.append(leaves[4].repeat_interleave(num_heads // heads[4], 0))
    got, _ = m2rnn_chunked(*leaves, chunk_size=7)
    want, _ = m2rnn_sequential(*shared)
    assert_close(got, want, FP64)
    for a, b in zip(gradients([got], leaves), gradients([want], leaves), strict=True):
        assert_close(a, b, FP64)


def test_gradcheck() -> None:
    docs = Documents.from_ids(torch.tensor([[0, 0, 0, 1, 2, 2], [0, 1, 1, 1, 1, 1]]))
    initial = torch.randn(5, 4, 6, 3, dtype=torch.double, requires_grad=True)

    def run(*leaves: Tensor) -> tuple[Tensor, Tensor | None]:
        return m2rnn_chunked(*leaves[:5], docs, leaves[5], chunk_size=4)

    leaves = [*inputs(num_tokens=6), initial]
    assert torch.autograd.gradcheck(run, leaves, fast_mode=True, atol=1e-7)


def test_only_final_states_are_used() -> None:
    leaves = inputs()
    want = gradients([m2rnn_sequential(*leaves)[1]], leaves[1:])
    final = m2rnn_chunked(*leaves, chunk_size=5)[1]
    assert final is not None
    for a, b in zip(gradients([final], leaves[1:]), want, strict=True):
        assert_close(a, b, FP64)


@pytest.mark.parametrize("clip", CLIPS, ids=CLIP_NAMES)
def test_a_row_cut_in_two_passes_its_state_on(clip: StateClip | None) -> None:
    leaves = inputs()
    want = m2rnn_chunked(*leaves, None, None, clip, 5)
    left = m2rnn_chunked(*(x[:, :9] for x in leaves[:4]), leaves[4], None, None, clip, 5)
    right = m2rnn_chunked(*(x[:, 9:] for x in leaves[:4]), leaves[4], None, left[1], clip, 5)
    got = torch.cat([left[0], right[0]], 1), right[1]
    assert want[1] is not None and got[1] is not None
    assert_close(got[0], want[0], FP64)
    assert_close(got[1], want[1], FP64)
    pairs = zip(gradients([*got], leaves), gradients([*want], leaves), strict=True)
    for a, b in pairs:
        assert_close(a, b, FP64)


def test_carried_clip_of_zero_cuts_time() -> None:
    """Nothing comes back from later tokens; an output still teaches its own token in full."""
    leaves = inputs()
    dy = torch.zeros(2, 23, 4, 3, dtype=torch.double)
    dy[:, 11] = 1.0
    y, _ = m2rnn_chunked(*leaves, clip=StateClip(0.0, "carried"), chunk_size=5)
    dv = torch.autograd.grad(y, leaves[2], dy)[0]
    free = torch.autograd.grad(m2rnn_chunked(*leaves, chunk_size=5)[0], leaves[2], dy)[0]
    assert dv[:, :11].abs().max() == 0 and free[:, :11].abs().max() > 0
    assert torch.equal(dv[:, 11], free[:, 11])


def saved_tensors(run) -> list[Tensor]:
    saved: dict[tuple, Tensor] = {}

    def pack(t: Tensor) -> Tensor:
        saved[t.untyped_storage().data_ptr(), t.shape, t.stride()] = t
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        run()
    return list(saved.values())


def test_keeps_states_of_chunk_starts_only() -> None:
    leaves = inputs(dtype=torch.float32)
    B, T, N, K, V, chunks = 2, 23, 4, 6, 3, 5
    saved = saved_tensors(lambda: m2rnn_chunked(*leaves, chunk_size=5, final_states=False))
    states = [t for t in saved if t.numel() == chunks * B * N * K * V]
    assert len(states) == 1 and states[0].dtype == torch.float32
    kept_bytes = sum(t.numel() * t.element_size() for t in saved)
    input_bytes = sum(t.numel() * t.element_size() for t in leaves)
    assert kept_bytes == input_bytes + 4 * chunks * B * N * K * V
    every_state = 4 * B * T * N * K * V
    assert kept_bytes < every_state
    plain = saved_tensors(lambda: m2rnn_sequential(*leaves))
    assert sum(t.numel() * t.element_size() for t in plain) > every_state


def test_masking_at_every_token_changes_nothing() -> None:
    """On an accelerator nobody asks where documents start; every token masks instead."""
    leaves = inputs()
    results = []
    for asked in (True, False):
        docs = Documents.from_ids(IDS_BT)
        if not asked:
            everywhere = replace(sequences_of(docs, leaves[2]), entries=range(1, 23))
            docs._memo["sequences"] = everywhere
        y, final = m2rnn_chunked(*leaves, docs, chunk_size=5)
        assert final is not None
        results.append([y, final, *gradients([y, final], leaves)])
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("poison", [1.0, float("nan")], ids=["changed", "nan"])
def test_documents_are_isolated_exactly(poison: float) -> None:
    mixer, docs = layer(dtype=torch.float32), Documents.from_ids(IDS_BT)
    x = torch.randn(2, 23, 20, generator=torch.Generator().manual_seed(1))
    other = x.clone()
    other[0, 8:18] += poison  # the fourth document of row 0
    outside = torch.ones(2, 23, dtype=torch.bool)
    outside[0, 8:18] = False
    results = []
    for row in (x, other):
        row = row.requires_grad_()
        y = mixer(row, docs)
        dx = torch.autograd.grad(y, row, torch.ones_like(y))[0]
        results.append((y.detach(), dx))
    (y, dx), (y_other, dx_other) = results
    assert torch.equal(y[outside], y_other[outside])
    assert torch.equal(dx[outside], dx_other[outside])
    assert not torch.equal(y[0, 8:18], y_other[0, 8:18])


def test_packed_row_is_its_documents_one_by_one() -> None:
    mixer = layer()
    x = torch.randn(2, 23, 20, dtype=torch.double)
    packed = mixer(x, Documents.from_ids(IDS_BT))
    for b in range(2):
        for name in IDS_BT[b].unique():
            inside = IDS_BT[b] == name
            assert_close(packed[b, inside], mixer(x[b, inside][None])[0], FP64)


def test_step_is_forward() -> None:
    mixer = layer()
    x = torch.randn(2, 23, 20, dtype=torch.double)
    want, state = mixer(x), mixer.init_state(2, x.device, x.dtype)
    for t in range(23):
        y, state = mixer.step(x[:, t], state)
        assert_close(y, want[:, t], FP64)


def of_heads(mixer: M2RNN, part: int, parts: int) -> dict[str, Tensor]:
    """The weights that `part` of the heads needs: plain tensors, as a rank of several holds them.

    q is cut by its own heads; the one head of k that all share is whole everywhere.
    """
    whole = ("in_k.weight", "conv_k.weight")
    named = dict(mixer.named_parameters())
    cut = {n: p if n in whole else p.chunk(parts)[part] for n, p in named.items()}
    cut["output_projection.weight"] = named["output_projection.weight"].chunk(parts, 1)[part]
    return cut


def test_some_of_the_heads_give_their_share_of_the_output() -> None:
    """Whatever forward counts, it counts from its weights; gradients arrive in the whole ones.

    The norm over all heads isn't a sum over parts; without its division by the rms, it is.
    """
    mixer, docs = layer(), Documents.from_ids(IDS_BT)
    mixer.g_norm = nn.Identity()  # type: ignore[assignment]
    x = torch.randn(2, 23, 20, dtype=torch.double, requires_grad=True)
    leaves = [x, *mixer.parameters()]
    want = mixer(x, docs)
    got = sum(functional_call(mixer, of_heads(mixer, i, 2), (x, docs)) for i in range(2))
    assert isinstance(got, Tensor)
    assert_close(got, want, FP64)
    for a, b in zip(gradients([got], leaves), gradients([want], leaves), strict=True):
        assert_close(a, b, FP64)


def test_all_that_looks_back_goes_through_two_submodules(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the convolution and the recurrence out, no token's output depends on another token."""
    mixer = layer()
    monkeypatch.setattr(mixer.convolve, "forward", lambda x, weight, docs: x * weight[:, 0, -1])
    monkeypatch.setattr(mixer.scan, "forward", lambda i, *_: i.v_BTNV * i.f_BTN[..., None])
    x = torch.randn(2, 9, 20, dtype=torch.double, requires_grad=True)
    (dx,) = torch.autograd.grad(mixer(x)[:, 4].square().sum(), x)
    assert dx[:, 4].abs().min() > 0
    dx[:, 4] = 0
    assert dx.abs().max() == 0


def test_narrow_inputs_are_computed_wide() -> None:
    """bf16 inputs give what their fp32 copies give, rounded once at the end."""
    narrow = inputs(dtype=torch.bfloat16)
    same = [x.detach().float().requires_grad_() for x in narrow]
    y, _ = m2rnn_chunked(*narrow, chunk_size=5)
    y_wide, _ = m2rnn_chunked(*same, chunk_size=5)
    assert y.dtype == torch.bfloat16 and torch.equal(y, y_wide.bfloat16())
    dy = torch.randn_like(y)
    got = torch.autograd.grad(y, narrow, dy)
    want = torch.autograd.grad(y_wide, same, dy.float())
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a, b.bfloat16())


def test_autocast_leaves_the_recurrence_alone() -> None:
    leaves = inputs(dtype=torch.float32)
    want = m2rnn_chunked(*leaves, chunk_size=5)[0]
    want_step = m2rnn_sequential(*leaves)[0]
    with torch.autocast("cpu", torch.bfloat16):
        got = m2rnn_chunked(*leaves, chunk_size=5)[0]
        dgot = gradients([got], leaves)
        assert torch.equal(m2rnn_sequential(*leaves)[0], want_step)
    assert torch.equal(got, want)
    for a, b in zip(dgot, gradients([want], leaves), strict=True):
        assert torch.equal(a, b)


def test_contract_parameters_stay_wide() -> None:
    mixer = layer(dtype=torch.bfloat16)
    names = {name for name, _ in contract_parameters(mixer)}
    assert names == {"D", "state_weight", "decay_gate.A_log", "decay_gate.dt_bias", "g_norm.weight"}
    for name, parameter in mixer.named_parameters():
        assert parameter.dtype == (torch.float32 if name in names else torch.bfloat16), name
    assert all(p.dtype == torch.float64 for p in layer(dtype=torch.double).parameters())


@pytest.mark.parametrize("autocast", [False, True], ids=["narrow weights", "autocast"])
def test_half_precision_is_near(autocast: bool) -> None:
    check_half_precision(lambda dtype: layer(dtype=dtype), autocast)


def test_init_rules_cover_everything() -> None:
    mixer = layer(dtype=torch.float32)  # initialise fails on a tensor or a rule too many
    assert torch.equal(mixer.state_weight, torch.eye(3).expand(4, 3, 3))
    assert torch.equal(mixer.D, torch.ones(4, 3))
    rate = mixer.decay_gate.A_log.exp()
    assert rate.min() > 0 and rate.max() < 16
    dt = torch.nn.functional.softplus(mixer.decay_gate.dt_bias)
    assert dt.min() >= 0.99e-3 and dt.max() <= 0.1001
    for conv in (mixer.conv_q, mixer.conv_k, mixer.conv_v):
        assert 0.3 < conv.weight.abs().max() <= 0.5
    into = [mixer.in_q, mixer.in_k, mixer.in_v, mixer.in_forget, mixer.in_gate]
    std = mixer.output_projection.weight.std() / torch.cat([i.weight for i in into]).std()
    assert abs(std * (2 * CONFIG.depth) ** 0.5 - 1) < 0.2


def test_meta_device_and_default_heads() -> None:
    with torch.device("meta"):
        mixer = M2RNN(ModelConfig(dim=192, m2rnn=M2RNNConfig(key_dim=32, value_dim=16)))
        y = mixer(torch.empty(2, 9, 192))
    assert len(mixer.state_weight) == 192 // (32 + 16) == 4
    assert all(p.is_meta for p in mixer.parameters()) and y.shape == (2, 9, 192)
    assert len(M2RNN(ModelConfig(dim=16)).state_weight) == 1
