"""Bytes and launches that fused operations would save of a step, against all that it has.

    python -m bench.fused         # the table of docs/benchmarks.md

A step's memory-bound bytes and launches come from traces of its blocks, eager or as the compiler
splits them (megacpp/speed/ours.py); what a fusion saves comes from sizes. A product that
normalises its input doesn't write it and read it again; one that ends with a rotation, or adds the
residual stream, doesn't write its result and read it again: a launch each, in the forward alone.
The backward of each needs sums over a whole row of a product's result, which no product has. The
time is that of the bytes on an H100, or the host's for the launches where it is what is waited for.
"""

from __future__ import annotations

from dataclasses import dataclass

from bench import parser_of
from megacpp.config.arguments import parse_run
from megacpp.config.schema import Config
from megacpp.memory.budget import as_run
from megacpp.memory.forms.local_shapes import LocalShapes
from megacpp.model.pattern import layer_kinds
from megacpp.speed.hardware import Rates, gpu
from megacpp.speed.operators import Passes, seconds
from megacpp.speed.ours import step_work
from megacpp.speed.step import predict

RANKS, GPU = 8, "H100"
LATENT = "nam56r_base --model.attention.kind mla --model.attention.q-lora-rank 64"  # as nam56r's
RUNS = {"dense_110m": "dense_110m", "nam56r_base": "nam56r_base", "nam56r_base, MLA": LATENT}
OPERATIONS = {
    "norm_qkv": "RMSNorm + Q, K, V",
    "mla_q_upproj": "MLA's queries from their latent + rotation",
    "residual": "residual, bias, dropout + product",
}


@dataclass(frozen=True)
class FusedOperation:
    """Operation in a step.

    Attributes:
        operation: name in `OPERATIONS`.
        bytes, launches: saved in a step.
        of_bytes, of_launches: memory-bound bytes and launches of the step.
        of_time: predicted seconds saved over those of the step.
    """

    operation: str
    bytes: float
    launches: int
    of_bytes: float
    of_launches: int
    of_time: float

    def row(self, run: str, compiled: str) -> str:
        """Return a row of the table."""
        share = self.bytes / self.of_bytes
        return (
            f"| {run} | {compiled} | {OPERATIONS[self.operation]} | "
            f"{self.bytes / 2**30:.2f} of {self.of_bytes / 2**30:,.0f} GiB ({share:.1%}) | "
            f"{self.launches:,} of {self.of_launches:,} | {self.of_time:.1%} |"
        )


def config_of(words: str, compiled: bool) -> Config:
    """Return a run's configuration on `RANKS` GPUs."""
    given = [*words.split(), "--train.compile", "inductor" if compiled else "off"]
    return as_run(parse_run(given, RANKS).config, "cuda", narrow=True)


def fusions(config: Config) -> list[FusedOperation]:
    """Return what each operation would save of a step of a run."""
    own, model = LocalShapes.on_rank(config, RANKS, 0), config.model
    step = step_work(config, RANKS, GPU)
    passes = [op for b in step.blocks for op in (*b.forward, *b.backward) if isinstance(op, Passes)]
    micro = step.microbatches
    issued = micro * sum(sum(b.launches) for b in step.blocks)
    moved, whole = micro * sum(op.bytes for op in passes), predict(step, gpu(GPU), Rates())
    a, kinds = model.attention, layer_kinds(model)
    attends = sum(kind[0] == "A" for kind in kinds)
    latents = attends if a.kind == "mla" and a.q_lora_rank else 0
    queries = own.tokens * a.num_heads // own.tp * a.head_dims[0]
    saved = {
        "norm_qkv": (attends, own.tokens * model.dim),
        "mla_q_upproj": (latents, queries),
        "residual": (len(kinds), own.stream * model.dim),
    }
    found = []
    for name, (layers, numel) in saved.items():
        count, size = micro * layers, 2.0 * micro * layers * numel * own.compute
        time = seconds(Passes(size, count), gpu(GPU), Rates()) if count else 0.0
        if whole.parts.get("host"):
            time += count * gpu(GPU).launch_us * 1e-6
        found.append(FusedOperation(name, size, count, moved, issued, time / whole.step_s))
    return [fusion for fusion in found if fusion.launches]


def table() -> list[str]:
    """Return the table of all runs, eager and compiled."""
    lines = [
        "| run | blocks | operation | bytes saved | launches saved | of a step's time |",
        "|---|---|---|---|---|---|",
    ]
    for run, words in RUNS.items():
        for compiled in (False, True):
            if "MLA" in run and compiled:
                continue
            how = "inductor" if compiled else "eager"
            lines += [fusion.row(run, how) for fusion in fusions(config_of(words, compiled))]
    return lines


def main() -> None:
    """Print the table."""
    parser_of(__doc__).parse_args()
    print("\n".join(table()))


if __name__ == "__main__":
    main()
