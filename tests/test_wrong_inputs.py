"""Wrong settings of a run: one line each, its exit code, nothing started.

`WRONG` are command lines of a run, `RANKS` environments that name no rank. Each leaves the folder
it was called from as it was.
"""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest

from megacpp.config.arguments import parse_or_exit, parse_run, read_run
from megacpp.config.checks.every import broken
from megacpp.errors import ConfigError, MegacppError
from tests.damaged import place as place
from tests.damaged import untouched as untouched
from tests.test_wrong_commands import COMMANDS

ROOT = Path(__file__).parents[1]

# (arguments, key that the line must start with, words that it must contain)
WRONG: list[tuple[str, str, str]] = [
    ("tinny", "preset=tinny", "tiny"),
    ("tiny stray", "argument=stray", "--section.key"),
    ("tiny --optm.lr 1", "--optm.lr", "--optim.lr"),
    ("tiny --lr 1", "--lr", "--optim.lr"),
    ("tiny --run.steps", "run.steps=", "needs a value"),
    ("tiny --run.steps many", "run.steps=many", "whole number"),
    ("tiny --run.steps -1", "run.steps=-1", "at least 0"),
    ("tiny --optim.lr fast", "optim.lr=fast", "a finite number"),
    ("tiny --optim.lr inf", "optim.lr=inf", "finite"),
    ("tiny --optim.lr nan", "optim.lr=nan", "finite"),
    ("tiny --run.no-tensorboard=true", "run.tensorboard=true", "takes no value"),
    ("tiny --optim.lr -1", "optim.lr=-1.0", "at least 0"),
    ("tiny --optim.name sgd", "optim.name=sgd", "muon_adamw, adamw"),
    ("tiny --optim.name adamw --optim.lr 0", "optim.lr=0", "nothing would be learned"),
    ("tiny --optim.beta1 1", "optim.beta1=1.0", "[0, 1)"),
    ("tiny --optim.beta2 1.5", "optim.beta2=1.5", "[0, 1)"),
    ("tiny --optim.muon-momentum -0.1", "optim.muon_momentum=-0.1", "[0, 1)"),
    ("tiny --optim.eps 0", "optim.eps=0.0", "above 0"),
    ("tiny --optim.schedule linear", "optim.schedule=linear", "cosine, wsd, constant"),
    ("tiny --optim.warmup-ratio 2", "optim.warmup_ratio=2.0", "[0, 1]"),
    ("tiny --optim.warmup-steps 500 --run.steps 10", "optim.warmup_steps=500", "run.steps (10)"),
    ("tiny --optim.clip-norm -1", "optim.clip_norm=-1.0", "at least 0"),
    ("tiny --model.mhc.streams 0", "model.mhc.streams=0", "at least 1"),
    ("tiny --model.mhc.streams 2 --model.mhc.iterations 0", "model.mhc.iterations=0", "at least 1"),
    ("tiny --model.mhc.ordering other", "model.mhc.ordering=other", "paper, deepseek_v4, megatron"),
    ("tiny --optim.muon-bucket-mib 0", "optim.muon_bucket_mib=0", "at least 1"),
    ("tiny --model.engram.layers 0,9", "model.engram.layers=0,9", "ranks 0 to 2"),
    ("tiny --model.engram.layers x", "model.engram.layers=x", "write 0,2,3 or every:4 or all"),
    ("tiny --model.pattern MF --model.engram.layers all", "model.engram.layers=all", "no A block"),
    ("tiny --model.engram.layers 0 --model.engram.dim 30", "model.engram.dim=30", "dim 32"),
    ("tiny --model.engram.layers 0 --model.engram.heads 0", "model.engram.heads=0", "at least 1"),
    ("tiny --model.engram.layers 0 --model.engram.max-order 1", "model.engram.max_order=1", "2"),
    (
        "tiny --model.engram.layers 0 --model.engram.table-size 9999999999",
        "model.engram.table_size=9999999999",
        "at most 2147483648",
    ),
    (
        "tiny --model.engram.layers 0 --model.engram.lr-factor -1",
        "model.engram.lr_factor=-1.0",
        "at least 0",
    ),
    ("tiny --optim.qk-clip 100", "optim.qk_clip=100.0", "qk_norm"),
    ("tiny --optim.qk-clip 100 --model.pattern MF", "optim.qk_clip=100.0", "no attention"),
    ("tiny --optim.qk-clip 1 --model.pattern MFA --model.depth 2", "optim.qk_clip=1.0", "2 layers"),
    ("tiny --optim.adamw-layers wo,o_proj", "optim.adamw_layers=o_proj", "use some of"),
    ("tiny --optim.adamw-state 2bit", "optim.adamw_state=2bit", "fp32, 8bit, 4bit, cpu_offload"),
    (
        "tiny --optim.adamw-state cpu_offload --train.device cpu",
        "optim.adamw_state=cpu_offload",
        "in the memory of the host already",
    ),
    (
        "tiny --train.batch-warmup-steps 1000000000",
        "train.batch_warmup_steps=1000000000",
        "at most 1000000",
    ),
    ("tiny --model.top.loss -1", "model.top.loss=-1.0", "at least 0"),
    ("tiny --model.top.window 0", "model.top.window=0", "at least 1"),
    ("tiny --model.ngram.heads -1", "model.ngram.heads=-1", "at least 0"),
    ("tiny --model.ngram.max-order 1", "model.ngram.max_order=1", "at least 2"),
    ("tiny --model.ngram.table-size 1", "model.ngram.table_size=1", "at least 2"),
    ("tiny --train.max-skips 0", "train.max_skips=0", "at least 1"),
    ("tiny --train.nonfinite ignore", "train.nonfinite=ignore", "skip, sanitize, raise"),
    ("tiny --train.gradient-sync never", "train.gradient_sync=never", "defer, each, resident"),
    (
        "tiny --precision.dtype fp16 --train.nonfinite sanitize",
        "train.nonfinite=sanitize",
        "loss scale",
    ),
    ("tiny --precision.loss-scale 1000", "precision.loss_scale=1000.0", "power of two"),
    ("tiny --precision.loss-scale 0", "precision.loss_scale=0.0", "above 0"),
    ("tiny --optim.muon-steps 0", "optim.muon_steps=0", "at least 1"),
    ("tiny --model.pattern AXE", "model.pattern=AXE", "A (attention)"),
    ("tiny --model.pattern |", "model.pattern=|", "no letter"),
    ("tiny --model.pattern A|E", "model.pattern=A|E", "model.depth=12"),
    ("tiny --model.pattern A||E --model.depth 2", "model.pattern=A||E", "stage is empty"),
    ("tiny --model.depth 0", "model.depth=0", "at least 1"),
    ("tiny --model.dim 0", "model.dim=0", "at least 1"),
    ("tiny --model.vocab-size 1", "model.vocab_size=1", "at least 2"),
    ("tiny --model.logit-softcap 0", "model.logit_softcap=0.0", "above 0"),
    ("tiny --model.attention.kind mha", "model.attention.kind=mha", "gqa, mla"),
    ("tiny --model.attention.num-kv-heads 4", "model.attention.num_kv_heads=4", "num-kv-heads 3"),
    (
        "tiny --model.attention.head-dim 33",
        "model.attention.head_dim=33",
        "use --model.attention.head-dim 34.",
    ),
    ("tiny --checkpoint.init NOPE", "checkpoint.init=NOPE", "no such folder"),
    ("tiny --checkpoint.init FOLDER", "checkpoint.init=FOLDER", "no config.json with a model_type"),
    (
        "tiny --model.attention.kind mla --model.attention.softcap 50",
        "model.attention.qk_norm",
        "grouped-query",
    ),
    (
        "tiny --model.attention.kind mla --model.attention.no-qk-norm"
        " --model.attention.qk-rope-head-dim 7",
        "model.attention.qk_rope_head_dim=7",
        "even",
    ),
    ("tiny --model.mamba3.headdim 100", "model.mamba3.headdim=100", "headdim 96"),
    ("tiny --model.mamba3.ngroups 5", "model.mamba3.ngroups=5", "ngroups 4"),
    ("tiny --model.mamba3.rope-fraction 0.7", "model.mamba3.rope_fraction=0.7", "0.5 or 1.0"),
    ("tiny --model.mamba3.d-state 18", "model.mamba3.d_state=18", "d-state 20"),
    ("tiny --model.mamba3.dt-min 1", "model.mamba3.dt_min=1.0", "dt_max"),
    ("tiny --model.mamba3.a-activation relu", "model.mamba3.a_activation=relu", "heavy_tail"),
    ("tiny --model.mamba3.mimo-rank 0", "model.mamba3.mimo_rank=0", "at least 1"),
    (
        "tiny --model.m2rnn.num-heads 4 --model.m2rnn.num-q-heads 3",
        "model.m2rnn.num_q_heads=3",
        "(4)",
    ),
    ("tiny --model.m2rnn.gradient-clip 0", "model.m2rnn.gradient_clip=0.0", "above 0"),
    ("tiny --model.m2rnn.chunk-size 0", "model.m2rnn.chunk_size=0", "at least 1"),
    ("tiny --model.moe.top-k 9", "model.moe.top_k=9", "num_experts (8)"),
    ("tiny --model.moe.num-groups 3", "model.moe.num_groups=3", "num-groups 2"),
    (
        "tiny --model.moe.num-groups 2 --model.moe.top-k-groups 3",
        "model.moe.top_k_groups=3",
        "num_groups (2)",
    ),
    ("tiny --model.moe.num-groups 4 --model.moe.top-k 3", "model.moe.top_k=3", "only 2 experts"),
    (
        "tiny --model.moe.num-groups 8 --model.moe.top-k-groups 2",
        "model.moe.num_groups=8",
        "best two",
    ),
    (
        "tiny --model.moe.num-shared 0 --model.moe.shared-gate",
        "model.moe.shared_gate=True",
        "no shared expert",
    ),
    ("tiny --model.moe.null-rho 0", "model.moe.null_rho=0.0", "(0, 1]"),
    ("tiny --model.moe.null-rho 1.5", "model.moe.null_rho=1.5", "(0, 1]"),
    (
        "tiny --model.moe.null-rho 0.5 --model.moe.bias-update-rate 0",
        "model.moe.bias_update_rate=0.0",
        "--model.moe.null-rho 1",
    ),
    ("tiny --model.moe.load-warning 0.5", "model.moe.load_warning=0.5", "at least 1"),
    ("tiny --model.moe.capacity-factor 0", "model.moe.capacity_factor=0.0", "above 0"),
    ("tiny --model.moe.z-loss -1", "model.moe.z_loss=-1.0", "at least 0"),
    ("tiny --data.seq-len 1", "data.seq_len=1", "at least 2"),
    ("tiny --data.mix code=0.6,prose", "data.mix=code=0.6,prose", "'prose' isn't NAME=SHARE"),
    ("tiny --data.mix code=1@5", "data.mix=code=1@5", "must rise from 0"),
    ("tiny --model.mtp.depths -1", "model.mtp.depths=-1", "at least 0"),
    ("tiny --model.mtp.depths 64 --data.seq-len 64", "model.mtp.depths=64", "data.seq_len=64"),
    ("tiny --model.mtp.depths 1 --model.mtp.loss -1", "model.mtp.loss=-1.0", "at least 0"),
    ("tiny --model.mtp.depths 1 --model.mtp.switch 2", "model.mtp.switch=2.0", "[0, 1]"),
    ("tiny --model.mtp.depths 1 --model.mtp.beta 0", "model.mtp.beta=0.0", "above 0"),
    (
        "tiny --model.mtp.depths 1 --model.mtp.hidden-dim -1",
        "model.mtp.hidden_dim=-1",
        "at least 0",
    ),
    ("tiny --train.device-batch-size 0", "train.device_batch_size=0", "at least 1"),
    ("tiny --train.tokens-per-step 5000", "train.tokens_per_step=5000", "step 4096 or 6144."),
    (  # as a run is resumed on twice the ranks: half the rows of each keep the batch
        "tiny --train.tokens-per-step 1024 --train.device-batch-size 8",
        "train.tokens_per_step=1024",
        "use --train.device-batch-size 2, or --train.tokens-per-step 4096 or 8192.",
    ),
    (
        "tiny --train.tokens-per-step 8192 --train.grad-accum 3",
        "train.grad_accum=3",
        "use --train.tokens-per-step 0 or",
    ),
    (
        "tiny --model.attention.kind mla",
        "model.attention.qk_norm=True",
        "use --model.attention.kind gqa or --model.attention.qk-norm false",
    ),
    ("tiny --train.device tpu", "train.device=tpu", "auto, cpu, cuda"),
    ("tiny --mesh.tp 3", "mesh.tp=3", "use --mesh.tp 2."),
    ("tiny --mesh.cp 0", "mesh.cp=0", "at least 1"),
    ("tiny --mesh.ep 3", "mesh.ep=3", "use --mesh.ep 2"),
    ("tiny --mesh.dp-shard 3", "mesh.dp_shard=3", "makes 3 ranks, not 2"),
    ("tiny --mesh.dp-replicate 3", "mesh.dp_replicate=3", "use --mesh.dp-replicate 2"),
    ("tiny --mesh.dp-shard 0", "mesh.dp_shard=0", "-1 (fill)"),
    ("tiny --precision.dtype int8", "precision.dtype=int8", "fp32"),
    ("tiny --run.tensorboard maybe", "run.tensorboard=maybe", "true or false"),
    ("tiny --checkpoint.keep -1", "checkpoint.keep=-1", "at least 0"),
    # Numbers that no machine has, and text that is no number.
    ("tiny --model.dim 99999999999999999999", "model.dim=99999999999999999999", "to 922337203"),
    ("tiny --model.dim 1000000007", "model.dim=1000000007", "at most 1048576"),
    ("tiny --model.dim 9223372036854775807", "model.dim=9223372036854775807", "at most"),
    (f"tiny --model.dim {'9' * 5000}", "model.dim=999", "whole number"),
    ("tiny --model.depth 1000000007", "model.depth=1000000007", "at most 1024"),
    ("tiny --model.attention.num-heads 1000000007", "model.attention.num_heads=1", "at most"),
    ("tiny --model.moe.num-experts 1000000007", "model.moe.num_experts=1", "at most 65536"),
    ("tiny --model.vocab-size 2147483648", "model.vocab_size=2147483648", "at most"),
    ("tiny --model.mhc.streams 17", "model.mhc.streams=17", "at most 16"),
    (
        "tiny --model.mhc.streams 2 --model.mhc.iterations 101",
        "model.mhc.iterations=101",
        "most 100",
    ),
    ("tiny --model.ngram.table-size 2147483649", "model.ngram.table_size=2147483649", "at most"),
    (
        "tiny --model.moe.hidden-dim 16777216 --model.moe.num-experts 65536",
        "model.dim=192",
        "1e+15",
    ),
    ("tiny --mesh.pp 1000000007", "mesh.pp=1000000007", "at most 131072"),
    ("tiny --mesh.ep 131071", "mesh.ep=131071", "use --mesh.ep 2"),
    ("tiny --mesh.tp -1", "mesh.tp=-1", "at least 1"),
    ("tiny --data.seq-len 9999999999", "data.seq_len=9999999999", "at most 16777216"),
    (
        "tiny --data.seq-len 65536 --train.device-batch-size 65536",
        "train.device_batch_size=65536",
        "use --train.device-batch-size 32767 or less",
    ),
    (
        "tiny --train.tokens-per-step 1125899906842624",
        "train.tokens_per_step=1125899906842624",
        "1000000 microbatches",
    ),
    ("tiny --train.grad-accum 1000001", "train.grad_accum=1000001", "at most 1000000"),
    ("tiny --memory.device-gib 1e300", "memory.device_gib=1e+300", "[0, 1048576]"),
    ("tiny --run.seed 9223372036854775808", "run.seed=9223372036854775808", "from -9223372036"),
    ("tiny --run.steps 0x10", "run.steps=0x10", "whole number"),
    ("tiny --run.steps 1e3", "run.steps=1e3", "whole number"),
    ("tiny --run.steps 1__0", "run.steps=1__0", "whole number"),
    ("tiny --run.steps 10_", "run.steps=10_", "whole number"),
    ("tiny --run.steps=", "run.steps=", "whole number"),
    ("tiny --run.steps -5", "run.steps=-5", "use --run.steps 0 or more."),
    ("tiny --run.steps 3 4", "argument=4", "is not a flag"),
    ("tiny --optim.lr 1e400", "optim.lr=1e400", "finite"),
    ("tiny --optim.lr é", "optim.lr=é", "finite"),
    ("tiny --optim.lr=", "optim.lr=", "finite"),
    ("tiny --run.tensorboard=", "run.tensorboard=", "true or false"),
    ("tiny --no-run.steps 3", "--no-run.steps", "--run.steps"),
    ("tiny --run.no-steps", "--run.no-steps", "--run.steps"),
    ("tiny --Run.Steps 3", "--Run.Steps", "--run.steps"),
    ("tiny ---run.steps 3", "---run.steps", "--run.steps"),
    ("tiny -- --run.steps 3", "--: ", "no such setting"),
    ("tiny -h3", "argument=-h3", "is not a flag"),
    ("tiny tiny", "argument=tiny", "is not a flag"),
    ("TINY", "preset=TINY", "tiny"),
    ("tiny --run.dir=", "run.dir=", "must name a folder"),
    ("tiny --data.path=", "data.path=", "must name a folder"),
    ("--config", "--config=", "needs a value"),
    ("--config NOPE.toml", "config=NOPE.toml", "No such file"),
    ("tiny --config empty.json", "config=empty.json", "is not JSON"),
    ("--config range.toml", "model.dim=-8", "use --model.dim 1 or more"),
    ("--config far.toml", "far.toml: model.dim=99999999999999999999", "to 922337203"),
    ("--config mesh.toml --mesh.tp 5", "mesh.tp=5", "use --mesh.tp 2"),
    ("nam56r --config RUN/config.json", "preset=nam56r", "is of the preset tiny"),
    ("--help nope", "help=nope", "no such section"),
    ("tiny --help optm", "help=optm", "did you mean 'optim'"),
    (f"--help {'x' * 5000}", "help=xxx", "no such section"),
    ("tiny --fit maybe", "memory.fit=maybe", "off, auto, smoke"),
    ("tiny --fit", "--fit=", "needs a value"),
    ("tiny --recompute-modules all", "recompute_modules=all", "core_attn"),
    ("tiny --gradient-checkpointing maybe", "gradient_checkpointing=maybe", "true or false"),
    (
        "tiny --recompute.activation-memory-budget 2",
        "recompute.activation_memory_budget=2",
        "[-1, 1]",
    ),
    (f"tiny --{'x' * 5000} 1", "--xxx", "no such setting"),
    (f"tiny --model.pattern {'A' * 5000}X", "model.pattern=AAA", "unknown letter"),
]


