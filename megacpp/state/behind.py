"""Asynchronous save: the step waits for a copy to host memory, a thread writes and publishes it.

One save is in flight at a time. Its collectives have a gloo group of their own, so they never mix
with those of the steps that go on meanwhile.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from megacpp.state.agreement import is_distributed
from megacpp.state.manifest import Seen
from megacpp.torch_extras import is_dtensor

if TYPE_CHECKING:
    from megacpp.state.uploads import Uploads

LONG = timedelta(days=1)  # a rank may wait so long for the slowest disk


class HasHeard(Protocol):
    """Request to leave after the current step: a `StopRequest`."""

    heard: str


class SaveThread:
    """Thread that writes one checkpoint at a time behind the steps.

    Attributes:
        stop: request to leave after a step, made by a failed save; None outside of a run.
        uploads: uploads of what is saved; None: there are none, or another rank has them.
        seen: files of checkpoints that this rank verified in earlier saves.
    """

    def __init__(self) -> None:
        self.stop: HasHeard | None = None
        self.uploads: Uploads | None = None
        self.seen: Seen = {}
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None
        self._group: dist.ProcessGroup | None = None

    @property
    def group(self) -> dist.ProcessGroup | None:
        """Gloo group of all ranks for saves alone; the first call makes it, on every rank."""
        if self._group is None and is_distributed():
            made = dist.new_group(backend="gloo", timeout=LONG, group_desc="save")
            assert isinstance(made, dist.ProcessGroup)
            self._group = made
        return self._group

    @property
    def busy(self) -> bool:
        """Whether a save is in flight."""
        return self._thread is not None and self._thread.is_alive()

    def start(self, write: Callable[[], object]) -> None:
        """Run `write` in the thread; the save before it must have been waited for."""
        assert self._thread is None
        gpu = torch.cuda.current_device() if torch.cuda.is_initialized() else None
        self._thread = threading.Thread(target=self._run, args=(write, gpu), name="save")
        self._thread.start()

    @property
    def held(self) -> frozenset[Path]:
        """Checkpoints that an upload still reads."""
        return self.uploads.held if self.uploads else frozenset()

    def saved(self, path: Path) -> Path:
        """Offer a published checkpoint to the uploads, and return it."""
        if self.uploads:
            self.uploads.offer(path)
        return path

    def finish(self) -> None:
        """Wait for the save in flight and raise nothing: another error is being reported."""
        if self._thread is not None:
            self._thread.join()

    def wait(self) -> None:
        """Wait for the save in flight; every rank calls it.

        Raises:
            CheckpointError: it failed, on any rank.
        """
        self.finish()
        error, self._error, self._thread = self._error, None, None
        if error is not None:
            raise error

    def _run(self, write: Callable[[], object], gpu: int | None) -> None:
        try:
            if gpu is not None:
                # A thread starts on the first GPU. DCP waits for the current one's stream, and the
                # driver would take half a gigabyte there for every rank of the node.
                torch.cuda.set_device(gpu)
            write()
        except BaseException as error:
            self._error = error
            if self.stop is not None:  # the ranks agree on the step after which they raise it
                self.stop.heard = self.stop.heard or "a failed save"


@torch.no_grad()
def host_copies(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return copies in host memory, contiguous; of DTensors the same shards of the same whole.

    Args:
        tensors: this rank's tensors by name, any shape.
    """
    copies = {name: _host_copy(t) for name, t in tensors.items()}
    if any(t.device.type != "cpu" for t in tensors.values()):
        torch.accelerator.synchronize()  # copies to pinned memory are asynchronous
    return copies


def _host_copy(t: Tensor) -> Tensor:
    local = t.to_local() if is_dtensor(t) else t
    copy = torch.empty(local.shape, dtype=local.dtype, pin_memory=local.is_cuda)
    copy.copy_(local.detach(), non_blocking=True)
    if not is_dtensor(t):
        return copy
    # `from_local` would move the copy to the device of the mesh.
    return type(t)(copy, t._spec, requires_grad=False)
