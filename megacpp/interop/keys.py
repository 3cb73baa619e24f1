"""Keys of config.json and our settings, both ways; no torch import here.

A rule writes keys from a model, and reads settings, dotted below `model`, from keys and defaults.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from megacpp.config.model import ModelConfig
from megacpp.interop.features import feeds, mixes
from megacpp.model.pattern import layer_kinds

Values = Mapping[str, Any]


class WrongKeyError(Exception):
    """Key of config.json that no setting of ours expresses: key, value and rule."""

    def __init__(self, key: str, value: Any, rule: str) -> None:
        super().__init__(key)
        self.key, self.value, self.rule = key, value, rule


@dataclass(frozen=True)
class KeyRule:
    """Keys of config.json that belong together.

    Attributes:
        to: keys of a model.
        back: settings of such keys.
    """

    to: Callable[[ModelConfig], dict[str, Any]]
    back: Callable[[Values], dict[str, Any]]


def same(**names: str) -> KeyRule:
    """Return the rule of keys that are settings under other names."""
    return KeyRule(
        lambda model: {key: attrgetter(ours)(model) for key, ours in names.items()},
        lambda values: {ours: needed(values, key) for key, ours in names.items()},
    )


def needed(values: Values, key: str) -> Any:
    """Return the value of a key.

    Raises:
        WrongKeyError: it is missing.
    """
    if values.get(key) is None:
        raise WrongKeyError(key, "", "is missing")
    return values[key]


# ---- layers: a layer there is two blocks here ---------------------------------------------------


def spelled(pairs: list[str]) -> dict[str, Any]:
    """Return pattern and depth of pairs of letters, the pattern as short as it tiles."""
    count = len(pairs)
    tile = next(
        n for n in range(1, count + 1) if all(pairs[i] == pairs[i % n] for i in range(count))
    )
    return {"pattern": "".join(pairs[:tile]), "depth": 2 * count}


def alike(pair: str) -> KeyRule:
    """Return the rule of a class whose layers are all one pair of letters."""
    return KeyRule(
        lambda model: {"num_hidden_layers": model.depth // 2},
        lambda values: spelled([pair] * needed(values, "num_hidden_layers")),
    )


def _leading(model: ModelConfig) -> dict[str, Any]:
    found = feeds(model)
    return {"num_hidden_layers": len(found), "first_k_dense_replace": found.count("F")}


def _from_leading(values: Values) -> dict[str, Any]:
    count, dense = needed(values, "num_hidden_layers"), values["first_k_dense_replace"] or 0
    kinds = values.get("mlp_layer_types") or [
        "dense" if i < dense else "sparse" for i in range(count)
    ]
    return spelled(["AF" if kind == "dense" else "AE" for kind in kinds])


LEADING = KeyRule(_leading, _from_leading)
TYPED_LEADING = KeyRule(
    lambda model: {
        **_leading(model),
        "mlp_layer_types": ["dense" if x == "F" else "sparse" for x in feeds(model)],
    },
    _from_leading,
)


def _dense_named(model: ModelConfig) -> dict[str, Any]:
    found = feeds(model)
    return {
        "num_hidden_layers": len(found),
        "decoder_sparse_step": 1,
        "mlp_only_layers": [i for i, letter in enumerate(found) if letter == "F"],
    }


def _feeds_named(values: Values) -> list[str]:
    only, every = values.get("mlp_only_layers") or [], values["decoder_sparse_step"]
    count = needed(values, "num_hidden_layers")
    return ["F" if i in only or (i + 1) % every else "E" for i in range(count)]


DENSE_NAMED = KeyRule(
    _dense_named, lambda values: spelled([f"A{letter}" for letter in _feeds_named(values)])
)
LINEAR, FULL = "linear_attention", "full_attention"


def _from_types(values: Values) -> dict[str, Any]:
    found, every = _feeds_named(values), values["full_attention_interval"]
    types = values.get("layer_types") or [
        FULL if (i + 1) % every == 0 else LINEAR for i in range(len(found))
    ]
    return spelled([("G" if t == LINEAR else "A") + x for t, x in zip(types, found, strict=True)])


TYPED = KeyRule(
    lambda model: {
        **_dense_named(model),
        "layer_types": [LINEAR if letter == "G" else FULL for letter in mixes(model)],
    },
    _from_types,
)


# ---- positions ----------------------------------------------------------------------------------


# Keys of the rotations above which a frequency stays, and below which it is slowed fully.
TURNS = {"pairs": ("beta_fast", "beta_slow"), "turns": ("high_freq_factor", "low_freq_factor")}


def to_rope(model: ModelConfig) -> dict[str, Any]:
    """Return the rotary keys as transformers 5 and 4 spell them."""
    a, yarn = model.attention, model.attention.yarn
    scaling: dict[str, Any] | None = None
    if yarn is not None and a.max_seq_len > yarn.original_seq_len:
        fast, slow = TURNS[yarn.ramp]
        scaling = {
            "rope_type": "yarn" if yarn.ramp == "pairs" else "llama3",
            "factor": yarn.factor,
            fast: yarn.beta_fast,
            slow: yarn.beta_slow,
            "original_max_position_embeddings": yarn.original_seq_len,
        }
        if a.kind == "mla" and yarn.ramp == "pairs":  # turns have no temperature
            scaling |= {"mscale": yarn.mscale, "mscale_all_dim": yarn.mscale}
            scaling |= {} if yarn.mscale else {"attention_factor": 1.0}  # transformers: 0 is none
        elif yarn.ramp == "pairs":
            scaling["attention_factor"] = 0.1 * yarn.mscale * math.log(yarn.factor) + 1.0
    theta = {"rope_theta": a.rope_theta}
    return {
        **theta,
        "rope_parameters": {"rope_type": "default", **(scaling or {}), **theta},
        "rope_scaling": scaling and {"type": scaling["rope_type"], **scaling},
    }


def from_rope(values: Values) -> dict[str, Any]:
    """Return the settings of rotary keys.

    Raises:
        WrongKeyError: frequencies that no setting stretches in the same way.
    """
    # Version 4's key wins, as in transformers.
    rope = values.get("rope_scaling") or values.get("rope_parameters") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    found = {"attention.rope_theta": float(rope.get("rope_theta", values["rope_theta"]))}
    if kind == "default":
        return found
    if kind == "llama3":
        return found | _from_turns(rope, values["max_position_embeddings"])
    if kind != "yarn" or not rope.get("truncate", True):
        name = "rope_type" if kind != "yarn" else "truncate"
        rule = "must be default, llama3 or yarn, truncated"
        raise WrongKeyError(name, rope.get(name, kind), rule)
    factor, length = float(needed(rope, "factor")), values["max_position_embeddings"]
    if factor <= 1:
        raise WrongKeyError("factor", factor, "must be above 1")
    original = rope.get("original_max_position_embeddings") or length
    scale, mscale = _temperature(rope, factor), rope.get("mscale_all_dim") or 0.0
    if not values.get("kv_lora_rank"):
        mscale = (scale - 1.0) / (0.1 * math.log(factor))
    elif scale != 1.0:  # which scales rotated dims alone
        if (given := rope.get("attention_factor")) is not None:
            raise WrongKeyError("attention_factor", given, "must be 1")
        raise WrongKeyError("mscale", rope.get("mscale"), f"must equal mscale_all_dim ({mscale})")
    return found | {
        "attention.yarn.factor": factor,
        "attention.yarn.beta_fast": _whole(rope, "beta_fast", 32),
        "attention.yarn.beta_slow": _whole(rope, "beta_slow", 1),
        "attention.yarn.original_seq_len": original,
        "attention.yarn.mscale": float(mscale),
        "attention.max_seq_len": max(length, math.ceil(original * factor)),
    }


def _temperature(rope: Values, factor: float) -> float:
    """Return what YaRN multiplies rotated queries and keys by, as transformers finds it."""
    if (given := rope.get("attention_factor")) is not None:
        return float(given)
    above, below = rope.get("mscale"), rope.get("mscale_all_dim")
    above, below = (above, below) if above and below else (1.0, 0.0)
    return (0.1 * above * math.log(factor) + 1.0) / (0.1 * below * math.log(factor) + 1.0)


def _whole(rope: Values, name: str, otherwise: int) -> int:
    if (value := rope.get(name) or otherwise) != int(value):
        raise WrongKeyError(name, value, "must be a whole number")
    return int(value)


def _from_turns(rope: Values, length: int) -> dict[str, Any]:
    """Return the settings of Llama 3's scaling."""
    original, found = needed(rope, "original_max_position_embeddings"), {}
    for name, key in zip(TURNS["turns"], TURNS["pairs"], strict=True):
        found[f"attention.yarn.{key}"] = _whole(rope, name, needed(rope, name))
    if length <= original:
        raise WrongKeyError("max_position_embeddings", length, f"must be above {original}")
    return found | {
        "attention.yarn.ramp": "turns",
        "attention.yarn.factor": float(needed(rope, "factor")),
        "attention.yarn.original_seq_len": original,
        "attention.yarn.mscale": 0.0,
    }


