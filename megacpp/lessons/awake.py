"""Models whose every parameter takes part at once, for tests of formulas.

What starts at zero (a memory's way into the stream, say) would leave all that is in front of it
without a gradient, and without an effect.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

from megacpp.model.hybrid import HybridLM
from megacpp.model.init import Constant, Normal, Rule


@contextmanager
def awake(std: float = 0.1) -> Iterator[None]:
    """Models that are initialised inside have small numbers where their rules say zero."""
    rules_of = HybridLM.init_rules

    def rules(self: HybridLM) -> dict[str, Rule]:
        parameters = dict(self.named_parameters())
        return {
            name: Normal(std) if name in parameters and rule == Constant(0.0) else rule
            for name, rule in rules_of(self).items()
        }

    with mock.patch.object(HybridLM, "init_rules", rules):
        yield
