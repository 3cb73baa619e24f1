"""Agreement between ranks: an error on one rank raises the same error on all of them.

Objects travel through torch's object collectives (pickle between live processes of one run); the
pickles are never written to a file.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeGuard, TypeVar

import torch.distributed as dist

from megacpp.errors import CheckpointError

if TYPE_CHECKING:
    from torch.distributed.checkpoint import CheckpointException

Thing = TypeVar("Thing")


def is_distributed() -> bool:
    """Return whether this process belongs to a process group."""
    return dist.is_available() and dist.is_initialized()


def this_rank() -> tuple[int, int]:
    """Return rank and number of ranks; (0, 1) without a process group."""
    return (dist.get_rank(), dist.get_world_size()) if is_distributed() else (0, 1)


def gather(thing: Thing, group: dist.ProcessGroup | None = None) -> list[Thing]:
    """Return the objects that all ranks pass, in rank order, on every rank.

    Args:
        thing: object of this rank.
        group: all ranks in a process group of their own; None: the default one.
    """
    if not is_distributed():
        return [thing]
    everyone: list[Thing] = [thing] * dist.get_world_size()
    dist.all_gather_object(everyone, thing, group)
    return everyone


def share(thing: Thing, source: int, group: dist.ProcessGroup | None = None) -> Thing:
    """Return the object that rank `source` passes, on every rank; `group` as in `gather`."""
    if not is_distributed():
        return thing
    things = [thing]
    dist.broadcast_object_list(things, source, group)
    return things[0]


@contextmanager
def agreed(what: str, fix: str, group: dist.ProcessGroup | None = None) -> Iterator[None]:
    """Run a block on every rank; if it fails on any rank, raise the first rank's error on all.

    Args:
        what: start of the error message: the operation that failed.
        fix: end of the error message.
        group: as in `gather`.

    Raises:
        CheckpointError: the block failed; a CheckpointError of the block is raised unchanged, any
            other error becomes `what: reason. Fix: fix.`
    """
    mine: BaseException | None = None
    try:
        yield
    except BaseException as error:
        if not isinstance(error, Exception) and not _of_dcp(error):
            raise
        if _of_dcp(error) and any(
            isinstance(cause, KeyboardInterrupt) for cause, _ in error.failures.values()
        ):
            raise KeyboardInterrupt from error  # DCP raises the same on all ranks
        mine = error
    errors = gather(None if mine is None else _one_line(mine, what, fix), group)
    first = next((error for error in errors if error is not None), None)
    if first is not None:
        raise CheckpointError(first) from mine


def _one_line(error: BaseException, what: str, fix: str) -> str:
    if isinstance(error, CheckpointError):
        return str(error)
    if _of_dcp(error) and error.failures:
        rank, (cause, _) = min(error.failures.items(), key=lambda item: item[0])
        return f"{what}: {_reason(cause)} on rank {rank}. Fix: {fix}."
    return f"{what}: {_reason(error)}. Fix: {fix}."


def _of_dcp(error: BaseException) -> TypeGuard[CheckpointException]:
    """Return whether the error is DCP's own exception, which doesn't derive from Exception."""
    module = sys.modules.get("torch.distributed.checkpoint")
    return module is not None and isinstance(error, module.CheckpointException)


def _reason(error: BaseException) -> str:
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror} ({error.filename})" if error.filename else error.strerror
    return f"{type(error).__name__} {' '.join(str(error).split())}".rstrip(". ")
