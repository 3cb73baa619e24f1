"""`megacpp train` before it starts anything, what torchrun reads of a rank, and the recipes."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.run import parse_args

from megacpp.cli.main import main
from megacpp.cli.train import TrainArgs
from megacpp.cli.train import launch_words as words_of
from megacpp.config.arguments import parse_run, split_args
from megacpp.launch.agent import exit_code, hear_once, killed, notes
from megacpp.launch.command import node_lines, node_shape, quoted, torchrun_words
from megacpp.outcome import UNSAVED, note
from megacpp.state.checkpoint import save_checkpoint

yaml = pytest.importorskip("yaml", reason="not installed: pyyaml")


def launch_words(words: list[str]) -> tuple[list[str], int, list[str]]:
    """torchrun's options, the largest world, and the flags of the run."""
    args, flags = split_args(TrainArgs, words)
    return *words_of(args, flags), flags


RECIPES = Path(__file__).parents[2] / "docs/launch"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("tiny --nproc 2 --model.dim 7", "model."),
        ("tiny --nproc 0", "nproc=0"),
        ("tiny --nproc two", "nproc=two"),
        ("tiny --nproc 3 --mesh.tp 2", "mesh.tp=2"),
        ("tiny --nnodes 2 --nproc 2", "nnodes=2"),
        ("tiny --nnodes 2:1 --rdzv-endpoint a:1", "nnodes=2:1"),
        ("tiny --nnodes 2 --rdzv-endpoint a", "rdzv-endpoint=a"),
        ("tinny --nproc 2", "preset=tinny"),
        ("tiny --nporc 2", "--nporc"),
    ],
)
def test_a_mistake_is_one_line_and_starts_nothing(
    words: str, says: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megacpp.launch.agent.launch", lambda *_: pytest.fail("started"))
    monkeypatch.setattr("os.execv", lambda *_: pytest.fail("started"))
    assert main(["train", *words.split()]) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: ") and says in err and err.count("\n") == 1 and "Fix: " in err


def test_an_elastic_launch_says_which_nodes_could_not_go_on(
    capsys: pytest.CaptureFixture[str],
) -> None:
    flags = "tiny --nnodes 1:2 --nproc 2 --rdzv-endpoint a:1 --mesh.tp 4".split()
    flags += "--model.attention.num-heads 8 --model.attention.num-kv-heads 4".split()
    flags += "--model.m2rnn.num-heads 4".split()
    assert launch_words(flags)[1] == 4
    assert capsys.readouterr().err.startswith(
        "note: the run couldn't go on with 1 node(s): mesh.tp=4"
    )


def test_one_rank_needs_no_launcher() -> None:
    assert launch_words(["tiny", "--run.steps", "3"]) == ([], 1, ["tiny", "--run.steps", "3"])
    words, world, flags = launch_words(["tiny", "--nproc", "2", "--max-restarts", "3"])
    assert world == 2 and flags == ["tiny"]
    read = parse_args([*words, "train.py", *flags])
    assert read.standalone and read.nproc_per_node == "2" and read.max_restarts == 3


@pytest.mark.parametrize(
    ("world", "shape", "lines"),
    [(8, (1, 8), 0), (64, (8, 8), 1), (12, (2, 6), 2), (13, (13, 1), 2)],
)
def test_the_printed_command_fills_nodes(world: int, shape: tuple[int, int], lines: int) -> None:
    assert node_shape(world, 8) == shape and len(node_lines(world, 8)) == lines
    words = torchrun_words(world, 8, "nam56r")
    read = parse_args([*words, "train.py"])
    assert int(read.nproc_per_node) == shape[1]
    if shape[0] > 1:
        assert (read.rdzv_backend, read.rdzv_id) == ("c10d", "nam56r")
        assert "$HOST:29500" in quoted(words) and "'" not in quoted(words)


def test_torchrun_shows_our_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "id_x/attempt_0/0/error.json"
    file.parent.mkdir(parents=True)
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))
    note(3, "data.path=x: no corpus. Fix: make one.")
    failure = ProcessFailure(0, 17, 3, str(file))
    table = ChildFailedError("train.py", {0: failure}).format_msg()
    assert "traceback : data.path=x: no corpus. Fix: make one." in table
    assert [found["errorCode"] for found in notes(tmp_path)] == [3]


