"""Order in which ranks issue collectives and messages, and the start: as NCCL asks, not gloo.

Forked gloo ranks, whose collectives and messages are recorded and replayed one after another
(issue_order.py): whole steps with Muon, and evaluations.
"""

from __future__ import annotations

import functools
import os
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megacpp.config.schema import MeshConfig
from parallel.pipeline import SCHEDULES
from parallel.start import start
from tests.parallel.issue_order import Issue, IssueOrder, Step, stuck
from tests.parallel.parity import Run, train
from tests.ranks import on_worlds
from tests.together import Together

BOTH = ("world", (0, 1))
QUIET = "TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING"


def mesh(**axes: object) -> MeshConfig:
    return MeshConfig(**{"dp_shard": 1, **axes})  # type: ignore[arg-type]


RUNS = [
    # every schedule, of which choices of keys travel beside hidden states
    *(Run("sparse_stages", mesh(pp=2, pp_schedule=name), accum=4) for name in SCHEDULES),
    Run("tied", mesh(pp=2, pp_schedule="zbv"), accum=4, evaluate=True),
    # messages and collectives on one communicator: a ring, states handed over, ends of chunks
    Run("options", mesh(cp=2, cp_m2rnn="serial", cp_attention="ring"), evaluate=True),
    Run("plain", mesh(cp=4, cp_m2rnn="serial", cp_attention="ring", cp_order="contiguous")),
    # several communicators of one rank
    Run("plain", mesh(dp_shard=2, tp=2, ep=2), optimizer="muon_adamw"),
    Run("options", mesh(pp=2, cp=2, cp_m2rnn="serial", pp_schedule="zbv"), accum=4),
]


def issued(rank: int, run: Run) -> list[Step]:
    order = IssueOrder()
    with order.recording():
        train(rank, run)
    return order.steps


@functools.cache
def results() -> Together[Run, list[list[Step]]]:
    def made(runs: list[Run]) -> dict[Run, list[list[Step]]]:
        return on_worlds(issued, {run: run.world for run in runs})

    return Together(__name__, RUNS, made, lambda run: [])


@pytest.mark.parametrize("run", RUNS, ids=str)
def test_every_rank_may_issue_one_thing_after_another(run: Run) -> None:
    steps = results()[run]
    assert min(map(len, steps)) > 10
    assert not stuck(steps)
    if run.mesh.pp > 1:
        assert any(one.kind == "send" for one in sum(steps[0], ()))


def message(kind: str, peer: int) -> Issue:
    return Issue(kind, BOTH, peer, 4, "torch.float32")


def test_the_replay_finds_what_gloo_lets_pass() -> None:
    """Two ranks that send first, and a message that one of them has behind a collective."""
    send, receive = (message(kind, 1) for kind in ("send", "recv"))
    back, its = (message(kind, 0) for kind in ("send", "recv"))
    both = Issue("all_reduce", BOTH, -1, 4, "torch.float32")
    assert "rank 0 waits in " in stuck([[(send,), (receive,)], [(back,), (its,)]])
    assert not stuck([[(send, receive)], [(back, its)]]), "a batch"
    assert not stuck([[(send,), (receive,)], [(its,), (back,)]])
    assert stuck([[(send,), (both,)], [(both,), (its,)]])
    assert not stuck([[(both,), (send,), (both,)], [(both,), (its,), (both,)]])
    assert stuck([[(both,)], []]), "a rank that doesn't come"
    alone = Issue("all_reduce", ("tp", (0, 1)), -1, 4, "torch.float32")
    assert stuck([[(both,), (alone,)], [(alone,), (both,)]]), "two groups in another order"


def test_communicators_are_made_before_the_first_message(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A message would otherwise make one, of its two ranks alone, when it is first sent."""
    numbers = {"RANK": "13", "WORLD_SIZE": "16", "LOCAL_RANK": "5", "LOCAL_WORLD_SIZE": "8"}
    for name, value in {**numbers, "MASTER_ADDR": "here", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv(QUIET, raising=False)
    limits, given, current = [(1024, 4096)], dict[str, Any](), list[Any]()

    def group(backend: str, **more: Any) -> None:
        given.update(more, backend=backend, current=[*current], quiet=os.environ[QUIET])

    monkeypatch.setattr("resource.getrlimit", lambda kind: limits[-1])
    monkeypatch.setattr("resource.setrlimit", lambda kind, limit: limits.append(limit))
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    monkeypatch.setattr(dist, "init_process_group", group)
    monkeypatch.setattr("parallel.start.join", lambda *_: None)
    own = torch.device("cuda", 5)
    start(MeshConfig(dp_shard=16), own, dist.HashStore())
    assert (given["backend"], given["device_id"], given["current"]) == ("nccl", own, [own])
    assert (given["rank"], given["world_size"], given["quiet"]) == (13, 16, "0")
    assert limits[-1] == (4096, 4096), "a socket of gloo to each of 1,023 ranks"
