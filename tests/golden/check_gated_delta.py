"""Gated DeltaNet against transformers' Qwen3-Next: rule, packed rows, segments, layer, decoding."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor, nn

from megacpp.blocks.gated_deltanet.config import GatedDeltaNetConfig
from megacpp.blocks.gated_deltanet.descriptor import GATED_DELTANET
from megacpp.blocks.gated_deltanet.module import DeltaInputs, GatedDeltaNet
from megacpp.config.schema import ModelConfig
from megacpp.kernels.causal_conv import causal_conv
from megacpp.kernels.gated_delta_rule.chunks import gated_delta_rule
from megacpp.kernels.gated_delta_rule.reference import gated_delta_sequential
from megacpp.kernels.gated_delta_rule.segments import fold, summarize
from megacpp.model.documents import Documents
from megacpp.model.scan import HeadTensors
from megacpp.model.upstream import from_upstream, to_upstream
from tests.differences import largest
from tests.golden.harness import GoldenFile

KNOWN = ("gdn_*.safetensors",)
RULE = ("q", "k", "v", "g", "beta")

Operation = Callable[..., tuple[Tensor, Tensor]]


def check(golden: GoldenFile) -> None:
    if "x" in golden:
        (check_decoding if "conv_state_final" in golden else check_layer)(golden)
    elif "qkv" in golden:
        for operation in operations(golden, "g"):
            check_packed(golden, operation)
    else:
        for operation in operations(golden, "g"):
            check_rule(golden, operation)
        for ranks in golden.config.get("cuts", ()):
            check_segments(golden, ranks)


def operations(golden: GoldenFile, name: str) -> list[Operation]:
    """The definition, and chunks: one token, sizes that leave a rest, the usual size."""
    num_tokens = golden.input(name).shape[1]
    ragged = next(size for size in range(7, num_tokens + 8) if num_tokens % size)
    sizes = (1, ragged, 64)
    return [gated_delta_sequential, *(partial(gated_delta_rule, chunk_size=c) for c in sizes)]


def check_rule(golden: GoldenFile, operation: Operation) -> None:
    """Outputs, final states and every gradient of the rule alone."""
    check_settings(golden)
    leaves = {name: golden.input(name, grad=True) for name in RULE}
    initial = golden.input("initial_state", grad=True) if "initial_state" in golden else None
    o, state = operation(*leaves.values(), golden.documents(), initial)
    golden.expect("out", o)
    outputs, cotangents = [o], [golden.input("d_out").to(o.dtype)]
    if "final_state" in golden:
        golden.expect("final_state", state)
    if "d_final_state" in golden:
        outputs, cotangents = [o, state], [*cotangents, golden.input("d_final_state")]
    torch.autograd.backward(outputs, cotangents)
    for name, leaf in leaves.items():
        golden.expect(f"grad_{name}", leaf.grad)
    if initial is not None:
        golden.expect("grad_initial_state", initial.grad)


def check_packed(golden: GoldenFile, operation: Operation) -> None:
    """Convolution and rule over packed documents; states of each document on its own."""
    check_settings(golden)
    docs, c = golden.documents(), golden.config
    qkv, weight = golden.input("qkv", grad=True), golden.input("conv_weight", grad=True)
    g, beta = golden.input("g", grad=True), golden.input("beta", grad=True)
    convolved = causal_conv(qkv, weight, docs)
    golden.expect("conv_out", convolved)
    keys, values = c["num_k_heads"] * c["head_k_dim"], c["num_v_heads"] * c["head_v_dim"]
    q, k, v = convolved.split([keys, keys, values], -1)
    q, k = (x.unflatten(-1, (-1, c["head_k_dim"])) for x in (q, k))
    inputs = q, k, v.unflatten(-1, (-1, c["head_v_dim"])), g, beta
    o, last = operation(*inputs, docs)
    golden.expect("out", o)
    bounds = golden.input("cu_seqlens").tolist()
    parts = [slice(a, b) for a, b in pairwise(bounds)]
    states = [operation(*(x[:, part] for x in inputs))[1] for part in parts[:-1]]
    final = torch.cat([*states, last])  # that of the packed row is its last document's
    golden.expect("final_state", final)
    torch.autograd.backward([o, final], [golden.input("d_out"), golden.input("d_final_state")])
    for name, leaf in {"qkv": qkv, "conv_weight": weight, "g": g, "beta": beta}.items():
        golden.expect(f"grad_{name}", leaf.grad)


def check_segments(golden: GoldenFile, ranks: int) -> None:
    """Summaries of a row in parts, the states that they fold into, and both adjoints."""
    q, k, v, g, beta = (golden.input(name) for name in RULE)
    docs, T = golden.documents(), g.shape[1]
    docs = Documents.rows(1, T) if docs is None else docs
    spans = [slice(w * T // ranks, (w + 1) * T // ranks) for w in range(ranks)]
    parts = [docs.take(torch.arange(T)[span]) for span in spans]
    given = [tuple(x[:, span] for x in (k, v, g, beta)) for span in spans]
    summaries = [summarize(*x, p, chunk_size=7) for x, p in zip(given, parts, strict=True)]
    starts = torch.stack([p.starts_BT.any(1) for p in parts])
    carries = golden.input(f"carries_w{ranks}").bool()
    assert torch.equal(carries[1:], ~starts[1:])  # the row's own first token doesn't count
    through = torch.stack([s.through_SNKK for s in summaries])
    golden.expect(f"transition_w{ranks}", torch.where(carries[..., None, None, None], through, 0))
    golden.expect(f"local_state_w{ranks}", torch.stack([s.added_SNKV for s in summaries]))
    golden.expect(f"local_log_decay_w{ranks}", torch.stack([x[2].sum(1) for x in given]))

    states = [s.S_BNKV.requires_grad_() for s in fold(summaries, carries)]
    golden.expect(f"abs_state_w{ranks}", torch.stack(states[1:]))
    enters = [w == 0 or bool(part.positions_BT[0, 0] > 0) for w, part in enumerate(parts)]
    entering = [s if e else 0.0 * s for e, s in zip(enters, states, strict=False)]
    golden.expect(f"entering_state_w{ranks}", torch.stack(entering))

    d_out, behind = golden.input("d_out"), torch.zeros_like(states[0])
    own, folded = [], []
    for w in reversed(range(ranks)):
        inputs = [x[:, spans[w]] for x in (q, k, v, g, beta)]
        o, _ = gated_delta_rule(*inputs, parts[w], entering[w], 7)
        own += torch.autograd.grad(o, states[w], d_out[:, spans[w]])
        after = fold([summaries[w]], carries[w : w + 1], states[w])[1].S_BNKV
        behind = own[-1] + torch.autograd.grad(after, states[w], behind)[0]
        folded.append(behind)
    golden.expect(f"grad_local_w{ranks}", torch.stack(own[::-1]))
    golden.expect(f"grad_abs_prev_w{ranks}", torch.stack(folded[::-1]))


def check_settings(golden: GoldenFile) -> None:
    """Check what is fixed here: norms of q and k, their scale, the layout of states."""
    c = golden.config
    assert c["use_qk_l2norm"] and c["l2norm_eps"] == 1e-6 and c["scale"] == "head_k_dim**-0.5"
    assert c["state_layout"] == "[k, v]"


class Recorded(nn.Module):
    """A scan that leaves what went in and out."""

    def __init__(self, scan: nn.Module) -> None:
        super().__init__()
        self.scan = scan

    def forward(self, inputs: DeltaInputs, weights: HeadTensors, docs: Documents | None) -> Tensor:
        self.inputs, self.outputs = inputs, self.scan(inputs, weights, docs)
        return self.outputs


def layer_of(golden: GoldenFile, chunk_size: int, **settings: bool) -> GatedDeltaNet:
    """The stored layer; every stored setting is used."""
    c = dict(golden.config)
    for name, known in {
        "in_proj_order": "per key head: q|k|v|z and b|a",
        "conv_order": "q|k|v",
        "scale": "head_k_dim**-0.5",
        "l2norm_eps": 1e-6,
    }.items():
        assert c.pop(name) == known
    c.pop("prefill", None)
    assert c.pop("state_layout", "[k, v]") == "[k, v]"
    dim, norm_eps = c.pop("hidden_size"), c.pop("norm_eps")
    delta = GatedDeltaNetConfig(
        num_key_heads=c.pop("num_k_heads"),
        num_value_heads=c.pop("num_v_heads"),
        key_dim=c.pop("head_k_dim"),
        value_dim=c.pop("head_v_dim"),
        conv_kernel=c.pop("conv_kernel"),
        chunk_size=chunk_size,
        **settings,
    )
    assert not c, f"unknown settings: {sorted(c)}"
    config = ModelConfig(dim=dim, norm_eps=norm_eps, gated_deltanet=delta)
    layer = GatedDeltaNet(config).to(golden.dtype)
    stored = {n.removeprefix("param."): golden.input(n) for n in golden.names("param.")}
    gated = replace(config, gated_deltanet=replace(delta, gate=True))
    ours = from_upstream(GATED_DELTANET, stored, gated)
    layer.load_state_dict({name: ours[name] for name in layer.state_dict()})
    return layer


def check_layer(golden: GoldenFile) -> None:
    for chunk_size in (7, 64):
        layer = layer_of(golden, chunk_size)
        x, y = run(golden, layer)
        golden.expect("y", y)
        golden.expect("grad.x", x.grad)
        grads = {n: p.grad for n, p in layer.named_parameters() if p.grad is not None}
        for name, grad in to_upstream(GATED_DELTANET, grads, layer.config).items():
            golden.expect(f"grad.{name}", grad)
        if "core_out" in golden:
            check_inside(golden, chunk_size)


def check_inside(golden: GoldenFile, chunk_size: int) -> None:
    """Results between the projections, and both options."""
    layer = layer_of(golden, chunk_size)
    layer.scan = recorded = Recorded(layer.scan)
    run(golden, layer)
    golden.expect("g", recorded.inputs.g_BTN)
    golden.expect("beta", recorded.inputs.beta_BTN)
    golden.expect("core_out", recorded.outputs)
    golden.expect("final_state", gated_delta_rule(*recorded.inputs.in_order())[1])

    layer = layer_of(golden, chunk_size, allow_neg_eigval=True)
    x, y = run(golden, layer)
    golden.expect("y_neg", y)
    golden.expect("grad_neg.x", x.grad, rounding=moved_by_rounding(golden, "grad_neg.x"))
    grads = {n: p.grad for n, p in layer.named_parameters() if p.grad is not None}
    grads = to_upstream(GATED_DELTANET, grads, layer.config)
    golden.expect("grad_neg.in_proj_ba.weight", grads["in_proj_ba.weight"])
    golden.expect("y_nogate", run(golden, layer_of(golden, chunk_size, gate=False))[1])


def moved_by_rounding(golden: GoldenFile, name: str) -> float:
    """How far the fp64 gradient of x moves where projections are off by their terms' rounding.

    A product over D terms in fp32 is off by about 2**-24 sum |x w|, in an order that depends on the
    CPU. One token's queries are small sums of large terms, and their norm magnifies the error.
    """
    exact, most = GoldenFile(golden.path, torch.float64), 0.0
    signs = torch.Generator().manual_seed(0)

    def off(linear: nn.Module, given: tuple[Tensor], y: Tensor) -> Tensor:
        terms = given[0].detach().abs() @ linear.weight.detach().abs().T
        return y + terms * 2.0**-24 * (torch.randint(2, y.shape, generator=signs) * 2 - 1)

    with torch.device("cpu"):  # as the file and the signs, whatever is checked
        for _ in range(8):
            layer = layer_of(exact, 64, allow_neg_eigval=True)
            for linear in (layer.in_q, layer.in_k, layer.in_v):
                linear.register_forward_hook(off)
            moved = run(exact, layer)[0].grad - exact.input(name)
            most = largest([most, moved.abs().max().item()])
    return most


def run(golden: GoldenFile, layer: GatedDeltaNet) -> tuple[Tensor, Tensor]:
    """Input with its gradient, and output."""
    x = golden.input("x", grad=True)
    y = layer(x, golden.documents())
    y.backward(golden.input("d_y"))
    return x, y


def check_decoding(golden: GoldenFile) -> None:
    """Steps from the first token on; states after the prefill and after the last token."""
    layer, x = layer_of(golden, 7), golden.input("x")
    golden.expect("y", layer(x))
    state, outputs = layer.init_state(len(x), x.device, x.dtype), []
    for t in range(x.shape[1]):
        y, state = layer.step(x[:, t], state)
        outputs.append(y)
        suffix = {golden.config["prefill"]: "prefill", x.shape[1]: "final"}.get(t + 1)
        if suffix:
            golden.expect(f"recurrent_state_{suffix}", state.scan)
            oldest = convolved_inputs(layer, x[:, t - state.taps_BCJ.shape[-1]])
            taps = torch.cat([oldest[..., None], state.taps_BCJ], -1)  # upstream keeps one more
            golden.expect(f"conv_state_{suffix}", taps)
    golden.expect("y", torch.stack(outputs, 1))


def convolved_inputs(layer: GatedDeltaNet, x_BD: Tensor) -> Tensor:
    return torch.cat([layer.in_q(x_BD), layer.in_k(x_BD), layer.in_v(x_BD)], -1)
