"""Time of what concerns some layers or some ranks alone: FP8, experts' shards, depths ahead."""

from __future__ import annotations

import pytest

from megacpp.cli.main import main
from megacpp.config.arguments import parse_run
from megacpp.memory.replayed import ahead_again
from megacpp.speed.hardware import Rates, gpu
from megacpp.speed.operators import Product
from megacpp.speed.ours import step_work
from megacpp.speed.step import StepWork, predict

FP8 = ("--precision.fp8", "torchao")


def work(words: str, size: int) -> StepWork:
    return step_work(parse_run(words.split(), size).config, size, "H100")


@pytest.mark.parametrize(
    ("more", "layers"),
    [("", "AFE"), ("--precision.fp8-layers A", "A"), ("--precision.fp8-layers F", "F")],
)
def test_products_are_in_fp8_where_the_layers_are(more: str, layers: str) -> None:
    words = f"tiny --model.pattern AEMRAF --model.depth 12 --precision.fp8 torchao {more}"
    blocks = [b for b in work(words, 1).blocks if len(b.kind) == 1]
    assert len(blocks) == 12
    for number, block in enumerate(blocks):
        dtypes = {op.dtype for op in block.forward if isinstance(op, Product)}
        wanted = 2 <= number < 10 and block.kind in layers
        assert ("fp8" in dtypes) == wanted, (number, block.kind, dtypes)


@pytest.mark.parametrize("command", ["speed tiny --world 1", "plan dense_110m --world 1"])
def test_a_gpu_without_fp8_is_refused(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = [*command.split(), "--gpu", "A100-80GB", *FP8]
    assert main(words) == 2
    assert capsys.readouterr().err == (
        "error: precision.fp8=torchao: A100-80GB has no FP8 products. "
        "Fix: use --precision.fp8 off, or --gpu H100.\n"
    )


def test_experts_are_gathered_by_ranks_of_tp() -> None:
    """Check that ranks of tp send nothing for what tp cuts, but shards of experts."""
    words = "tiny --model.pattern AE --mesh.tp 2 --mesh.ep"
    machine = gpu("H100")
    alone, shared = (predict(work(f"{words} {ep}", 2), machine, Rates()) for ep in (2, 1))
    assert "exposed data" not in alone.parts and "slowed by data" not in alone.parts
    assert {"exposed data", "slowed by data"} & shared.parts.keys()
    dense = predict(work("tiny --model.pattern AF --mesh.tp 2", 2), machine, Rates())
    assert "exposed data" not in dense.parts


def test_depths_ahead_are_run_again() -> None:
    words = "tiny --model.mtp.depths 2 --recompute.mtp"
    flops = []
    for again in ("true", "false"):
        (ahead,) = [b for b in work(f"{words} {again}", 1).blocks if b.kind == "mtp"]
        flops.append(sum(op.flops for op in ahead.backward if isinstance(op, Product)))
    config = parse_run(f"{words} true".split(), 1).config
    tokens = config.train.device_batch_size * config.data.seq_len
    wanted = ahead_again(config) * tokens
    assert wanted > 0 and flops[0] - flops[1] == pytest.approx(wanted, rel=1e-3)
