"""A rank's whole step, traced on the trainer's own model without values or peers."""

from __future__ import annotations

from dataclasses import replace

from checkpointing.apply import Keeper
from checkpointing.recorder import Recorder
from megacpp.cli.measure import _short
from megacpp.config import Config
from megacpp.memory.stream import Stream
from optim.build import build_optimizer
from optim.clip import clip_gradients
from parallel.fake import (
    FakeBoundary,
    as_trained,
    fake_batch,
    fake_tensors,
    fake_world,
    planned_model,
)

MICROBATCHES = 2  # the first leaves its gradients, the last reduces them: others are as the first


def trace_step(config: Config, size: int, rank: int = 0) -> Stream:
    """Every allocation of one optimizer step of rank `rank` of `size`, all layers run."""
    config = as_trained(config)
    with fake_world(config, size, rank) as world:
        keeper = Keeper(config)
        model = planned_model(config, world, keeper)
        with fake_tensors(memory=True), Recorder(model) as recorder:
            model.to_empty(device=world.device)
            model.train()
            optimizer = build_optimizer(model, config, world.holders)
            boundary = FakeBoundary(model, world, config)

            def step(config: Config, microbatches: int) -> None:
                with recorder.stage("batch"):
                    batches = [fake_batch(config)] * microbatches
                sums = boundary.accumulate(batches)
                recorder.note_gradients()
                with recorder.stage("clip"):
                    clip_gradients(
                        model,
                        config.optim.clip_norm,
                        copies=boundary.copies,
                        along=sums.along,
                        loss_scale=boundary.loss_scale.value,
                    )
                with recorder.stage("optimizer"):
                    optimizer.step()
                optimizer.zero_grad()
                boundary.conclude()

            if world.parallel:
                step(_short(config), 1)
            recorder.begin(optimizer)
            step(config, min(MICROBATCHES, config.train.grad_accum))
        return recorder.stream()
