"""Closed forms of a launch on a GPU against its trace, where kernels allocate and nothing computes.

The Python around each Triton kernel is the project's own (of M blocks mamba-ssm's), with fake
tensors in the place of a GPU's: parallel/gpu_stand_ins.py.
"""

from __future__ import annotations

import importlib.util

import pytest

from megacpp.arguments import parse_run
from megacpp.cli.trace import trace_step
from megacpp.config import Config
from megacpp.kernels import expert_mlp, experts_triton, grouped_mm
from megacpp.kernels.backend import PLAIN_KERNELS
from megacpp.memory.budget import as_run
from megacpp.memory.estimate import estimate
from megacpp.memory.forms import activation_experts
from parallel.gpu_stand_ins import on_gpu, traced_kernels
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


@pytest.mark.parametrize("name", [*CASES])
def test_moments_are_those_of_a_trace(name: str) -> None:
    pattern, flags, size = CASES[name]
    found = misses(pattern, flags, size, gpu=True)
    assert all(LEAST < miss < MOST for miss in found.values()), found


@needs_library
@pytest.mark.parametrize("flags", ["", ALL])
def test_moments_of_mamba_ssm_are_those_of_its_own_code(flags: str) -> None:
    found = misses("MM", f"{LIBRARY} {flags}", 1, gpu=True)
    assert all(LEAST < miss < MOST for miss in found.values()), found


def launch(flags: str, size: int = 1) -> Config:
    return as_run(parse_run(flags.split(), size).config, "cuda", narrow=True)


@pytest.mark.parametrize(
    ("size", "flags"),
    [
        (1, "moe_small --model.depth 4 --model.vocab_size 1024"),
        (1, "nam56r_quarter --model.depth 4 --model.pattern RERE --optim.qk_clip 0"),
        (8, "moe_small --model.depth 4 --mesh.ep 4 --recompute.eblock none"),
    ],
)
def test_an_estimate_is_what_a_launch_would_hold(size: int, flags: str) -> None:
    """Of tensors, within the 3 % that are asked of a measured step."""
    config = launch(flags, size)
    peak = trace_step(config, size).peak()[1]
    assert abs(estimate(config, size, detail=False).tensors / peak - 1) < 0.03


def test_a_trace_says_which_kernels_it_counts() -> None:
    counted = traced_kernels(launch("tiny --kernels.attention flex"))
    assert (counted.experts, counted.m2rnn, counted.cross_entropy) == ("triton",) * 3
    assert counted.attention == "torch"  # the compiler takes no tensors without values
    assert traced_kernels(parse_run(["tiny"], 1).config) == PLAIN_KERNELS


def test_stand_ins_leave_nothing_behind() -> None:
    before = {**vars(experts_triton)}, grouped_mm.CPU_ROWS
    with on_gpu():
        assert grouped_mm.CPU_ROWS == activation_experts.GPU_ROWS == grouped_mm.GPU_ROWS
        assert vars(experts_triton) != before[0]
    assert ({**vars(experts_triton)}, grouped_mm.CPU_ROWS) == before
    assert activation_experts.ROWS == expert_mlp.CPU_ROWS
