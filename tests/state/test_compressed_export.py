"""Saved and exported weights know nothing of latents."""

from __future__ import annotations

from pathlib import Path

import torch

from megacpp.state.export import export_weights, load_exported, load_trained
from megacpp.state.tensors import model_tensors
from megacpp.state.training import TrainingState
from tests.optim.test_compressed import CONFIG, build, train
from tests.synthetic import ragged_batch


def test_exported_and_saved_weights_are_those_of_a_plain_model(tmp_path: Path) -> None:
    model, optimizer = build()
    train(model, optimizer, range(2))
    export_weights(model, tmp_path / "final", CONFIG.model)
    state = TrainingState(tmp_path / "saved", model, optimizer, CONFIG, "corpus")
    state.advance(True, good=True)
    path = state.save(keep=1)
    batch = ragged_batch(range(2), 16, CONFIG.model.vocab_size)
    arguments = batch.ids_BT, batch.labels_BT, batch.docs
    for plain in (
        load_exported(tmp_path / "final", dtype=torch.float64),
        load_trained(path, CONFIG.model, dtype=torch.float64),
    ):
        assert dict(plain.named_parameters()).keys() == model_tensors(model).keys() & dict(
            model.named_parameters()
        )
        with torch.no_grad():
            assert plain(*arguments).loss_sum == model.eval()(*arguments).loss_sum
