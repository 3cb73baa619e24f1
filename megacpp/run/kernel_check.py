"""Comparison of each operation's backends on this machine with the reference.

The mixer of a block (or the head) computes a short row of packed documents by the backend and by
the reference, in the dtype of the run; output and gradients are compared. Values that decide the
routes of tokens are the same in both. Errors are relative, |x - y| / |y| over all numbers together.

Legend: B rows, T tokens, D model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from megacpp.config.arguments import replace_keys
from megacpp.config.presets import tiny
from megacpp.config.schema import Config, ModelConfig
from megacpp.errors import config_error
from megacpp.kernels.backend import PLAIN_KERNELS, set_kernels
from megacpp.kernels.chosen import host_of
from megacpp.kernels.operation import Backend
from megacpp.kernels.selection import OPERATIONS, BackendSelection
from megacpp.model.block import Block
from megacpp.model.documents import Documents
from megacpp.model.head import LanguageModelHead
from megacpp.model.init import initialise
from megacpp.model.norm import RMSNorm
from megacpp.model.pattern import block_letters
from megacpp.model.precision import compute_dtype

SHORT = (1, 256)  # rows and tokens: two chunks of most scans, a few documents
# Errors that rounding explains between two orders of the same sums. In narrow dtypes operands and
# results are rounded to 2^-8 (2^-11) of themselves, about 64 times on the way from an input to an
# output or back, independently: the error grows by the square root of 64.
BOUNDS = {
    torch.bfloat16: 8 * 2**-8,
    torch.float16: 8 * 2**-11,
    torch.float32: 1e-5,
    torch.float64: 1e-12,
}


@dataclass(frozen=True)
class Agreement:
    """Error of a backend against the reference, or the reason why it can't run.

    Attributes:
        unsupported: reason why it can't run here, or None.
        output_error: relative error of the output.
        gradient_error: relative error of all gradients.
        bound: largest error that passes.
    """

    operation: str
    backend: str
    unsupported: str | None
    output_error: float = math.nan
    gradient_error: float = math.nan
    bound: float = math.nan

    @property
    def holds(self) -> bool | None:
        """Whether both errors are within the bound (NaN never is); None if it can't run here."""
        if self.unsupported is not None:
            return None
        return self.output_error <= self.bound and self.gradient_error <= self.bound

    @property
    def words(self) -> str:
        """Text such as `off by 2e-07 (output) and 3e-07 (gradients), bound 1e-05`."""
        if self.unsupported is not None:
            return self.unsupported
        return (
            f"off by {self.output_error:.0e} (output) and {self.gradient_error:.0e} (gradients), "
            f"bound {self.bound:.0e}"
        )


@dataclass(frozen=True)
class Case:
    """Module that performs one operation, and the function that runs it."""

    module: nn.Module
    run: Callable[[Tensor, Documents], Tensor]
    dim: int


def variants() -> Iterator[tuple[str, str, Config]]:
    """Yield operation, special feature (empty for the default preset), and configuration."""
    config = tiny()
    for name in OPERATIONS:
        yield name, "", config
    for name, operation in OPERATIONS.items():
        for special, settings in operation.special.items():
            yield name, special, replace_keys(config, dict(settings))


def check_backends(
    device: torch.device, shape: tuple[int, int] = SHORT
) -> Iterator[tuple[str, Agreement]]:
    """Yield, for every variant, each backend's agreement or the reason why it can't run."""
    for name, special, config in variants():
        host = host_of(config, device)
        for backend in OPERATIONS[name].backends:
            unsupported = backend.unsupported_reason(config, host)
            if unsupported is not None:
                yield special, Agreement(name, backend.name, unsupported)
            elif backend.name != "reference":
                yield special, agreement(name, backend, config, device, shape)


def verify_kernels(
    config: Config,
    device: torch.device,
    found: Mapping[str, BackendSelection],
    shape: tuple[int, int] = SHORT,
) -> list[str]:
    """Compare the selected library and Triton kernels with the reference before training.

    An untested GPU or a defective release would otherwise show only as a slightly wrong loss. One
    layer of the configured model is compared, forward and backward.

    Args:
        config: configuration of the run.
        device: device of this rank.
        found: selected backends.
        shape: rows and tokens of the comparison.

    Returns:
        A header line for each kernel that was compared.

    Raises:
        ConfigError: a kernel doesn't agree with the reference.
    """
    lines = []
    for name, choice in found.items():
        if choice.backend in ("torch", "reference"):
            continue
        one = agreement(name, OPERATIONS[name].backend(choice.backend), config, device, shape)
        if not one.holds:
            raise config_error(
                f"kernels.{name}",
                choice.backend,
                f"doesn't agree with its definition on this device ({one.words})",
                f"use kernels.{name}=torch, and report it with the output of megacpp doctor",
            )
        lines.append(f"{name}: {choice.backend} agrees with its definition here, {one.words}")
    if lines and device.type == "cuda":
        torch.cuda.empty_cache()
    return lines


