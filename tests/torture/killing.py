"""R17: ranks and agents of a run on two nodes are killed at random, for as long as is asked.

Two launchers on the loopback address are the nodes, one rank each. An agent that has ended
with a failure is started again by the same command, as a scheduler or a shell's loop does it.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from megacpp.run.goodput import Account
from tests.launch import ROOT
from tests.ranks import children
from tests.run.test_cluster import free_port, recipe

GONE_S = 15.0  # a killed agent's ranks have ended by then


def alive(pids: Sequence[int]) -> list[int]:
    """Return those of some processes that run; a zombie doesn't."""
    found = []
    for pid in pids:
        with suppress(OSError):
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
            found += [pid] if state != "Z" else []
    return found


@dataclass
class Nodes:
    """Agents of one run.

    Args:
        flags: of train.py.
        env: their variables.
        count: how many.

    Attributes:
        seen: every rank there was.
        started: agents, those started again counted too.
    """

    flags: Sequence[str]
    env: Mapping[str, str]
    count: int = 2
    seen: set[int] = field(default_factory=set)
    started: int = 0

    def __post_init__(self) -> None:
        port = free_port()
        times = "join_timeout=600,last_call_timeout=2,keep_alive_interval=1"
        conf = f"{times},keep_alive_max_attempt=6,read_timeout=60,is_host="
        self.options = [
            recipe(
                port,
                nproc="1",
                nnodes=str(self.count),
                max_restarts="99",
                rdzv_conf=f"{conf}{int(node == 0)}",
            )
            for node in range(self.count)
        ]
        self.agents = [self.start(node) for node in range(self.count)]

    def start(self, node: int) -> subprocess.Popen[bytes]:
        """Start an agent."""
        self.started += 1
        return subprocess.Popen(
            [sys.executable, "-m", "megacpp", "train", *self.flags, *self.options[node]],
            cwd=ROOT,
            env=dict(self.env),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

    def ranks(self) -> list[int]:
        """Return the ranks that run."""
        found = [pid for agent in self.agents for pid in children(agent.pid)]
        self.seen.update(found)
        return found

    def going(self) -> bool:
        """Start again the agents that ended with a failure; return whether any runs."""
        ended = [agent.poll() for agent in self.agents]
        if 0 in ended:
            return None in ended
        self.agents = [
            agent if code is None else self.start(node)
            for node, (agent, code) in enumerate(zip(self.agents, ended, strict=True))
        ]
        return True

    def kill(self, draw: random.Random) -> bool:
        """Kill an agent or a rank; return whether no rank of a killed agent stayed."""
        node = draw.randrange(2 * len(self.agents))
        if node >= len(self.agents):
            os.kill(draw.choice(self.ranks()), signal.SIGKILL)
            return True
        left = children(self.agents[node].pid)
        self.agents[node].kill()
        self.agents[node].wait()
        deadline = time.monotonic() + GONE_S
        while alive(left) and time.monotonic() < deadline:
            time.sleep(0.1)
        return not alive(left)


@contextmanager
def nodes(flags: Sequence[str], env: Mapping[str, str]) -> Iterator[Nodes]:
    """Lend two agents; none outlives the block."""
    both = Nodes(flags, env)
    try:
        yield both
    finally:
        for process in [*both.agents]:
            process.kill()
            process.wait()


def kills_between(
    both: Nodes, folder: Path, draw: random.Random, pause: tuple[float, float]
) -> str:
    """Kill at random moments until the run has ended.

    Args:
        both: its agents.
        folder: of the run.
        draw: chooses whom and when.
        pause: shortest and longest seconds between two kills.

    Returns:
        What happened, in words.
    """
    killed, agents, stayed, last = 0, 0, 0, time.monotonic()
    wait = draw.uniform(*pause)
    while both.going():
        time.sleep(0.05)
        full = len(both.ranks()) == both.count and (folder / "metrics.jsonl").exists()
        if full and time.monotonic() - last > wait:
            before = [agent.pid for agent in both.agents if agent.poll() is None]
            stayed += not both.kill(draw)
            agents += any(not alive([pid]) for pid in before)
            killed, last, wait = killed + 1, time.monotonic(), draw.uniform(*pause)
    left = len(alive(sorted(both.seen)))
    return (
        f"{killed} kills ({agents} of agents), ranks that outlived their agent: {stayed}, left "
        f"after the end: {left}"
    )


def cost_of_kills(spent: Account) -> str:
    """Return what one of the kills cost, and how far apart they may be for 90% of the time.

    Between two kills a run trains for `interval - start - lost` seconds: goodput is
    1 - (start + lost) / interval.
    """
    if spent.starts < 2:
        return "no start followed a kill"
    start, lost = spent.startup_s / spent.starts, spent.seconds["restart_lost"] / (spent.starts - 1)
    return (
        f"a kill costs a start of {start:.1f} s and {lost:.1f} s of lost steps and waits, so 90% "
        f"needs {10 * (start + lost):.0f} s between two"
    )
