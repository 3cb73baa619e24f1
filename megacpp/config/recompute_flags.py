"""Translation of other trainers' recompute flags on the command line.

Other trainers have one flag per recomputed part; here these are fields of one policy. A flag of the
table below is translated, and the run reports the translation. No torch import.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from megacpp.errors import ConfigError, config_error

TRUE, FALSE = ("true", "True", "1", "yes", "on"), ("false", "False", "0", "no", "off")
Meaning = dict[str, str]  # setting -> value
BY_KIND: Meaning = {  # the policy of the large presets, and of the estimator's grad_checkpoint
    "recompute.eblock": "expert_gemm_only",
    "recompute.mblock": "conv_bc_only",
    "recompute.rblock": "full_plus_norms",
    "recompute.norms": "true",
    "recompute.mlp": "true",
}
NONE: Meaning = {
    **{f"recompute.{kind}": "none" for kind in ("ablock", "eblock", "mblock", "gblock", "fblock")},
    "recompute.rblock": "recurrence",
    **{f"recompute.{region}": "false" for region in ("norms", "core_attn", "mlp")},
}


def _either(yes: Meaning, no: Meaning) -> Callable[[str, str], Meaning]:
    def read(flag: str, text: str) -> Meaning:
        if text not in TRUE + FALSE:
            raise config_error(flag, text, "must be true or false", f"write --{flag} true")
        return yes if text in TRUE else no

    return read


def _switch(key: str, on: str = "true", off: str = "false") -> Callable[[str, str], Meaning]:
    return _either({key: on}, {key: off})


def _modules(flag: str, text: str) -> Meaning:
    meanings = {
        "core_attn": ("recompute.core_attn", "true"),
        "mlp": ("recompute.mlp", "true"),
        "moe": ("recompute.eblock", "full"),
        "norms": ("recompute.norms", "true"),
    }
    names = [name for name in text.split(",") if name]
    for name in names:
        if name not in meanings:
            legal = ", ".join(meanings)
            raise config_error(flag, name, f"must be of {legal}", "write --recompute-modules mlp")
    return dict(meanings[name] for name in names)


def _spacing(flag: str, text: str) -> Meaning:
    if not text.isdecimal():
        raise config_error(
            flag, text, "must be a number of layers, 0 for none", "write --checkpoint-spacing 1"
        )
    return BY_KIND if int(text) else NONE


def _same(key: str) -> Callable[[str, str], Meaning]:
    return lambda _, text: {key: text}


OLDER: dict[str, Callable[[str, str], Meaning]] = {
    "recompute_moe_experts": _switch("recompute.eblock", "expert_gemm_only", "none"),
    "recompute_m2rnn": _switch("recompute.rblock", "recurrence", "none"),
    "recompute_mamba_conv": _switch("recompute.mblock", "conv_bc_only", "none"),
    "recompute_norms": _switch("recompute.norms"),
    "mla_recompute_q_upproj": _switch("recompute.mla_q_upproj"),
    "recompute_modules": _modules,
    "mtp_recompute": _switch("recompute.mtp"),
    "mhc_recompute_group_size": _same("recompute.mhc_group_size"),
    "gradient_checkpointing": _either(BY_KIND, NONE),
    "checkpoint_spacing": _spacing,
    "skip_eblock_checkpointing": _either({"recompute.eblock": "none"}, {}),
    "activation_memory_budget": _same("recompute.activation_memory_budget"),
    "cpu_offload_checkpointing": _switch("recompute.offload", "block_inputs", "none"),
}
TAKES_A_VALUE = (
    *("recompute_modules", "mhc_recompute_group_size", "activation_memory_budget"),
    "checkpoint_spacing",
)


def translate(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the arguments with such flags translated, and a line for each translation.

    Raises:
        ConfigError: a value that the flag doesn't take.
    """
    left, found, notes = list(arguments), [], []
    while left:
        word = left.pop(0)
        text, equals, value = word.removeprefix("--").partition("=")
        name = text.replace("-", "_")
        no = name.removeprefix("no_") in OLDER and name not in OLDER
        name = name.removeprefix("no_") if no else name
        if not word.startswith("--") or name not in OLDER:
            found.append(word)
            continue
        if not equals and left and not left[0].startswith("--"):
            value = left.pop(0)
        elif not equals and name in TAKES_A_VALUE:
            raise ConfigError(f"{name}=: needs a value. Fix: write --{text} VALUE.")
        value = "false" if no else value or "true"
        meaning = OLDER[name](name, value)
        flags = [f"--{key.replace('_', '-')}={to}" for key, to in meaning.items()]
        found += flags
        said = f"{word} {'' if equals or no else value}"
        notes.append(
            f"{said} means {' '.join(flags) or 'what the policy says'}{_spaced(name, value)}"
        )
    return found, [" ".join(note.split()) for note in notes]


def _spaced(name: str, value: str) -> str:
    """Add to a note that a policy is by kind of block, not by every so many layers."""
    every = name == "checkpoint_spacing" and int(value) > 1
    return f", in every layer: there is no policy for one layer in {value}" if every else ""
