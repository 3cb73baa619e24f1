"""Features of a model that tell one class of Hugging Face from another; no torch import here."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from operator import attrgetter

from megacpp.blocks.features import FEATURES as MODEL_FEATURES
from megacpp.config.model import ModelConfig
from megacpp.errors import ConfigError, config_error
from megacpp.model.pattern import block_letters, layer_kinds
from megacpp.model.primes import nearest_divisor


@dataclass(frozen=True)
class Feature:
    """Property of a model with a few values.

    Attributes:
        key: setting that decides it.
        of: its value.
        typed: what to set for each value.
    """

    key: str
    of: Callable[[ModelConfig], str]
    typed: Mapping[str, str]


@dataclass(frozen=True)
class Blocker:
    """Setting that no class expresses.

    Attributes:
        key: the setting.
        when: a model has it.
        rule: why it is refused.
        fix: what to type instead.
    """

    key: str
    when: Callable[[ModelConfig], bool]
    rule: str
    fix: str


def letters(model: ModelConfig) -> str:
    """Return the block letters of all layers."""
    return block_letters(model.pattern, model.depth)


def mixes(model: ModelConfig) -> str:
    """Return the letters of sequence mixers: every other block from the first."""
    return letters(model)[0::2]


def feeds(model: ModelConfig) -> str:
    """Return the letters of feed-forward blocks: every other block from the second."""
    return letters(model)[1::2]


def alternates(model: ModelConfig) -> bool:
    """Return whether blocks come in pairs: a sequence mixer, then a feed-forward block."""
    pairs = len(mixes(model)) == len(feeds(model))
    return pairs and set(mixes(model)) <= set("AG") and set(feeds(model)) <= set("EF")


def has(letter: str) -> Callable[[ModelConfig], bool]:
    """Return the test whether a model has blocks of a letter."""
    return lambda model: letter in letters(model)


def _feed_order(model: ModelConfig) -> str:
    found = feeds(model)
    if len(set(found)) < 2:
        return f"{found[0]} alone"
    return "F, then E" if found == "F" * found.count("F") + "E" * found.count("E") else "E and F"


def _router(model: ModelConfig) -> str:
    if "E" not in feeds(model):
        return "none"
    return "sigmoid" if model.moe.score == "sigmoid" else f"softmax {model.moe.softmax_order}"


def _shared(model: ModelConfig) -> str:
    if "E" not in feeds(model) or not model.moe.num_shared:
        return "none"
    return "gated" if model.moe.shared_gate else "plain"


def _sparse(model: ModelConfig) -> str:
    if model.attention.sparse.stage == "dense" or "A" not in mixes(model):
        return "none"
    kinds = [kind for kind in layer_kinds(model) if kind[0] == "A"]
    sparse = [kind for kind in kinds if kind.startswith("A.")]
    if len(sparse) < len(kinds):
        return "some layers" if sparse else "none"
    return "each layer" if set(kinds) == {"A.index"} else "choices shared"


def _head_norms(model: ModelConfig) -> str:
    if not model.attention.qk_norm or model.attention.kind == "mla":
        return "no"
    return "wide" if model.attention.qk_norm_wide else "yes"


def _window(model: ModelConfig) -> str:
    if not model.attention.window:
        return "no"
    return "some layers" if any("+full" in kind for kind in layer_kinds(model)) else "yes"


def _yes(test: Callable[[ModelConfig], bool]) -> Callable[[ModelConfig], str]:
    return lambda model: "yes" if test(model) else "no"


def _switch(key: str) -> dict[str, str]:
    return {"yes": f"{key}=true", "no": f"{key}=false"}


FEATURES: Mapping[str, Feature] = {
    "attention": Feature(
        "model.attention.kind",
        attrgetter("attention.kind"),
        {kind: f"model.attention.kind={kind}" for kind in ("gqa", "mla")},
    ),
    "feed-forward": Feature(
        "model.pattern",
        _feed_order,
        {"F alone": "model.pattern=AF", "E alone": "model.pattern=AE"},
    ),
    "router": Feature(
        "model.moe.score",
        _router,
        {
            "sigmoid": "model.moe.score=sigmoid",
            "softmax post": "model.moe.score=softmax and model.moe.softmax_order=post",
            "softmax pre": "model.moe.score=softmax and model.moe.softmax_order=pre",
        },
    ),
    "sparse": Feature(
        "model.attention.sparse.layers",
        _sparse,
        {
            "none": "model.attention.sparse.layers=''",
            "each layer": "model.attention.sparse.layers=all",
        },
    ),
    "shared expert": Feature(
        "model.moe.num_shared",
        _shared,
        {
            "none": "model.moe.num_shared=0",
            "plain": "model.moe.shared_gate=false",
            "gated": "model.moe.shared_gate=true",
        },
    ),
    "Gated DeltaNet": Feature("model.pattern", _yes(has("G")), {"no": "model.pattern=AE"}),
    "groups of experts": Feature(
        "model.moe.num_groups",
        _yes(lambda model: has("E")(model) and model.moe.num_groups > 1),
        {"no": "model.moe.num_groups=1 and model.moe.top_k_groups=1"},
    ),
    "qk_norm": Feature(
        "model.attention.qk_norm",
        _head_norms,
        {**_switch("model.attention.qk_norm"), "wide": "model.attention.qk_norm_wide=true"},
    ),
    "output gate": Feature(
        "model.attention.output_gate",
        _yes(lambda model: model.attention.output_gate and model.attention.kind == "gqa"),
        _switch("model.attention.output_gate"),
    ),
    "window": Feature(
        "model.attention.window",
        _window,
        {
            "no": "model.attention.window=0",
            "yes": "model.attention.full_layers=''",
            "some layers": "model.attention.window=4096 and model.attention.full_layers=every:4",
        },
    ),
    "norms behind mixers": Feature(
        "model.post_norm", _yes(attrgetter("post_norm")), _switch("model.post_norm")
    ),
    "qkv_bias": Feature(
        "model.attention.qkv_bias",
        _yes(lambda model: model.attention.qkv_bias and model.attention.kind == "gqa"),
        _switch("model.attention.qkv_bias"),
    ),
    "partial rotary": Feature(
        "model.attention.rope_fraction",
        _yes(lambda model: model.attention.rope_fraction < 1),
        {"no": "model.attention.rope_fraction=1"},
    ),
    "activation of F": Feature(
        "model.mlp.activation",
        lambda model: model.mlp.activation if has("F")(model) else "none",
        {name: f"model.mlp.activation={name}" for name in ("swiglu", "relu2")},
    ),
    "query latent": Feature(
        "model.attention.q_lora_rank",
        _yes(lambda model: model.attention.kind == "mla" and model.attention.q_lora_rank > 0),
        {"yes": "model.attention.q_lora_rank=64"},
    ),
    "heads divide the width": Feature(
        "model.attention.num_heads",
        _yes(lambda model: model.dim % model.attention.num_heads == 0),
        {"yes": "model.attention.num_heads={divisor}"},
    ),
}  # fmt: skip

BY_CODE = "--to hf-code"  # exports what no class expresses
BLOCKERS = (
    Blocker(
        "model.pattern",
        lambda model: not alternates(model),
        "a layer there is a pair, A or G and then E or F ({letters} isn't made of these)",
        "use model.pattern=AE and an even --model.depth",
    ),
    Blocker(
        "model.attention.softcap",
        lambda model: model.attention.softcap is not None and has("A")(model),
        "no class caps attention logits",
        "use model.attention.softcap=none",
    ),
    Blocker(
        "model.attention.yarn.mscale",
        lambda model: (
            has("A")(model)
            and (yarn := model.attention.yarn) is not None
            and yarn.ramp == "turns"
            and yarn.mscale > 0
        ),
        "no class has a temperature where frequencies go by turns",
        "use model.attention.yarn.mscale=0",
    ),
    Blocker(
        "model.attention.yarn.mscale",
        lambda model: (
            has("A")(model)
            and model.attention.rope_fraction < 1
            and (yarn := model.attention.yarn) is not None
            and yarn.mscale > 0
        ),
        "no class has a temperature of all dims where it rotates a part of them",
        "use model.attention.yarn.mscale=0",
    ),
    Blocker(
        "model.logit_softcap",
        lambda model: model.logit_softcap is not None,
        "no class of these blocks caps the logits",
        "use model.logit_softcap=none",
    ),
    Blocker(
        "model.moe.null_rho",
        lambda model: has("E")(model) and model.moe.null_rho < 1,
        "no class has null experts",
        "use model.moe.null_rho=1",
    ),
    Blocker(
        "model.moe.activation",
        lambda model: has("E")(model) and model.moe.activation != "swiglu",
        "no class with these blocks has such experts",
        "use model.moe.activation=swiglu",
    ),
    *(
        Blocker(one.exported[0], one.present, *one.exported[1:])
        for one in MODEL_FEATURES.values()
        if one.exported
    ),
)


def features(model: ModelConfig) -> dict[str, str]:
    """Return every feature's value."""
    return {name: feature.of(model) for name, feature in FEATURES.items()}


