"""Functions around Triton kernels that a compiled graph has as one operator each."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, TypeVar

import torch

Function = TypeVar("Function", bound=Callable[..., Any])
# Results without values are wanted: kernels aren't launched (strides.py).
NO_LAUNCH: ContextVar[bool] = ContextVar("no launch", default=False)


def graph_operator(name: str) -> Callable[[Function], Function]:
    """Return a decorator: while a compiler traces, a function is the operator `megacpp::name`.

    Elsewhere it is called as it is, which an operator costs more than. Without values it runs but
    for its launches, so that shapes and layouts of results are written once. Results are new
    tensors, none a view of another.

    Args:
        name: of the operator; arguments and results are those that torch.library.custom_op takes.
    """

    def decorated(function: Function) -> Function:
        operator = torch.library.custom_op(f"megacpp::{name}", function, mutates_args=())
        operator.register_fake(_without_launches(function))

        @functools.wraps(function)
        def call(*given: Any) -> Any:
            return (operator if torch.compiler.is_compiling() else function)(*given)

        return call  # type: ignore[return-value]

    return decorated


def _without_launches(function: Callable[..., Any]) -> Callable[..., Any]:
    def run(*given: Any) -> Any:
        token = NO_LAUNCH.set(True)
        try:
            return function(*given)
        finally:
            NO_LAUNCH.reset(token)

    return run
