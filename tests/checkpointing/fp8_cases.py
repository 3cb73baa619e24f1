"""Small models with FP8 layers, for tests of them."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor, nn

from checkpointing.apply import ActivationCheckpointing
from megacpp.blocks.dense.config import MLPConfig
from megacpp.config.checks.fp8 import fp8_rules
from megacpp.config.schema import (
    KEEP,
    Config,
    ModelConfig,
    PrecisionConfig,
    TrainConfig,
)
from megacpp.model.hybrid import HybridLM
from megacpp.model.init import initialise
from tests.model.small import small

CPU = torch.device("cpu")
IDS_BT = torch.randint(50, (2, 16), generator=torch.Generator().manual_seed(3))
CPU_RUN = TrainConfig(device="cpu")


def model_config(pattern: str = "AFAF", hidden: int = 48) -> ModelConfig:
    return small(pattern, dim=32, mlp=MLPConfig(hidden_dim=hidden), init_std=0.1)


def config_with(fp8: str = "torchao", model: ModelConfig | None = None, **policy: Any) -> Config:
    return Config(
        model=model or model_config(),
        train=CPU_RUN if fp8 == "torchao" else TrainConfig(),
        precision=PrecisionConfig(fp8=fp8, fp8_ends=0),  # type: ignore[arg-type]
        recompute=dataclasses.replace(KEEP, **policy),
    )


def built(config: Config) -> tuple[HybridLM, ActivationCheckpointing]:
    model, ac = HybridLM(config.model), ActivationCheckpointing(config)
    ac(model)
    initialise(model, model.init_rules(), 0)
    return model, ac


def gradients_of(model: nn.Module) -> dict[str, Tensor]:
    loss = model(IDS_BT, IDS_BT).loss_sum
    loss.backward()
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None} | {"loss": loss}


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[n], b[n]) for n in a)


def te_config(**policy: Any) -> Config:
    return config_with("te", **policy)


def broken_keys(config: Config) -> list[str]:
    return [str(e).split("=")[0] for e in fp8_rules(config)]


def changed(config: Config, **parts: dict[str, Any]) -> Config:
    replace = dataclasses.replace
    return replace(config, **{k: replace(getattr(config, k), **v) for k, v in parts.items()})
