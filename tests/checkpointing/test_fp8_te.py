"""FP8 by Transformer Engine: a stand-in that says what was called, and the real thing on a GPU."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from checkpointing.apply import ActivationCheckpointing, set_recompute
from checkpointing.fp8 import to_fp8
from checkpointing.recompute import Replays
from megacpp.config.checks.fp8 import fp8_mesh_rules
from megacpp.config.schema import KEEP, Config, TrainConfig
from megacpp.errors import ConfigError
from megacpp.model.hybrid import HybridLM
from megacpp.model.init import initialise
from megacpp.model.regions import layer_regions
from tests.checkpointing.fp8_cases import (
    CPU,
    IDS_BT,
    broken_keys,
    built,
    changed,
    config_with,
    gradients_of,
    model_config,
    same,
    te_config,
)


class CurrentLinear(nn.Module):
    """Stand-in for Transformer Engine's linear layer: FP8 inside its context, else wide."""

    state: dict[str, Any]

    def __init__(
        self, columns: int, rows: int, bias: bool, params_dtype: torch.dtype, device: str
    ) -> None:
        super().__init__()
        assert not bias and device == "meta"
        empty = torch.empty(rows, columns, dtype=params_dtype, device=device)
        self.weight = nn.Parameter(empty)

    def forward(self, x: Tensor) -> Tensor:
        if not self.state["fp8"]:
            return F.linear(x, self.weight)
        step = float(x.detach().abs().max()) / 64
        rounded = x + ((x / step).round() * step - x).detach()
        return F.linear(rounded, self.weight)


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Return a `transformer_engine` whose calls are listed."""
    calls: list[Any] = []
    state = {"fp8": False}

    @contextmanager
    def autocast(enabled: bool, recipe: Any) -> Iterator[None]:
        calls.append(("autocast", enabled, recipe))
        before, state["fp8"] = state["fp8"], enabled
        try:
            yield
        finally:
            state["fp8"] = before

    def checkpoint(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Its own enters no context again, and leaves marks on what it is given."""
        assert state["fp8"], "the recomputation must begin inside of the autocast"
        fn.fsdp_wrapped, fn.fsdp_group = False, None  # type: ignore[attr-defined]
        calls.append(("checkpoint", fn, args, kwargs))
        return torch_checkpoint(fn, *args, use_reentrant=kwargs["use_reentrant"])

    def module(name: str, **content: Any) -> None:
        made = ModuleType(name)
        made.__spec__ = ModuleSpec(name, None)
        vars(made).update(content)
        monkeypatch.setitem(sys.modules, name, made)

    linear = type("Linear", (CurrentLinear,), {"state": state})
    module("transformer_engine")
    module("transformer_engine.common")
    module(
        "transformer_engine.common.recipe",
        Float8CurrentScaling=lambda fp8_format: ("current", fp8_format),
        Format=type("Format", (), {"HYBRID": "hybrid"}),
    )
    module(
        "transformer_engine.pytorch",
        Linear=linear,
        checkpoint=checkpoint,
        autocast=autocast,
    )
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: (9, 0))
    return calls


FULL = {"ablock": "full", "fblock": "full"}


def kept(config: Config) -> HybridLM:
    """Return the activation checkpointing that a run makes on a GPU."""
    model = HybridLM(config.model)
    ActivationCheckpointing(config, torch.device("cuda"))(model)
    initialise(model, model.init_rules(), 0)
    return model


def kept_wrongly(config: Config) -> HybridLM:
    """FP8 blocks with the recomputation of all other blocks, which the rules refuse."""
    model, again = HybridLM(config.model), dataclasses.replace(KEEP, **FULL)  # type: ignore[arg-type]
    layers = to_fp8(model, config, torch.device("cuda"))
    assert len(layers.converted) == 14 and not layers.emulated
    set_recompute(model, layer_regions(again, config.model), again, Replays())
    initialise(model, model.init_rules(), 0)
    return model


def test_transformer_engine_recomputes_its_blocks(stand_in: list[Any]) -> None:
    plain, again = kept(te_config()), kept(te_config(**FULL))
    wrong, context = kept_wrongly(te_config()), ("autocast", True, ("current", "hybrid"))
    for step in range(2):
        stand_in.clear()
        expected = gradients_of(plain)
        assert stand_in == [context]
        stand_in.clear()
        assert same(gradients_of(again), expected)
        repeated = [call for call in stand_in if call[0] == "checkpoint"]
        assert len(repeated) == 3 and all(c == context for c in stand_in if c not in repeated)
        assert len(stand_in) == 1 + 3 * 3, "the forward, and of each block: it, first and again"
        for _, _, args, kwargs in repeated:
            assert len(args) == 2 and args[0].shape == (2, 16, 32)
            assert kwargs == {"use_reentrant": False}
        assert not same(gradients_of(wrong), expected), f"step {step}: other numbers"


