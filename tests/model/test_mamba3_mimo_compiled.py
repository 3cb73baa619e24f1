"""mamba-ssm's MIMO backward compiled for compute capability 9.0: what its refusals count on."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from megacpp.kernels.mamba3.library import _imported
from megacpp.kernels.mamba3.support import _mimo_bytes

N, P, R, C, ANGLES = 64, 64, 2, 16, 16
THREADS = 256  # of a block of the backward
REGISTERS = 65_536  # of a multiprocessor

missing = [n for n in ("mamba_ssm", "tilelang") if importlib.util.find_spec(n) is None]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(missing), reason=f"not installed: {', '.join(missing)} (make kernels)"),
]


def lowered(chunk: int) -> Any:
    """Sources for a GPU of 9.0 and for its host, as the kernel's own settings make them."""
    import tilelang
    import tilelang.language as T
    from tilelang import tvm

    kernel = _imported("mamba_ssm.ops.tilelang.mamba3.mamba3_mimo_bwd").mamba_mimo_bwd_bwd
    sizes = [T.dynamic(name) for name in ("B", "S", "H", "G")]
    shape = {"chunk_size": chunk, "rotary_dim_divisor": N // ANGLES, "dtype": "bfloat16"}
    program = kernel.get_tir(*sizes, N, P, R, True, True, True, threads=THREADS, **shape)
    settings = {key.value: value for key, value in kernel.pass_configs.items()}
    target = tvm.target.Target({"kind": "cuda", "arch": "sm_90"})
    with tvm.transform.PassContext(opt_level=3, config=settings), target:
        return tilelang.lower(program, target=target, enable_host_codegen=True)


@pytest.fixture(scope="module")
def backward() -> Any:
    return lowered(C)


def test_refusals_count_the_shared_memory_that_it_asks_for(backward: Any) -> None:
    """To the byte: the last number that the host hands to the launch."""
    numbers = re.findall(r"v_int64\) = \(\(int64_t\)(\d+)\);", backward.host_mod.inspect_source())
    assert int(numbers[-1]) == _mimo_bytes(R, N, P, C, ANGLES)


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not installed")
def test_its_threads_have_their_registers(backward: Any, tmp_path: Path) -> None:
    import tilelang

    root = Path(tilelang.__file__).parent
    source = tmp_path / "backward.cu"
    source.write_text(backward.kernel_source)
    include = [f"-I{root / 'src'}", f"-I{root / '3rdparty' / 'cutlass' / 'include'}"]
    options = ["-cubin", "-arch=sm_90a", "-std=c++17", "--use_fast_math", "-Xptxas=-v"]
    done = subprocess.run(
        ["nvcc", *options, *include, "-o", str(tmp_path / "backward.cubin"), str(source)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    used = [int(n) for n in re.findall(r"Used (\d+) registers", done.stderr)]
    spilt = [int(n) for n in re.findall(r"(\d+) bytes spill", done.stderr)]
    assert len(used) == 1 and used[0] * THREADS <= REGISTERS
    assert max(spilt) == 0


def test_chunks_too_small_for_its_warps_are_not_compiled() -> None:
    """Why chunks of 16 rows are refused: remove that when this one is compiled."""
    with pytest.raises(Exception, match="m_warp \\* n_warp must equal num_warps"):
        lowered(8)
