"""Command `megacpp doctor`: what is installed, what is missing and why it matters."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import platform
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass

from megacpp.config.settings import setting
from megacpp.kernels.host import installed
from megacpp.terminal.screen import labelled
from megacpp.versions import PYTHON, TESTED_PYTHON, TRITON, minor, remark


@dataclass(frozen=True)
class Finding:
    """Line of the report; `ok` is None for something optional that is absent."""

    name: str
    ok: bool | None
    detail: str


# module -> its use, and the replacement without it
OPTIONAL = {
    "mamba_ssm": ("Mamba-3 Triton/TileLang kernels on a GPU", "our chunked torch form"),
    "tilelang": ("the MIMO kernel of Mamba-3", "our chunked torch form"),
    "torchao": (
        "--precision.fp8 torchao, --optim.adamw-state 8bit and 4bit",
        "bf16 blocks, moments of AdamW in fp32",
    ),
    "transformer_engine": (
        "--precision.fp8 te and the one recomputation that its FP8 blocks may run under",
        "bf16 blocks, or --precision.fp8 torchao",
    ),
    "pyarrow": ("parquet sources", "folders and jsonl only"),
    "zstandard": (".jsonl.zst sources", "plain .jsonl"),
    "matplotlib": ("plots", "tables"),
    "yaml": ("--config FILE.yaml", "--config FILE.toml or FILE.json"),
}

# Packages with separate parts: the part that is used.
PARTS = {"transformer_engine": "transformer_engine.pytorch"}

SELF_TEST = """
import os, sys, torch, torch.distributed as dist
rank, store = int(sys.argv[1]), dist.FileStore(sys.argv[2], 2)
dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
x = torch.full((1024,), float(rank + 1)); dist.all_reduce(x)
out, inp = torch.empty(512), x.clone(); dist.reduce_scatter_tensor(out, inp)
assert x.eq(3).all() and out.eq(6).all(), (x[0], out[0])
dist.barrier(); dist.destroy_process_group()
"""


@dataclass(frozen=True)
class DoctorArgs:
    """Checks to run."""

    kernels: bool = setting(False, "Compare every backend that can run here with its definition.")
    no_self_test: bool = setting(False, "Leave out the two gloo ranks.")
    json: bool = setting(False, "Print one JSON list instead of text.")


def doctor(args: DoctorArgs) -> int:
    """Report versions, devices and optional kernels with reasons, and test two gloo ranks.

    The exit code is 1 if something that training needs is broken.
    """
    findings = [*_versions(), *_devices(), _fp8(), *_kernels(), *_optional()]
    if not args.no_self_test:
        findings.append(_gloo())
    if args.kernels:
        findings += _compared()
    if args.json:
        print(json.dumps([asdict(f) for f in findings], indent=2))
    else:
        marks = {True: "ok", False: "BROKEN", None: "absent"}
        for f in findings:
            print("\n".join(labelled(f"{marks[f.ok]:7} {f.name}", f.detail, 32)))
    return 1 if any(f.ok is False for f in findings) else 0


def _versions() -> list[Finding]:
    from megacpp.launch.record import versions

    oldest, newest = PYTHON
    python_ok = oldest <= sys.version_info[:2] <= newest
    bounds = " to ".join(".".join(map(str, bound)) for bound in PYTHON)
    words = f"supported: {bounds}; tested: {', '.join(TESTED_PYTHON)}"
    where = f"{platform.python_version()} on {platform.platform()}; {words}"
    found = [Finding("python", python_ok, where)]
    for name, version in versions().items():
        ok, words = True, version
        if name == "torch":
            ok, words = minor(version) >= minor(next(iter(TRITON))), f"{version}; {remark(version)}"
        found.append(Finding(name, ok, words))
    return [*found, _triton()]


def _triton() -> Finding:
    """Report Triton next to the version that CUDA builds of this torch require."""
    here = installed()
    wanted = next(
        (triton for torch, triton in TRITON.items() if minor(torch) == minor(here["torch"])), None
    )
    words = f"torch {here['torch']} for GPUs requires {wanted}" if wanted else "not tested"
    if "triton" not in here:
        return Finding("triton", None, f"for kernels on a GPU; {words}")
    return Finding("triton", True, f"{here['triton']}; {words}")


def _devices() -> list[Finding]:
    import torch

    threads = os.environ.get("OMP_NUM_THREADS", "unset")
    cpu = Finding(
        "cpu", True, f"{os.cpu_count()} cores, OMP_NUM_THREADS={threads} (set 1 per rank)"
    )
    if not torch.cuda.is_available():
        why = "this torch is a CPU build" if torch.version.cuda is None else "no device visible"
        return [cpu, Finding("cuda", None, f"{why}; training runs on the CPU in fp32")]
    gpus = []
    for i in range(torch.cuda.device_count()):
        p = torch.cuda.get_device_properties(i)
        try:
            free, _ = torch.cuda.mem_get_info(i)
        except RuntimeError as error:  # in exclusive use by another process, or broken
            first = str(error).splitlines()[0]
            gpus.append(Finding(f"cuda:{i}", False, f"{p.name} doesn't answer: {first}"))
            continue
        room = f"{p.total_memory / 2**30:.0f} GiB, {free / 2**30:.0f} GiB free"
        gpus.append(Finding(f"cuda:{i}", True, f"{p.name}, capability {p.major}.{p.minor}, {room}"))
    from megacpp.launch.record import driver_version, nccl_version

    driver = driver_version() or "unknown (no nvidia-smi)"
    built = f"built with CUDA {torch.version.cuda}, driver {driver}"
    nccl = nccl_version()
    return [
        *(cpu, *gpus, Finding("cuda runtime", True, built)),
        Finding("nccl", True if nccl else None, nccl or "this torch has none; one GPU only"),
    ]


def _optional() -> list[Finding]:
    found = []
    for name, (gives, instead) in OPTIONAL.items():
        if importlib.util.find_spec(name) is None:
            found.append(Finding(name, None, f"for {gives}; without it: {instead}"))
        elif name in PARTS and (why := _import_trouble(PARTS[name])):
            detail = f"installed, but {PARTS[name]} can't be imported ({why})"
            found.append(Finding(name, None, f"{detail}; for {gives}; without it: {instead}"))
        else:
            found.append(Finding(name, True, gives))
    return found


def _import_trouble(module: str) -> str:
    """Return the reason why a module can't be imported, or nothing."""
    try:
        importlib.import_module(module)
    except Exception as error:  # packages with compiled parts raise any exception
        return f"{type(error).__name__}: {error}".strip().splitlines()[0]
    return ""