# (variables of torchrun, key that the line must start with, words that it must contain)
RANKS: list[tuple[str, str, str]] = [
    ("WORLD_SIZE=abc", "WORLD_SIZE=abc", "whole number"),
    ("WORLD_SIZE=", "WORLD_SIZE=", "whole number"),
    ("WORLD_SIZE=0", "WORLD_SIZE=0", "whole number"),
    ("WORLD_SIZE=-2", "WORLD_SIZE=-2", "whole number"),
    ("WORLD_SIZE=2.0", "WORLD_SIZE=2.0", "whole number"),
    ("WORLD_SIZE=99999999999999999999999", "WORLD_SIZE=9999", "whole number"),
    ("WORLD_SIZE=2", "RANK=", "unset WORLD_SIZE"),
    ("WORLD_SIZE=2 RANK=0", "LOCAL_RANK=", "torchrun"),
    ("WORLD_SIZE=2 RANK=0 LOCAL_RANK=0", "MASTER_ADDR=", "torchrun"),
    ("WORLD_SIZE=2 RANK=0 LOCAL_RANK=0 MASTER_ADDR=x", "MASTER_PORT=", "torchrun"),
    ("WORLD_SIZE=2 RANK=2 LOCAL_RANK=0 MASTER_ADDR=x MASTER_PORT=1", "RANK=2", "0 to 1"),
    ("WORLD_SIZE=2 RANK=a LOCAL_RANK=0 MASTER_ADDR=x MASTER_PORT=1", "RANK=a", "0 to 1"),
    ("WORLD_SIZE=2 RANK=0 LOCAL_RANK=5 MASTER_ADDR=x MASTER_PORT=1", "LOCAL_RANK=5", "0 to 1"),
    ("WORLD_SIZE=2 RANK=0 LOCAL_RANK=0 MASTER_ADDR=x MASTER_PORT=0", "MASTER_PORT=0", "1 to 65535"),
    ("WORLD_SIZE=2 RANK=0 LOCAL_RANK=0 MASTER_ADDR=x MASTER_PORT=p", "MASTER_PORT=p", "1 to"),
    ("RANK=1", "RANK=1", "one process"),
    ("WORLD_SIZE=1 LOCAL_RANK=3", "LOCAL_RANK=3", "one process"),
]