def agreement(
    name: str, backend: Backend, config: Config, device: torch.device, shape: tuple[int, int]
) -> Agreement:
    """Compare one backend with the reference.

    Args:
        name: operation.
        backend: backend to compare.
        config: configuration of the run.
        device: device of this rank.
        shape: rows and tokens of the comparison.
    """
    dtype = compute_dtype(config.precision, device)
    case = case_of(name, config.model, device)
    want = results(case, name, "reference", shape, dtype, device)
    got = results(case, name, backend.name, shape, dtype, device)
    errors = off_by(got[:1], want[:1]), off_by(got[1:], want[1:])
    return Agreement(name, backend.name, None, *errors, BOUNDS[dtype])


def case_of(name: str, model: ModelConfig, device: torch.device, whole: bool = False) -> Case:
    """Return the mixer of a block (or the head, or a norm) with the weights of a fresh run.

    Args:
        name: operation.
        model: settings of the model.
        device: device of the module.
        whole: the block around the mixer, too.
    """
    letters = block_letters(model.pattern, model.depth)
    of = OPERATIONS[name].letters
    letter = next((each for each in of if each in letters), of[:1])  # one kind stands for all
    with torch.device("meta"):
        if name == "rms_norm":
            module = RMSNorm(model.dim, model.norm_eps)
        else:
            module = Block(letter, model) if letter else LanguageModelHead(model)
    module.to_empty(device=device)
    initialise(module, module.init_rules(), seed=0)
    if isinstance(module, Block) and not whole:  # the residual would hide the mixer's output
        module = module.mixer
        if hasattr(module, "D"):  # and the skip connection that of the recurrence
            nn.init.constant_(module.D, 0.01)
    if isinstance(module, RMSNorm):
        return Case(module, lambda x_BTD, docs: module(x_BTD), model.dim)
    if letter:
        return Case(module, module, model.dim)

    def loss(x_BTD: Tensor, docs: Documents) -> Tensor:
        labels_BT = (docs.positions_BT * 31 + docs.ids_BT) % model.vocab_size
        return module(x_BTD, labels_BT).loss_sum / labels_BT.numel()

    return Case(module, loss, model.dim)


def results(
    case: Case,
    name: str,
    backend: str,
    shape: tuple[int, int],
    dtype: torch.dtype,
    device: torch.device,
) -> list[Tensor]:
    """Return the output, the gradient of the input and the gradients of the weights.

    Args:
        case: module to run.
        name: operation.
        backend: name of the backend.
        shape: rows and tokens.
        dtype: compute dtype.
        device: device of the module.
    """
    set_kernels(case.module, replace(PLAIN_KERNELS, **{name: backend}))
    draw = torch.Generator().manual_seed(0)
    made = (torch.randn(*shape, case.dim, generator=draw) for _ in range(2))
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    x_BTD, way_BTD = (x.to(device, wide) for x in made)
    docs = packed_documents(*shape).to(device)
    with torch.autocast(device.type, dtype, enabled=dtype.itemsize < 4):
        y = case.run(x_BTD.requires_grad_(), docs)
    inputs = [x_BTD, *(p for p in case.module.parameters() if p.requires_grad)]
    way = way_BTD.to(y.dtype) if y.ndim else None
    found = torch.autograd.grad(y, inputs, way, allow_unused=True)
    return [y.detach(), *(g for g in found if g is not None)]


def packed_documents(rows: int, tokens: int, each: int = 5) -> Documents:
    """Return documents of uneven lengths, about `each` of them in a row, different in each row."""
    t_T = torch.arange(tokens)
    return Documents.from_ids(torch.stack([(t_T * each + 7 * b) // tokens for b in range(rows)]))


def off_by(got: list[Tensor], want: list[Tensor]) -> float:
    """Return the norm of all differences over the norm of all reference values."""
    assert len(got) == len(want) > 0
    pairs = list(zip(got, want, strict=True))
    apart = math.hypot(*((a.double() - b.double()).norm().item() for a, b in pairs))
    return apart / max(math.hypot(*(b.double().norm().item() for b in want)), 1e-300)
