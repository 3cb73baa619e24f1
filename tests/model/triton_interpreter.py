"""Triton's interpreter with a GPU's bf16, for child processes with TRITON_INTERPRET=1.

    mend()      before the first launch, and before kernels are imported that tune themselves

The interpreter of Triton 3.6 to 3.9 does every operation of a kernel in numpy, which has no bf16.
It holds such numbers as uint16 and computes with their bits: sums, products, comparisons, negations
and `tl.dot` are wrong without an error, a cast from fp32 cuts off where a GPU rounds, `tl.full`
fails. Upstream doesn't support it (triton #4972; #10945 and #11585 were declined).

Here a bf16 number is an fp32 number that bf16 can hold, and whatever makes one rounds it once, to
the nearest, of two to the even one. So does a GPU: its bf16 instructions round once, and rounding a
sum or product twice, in fp32 first, comes to the same (24 >= 2 * 8 + 2 bits). `tl.dot` of bf16 is a
sum of exact products in fp32; the order of its sum is another than on tensor cores. What a GPU does
in an order of its own is refused, not guessed: reductions and atomics of bf16.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import triton
import triton.language as tl
from triton.backends.nvidia.compiler import min_dot_size
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

BF16 = tl.bfloat16
patch, patch_tensor = interpreter._patch_lang, interpreter._patch_lang_tensor
checked: Any = TensorHandle.__post_init__
check_tensor: Any = interpreter.ReduceScanOpInterface.check_tensor
numpy_dtype, fits = interpreter._get_np_dtype, interpreter._validate_np_data_size
Numbers = Any  # of numpy


def mend(tf32: bool = False) -> None:
    """Changes the interpreter of this process, for good: it never lets go of a builder it has used.

    Args:
        tf32: products of fp32 read ten bits of a fraction, unless a kernel asks for all of them.
    """
    assert triton.knobs.runtime.interpret, "TRITON_INTERPRET=1, before triton is imported"
    triton.autotune = first_configuration
    TensorHandle.__post_init__ = rounded
    interpreter.ReduceScanOpInterface.check_tensor = no_bf16
    interpreter._patch_lang, interpreter._patch_lang_tensor = patch_once, countable
    interpreter._get_np_dtype = dtype_of
    interpreter._validate_np_data_size = lambda data, kind: narrow(kind) or fits(data, kind)
    interpreter.InterpreterBuilder = TensorCores if tf32 else Builder
    interpreter.interpreter_builder = interpreter.InterpreterBuilder()
    interpreter.interpreter_semantic = TritonSemantic(interpreter.interpreter_builder)


def patch_once(fn: Any) -> Any:
    """Patch the language for a kernel; a function that it calls would do all of it again."""
    if any(tl.core.is_builtin(language.load) for language in languages(fn)):
        return patch(fn)
    return interpreter._LangPatchScope()


@cache
def languages(fn: Any) -> list[Any]:
    return [module for module in fn.__globals__.values() if module is tl or module is tl.core]


def dtype_of(kind: Any) -> Any:
    """Return numpy's dtype of numbers or pointers; the interpreter makes a table at each call."""
    pointer = isinstance(kind.scalar, tl.pointer_type)
    return numpy_dtype(kind) if pointer else number_dtype(kind.scalar)


@cache
def number_dtype(scalar: Any) -> Any:
    return np.dtype(np.float32) if narrow(scalar) else numpy_dtype(scalar)


def countable(tensor: Any, scope: Any) -> None:
    """Triton 3.6 takes int() of an array of one number, which numpy 2.4 refuses (triton #9171,
    mended by #9172)."""
    patch_tensor(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())


def first_configuration(configs: Any, **_: Any) -> Callable[[Any], Any]:
    """Instead of the autotuner, which measures on a GPU."""

    class Fixed:
        def __init__(self, kernel: Any) -> None:
            self.kernel, self.constants = kernel, configs[0].kwargs

        def __getitem__(self, grid: Any) -> Callable[..., None]:
            grid = grid(self.constants) if callable(grid) else grid
            return lambda *args, **kwargs: self.kernel[grid](*args, **self.constants, **kwargs)

    return Fixed


def narrow(kind: Any) -> bool:
    """Of numbers or blocks of numbers; a pointer to bf16 is none."""
    return kind.scalar.name == BF16.name


