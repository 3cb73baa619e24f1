"""Blocks with Triton's kernels as compiled graphs, in Triton's interpreter: test_compile_triton.py.

TRITON_INTERPRET=1 python -m pytest tests/checkpointing/compiled_triton_cases.py

One process; fp32 at 1e-5 of the largest number; aot_eager, which is the compiler's choice of what
is kept without its code. Packed documents, and whole rows, by turns.

Legend: B rows, T tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters
from torch._ops import OpOverload
from torch.utils._pytree import tree_map

from checkpointing.compile import compile_blocks
from megacpp.config.schema import ModelConfig
from megacpp.kernels import triton_causal_conv, triton_gates
from megacpp.kernels.backend import Kernels, set_kernels
from megacpp.model.documents import Documents
from megacpp.model.hybrid import HybridLM
from megacpp.model.init import initialise
from tests.model.small import small
from tests.model.triton_interpreter import mend
from tests.synthetic import ragged_batch

mend()
B, T = 2, 12
TRITON = "mamba3", "m2rnn", "gated_delta_rule", "short_conv", "gates", "rms_norm", "experts"


def wide_enough(model: ModelConfig, pattern: str) -> ModelConfig:
    """Return the model with a state that `tl.dot` takes."""
    m2rnn = replace(model.m2rnn, key_dim=16, value_dim=16)
    return replace(model, pattern=pattern, depth=len(pattern), m2rnn=m2rnn)


MODELS = {
    "Mamba-3": wide_enough(small(), "MF"),
    "M2RNN": wide_enough(small(), "RF"),
    "delta rule": wide_enough(small(), "GF"),
    "experts": wide_enough(small(), "EF"),
}
SCANS = {
    "Mamba-3": {"mamba3_forward", "mamba3_backward", "steps_forward", "steps_backward"},
    "M2RNN": {"m2rnn_forward", "m2rnn_backward", "decay_backward", "causal_conv_backward"},
    "delta rule": {"delta_rule_forward", "delta_rule_backward", "gated_norm_backward"},
    "experts": {"experts_group", "experts_units", "experts_units_backward", "experts_sum"},
}


@pytest.fixture(autouse=True)
def few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    for kernels in (triton_causal_conv, triton_gates):
        monkeypatch.setattr(kernels, "PROGRAMS", 4)


@pytest.fixture(autouse=True)
def new_graphs() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def model_of(config: ModelConfig, compiled: bool) -> HybridLM:
    model = HybridLM(config)
    initialise(model, model.init_rules(), 0)
    torch.manual_seed(0)
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.2)
    set_kernels(model, Kernels(**dict.fromkeys(TRITON, "triton")))
    if compiled:
        compile_blocks(model, "aot_eager", 0.5)
    return model


@pytest.mark.parametrize("name", MODELS)
def test_gradients_are_those_of_the_blocks_as_written(name: str) -> None:
    plain, compiled = (model_of(MODELS[name], compiled) for compiled in (False, True))
    made = []
    for step in range(2):
        batch = ragged_batch(range(step * B, (step + 1) * B), T)
        for docs in (batch.docs, Documents.rows(B, T))[: 2 - step]:
            for model in (plain, compiled):
                model.zero_grad()
                model(batch.ids_BT, batch.labels_BT, docs).loss_sum.backward()
            for (path, p), q in zip(plain.named_parameters(), compiled.parameters(), strict=True):
                assert p.grad is not None and q.grad is not None, path
                assert (p.grad - q.grad).abs().max() <= 1e-5 * p.grad.abs().max(), path
            made.append(counters["stats"]["unique_graphs"])
    # Of packed rows and of whole ones, which experts don't read, beside that of the last layer.
    assert made[1:] == [2 if name == "experts" else 3] * 2
    assert not counters["graph_break"]


@pytest.mark.parametrize("name", SCANS)
def test_results_without_values_are_laid_out_alike(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check every operator of ours that graphs call, with the arguments that they call it with."""
    calls: dict[OpOverload, Any] = {}
    call = OpOverload.__call__

    def noted(operator: OpOverload, /, *given: Any, **named: Any) -> Any:
        if operator.namespace == "megacpp" and operator not in calls:
            copied = tree_map(lambda x: x.clone() if isinstance(x, Tensor) else x, given)
            calls[operator] = copied
        return call(operator, *given, **named)

    model, batch = model_of(MODELS[name], True), ragged_batch(range(B), T)
    with monkeypatch.context() as patched:
        patched.setattr(OpOverload, "__call__", noted)
        model(batch.ids_BT, batch.labels_BT, batch.docs).loss_sum.backward()
    names = {operator._schema.name.partition("::")[2] for operator in calls}
    assert SCANS[name] <= names
    for operator, given in calls.items():
        torch.library.opcheck(operator, given, test_utils=("test_schema", "test_faketensor"))
