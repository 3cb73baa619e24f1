"""Every setting of a run changes the memory estimate, or is named as one that memory ignores.

A setting without a line here fails: a feature comes with its entry in the estimator.
"""

from __future__ import annotations

from dataclasses import fields, make_dataclass, replace

import pytest

from megacpp.blocks.attention.config import SparseAttentionConfig
from megacpp.config.arguments import parse_run
from megacpp.config.policy import CheckpointingPolicy
from megacpp.config.schema import KernelsConfig, PrecisionConfig, TrainConfig
from megacpp.memory.estimate import estimate

SECTIONS = {
    "recompute": CheckpointingPolicy,
    "train": TrainConfig,
    "precision": PrecisionConfig,
    "kernels": KernelsConfig,
    "model.attention.sparse": SparseAttentionConfig,
}
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
FP8 = "--precision.fp8 torchao --precision.fp8-ends 0 --model.pattern FFF"
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
    "train.gradient-sync": (2, "--model.pattern FFF", "defer", "each"),
    "train.device": (1, "--model.pattern FFF", "cpu", "cuda"),
    "train.compile": (1, "--model.pattern AFF", "off", "inductor"),
    "precision.dtype": (1, "--model.pattern FFF", "bf16", "fp32"),
    "precision.fp8": (1, "--precision.fp8-ends 0 --model.pattern FFF", "off", "torchao"),
    "precision.fp8-layers": (1, FP8.replace("FFF", "AFF"), "F", "AF"),
    "kernels.attention": (1, f"{GPU} AFF", "varlen", "torch"),
    "kernels.mamba3": (1, f"{GPU} MFF --data.seq-len 256", "mamba_ssm", "torch"),
    "kernels.m2rnn": (1, f"{GPU} RFF", "triton", "torch"),
    "kernels.gated-delta-rule": (1, f"{GPU} GFF", "triton", "torch"),
    "kernels.short-conv": (1, f"{GPU} MFF --model.mamba3.conv-kernel 64", "triton", "torch"),
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
IGNORED = {
    "recompute.last-layer": "has one value",
    "recompute.fp8-wrapper": "is which function runs again, not what",
    "recompute.compress-redraw": "is when projections are drawn",
    "train.tokens-per-step": "becomes grad_accum",
    "train.batch-warmup-steps": "starts with fewer microbatches; the last steps decide",
    "train.num-chunks": "is of a pipeline, whose forms tests/memory/test_accumulation.py holds",
    "train.static-shapes": "forbids a warmup",
    "train.divisor": "is a number",
    "train.nonfinite": "is a decision behind the step",
    "train.max-skips": "counts steps",
    "train.rewinds": "counts steps",
    "train.max-spikes": "counts steps",
    "precision.loss-scale": "is a number",
    "precision.loss-scale-growth": "counts steps",
    "precision.fp8-local-scales": "is a permission",
    "precision.fp8-ends": "leaves kinds out; layers of a kind are estimated alike",
    "precision.fp8-recipe": "is what has a scale; tensors in FP8 are as many",
    "precision.fp8-all-gather": "is estimated as without it, which is more",
    "model.attention.sparse.loss": "is a weight",
}


def moments(name: str, value: str, size: int, around: str) -> dict[str, int]:
    """Return moments of an estimate; kernels don't have to be installed."""
    given = [] if name.startswith("kernels.") else [f"--{name}", value]
    config = parse_run([*SMALL.split(), *around.split(), *given], size).config
    if not given:
        kernel = {name.partition(".")[2].replace("-", "_"): value}
        config = replace(config, kernels=replace(config.kernels, **kernel))
    return estimate(config, size, detail=False).moments


@pytest.mark.parametrize("name", ENTRIES)
def test_a_setting_changes_the_estimate(name: str) -> None:
    size, around, *values = ENTRIES[name]
    before, after = (moments(name, value, size, around) for value in values)
    assert before != after


def missing(sections: dict[str, type]) -> set[str]:
    names = {
        f"{section}.{field.name.replace('_', '-')}"
        for section, kind in sections.items()
        for field in fields(kind)
    }
    known = set(ENTRIES) | set(IGNORED)
    assert not set(ENTRIES) & set(IGNORED) and known <= names | missing_elsewhere(sections)
    return names - known


def missing_elsewhere(sections: dict[str, type]) -> set[str]:
    """Return the names of sections that aren't asked about."""
    names = set(ENTRIES) | set(IGNORED)
    return {name for name in names if name.rpartition(".")[0] not in sections}


def test_no_setting_is_without_an_entry() -> None:
    assert missing(SECTIONS) == set()


def test_a_new_setting_needs_an_entry() -> None:
    new = make_dataclass("New", [("twice", bool, False)], bases=(CheckpointingPolicy,), frozen=True)
    assert missing({"recompute": new}) == {"recompute.twice"}
