"""Files that go to a machine with a GPU and come back: wheels, caches, results.

    python -m bench.gpu --prepare        # here: fill .gpu/ with wheels that a GPU's image may lack
    .gpu/wheels/*.whl                    # pure Python, read where they are unpacked
    .gpu/caches.tar.gz.00 ...            # of Triton, inductor and estimates, of earlier calls
    .gpu/gpu.json, .gpu/machine.json     # rows and ceilings of earlier calls

All files of the folder are small: a tree that travels is often limited, and so is each file of what
comes back.
"""

from __future__ import annotations

import io
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parents[2]
CARRIED = ROOT / ".gpu"
RESULTS = ("gpu.json", "machine.json")
CACHES = {
    "TRITON_CACHE_DIR": "triton",
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "MEGACPP_CACHE": "megacpp",  # traces of blocks, for estimates
}
PARTS = "caches.tar.gz."
PART_BYTES, MOST_PARTS = 15 << 20, 4
# Packages that Mamba-3's kernels need; their CUDA extension is for Mamba-1.
WHEELS = ("einops==0.8.2",)
BUILT = ("mamba-ssm==2.3.2.post1",)
BUILD_ENV = {"MAMBA_FORCE_BUILD": "TRUE", "MAMBA_SKIP_CUDA_BUILD": "TRUE"}


def prepare(folder: Path = CARRIED, run: Callable[..., object] = subprocess.run) -> list[Path]:
    """Return pure wheels, fetched or built into a folder; `run` may be a stand-in."""
    wheels = folder / "wheels"
    wheels.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "-w", str(wheels)]
    run([*command, *WHEELS], check=True)
    run([*command, "--no-build-isolation", *BUILT], check=True, env=os.environ | BUILD_ENV)
    return sorted(wheels.glob("*.whl"))


def unpack(carried: Path, out: Path, work: Path) -> None:
    """Make what was carried usable: results in `out`, caches and packages below `work`.

    Packages come after those of the image on the path. Caches have the same place in every call,
    since compiled code names files by their path.

    Args:
        carried: folder that travelled; it may be missing.
        out: folder of results.
        work: folder of caches and packages, of this machine.
    """
    site = work / "site"
    for name in (*CACHES.values(), "site"):
        (work / name).mkdir(parents=True, exist_ok=True)
    for wheel in sorted((carried / "wheels").glob("*.whl")):
        with zipfile.ZipFile(wheel) as content:
            content.extractall(site)
    sys.path.append(str(site))
    os.environ["PYTHONPATH"] = os.pathsep.join(
        filter(None, (os.environ.get("PYTHONPATH"), str(site)))
    )
    for name, folder in CACHES.items():
        os.environ[name] = str(work / folder)
    os.environ.setdefault("TRITON_CACHE_AUTOTUNING", "1")  # what is tuned comes back too
    if parts := sorted(carried.glob(f"{PARTS}*")):
        packed = io.BytesIO(b"".join(part.read_bytes() for part in parts))
        with tarfile.open(fileobj=packed, mode="r:gz") as content:
            content.extraction_filter = getattr(tarfile, "data_filter", None)  # from 3.11.4 on
            content.extractall(work)
    for name in RESULTS:
        if (carried / name).is_file() and not (out / name).exists():
            shutil.copyfile(carried / name, out / name)


def pack(work: Path, out: Path, part_bytes: int = PART_BYTES) -> str:
    """Write the caches to `out` in parts, and say how large they are.

    Nothing is written if they need more than `MOST_PARTS`: half a cache can't be unpacked.

    Args:
        work: folder of the caches.
        out: folder of results.
        part_bytes: largest size of a file.
    """
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz", compresslevel=3) as content:
        for folder in CACHES.values():
            content.add(work / folder, arcname=folder)
    whole = packed.getvalue()
    pieces = [whole[i : i + part_bytes] for i in range(0, len(whole), part_bytes)]
    for old in out.glob(f"{PARTS}*"):
        old.unlink()
    if len(pieces) > MOST_PARTS:
        return f"caches: {len(whole):,} bytes packed, too large to bring back"
    for number, piece in enumerate(pieces):
        (out / f"{PARTS}{number:02d}").write_bytes(piece)
    return f"caches: {len(whole):,} bytes packed, {len(pieces)} files"
