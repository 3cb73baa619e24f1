"""Accuracy and speed of memory estimates, against traces of the trainer's own model.

    python -m bench.estimate                # a dozen points
    python -m bench.estimate --points 40    # so many
    python -m bench.estimate --full --jobs 2  # 216, for an idle half hour

A point is a preset on a mesh: ranks, tokens, tp, ep, cp, pp, policy, optimizer. Its trace runs the
trainer's builder and a whole step on fake tensors: its peak is what tensors need. The estimate is
compared without what no tensor asks for (context, libraries, allocator). `upper` must not be below.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from multiprocessing import get_context

from bench import parser_of
from megacpp.config.arguments import replace_keys
from megacpp.config.checks.every import check, resolve
from megacpp.config.presets import preset
from megacpp.config.schema import KEEP, Config
from megacpp.errors import ConfigError
from megacpp.memory.estimate import NO_TENSOR, estimate

PRESETS = (
    "nam56r_base",
    "nam52_deep_base",
    "dense_110m",
    "hybrid_400m",
    "moe_small",
    "nam56r_quarter",
)
WORLDS = (8, 16, 32, 64, 128, 256, 512, 1024)
TOKENS = (4096, 8192, 16384, 32768, 65536)
POLICIES = {
    "preset": None,
    "nothing": KEEP,
    "experts": replace(KEEP, eblock="expert_gemm_only", ablock="selective"),
    "blocks": replace(
        KEEP,
        ablock="full",
        eblock="full",
        mblock="conv_bc_only",
        rblock="full_plus_norms",
        fblock="full",
    ),
}


@dataclass(frozen=True)
class EstimatePoint:
    """Configuration to trace and to estimate."""

    preset: str
    world: int
    tokens: int
    rows: int
    tp: int
    ep: int
    cp: int
    pp: int
    policy: str
    optimizer: str
    sync: str
    reshard: str

    def config(self) -> Config:
        """Return the configuration, resolved for its world.

        Raises:
            ConfigError: the trainer would reject it.
        """
        base, policy = preset(self.preset), POLICIES[self.policy]
        keys = {
            "data.seq_len": self.tokens,
            "train.device_batch_size": self.rows,
            "train.tokens_per_step": 0,
            "train.grad_accum": 2 * self.pp,
            "train.gradient_sync": self.sync,
            "mesh.reshard": self.reshard,
            "optim.name": self.optimizer,
        }
        keys |= {f"mesh.{axis}": getattr(self, axis) for axis in ("tp", "ep", "cp", "pp")}
        config = replace_keys(replace(base, recompute=policy or base.recompute), keys)
        check(config, self.world)
        return resolve(config, self.world)

    def __str__(self) -> str:
        mesh = f"tp {self.tp} ep {self.ep:<2} cp {self.cp} pp {self.pp}"
        how = f"{self.policy:7} {self.optimizer:10} {self.sync:8} {self.reshard:6}"
        return f"{self.preset:14} {self.world:>4} x {self.rows} x {self.tokens:>5} {mesh} {how}"


@dataclass(frozen=True)
class Result:
    """Bytes of a point.

    Attributes:
        upper: upper bound, without bytes outside tensors.
        seconds: seconds of the trace.
    """

    point: EstimatePoint
    trace: int
    where: str
    tensors: int
    moment: str
    upper: int
    seconds: float

    @property
    def share(self) -> float:
        """Error of the estimate as a fraction of the trace (negative: too low)."""
        return self.tensors / self.trace - 1


def points(number: int, pipelines: bool, seed: int = 0) -> Iterator[EstimatePoint]:
    """Yield legal points, of every preset and world alike; deterministic for a number."""
    draw, seen = random.Random(seed), set()
    while len(seen) < number:
        name = PRESETS[len(seen) % len(PRESETS)]
        world = WORLDS[len(seen) // len(PRESETS) % len(WORLDS)]
        point = EstimatePoint(
            name,
            world,
            draw.choice(TOKENS),
            draw.choice((1, 1, 2)),
            draw.choice((1, 1, 2, 4)),
            draw.choice((1, 2, 4, 8)),
            draw.choice((1, 1, 2, 4)),
            draw.choice((1, 1, 1, 2)) if pipelines else 1,
            draw.choice(tuple(POLICIES)),
            draw.choice(("muon_adamw", "muon_adamw", "adamw")),
            draw.choice(("defer", "defer", "each", "resident")),
            draw.choice(("auto", "always", "never")),
        )
        try:
            point.config()
        except ConfigError:
            continue
        if point not in seen:
            seen.add(point)
            yield point


def measure(point: EstimatePoint) -> Result:
    """Trace a point and estimate it."""
    from megacpp.cli.trace import trace_step  # torch

    config = point.config()
    begin = time.perf_counter()
    stream = trace_step(config, point.world)
    event, peak = stream.peak()
    traced = time.perf_counter() - begin
    found = estimate(config, point.world)
    upper = found.upper - sum(found.components.get(name, 0) for name in NO_TENSOR)
    where = stream.where(event)
    return Result(point, peak, where, found.tensors, found.moment, upper, traced)


def latencies() -> tuple[float, float]:
    """Return mean and worst milliseconds of an estimate without detail, over many points."""
    configs = [(point.config(), point.world) for point in points(200, True, seed=1)]
    times = []
    for config, world in configs:
        begin = time.perf_counter()
        estimate(config, world, detail=False)
        times.append((time.perf_counter() - begin) * 1e3)
    return statistics.mean(times), max(times)


def summary(results: list[Result]) -> dict[str, float]:
    """Return statistics of the estimates' errors."""
    shares = [result.share for result in results]
    return {
        "points": len(results),
        "median_abs": statistics.median(map(abs, shares)),
        "max_over": max(0.0, *shares),
        "max_under": max(0.0, *(-share for share in shares)),
        "upper_below_trace": sum(result.upper < result.trace for result in results),
    }


def line(result: Result) -> str:
    """Return one point as text."""
    gib, more = result.trace / 2**30, f"upper {result.upper / result.trace:5.2f}x"
    where = f"{result.where} / {result.moment}  {result.seconds:.0f} s"
    return f"{result.point}  {gib:8.3f} GiB {100 * result.share:+7.3f} %  {more}  {where}"


def main() -> None:
    """Run the benchmark from the command line."""
    parser = parser_of(__doc__)
    parser.add_argument("--points", type=int, default=12)
    parser.add_argument("--full", action="store_true", help="216 points")
    parser.add_argument("--pipelines", action="store_true", help="pp 2 among them")
    parser.add_argument("--jobs", type=int, default=1, help="processes that trace")
    options = parser.parse_args()
    results = []
    asked = points(216 if options.full else options.points, options.pipelines)
    with get_context("fork").Pool(options.jobs, maxtasksperchild=10) as pool:
        for result in pool.imap(measure, asked):
            results.append(result)
            print(line(result), flush=True)
    found = summary(results)
    mean, worst = latencies()
    print(
        f"{found['points']} points: median {100 * found['median_abs']:.3f} %, "
        f"most over {100 * found['max_over']:.3f} %, most under {100 * found['max_under']:.3f} %, "
        f"upper below the trace {found['upper_below_trace']} times"
    )
    print(f"an estimate takes {mean:.2f} ms on average, {worst:.2f} ms at most (without detail)")


if __name__ == "__main__":
    main()
