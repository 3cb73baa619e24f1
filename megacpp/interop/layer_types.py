"""Keys of classes whose layers see a window or all tokens; no torch import here."""

from __future__ import annotations

from typing import Any

from megacpp.config.model import ModelConfig
from megacpp.interop.keys import (
    FULL,
    SIZES,
    KeyRule,
    Values,
    WrongKeyError,
    from_rope,
    needed,
    to_rope,
)
from megacpp.model.pattern import layer_kinds

THETA = 5e5  # of layers with a window, unless their own keys say another
SLIDING = "sliding_attention"


def _to_layers(model: ModelConfig) -> dict[str, Any]:
    """Return the keys of layers with a window and without, each with rotary keys of its own."""
    found, theta = to_rope(model), model.attention.rope_theta
    mixers = layer_kinds(model)[0::2]
    return found | {
        "sliding_window": model.attention.window,
        "layer_types": [FULL if "+full" in kind else SLIDING for kind in mixers],
        "rope_parameters": {
            FULL: found["rope_parameters"],
            SLIDING: {"rope_type": "default", "rope_theta": theta},
        },
    }


def _from_layers(values: Values) -> dict[str, Any]:
    count = needed(values, "num_hidden_layers")
    types = values.get("layer_types") or [
        FULL if (i + 1) % 4 == 0 else SLIDING for i in range(count)
    ]
    full = [i for i, kind in enumerate(types) if kind == FULL]
    of_kinds = values.get("rope_parameters") or {}
    sliding = of_kinds.get(SLIDING) or {}
    found = from_rope({**values, "rope_parameters": of_kinds.get(FULL)})
    if sliding.get("rope_type", "default") != "default":
        raise WrongKeyError("rope_type", sliding["rope_type"], f"must be default in {SLIDING}")
    theta = sliding.get("rope_theta", THETA)
    if len(full) == count:
        return found
    window = {"attention.window": needed(values, "sliding_window")}
    if not full:
        return window | {"attention.rope_theta": theta}
    if theta != found["attention.rope_theta"]:
        raise WrongKeyError("rope_theta", theta, f"of {SLIDING} must be that of {FULL}")
    every = full[0] + 1
    tiled = full == list(range(full[0], count, every))
    ranks = f"every:{every}" if tiled else ",".join(map(str, full))
    return found | window | {"attention.full_layers": ranks}


BY_LAYER = (*SIZES, KeyRule(_to_layers, _from_layers))
WINDOW = KeyRule(
    lambda model: {"sliding_window": model.attention.window or None},
    # Layers that are named see all tokens: others are refused.
    lambda values: {
        "attention.window": 0 if values.get("layer_types") else values.get("sliding_window") or 0
    },
)
