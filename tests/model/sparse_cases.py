"""Small sparse models in fp64, and what a backward through them gives."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor

from megacpp.config.schema import KEEP, CheckpointingPolicy, Config, ModelConfig, PrecisionConfig
from megacpp.model.auxiliary import AuxiliarySource
from megacpp.model.hybrid import HybridLM
from parallel.build import build_model
from parallel.mesh import World
from tests.parallel.parity import models
from tests.synthetic import ragged_batch

ONE = World(0, 1, torch.device("cpu"))
TOKENS, SCALE = 24, 0.01  # of a row; 1 / tokens of a step, or so
MODELS = ("sparse_mla", "sparse_mla_direct", "sparse_stages", "sparse_gqa")


def sparse_model(name: str, **settings: Any) -> ModelConfig:
    """A model of MODELS with other settings of `model.attention.sparse`."""
    model = models()[name.removesuffix("_direct")]
    a = replace(model.attention, sparse=replace(model.attention.sparse, **settings))
    return replace(model, attention=replace(a, q_lora_rank=0) if "direct" in name else a)


def build(
    model: ModelConfig,
    recompute: CheckpointingPolicy | None = None,
    prepare: Callable[[Config], Callable[[HybridLM], object]] | None = None,
    dtype: Literal["fp32", "fp64"] = "fp64",
) -> HybridLM:
    """As a run on one process has it, with auxiliary losses that count."""
    config = Config(
        model=model,
        recompute=recompute or KEEP,
        precision=PrecisionConfig(dtype),
    )
    built = build_model(config, ONE, prepare(config) if prepare else None)
    for source in built.modules():
        if isinstance(source, AuxiliarySource):
            source.aux_scale.fill_(SCALE)
    return built


def train(model: HybridLM, rows: range = range(4)) -> dict[str, Tensor]:
    """Loss, gradients by name and what was recorded, of a forward and a backward."""
    batch = ragged_batch(list(rows), TOKENS, model.config.vocab_size)
    loss = model(batch.ids_BT, batch.labels_BT, batch.docs).loss_sum
    if loss.requires_grad:  # in a warm-up through the indexers' losses alone
        (loss * SCALE).backward()
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    recorded = {n: b.clone() for n, b in model.named_buffers() if n.endswith("loss_sums")}
    return {"loss": loss.detach(), **recorded, **found}
