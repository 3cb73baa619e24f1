"""Closed forms of a launch on a GPU against its trace, where kernels allocate and nothing computes.

The Python around each Triton kernel is the project's own (of M blocks mamba-ssm's), with fake
tensors in the place of a GPU's: parallel/simulate/gpu_stand_ins.py.
"""

from __future__ import annotations

import importlib.util
from dataclasses import replace

import pytest
import torch

from megacpp.cli.trace import trace_step
from megacpp.config.arguments import parse_run
from megacpp.config.schema import Config
from megacpp.kernels.backend import PLAIN_KERNELS
from megacpp.kernels.experts import grouped_mm
from megacpp.memory.budget import as_run
from megacpp.memory.estimate import estimate
from megacpp.memory.forms.local_shapes import LocalShapes
from megacpp.memory.forms.parts import forms_of
from megacpp.memory.forms.traced import TracedPart, traced_moments
from parallel.simulate.gpu_stand_ins import on_gpu
from parallel.simulate.traced_kernels import traced_kernels
from tests.memory.working_cases import misses

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton isn't installed"
)
needs_library = pytest.mark.skipif(
    importlib.util.find_spec("mamba_ssm") is None, reason="mamba-ssm isn't installed"
)

# Per cent of the fullest moment of a layer; what is left out are numbers of single tokens.
LEAST, MOST = -0.5, 2.0
ALL = "--recompute.eblock none --recompute.rblock none --recompute.mblock none"
LIBRARY = "--kernels.mamba3 mamba_ssm --data.seq_len 1024 --train.device_batch_size 2"
CASES = {
    "attention": ("AF", "", 1),
    "experts, gates run again": ("EE", "", 1),
    "experts, all kept": ("EE", f"{ALL} --model.moe.activation relu2", 1),
    "experts of other ranks": ("EE", "--mesh.ep 4", 4),
    "experts with capacity": ("EE", "--mesh.ep 2 --model.moe.capacity_factor 1.25", 2),
    "null experts": ("EE", "--model.moe.null_rho 0.5", 1),
    "recurrence again": ("RR", "--recompute.rblock recurrence --model.m2rnn.num_heads 96", 1),
    "recurrence, all kept": ("RR", ALL, 1),
    "chunk after chunk": ("RR", "--mesh.cp 2 --mesh.cp_m2rnn serial", 2),
}
# Gradients of experts weigh as much as all else: each is added to the sum of earlier microbatches.
ACCUMULATES = (
    "--model.vocab_size 1024 --data.seq_len 512 --train.device_batch_size 8"
    " --train.tokens_per_step 0 --train.grad_accum 2"
)

STREAMS = "--model.mhc.streams 4 --train.device_batch_size 8 --recompute.mlp false"


@pytest.mark.parametrize("name", [*CASES])
def test_moments_are_those_of_a_trace(name: str) -> None:
    pattern, flags, size = CASES[name]
    found = misses(pattern, flags, size, gpu=True)
    assert all(LEAST < miss < MOST for miss in found.values()), found


# Of forwards, at most; of backwards MOST. States that are handed on are counted as if all lived on.
STATES = "--mesh.cp 2 --data.seq_len 4096"
LIBRARY_CASES: dict[str, tuple[int, float]] = {
    "": (1, MOST),
    ALL: (1, MOST),
    "--model.mamba3.out_norm true --data.seq_len 2048": (1, 6.0),
    STATES: (2, 5.0),
    f"{STATES} --mesh.cp_order contiguous": (2, 5.0),
}


@needs_library
@pytest.mark.parametrize("flags", [*LIBRARY_CASES])
def test_moments_of_mamba_ssm_are_those_of_its_own_code(flags: str) -> None:
    size, most = LIBRARY_CASES[flags]
    found = misses("MM", f"{LIBRARY} {flags}", size, size - 1, gpu=True)
    assert all(LEAST < miss < most for miss in found.values()), found
    backward = [miss for name, miss in found.items() if name.startswith("backward")]
    assert max(backward) < MOST, found


def launch(flags: str, size: int = 1) -> Config:
    return as_run(parse_run(flags.split(), size).config, "cuda", narrow=True)


@pytest.mark.parametrize(
    ("size", "flags"),
    [
        (1, "moe_small --model.depth 4 --model.vocab_size 1024"),
        (1, "nam56r_quarter --model.depth 4 --model.pattern RERE --optim.qk_clip 0"),
        (8, "moe_small --model.depth 4 --mesh.ep 4 --recompute.eblock none"),
        (1, f"moe_small --model.pattern AE --model.depth 2 {ACCUMULATES}"),
        (2, "tiny --model.depth 4 --model.vocab_size 32003 --precision.dtype fp16"),
        (1, f"tiny --model.pattern F --model.depth 3 {STREAMS}"),
    ],
)
def test_an_estimate_is_what_a_launch_would_hold(size: int, flags: str) -> None:
    """Of tensors; 3 % are asked of a measured step, and a launch has more that a trace has not."""
    config = launch(flags, size)
    peak = trace_step(config, size).peak()[1]
    assert -0.005 < estimate(config, size, detail=False).tensors / peak - 1 < 0.01


def test_an_estimate_is_of_the_chosen_kernels() -> None:
    """Of one process whose experts are Triton's, and of the same with torch's."""
    config = launch("moe_small --model.depth 2")
    plain = replace(config, kernels=replace(config.kernels, experts="torch"))
    found = []
    for chosen in (config, plain):
        own = LocalShapes.on_rank(chosen, 1, 0)
        part = TracedPart(("E",))
        form = forms_of(own, ((part, False),))[part, False]
        assert form.backward == traced_moments(own, part, backward=True)
        found.append(form.backward[0].bytes)
    assert found[0] < found[1]


def test_a_trace_says_which_kernels_it_counts() -> None:
    counted = traced_kernels(launch("tiny --kernels.attention flex"))
    assert (counted.experts, counted.m2rnn, counted.cross_entropy) == ("triton",) * 3
    assert counted.attention == "flex"
    assert traced_kernels(parse_run(["tiny"], 1).config) == PLAIN_KERNELS


def test_stand_ins_leave_nothing_behind() -> None:
    operators = torch.library.CustomOpDef
    before = {**vars(operators)}, grouped_mm.CPU_ROWS
    with on_gpu():
        assert grouped_mm.CPU_ROWS == grouped_mm.GPU_ROWS
        assert vars(operators) != before[0]
    assert ({**vars(operators)}, grouped_mm.CPU_ROWS) == before