def _fp8() -> Finding:
    """Report whether this device multiplies matrices in FP8."""
    import torch

    from megacpp.model.precision import FP8_CAPABILITY

    need = "compute capability {}.{}".format(*FP8_CAPABILITY)
    if not torch.cuda.is_available():
        without = "--precision.fp8 torchao is emulated (same rounding, slow), te is refused"
        return Finding("fp8", None, f"no GPU; {without}")
    capability = torch.cuda.get_device_capability()
    if capability < FP8_CAPABILITY:
        has = "{}.{}".format(*capability)
        return Finding("fp8", None, f"needs {need}, this GPU has {has}; bf16 blocks only")
    return Finding("fp8", True, f"matrix products in hardware ({need} or more)")


def _kernels() -> list[Finding]:
    """Report the backend that `auto` selects for each operation, with the reason."""
    from megacpp.config.presets import tiny
    from megacpp.kernels.chosen import host_of
    from megacpp.kernels.mamba3.library import siso_tuners
    from megacpp.kernels.selection import OPERATIONS, choose
    from parallel.start import pick_device

    host = host_of(tiny(), pick_device("auto"))
    found = []
    for name, choice in choose(tiny(), host).items():
        ways = ", ".join(b.name for b in OPERATIONS[name].backends)
        ok, words = True, f"{choice.taken}; there are {ways}"
        if choice.backend == "mamba_ssm":
            try:
                tries = sum(len(tuner.configs) for tuner in siso_tuners())
            except ImportError as error:
                ok, words = False, f"{words}; can't be imported: {error}"
            else:
                words += f"; the first call tries {tries} configurations, later runs read what won"
        found.append(Finding(f"kernels.{name}", ok, words))
    return found


def _compared() -> list[Finding]:
    """Compare every backend with the reference on this machine's device."""
    from megacpp.run.kernel_check import check_backends
    from parallel.start import pick_device

    found = []
    for special, one in check_backends(pick_device("auto")):
        name, note = f"{one.operation}={one.backend}", f"{special}: " if special else ""
        found.append(Finding(name, one.holds, note + one.words))
    return found


def _gloo() -> Finding:
    """Run an all-reduce and a reduce-scatter with known results in two processes."""
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            subprocess.Popen(
                [sys.executable, "-W", "ignore", "-c", SELF_TEST, str(rank), f"{folder}/store"],
                stderr=subprocess.PIPE,
                text=True,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
            for rank in range(2)
        ]
        try:
            errors = [rank.communicate(timeout=60)[1] for rank in ranks]
        except subprocess.TimeoutExpired:
            for rank in ranks:
                rank.kill()
            return Finding("gloo self-test", False, "two local ranks did not meet within 60 s")
    if any(rank.returncode for rank in ranks):
        last = next(e for e in errors if e).strip().splitlines()[-1]
        return Finding("gloo self-test", False, last)
    return Finding("gloo self-test", True, "two ranks agreed on an all-reduce and a reduce-scatter")
