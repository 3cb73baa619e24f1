"""The Mamba-3 layer: decoding, documents, precision, initial values."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import functional_call

from checkpointing.compile import Compiler
from megacpp.blocks.mamba3.config import Mamba3Config
from megacpp.blocks.mamba3.module import Mamba3, Mamba3Scan
from megacpp.config.schema import ModelConfig
from megacpp.kernels.mamba3.inputs import HeadWeights, ScanInputs
from megacpp.kernels.recurrent_gates import decay_rate
from megacpp.model.documents import Documents
from megacpp.model.fp32 import contract_parameters
from megacpp.model.init import initialise
from tests.model.mamba3_cases import VARIANTS, packed, random_layer


def random_input(tokens: int, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(7)
    x_BTD = torch.randn(2, tokens, 12, generator=generator, dtype=torch.float64)
    return x_BTD.to(dtype).requires_grad_()


@pytest.mark.parametrize("variant", VARIANTS)
def test_steps_equal_forward_over_packed_documents(variant: str) -> None:
    layer, x_BTD = random_layer(variant), random_input(19)
    ids_T = torch.tensor([0] * 7 + [1] + [2] * 11)
    want = layer(x_BTD, Documents.from_ids(ids_T.expand(2, 19)))
    ys = []
    for t in range(19):
        if t == 0 or ids_T[t] != ids_T[t - 1]:
            state = layer.init_state(2, x_BTD.device, x_BTD.dtype)
        y_BD, state = layer.step(x_BTD[:, t], state)
        ys.append(y_BD)
    got = torch.stack(ys, 1)
    assert (got - want).abs().max() <= 1e-12 * want.abs().max()


@pytest.mark.parametrize("variant", VARIANTS)
def test_no_documents_means_whole_rows(variant: str) -> None:
    layer, x_BTD = random_layer(variant), random_input(13)
    assert torch.equal(layer(x_BTD), layer(x_BTD, Documents.rows(2, 13)))


@pytest.mark.parametrize("variant", VARIANTS)
def test_documents_are_isolated_bit_for_bit(variant: str) -> None:
    docs = packed(2, 29, seed=2)
    document = docs.ids_BT == docs.ids_BT[0, 14]
    document[1] = False
    runs = []
    for change in (0.0, 3.0):
        layer, x_BTD = random_layer(variant, dtype=torch.float32), random_input(29, torch.float32)
        with torch.no_grad():
            x_BTD[document] += change
        y_BTD = layer(x_BTD, docs)
        y_BTD.square().sum().backward()
        runs.append((y_BTD.detach(), x_BTD.grad))
    for before, after in zip(*runs, strict=True):
        assert before is not None and after is not None
        assert torch.equal(before[~document], after[~document])
        assert not torch.equal(before[document], after[document])


@pytest.mark.parametrize("variant", VARIANTS)
def test_packed_documents_equal_documents_alone(variant: str) -> None:
    layer, x_BTD, docs = random_layer(variant), random_input(23), packed(2, 23, seed=4)
    together = layer(x_BTD, docs).flatten(0, 1)
    for start, end in docs.cu_seqlens.unfold(0, 2, 1).tolist():
        alone = layer(x_BTD.flatten(0, 1)[None, start:end])[0]
        assert (together[start:end] - alone).abs().max() <= 1e-12 * together.abs().max()


def of_heads(layer: Mamba3, part: int, parts: int) -> dict[str, Tensor]:
    """The weights that `part` of the heads needs: plain tensors, as a rank of several holds them.

    B and C are cut by group where there are groups to cut, else every part has all of them.
    """
    G, cut = layer.mamba.ngroups, {}
    for name, p in layer.named_parameters():
        whole = name in ("in_angles.weight", "B_norm.weight", "C_norm.weight")
        if name.startswith(("in_B", "in_C", "conv_B", "conv_C")):
            by_group = p.unflatten(0, (layer.mamba.mimo_rank, G, -1))
            cut[name] = (by_group if G == 1 else by_group.chunk(parts, 1)[part]).flatten(0, 2)
        elif name == "out_proj.weight":
            cut[name] = p.chunk(parts, 1)[part]
        else:
            cut[name] = p if whole else p.chunk(parts)[part]
    return cut


@pytest.mark.parametrize("variant", VARIANTS)
def test_some_of_the_heads_give_their_share_of_the_output(variant: str) -> None:
    """Whatever forward counts, it counts from its weights; gradients arrive in the whole ones."""
    layer, x_BTD, docs = random_layer(variant), random_input(19), packed(2, 19, seed=6)
    leaves = [x_BTD, *layer.parameters()]
    want = layer(x_BTD, docs)
    got = sum(functional_call(layer, of_heads(layer, i, 2), (x_BTD, docs)) for i in range(2))
    assert isinstance(got, Tensor)
    assert (got - want).abs().max() <= 1e-12 * want.abs().max()
    grads = [torch.autograd.grad(y.square().sum(), leaves) for y in (got, want)]
    for a, b in zip(*grads, strict=True):
        assert (a - b).abs().max() <= 1e-12 * b.abs().max()


def test_all_that_looks_back_goes_through_two_submodules(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the convolution and the scan taken out, no token's output depends on another token."""
    layer, x_BTD = random_layer("mimo_groups_conv_outnorm"), random_input(9)
    monkeypatch.setattr(layer.convolve, "forward", lambda x, weight, docs: x * weight[:, 0, -1])
    monkeypatch.setattr(layer.scan, "forward", lambda inputs, *_: inputs.V * inputs.Z)
    (dx_BTD,) = torch.autograd.grad(layer(x_BTD)[:, 4].square().sum(), x_BTD)
    assert dx_BTD[:, 4].abs().min() > 0
    dx_BTD[:, 4] = 0
    assert dx_BTD.abs().max() == 0


