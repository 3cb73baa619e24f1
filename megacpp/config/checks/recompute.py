"""Rules of the recompute policy, of compiled blocks and of FP8; no torch import here."""

from __future__ import annotations

from collections.abc import Iterator

from megacpp.blocks.kinds import KINDS
from megacpp.config.checks.fp8 import fp8_rules
from megacpp.config.schema import Config
from megacpp.errors import ConfigError, config_error


def recompute_rules(config: Config) -> Iterator[ConfigError]:
    """Yield broken rules of `config.recompute` and of its combinations."""
    yield from fp8_rules(config)
    policy = config.recompute
    for kind in KINDS.values():
        yield from kind.policy_checks(config)
    if policy.compress and config.model.depth == 1:
        yield config_error(
            "recompute.compress",
            policy.compress,
            "is for all layers but the last, and model.depth is 1",
            "use recompute.compress=0",
        )
    for name, off in (("compress", 0), ("offload", "none")):
        if getattr(policy, name) != off and config.train.compile != "off":
            yield config_error(
                f"recompute.{name}",
                getattr(policy, name),
                "in a compiled block the compiler alone decides what is kept",
                f"use recompute.{name}={off}, or train.compile=off",
            )
    if 0 <= policy.activation_memory_budget < 1 and config.train.compile == "off":
        yield config_error(
            "recompute.activation_memory_budget",
            policy.activation_memory_budget,
            "is what the compiler goes by, and no block is compiled",
            "use train.compile=inductor, or recompute.activation_memory_budget=-1 with a policy by "
            "block kind such as recompute.ablock=full",
        )
