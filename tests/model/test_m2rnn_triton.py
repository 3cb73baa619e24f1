"""The Triton form of M2RNN: its cases in the interpreter and on a GPU, and what needs neither."""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

import megacpp.kernels.flop_formulas  # noqa: F401 - registers those of our operators
from megacpp.config.presets import tiny
from megacpp.config.schema import Config, KernelsConfig
from megacpp.errors import ConfigError
from megacpp.kernels.host import Host
from megacpp.kernels.m2rnn.backends import m2rnn_chunked
from megacpp.kernels.m2rnn.support import m2rnn_triton
from megacpp.kernels.selection import choose
from megacpp.model.documents import Documents
from tests.model import machine_code
from tests.model.in_child import run_cases
from tests.model.test_flops import in_place_baddbmm

CASES = "tests/model/m2rnn_triton_cases.py"
GPU = Host("cuda", "bf16", (9, 0), "a GPU", {"triton": "3.7.1"})


def run(config: pytest.Config, interpreted: bool) -> None:
    golden = config.getoption("--golden-dir")
    flags = ["--golden-dir", golden] if golden else []
    run_cases(CASES, *flags, interpreted=interpreted)


@pytest.mark.slow
def test_in_the_interpreter(pytestconfig: pytest.Config) -> None:
    pytest.importorskip("triton")
    run(pytestconfig, interpreted=True)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu(pytestconfig: pytest.Config) -> None:
    run(pytestconfig, interpreted=False)


def fake() -> list[Tensor]:
    """q, k, v, f, W of two rows of 21 tokens, as a layer has them."""
    shapes = (2, 21, 1, 64), (2, 21, 1, 64), (2, 21, 4, 16), (2, 21, 4), (4, 16, 16)
    dtypes = *[torch.bfloat16] * 3, *[torch.float32] * 2
    pairs = zip(shapes, dtypes, strict=True)
    return [torch.empty(s, dtype=d).requires_grad_() for s, d in pairs]


def kept(saved: list[Tensor], t: Tensor) -> Tensor:
    saved.append(t)
    return t


@pytest.mark.parametrize("packed", [False, True], ids=["rows", "documents"])
@pytest.mark.parametrize("keep_states", [False, True])
def test_keeps_and_counts_what_the_torch_form_does(keep_states: bool, packed: bool) -> None:
    """Tensors without values: bytes for backward, shapes and dtypes of gradients, products.

    Of all states, that behind the last token isn't kept.
    """
    found = {}
    for backend in ("torch", "triton"):
        saved: list[Tensor] = []
        counter = FlopCounterMode(
            display=False, custom_mapping={torch.ops.aten.baddbmm_: in_place_baddbmm}
        )
        with FakeTensorMode(), counter:
            leaves, docs = fake(), None
            if packed:
                docs = Documents.from_ids(torch.empty(2, 21, dtype=torch.int64))
            with torch.autograd.graph.saved_tensors_hooks(partial(kept, saved), lambda t: t):
                y, _ = m2rnn_chunked(
                    *leaves, docs, chunk_size=8, final_states=False, keep_states=keep_states,
                    backend=backend,
                )  # fmt: skip
            grads = torch.autograd.grad(y, leaves, torch.empty_like(y))
        kept_bytes = sum(t.numel() * t.element_size() for t in saved)
        facts = [(t.shape, t.dtype) for t in (y, *grads)]
        found[backend] = kept_bytes, facts, counter.get_total_flops()
    last_state = keep_states * 4 * 2 * 4 * 64 * 16
    assert found["torch"][0] - last_state == found["triton"][0]
    assert found["torch"][1:] == found["triton"][1:]


def compiled(K: int, V: int, capability: int) -> list[tuple[str, str]]:
    """Each kernel's name and its machine code in words."""
    triton = pytest.importorskip("triton")
    from megacpp.kernels.m2rnn import triton_kernels as kernels
    from megacpp.kernels.m2rnn.triton_launch import ROWS, padded

    narrow, flags = ("q_ptr", "k_ptr", "v_ptr", "dy_ptr"), {
        **{f"{name}_SHARED": 1 for name in "VFW"}, "Q_SHARED": 132, "K_SHARED": 132,
        "K": K, "V": V, "BLOCK_K": ROWS, "BLOCK_V": padded(V), "PACKED": True,
        "INITIAL": False, "FRONTS": True, "FINAL": False, "KEEP": False,
        "AGAIN": True, "DINITIAL": False, "DFINAL": False, "CLIP": 1, "FROM_ZERO": False,
        "DH_FROM_ZERO": False, "DW_FROM_ZERO": True,
    }  # fmt: skip
    found = []
    for kernel in (kernels.run_kernel, kernels.backward_kernel):
        kinds = {name: "*fp32" if name.endswith("_ptr") else "i32" for name in kernel.arg_names}
        kinds |= {name: "*bf16" for name in narrow if name in kinds}
        kinds |= {"starts_ptr": "*i1", "index_ptr": "*i64", "bound": "fp32"}
        made = machine_code.compiled(kernel, kinds, flags, capability, {"num_warps": 1})
        tool = triton.knobs.nvidia.nvdisasm.path
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(made.asm["cubin"])
            file.flush()
            text = subprocess.run(
                [tool, "-c", file.name], capture_output=True, text=True, check=True
            ).stdout
        found.append((kernel.__name__, text))
    return found