def spy_on_scan(layer: Mamba3, monkeypatch: pytest.MonkeyPatch) -> dict[str, torch.dtype]:
    """dtypes that reach the scan, filled by the next forward."""
    seen: dict[str, torch.dtype] = {}
    scan = Mamba3Scan.forward

    def spy(inputs: ScanInputs, weights: HeadWeights, docs: Documents) -> Tensor:
        for name, x in {**vars(inputs), **vars(weights)}.items():
            if isinstance(x, Tensor):
                seen[name] = x.dtype
        assert isinstance(layer.scan, Mamba3Scan)
        return scan(layer.scan, inputs, weights, docs)

    monkeypatch.setattr(layer.scan, "forward", spy)
    return seen


def exact_and_least_error(low: Mamba3, x_BTD: Tensor, variant: str) -> tuple[Tensor, float]:
    """fp64 output with the values of `low`, and its error once all projections are rounded."""
    layer, docs = random_layer(variant), packed(2, 19)
    layer.load_state_dict({name: t.double() for name, t in low.state_dict().items()})
    exact = layer(x_BTD.double(), docs)
    project = layer._project

    def rounded(x_BTD: Tensor) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, ...]]:
        channels, rest = project(x_BTD)
        v, bc, *rest = (y.bfloat16().double() for y in (*channels, *rest))
        return (v, bc), tuple(rest)

    layer._project = rounded  # type: ignore[method-assign]
    return exact, (layer(x_BTD.double(), docs) - exact).norm().item()


