"""Wrong inputs of every command of `megacpp`: one line each, its exit code, nothing written.

Files are missing, damaged or of another kind. Each leaves the folder it was called from as it was.
"""

from __future__ import annotations

import io
import json
import os
import re
import shlex
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest

from megacpp.cli.main import main
from megacpp.config.arguments import parse_or_exit
from tests.damaged import place as place
from tests.damaged import untouched as untouched

# (arguments, exit code, start of the line, words that it must contain); RUN is a finished run,
# CORPUS its corpus, and the others are files and folders of the fixture `place`.
COMMANDS: list[tuple[str, int, str, str]] = [
    ("nope", 2, "command=nope: ", "use one of"),
    ("presetz", 2, "command=presetz: ", "'presets'"),
    ("''", 2, "command=: ", "use one of"),
    ("--nope", 2, "command=--nope: ", "use one of"),
    ("data nope", 2, "command=data nope: ", "did you mean 'data "),
    ("memory x", 2, "command=memory x: ", "did you mean 'memory "),
    ("dat prepare texts", 2, "command=dat prepare: ", "did you mean 'data prepare'"),
    ("help nope", 2, "command=nope: ", "use one of"),
    ("presets x", 2, "argument=x: ", "see --help"),
    ("doctor x", 2, "argument=x: ", "see --help"),
    ("show nope", 2, "preset=nope: ", "use one of"),
    ("show --world", 2, "world=: ", "write --world VALUE"),
    ("show --world 0", 2, "world=0: ", "at least 1"),
    ("show --world=", 2, "world=: ", "whole number"),
    ("validate --world -3", 2, "world=-3: ", "at least 1"),
    ("validate --world 99999999999999999999", 2, "world=9999", "from -922"),
    ("explain --world 131073", 2, "world=131073: ", "at most 131072"),
    ("dry-run --world 2 --rank 2", 2, "rank=2: ", "below the world"),
    ("dry-run --rank -1", 2, "rank=-1: ", "use --rank 0 or more"),
    ("dry-run --json=maybe", 2, "json=maybe: ", "true or false"),
    ("activations --policy x", 2, "policy=x: ", "one of none, selective, full"),
    ("activations --rank x", 2, "rank=x: ", "whole number"),
    ("memory trace --model.dim 1.5", 2, "model.dim=1.5: ", "whole number"),
    ("show --memory.device-gib 80GB", 2, "memory.device_gib=80GB: ", "finite number of GiB"),
    ("plan", 2, "world=: is needed: number of devices", "write --world 8"),
    ("plan --world 131073", 2, "world=131073: ", "use --world 131072 or less"),
    ("plan --world 2", 2, "memory=: ", "write --memory 141GiB"),
    ("plan --world 2 --memory x", 2, "memory=x: ", "must be a number"),
    ("plan --world 2 --memory 0", 2, "memory=0: ", "above 0"),
    ("plan --world 2 --memory -1", 2, "memory=-1: ", "must be a number"),
    (f"plan --world 2 --memory {'9' * 400}GiB", 2, "memory=999", "must be a number"),
    ("plan --world 2 --memory 80 --top 0", 2, "top=0: ", "use --top 1 or more"),
    ("plan --world 2 --memory 80 --seq -1", 2, "seq=-1: ", "at least 0"),
    ("plan --world 2 --memory 80 --tokens-per-step -1", 2, "tokens_per_step=-1: ", "at least"),
    ("plan --world 2 --memory 1MiB --tokens-per-step 1024", 2, "memory=1.00 MiB: ", "write --mem"),
    ("plan --world 7 --memory 80 --tokens-per-step 1024", 2, "world=7: ", "write another"),
    ("validate --data --data.path NOPE", 3, "data.path=NOPE: ", "no such folder"),
    ("validate --data --data.path FOLDER", 3, "data.path=FOLDER: ", "holds no index.json"),
    ("validate --data --data.path CORPUS_half", 3, "CORPUS_half/index.json", "cannot be read"),
    ("validate --data --data.path CORPUS", 2, "model.vocab_size=64: ", "400 ids"),
    ("validate --memory.device-gib 0.001", 2, "memory.gate=on: ", "--memory.gate off"),
    ("data inspect NOPE", 3, "data.path=NOPE: ", "no such folder"),
    ("data inspect EMPTY", 3, "data.path=EMPTY: ", ""),
    ("data inspect CORPUS --seq-len 999999999", 3, "seq_len=999999999: ", "Fix: use --seq-len "),
    ("data inspect FOLDER", 3, "data.path=FOLDER: ", "holds no index.json"),
    ("data inspect CORPUS_half", 3, "CORPUS_half/index.json", "cannot be read"),
    ("data inspect CORPUS_binary", 3, "CORPUS_binary/index.json", "cannot be read"),
    ("data inspect CORPUS_deep", 3, "CORPUS_deep/index.json", "cannot be read"),
    ("data inspect CORPUS_list", 3, "CORPUS_list/index.json", "cannot be read"),
    ("data inspect CORPUS_version", 3, "CORPUS_version/index.json", "format 9"),
    ("data inspect CORPUS_shard", 3, "CORPUS_shard/train-00000.bin", "truncated"),
    ("data inspect CORPUS_tokenizer", 3, "CORPUS_tokenizer/tokenizer.json", "truncated"),
    ("data inspect LONG", 2, "path=xxx", "too long"),
    ("data inspect CORPUS --rows 0", 2, "rows=0: ", "at least 1"),
    ("data inspect CORPUS --seq-len 0", 2, "seq_len=0: ", "at least 1"),
    ("data inspect CORPUS --split x", 2, "split=x: ", "train, validation"),
    ("data inspect CORPUS CORPUS", 2, "argument=CORPUS: ", "is not a flag"),
    ("completion", 2, "shell=: ", "write SHELL"),
    ("plan --wrold 8", 2, "--wrold: ", "did you mean '--world'"),
    ("explain --rnak 1", 2, "--rnak: ", "did you mean '--rank'"),
    ("train --nprocs=2", 2, "--nprocs: ", "did you mean '--nproc'"),
    ("sample --temprature 1", 2, "--temprature: ", "did you mean '--temperature'"),
    ("speed --timeline /proc/nope.json", 2, "timeline=/proc/nope.json: ", "is not writable"),
    ("export", 2, "run=: ", "write RUN"),
    ("export RUN", 2, "out=: ", "write --out VALUE"),
    ("export RUN --out X --to gguf", 2, "to=gguf: ", "hf"),
    ("export RUN --out X --dtype fp16", 2, "dtype=fp16: ", "bf16, fp32"),
    ("export RUN --out X --file-gb 0", 2, "file_gb=0.0: ", "above 0"),
    ("export RUN --out X --checkpoint 9", 2, "checkpoint=9: ", "write --checkpoint 2"),
    ("export RUN --out X", 2, "model.pattern=F: ", "use --model.pattern AE"),
    ("export NOPE --out X", 2, "run=NOPE: ", "no such folder"),
    ("export FOLDER --out X", 2, "run=FOLDER: ", "holds no final weights"),
    ("show --from NOPE", 2, "from=NOPE: ", "no such folder"),
    ("show --from FOLDER", 2, "from=FOLDER: ", "holds no final weights"),
    ("train --nproc 0", 2, "nproc=0: ", "use --nproc 1 or more"),
    ("train --nproc 131073", 2, "nproc=131073: ", "must be at most 131072. Fix: use --nproc 1."),
    ("train --nproc x", 2, "nproc=x: ", "whole number"),
    ("train tiny --nproc-per-node 2", 2, "--nproc-per-node: ", "use --nproc N"),
    ("train tiny --nproc_per_node=2", 2, "--nproc_per_node=2: ", "use --nproc 2"),
    ("train --nnodes 0", 2, "nnodes=0: ", "from 1 to 1024"),
    ("train --nnodes 2000", 2, "nnodes=2000: ", "from 1 to 1024"),
    ("train --nnodes 2", 2, "nnodes=2: ", "a place to meet"),
    ("completion tcsh", 2, "shell=tcsh: ", "one of bash, zsh, fish, words"),
    ("completion bash zsh", 2, "argument=zsh: ", "see --help"),
    ("completion words --line", 2, "line=: ", "write --line VALUE"),
    ("completion bash --nope", 2, "--nope: ", "did you mean"),
    ("show --config", 2, "--config=: ", "needs a value"),
    ("show --config=", 2, "config=.: ", "must end in .json"),
    ("show --config NOPE.toml", 2, "config=NOPE.toml: ", "No such file"),
    ("show --config LONG.toml", 2, "config=xxx", "name too long"),
    ("show --config FOLDER", 2, "config=FOLDER: ", "must end in .json"),
    ("show --config folder.toml", 2, "config=folder.toml: ", "Is a directory"),
    ("show --config empty.json", 2, "config=empty.json: ", "is not JSON"),
    ("show --config binary.toml", 2, "config=binary.toml: ", "is not TOML"),
    ("show --config deep.json", 2, "config=deep.json: ", "is not JSON"),
    ("show --config digits.json", 2, "config=digits.json: ", "is not JSON"),
    ("show --config list.json", 2, "config=list.json: ", "table of settings"),
    ("show --config presets.json", 2, "presets.json: preset=['tiny']: ", "no such preset"),
    ("show --config far.toml", 2, "far.toml: model.dim=999", "from -922"),
    ("show --config odd.json", 2, "odd.json: a\\nb: ", "no such setting"),
    ("show --config section.toml", 2, "section.toml: model: ", "no such setting"),
    ("show --config range.toml", 2, "model.dim=-8: ", "use --model.dim 1 or more"),
    ("validate --config range.toml", 2, "model.dim=-8: ", "at least 1"),
    ("dry-run --config mesh.toml --world 2", 2, "mesh.tp=3: ", "use --mesh.tp 2"),
    ("plan --world 2 --memory 1 --config range.toml", 2, "model.dim=-8: ", "at least 1"),
    ("show nam56r --config RUN/config.json", 2, "preset=nam56r: ", "is of the preset tiny"),
    ("show --config RUN_binary/config.json", 2, "config=RUN_binary/config.json: ", "is not JSON"),
    ("show --config RUN_list/config.json", 2, "config=RUN_list/config.json: ", "a table"),
    ("show --config RUN_words/config.json", 2, "RUN_words/config.json: model.dim=wide", "whole"),
    ("show --config RUN_negative/config.json", 2, "model.dim=-32: ", "at least 1"),
    ("show --config RUN_older/config.json", 2, "RUN_older/config.json: model.init_dev", "no such"),
    ("data prepare NOPE --out O", 3, "source=NOPE: ", "no such folder or file"),
    ("data prepare FOLDER --out O", 3, "source=FOLDER: ", ""),
    ("data prepare EMPTY --out O", 3, "source=EMPTY: ", "0 different documents"),
    ("data prepare SOURCE --out FULL", 2, "out=FULL: ", "is not a corpus"),
    ("data prepare SOURCE --out LONG", 2, "path=", "too long"),
    ("data prepare SOURCE --out EMPTY/x", 3, "out=EMPTY/x: ", "cannot be written"),
    ("data prepare SOURCE --out /proc/nope", 3, "out=/proc/nope: ", "cannot be written"),
    (
        "data prepare SOURCE --out O --vocab-size 99999999999",
        2,
        "vocab_size=99999999999: ",
        "at most 131072",
    ),
    (
        "data prepare SOURCE --out O --validation-fraction nan",
        2,
        "validation_fraction=nan",
        "finite",
    ),
    ("data prepare SOURCE --out O --document-bytes 9000000", 2, "document_bytes=", "8388608"),
    ("data prepare SOURCE --out O --tokenizer-bytes 0", 2, "tokenizer_bytes=0: ", "at least 1"),
    ("data prepare SOURCE --out O --globs", 2, "globs=: ", "needs a value"),
    ("data prepare SOURCE --out O --globs [", 3, "source=SOURCE: ", "no file matches ["),
    ("memory diff", 2, "before=: ", "write BEFORE"),
    ("memory diff a", 2, "after=: ", "write AFTER"),
    ("memory diff a b c", 2, "argument=c: ", "see --help"),
    ("memory diff NOPE NOPE", 3, "snapshot=NOPE: ", "no such file"),
    ("memory diff FOLDER FOLDER", 3, "snapshot=FOLDER: ", "is a directory"),
    ("memory diff EMPTY EMPTY", 3, "snapshot=EMPTY: ", "not one of megacpp"),
    ("memory diff BINARY BINARY", 3, "snapshot=BINARY: ", "not one of megacpp"),
    ("memory diff DEEP DEEP", 3, "snapshot=DEEP: ", "not one of megacpp"),
    ("memory diff LONG LONG", 3, "snapshot=xxx", "too long"),
    ("report", 2, "run=: ", "write RUN"),
    ("report LONG", 2, "path=xxx", "too long"),
    ("report RUN --out", 2, "out=: ", "--out VALUE"),
    ("report RUN --out EMPTY/x", 2, "out=EMPTY/x: ", "not writable"),
    ("sample", 2, "run=: ", "write RUN"),
    ("sample RUN RUN", 2, "argument=RUN: ", "see --help"),
    ("sample NOPE", 2, "run=NOPE: ", "no such run folder"),
    ("sample EMPTY", 2, "run=EMPTY: ", "no such run folder"),
    ("sample LONG", 2, "path=xxx", "too long"),
    ("sample FOLDER", 2, "checkpoint=final: ", "train it first"),
    ("sample RUN/final", 2, "checkpoint=final: ", "give the folder of its run"),
    ("sample RUN --xyzzy", 2, "--xyzzy: ", "see --help"),
    ("sample RUN --prompt", 2, "prompt=: ", "needs a value"),
    ("sample RUN --prompt \udcff\udcfe", 2, "argument=\\xff\\xfe: ", "isn't text"),
    ("sample RUN --max-tokens -1", 2, "max_tokens=-1: ", "use --max-tokens 0 or more"),
    ("sample RUN --max-tokens 1e3", 2, "max_tokens=1e3: ", "whole number"),
    ("sample RUN --temperature nan", 2, "temperature=nan: ", "finite"),
    ("sample RUN --temperature -1", 2, "temperature=-1", "0 or more"),
    ("sample RUN --top-k -1", 2, "top_k=-1: ", "0 or more"),
    ("sample RUN --seed 99999999999999999999", 2, "seed=9999", "from -922"),
    ("sample RUN --device tpu", 2, "device=tpu: ", "auto, cpu, cuda"),
    ("sample RUN --checkpoint 7", 2, "checkpoint=7: ", "write --checkpoint 2"),
    ("sample RUN --checkpoint ../x", 2, "checkpoint=../x: ", "final, latest or a step"),
    ("sample RUN_half --checkpoint 2", 3, "run=RUN_half: config.json ", "line "),
    ("sample RUN_binary --checkpoint 2", 3, "run=RUN_binary: config.json ", "is not text"),
    ("sample RUN_deep --checkpoint 2", 3, "run=RUN_deep: config.json ", "line 1: "),
    ("sample RUN_list --checkpoint 2", 3, "run=RUN_list: config.json ", "is not an object"),
    ("sample RUN_missing --checkpoint 2", 2, "run=RUN_missing: ", "is not there"),
    ("sample RUN_words --checkpoint 2", 4, "model.dim: ", "can't be 'wide'"),
    ("sample RUN_negative --checkpoint 2", 2, "model.dim=-32: ", "at least 1"),
    ("sample RUN_older --checkpoint 2", 4, "model.", "in config.json"),
    ("sample RUN_manifest", 4, "RUN_manifest/final/manifest.json", "unreadable"),
    ("sample RUN_version", 4, "RUN_version/final/manifest.json", "version 9"),
    ("sample RUN_weights", 4, "RUN_weights/final/model.safetensors", "bytes instead of"),
]