PART = "partial_rotary_factor"


def _from_part(values: Values) -> dict[str, Any]:
    rope = values.get("rope_scaling") or values.get("rope_parameters") or {}
    part = float((values.get("rope_parameters") or rope).get(PART, values[PART]))
    stretched = rope.get("rope_type", rope.get("type")) == "yarn"
    if part < 1 and stretched and rope.get("attention_factor") != 1:
        raise WrongKeyError(PART, part, "must be 1 with a temperature, or attention_factor 1")
    return {"attention.rope_fraction": part}


PARTIAL = KeyRule(lambda model: {PART: model.attention.rope_fraction}, _from_part)


# ---- blocks -------------------------------------------------------------------------------------


def _heads(values: Values) -> dict[str, Any]:
    heads = needed(values, "num_attention_heads")
    dim = values.get("head_dim") or needed(values, "hidden_size") // heads
    key_heads = values.get("num_key_value_heads") or heads
    return {"attention.num_kv_heads": key_heads, "attention.head_dim": dim}


BASE = KeyRule(
    lambda model: {"tie_word_embeddings": model.tie_embeddings},
    lambda values: {"tie_embeddings": bool(values.get("tie_word_embeddings"))},
)
SIZES = (
    same(
        vocab_size="vocab_size",
        hidden_size="dim",
        rms_norm_eps="norm_eps",
        num_attention_heads="attention.num_heads",
        max_position_embeddings="attention.max_seq_len",
    ),
    BASE,
)
COMMON = (*SIZES, KeyRule(to_rope, from_rope))
GQA = KeyRule(
    lambda model: {
        "num_key_value_heads": model.attention.num_kv_heads,
        "head_dim": model.attention.head_dim,
    },
    _heads,
)
MLA_DIMS = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
MLA = KeyRule(
    lambda model: {
        **{name: getattr(model.attention, name) for name in MLA_DIMS},
        "q_lora_rank": model.attention.q_lora_rank or None,
        "num_key_value_heads": model.attention.num_heads,
    },
    lambda values: {
        **{f"attention.{name}": needed(values, name) for name in MLA_DIMS},
        "attention.q_lora_rank": values["q_lora_rank"] or 0,
        "attention.kind": "mla",
    },
)
DENSE = same(intermediate_size="mlp.hidden_dim")


