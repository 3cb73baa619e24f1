"""Every setting of a run changes the memory estimate, or leaves it alone for a reason given here.

A setting without a line here fails: a feature comes with its entry in the estimator. Both are
shown by estimates with another value.
"""

from __future__ import annotations

from dataclasses import fields, is_dataclass, make_dataclass, replace
from functools import cache
from typing import get_args, get_type_hints

import pytest

from megacpp.config.arguments import parse_run
from megacpp.config.policy import CheckpointingPolicy
from megacpp.config.schema import Config
from megacpp.memory.estimate import MemoryEstimate, estimate


def sections(kind: type, name: str = "") -> dict[str, type]:
    """Return the classes of settings by section."""
    found = {name: kind}
    for key, of in get_type_hints(kind).items():
        for one in (of, *get_args(of)):  # a section may be None
            if isinstance(one, type) and is_dataclass(one):
                found |= sections(one, f"{name}.{key}".lstrip(".").replace("_", "-"))
    return found


SECTIONS = {name: kind for name, kind in sections(Config).items() if name}
SMALL = (
    "dense_110m --model.dim 64 --model.vocab-size 256 --model.mlp.hidden-dim 128 --data.seq-len 64 "
    "--model.attention.num-heads 4 --model.attention.num-kv-heads 2 --model.attention.head-dim 16 "
    "--train.tokens-per-step 0 --train.grad-accum 2 --model.depth 3 --recompute.ablock none "
    "--recompute.eblock none --recompute.mblock none --recompute.rblock none"
)
GPU = "--train.device cuda --model.pattern"
MLA = "--model.attention.kind mla --model.attention.no-qk-norm --model.attention.q-lora-rank 32"
MLA += " --model.pattern AFF"
SPARSE = "--model.pattern AAF --model.attention.sparse"
CHOICE = f"{SPARSE}.layers all {SPARSE.split()[-1]}.top-k 8"
# More than what is on its way at a time, which stays counted.
MANY = "--train.device-batch-size 32768"
OFFLOAD = (
    f"{MANY} --train.device cuda --recompute.offload saved_tensors --recompute.offload-min-mib"
)
FP8_PATTERN = "FFF --precision.fp8 torchao --precision.fp8-ends 0"
FP8 = f"--model.pattern {FP8_PATTERN}"
MOE = "EFF --model.moe.num-experts 8 --model.moe.top-k 2 --model.moe.hidden-dim 64"
ORDERED = "--mesh.cp 2 --mesh.cp-order contiguous"
DEFAULT = ""  # or what the flags around a setting make it
# By setting: ranks, flags around it, and two of its values.
ENTRIES: dict[str, tuple[int, str, str, str]] = {
    "recompute.ablock": (1, "--model.pattern AFF", "none", "full"),
    "recompute.eblock": (1, "--model.pattern EFF", "none", "expert_gemm_only"),
    "recompute.mblock": (1, "--model.pattern MFF", "none", "conv_bc_only"),
    "recompute.rblock": (1, "--model.pattern RFF", "none", "recurrence"),
    "recompute.gblock": (1, "--model.pattern GFF", "none", "full"),
    "recompute.fblock": (1, "--model.pattern FFF", "none", "full"),
    "recompute.norms": (1, "--model.pattern FFF", "False", "True"),
    "recompute.regather": (2, "--mesh.tp 2 --model.pattern FFF", "off", "on"),
    "recompute.core-attn": (1, "--model.pattern AFF", "False", "True"),
    "recompute.mlp": (1, "--model.pattern FFF", "False", "True"),
    "recompute.mla-q-upproj": (1, MLA, "False", "True"),
    "recompute.mla-kv": (1, MLA, "False", "True"),
    "recompute.mtp": (1, "--model.pattern FFF --model.mtp.depths 2", "False", "True"),
    "recompute.mhc-group-size": (1, "--model.pattern FFF --model.mhc.streams 2", "-1", "2"),
    "recompute.offload": (1, f"{MANY} {GPU} FFF", "none", "saved_tensors"),
    "recompute.offload-min-mib": (1, f"{OFFLOAD.rsplit(' ', 1)[0]} --model.pattern FFF", "0", "9"),
    "recompute.offload-host-gib": (1, f"{OFFLOAD} 0 --model.pattern FFF", "0.0001", "64"),
    "recompute.compress": (1, "--model.pattern FFF", "0", "0.25"),
    "recompute.activation-memory-budget": (
        1,
        "--train.compile inductor --model.pattern FFF",
        "1",
        "0",
    ),
    "train.device-batch-size": (1, "--model.pattern FFF", "4", "8"),
    "train.grad-accum": (1, "--model.pattern FFF", "1", "2"),
    "train.tokens-per-step": (1, "--model.pattern FFF --train.grad-accum 0", "1024", "2048"),
    "train.num-chunks": (2, "--model.pattern FFF --mesh.pp 2 --train.grad-accum 4", "1", "2"),
    "train.gradient-sync": (2, "--model.pattern FFF", "defer", "each"),
    "train.device": (1, "--model.pattern FFF", "cpu", "cuda"),
    "train.compile": (1, "--model.pattern FFF", "off", "inductor"),
    "precision.dtype": (1, "--model.pattern FFF", "bf16", "fp32"),
    "precision.fp8": (1, "--precision.fp8-ends 0 --model.pattern FFF", "off", "torchao"),
    "precision.fp8-ends": (1, FP8, "0", "1"),
    "precision.fp8-recipe": (
        1,
        f"{FP8} --precision.fp8-local-scales",
        "rowwise_with_gw_hp",
        "tensorwise",
    ),
    "precision.fp8-layers": (1, FP8.replace("FFF", "AFF"), "F", "AF"),
    "kernels.attention": (1, f"{GPU} AFF", "varlen", "torch"),
    "kernels.mamba3": (1, f"{GPU} MFF", "mamba_ssm", "torch"),
    "kernels.m2rnn": (1, f"{GPU} RFF", "triton", "torch"),
    "kernels.gated-delta-rule": (1, f"{GPU} GFF", "triton", "torch"),
    "kernels.short-conv": (1, f"{GPU} MFF --model.mamba3.conv-kernel 8", "triton", "torch"),
    "kernels.gates": (1, f"{GPU} RFF", "triton", "torch"),
    "kernels.experts": (1, f"{GPU} EFF", "triton", "torch"),
    "kernels.cross-entropy": (1, f"{GPU} FFF", "triton", "torch"),
    "kernels.rms-norm": (1, f"{GPU} FFF", "triton", "torch"),
    "model.attention.sparse.layers": (1, "--model.pattern AAF", "0", "all"),
    "model.attention.sparse.top-k": (1, f"{SPARSE}.layers all", "8", "16"),
    "model.attention.sparse.num-heads": (1, CHOICE, "2", "4"),
    "model.attention.sparse.head-dim": (1, CHOICE, "16", "32"),
    "model.attention.sparse.share": (1, CHOICE, "1", "2"),
    "model.attention.sparse.own": (1, f"{CHOICE} {SPARSE.split()[-1]}.share 2", "0", "1"),
    "model.attention.sparse.stage": (1, f"{CHOICE} --data.seq-len 512", "sparse", "dense"),
}
# Ranks, pattern and flags, then settings of a section, each with a value that moves the estimate.
GROUPS = (
    ("run", 1, "FFF", "tasks fim"),
    ("model", 1, "FFF", "dim 128; depth 6; vocab-size 2048; tie-embeddings false; pattern MFF;"
     " logit-softcap 30; post-norm true"),
    ("model.attention", 1, "AFF", "num-heads 8; num-kv-heads 1; head-dim 32; qk-norm false;"
     " qk-norm-wide true; qkv-bias true; output-gate true; softcap 30"),
    ("model.attention", 1, "AFF --model.attention.no-qk-norm", "kind mla"),
    ("model.attention", 1, "AFF --model.attention.kind mla --model.attention.no-qk-norm",
     "q-lora-rank 32; kv-lora-rank 32; qk-nope-head-dim 32; qk-rope-head-dim 32; v-head-dim 32"),
    ("model.attention", 1, "AFF --model.attention.window 8", "full-layers 0"),
    ("model.mamba3", 1, "MFF", "d-state 32; expand 1; headdim 32; ngroups 2; mimo-rank 2;"
     " a-activation softplus; out-norm true; conv-kernel 1; chunk-size 32; rope-fraction 1.0"),
    ("model.m2rnn", 1, "RFF", "num-heads 2; key-dim 32; value-dim 8; conv-kernel 2; chunk-size 32"),
    ("model.m2rnn", 1, "RFF --model.m2rnn.num-heads 4", "num-q-heads 2; num-k-heads 2"),
    ("model.gated-deltanet", 1, "GFF", "num-key-heads 1; num-value-heads 2; key-dim 32;"
     " value-dim 32; conv-kernel 2; allow-neg-eigval true; gate false; chunk-size 32"),
    ("model.moe", 1, MOE, "num-experts 4; top-k 1; hidden-dim 128; activation relu2; num-shared 2;"
     " shared-hidden-dim 128; shared-gate true; score softmax; null-rho 0.5; capacity-factor 0.5;"
     " balance-loss 0.1; sequence-loss 0.1; z-loss 0.1"),
    ("model.mlp", 1, "FFF", "hidden-dim 512; activation relu2"),
    ("model.mtp", 1, "FFF --model.mtp.depths 2", "depths 1; shared false; hidden post_norm;"
     " hidden-dim 1; detach-trunk true; detach-head true"),
    ("model.top", 1, "FFF --model.top.window 8", "loss 0.1"),
    ("model.top", 1, "FFF --model.top.loss 0.1", "window 32"),
    ("model.mhc", 1, "FFF --model.mhc.streams 2", "streams 1; collapse sum; iterations 80"),
    ("model.ngram", 1, "FFF --model.ngram.heads 2",
     "heads 4; max-order 2; table-size 5000; dim 32"),
    ("model.engram", 1, "AFF --model.engram.layers 0",
     "heads 4; max-order 2; table-size 5000; dim 128; conv-kernel 2"),
    ("model.engram", 1, "AAF", "layers 0,1"),
    ("data", 1, "FFF", "seq-len 128"),
    ("mesh", 4, "FFF", "pp 2; dp-replicate 2; cp 2; tp 2; reshard always"),
    ("mesh", 2, "EFF", "ep 2"),
    ("mesh", 2, "EFF --mesh.ep 2", "ep-dispatch per_expert"),
    ("mesh", 2, "AFF --mesh.cp 2", "cp-attention heads"),
    ("mesh", 2, f"MFF {ORDERED}", "cp-mamba3 heads"),
    ("mesh", 2, f"RFF {ORDERED} --model.m2rnn.num-heads 4", "cp-m2rnn serial"),
    ("mesh", 2, f"GFF {ORDERED}", "cp-gated-deltanet heads"),
    ("mesh", 2, "FFF --mesh.pp 2 --model.depth 8 --train.grad-accum 4", "pp-schedule gpipe"),
    ("optim", 1, "FFF", "name adamw; adamw-state 8bit; muon-momentum-dtype fp32; muon-dtype fp32"),
    ("optim", 1, "FFF --optim.name muon_adamw", "adamw-layers w1,w2"),
    ("optim", 1, "FFF --optim.name adamw", "cautious-weight-decay True"),
    ("optim", 2, "FFF --model.dim 1024 --model.mlp.hidden-dim 4096", "muon-bucket-mib 64"),
    ("memory", 1, "FFF", "expandable-segments false"),
)  # fmt: skip
ENTRIES |= {
    f"{section}.{name}": (ranks, f"--model.pattern {around}", DEFAULT, value)
    for section, ranks, around, settings in GROUPS
    for name, value in map(str.split, settings.split("; "))
}
# Ranks, pattern and flags, a reason, then settings of a section, each with a value that leaves the
# estimate as it is.
NO_BYTES = (
    ("run", 1, "FFF", "names, and what happens when; an evaluation keeps no activations",
     "dir x; force true; steps 9; seed 1; log-every 2; eval-every 5; eval-rows 8; sample-tokens 0;"
     " sample-prompt x; tensorboard false; wandb x; until 3; monitor 8080; digest-every 5;"
     " audit-every 5; timeout 60; profile 2"),
    ("run", 1, "FFF --run.tasks fim", "when, and how many one after the other",
     "tasks-every 5; tasks-limit 3"),
    ("checkpoint", 1, "FFF", "files; copies of the state are in host memory",
     "every 5; keep 3; keep-every 10; async true; mirror-every 5; resume never; damaged older;"
     " remote file:///x"),
    ("speed", 1, "FFF", "a limit of speed", "min-mfu 0.1; gate off"),
    ("recompute", 1, "AFF", "has one value", "last-layer never"),
    ("recompute", 1, "FFF", "which function runs again, not what", "fp8-wrapper torchao"),
    ("recompute", 1, "FFF --recompute.compress 0.25", "when projections are drawn",
     "compress-redraw 8"),
    ("train", 1, "FFF", "starts with fewer microbatches; the last steps decide",
     "batch-warmup-steps 8"),
    ("train", 1, "EFF", "forbids a warmup of the batch", "static-shapes true"),
    ("train", 1, "FFF", "a factor, and decisions behind the step, made in place",
     "divisor microbatches; nonfinite sanitize"),
    ("train", 1, "FFF", "counts of steps", "max-skips 5; rewinds 2; max-spikes 3"),
    ("precision", 1, "FFF --precision.dtype fp16 --train.device cuda", "a number, a count of steps",
     "loss-scale 1024; loss-scale-growth 100"),
    ("precision", 1, FP8_PATTERN, "a permission", "fp8-local-scales true"),
    ("precision", 2, f"{FP8_PATTERN} --precision.fp8-local-scales"
     " --precision.fp8-recipe tensorwise", "estimated as without it, which is more",
     "fp8-all-gather true"),
    ("model", 1, "FFF", "numbers", "norm-eps 1e-6; z-loss 0.1; init-std 0.1"),
    ("model.attention", 1, "AFF", "numbers, and a limit", "rope-theta 1000; rope-fraction 0.5;"
     " max-seq-len 64"),
    ("model.attention", 1, "AFF", "which keys are seen; no scores are saved", "window 8"),
    ("model.attention.yarn", 1, "AFF", "numbers, from which one small table is computed",
     "original-seq-len 32; factor 4; beta-fast 16; beta-slow 2; mscale 0.5; ramp turns"),
    ("model.attention.sparse", 1, CHOICE.partition(" ")[2], "a weight", "loss 0.1"),
    ("model.mamba3", 1, "MFF", "numbers", "a-floor 0.01; dt-min 0.01; dt-max 0.2;"
     " dt-init-floor 0.001"),
    ("model.m2rnn", 1, "RFF", "a bound, and of which gradient",
     "gradient-clip 0.5; clip-mode total"),
    ("model.moe", 1, MOE, "numbers", "route-scale 2; load-warning 8; bias-update-rate 0.1"),
    ("model.moe", 1, f"{MOE} --model.moe.num-groups 4 --model.moe.top-k-groups 2",
     "which experts are chosen, not how many",
     "softmax-order pre; num-groups 2; top-k-groups 1"),
    ("model.mtp", 1, "FFF --model.mtp.depths 2", "numbers, and an order of inputs",
     "loss 0.2; loss-final 0.1; switch 0.5; beta 0.5; order hidden_embedding"),
    ("model.ngram", 1, "FFF --model.ngram.heads 2", "a number", "lr-factor 3"),
    ("model.engram", 1, "AFF --model.engram.layers 0", "numbers", "seed 7; lr-factor 3"),
    ("model.mhc", 1, "FFF --model.mhc.streams 2", "an order of operations, first values",
     "ordering deepseek_v4; init plain"),
    ("data", 1, "FFF", "which rows are read", "path data/other; mix a=0.5,b=0.5"),
    ("mesh", 2, "AFF", "what the other axes leave", "dp-shard 2"),
    ("mesh", 2, "AFF --mesh.cp 2", "which tokens a rank has, not how many", "cp-order contiguous"),
    ("optim", 1, "FFF", "numbers", "lr 0.1; embed-lr 0.1; head-lr 0.1; vector-lr 0.1; beta1 0.8;"
     " beta2 0.9; eps 1e-6; weight-decay 0.2; muon-lr 0.1; muon-momentum 0.9;"
     " muon-weight-decay 0.1; clip-norm 0"),
    ("optim", 1, "FFF", "a schedule", "schedule wsd; warmup-steps 5; warmup-ratio 0.1;"
     " decay-ratio 0.3; final-lr-ratio 0.2"),
    ("optim", 1, "FFF", "how often one product is repeated, and its factors", "muon-steps 3;"
     " muon-coefficients polar_express; muon-scale rms; muon-nesterov false"),
    ("optim", 1, "AFF --model.attention.no-qk-norm", "two numbers for each head",
     "qk-clip 100"),
    ("memory", 1, "FFF", "what is made of an estimate, or measured", "gate off; device-gib 8;"
     " headroom 0.2; fit auto; fit-candidates 2; calibration other; snapshot-every 10;"
     " snapshot-gap 5"),
)  # fmt: skip
# Not tried: their values are folders with weights, which are read before the first step.
OF_A_FOLDER = {"checkpoint.init", "checkpoint.init-check"}
IGNORED = OF_A_FOLDER | {
    f"{section}.{pair.split()[0]}"
    for section, *_, settings in NO_BYTES
    for pair in settings.split("; ")
}


