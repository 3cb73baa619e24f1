"""TileLang kernels on a CPU: the traced tensor program, computed tile by tile with torch.

    Interpreted(kernel.get_tir(...))(tensors...)

A kernel is taken before it is lowered: its loads, stores, casts and tile operators are computed in
the dtypes that it names, so bf16 is rounded where the kernel rounds it, and products are summed in
fp32. Reads of an argument outside of it give zero and writes there nothing, as the guards do that
TileLang puts around them; elsewhere they are errors. What a block hasn't written is NaN. Whatever
isn't known here is an error, never passed over.

Not seen from here: how threads share a tile (layouts, barriers), approximations of fast math, the
order of a sum, TF32.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from tests.model.tilelang_expressions import (
    DTYPES,
    Expr,
    Expressions,
    Frame,
    both,
    kind,
    negated,
    offset,
    sizes,
    unknown,
)

Step = Callable[[Frame], None]

SERIAL, PARALLEL, UNROLLED = 0, 1, 3  # kinds of a loop


class Interpreted(Expressions):
    """A kernel as a function of its tensors, which it writes in place."""

    def __init__(self, kernel: Any, instead: dict[str, torch.dtype] | None = None) -> None:
        """`instead`: dtypes to compute in, in place of those that the kernel names."""
        self.arguments = [kernel.buffer_map[handle] for handle in kernel.params]
        super().__init__({b.data for b in self.arguments}, DTYPES | (instead or {}))
        with _disable_current_modes():  # who counts what Python allocates doesn't see inside
            self.step = self.statement(kernel.body)

    def __call__(self, *tensors: Tensor | None) -> None:
        frame = Frame()
        assert len(tensors) == len(self.arguments), f"{len(tensors)} arguments"
        for buffer, tensor in zip(self.arguments, tensors, strict=True):
            if tensor is not None:  # an argument that the kernel never touches may be missing
                self.bind(frame, buffer, tensor)
        with _disable_current_modes():
            self.step(frame)

    def bind(self, frame: Frame, buffer: Any, tensor: Tensor) -> None:
        """The caller's side of the contract: dtype, sizes and dense rows, as the host code asks."""
        assert tensor.dtype == self.dtype(buffer), f"{buffer.name}: {tensor.dtype}"
        assert tensor.is_contiguous() and tensor.ndim == len(buffer.shape), buffer.name
        for size, extent in zip(tensor.shape, buffer.shape, strict=True):
            of_extent = self.expr(extent)
            for name in unknown(extent, frame):  # one, added once: as the host code solves it
                frame.values[name] = 0
                frame.values[name] = size - of_extent(frame)
            if of_extent(frame) != size:
                raise ValueError(f"{buffer.name}: {tuple(tensor.shape)}, one is not {extent}")
        frame.memory[buffer.data] = tensor.detach()

    # Statements

    def statement(self, s: Any) -> Step:
        return getattr(self, f"_{kind(s)}", self._unknown)(s)

    def _SeqStmt(self, s: Any) -> Step:
        steps = [self.statement(part) for part in s.seq]

        def run(frame: Frame) -> None:
            for step in steps:
                step(frame)

        return run

    def _AttrStmt(self, s: Any) -> Step:
        """The grid is a loop over its blocks; threads of one are not told apart."""
        body = self.statement(s.body)
        if s.attr_key == "threadblock_swizzle_pattern":  # the order of blocks
            return body
        if s.attr_key != "thread_extent":
            raise NotImplementedError(s.attr_key)
        if s.node.thread_tag.startswith("threadIdx."):
            return body
        return self._loop(s.node.var, self.expr(s.value), body)

    def _For(self, s: Any) -> Step:
        assert int(s.min) == 0 and s.thread_binding is None, s.loop_var
        body, extent = self.statement(s.body), self.expr(s.extent)
        if s.kind in (SERIAL, UNROLLED):
            return self._loop(s.loop_var, extent, body)
        if s.kind != PARALLEL:
            raise NotImplementedError(f"loop of kind {s.kind}")

        def run(frame: Frame) -> None:
            n, outer, active = extent(frame), frame.lanes, frame.active
            frame.values[s.loop_var] = torch.arange(n).view(n, *(1 for _ in outer))
            frame.lanes = (n, *outer)
            body(frame)
            frame.lanes, frame.active = outer, active
            del frame.values[s.loop_var]

        return run

    def _loop(self, var: Any, extent: Expr, body: Step) -> Step:
        def run(frame: Frame) -> None:
            for i in range(extent(frame)):
                frame.values[var] = i
                body(frame)
            frame.values.pop(var, None)

        return run

    def _BlockRealize(self, s: Any) -> Step:
        block = s.block
        assert not block.iter_vars and not block.match_buffers and block.init is None
        assert not set(block.annotations) - {"layout_map"}, block.annotations
        body = self.statement(block.body)

        def run(frame: Frame) -> None:
            for b in block.alloc_buffers:
                dtype = self.dtype(b)
                empty = math.nan if dtype.is_floating_point else torch.iinfo(dtype).min
                frame.memory[b.data] = torch.full(sizes(b), empty, dtype=dtype)
            body(frame)

        return run

    def _LetStmt(self, s: Any) -> Step:
        value, body = self.expr(s.value), self.statement(s.body)

        def run(frame: Frame) -> None:
            frame.values[s.var] = value(frame)
            body(frame)
            del frame.values[s.var]

        return run

    def _IfThenElse(self, s: Any) -> Step:
        condition, then = self.expr(s.condition), self.statement(s.then_case)
        other = self.statement(s.else_case) if s.else_case is not None else None

        def run(frame: Frame) -> None:
            truth, active = condition(frame), frame.active
            for branch, chosen in ((then, truth), (other, negated(truth))):
                if branch is not None and (isinstance(chosen, Tensor) or chosen):
                    frame.active = both(active, chosen)
                    branch(frame)
            frame.active = active

        return run

    def _BufferStore(self, s: Any) -> Step:
        assert s.predicate is None
        write = self.writer(s.buffer, [self.expr(i) for i in s.indices])
        value = self.expr(s.value)
        return lambda frame: write(frame, value(frame))

    def _Evaluate(self, s: Any) -> Step:
        name = s.value.op.name
        if name == "tl.no_set_max_nreg":  # how a kernel is compiled
            return lambda frame: None
        operations = {
            "tl.tileop.copy": self._copy,
            "tl.tileop.fill": self._fill,
            "tl.tileop.gemm_py": self._gemm,
            "tl.tileop.reduce": self._reduce,
        }
        if name not in operations:
            self._unknown(s.value)
        return operations[name](s.value.args)

    # Tile operators

    def region(self, region: Any) -> tuple[Any, list[Expr], list[int]]:
        """A box of a buffer: the buffer, the indices of its elements, its extents."""
        if kind(region) == "Call":
            assert region.op.name == "tl.tileop.region", region
            corner, extents = region.args[0], [int(n) for n in region.args[2:]]
            starts = list(corner.indices)
        else:
            assert kind(region) == "BufferLoad", region
            corner, starts, extents = region, [], []
            for i in region.indices:
                ramp = kind(i) == "Ramp"
                assert not ramp or int(i.stride) == 1, region
                starts.append(i.base if ramp else i)
                extents.append(int(i.lanes) if ramp else 1)
        assert len(starts) == len(extents) == len(corner.buffer.shape), region
        indices = []
        for k, (start, n) in enumerate(zip(starts, extents, strict=True)):
            steps = torch.arange(n).view(*(n if i == k else 1 for i in range(len(extents))))
            indices.append(partial(offset, self.expr(start), steps))
        return corner.buffer, indices, extents

    def box(self, region: Any) -> tuple[list[int], Expr, Callable[[Frame, Tensor], None]]:
        """Of a region: its sizes without those of 1, how it is read and how it is written."""
        buffer, indices, extents = self.region(region)
        sizes = [n for n in extents if n > 1]
        read, write = self.reader(buffer, indices), self.writer(buffer, indices)

        def get(frame: Frame) -> Tensor:
            assert not frame.lanes, f"{buffer.name}: a tile operator in a parallel loop"
            return read(frame).view(sizes)

        def put(frame: Frame, tile: Tensor) -> None:
            assert not frame.lanes, f"{buffer.name}: a tile operator in a parallel loop"
            write(frame, tile.to(self.dtype(buffer)).view(extents))

        return sizes, get, put

    def _copy(self, args: Sequence[Any]) -> Step:
        (from_sizes, get, _), (to_sizes, _, put) = self.box(args[0]), self.box(args[1])
        assert len(args) == 2 and from_sizes == to_sizes, args
        return lambda frame: put(frame, get(frame))

    def _fill(self, args: Sequence[Any]) -> Step:
        sizes, _, put = self.box(args[0])
        value = self.expr(args[1])
        return lambda frame: put(frame, torch.full(sizes, value(frame), dtype=torch.float32))

    def _gemm(self, args: Sequence[Any]) -> Step:
        boxes = [self.box(a) for a in args[:3]]
        turned = [bool(a) for a in args[3:5]]
        M, N, K = (int(a) for a in args[5:8])
        clear = bool(args[9])
        shapes = [[K, M] if turned[0] else [M, K], [N, K] if turned[1] else [K, N], [M, N]]
        assert [sizes for sizes, _, _ in boxes] == shapes, args

        def run(frame: Frame) -> None:
            a_MK, b_KN = (
                (x.T if t else x).float()
                for x, t in zip((get(frame) for _, get, _ in boxes[:2]), turned, strict=True)
            )
            _, get, put = boxes[2]
            product_MN = a_MK @ b_KN
            put(frame, product_MN if clear else get(frame) + product_MN)

        return run

    def _reduce(self, args: Sequence[Any]) -> Step:
        """In the dtype of the result, as TileLang does."""
        (sizes, get, _), (reduced, old, put) = self.box(args[0]), self.box(args[1])
        how, dim, clear = args[2].value, int(args[3]), bool(args[4])
        dtype = self.dtype(args[1].buffer)
        want = sizes[:dim] + sizes[dim + 1 :]
        assert how == "sum" and [n for n in want if n > 1] == reduced, args

        def run(frame: Frame) -> None:
            total = get(frame).to(dtype).sum(dim).view(reduced)
            put(frame, total if clear else old(frame) + total)

        return run
