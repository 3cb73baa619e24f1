"""FP8 blocks: selection of linear layers, and recomputation with the same scales.

torchao   the scale of a token's row is computed from that row, of a weight's row from that row,
          and weight gradients are computed wide (recipe `rowwise_with_gw_hp`). There is no state,
          so any recomputation gives the same bits, and nothing depends on the distribution of
          tokens over microbatches and ranks. Other recipes compute scales from all tokens of a
          microbatch on a rank. Routed experts multiply by megacpp/kernels/experts/fp8.py, weights
          that `tp` shards by checkpointing/fp8_shards.py.
te        Transformer Engine's current scaling: one scale per tensor, computed from it. (Delayed
          scaling has a history that would have to be saved.) A layer computes in FP8 only inside
          a context, so a recomputation outside it would compute in bf16:
          `TransformerEngineRecompute` enters it again. Any other recomputation is rejected.

Optional packages are imported inside functions. (Activation memory, not saved training state.)
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import nn

from megacpp.blocks.experts.module import Experts
from megacpp.config.checks.fp8 import (
    MULTIPLE,
    divides,
    fp8_experts,
    fp8_kinds,
    fp8_layers,
    fp8_rules,
    fp8_wanted,
    local_scales,
)
from megacpp.config.schema import Config, PrecisionConfig
from megacpp.kernels.experts.fp8 import Fp8Products
from megacpp.model.hybrid import HybridLM
from megacpp.model.precision import check_fp8_device
from megacpp.model.regions import Region
from megacpp.quiet import quiet_import

R = TypeVar("R")


@dataclass(frozen=True)
class Fp8Layers:
    """Selected layers of a model.

    Attributes:
        converted: names of linear layers that compute in FP8.
        experts: names of stacks of routed experts that compute in FP8.
        left: name to reason of layers that can't.
        emulated: values are rounded to FP8 and multiplied wide, without FP8 hardware.
    """

    converted: tuple[str, ...]
    experts: tuple[str, ...]
    left: dict[str, str]
    emulated: bool

    def words(self, precision: PrecisionConfig) -> list[str]:
        """Return lines for the header of a run."""
        how = "rounded to FP8 and multiplied wide" if self.emulated else "in FP8"
        experts = f" and {len(self.experts)} stacks of experts" if self.experts else ""
        where = f"of {fp8_kinds(precision)} blocks"
        if precision.fp8_ends:
            where += f" but the first and last {precision.fp8_ends} layers"
        by = precision.fp8 if precision.fp8 == "te" else f"torchao, {precision.fp8_recipe}"
        found = [f"{len(self.converted)} linear layers{experts} {where} {how} ({by})"]
        if local_scales(precision):
            found.append("FP8 scales are of a rank's microbatch: the loss depends on the mesh")
        if precision.fp8_all_gather:
            tried = "" if self.emulated else " (compared over gloo, not yet over NCCL)"
            found.append(f"weights of linear layers travel in FP8{tried}")
        if precision.fp8 == "te":
            found.append("Transformer Engine was only ever a stand-in in tests of this")
        reasons = sorted(set(self.left.values()))
        return found + [f"{len(self.left)} stay wide: {'; '.join(reasons)}"] * bool(reasons)


def check_fp8(config: Config) -> None:
    """Check `precision.fp8` (megacpp/config/checks/fp8.py).

    Raises:
        ConfigError: the first broken rule.
    """
    for error in fp8_rules(config):
        raise error


def to_fp8(model: HybridLM, config: Config, device: torch.device) -> Fp8Layers:
    """Convert layers to FP8 in place, after heads are sharded and before FSDP2.

    Parameters stay the same objects under the same names.

    Args:
        model: this rank's part of the model.
        config: configuration of the run.
        device: device on which the model will run; it may still be on the meta device.
    """
    precision = config.precision
    if precision.fp8 == "off":
        return Fp8Layers((), (), {}, False)
    check_fp8(config)
    check_fp8_device(config, device)
    converted, experts, left = _choose(model, config)
    emulated = precision.fp8 == "torchao" and device.type != "cuda"
    if precision.fp8 == "te":
        _by_transformer_engine(model, converted)
        return Fp8Layers(converted, (), left, False)
    _by_torchao(model, set(converted), precision, emulated)
    for name in experts:
        stack = model.get_submodule(name)
        assert isinstance(stack, Experts)
        stack.fp8 = Fp8Products(emulated, precision.fp8_recipe == "rowwise_with_gw_hp")
    return Fp8Layers(converted, experts, left, emulated)


class TransformerEngineRecompute:
    """Recomputation of a block that Transformer Engine computes in FP8.

    The whole block is recomputed by Transformer Engine's `checkpoint`; its regions aren't. The
    repeated function enters the FP8 context itself: not every version of `checkpoint` with
    `use_reentrant=False` does so in a backward. It is a function rather than a method, because
    `checkpoint` sets attributes on it.
    """

    def __call__(self, region: Region, fn: Callable[..., R], *args: object) -> R:
        """Run a whole block under Transformer Engine's `checkpoint`, and other regions directly."""
        if region != "block" or not torch.is_grad_enabled():
            return fn(*args)
        from transformer_engine.pytorch import checkpoint  # pyright: ignore[reportMissingImports]

        def in_fp8(*args: object) -> R:
            with fp8_context():
                return fn(*args)

        return checkpoint(in_fp8, *args, use_reentrant=False)

    def keep(self, fn: Callable[..., R], *args: object) -> R:
        """Call a function whose result is a decision; whole blocks needn't remember it."""
        return fn(*args)


