"""Progress of a model that runs without values, counted in forwards of blocks."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch.nn.modules.module import register_module_forward_hook

from megacpp.model.block import Block
from megacpp.terminal.progress import progress_bars


@contextlib.contextmanager
def following(name: str, blocks: int) -> Iterator[None]:
    """Show progress while about `blocks` forwards of blocks run, with their backwards."""
    with progress_bars() as stage:
        advance = stage(name, max(1, blocks))

        def ran(module: Any, *_: object) -> None:
            if isinstance(module, Block):
                advance(1)

        hook = register_module_forward_hook(ran)
        try:
            yield
        finally:
            hook.remove()
