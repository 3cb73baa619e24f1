"""M2RNN against lm-engine: the recurrence with both gradient clips, packed documents, the layer."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from megacpp.blocks.m2rnn.config import M2RNNConfig
from megacpp.blocks.m2rnn.descriptor import M2RNN_KIND
from megacpp.blocks.m2rnn.module import M2RNN
from megacpp.config.schema import ModelConfig
from megacpp.kernels.backend import Kernels, set_kernels
from megacpp.kernels.m2rnn.backends import m2rnn_chunked
from megacpp.kernels.m2rnn.chunks import StateClip
from megacpp.kernels.m2rnn.reference import m2rnn_sequential
from megacpp.model.upstream import from_upstream, to_upstream
from tests.golden.harness import GoldenFile

KNOWN = ("m2rnn_*.safetensors",)
SKIP = ("*_cp*.safetensors",)

Operation = Callable[..., tuple[Tensor, Tensor | None]]


def check(golden: GoldenFile) -> None:
    if "x" in golden:
        check_layer(golden)
    else:
        check_operation(golden)


def check_operation(golden: GoldenFile) -> None:
    num_tokens = golden.input("q").shape[1]
    ragged = next(size for size in range(5, num_tokens + 6) if num_tokens % size)
    chunked = [partial(m2rnn_chunked, chunk_size=size) for size in (1, ragged, num_tokens)]
    for operation in (m2rnn_sequential, *chunked):
        check_clips(golden, operation)


def check_clips(golden: GoldenFile, operation: Operation) -> None:
    """Every meaning of the clip that is stored."""
    bound = clip_bound(golden)
    check_gradients(golden, operation, StateClip(bound, "total") if bound else None, "")
    if golden.names("grad_W_tritonclip"):
        assert bound is not None
        check_gradients(golden, operation, StateClip(bound, "carried"), "_tritonclip")


def check_gradients(
    golden: GoldenFile, operation: Operation, clip: StateClip | None, suffix: str
) -> None:
    """Outputs, final states and every gradient under one meaning of the clip."""
    inputs = {name: golden.input(name, grad=True) for name in ("q", "k", "v", "f", "W")}
    initial = golden.input("h0", grad=True) if "h0" in golden else None
    y, final = operation(*inputs.values(), golden.documents(), initial, clip)
    assert final is not None
    golden.expect("y", y)
    golden.expect("hT", final)
    torch.autograd.backward([y, final], [golden.input("d_y"), golden.input("d_hT")])
    for name, x in inputs.items():
        golden.expect(f"grad_{name}{suffix}", x.grad)
    if initial is not None:
        golden.expect(f"grad_h0{suffix}", initial.grad)


def clip_bound(golden: GoldenFile) -> float | None:
    """The bound on the state gradient that the stored call was made with, None if it had none."""
    found = re.search(r"gradient_clipping=([0-9.eE+-]+)", golden.metadata.get("function", ""))
    return float(found[1]) if found else golden.config.get("gradient_clipping")


def check_layer(golden: GoldenFile, chunk_sizes: tuple[int, ...] = (5, 64), **kernels: str) -> None:
    for chunk_size in chunk_sizes:
        config = model_config(golden.config, chunk_size)
        layer = M2RNN(config).to(golden.dtype)
        set_kernels(layer, Kernels(**kernels))
        stored = {n.removeprefix("param."): golden.input(n) for n in golden.names("param.")}
        layer.load_state_dict(from_upstream(M2RNN_KIND, stored, config))
        x = golden.input("x", grad=True)
        y = layer(x, golden.documents())
        y.backward(golden.input("d_y"))
        golden.expect("y", y)
        golden.expect("grad.x", x.grad)
        grads = {name: p.grad for name, p in layer.named_parameters() if p.grad is not None}
        for name, grad in to_upstream(M2RNN_KIND, grads, config).items():
            golden.expect(f"grad.{name}", grad)


def model_config(stored: dict, chunk_size: int) -> ModelConfig:
    """Our configuration from the stored one; every stored key is used."""
    stored = dict(stored)
    dim, norm_eps = stored.pop("D"), stored.pop("norm_eps")
    m2rnn = M2RNNConfig(
        num_heads=stored.pop("heads"),
        num_q_heads=stored.pop("num_q_heads"),
        num_k_heads=stored.pop("num_k_heads"),
        key_dim=stored.pop("k_head_dim"),
        value_dim=stored.pop("v_head_dim"),
        conv_kernel=stored.pop("kernel_size"),
        gradient_clip=stored.pop("gradient_clipping"),
        clip_mode="total",  # what the upstream torch backend does
        chunk_size=chunk_size,
    )
    assert not stored, f"unknown settings: {sorted(stored)}"
    return ModelConfig(dim=dim, norm_eps=norm_eps, m2rnn=m2rnn)
