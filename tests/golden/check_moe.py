"""Golden: routing and mixture of experts of DeepSeek-V3, losses and bias update of Megatron-LM."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from megacpp.blocks.experts.config import MoEConfig
from megacpp.blocks.experts.module import MixtureOfExperts
from megacpp.blocks.experts.router import Router, Routing
from megacpp.config.schema import ModelConfig
from megacpp.kernels.backend import Kernels, set_kernels
from megacpp.model.documents import Documents
from megacpp.model.init import initialise
from tests.golden.harness import GoldenFile

KNOWN = ("moe_*.safetensors",)


def check(golden: GoldenFile) -> None:
    if "experts.w1" in golden:
        check_layer(golden)
    elif "weights_post_softmax" in golden:
        check_softmax(golden)
    else:
        check_sigmoid(golden)


def sigmoid_config(golden: GoldenFile, weight: str) -> MoEConfig:
    c = golden.config
    return MoEConfig(
        num_experts=golden.input(weight).shape[0],
        top_k=c["topk"],
        num_groups=c.get("n_groups", 1),
        top_k_groups=c.get("topk_groups", 1),
        route_scale=c.get("route_scale", 1.0),
        bias_update_rate=c.get("bias_update_rate", 1e-3),
    )


def build_router(golden: GoldenFile, moe: MoEConfig, x_TD: Tensor, weight: str) -> Router:
    router = Router(ModelConfig(dim=x_TD.shape[1], moe=moe)).to(golden.dtype)
    initialise(router, router.init_rules(), seed=0)
    with torch.no_grad():
        router.weight.copy_(golden.input(weight))
    return router


def check_sigmoid(golden: GoldenFile) -> None:
    x_TD = golden.input("x", grad=True)
    router = build_router(golden, sigmoid_config(golden, "gate_weight"), x_TD, "gate_weight")
    router.expert_bias.copy_(golden.input("expert_bias"))
    golden.expect("scores", router.route(x_TD).scores_TE)
    weights_TK, indices_TK, _ = router(x_TD[None])
    golden.expect("tokens_per_expert", router.tokens_per_expert.clone())
    weights_TK, indices_TK = ascending(weights_TK, indices_TK)
    golden.expect("indices", indices_TK)
    golden.expect("weights", weights_TK)
    weights_TK.backward(golden.input("d_weights"))
    golden.expect("grad_x", x_TD.grad)
    golden.expect("grad_gate_weight", router.weight.grad)
    router.update_bias()
    golden.expect("expert_bias_next", router.expert_bias)
    assert not router.tokens_per_expert.any()


def check_softmax(golden: GoldenFile) -> None:
    c, x_TD = golden.config, golden.input("x")
    moe = MoEConfig(
        num_experts=golden.input("gate_weight").shape[0],
        top_k=c["topk"],
        score="softmax",
        balance_loss=c["aux_coeff"],
        sequence_loss=c["aux_coeff"],
        z_loss=c["z_coeff"],
    )
    for order in ("post", "pre"):
        moe = replace(moe, softmax_order=order)  # type: ignore[arg-type]
        router = build_router(golden, moe, x_TD, "gate_weight")
        routing = router.route(x_TD)
        golden.expect("logits", routing.logits_TE)
        weights_TK, indices_TK = ascending(routing.weights_TK, routing.indices_TK)
        golden.expect("indices", indices_TK)
        golden.expect(f"weights_{order}_softmax", weights_TK)
        (grad,) = torch.autograd.grad(
            weights_TK, routing.logits_TE, golden.input("d_weights"), retain_graph=True
        )
        golden.expect(f"grad_logits_{order}", grad)
    check_losses(golden, router, routing)


def check_losses(golden: GoldenFile, router: Router, routing: Routing) -> None:
    """Ours are sums over the tokens; the stored ones are means."""
    tokens = len(routing.logits_TE)
    router.count(routing.indices_TK)
    golden.expect("tokens_per_expert", router.tokens_per_expert)
    docs = Documents.rows(golden.config["B"], golden.config["S"], golden.device)
    losses = router.auxiliary_losses(routing, docs)
    for ours, theirs in (("balance", "aux"), ("z", "z"), ("sequence", "seq_aux")):
        loss = losses[ours] / tokens
        golden.expect(f"{theirs}_loss", loss)
        (grad,) = torch.autograd.grad(loss, routing.logits_TE, retain_graph=True)
        golden.expect(f"grad_logits_{theirs}", grad)


def check_layer(golden: GoldenFile, backend: str = "torch") -> None:
    x_TD = golden.input("x", grad=True)
    hidden, shared = golden.input("experts.w1").shape[1], golden.config["n_shared"]
    moe = replace(
        sigmoid_config(golden, "gate.weight"),
        hidden_dim=hidden,
        num_shared=shared,
        shared_hidden_dim=golden.input("shared.w1").shape[0] // shared,
    )
    layer = MixtureOfExperts(ModelConfig(dim=x_TD.shape[1], moe=moe)).to(golden.dtype)
    initialise(layer, layer.init_rules(), seed=0)
    set_kernels(layer, Kernels(experts=backend))
    theirs = {}
    for name, parameter in layer.named_parameters():
        theirs[name] = name.replace("router.", "gate.")
        if name.startswith("shared."):
            theirs[name] = name.removesuffix(".weight")
        parameter.data.copy_(golden.input(theirs[name]))
    layer.router.expert_bias.copy_(golden.input("gate.bias"))
    y_TD = layer(x_TD[None])[0]
    golden.expect("y", y_TD)
    golden.expect("indices", layer.router.route(x_TD).indices_TK.sort(dim=1).values)
    y_TD.backward(golden.input("d_y"))
    golden.expect("grad.x", x_TD.grad)
    for name, parameter in layer.named_parameters():
        golden.expect(f"grad.{theirs[name]}", parameter.grad)


def ascending(weights_TK: Tensor, indices_TK: Tensor) -> tuple[Tensor, Tensor]:
    """Both, with each token's experts in ascending order."""
    indices_TK, order_TK = indices_TK.sort(dim=1)
    return weights_TK.gather(1, order_TK), indices_TK