def loops_and_spills(code: str) -> tuple[int, list[str]]:
    """Loops of machine code, and reads and writes of local memory within them."""
    starts, loops, local, new = {}, [], [], []
    for line in code.splitlines():
        if label := re.match(r"\s*(\.L\w*):", line):
            new.append(label[1])
        if not (found := re.search(r"/\*([0-9a-f]{4,})\*/ +(.*);", line)):
            continue
        place, words = int(found[1], 16), found[2]
        starts |= dict.fromkeys(new, place)
        new = []
        if re.search(r"\b(STL|LDL)\b", words):
            local.append((place, words))
        if (target := re.search(r"\bBRA\b.*\((\.L\w*)\)", words)) and target[1] in starts:
            loops.append((starts[target[1]], place))
    loops = [(start, end) for start, end in loops if start < end]  # the last one waits on itself
    spills = [words for at, words in local if any(start <= at <= end for start, end in loops)]
    return len(loops), spills


@pytest.mark.parametrize("capability", [80, 90, 100])
def test_compiles_without_a_gpu_and_loops_without_spills(capability: int) -> None:
    """bf16 to machine code; at the paper's size, and for one GPU at the largest that is allowed."""
    for K, V in [(64, 16), (128, 32)][: 2 if capability == 90 else 1]:
        for name, code in compiled(K, V, capability):
            loops = 1 if name == "run_kernel" else 3  # over tokens; over chunks and twice within
            assert loops_and_spills(code) == (loops, []), f"{name} {K} {V}"


@pytest.mark.parametrize("capability", [80, 90, 100])
def test_sums_compile_without_a_gpu(capability: int) -> None:
    """Those of a backward at the paper's size, with heads that share q and k."""
    pytest.importorskip("triton")
    from megacpp.kernels.m2rnn import triton_sums

    shapes = [(1, 44, 1, 64), (1, 44, 1, 64), (4, 44, 44, 16), (4, 44, 44, 1), (8, 16, 16, 16)]
    fixed = {
        f"{name}{i}": n for i, s in enumerate(shapes) for name, n in zip("PNGW", s, strict=True)
    }
    fixed |= {"BLOCK": triton_sums.BLOCK, "PADDED": 64, "AT_ONCE": triton_sums.AT_ONCE}
    kinds = {f"part{i}": "*fp32" for i in range(5)} | {f"out{i}": "*bf16" for i in range(3)}
    kinds |= {"out3": "*fp32", "out4": "*bf16"}
    options = {"num_warps": 4}
    made = machine_code.compiled(triton_sums._sum_kernel, kinds, fixed, capability, options, "i32")
    assert made.asm["cubin"]


def test_a_spill_in_a_loop_is_found() -> None:
    """Machine code with one spill over a loop and one within it."""
    lines = ["STL.64 [R1], R14", "MOV R2, R3", "STL [R1+0x8], R2", "@P1 BRA `(.L_x_1)"]
    lines += ["LDL.LU.64 R24, [R1]", "EXIT"]
    text = [f"  /*{16 * i:04x}*/  {words} ;" for i, words in enumerate(lines)]
    found = loops_and_spills("\n".join([text[0], ".L_x_1:", *text[1:]]))
    assert found == (1, ["STL [R1+0x8], R2 "])


def with_state(key_dim: int, value_dim: int) -> Config:
    base = tiny()
    m2rnn = replace(base.model.m2rnn, key_dim=key_dim, value_dim=value_dim)
    return replace(base, model=replace(base.model, m2rnn=m2rnn))


def test_what_it_refuses() -> None:
    assert m2rnn_triton(with_state(64, 16), GPU) is None
    assert m2rnn_triton(with_state(256, 16), replace(GPU, capability=None)) is None
    assert m2rnn_triton(with_state(512, 32), GPU) is None
    for host, why in (
        (Host("cpu", "fp32", packages=GPU.packages), "needs a GPU"),
        (replace(GPU, packages={}), "needs triton 3.5 (installed: none)"),
        (replace(GPU, packages={"triton": "3.4.1"}), "needs triton 3.5 (installed: 3.4.1)"),
        (replace(GPU, capability=(7, 5)), "needs compute capability 8.0 (a GPU: 7.5)"),
        (replace(GPU, dtype="fp64"), "computes in fp32 (precision.dtype=fp64)"),
    ):
        assert m2rnn_triton(tiny(), host) == why
    assert m2rnn_triton(with_state(64, 33), GPU) == "holds states of value_dim up to 32 (64 x 33)"


def test_a_gpu_takes_it_by_itself_and_a_cpu_says_why_not() -> None:
    assert choose(tiny(), GPU)["m2rnn"].backend == "triton"
    found = choose(tiny(), Host("cpu", "fp32"))["m2rnn"]
    assert found.taken == "torch (auto; triton: needs a GPU)"
    named = replace(tiny(), kernels=KernelsConfig(m2rnn="triton"))
    with pytest.raises(ConfigError, match="m2rnn=triton: needs a GPU"):
        choose(named, Host("cpu", "fp32"))


def test_without_a_gpu_it_says_so() -> None:
    pytest.importorskip("triton")
    leaves = [torch.rand(1, 2, 1, 4), torch.rand(1, 2, 1, 4), torch.rand(1, 2, 1, 3)]
    with pytest.raises(RuntimeError, match="no kernels for cpu"):
        m2rnn_chunked(*leaves, torch.rand(1, 2, 1), torch.rand(1, 3, 3), backend="triton")