def _started(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> tuple[int, str, str]:
    """Exit code and output of what `train.py` does before it imports torch."""
    monkeypatch.setattr(sys, "argv", ["train.py", *arguments])
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err), pytest.raises(SystemExit) as left:
        parse_or_exit("train.py")
    return int(left.value.code or 0), out.getvalue(), err.getvalue()


@pytest.mark.usefixtures("untouched")
@pytest.mark.parametrize(("arguments", "key", "words"), WRONG, ids=[w[0][:60] for w in WRONG])
def test_one_line_with_key_rule_and_fix(
    arguments: str, key: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = {"WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0"}
    for name, value in {**ranks, "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    code, out, err = _started(arguments.split(), monkeypatch)
    assert (code, out) == (2, "") and err.count("\n") == 1
    line = err.removeprefix("error: ").rstrip("\n")
    assert line.startswith(key) and words in line and ". Fix: " in line
    assert len(line) <= (200 if len(arguments) < 200 else 300)
    for fixed, world in fixes(arguments, line):
        assert not [
            e for e in every_error(fixed, world) if e.partition("=")[0] == line.partition("=")[0]
        ], fixed


@pytest.mark.usefixtures("untouched")
@pytest.mark.parametrize(("variables", "key", "words"), RANKS, ids=[w[0] for w in RANKS])
def test_ranks_that_torchrun_did_not_start(
    variables: str, key: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for pair in variables.split():
        monkeypatch.setenv(*pair.split("=", 1))
    code, out, err = _started(["tiny"], monkeypatch)
    assert (code, out) == (2, "") and err.count("\n") == 1
    assert err.startswith(f"error: {key}") and words in err and ". Fix: " in err


def test_the_table_is_whole() -> None:
    assert len(WRONG) + len(COMMANDS) + len(RANKS) >= 250
    mended = [w for w in WRONG if list(fixes(w[0], message(w[0].split(), 2)))]
    assert len(mended) >= 90  # whose fix is one that a program can type


def message(arguments: list[str], world: int) -> str:
    """Return the first error of a command line."""
    with pytest.raises(ConfigError) as caught:
        parse_run(arguments, world)
    return str(caught.value)


def every_error(arguments: list[str], world: int) -> list[str]:
    """All errors of a command line, as `megacpp validate` lists them."""
    try:
        return [str(error) for error in broken(read_run(arguments).config, world)]
    except MegacppError as error:
        return [str(error)]


def fixes(arguments: str, line: str) -> Iterator[tuple[list[str], int]]:
    """Command lines and ranks that the fixes of an error lead to, as far as they can be typed.

    `use --model.dim 8`, `did you mean 'x'`, `start 4 ranks`.
    """
    words, (left, _, fix) = arguments.split(), line.rpartition(". Fix: ")
    key, _, value = left.partition(": ")[0].partition("=")
    if found := re.search(r"did you mean '(.+?)'", fix):
        wrong = key if key.startswith("--") else value
        right = found[1]
        places = [i for i, word in enumerate(words) if word == wrong]
        if places:
            yield [*words[: places[0]], right, *words[places[0] + 1 :]], 2
        return
    if found := re.search(r"start (\d+) ranks", fix):
        yield words, int(found[1])
    if fix.startswith("write "):
        return
    for flag, wanted in re.findall(r"(--[a-z0-9.-]+\.[a-z0-9-]+) ([^\s,]+)", fix.rstrip(".")):
        yield [*words, flag, wanted], 2


MEETING = {"MASTER_ADDR": "localhost", "MASTER_PORT": "1"}


@pytest.mark.parametrize("arguments", ["tiny --mesh.tp 3", "tiny --optm.lr 1"])
def test_train_exits_2_with_one_line_and_without_torch(arguments: str) -> None:
    """Under torchrun's environment but without a rendezvous: a process group would hang or fail."""
    ranks = {"WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0", **MEETING}
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "train.py", *arguments.split()],
        cwd=ROOT,
        env={**os.environ, **ranks},
        capture_output=True,
        text=True,
        timeout=60,
    )
    lines = [x for x in done.stderr.splitlines() if not x.startswith("import time:")]
    assert done.returncode == 2 and len(lines) == 1 and lines[0].startswith("error: ")
    assert not any(x.endswith(" torch") for x in done.stderr.splitlines())


def test_other_ranks_stay_silent() -> None:
    ranks = {"WORLD_SIZE": "2", "RANK": "1", "LOCAL_RANK": "1", **MEETING}
    done = subprocess.run(
        [sys.executable, "train.py", "tinny"],
        cwd=ROOT,
        env={**os.environ, **ranks},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2 and not done.stderr and not done.stdout
