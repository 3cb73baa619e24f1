"""Descriptors of kinds and features against their modules: names, order, shapes, fp32."""

from __future__ import annotations

import dataclasses
from fnmatch import fnmatchcase

import pytest
import torch

from megacpp.blocks.descriptor import BlockKind
from megacpp.blocks.features import FEATURES
from megacpp.blocks.kinds import KINDS
from megacpp.config.presets import tiny_full
from megacpp.config.schema import ModelConfig
from megacpp.model.count import meta_model
from megacpp.model.fp32 import contract_parameters
from megacpp.model.pattern import layer_kinds
from megacpp.model.sizes import layer_parameters
from tests.model.small import small, variants

MODELS = {"small": small(), **variants()}


def built(model: ModelConfig, layer: int, kind: str) -> torch.nn.Module:
    with torch.device("meta"):
        return KINDS[kind[0]].build(kind, model, layer)


@pytest.mark.parametrize("name", MODELS)
def test_a_descriptor_lists_the_parameters_of_its_module_in_order(name: str) -> None:
    model = MODELS[name]
    for layer, kind in enumerate(layer_kinds(model)):
        mixer = built(model, layer, kind)
        said = [(n, shape) for n, shape, _ in KINDS[kind[0]].shapes(model, kind)]
        assert said == [(n, tuple(p.shape)) for n, p in mixer.named_parameters()]
        wide = {n for n, _, row in KINDS[kind[0]].shapes(model, kind) if row.fp32}
        assert wide == {n for n, _ in contract_parameters(mixer)}


@pytest.mark.parametrize("name", FEATURES)
def test_a_feature_lists_the_parameters_of_its_modules(name: str) -> None:
    feature = FEATURES[name]
    models = [model for model in (*MODELS.values(), tiny_full().model) if feature.present(model)]
    assert models
    for config in models:
        model = meta_model(config)
        wide = {n for n, _ in contract_parameters(model)}
        kinds = "".join(layer_kinds(config))
        said = {n: (shape, row.fp32) for n, shape, row in feature.shapes(config, kinds)}
        found = {
            n: (tuple(p.shape), n in wide)
            for n, p in model.named_parameters()
            if ".mixer." not in n and fnmatchcase(n, feature.below + "*")
        }
        for n, own in found.items():
            here = [short for short in said if fnmatchcase(n, feature.below + short)]
            assert own == said[max(here, key=len)], n
        assert all(any(n.endswith(short) for n in found) for short in said)


@pytest.mark.parametrize("name", MODELS)
def test_layers_are_counted_from_the_descriptor(name: str) -> None:
    model = MODELS[name]
    kinds = layer_kinds(model)
    assert len(layer_parameters(model)) == len(kinds)
    for letter in {kind[0] for kind in kinds}:
        assert KINDS[letter].numel(model) > 0


def test_a_descriptor_that_misses_a_part_names_it() -> None:
    given = {f.name: getattr(KINDS["R"], f.name) for f in dataclasses.fields(BlockKind)}
    for part in ("parameters", "dims", "multiply_adds", "regions", "layouts"):
        rest = {name: value for name, value in given.items() if name != part}
        with pytest.raises(TypeError, match=part):
            BlockKind(**rest)
    lame = dataclasses.replace(KINDS["R"], dims=lambda model: {"H": 1})
    with pytest.raises(ValueError, match=r"weight.*: dims lack"):
        list(lame.shapes(small()))
