"""Command `megacpp train`: check the command, then start train.py under torchrun."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass

from megacpp.config.arguments import parse_run
from megacpp.config.environment import MOST_RANKS
from megacpp.config.settings import setting
from megacpp.errors import ConfigError, config_error
from megacpp.home import HOME

MOST_NODES = 1024  # each number of them is checked before an elastic launch


@dataclass(frozen=True)
class TrainArgs:
    """Machines, ranks, and torchrun's own options with its defaults."""

    nproc: int = setting(
        1, "Ranks on this machine (1: without torchrun).", "ranks", at_least=1, at_most=MOST_RANKS
    )
    nnodes: str = setting("1", "Machines; MIN:MAX goes on with fewer. Run the command on each.")
    rdzv_endpoint: str = setting("", "HOST:PORT of one of the machines, the same on all.")
    rdzv_id: str = setting("", "Name of this launch, the same on all machines.")
    rdzv_conf: str = setting("", "Times of the rendezvous, see docs/launch.")
    max_restarts: str = setting("", "How often ranks are started again after a failure.")
    monitor_interval: str = setting("", "Time between looks at the ranks.", "seconds")
    node_rank: str = setting("", "Number of this machine.")
    local_addr: str = setting("", "Address of this machine.")
    log_dir: str = setting("", "Folder for what ranks print.")
    redirects: str = setting("", "Streams that go to files only: 1 stdout, 2 stderr, 3 both.")
    tee: str = setting("", "Streams that go to files and the screen.")
    local_ranks_filter: str = setting("", "Ranks of a machine whose streams the screen shows.")
    numa_binding: str = setting("", "How ranks are bound to NUMA nodes.")
    shutdown_timeout: str = setting("", "Time for ranks to leave after a SIGTERM.", "seconds")


# Options of torchrun that are passed on as they are.
PASSED = tuple(name for name in TrainArgs.__dataclass_fields__)[3:]


def train(args: TrainArgs, words: list[str]) -> int:
    """Check the command, start the ranks of this machine, and return a failed rank's exit code.

    It equals `torchrun ... train.py PRESET ...`, with less output when something is wrong. Data and
    run folders are relative to the current folder. Recipes for clusters: docs/launch.
    """
    if named := [w for w in words if w.replace("_", "-").startswith("--nproc-per-node")]:
        value = named[0].partition("=")[2] or "N"
        raise ConfigError(f"{named[0]}: is torchrun's name of it. Fix: use --nproc {value}.")
    options, world = launch_words(args, words)
    parse_run(words, world, resumes=True)
    script = HOME / "train.py"
    if not options:
        sys.stdout.flush()
        os.execv(sys.executable, [sys.executable, str(script), *words])
    from megacpp.launch.agent import launch

    return launch(options, script, words)


def launch_words(args: TrainArgs, flags: list[str]) -> tuple[list[str], int]:
    """Return torchrun's options (none: one process) and the largest world.

    Raises:
        ConfigError: they don't make a launch.
    """
    given = {name.replace("_", "-"): getattr(args, name) for name in PASSED}
    passed = [f"--{name}={value}" for name, value in given.items() if value]
    nodes, endpoint, ranks = args.nnodes, args.rdzv_endpoint, args.nproc
    least, most = _nodes(nodes)
    if most > 1 and not endpoint:
        fix = "write --rdzv-endpoint HOST:29500 with the name of one of them, the same on all"
        raise config_error("nnodes", nodes, "machines need a place to meet", fix)
    if endpoint and (":" not in endpoint or not endpoint.rpartition(":")[2].isdigit()):
        fix = f"write --rdzv-endpoint {endpoint.partition(':')[0]}:29500"
        raise config_error("rdzv-endpoint", endpoint, "must be HOST:PORT", fix)
    if most == 1 and not endpoint:
        alone = ranks == 1 and not passed
        return [] if alone else ["--standalone", f"--nproc-per-node={ranks}", *passed], ranks
    if not args.rdzv_id:
        passed.insert(0, "--rdzv-id=megacpp")
    unfit: dict[int, ConfigError] = {}
    for number in range(least, most):  # an elastic launch may have to continue with fewer nodes
        try:
            parse_run(flags, number * ranks, resumes=True)
        except ConfigError as error:
            unfit[number] = error
    if unfit:
        first = next(iter(unfit.values()))
        numbers = ", ".join(map(str, unfit))
        print(f"note: the run couldn't go on with {numbers} node(s): {first}", file=sys.stderr)
    meet = ["--rdzv-backend=c10d", f"--rdzv-endpoint={endpoint}"]
    words = [f"--nnodes={nodes}", f"--nproc-per-node={ranks}", *meet, *passed]
    return words, most * ranks


def _nodes(text: str) -> tuple[int, int]:
    """Return the fewest and most machines of `N` or `MIN:MAX`."""
    parts = text.split(":")
    if len(parts) <= 2 and all(part.isdigit() for part in parts):
        least, most = int(parts[0]), int(parts[-1])
        if 1 <= least <= most <= MOST_NODES:
            return least, most
    raise config_error(
        "nnodes", text, f"must be N or MIN:MAX, from 1 to {MOST_NODES}", "write --nnodes 2 or 1:2"
    )