@cache
def found(flags: str, size: int) -> MemoryEstimate:
    """Return the estimate of a small model with some flags."""
    return estimate(parse_run([*SMALL.split(), *flags.split()], size).config, size, detail=False)


def moments(name: str, value: str, size: int, around: str) -> dict[str, int]:
    """Return moments of an estimate; kernels don't have to be installed.

    Settings of `memory` change what is beside tensors: the components are returned.
    """
    if not name.startswith("kernels."):
        memory = found(f"{around} --{name} {value}" if value else around, size)
        return memory.components if name.startswith("memory.") else memory.moments
    config = parse_run([*SMALL.split(), *around.split()], size).config
    kernel = {name.partition(".")[2].replace("-", "_"): value}
    config = replace(config, kernels=replace(config.kernels, **kernel))
    return estimate(config, size, detail=False).moments


@pytest.mark.parametrize("name", ENTRIES)
def test_a_setting_changes_the_estimate(name: str) -> None:
    size, around, *values = ENTRIES[name]
    before, after = (moments(name, value, size, around) for value in values)
    assert before != after


@pytest.mark.parametrize(("section", "size", "around", "reason", "settings"), NO_BYTES)
def test_other_settings_leave_the_estimate_alone(
    section: str, size: int, around: str, reason: str, settings: str
) -> None:
    around = f"--model.pattern {around}"
    flags = " ".join(f"--{section}.{pair}" for pair in settings.split("; "))
    before, after = found(around, size), found(f"{around} {flags}", size)
    assert after == before, reason


def flag(section: str, field: str) -> str:
    """Return a setting as its flag has it."""
    return f"{section}.{field.rstrip('_').replace('_', '-')}"


def missing(kinds: dict[str, type]) -> set[str]:
    """Return the settings of some sections that have no line."""
    names = {flag(section, field.name) for section, kind in kinds.items() for field in fields(kind)}
    return names - ENTRIES.keys() - IGNORED - SECTIONS.keys()


def test_no_setting_is_without_an_entry() -> None:
    assert missing(SECTIONS) == set()
    assert not ENTRIES.keys() & IGNORED
    known = {flag(section, f.name) for section, kind in SECTIONS.items() for f in fields(kind)}
    assert ENTRIES.keys() | IGNORED <= known


def test_a_new_setting_needs_an_entry() -> None:
    new = make_dataclass("New", [("twice", bool, False)], bases=(CheckpointingPolicy,), frozen=True)
    assert missing({"recompute": new}) == {"recompute.twice"}
