"""Class of Hugging Face that computes what a model does; no torch import here.

Export takes the first class of the table (table.py) whose `fits` has every feature of a model;
import the class that config.json names.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from operator import attrgetter
from typing import Any

from megacpp.blocks.features import FEATURES as MODEL_FEATURES
from megacpp.config.model import ModelConfig
from megacpp.errors import ConfigError, config_error
from megacpp.interop import keys
from megacpp.interop.features import BY_CODE, FEATURES, blocked, features, letters, settings_for
from megacpp.interop.hf_class import HFClass
from megacpp.interop.table import CLASSES
from megacpp.model.pattern import LETTERS, expand_pattern

# Any model, by code in its folder (code/write.py).
CODE = HFClass(
    "MegacppForCausalLM",
    "megacpp",
    {},
    (keys.CODE,),
    {
        "auto_map": {
            "AutoConfig": "configuration_megacpp.MegacppConfig",
            "AutoModelForCausalLM": "modeling_megacpp.MegacppForCausalLM",
        }
    },
    own=True,
)


def class_of(model: ModelConfig, dropless: bool = False, code: bool = False) -> tuple[HFClass, str]:
    """Return the class that computes what a model does, and why it is that one.

    Args:
        model: settings.
        dropless: as `blocked`.
        code: take code in the folder even if transformers has a class.

    Raises:
        ConfigError: no class does; the error names a setting and what to set instead.
    """
    recurrent = [LETTERS[x] for x in "MR" if x in letters(model)]
    code = code or bool(recurrent)
    for error in blocked(model, dropless, code):
        raise error
    if code:
        no = " and ".join(recurrent)
        return CODE, f"code in the folder{no and f', as transformers has no {no}'}"
    found = features(model)
    exact = [one for one in CLASSES if one.fits and not one.misfits(found)]
    if exact:
        return exact[0], _reason(found)
    raise _nearest_misses(model, found)


def class_named(model_type: str) -> HFClass | None:
    """Return the class of config.json's `model_type`."""
    return next((one for one in (*CLASSES, CODE) if one.model_type == model_type), None)


def to_config(one: HFClass, model: ModelConfig) -> dict[str, Any]:
    """Return the keys of config.json that decide what a model computes."""
    found: dict[str, Any] = {"architectures": [one.name], "model_type": one.model_type}
    for rule in one.rules:
        found |= rule.to(model)
    found |= one.fixed
    if keys.PART in found:  # transformers 5 reads it there
        found["rope_parameters"] |= {keys.PART: found[keys.PART]}
    return found


def dropped(model: ModelConfig) -> list[str]:
    """Return what a folder lacks without changing the model's function, a line each."""
    found = [
        f"{one.title} (model.{one.name}) trains only; its weights are left out"
        for one in MODEL_FEATURES.values()
        if one.present(model) and not one.exported
    ]
    if model.attention.sparse.layers and model.attention.sparse.stage == "dense":
        found.append("attention is dense (model.attention.sparse.stage); indexers are left out")
    return found


def _reason(found: Mapping[str, str]) -> str:
    """Return the features that decide, as words."""
    return ", ".join(
        _worded(name, value)
        for name, value in found.items()
        if value not in ("none", "no") and name != "heads divide the width"
    )


def _worded(name: str, value: str) -> str:
    """Return a feature and its value as words."""
    return {"yes": name, "no": f"a model without {name}"}.get(value, f"{name}: {value}")


def _nearest_misses(model: ModelConfig, found: Mapping[str, str]) -> ConfigError:
    """Return the error of the class that the fewest changes lead to, the cheapest ones if equal."""
    cost = {name: len(FEATURES) - i for i, name in enumerate(FEATURES)}
    rows = {one: one.misfits(found) for one in CLASSES if one.fits}
    near = min(rows, key=lambda one: (len(rows[one]), max(cost[name] for name in rows[one])))
    names = rows[near]
    settings = [
        setting
        for name in names
        for setting in next(
            filter(None, (settings_for(name, value, model) for value in near.fits[name])), []
        )
    ]
    key = settings[0].partition("=")[0] if settings else FEATURES[names[0]].key
    value = attrgetter(key.removeprefix("model."))(model)
    other = " or ".join(_worded(name, found[name]) for name in names)
    rule = f"{near.name}, the nearest class of Hugging Face, doesn't compute: {other}"
    return config_error(key, value, rule, f"train with {' and '.join(settings)}, or add {BY_CODE}")


def as_exported(model: ModelConfig, own: bool = False) -> ModelConfig:
    """Return the settings of what a folder computes: without what `dropped` names.

    Args:
        model: settings of the run.
        own: the folder has code of ours, which drops no token and knows the layers' blocks alone.
    """
    sparse = model.attention.sparse
    if own:
        spelled = "|".join(expand_pattern(model.pattern, model.depth))
        model = replace(model, pattern=spelled, moe=replace(model.moe, capacity_factor=None))
    if sparse.stage == "dense":
        sparse = replace(sparse, layers="")
    return replace(
        model,
        mtp=replace(model.mtp, depths=0),
        top=replace(model.top, loss=0.0),
        attention=replace(model.attention, sparse=sparse),
    )
