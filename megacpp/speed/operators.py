"""Seconds of operators on one GPU: products, attention, memory-bound work, recurrences.

    seconds(Product(8192, 4096, 4096), gpu("H100"), Rates())

A product is counted in output tiles. Its time is the larger of arithmetic (peak x fraction reached
x filled waves x fill of the K loop) and memory traffic. Memory-bound work moves its bytes at the
fraction of the memory's peak that is reached. No kernel is shorter than `LEAST_US`.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Literal, NamedTuple

from megacpp.speed.hardware import GpuSpec, Rates, attention_rates, product_table

Where = Literal["TN", "NN", "NT"]
# Rows and columns of an output tile, and its speed against the largest one.
TILES = ((256, 128, 1.0), (128, 256, 1.0), (128, 128, 0.92), (64, 128, 0.7), (64, 64, 0.5))
# Fits to the A100 table of hardware.json (81 products, mean error 2.8 %): elements of K that a
# tile's start and end cost, and the part of a last, partly filled wave that split tiles fill.
K_FILL, WAVE_SHARED = 133, 0.45
# Peak of fp32 products without TF32 against that of bf16 (vendor data sheets: 19.5, 67 and 75
# TFLOP/s).
FP32 = {"A100": 1 / 16, "H100": 1 / 15, "B200": 1 / 30}
TABLE_REACH = 1.3  # a measured product stands for those whose sizes differ by less
# Waves of 128-query tiles at which attention reaches half its speed, forward and backward.
ATTENTION_WAVES = (1.4, 0.6)
B200_WAVES = (3.0, 0.5)
ATTENTION_ROW = 300  # keys at which a kernel reaches half its speed on a row
LEAST_US = 3.0  # of a kernel
# Of each product of a group that is a kernel of its own: Transformer Engine's group of 8 x 4096
# rows takes 164 us on an H100, and that of 16 x 2048 rows 186 us (NVIDIA/TransformerEngine#2045).
APART_US = 2.8


class Product(NamedTuple):
    """Matrix products `[m, k] x [k, n]`, `count` of them in one kernel.

    Attributes:
        m: rows of the output.
        n: columns of the output.
        k: summed dim.
        count: products of that size in one launch (experts, heads).
        layout: TN forward, NN gradient of the input, NT gradient of the weight.
        dtype: of the operands; an fp32 product runs without TF32.
        rounds: an FP8 product also rounds its operands.
        added: the output is added to an fp32 gradient.
        what: name of the part that it belongs to.
        apart: each product is a kernel of its own, on one of a few streams.
    """

    m: int
    n: int
    k: int
    count: int = 1
    layout: Where = "TN"
    dtype: str = "bf16"
    rounds: bool = True
    added: bool = False
    what: str = "products"
    apart: bool = False

    @property
    def flops(self) -> float:
        """Two for each multiply-add."""
        return 2.0 * self.m * self.n * self.k * self.count


class Attend(NamedTuple):
    """Attention of a fused kernel.

    Attributes:
        heads: rows times query heads of this rank.
        queries: tokens of a row that this rank asks for.
        keys: mean number of keys that a query attends to.
        width: dims of a query and of a value, summed.
        kernel: a name of hardware.json's `attention`.
        backward: the backward pass, which multiplies 2.5 times as much.
    """

    heads: int
    queries: int
    keys: float
    width: int = 256
    kernel: str = "flash2"
    backward: bool = False

    @property
    def flops(self) -> float:
        """Two for each multiply-add of a key that is attended to."""
        once = 2.0 * self.heads * self.queries * self.keys * self.width
        return once * (2.5 if self.backward else 1.0)


class Passes(NamedTuple):
    """Memory-bound work.

    Attributes:
        bytes: read and written.
        launches: kernels that share them.
        what: name of the part that it belongs to.
    """

    bytes: float
    launches: int = 1
    what: str = "memory-bound"


class SerialWork(NamedTuple):
    """Steps that follow one another, each with its own products.

    Attributes:
        steps: serial depth.
        step_us: time of a step that nothing hides.
        bytes: read and written over all steps.
        flops: of all steps, at the speed of products.
    """

    steps: float
    step_us: float
    bytes: float
    flops: float = 0.0


Operator = Product | Attend | Passes | SerialWork


@lru_cache(maxsize=1 << 16)
def seconds(op: Operator, gpu: GpuSpec, rates: Rates) -> float:
    """Return the time of an operator on a GPU, in seconds."""
    if isinstance(op, Product):
        return product_seconds(op, gpu, rates)
    if isinstance(op, Attend):
        return attention_seconds(op, gpu, rates)
    if isinstance(op, Passes):
        return max(memory_seconds(op.bytes, gpu, rates), op.launches * LEAST_US * 1e-6)
    arithmetic = op.flops / (gpu.bf16_tflops * 1e12 * gpu.bf16_reached * rates.products)
    return max(memory_seconds(op.bytes, gpu, rates), arithmetic) + op.steps * op.step_us * 1e-6


def memory_seconds(count: float, gpu: GpuSpec, rates: Rates) -> float:
    """Return the time that moving `count` bytes takes, in seconds."""
    return count / (gpu.hbm_gbs * 1e9 * gpu.hbm_reached * rates.memory)


def product_seconds(op: Product, gpu: GpuSpec, rates: Rates) -> float:
    """Return the time of a product, in seconds; an FP8 product counts the rounding of operands."""
    if op.m <= 0 or op.n <= 0 or op.k <= 0 or op.count <= 0:
        return 0.0
    eight = op.dtype == "fp8" and gpu.fp8_tflops > 0
    peak, reached = gpu.bf16_tflops, gpu.bf16_reached
    if eight:
        peak, reached = gpu.fp8_tflops, gpu.fp8_reached
    full = op.dtype == "fp32" and not gpu.on_host
    if full:
        peak *= FP32[gpu.generation]
    measured = None if eight or full else _measured(op, gpu)
    if measured is not None:
        arithmetic = op.flops / (measured * 1e12)
    else:
        # A tile starts and ends in the same time, in which FP8 multiplies more elements.
        fill = K_FILL * peak / gpu.bf16_tflops
        filled = _filled(op.m, op.n, op.count, int(gpu.sms)) * op.k / (op.k + fill)
        arithmetic = op.flops / (peak * 1e12 * reached * filled)
    itemsize = 1 if eight else 4 if full else 2
    written = 8 if op.added else max(2, itemsize)
    moved = itemsize * (op.m * op.k + op.n * op.k) + written * op.m * op.n
    moving = memory_seconds(moved * op.count, gpu, rates)
    time = max(arithmetic / rates.products, moving, LEAST_US * 1e-6)
    if op.apart:
        time += op.count * APART_US * 1e-6
    if eight and op.rounds and op.layout != "NT":  # read in bf16, written in FP8 and transposed
        time += memory_seconds(4.0 * op.m * op.k * op.count, gpu, rates)
    return time


def _filled(m: int, n: int, count: int, sms: int) -> float:
    """Return the fraction of arithmetic that output tiles use, by the best tile."""
    best = 0.0
    for rows, columns, speed in TILES:
        tiles = count * math.ceil(m / rows) * math.ceil(n / columns)
        waves = tiles / sms
        taken = math.ceil(waves) * (1 - WAVE_SHARED) + max(waves, 1.0) * WAVE_SHARED
        best = max(best, speed * count * m * n / (rows * columns * sms * taken))
    return best


@lru_cache(maxsize=1 << 14)
def _near(name: str, m: int, n: int, k: int, layout: str, reach: float) -> float | None:
    """Return the measured TFLOP/s of the nearest product of a table, None: none is near.

    Args:
        name: of the GPU.
        m: rows of the output.
        n: columns of the output.
        k: summed dim.
        layout: of the product.
        reach: each size may differ by less than this factor.
    """
    best, nearest = 3 * math.log(reach), None
    for (rows, columns, depth, where), speed in product_table(name).items():
        if where != layout:
            continue
        off = [abs(math.log(a / b)) for a, b in ((m, rows), (n, columns), (k, depth))]
        if max(off) < math.log(reach) and sum(off) < best:
            best, nearest = sum(off), speed
    return nearest


def _measured(op: Product, gpu: GpuSpec) -> float | None:
    """Return measured TFLOP/s; a CPU has no tiles and no waves, so it has its table alone."""
    if op.count > 1 and not gpu.on_host:
        return None
    reach = math.inf if gpu.on_host else TABLE_REACH
    return _near(gpu.name, op.m, op.n, op.k, op.layout, reach)


def attention_seconds(op: Attend, gpu: GpuSpec, rates: Rates) -> float:
    """Return the time of a fused attention kernel, in seconds."""
    if op.flops <= 0:
        return 0.0
    speed = attention_rates(op.kernel, gpu.generation)[op.backward]
    speed *= gpu.bf16_tflops * gpu.bf16_reached / _usual(gpu.generation)
    half = (B200_WAVES if gpu.generation == "B200" else ATTENTION_WAVES)[op.backward]
    waves = op.heads * math.ceil(op.queries / 128) / gpu.sms
    row = op.keys * 2
    filled = waves / (waves + half) * row / (row + ATTENTION_ROW)
    narrow = min(1.0, 0.82 + 0.18 * op.width / 256)  # FlashAttention-2: 171 of 187 with 64 dims
    time = op.flops / (speed * 1e12 * filled * narrow * rates.attention)
    return max(time, LEAST_US * 1e-6)


def _usual(generation: str) -> float:
    """Return TFLOP/s that products reach on the board whose attention was measured."""
    return {"A100": 312 * 0.782, "H100": 989 * 0.723, "B200": 2250 * 0.5}[generation]
