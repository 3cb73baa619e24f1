"""Warm-up of indexers and the training after it as one run: changes that a resume allows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from megacpp.config.schema import Config, OptimConfig, PrecisionConfig
from megacpp.errors import CheckpointError
from megacpp.model.hybrid import HybridLM
from megacpp.run.health import Health
from megacpp.state.training import TrainingState
from optim.build import build_optimizer
from optim.muon_adamw import MuonAdamW
from tests.model.sparse_cases import build, sparse_model, train


def made(folder: Path, **sparse: Any) -> tuple[HybridLM, MuonAdamW, TrainingState, Health]:
    config = Config(
        model=sparse_model("sparse_mla", **sparse),
        precision=PrecisionConfig("fp64"),
        optim=OptimConfig(weight_decay=0.1),
    )
    model = build(config.model)
    optimizer, health = build_optimizer(model, config), Health()
    others = {"health": health}
    return (
        model,
        optimizer,
        TrainingState(folder, model, optimizer, config, "", None, others),
        health,
    )


def step(model: HybridLM, optimizer: MuonAdamW) -> None:
    train(model)
    optimizer.step()
    optimizer.zero_grad()


def test_the_training_goes_on_where_the_warm_up_ended(tmp_path: Path) -> None:
    model, optimizer, state, health = made(tmp_path, stage="dense", loss=1.0)
    start = {name: p.detach().clone() for name, p in model.named_parameters()}
    for number in range(2):
        step(model, optimizer)
        health.observe(number, 4.0, 1e-5)
        state.advance(True, good=True)
    for name, p in model.named_parameters():
        assert torch.equal(p, start[name]) == ("indexer" not in name), name
    state.save(keep=1)
    after, its_optimizer, resumed, averages = made(tmp_path, stage="sparse", loss=0.1)
    resumed.resume("auto")
    key = "model.attention.sparse"
    assert resumed.changed == [
        f"{key}.stage changed from dense to sparse on resume",
        f"{key}.loss changed from 1.0 to 0.1 on resume",
        "health: starts anew with the stage",
    ]
    assert averages.state() == Health().state() != health.state()
    for (name, p), other in zip(after.named_parameters(), model.parameters(), strict=True):
        assert torch.equal(p, other) and p.requires_grad, name
    step(after, its_optimizer)
    moved = [
        not torch.equal(p, q) for p, q in zip(after.parameters(), model.parameters(), strict=True)
    ]
    assert all(moved), "now everything is trained"


@pytest.mark.parametrize("setting", ["share", "own", "layers", "head_dim", "num_heads"])
def test_what_makes_another_model_is_refused(tmp_path: Path, setting: str) -> None:
    _, _, state, _ = made(tmp_path)
    state.advance(True, good=True)
    state.save(keep=1)
    other = {"share": 1, "own": "", "layers": "1", "head_dim": 8, "num_heads": 4}[setting]
    *_, resumed, _ = made(
        tmp_path, **({"own": "1"} if setting == "layers" else {}) | {setting: other}
    )
    with pytest.raises(CheckpointError, match=rf"model\.attention\.sparse\.(own|{setting})="):
        resumed.resume("auto")