def test_the_code_of_a_launch() -> None:
    assert exit_code([-9, 6, 6]) == 6 and exit_code([6, 3]) == 3 and exit_code([-15, 75]) == 75
    assert killed({1: (-9, 5), 0: (6, 7)}).startswith("error: rank 1 lost: killed by SIGKILL")
    assert killed({0: (75, 5), 1: (75, 6)}) == UNSAVED
    assert killed({8: (6, 5), 9: (-9, 6)}).startswith(
        "error: rank 8 lost a rank of another machine"
    )
    watchdog = {8: (-6, 5), 9: (-6, 5)}  # what NCCL's ranks end with, a minute after the others
    assert "rank 8 ended by SIGABRT: " in killed(watchdog)
    assert killed({**watchdog, 10: (-9, 6)}).startswith("error: rank 10 lost: killed by SIGKILL")
    assert exit_code([-6, -6]) == 6


def test_a_launcher_hears_a_signal_once_and_ctrl_c_again() -> None:
    """Raise on the first SIGTERM; the ranks save until they are done, however often it comes."""
    handler = MagicMock(side_effect=SystemExit)
    processes = SimpleNamespace(_terminate_process_handler=handler)
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        hear_once(processes)
        for number in (signal.SIGINT, signal.SIGINT):
            with pytest.raises(SystemExit):
                processes._terminate_process_handler(number, None)
        assert signal.getsignal(signal.SIGTERM) == before[signal.SIGTERM]
        with pytest.raises(SystemExit):
            processes._terminate_process_handler(signal.SIGTERM, None)
        for again in before:
            os.kill(os.getpid(), again)
        assert handler.call_count == 3
    finally:
        for number, handled in before.items():
            signal.signal(number, handled)


# ---- the recipes ---------------------------------------------------------------------------------


def commands() -> dict[str, list[str]]:
    """Return the words after `megacpp train` in each recipe."""
    jobset = yaml.safe_load((RECIPES / "kubernetes-jobset.yaml").read_text())
    job = jobset["spec"]["replicatedJobs"][0]["template"]["spec"]
    container = job["template"]["spec"]["containers"][0]
    found = {"kubernetes": container["command"][2:]}
    scripts = {"slurm": (RECIPES / "slurm.sbatch").read_text()}
    scripts["skypilot"] = yaml.safe_load((RECIPES / "skypilot.yaml").read_text())["run"]
    for name, text in scripts.items():
        line = text.replace("\\\n", " ").split("megacpp train ", 1)[1].splitlines()[0]
        for variable in ('"$SLURM_NNODES"', '"$SKYPILOT_NUM_NODES"'):
            line = line.replace(variable, "2")
        for variable in ('"$NPROC"', '"$SKYPILOT_NUM_GPUS_PER_NODE"'):
            line = line.replace(variable, "8")
        found[name] = (
            line.replace('"$@"', "nam56r")
            .replace("$HOST:$PORT", "$HOST:29500")
            .replace('"', "")
            .split()
        )
    return found


@pytest.mark.parametrize("name", ["slurm", "kubernetes", "skypilot"])
def test_a_recipe_starts_what_the_loopback_launch_starts(name: str) -> None:
    """Compare with the options of ssh.md's line, which test_cluster.py runs."""
    ssh = (RECIPES / "ssh.md").read_text()
    line = ssh.split("megacpp train ", 1)[1].split('"')[0]
    expected = parse_args([*launch_words(line.split())[0], "train.py"])
    words, world, flags = launch_words(commands()[name])
    assert world == 16 and flags[0] == "nam56r"
    parse_run(flags, world)
    read = parse_args([*words, "train.py"])
    for key in (
        "nnodes",
        "nproc_per_node",
        "rdzv_backend",
        "rdzv_conf",
        "tee",
        "local_ranks_filter",
    ):
        assert getattr(read, key) == getattr(expected, key), key
    assert read.rdzv_endpoint.endswith(":29500")


def test_the_slurm_file_is_one() -> None:
    path = RECIPES / "slurm.sbatch"
    subprocess.run(["bash", "-n", str(path)], check=True)
    lines = path.read_text().splitlines()
    options = [line.split("#SBATCH --")[1] for line in lines if line.startswith("#SBATCH ")]
    assert {"requeue", "open-mode=append", "signal=TERM@300"} <= set(options)
    first = next(i for i, line in enumerate(lines) if line and not line.startswith("#"))
    assert max(i for i, line in enumerate(lines) if line.startswith("#SBATCH")) < first