def blocked(
    model: ModelConfig, dropless: bool = False, code: bool = False
) -> Iterator[ConfigError]:
    """Yield the settings that no class expresses.

    Args:
        model: settings.
        dropless: experts may drop no token in the exported model although they did in training.
        code: the folder has code of ours, which expresses the others.
    """
    for one in () if code else BLOCKERS:
        if one.when(model):
            value = attrgetter(one.key.removeprefix("model."))(model)
            rule = one.rule.format(letters=letters(model))
            yield config_error(one.key, value, rule, f"{one.fix}, or add {BY_CODE}")
            return
    if has("E")(model) and model.moe.capacity_factor is not None and not dropless:
        yield config_error(
            "model.moe.capacity_factor",
            model.moe.capacity_factor,
            "Hugging Face's experts drop no token, so results would differ",
            "add --dropless to accept that, or train with model.moe.capacity_factor=none",
        )


def settings_for(name: str, value: str, model: ModelConfig) -> list[str]:
    """Return the `key=value` to set so that a feature has a value; none if no setting does it."""
    divisor = nearest_divisor(model.dim, model.attention.num_heads)
    found = FEATURES[name].typed.get(value, "").format(divisor=divisor).split(" and ")
    return [one for one in found if one and not _holds(one, model)]


def _holds(setting: str, model: ModelConfig) -> bool:
    key, _, value = setting.partition("=")
    return str(attrgetter(key.removeprefix("model."))(model)).lower() == value
