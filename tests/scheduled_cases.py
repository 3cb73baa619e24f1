"""Cases of Inductor's schedule for an H100: run by test_launches.py, or by pytest on this file."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch._inductor.decomposition import select_decomp_table
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from bench.launches import COMPILED, COMPILED_HEADING, PAGE, compiled, compiled_line
from bench.scheduled import calls, scheduled
from checkpointing.tracing.graph_run import _is_view, _stays_on_chip, results_beside
from megacpp.versions import TORCH

CASES = [*((letter, torch.bfloat16) for letter in "AFEMR"), ("F", torch.float32)]


def test_what_is_fused_for_a_gpu_without_one() -> None:
    """A product, and one kernel of everything that is element-wise behind it."""

    def f(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return F.silu(x @ w) * 2 + 1

    x, w = torch.empty(64, 32, dtype=torch.bfloat16), torch.empty(32, 16, dtype=torch.bfloat16)
    with FakeTensorMode(allow_non_fake_inputs=True):
        graph = make_fx(lambda *given: [f(*given)], select_decomp_table())(x, w)
    launches, num_bytes = scheduled(graph)
    assert launches == ["extern_kernels.mm", "triton"]
    product = 64 * 32 + 32 * 16 + 64 * 16
    assert num_bytes == 2 * (product + 2 * 64 * 16)


def test_a_sum_of_what_programs_left_counts() -> None:
    """Count what follows a norm's kernel, which leaves sums over some rows for torch to add."""
    code = """
def call(self, args):
    triton_per_fused_add_mul_sum_view_2.run(buf4, primals_1, workspace_0, 8192, 3584, stream=s)
    buf7 = workspace_0[0 * (512) * (3584) : (0 + 1) * (512) * (3584)].view(512, 3584).sum(dim=0)
    extern_kernels.mm(buf4, primals_2, out=buf8)
"""
    assert calls(code) == ["triton", "sum", "extern_kernels.mm"]


@pytest.mark.skipif(not torch.__version__.startswith(TORCH), reason="another version fuses anew")
@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_page_has_todays_counts_of_compiled_blocks(case: tuple[str, torch.dtype]) -> None:
    section = PAGE.read_text().partition(COMPILED_HEADING)[2].partition("\n## ")[0]
    command = "python -m bench.launches --compiled --write"
    assert case in COMPILED
    assert compiled_line(*case) in section.splitlines(), command


@pytest.mark.skipif(not torch.__version__.startswith(TORCH), reason="another version fuses anew")
@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_trace_of_a_graph_has_as_many_launches(case: tuple[str, torch.dtype]) -> None:
    """To one of those that Inductor schedules."""
    _, pair, found = compiled(*case)
    for graph, (names, _) in zip((pair.forward, pair.backward), found, strict=True):
        nodes = [*graph.graph.nodes]
        run = {
            node
            for node in nodes
            if node.op == "call_function" and not (_is_view(node) or _stays_on_chip(node))
        }
        assert abs(len(run - results_beside(nodes)) - len(names)) <= 1, names
