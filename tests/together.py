"""Results of cases that are made together, as cases of one size share a fork of ranks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Generic, TypeVar

import pytest

Case = TypeVar("Case", bound=Hashable)
Result = TypeVar("Result")
_chosen: defaultdict[str, list[object]] = defaultdict(list)  # by module, values of its parameters


def choose(items: Iterable[pytest.Item]) -> None:
    """Note the parameters of all tests that this process may run."""
    for item in items:
        if isinstance(item, pytest.Function) and hasattr(item, "callspec"):
            _chosen[item.module.__name__] += item.callspec.params.values()


class Together(dict[Case, Result], Generic[Case, Result]):
    """Results by case; the first that is asked for is made with all others that will be.

    Args:
        module: name of the module of tests.
        cases: that its tests have as a parameter; those of chosen tests are made together.
        make: makes the results of several cases.
        beside: other cases that a case is compared with.
    """

    def __init__(
        self,
        module: str,
        cases: Sequence[Case],
        make: Callable[[list[Case]], dict[Case, Result]],
        beside: Callable[[Case], Iterable[Case]] = lambda _: (),
    ) -> None:
        super().__init__()
        self.module, self.cases, self.make, self.beside = module, cases, make, beside

    def __missing__(self, case: Case) -> Result:
        kinds = {type(c) for c in self.cases}  # other parameters may have no hash
        chosen = {v for v in _chosen[self.module] if type(v) in kinds}
        wanted = [case, *(c for c in self.cases if c in chosen)]
        every = dict.fromkeys([*wanted, *(b for c in wanted for b in self.beside(c))])
        self.update(self.make([c for c in every if c not in self]))
        return self[case]
