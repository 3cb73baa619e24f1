"""FP8 by torchao: which layers, the same bits when they run again and on any data mesh, refusals.

Emulated: rounded to FP8 and multiplied in fp32.
"""

from __future__ import annotations

import dataclasses
import functools
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from checkpointing.fp8 import check_fp8, to_fp8
from megacpp.config.checks.fp8 import fp8_layers
from megacpp.config.schema import Config, MeshConfig
from megacpp.errors import ConfigError
from megacpp.model.hybrid import HybridLM
from megacpp.model.precision import check_fp8_device
from parallel.boundary import AccumulationBoundary
from parallel.build import build_model
from tests.checkpointing.fp8_cases import (
    CPU,
    CPU_RUN,
    broken_keys,
    built,
    changed,
    config_with,
    gradients_of,
    model_config,
    same,
    te_config,
)
from tests.differences import largest, relative
from tests.model.small import small, variants
from tests.parallel.parity import Run, Slices, batches_of, config_of, error, gradients, world_of
from tests.ranks import run_ranks


def test_which_layers() -> None:
    config = changed(config_with(model=model_config("AMERF")), precision={"fp8_layers": "AF"})
    model = HybridLM(config.model)
    before = dict(model.named_parameters())
    layers = to_fp8(model, config, CPU)
    names = {f"blocks.0.mixer.{n}" for n in ("wq", "wk", "wv", "wo")}
    names |= {f"blocks.4.mixer.{n}" for n in ("w1", "w2", "w3")}
    assert set(layers.converted) == names and not layers.left and layers.emulated
    assert {n for n, m in model.named_modules() if type(m).__name__ == "Float8Linear"} == names
    after = dict(model.named_parameters())
    assert list(before) == list(after) and all(before[n] is after[n] for n in before)
    assert list(HybridLM(config.model).state_dict()) == list(model.state_dict())


def test_layers_whose_dims_do_not_divide_stay() -> None:
    config = config_with(model=model_config("AF", hidden=24))
    layers = to_fp8(HybridLM(config.model), config, CPU)
    assert all(name.startswith("blocks.0.") for name in layers.converted)
    assert layers.left["blocks.1.mixer.w2"] == "32 x 24 are not both multiples of 16"
    assert len(layers.left) == 3
    off = to_fp8(HybridLM(config.model), config_with("off"), CPU)
    assert not off.converted and not off.left


@pytest.mark.parametrize("name", variants())
def test_sizes_are_those_of_the_model(name: str) -> None:
    """Compare the sizes that the rules compute without a model with a model's."""
    config = variants()[name]
    with torch.device("meta"):
        model = HybridLM(config)
    for letter, layers in fp8_layers(config).items():
        if letter not in model.letters:
            continue
        mixer = model.get_submodule(f"blocks.{model.letters.index(letter)}.mixer")
        found = {n: tuple(m.weight.shape) for n, m in mixer.named_modules() if n in layers}  # type: ignore[union-attr]
        assert found == layers


@pytest.mark.parametrize(
    "policy",
    [
        {"ablock": "full", "fblock": "full"},
        {"ablock": "selective", "mlp": True, "norms": True},
        {"fblock": "full", "norms": True},
    ],
    ids=str,
)
def test_recomputation_finds_the_same_scales(policy: dict[str, Any]) -> None:
    """Bitwise: the scales of torchao come from what is multiplied, and that is the same again."""
    plain, _ = built(config_with())
    wide, _ = built(config_with("off"))
    again, ac = built(config_with(**policy))
    expected = gradients_of(plain)
    assert same(gradients_of(again), expected) and sum(ac.replays.counts.values()) >= 3
    assert not same(gradients_of(wide), expected), "FP8 rounds"


def test_torch_checkpoint_finds_the_same_scales() -> None:
    plain, again = (built(config_with())[0] for _ in range(2))
    for block in again.blocks.values():
        run = functools.partial(checkpoint, block.forward)
        block.forward = functools.partial(run, use_reentrant=False)
    assert same(gradients_of(again), gradients_of(plain))


