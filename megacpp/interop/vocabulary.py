"""Rows of a larger vocabulary than that of the folder of first weights.

A new row is the mean of the folder's rows plus the noise that the initialiser draws for it. By the
mean a new id's logit is that of an average id, so known ids keep their probabilities; logits of
rows near zero would exceed those of a trained table, which are mostly negative (Hewitt 2021,
"Initializing New Word Embeddings"). The noise makes new rows differ, and is a function of seed,
name and index: every mesh adds the same rows.

Legend: D numbers of a row.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from megacpp.blocks.features import FEATURES
from megacpp.config.model import ModelConfig
from megacpp.errors import config_error
from megacpp.interop.links import Link
from megacpp.interop.places import WeightsFolder, read_model
from megacpp.interop.stored import StoredTensors
from megacpp.model.init import Rule, Slice, tensor_key

AT_ONCE = 1 << 20  # numbers that are read at once
KEY = "model.vocab_size"


def with_rows_of(place: WeightsFolder, model: ModelConfig) -> ModelConfig:
    """Return a model's settings with as many ids as its folder of weights has.

    Args:
        place: the folder.
        model: settings of the model to fill.

    Raises:
        ConfigError: the model has fewer ids, or more where ids are hashed.
    """
    have, wanted = read_model(place).vocab_size, model.vocab_size
    if have > wanted:
        raise config_error(
            KEY,
            wanted,
            f"{place.folder} has {have} rows, and {have - wanted} of them would be lost",
            f"use {KEY}={have}, or leave it out",
        )
    if have < wanted and any(one.hashes and one.present(model) for one in FEATURES.values()):
        raise config_error(
            KEY,
            wanted,
            f"{place.folder} has {have} rows, and hashes of n-grams depend on their number",
            f"use {KEY}={have} and a corpus of at most {have} ids",
        )
    return replace(model, vocab_size=have)


def mean_row(link: Link, stored: StoredTensors) -> Tensor:
    """Return the mean `[D]` of a table's rows in a folder, fp64.

    Whole rows are summed in one order, whatever part of them a rank stores.
    """
    rows, width = link.shape
    step = max(1, AT_ONCE // width)
    total_D = torch.zeros(width, dtype=torch.float64)
    for first in range(0, rows, step):
        read = stored.rows(link.name, first, min(step, rows - first))
        total_D += link.ours(read).double().sum(0)
    return total_D / rows


def add_rows(
    target: Slice, name: str, rule: Rule, seed: int, link: Link, stored: StoredTensors
) -> None:
    """Fill the rows of a table that a folder lacks, as far as this process stores them.

    Args:
        target: what this process stores of the table.
        name: of the table.
        rule: its initial values.
        seed: of the run.
        link: the table in the folder.
        stored: tensors of the folder.
    """
    row, column = target.offset
    known = min(max(link.shape[0] - row, 0), len(target.local))
    new = target.local[known:]
    if new.numel() == 0:
        return
    mean_D = mean_row(link, stored)[column : column + new.shape[1]]
    key, width = tensor_key(seed, name), target.shape[1]
    columns_D = column + torch.arange(len(mean_D))
    first = row + known
    for into in new.split(max(1, AT_ONCE // width)):
        index = (first + torch.arange(len(into)))[:, None] * width + columns_D
        into.copy_(rule(index, target.shape, key) + mean_D)
        first += len(into)
