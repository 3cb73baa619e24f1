"""Steps composed of few traced layers, against steps of which all layers were traced.

Bytes at the peak, of each component, and the most of every part of the step. What may differ are
the scalars that the norm of the gradients and AdamW have one of for each parameter, and the last
byte of the root unit's buffers.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megacpp.cli.main import main
from megacpp.cli.memory import moments_of
from megacpp.cli.trace import trace_step
from megacpp.memory.compose import shallow
from tests.memory.test_trace import ADAMW, FULL, NONE, SELECTIVE, TWICE, config_of

SCALARS = 64  # bytes of a layer; where little is alive they are more than in the peak
ALWAYS, NEVER = "--mesh.reshard always", "--mesh.reshard never"
SHARED = "--model.attention.sparse.layers all --model.attention.sparse.share 9"
CASES = [
    (1, "AEMEAEMRFA", ""),
    (1, "MMAERREAFF", f"{FULL} {TWICE}"),
    (2, "AEMEAEMRFA", f"--mesh.cp 2 {TWICE} {NONE}"),
    (4, "RRMMEEAARR", f"{ALWAYS} {FULL} --mesh.dp_replicate 2 --train.gradient_sync each {TWICE}"),
    (8, "AEMEAEMRFA", f"{NEVER} {ADAMW}"),
    (8, "EEMMAAEEFMFA", f"--mesh.tp 2 --mesh.ep 4 {ALWAYS} {TWICE} {SELECTIVE}"),
    (4, "AEMEAEMRAEMF", f"--mesh.pp 2 --train.grad_accum 4 {ALWAYS}"),
    # keys that layer 0 chose for all
    (3, "AEEEFAEEEFFFAEEEF", f"--mesh.pp 3 --train.grad_accum 4 {NEVER} {SHARED}"),
    (4, "AEMEAEMEFFFF", "--mesh.pp 2 --mesh.ep 2 --train.grad_accum 4 --mesh.pp_schedule gpipe"),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: " ".join(map(str, case)))
def test_few_layers_tell_of_all(case: tuple[int, str, str]) -> None:
    size, pattern, _ = case
    config, rank = config_of(*case), size - 1
    few = shallow(config, size, rank)
    assert few is not None and len({traced for _, traced in few.parts}) < len(few.parts)
    composed, traced = (trace_step(config, size, rank, full) for full in (False, True))
    event, peak = traced.peak()
    other, found = composed.peak()
    slack = SCALARS * len(pattern)
    assert found == pytest.approx(peak, abs=slack)
    assert composed.where(other) == traced.where(event)
    mine, theirs = composed.by_component(other), traced.by_component(event)
    for name in mine | theirs:
        assert mine.get(name, 0) == pytest.approx(theirs.get(name, 0), abs=slack), name
    moments = [moments_of(stream) for stream in (composed, traced)]
    assert [m.name for m in moments[0]] == [m.name for m in moments[1]]
    for one, all_layers in zip(*moments, strict=True):
        assert (one.peak, one.end) == pytest.approx((all_layers.peak, all_layers.end), rel=1e-3)


def test_a_composed_stream_is_one() -> None:
    """Whatever is freed was there, and what rests at the end was there at the start."""
    stream = trace_step(config_of(2, "AEMAEMAEMA", ""), 2)
    times = dict.fromkeys(range(len(stream.blocks)), 0)
    for number in stream.events:
        times[number] += 1
    assert set(times.values()) <= {1, 2}
    assert {b.part for b in stream.blocks} >= {f"blocks.{i}" for i in range(10)}
    first, last = stream.timeline()[stream.marks[0][0] - 1], stream.timeline()[-1]
    assert last == pytest.approx(first, abs=4096)  # and the norm that clipping left


def test_offload_and_narrow_moments_are_traced_in_full() -> None:
    """What they do in a layer depends on the others; the trace is the same either way."""
    config = config_of(1, "AEAEAE", "--optim.cautious_weight_decay true")
    streams = [trace_step(config, 1, 0, full) for full in (False, True)]
    assert streams[0].peak() == streams[1].peak()


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = (
        "tiny --world 2 --rank 1 --train.device cpu --model.depth 2 --model.pattern AF".split()
    )
    file = tmp_path / "step.pickle"
    assert main(["memory", "trace", *arguments, "--json", "--timeline", str(file)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert sum(found["components"].values()) == found["peak"] > found["resting"]
    assert max(m["peak"] for m in found["moments"]) == found["peak"]
    assert file.stat().st_size > 0
    assert main(["memory", "trace", *arguments]) == 0
    said = capsys.readouterr().out
    assert found["where"] in said and "optimizer_state" in said
    assert main(["memory", "trace", "--rank", "1"]) == 2
    capsys.readouterr()
    nowhere = str(tmp_path / "no" / "such.pickle")
    assert main(["memory", "trace", *arguments, "--timeline", nowhere]) == 2
    assert capsys.readouterr().err.startswith(f"error: timeline={nowhere}: is not writable (")