def test_transformer_engine_evaluates_wide(stand_in: list[Any]) -> None:
    model = kept(te_config(**FULL))
    wide, _ = built(config_with("off"))
    with torch.no_grad():
        assert torch.equal(model(IDS_BT, IDS_BT).loss_sum, wide(IDS_BT, IDS_BT).loss_sum)
    assert stand_in == []


TE_RULES: dict[str, tuple[Callable[[], Config], list[str]]] = {
    "fine": (lambda: te_config(ablock="full", fblock="full", norms=True), []),
    "stock checkpoint": (
        lambda: te_config(ablock="full", fp8_wrapper="torchao"),
        ["recompute.fp8_wrapper"],
    ),
    "stock checkpoint of other blocks": (
        lambda: te_config(ablock="selective", fp8_wrapper="torchao"),
        [],
    ),
    "mlp": (lambda: te_config(mlp=True), ["recompute.mlp"]),
    "mlp of shared experts": (
        lambda: changed(te_config(mlp=True), model={"pattern": "AE", "depth": 4}),
        [],
    ),
    "compiled": (
        lambda: changed(te_config(), train={"compile": "inductor"}),
        ["train.compile"],
    ),
    "mesh": (
        lambda: changed(te_config(), mesh={"tp": 2, "pp": 2, "cp": 2, "ep": 2}),
        ["mesh.tp", "mesh.pp", "mesh.cp", "mesh.ep"],
    ),
    "data mesh": (lambda: changed(te_config(), mesh={"dp_replicate": 2, "dp_shard": 2}), []),
    "cpu": (lambda: changed(te_config(), train={"device": "cpu"}), ["precision.fp8"]),
    "fp32": (lambda: changed(te_config(), precision={"dtype": "fp32"}), ["precision.fp8"]),
    "tokens": (
        lambda: changed(te_config(), train={"device_batch_size": 1}, data={"seq_len": 24}),
        ["precision.fp8"],
    ),
}


@pytest.mark.parametrize("name", TE_RULES)
def test_rules_of_transformer_engine(name: str, stand_in: list[Any]) -> None:
    make, keys = TE_RULES[name]
    assert broken_keys(make()) == keys


def test_stock_recomputation_is_refused_with_the_reason(
    stand_in: list[Any],
) -> None:
    config = te_config(fblock="full", fp8_wrapper="torchao")
    with pytest.raises(
        ConfigError, match=r"^recompute.fp8_wrapper=torchao: recompute.fblock=full runs FP8 .*wrong"
    ):
        to_fp8(HybridLM(config.model), config, CPU)


def test_an_old_transformer_engine_is_refused(
    stand_in: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(sys.modules["transformer_engine.pytorch"], "autocast")
    with pytest.raises(
        ConfigError, match=r"needs a Transformer Engine that has .*Fix: pip install"
    ):
        to_fp8(HybridLM(te_config().model), te_config(), torch.device("cuda"))


def test_one_scale_of_a_microbatch_is_agreed_to() -> None:
    config = changed(te_config(), train={"grad_accum": 2}, mesh={"dp_shard": 1})
    (error,) = fp8_mesh_rules(config, 1)
    assert str(error).startswith("precision.fp8=te: takes a scale") and "fp8 torchao" in str(error)
    agreed = changed(config, precision={"fp8_local_scales": True})
    assert not list(fp8_mesh_rules(agreed, 1))
    assert not list(fp8_mesh_rules(changed(config, train={"grad_accum": 1}), 1))


# ---- on a GPU -----------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("fp8", ["torchao", "te"])
def test_on_a_gpu(fp8: str) -> None:
    """Bitwise with and without recomputation, in bf16 otherwise; attention's sums are unordered."""
    if fp8 == "te":
        pytest.importorskip("transformer_engine.pytorch")
    device = torch.device("cuda", torch.cuda.current_device())
    if torch.cuda.get_device_capability(device) < (8, 9):
        pytest.skip("this GPU has no FP8")
    found = []
    for fblock in ("none", "full"):
        config = config_with(fp8, model_config("FFFF"), fblock=fblock)
        config = dataclasses.replace(config, train=TrainConfig(device="cuda"))
        model = HybridLM(config.model)
        ActivationCheckpointing(config, device)(model)
        initialise(model, model.init_rules(), 0)
        model.to(device)
        ids_BT = IDS_BT.to(device)
        for _ in range(3):
            with torch.autocast("cuda", torch.bfloat16):
                loss = model(ids_BT, ids_BT).loss_sum
            loss.backward()
        found.append([p.grad for p in model.blocks.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_doctor_tries_what_is_installed_in_parts(
    stand_in: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from megacpp.cli.doctor import _optional

    def found() -> Any:
        (finding,) = (f for f in _optional() if f.name == "transformer_engine")
        return finding

    assert found().ok and "--precision.fp8 te" in found().detail
    monkeypatch.setitem(sys.modules, "transformer_engine.pytorch", None)
    assert found().ok is None and "installed, but" in found().detail