@pytest.mark.parametrize("mode", ["bf16 weights", "autocast"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_bf16_compute_keeps_the_contract_in_fp32(
    variant: str, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer, low = random_layer(variant, dtype=torch.float32).bfloat16(), mode == "bf16 weights"
    x_BTD = random_input(19, torch.bfloat16).detach()
    exact, least_error = exact_and_least_error(layer, x_BTD, variant)
    if not low:
        layer, x_BTD = layer.float(), x_BTD.float()
    seen = spy_on_scan(layer, monkeypatch)
    x_BTD.requires_grad_()
    with torch.autocast("cpu", torch.bfloat16, enabled=not low):
        y_BTD = layer(x_BTD, packed(2, 19))
        y_BTD.float().square().sum().backward()  # inside, where a product would be cast again
    operands = {"Q", "K", "V", "Z", "Trap", "Angles"}
    assert seen["V"] == torch.bfloat16
    assert {n: d for n, d in seen.items() if n not in operands and d != torch.float32} == {}
    assert all(p.dtype == torch.float32 for _, p in contract_parameters(layer))
    assert y_BTD.dtype == x_BTD.dtype
    # Operands have 8 bits: what is done to them may cost little more than having them at all.
    assert (y_BTD.double() - exact).norm() <= 3 * least_error
    assert x_BTD.grad is not None and x_BTD.grad.isfinite().all()


def test_contract_holds_what_the_recurrence_needs_and_no_matrix() -> None:
    layer = random_layer("mimo_groups_conv_outnorm")
    held = {name for name, _ in contract_parameters(layer)}
    assert {n for n, _ in layer.named_parameters()} - held == {
        *(f"in_{part}.weight" for part in ("z", "x", "B", "C", "dt", "A", "trap", "angles")),
        *(f"conv_{part}.weight" for part in "xBC"),
        "out_proj.weight",
    }


def test_heavy_tail_and_softplus_decay_rates() -> None:
    a = torch.tensor([-1e6, -1.0, 0.0, 1.0, 5.0], dtype=torch.float64, requires_grad=True)
    heavy = decay_rate(a, 1e-4, softplus=False)
    torch.testing.assert_close(heavy, -torch.tensor([1e-4, 0.5, 1.0, 2.0, 6.0]).double())
    (grad,) = torch.autograd.grad(heavy.sum(), a)
    torch.testing.assert_close(grad, -torch.tensor([0.0, 0.25, 1.0, 1.0, 1.0]).double())
    soft = decay_rate(a, 1e-4, softplus=True)
    torch.testing.assert_close(soft, -F.softplus(a).clamp(min=1e-4))


@pytest.mark.parametrize("variant", VARIANTS)
def test_init_rules_cover_every_tensor(variant: str) -> None:
    layer = random_layer(variant)
    tensors = [n for n, _ in layer.named_parameters()] + [n for n, _ in layer.named_buffers()]
    assert sorted(layer.init_rules()) == sorted(tensors)


def test_initial_values() -> None:
    config = ModelConfig(
        dim=64, depth=8, mamba3=Mamba3Config(headdim=8, mimo_rank=4, conv_kernel=4)
    )
    layer = Mamba3(config)
    initialise(layer, layer.init_rules(), seed=0)
    dt = F.softplus(layer.dt_bias)
    assert dt.min() >= 0.999e-3 and dt.max() <= 0.1001 and dt.max() > 5 * dt.min()
    for wide in (layer.in_z, layer.in_x, layer.in_B, layer.in_C):
        assert wide.weight.std().item() == pytest.approx(0.02, rel=0.03)
    for thin in (layer.in_dt, layer.in_A, layer.in_trap, layer.in_angles):
        assert thin.weight.std().item() == pytest.approx(0.02, rel=0.15)
    assert layer.out_proj.weight.std().item() == pytest.approx(0.02 / 4, rel=0.03)
    for parameter, value in (
        (layer.D, 1.0),
        (layer.B_bias, 1.0),
        (layer.C_bias, 1.0),
        (layer.mimo_x, 0.25),
        (layer.mimo_o, 0.25),
        (layer.mimo_z, 1.0),
    ):
        assert torch.all(parameter == value)
    for conv in (layer.conv_x, layer.conv_B, layer.conv_C):
        assert 0.45 < conv.weight.abs().max() <= 0.5


def test_builds_on_meta_without_values() -> None:
    with torch.device("meta"):
        layer = Mamba3(ModelConfig(mamba3=Mamba3Config(mimo_rank=4, conv_kernel=4, out_norm=True)))
    assert all(p.is_meta for p in layer.parameters())


@pytest.mark.slow
def test_compiles_as_one_graph() -> None:
    layer, docs = random_layer("mimo_groups_conv_outnorm"), packed(2, 19)
    graph, runs = Compiler("aot_eager", budget=1.0).compile(Mamba3.forward), []
    for run in (layer, functools.partial(graph, layer)):
        x_BTD = random_input(19)
        y_BTD = run(x_BTD, docs)
        y_BTD.square().sum().backward()
        runs.append((y_BTD, x_BTD.grad))
    for eager, compiled in zip(*runs, strict=True):
        torch.testing.assert_close(compiled, eager, rtol=1e-12, atol=1e-12)