def experts(number: str, width: str = "moe_intermediate_size") -> KeyRule:
    """Return the rule of routed experts, given the keys of their number and width."""
    return same(
        **{number: "moe.num_experts", width: "moe.hidden_dim", "num_experts_per_tok": "moe.top_k"}
    )


SOFTMAX_ORDER = KeyRule(
    lambda model: {"norm_topk_prob": model.moe.softmax_order == "post"},
    lambda values: {"moe.softmax_order": "post" if values["norm_topk_prob"] else "pre"},
)
SCALED = same(routed_scaling_factor="moe.route_scale")
GROUPED = same(n_group="moe.num_groups", topk_group="moe.top_k_groups")
# vLLM asks for the numbers where transformers has no groups.
ONE_GROUP = KeyRule(lambda model: {"n_group": 1, "topk_group": 1}, lambda values: {})


def shared_width(key: str) -> KeyRule:
    """Return the rule of one shared expert, given the key of its width."""
    return KeyRule(
        lambda model: {key: model.moe.num_shared * model.moe.shared_hidden_dim},
        lambda values: {
            "moe.num_shared": int(needed(values, key) > 0),
            "moe.shared_hidden_dim": values[key] or needed(values, "hidden_size"),
        },
    )


def padded_units(model: ModelConfig) -> int:
    """Return the hidden units of as many whole experts as hold the shared ones."""
    units, each = model.moe.num_shared * model.moe.shared_hidden_dim, model.moe.hidden_dim
    return -(-units // each) * each


SHARED_NUMBER = KeyRule(
    lambda model: {"n_shared_experts": padded_units(model) // model.moe.hidden_dim},
    lambda values: {
        "moe.num_shared": int((values.get("n_shared_experts") or 0) > 0),
        "moe.shared_hidden_dim": max(1, values.get("n_shared_experts") or 0)
        * needed(values, "moe_intermediate_size"),
    },
)
INDEXER = same(
    index_topk="attention.sparse.top_k",
    index_n_heads="attention.sparse.num_heads",
    index_head_dim="attention.sparse.head_dim",
)


def _from_indexers(values: Values) -> dict[str, Any]:
    types = values.get("indexer_types") or []
    own = [str(i) for i, kind in enumerate(types) if kind == "full"]
    found = {"attention.sparse.layers": "all", "attention.sparse.share": 1}
    if len(own) < len(types):
        found |= {"attention.sparse.share": len(types), "attention.sparse.own": ",".join(own)}
    return found


INDEXERS = KeyRule(
    lambda model: {
        "indexer_types": [
            "full" if kind == "A.index" else "shared" for kind in layer_kinds(model)[0::2]
        ]
    },
    _from_indexers,
)
EACH_INDEXES = KeyRule(lambda model: {}, _from_indexers)
DELTA = same(
    linear_num_key_heads="gated_deltanet.num_key_heads",
    linear_num_value_heads="gated_deltanet.num_value_heads",
    linear_key_head_dim="gated_deltanet.key_dim",
    linear_value_head_dim="gated_deltanet.value_dim",
    linear_conv_kernel_dim="gated_deltanet.conv_kernel",
)


def _from_scale(values: Values) -> dict[str, Any]:
    scale, usual = values["attention_multiplier"], _heads(values)["attention.head_dim"] ** -0.5
    if not math.isclose(scale, usual, rel_tol=1e-6):
        raise WrongKeyError("attention_multiplier", scale, f"must be head_dim**-0.5 ({usual:g})")
    return {}


ATTENTION_SCALE = KeyRule(
    lambda model: {"attention_multiplier": model.attention.head_dim**-0.5}, _from_scale
)
CODE = KeyRule(
    lambda model: {
        "vocab_size": model.vocab_size,
        "hidden_size": model.dim,
        "num_hidden_layers": model.depth,
        "num_attention_heads": model.attention.num_heads,
        "max_position_embeddings": model.attention.max_seq_len,
        "tie_word_embeddings": model.tie_embeddings,
    },
    lambda values: {},  # all is in our own settings
)


def bias(key: str) -> KeyRule:
    """Return the rule of a bias on queries, keys and values, given its key."""
    return KeyRule(
        lambda model: {key: model.attention.qkv_bias},
        lambda values: {"attention.qkv_bias": bool(values.get(key))},
    )


HEAD_NORMS = KeyRule(
    lambda model: {"use_qk_norm": model.attention.qk_norm},
    lambda values: {"attention.qk_norm": bool(values.get("use_qk_norm"))},
)
