"""Whole weights of a model whose parts are on several ranks."""

from __future__ import annotations

from torch import Tensor, nn

from megacpp.state.agreement import this_rank
from megacpp.state.catalogue import catalogue
from megacpp.state.export import _ordered, _whole_tensors
from megacpp.state.tensors import model_tensors


def gather_weights(model: nn.Module) -> dict[str, Tensor] | None:
    """Return all weights on rank 0's CPU, None on other ranks; every rank calls it.

    Names and their order are those of the unsharded model on any mesh. One parameter at a time is
    whole on a device.
    """
    whole = catalogue(model_tensors(model))
    weights = dict(_whole_tensors(model, whole, _ordered(model, whole)))
    return weights if this_rank()[0] == 0 else None
