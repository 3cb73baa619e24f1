"""Trainer of a small model on any device, one process or a mesh of one rank.

Legend: B rows, T tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from torch import Tensor

from checkpointing.apply import ActivationCheckpointing
from megacpp.config.schema import (
    KEEP,
    CheckpointingPolicy,
    Config,
    DataConfig,
    MeshConfig,
    ModelConfig,
    OptimConfig,
    PrecisionConfig,
    RunConfig,
    TrainConfig,
)
from megacpp.data.batches import Batch
from megacpp.data.loader import Loader
from megacpp.run.health import Health
from megacpp.state.training import TrainingState
from optim.build import build_optimizer
from optim.clip import clip_gradients
from parallel.boundary import AccumulationBoundary
from parallel.build import build_model
from parallel.mesh import World
from parallel.step_sums import StepSums
from tests.model.small import small
from tests.synthetic import ragged_batch

ROWS, T, ACCUM = 2, 16, 2


@dataclass(frozen=True)
class Settings:
    """Settings of a run of the small model; sizes are multiples of 16 bytes in bf16."""

    pattern: str = "AEMRF"
    dtype: Literal["bf16", "fp32", "fp64"] = "bf16"
    optimizer: Literal["adamw", "muon_adamw"] = "muon_adamw"
    recompute: CheckpointingPolicy = KEEP

    @property
    def config(self) -> Config:
        return Config(
            preset="small",
            model=wide_enough(small(self.pattern)),
            run=RunConfig(steps=8, seed=1),
            data=DataConfig(seq_len=T),
            train=TrainConfig(
                device_batch_size=ROWS, grad_accum=ACCUM, tokens_per_step=ROWS * T * ACCUM
            ),
            mesh=MeshConfig(dp_shard=1),
            optim=OptimConfig(name=self.optimizer),
            precision=PrecisionConfig(dtype=self.dtype),
            recompute=self.recompute,
        )


def wide_enough(model: ModelConfig) -> ModelConfig:
    """Sizes that the grouped kernels of a GPU take in bf16: rows of 16 bytes."""
    moe = replace(model.moe, hidden_dim=16, shared_hidden_dim=16)
    return replace(model, dim=32, moe=moe)


class Source:
    """Ragged rows by number, as a corpus gives them."""

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size

    def changes_at(self, step: int, /) -> bool:
        return False

    def train_batch(self, rows: list[int], /) -> Batch:
        return ragged_batch(rows, T, self.vocab_size)


class Trainer:
    """Step of train.py, and its checkpoints in a folder."""

    def __init__(self, config: Config, world: World, folder: Path | None = None) -> None:
        self.config, self.world = config, world
        self.ac = ActivationCheckpointing(config, world.device)
        self.model = build_model(config, world, self.ac)
        self.optimizer = build_optimizer(self.model, config, world.holders)
        self.boundary = AccumulationBoundary(self.model, world, config)
        source = Source(config.model.vocab_size)
        self.loader = Loader(source, 0, 1, ROWS)  # type: ignore[arg-type]
        if folder is not None:
            counters = {"health": Health(), "loss_scale": self.boundary.loss_scale}
            parts = (self.model, self.optimizer, config, "rows", self.loader, counters)
            self.state = TrainingState(folder, *parts)  # type: ignore[arg-type]

    def forward_backward(self, batches: list[Batch], step: int = 0) -> tuple[StepSums, Tensor]:
        """Everything of a step before somebody looks at a number: sums, and the gradients' norm."""
        sums = self.boundary.accumulate(batches, step)
        norm = clip_gradients(
            self.model.parameters(),
            self.config.optim.clip_norm,
            copies=self.boundary.copies,
            along=sums.along,
        )
        return sums, norm

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def step(self) -> float:
        """Run one step; return its loss."""
        sums, norm = self.forward_backward(list(self.loader.take(ACCUM)))
        status = self.boundary.check_step(sums, norm)
        assert status.healthy, status
        self.update()
        self.boundary.finish_step(status)
        if hasattr(self, "state"):
            self.state.advance(True, good=True)
        return status.loss

    def weights(self) -> dict[str, Tensor]:
        """Copies, on the host."""
        return {n: _local(p).detach().cpu().clone() for n, p in self.model.named_parameters()}


def _local(p: Tensor) -> Tensor:
    return p.to_local() if hasattr(p, "to_local") else p  # type: ignore[attr-defined]
