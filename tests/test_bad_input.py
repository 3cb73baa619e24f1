"""Wrong configurations: each is one line with key, value, rule and fix; exit 2, before any rank."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from megacpp.arguments import parse_run, replace_keys
from megacpp.config import Config
from megacpp.errors import ConfigError
from megacpp.presets import tiny
from megacpp.rules import broken
from megacpp.settings import settings_of

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
    ("tiny --model.engram.layers x", "model.engram.layers=x", "write 0,2,3 or all"),
    ("tiny --model.pattern MF --model.engram.layers all", "model.engram.layers=all", "no A block"),
    ("tiny --model.engram.layers 0 --model.engram.dim 30", "model.engram.dim=30", "use dim=32"),
    ("tiny --model.engram.layers 0 --model.engram.heads 0", "model.engram.heads=0", "at least 1"),
    ("tiny --model.engram.layers 0 --model.engram.max-order 1", "model.engram.max_order=1", "2"),
    (
        "tiny --model.engram.layers 0 --model.engram.table-size 9999999999",
        "model.engram.table_size=9999999999",
        "[2, 2147483648]",
    ),
    (
        "tiny --model.engram.layers 0 --model.engram.lr-factor -1",
        "model.engram.lr_factor=-1.0",
        "at least 0",
    ),
    ("tiny --optim.qk-clip 100", "optim.qk_clip=100.0", "qk_norm"),
    ("tiny --optim.qk-clip 100 --model.pattern MF", "optim.qk_clip=100.0", "no attention"),
    ("tiny --optim.adamw-state 2bit", "optim.adamw_state=2bit", "fp32, 8bit, 4bit, cpu_offload"),
    (
        "tiny --optim.adamw-state cpu_offload --train.device cpu",
        "optim.adamw_state=cpu_offload",
        "in the memory of the host already",
    ),
    (
        "tiny --train.batch-warmup-steps 1000000000",
        "train.batch_warmup_steps=1000000000",
        "[0, 1000000]",
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
    ("tiny --model.attention.num-kv-heads 4", "model.attention.num_kv_heads=4", "num_kv_heads=3"),
    ("tiny --model.attention.head-dim 33", "model.attention.head_dim=33", "use 34"),
    ("tiny --model.attention.yarn.factor 2", "model.attention.yarn", "kind=mla"),
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
    ("tiny --model.mamba3.headdim 100", "model.mamba3.headdim=100", "headdim=96"),
    ("tiny --model.mamba3.ngroups 5", "model.mamba3.ngroups=5", "ngroups=4"),
    ("tiny --model.mamba3.rope-fraction 0.7", "model.mamba3.rope_fraction=0.7", "0.5 or 1.0"),
    ("tiny --model.mamba3.d-state 18", "model.mamba3.d_state=18", "d_state=20"),
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
    ("tiny --model.moe.num-groups 3", "model.moe.num_groups=3", "num_groups=2"),
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
        "null_rho=1",
    ),
    ("tiny --model.moe.load-warning 0.5", "model.moe.load_warning=0.5", "at least 1"),
    ("tiny --model.moe.capacity-factor 0", "model.moe.capacity_factor=0.0", "above 0"),
    ("tiny --model.moe.z-loss -1", "model.moe.z_loss=-1.0", "at least 0"),
    ("tiny --data.seq-len 1", "data.seq_len=1", "at least 2"),
    ("tiny --model.mtp.depths -1", "model.mtp.depths=-1", "at least 0"),
    ("tiny --model.mtp.depths 256", "model.mtp.depths=256", "data.seq_len=256"),
    ("tiny --model.mtp.depths 1 --model.mtp.loss -1", "model.mtp.loss=-1.0", "at least 0"),
    ("tiny --model.mtp.depths 1 --model.mtp.switch 2", "model.mtp.switch=2.0", "[0, 1]"),
    ("tiny --model.mtp.depths 1 --model.mtp.beta 0", "model.mtp.beta=0.0", "above 0"),
    (
        "tiny --model.mtp.depths 1 --model.mtp.hidden-dim -1",
        "model.mtp.hidden_dim=-1",
        "at least 0",
    ),
    ("tiny --train.device-batch-size 0", "train.device_batch_size=0", "at least 1"),
    ("tiny --train.tokens-per-step 5000", "train.tokens_per_step=5000", "use 4096 or 6144"),
    (
        "tiny --train.tokens-per-step 8192 --train.grad-accum 3",
        "train.grad_accum=3",
        "only one of the two",
    ),
    ("tiny --train.device tpu", "train.device=tpu", "auto, cpu, cuda"),
    ("tiny --mesh.tp 3", "mesh.tp=3", "use mesh.tp=2, or start 3 ranks"),
    ("tiny --mesh.cp 0", "mesh.cp=0", "at least 1"),
    ("tiny --mesh.ep 3", "mesh.ep=3", "use mesh.ep=2"),
    ("tiny --mesh.dp-shard 3", "mesh.dp_shard=3", "makes 3 ranks, not 2"),
    ("tiny --mesh.dp-replicate 3", "mesh.dp_replicate=3", "use mesh.dp_replicate=2"),
    ("tiny --mesh.dp-shard 0", "mesh.dp_shard=0", "-1 (fill)"),
    ("tiny --precision.dtype int8", "precision.dtype=int8", "fp32"),
    ("tiny --run.tensorboard maybe", "run.tensorboard=maybe", "true or false"),
    ("tiny --checkpoint.keep -1", "checkpoint.keep=-1", "at least 0"),
]


@pytest.mark.parametrize(("arguments", "key", "words"), WRONG, ids=[w[0] for w in WRONG])
def test_one_line_with_key_rule_and_fix(arguments: str, key: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_run(arguments.split(), world_size=2)
    line = str(caught.value)
    assert line.startswith(key) and words in line and ". Fix: " in line and "\n" not in line
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    "change",
    [
        {"model.pattern": "AXE"},
        {"model.attention.sparse.layers": "9"},
        {"model.attention.sparse.own": "x"},
        {"model.engram.layers": "9"},
    ],
    ids=str,
)
def test_a_mistake_is_reported_once(change: dict[str, str]) -> None:
    config = replace_keys(tiny(), change)
    found = [str(error) for error in broken(config, world_size=1)]
    (key,) = change
    assert len(found) == 1 and found[0].startswith(key), found


@pytest.mark.parametrize("state", ["8bit", "4bit"])
def test_low_bit_moments_need_torchao(state: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchao", None)  # as if it weren't installed
    wanted = ["tiny", "--optim.adamw-state", state]
    with pytest.raises(ConfigError, match="Fix: pip install torchao") as caught:
        parse_run(wanted, world_size=2)
    assert str(caught.value).startswith(f"optim.adamw_state={state}: needs torchao")
    assert caught.value.exit_code == 2
    parse_run(["tiny", "--optim.adamw-state", "fp32"], world_size=2)


FP8 = {"precision.fp8": "torchao"}
SIZED = [one for one in settings_of(Config).values() if one.kind is int and one.range]


@pytest.mark.parametrize("value", [-1, 0])
def test_a_size_out_of_range_is_a_rule_and_no_crash(value: int) -> None:
    """`megacpp validate` asks all rules, also those that divide by what is wrong."""
    checked = [one for one in SIZED if one.range and not one.range.holds(value)]
    assert len(checked) > 40
    for one in checked:
        if one.key.startswith("model.attention.yarn"):
            continue  # refused as a whole where attention isn't MLA
        for more in ({}, FP8):
            found = list(broken(replace_keys(tiny(), more | {one.key: value}), 1))
            start = f"{one.key}={value}: must be {one.range}"
            assert str(found[0]).startswith(start), one.key


def test_at_least_forty() -> None:
    assert len(WRONG) >= 40


@pytest.mark.parametrize("arguments", ["tiny --mesh.tp 3", "tiny --optm.lr 1"])
def test_train_exits_2_with_one_line_and_without_torch(arguments: str) -> None:
    """Under torchrun's environment but without a rendezvous: a process group would hang or fail."""
    ranks = {"WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0", "MASTER_PORT": "1"}
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
    ranks = {"WORLD_SIZE": "2", "RANK": "1", "LOCAL_RANK": "1"}
    done = subprocess.run(
        [sys.executable, "train.py", "tinny"],
        cwd=ROOT,
        env={**os.environ, **ranks},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2 and not done.stderr and not done.stdout