@pytest.mark.usefixtures("untouched")
@pytest.mark.parametrize(
    ("words", "code", "start", "has"), COMMANDS, ids=[c[0][:60] for c in COMMANDS]
)
def test_commands_refuse_in_one_line(words: str, code: int, start: str, has: str) -> None:
    arguments = [word.replace("LONG", "x" * 300) for word in shlex.split(words)]
    if words.startswith("validate --data"):
        arguments += ["--model.vocab-size", "64"]
    with redirect_stdout(io.StringIO()) as out, redirect_stderr(io.StringIO()) as err:
        assert main(arguments) == code, err.getvalue()
    said = err.getvalue() + (out.getvalue() if words.startswith("validate") else "")
    said = re.sub(r"(?m)^\w+: \d+%, [\d:]+ left\n", "", said)  # a slow machine shows progress
    assert said.startswith(f"error: {start}") and has in said and "Fix: " in said
    assert said.count("\n") == 1 and len(said) < 900, said


def test_what_a_run_leaves_follows_the_umask(place: Path) -> None:
    """`place` ran with umask 027; safetensors would write for the owner alone."""
    files = [path for path in (place / "RUN").rglob("*") if path.is_file()]
    assert any(path.name == "model.safetensors" for path in files)
    assert {path: path.stat().st_mode & 0o777 for path in files} == dict.fromkeys(files, 0o640)
    assert json.loads((place / "RUN/final/manifest.json").read_text())["step"] == 2


@pytest.mark.usefixtures("untouched")
@pytest.mark.parametrize(
    "words",
    [
        *("data inspect CORPUS", "presets", "show tiny --world 2 --json", "report RUN --json"),
        *("--help", "--version", "data", "plan --help", "train.py --help", "completion bash"),
    ],
)
def test_output_that_nobody_reads(
    words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Use a real pipe without a reader; small output is only written at the end."""
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w") as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        if words.startswith("train.py"):
            monkeypatch.setattr(sys, "argv", words.split())
            with pytest.raises(SystemExit, match=r"^141$"):
                parse_or_exit("train.py")
        else:
            assert main(words.split()) == 141
    assert capsys.readouterr().err == ""


def test_activations_of_a_gpu_name_no_kernel_of_a_cpu(capsys: pytest.CaptureFixture[str]) -> None:
    words = "activations tiny --model.pattern A --model.depth 2 --data.seq-len 32 --json"
    for device, found in (("auto", False), ("cpu", True)):
        assert main([*words.split(), "--train.device", device]) == 0
        out = capsys.readouterr().out
        assert "scaled_dot_product_flash_attention" in out and ("_for_cpu" in out) is found