def fp8_context() -> AbstractContextManager[Any]:
    """Return Transformer Engine's FP8 context: e4m3 forward, e5m2 backward."""
    from transformer_engine.common.recipe import (  # pyright: ignore[reportMissingImports]
        Float8CurrentScaling,
        Format,
    )
    from transformer_engine.pytorch import autocast  # pyright: ignore[reportMissingImports]

    return autocast(enabled=True, recipe=Float8CurrentScaling(fp8_format=Format.HYBRID))


def _choose(
    model: HybridLM, config: Config
) -> tuple[tuple[str, ...], tuple[str, ...], dict[str, str]]:
    """Return linear layers and experts that can be FP8, and the others with the reason."""
    layers, converted, experts, left = fp8_layers(model.config), [], [], {}
    chosen = set(fp8_wanted(config))
    for key in model.blocks:
        letter, mixer = model.letters[int(key)], f"blocks.{key}.mixer"
        if int(key) not in chosen:
            continue
        for leaf in layers[letter]:
            linear = model.get_submodule(f"{mixer}.{leaf}")
            assert isinstance(linear, nn.Linear), leaf
            if divides(linear.out_features, linear.in_features):
                converted.append(f"{mixer}.{leaf}")
            else:
                left[f"{mixer}.{leaf}"] = _odd(linear.out_features, linear.in_features)
        if letter == "E":
            sides = model.config.moe.hidden_dim, model.config.dim
            if fp8_experts(model.config):
                experts.append(f"{mixer}.experts")
            else:
                left[f"{mixer}.experts"] = _odd(*sides)
    return tuple(converted), tuple(experts), left


def _odd(rows: int, columns: int) -> str:
    return f"{rows} x {columns} are not both multiples of {MULTIPLE}"


def _by_torchao(
    model: HybridLM, names: set[str], precision: PrecisionConfig, emulated: bool
) -> None:
    from dataclasses import replace

    from torch.distributed.tensor import DTensor

    with quiet_import():
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    from checkpointing.fp8_shards import shard_in_fp8

    recipe = Float8LinearConfig.from_recipe_name(precision.fp8_recipe)
    gather = precision.fp8_all_gather
    config = replace(recipe, emulate=emulated, enable_fsdp_float8_all_gather=gather)
    layers = {name: model.get_submodule(name) for name in names}
    sharded = {n: m for n, m in layers.items() if isinstance(m._parameters["weight"], DTensor)}
    for linear in sharded.values():
        assert isinstance(linear, nn.Linear)
        shard_in_fp8(linear, config)
    whole = names - set(sharded)
    convert_to_float8_training(model, module_filter_fn=lambda _, name: name in whole, config=config)


def _by_transformer_engine(model: HybridLM, names: tuple[str, ...]) -> None:
    from transformer_engine.pytorch import Linear  # pyright: ignore[reportMissingImports]

    for name in names:
        old = model.get_submodule(name)
        assert isinstance(old, nn.Linear) and old.bias is None
        new = Linear(
            old.in_features,
            old.out_features,
            bias=False,
            params_dtype=old.weight.dtype,
            device="meta",
        )
        new.weight = old.weight
        model.set_submodule(name, new)
    forward = model.forward

    def in_fp8(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():  # evaluation has any number of rows, and is computed wide
            return forward(*args, **kwargs)
        with fp8_context():
            return forward(*args, **kwargs)

    model.forward = in_fp8