def nearest(x: Numbers) -> Numbers:
    """fp32 rounded to bf16, still as fp32; a NaN becomes the one without other bits."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    up = bits + np.uint32(0x7FFF) + ((bits >> 16) & 1)
    return np.where(np.isnan(x), np.float32("nan"), (up & np.uint32(0xFFFF0000)).view(np.float32))


def to_bits(x: Numbers) -> Numbers:
    return (np.ascontiguousarray(x, np.float32).view(np.uint32) >> 16).astype(np.uint16)


def from_bits(bits: Numbers) -> Numbers:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def rounded(handle: TensorHandle) -> None:
    """After every operation; the results of comparisons keep the dtype of what was compared."""
    checked(handle)
    if narrow(handle.dtype) and handle.data.dtype != bool:
        handle.data = nearest(handle.data)


def truth(mask: Any) -> TensorHandle:
    """Booleans of a mask: Triton 3.9 takes nothing else, and makes bytes of a splat of one.

    The mask of a block pointer or a descriptor is a plain array.
    """
    numbers = mask if isinstance(mask, np.ndarray) else mask.data
    return TensorHandle(numbers.astype(bool), tl.int1)


def no_bf16(self: Any, given: Any) -> None:
    check_tensor(self, given)
    if any(narrow(x.dtype) for x in given):
        raise NotImplementedError("a reduction of bf16")


class Builder(InterpreterBuilder):
    """Operations that see bits, or numbers on their way to others."""

    def __init__(self) -> None:
        super().__init__()
        self.codegen_fns["min_dot_size"] = min_dot_size(None)
        # Asserts behind each operation on integers: a GPU has them in kernels to be debugged alone.
        self.options = replace(self.options, sanitize_overflow=False)

    def get_bf16(self, value: float) -> TensorHandle:
        return TensorHandle(np.array([value], np.float32), BF16)

    def create_masked_load(
        self, ptrs: Any, mask: Any, other: Any, *how: Any, **more: Any
    ) -> TensorHandle:
        mask = truth(mask)
        if ptrs.get_element_ty() != BF16:
            return super().create_masked_load(ptrs, mask, other, *how, **more)
        bits = np.zeros(ptrs.data.shape, np.uint16) if other is None else to_bits(other.data)
        found = interpreter._interpreter.load(ptrs.data, mask.data, bits, np.dtype(np.uint16))
        return TensorHandle(from_bits(found), BF16)

    def create_masked_store(self, ptrs: Any, value: Any, mask: Any, *how: Any) -> Any:
        kind = ptrs.get_element_ty()
        assert value.dtype.scalar == kind, f"{value.dtype} into memory of {kind}"
        bits = to_bits(value.data) if kind == BF16 else value.data
        return interpreter._interpreter.store(ptrs.data, bits, truth(mask).data)

    def cast_impl(self, src: Any, dst_type: Any) -> TensorHandle:
        return TensorHandle(src.data.astype(interpreter._get_np_dtype(dst_type)), dst_type.scalar)

    def create_fp_to_fp(self, src: Any, dst_type: Any, rounding: Any) -> TensorHandle:
        if narrow(src.dtype) or narrow(dst_type):
            raise NotImplementedError("bf16 to or from fp8, or rounded another way")
        return super().create_fp_to_fp(src, dst_type, rounding)

    def create_bitcast(self, src: Any, dst_type: Any) -> TensorHandle:
        if narrow(src.dtype) and not narrow(dst_type):
            src = TensorHandle(to_bits(src.data), tl.uint16)
        if narrow(dst_type) and not narrow(src.dtype):
            return TensorHandle(from_bits(src.data.view(np.uint16)), BF16)
        return super().create_bitcast(src, dst_type)

    def create_fabs(self, arg: Any) -> TensorHandle:
        return self.unary_op(arg, np.abs) if narrow(arg.dtype) else super().create_fabs(arg)

    def create_atomic_rmw(self, op: Any, ptr: Any, value: Any, *how: Any) -> TensorHandle:
        if narrow(value.dtype):
            raise NotImplementedError("an atomic operation on bf16")
        return super().create_atomic_rmw(op, ptr, value, *how)


class TensorCores(Builder):
    """Products of fp32 as tensor cores do them where a kernel allows it, which is the default."""

    def create_dot(self, a: Any, b: Any, acc: Any, precision: Any, most: Any) -> TensorHandle:
        if precision == interpreter._ir.INPUT_PRECISION.TF32:
            a, b = (TensorHandle(ten_bits(x.data), x.dtype) for x in (a, b))
        return super().create_dot(a, b, acc, precision, most)


def ten_bits(x: Numbers) -> Numbers:
    """Of an fp32 number's 23, the others cut off: TF32 as `mma` reads it; no matter to bf16."""
    if x.dtype != np.float32:
        return x
    return (np.ascontiguousarray(x).view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32)


# For kernels that call PTX's approximations, which are within 2^-10 of these.
@triton.jit
def cos(x):
    return tl.cos(x)


@triton.jit
def sin(x):
    return tl.sin(x)


@triton.jit
def tanh(x):
    return 2 * tl.sigmoid(2 * x) - 1


@triton.jit
def sech2(x):
    return 4 * tl.sigmoid(2 * x) * tl.sigmoid(-2 * x)