@pytest.mark.parametrize(
    ("code", "restarts", "again"),
    [(75, 99, True), (6, 9, True), (137, 9, True), (6, 10, False), (137, 10, False)]
    + [(code, 0, False) for code in (0, 1, 2, 3, 4, 5)],
)
def test_slurm_starts_a_job_again(code: int, restarts: int, again: bool, tmp_path: Path) -> None:
    """Run the script with commands that note what they are asked."""
    asked = tmp_path / "asked"
    for name, end in (("srun", code), ("scontrol", 0)):
        (tmp_path / name).write_text(f'#!/bin/sh\necho {name} "$@" >> {asked}\nexit {end}\n')
        (tmp_path / name).chmod(0o755)
    env = {"PATH": f"{tmp_path}:/usr/bin:/bin", "SLURM_JOB_ID": "7", "SLURM_NNODES": "2"}
    env |= {"SLURM_JOB_NODELIST": "a,b", "SLURM_RESTART_COUNT": str(restarts), "RDZV_HOST": "a"}
    done = subprocess.run(["bash", RECIPES / "slurm.sbatch", "tiny"], env=env, check=False)
    assert done.returncode == code
    assert ("scontrol requeue 7" in asked.read_text().splitlines()) == again


def test_slurm_reads_the_directives(tmp_path: Path) -> None:
    if shutil.which("sinfo") is None or subprocess.run(["sinfo"], capture_output=True).returncode:
        pytest.skip("no Slurm controller answers here")
    text = (RECIPES / "slurm.sbatch").read_text().replace("#SBATCH --gpus-per-node=8\n", "")
    path = tmp_path / "job.sbatch"  # a controller without GPUs refuses to count them
    path.write_text(text)
    done = subprocess.run(["sbatch", "--test-only", path, "tiny"], capture_output=True, text=True)
    assert done.returncode == 0 and "to start at" in done.stderr, done.stderr


def test_exit_codes_of_the_manifests() -> None:
    """75 and 6 start again; 2 to 5 don't."""
    jobset = yaml.safe_load((RECIPES / "kubernetes-jobset.yaml").read_text())
    assert (jobset["apiVersion"], jobset["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    job = jobset["spec"]["replicatedJobs"][0]["template"]["spec"]
    by_action = {}
    for rule in job["podFailurePolicy"]["rules"]:
        codes = rule.get("onExitCodes", {}).get("values", [])
        by_action[rule["action"]] = by_action.get(rule["action"], []) + codes
    assert by_action == {"FailJob": [2, 3, 4, 5], "Ignore": [75]}
    assert job["template"]["spec"]["restartPolicy"] == "Never", "needed by podFailurePolicy"
    assert job["completions"] == job["parallelism"] == 2
    name, nodes = jobset["metadata"]["name"], jobset["spec"]["replicatedJobs"][0]["name"]
    assert f"--rdzv-endpoint={name}-{nodes}-0-0.{name}:29500" in commands()["kubernetes"]
    sky = yaml.safe_load((RECIPES / "skypilot.yaml").read_text())
    assert sky["resources"]["job_recovery"]["recover_on_exit_codes"] == [6, 75]


# ---- the same run on another number of ranks -----------------------------------------------------


def test_a_run_keeps_its_tokens_a_step(tmp_path: Path) -> None:
    flags = ["tiny", "--run.dir", str(tmp_path), "--train.device-batch-size", "1"]
    counters = {"tokens_per_step": 4 * 256}
    saved = save_checkpoint(tmp_path / "checkpoints", 2, {"w": torch.zeros(3)}, counters, keep=1)
    two = parse_run(flags, 2, resumes=True)
    assert two.config.train.grad_accum == 2 and two.config.train.tokens_per_step == 1024
    assert two.notes == (f"train.tokens_per_step = 1024 of {saved}",)
    assert parse_run(flags, 4, resumes=True).notes == ()
    assert parse_run(flags, 2).config.train.grad_accum == 1, "a question, not a start"
    given = [*flags, "--train.grad-accum", "1"]
    assert parse_run(given, 2, resumes=True).config.train.tokens_per_step == 512
    with pytest.raises(ValueError, match=r"tokens_per_step=1024: must be a multiple"):
        parse_run(flags, 3, resumes=True)
    (saved / "extra.json").write_text("{")
    assert parse_run(flags, 2, resumes=True).config.train.grad_accum == 1


def test_a_fitted_run_may_leave_its_mesh() -> None:
    flags = ["tiny", "--mesh.tp", "2", "--train.tokens-per-step", "32768"]
    with pytest.raises(ValueError, match=r"mesh\.tp=2"):
        parse_run(flags, 3)
    found = parse_run([*flags, "--fit", "auto", "--train.tokens-per-step", "24576"], 3)
    assert (found.config.mesh.tp, found.config.mesh.dp_shard) == (1, 3)
    assert found.provenance["mesh.tp"] != "command line"
    assert found.notes[-1].startswith("mesh.tp=2: ") and "chooses the mesh" in found.notes[-1]
    assert parse_run([*flags, "--fit", "auto"], 4).config.mesh.tp == 2, "what fits stays"