@pytest.mark.parametrize(("recipe", "alike"), [("rowwise_with_gw_hp", True), ("tensorwise", False)])
def test_how_tokens_are_split_changes_nothing(recipe: str, alike: bool) -> None:
    """Rows have their own scales, so two microbatches are one; one scale of a batch isn't so."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    generator = torch.Generator().manual_seed(4)
    found: list[Tensor] = []
    x_TD, dy_TF = (torch.randn(64, 32, generator=generator) for _ in range(2))
    x_TD[40:] *= 7
    for parts in (1, 4):
        torch.manual_seed(0)
        config = dataclasses.replace(Float8LinearConfig.from_recipe_name(recipe), emulate=True)
        linear = convert_to_float8_training(nn.Linear(32, 32, bias=False), config=config)
        x = x_TD.clone().requires_grad_()
        for rows, grad in zip(x.chunk(parts), dy_TF.chunk(parts), strict=True):
            linear(rows).backward(grad)
        weight = linear.weight
        assert isinstance(weight, Tensor) and weight.grad is not None and x.grad is not None
        found += [weight.grad, x.grad]
    assert all(t.isfinite().all() for t in found)
    worst = largest(relative(a, b) for a, b in zip(found[2:], found[:2], strict=True))
    assert worst <= 1e-5 if alike else worst > 1e-3


def test_sharded_over_two_ranks() -> None:
    """FSDP2 gathers wide weights and FP8 scales them there: one rank with two microbatches."""

    def body(rank: int, world_size: int, run: Run) -> Slices:
        base = config_of(run)
        precision = dataclasses.replace(base.precision, fp8="torchao", fp8_ends=0)
        config = dataclasses.replace(base, precision=precision, train=CPU_RUN)
        world = world_of(rank, run)
        model = build_model(config, world, lambda m: to_fp8(m, config, CPU))
        kinds = [type(m).__mro__ for m in model.modules()]
        assert sum(any(k.__name__ == "Float8Linear" for k in mro) for mro in kinds) == 4
        AccumulationBoundary(model, world, config).accumulate(batches_of(0, world, run))
        return gradients(model)

    sharded = Run("A", MeshConfig(dp_shard=2), accum=1, dtype="fp32")
    alone = dataclasses.replace(sharded, mesh=MeshConfig(dp_shard=1), accum=2)
    expected = body(0, 1, alone)
    for found in run_ranks(functools.partial(body, run=sharded), 2):
        assert error(found, expected)[0] <= 1e-5


TORCHAO_RULES: dict[str, tuple[Config, list[str]]] = {
    "fine": (config_with(ablock="full", fblock="full", mlp=True), []),
    "off": (changed(config_with("off"), mesh={"tp": 2}), []),
    "fp64": (changed(config_with(), precision={"dtype": "fp64"}), ["precision.fp8"]),
    "fp32": (changed(config_with(), precision={"dtype": "fp32"}), []),
    "fp32 on a GPU": (
        changed(config_with(), precision={"dtype": "fp32"}, train={"device": "cuda"}),
        ["precision.fp8"],
    ),
    "nothing to convert": (config_with(model=small("MER", dim=32)), ["precision.fp8"]),
    "nothing that divides": (config_with(model=model_config("F", 24)), ["precision.fp8"]),
    "tensor parallel": (changed(config_with(), mesh={"tp": 2}), ["mesh.tp"]),
    "other axes": (changed(config_with(), mesh={"pp": 2, "cp": 2, "dp_shard": 2}), []),
    "compression": (changed(config_with(), recompute={"compress": 0.5}), ["recompute.compress"]),
    "wrapper": (
        config_with(ablock="full", fp8_wrapper="te_checkpoint"),
        ["recompute.fp8_wrapper"],
    ),
    "wrapper of mlp": (
        config_with(mlp=True, fp8_wrapper="te_checkpoint"),
        ["recompute.fp8_wrapper"],
    ),
    "no FP8 layer runs again": (
        config_with(ablock="selective", norms=True, fp8_wrapper="te_checkpoint"),
        [],
    ),
    "the last layer never runs again": (
        config_with(model=model_config("MF"), fblock="full", fp8_wrapper="te_checkpoint"),
        [],
    ),
    "compiled": (
        changed(
            config_with(ablock="full", fp8_wrapper="te_checkpoint"),
            train={"compile": "inductor"},
        ),
        [],
    ),
}


@pytest.mark.parametrize("name", TORCHAO_RULES)
def test_rules_of_torchao(name: str) -> None:
    config, keys = TORCHAO_RULES[name]
    assert broken_keys(config) == keys
    if keys:
        with pytest.raises(ConfigError, match="Fix: "):
            check_fp8(config)
    else:
        check_fp8(config)


def test_missing_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    for fp8, package in (("te", "transformer-engine"), ("torchao", "torchao")):
        with pytest.raises(ConfigError, match=f"needs {package}.*Fix: pip install '?{package}"):
            check_fp8(te_config() if fp8 == "te" else config_with())


def test_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    check_fp8_device(config_with(), CPU)
    check_fp8_device(config_with("off"), torch.device("cuda"))
    with pytest.raises(ConfigError, match="runs on a GPU alone"):
        check_fp8_device(config_with("te"), CPU)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: (8, 0))
    with pytest.raises(ConfigError, match="needs a GPU of compute capability"):
        check_fp8_device(config_with(), torch.device("cuda"))
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: (9, 0))
    check_fp8_device(config_with(), torch.device("cuda"))


def test_nothing_of_torchao_is_printed() -> None:
    """Its extensions for other versions of torch don't load, and none of them is used."""
    command = "speed moe_small --world 8 --gpu H100 --precision.fp8 torchao --model.depth 8"
    done = subprocess.run(
        [sys.executable, "-m", "megacpp", *command.split()], capture_output=True, text=True
    )
    assert done.returncode == 0 and "rounding to FP8" in done.stdout
    assert done.stderr == ""
