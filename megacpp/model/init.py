"""Initial values as a pure function of (seed, parameter name, global index).

Each element hashes its own global index, so any shard on any mesh computes exactly its slice of
the same tensor, in any order, without a generator. Values are computed in fp64 and cast once.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

_GOLDEN = -7046029254386353131  # 0x9E3779B97F4A7C15 as int64: the splitmix64 increment
_MIX1 = -4658895280553007687  # 0xBF58476D1CE4E5B9
_MIX2 = -7723592293110705685  # 0x94D049BB133111EB


class Rule(Protocol):
    """Initial values of one tensor."""

    def __call__(self, index: Tensor, shape: tuple[int, ...], key: int) -> Tensor:
        """Return fp64 values for flat global indices of a tensor of `shape`, hashed with `key`."""
        ...


@dataclass(frozen=True)
class Constant:
    """Equal elements, `value`."""

    value: float

    def __call__(self, index: Tensor, shape: tuple[int, ...], key: int) -> Tensor:
        """Return the value for every index."""
        return torch.full(index.shape, self.value, dtype=torch.float64, device=index.device)


@dataclass(frozen=True)
class Uniform:
    """Uniform values in [low, high), independent of each other."""

    low: float
    high: float

    def __call__(self, index: Tensor, shape: tuple[int, ...], key: int) -> Tensor:
        """Return values of the shape of `index`."""
        return self.low + (self.high - self.low) * uniform(index, key)


@dataclass(frozen=True)
class Normal:
    """Normal values of mean 0, independent of each other, by the inverse distribution function."""

    std: float

    def __call__(self, index: Tensor, shape: tuple[int, ...], key: int) -> Tensor:
        """Return values of the shape of `index`."""
        return self.std * math.sqrt(2.0) * torch.erfinv(2.0 * uniform(index, key) - 1.0)


@dataclass(frozen=True)
class LogUniform:
    """Logarithm of a uniform value in [low, high): decay rates A (Mamba, M2RNN `A_log`)."""

    low: float
    high: float

    def __call__(self, index: Tensor, shape: tuple[int, ...], key: int) -> Tensor:
        """Return values of the shape of `index`."""
        return torch.log(self.low + (self.high - self.low) * uniform(index, key))


@dataclass(frozen=True)
class TimeStepBias:
    """Inverse softplus of a log-uniform step in [low, high], at least `floor` (Mamba)."""

    low: float
    high: float
    floor: float

    def __call__(self, index: Tensor, shape: tuple[int, ...], key: int) -> Tensor:
        """Return values of the shape of `index`."""
        span = math.log(self.high) - math.log(self.low)
        dt = torch.exp(math.log(self.low) + span * uniform(index, key)).clamp(min=self.floor)
        return dt + torch.log(-torch.expm1(-dt))


@dataclass(frozen=True)
class Identity:
    """Identity matrices over the last two dims."""

    def __call__(self, index: Tensor, shape: tuple[int, ...], key: int) -> Tensor:
        """Return 1 on the diagonal of the last two dims of `shape`, else 0."""
        rows, cols = shape[-2:]
        within = index % (rows * cols)
        return (within // cols == within % cols).double()


def tensor_key(seed: int, name: str) -> int:
    """Return the 64-bit key of one tensor: SHA-256 of seed and name, as a signed integer."""
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    return int.from_bytes(digest[:8], "little", signed=True)


def uniform(index: Tensor, key: int) -> Tensor:
    """Return fp64 uniform values in (0, 1), one per global index: splitmix64 (Steele et al. 2014).

    Values have 52 bits, so that adding a half is exact: with 53 the largest value would round to 1.

    Args:
        index: int64 global indices `[...]`, any shape.
        key: hash key of the tensor.
    """
    z = index * _GOLDEN + key  # int64 wraps, as the algorithm wants
    z = (z ^ _shift(z, 30)) * _MIX1
    z = (z ^ _shift(z, 27)) * _MIX2
    z = z ^ _shift(z, 31)
    return (_shift(z, 12).double() + 0.5) * 2.0**-52


def _shift(z: Tensor, bits: int) -> Tensor:
    """Logical right shift (torch's >> on int64 is arithmetic)."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)


@dataclass(frozen=True)
class Slice:
    """Part of a tensor that this process stores."""

    local: Tensor
    shape: tuple[int, ...]  # of the whole tensor
    offset: tuple[int, ...]  # of the part, per dim


def whole(t: Tensor) -> Slice:
    """Return the slice of an unsharded tensor, all of it.

    Args:
        t: any shape.
    """
    return Slice(t, tuple(t.shape), (0,) * t.dim())


@torch.no_grad()
def initialise(
    model: nn.Module, rules: Mapping[str, Rule], seed: int, part: Callable[[Tensor], Slice] = whole
) -> None:
    """Fill every parameter and buffer of a materialised model by its rule.

    Args:
        model: on its final device.
        rules: exactly one rule per parameter and buffer name.
        seed: of the run.
        part: returns the part that this process stores (parallel/fsdp.py passes one for DTensors).

    Raises:
        AssertionError: a tensor without a rule or a rule without a tensor.
    """
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    missing, unused = sorted(tensors.keys() - rules.keys()), sorted(rules.keys() - tensors.keys())
    assert not missing and not unused, f"no init rule for {missing}; no tensor for {unused}"
    for name, tensor in tensors.items():
        _fill(part(tensor), rules[name], tensor_key(seed, name))


def _fill(piece: Slice, rule: Rule, key: int, most: int = 0) -> None:
    """Write the values of one slice, at most `most` elements at a time (0: chosen by device).

    On a CPU a pass stays in the cache, which is five times faster; a GPU wants fewer launches.
    """
    local, offset = piece.local, piece.offset
    most = most or (1 << 16 if local.device.type == "cpu" else 1 << 22)
    if local.numel() <= most:
        index = _global_index(local.shape, offset, piece.shape, local.device)
        local.copy_(rule(index, piece.shape, key))
        return
    dim = next(d for d, size in enumerate(local.shape) if size > 1)
    rows = max(1, most * local.shape[dim] // local.numel())
    for first, part in zip(range(0, local.shape[dim], rows), local.split(rows, dim), strict=True):
        start = (*offset[:dim], offset[dim] + first, *offset[dim + 1 :])
        _fill(Slice(part, piece.shape, start), rule, key, most)


def _global_index(
    shape: Sequence[int], start: Sequence[int], whole_shape: Sequence[int], device: torch.device
) -> Tensor:
    """Flat indices, in the whole tensor, of a box of `shape` at `start`."""
    index, stride = torch.zeros((), dtype=torch.int64, device=device), 1
    for dim in reversed(range(len(shape))):
        along = (start[dim] + torch.arange(shape[dim], device=device)) * stride
        index = index + along.view(-1, *(1,) * (len(shape) - 1 - dim))
        stride *= whole_shape[dim]
    return index.expand(tuple(shape))
