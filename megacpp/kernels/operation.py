"""Hot operations and their backends as data; no torch import here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from megacpp.config.schema import Config
from megacpp.kernels.host import Host
from megacpp.kernels.support import always

# Why a backend can't do its operation for a configuration on a host; None: it can.
Support = Callable[[Config, Host], str | None]


@dataclass(frozen=True)
class Backend:
    """Implementation of an operation.

    Attributes:
        name: in settings.
        what: description, for tables.
        unsupported_reason: why it can't run; None: it can.
        by_itself: `auto` may take it. The definitions that others are tested against it may not.
        cost: what it needs for this configuration beside its operation; empty: nothing.
        traced: memory traces count what it allocates; otherwise they take torch's form.
    """

    name: str
    what: str
    unsupported_reason: Support
    by_itself: bool = True
    cost: Callable[[Config], str] = lambda config: ""
    traced: bool = True


@dataclass(frozen=True)
class Operation:
    """Hot operation of a model.

    Attributes:
        what: description, for tables.
        letters: of blocks that run it; empty: every model.
        backends: in the order in which `auto` tries them.
        special: features that have code of their own in a backend, each with settings that have it.
    """

    what: str
    letters: str
    backends: tuple[Backend, ...]
    special: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def backend(self, name: str) -> Backend:
        """Return the backend of that name."""
        return next(b for b in self.backends if b.name == name)


def definition(what: str, unsupported_reason: Support = always) -> Backend:
    """Return the backend that others are tested against, named `reference`."""
    return Backend("reference", what, unsupported_reason, by_itself=False, traced=False)
