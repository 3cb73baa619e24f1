"""Wrong inputs of every command and of train.py: one line each, its exit code, nothing started.

`WRONG` are command lines of a run, `COMMANDS` those of `megacpp`, with files that are missing,
damaged or of another kind, `RANKS` environments that name no rank. Each leaves the folder it was
called from as it was.
"""

from __future__ import annotations

import io
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import typing
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest
import torch.distributed as dist

from megacpp.cli.main import main
from megacpp.config.arguments import leaf_types, parse_or_exit, parse_run, read_run, replace_keys
from megacpp.config.checks.every import broken
from megacpp.config.presets import tiny
from megacpp.config.schema import Config
from megacpp.config.settings import settings_of
from megacpp.errors import ConfigError, MegacppError

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
    (
        "tiny --train.tokens-per-step 8192 --train.grad-accum 3",
        "train.grad_accum=3",
        "only one of the two",
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
    ("tiny --model.mhc.streams 2 --model.mhc.iterations 1001", "model.mhc.iterations=1001", "1000"),
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

# (arguments, exit code, start of the line, words that it must contain); RUN is a finished run,
# CORPUS its corpus, and the others are files and folders of the fixture `place`.
COMMANDS: list[tuple[str, int, str, str]] = [
    ("nope", 2, "command=nope: ", "use one of"),
    ("presetz", 2, "command=presetz: ", "'presets'"),
    ("''", 2, "command=: ", "use one of"),
    ("--nope", 2, "command=--nope: ", "use one of"),
    ("data nope", 2, "command=data nope: ", "did you mean 'data "),
    ("memory x", 2, "command=memory x: ", "did you mean 'memory "),
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
    ("plan", 2, "world=: ", "write --world VALUE"),
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


@pytest.fixture(scope="module")
def place(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a finished run, its corpus, and damaged copies of both."""
    from tests.launch import forked

    folder = tmp_path_factory.mktemp("place")
    shutil.copytree(corpus, folder / "CORPUS")
    small = "--model.dim 32 --model.depth 1 --model.pattern F --data.seq-len 64 --run.steps 2"
    flags = f"{small} --data.path {corpus} --model.vocab-size 400 --run.dir {folder / 'RUN'}"
    umask = os.umask(0o027)
    try:
        done = forked("tiny", *flags.split(), "--run.sample-tokens", "2")
    finally:
        os.umask(umask)
    assert done.returncode == 0, done.stderr
    text = (folder / "RUN/config.json").read_text()
    for name, content in {
        "half": text[: len(text) // 2],
        "binary": bytes(range(256)),
        "deep": "[" * 100_000,
        "list": "[]",
        "missing": None,
        "words": text.replace('"dim": 32', '"dim": "wide"'),
        "negative": text.replace('"dim": 32', '"dim": -32'),
        "older": text.replace('"init_std"', '"init_deviation"'),
    }.items():
        _copy(folder / "RUN", f"RUN_{name}", "config.json", content)
    manifest = json.loads((folder / "RUN/final/manifest.json").read_text())
    _copy(folder / "RUN", "RUN_manifest", "final/manifest.json", "[" * 100_000)
    other = json.dumps({**manifest, "version": 9})
    _copy(folder / "RUN", "RUN_version", "final/manifest.json", other)
    _copy(folder / "RUN", "RUN_weights", "final/model.safetensors", "short")
    text = (folder / "CORPUS/index.json").read_text()
    for name, content in {
        "half": text[:500],
        "binary": bytes(range(256)),
        "deep": "[" * 100_000,
        "list": "[]",
        "version": re.sub(r'"format_version": \d', '"format_version": 9', text),
    }.items():
        _copy(folder / "CORPUS", f"CORPUS_{name}", "index.json", content)
    _copy(folder / "CORPUS", "CORPUS_shard", "train-00000.bin", "")
    _copy(folder / "CORPUS", "CORPUS_tokenizer", "tokenizer.json", "{}")
    for name, content in {
        "EMPTY": b"",
        "BINARY": bytes(range(256)),
        "DEEP": b"[" * 100_000,
    }.items():
        (folder / name).write_bytes(content)
    for name, content in {
        "empty.json": b"",
        "binary.toml": bytes(range(256)),
        "deep.json": b"[" * 100_000,
        "digits.json": b'{"model.dim": ' + b"9" * 5000 + b"}",
        "list.json": b"[]",
        "presets.json": b'{"preset": ["tiny"]}',
        "odd.json": b'{"a\\nb": 1}',
        "far.toml": b"model.dim = 99999999999999999999",
        "section.toml": b"model = 3",
        "range.toml": b"[model]\ndim = -8",
        "mesh.toml": b"mesh.tp = 3",
    }.items():
        (folder / name).write_bytes(content)
    (folder / "folder.toml").mkdir()
    (folder / "FOLDER").mkdir()
    (folder / "FULL").mkdir()
    (folder / "FULL/notes").write_text("mine")
    (folder / "SOURCE").mkdir()
    for number in range(4):
        (folder / f"SOURCE/{number}.h").write_text(f"int a{number};\n" * 40)
    return folder


def _copy(source: Path, name: str, file: str, content: str | bytes | None) -> None:
    """`source` beside itself as `name`, with one file replaced (None: removed)."""
    path = shutil.copytree(source, source.with_name(name)) / file
    path.unlink()
    if content is not None:
        path.write_bytes(content.encode() if isinstance(content, str) else content)


@pytest.fixture
def untouched(place: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Called from `place`, which stays as it is; no process group is started."""
    monkeypatch.chdir(place)
    for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    before = _listed(place)
    yield
    assert _listed(place) == before and not dist.is_initialized()


def _listed(folder: Path) -> dict[Path, int]:
    return {path: path.lstat().st_mtime_ns for path in folder.rglob("*")}


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
    assert line.startswith(key) and words in line and ". Fix: " in line and len(line) < 600
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


ODD: dict[object, list[str]] = {
    int: ["-1", "1000000007", "9223372036854775807", "9" * 400],
    float: ["-1", "1e300", "1e-300", "nan"],
    str: ["", "é\n", "x" * 5000],
    bool: [""],
}


def test_no_value_of_any_setting_hangs_or_crashes() -> None:
    """Each setting alone at values that nobody means: legal, or one line, and at once."""

    def late(*_: object) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGVTALRM, late)
    try:
        for key, kind in leaf_types(Config).items():
            inner = next((k for k in (*typing.get_args(kind), kind) if k in ODD), str)
            for value in ODD[inner]:
                signal.setitimer(signal.ITIMER_VIRTUAL, 1.0)  # of CPU time
                try:
                    parse_run(["tiny_full", f"--{key}={value}"], 8)
                except MegacppError as error:
                    line = str(error)
                    assert line.isprintable() and ". Fix: " in line and len(line) < 900, line
                except TimeoutError:
                    pytest.fail(f"--{key}={value[:40]} takes over a second")
                finally:
                    signal.setitimer(signal.ITIMER_VIRTUAL, 0)
    finally:
        signal.signal(signal.SIGVTALRM, before)


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


MEETING = {"MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
FP8 = {"precision.fp8": "torchao"}
SIZED = [one for one in settings_of(Config).values() if one.kind is int and one.range]


@pytest.mark.parametrize("value", [-1, 0])
def test_a_size_out_of_range_is_a_rule_and_no_crash(value: int) -> None:
    """`megacpp validate` asks all rules, also those that divide by what is wrong."""
    checked = [one for one in SIZED if one.range and not one.range.holds(value)]
    assert len(checked) > 40
    for one in checked:
        for more in ({}, FP8):
            found = list(broken(replace_keys(tiny(), more | {one.key: value}), 1))
            assert one.range and one.range.least is not None
            start = f"{one.key}={value}: must be at least {one.range.least}. Fix: "
            assert str(found[0]).startswith(start), one.key


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
