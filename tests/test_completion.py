"""Shell completion: words from the tables, and the scripts in real shells."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from megacpp.cli.completion import SCRIPTS, candidates
from megacpp.cli.main import COMMANDS, main
from megacpp.config.arguments import leaf_types
from megacpp.config.presets import PRESETS
from megacpp.config.schema import Config

ROOT = Path(__file__).parents[1]


def words(line: str) -> set[str]:
    return {word for word, _ in candidates(line.split(" "))}


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("megacpp ", {name.split()[0] for name in COMMANDS}),
        ("megacpp pre", {"presets"}),
        ("/x/bin/megacpp memory ", {"trace", "diff", "generate"}),
        ("megacpp data p", {"prepare"}),
        ("megacpp show ", set(PRESETS)),
        ("megacpp show nam56r_", {"nam56r_quarter", "nam56r_base"}),
        ("megacpp show tiny ", set()),
        ("megacpp show tiny --optim.sch", {"--optim.schedule"}),
        ("megacpp show tiny --optim.schedule ", {"cosine", "wsd", "constant"}),
        ("megacpp show tiny --optim.schedule w", {"wsd"}),
        (
            "megacpp show --optim.schedule=c",
            {"--optim.schedule=cosine", "--optim.schedule=constant"},
        ),
        ("megacpp show --run.tensorboard --optim.sche", {"--optim.schedule"}),
        ("megacpp show --config ", set()),
        ("megacpp plan --wo", {"--world"}),
        ("megacpp data inspect --split ", {"train", "validation"}),
        ("megacpp completion ", {"bash", "zsh", "fish", "words"}),
        (
            "torchrun --standalone --nproc-per-node=2 train.py ti",
            {"tiny", "tiny_chat", "tiny_full"},
        ),
        ("torchrun train.py tiny --mesh.pp-schedule z", {"zbv"}),
        ("./train.py --run.no-t", {"--run.no-tensorboard"}),
        ("torchrun --st", set()),
    ],
)
def test_what_may_follow(line: str, found: set[str]) -> None:
    assert words(line) == found


def test_every_flag_of_a_run_is_completed_with_its_sentence() -> None:
    offered = dict(candidates(["train.py", "--"]))
    flags = {f"--{key.replace('_', '-')}" for key in leaf_types(Config)}
    assert flags <= set(offered) and {"--config", "--fit", "--help"} <= set(offered)
    assert all(sentence for sentence in offered.values())


def test_words_come_with_a_tab(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "words", "--line", "megacpp pres"]) == 0
    assert capsys.readouterr().out == "presets\tlist the presets with parameter counts\n"


# ---- real shells --------------------------------------------------------------------------------

ASK = {
    "bash": """
complete -p megacpp torchrun >/dev/null || exit 3
COMP_LINE='{line}'; COMP_POINT=${{#COMP_LINE}}; COMP_WORDS=({line}); COMP_CWORD=1
_megacpp 2>/dev/null; printf '%s\\n' "${{COMPREPLY[@]}}"
""",
    "zsh": """
words=(${{(s: :)${{:-'{line}'}}}}); CURRENT=$#words
_describe() {{ print -l ${{(P)2}} }}; _files() {{ print files }}
_megacpp
""",
    "fish": "complete -C '{line}'",
}


@pytest.mark.parametrize("shell", SCRIPTS)
def test_a_real_shell_completes(shell: str, tmp_path: Path) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} isn't installed")
    program = tmp_path / "megacpp"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m megacpp "$@"\n')
    program.chmod(0o755)
    script = SCRIPTS[shell]
    start = "compdef() { : }\n" if shell == "zsh" else ""
    path = f"{tmp_path}:{os.environ['PATH']}"
    for line, wanted in (
        ("megacpp show nam56r_b", "nam56r_base"),
        ("megacpp show tiny --optim.schedule w", "wsd"),
        ("torchrun train.py tiny_f", "tiny_full"),
    ):
        done = subprocess.run(
            [shell, "-c", f"{start}{script}\n{ASK[shell].format(line=line)}"],
            cwd=ROOT,
            env={**os.environ, "PATH": path, "HOME": str(tmp_path)},
            capture_output=True,
            text=True,
            timeout=60,
        )
        found = [x.split("\t")[0].split(":")[0] for x in done.stdout.splitlines()]
        assert found == [wanted], (done.stdout, done.stderr)
