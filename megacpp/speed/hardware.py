"""Figures of GPUs, their nodes and fabrics, each with its source (hardware.json).

    gpu("H100").bf16_tflops        # 989.0
    gpu("H100").figures["sms"]     # Figure(132, "", "vendor data sheet")

A figure called `..._reached` is the fraction of the peak that software reaches.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from megacpp.errors import config_error

FILE = Path(__file__).with_name("hardware.json")
GENERATIONS = ("A100", "H100", "B200")
LAYOUTS = ("TN", "NN", "NT")
# Figures that may be 0: not known, not there, or too short to measure.
MAY_BE_0 = ("hbm_gib", "l2_mib", "power_w", "fp8_tflops", "fp8_reached", "launch_us", "pass_us",
            "node_latency_us", "network_latency_us")  # fmt: skip
MOST = 1e12  # of any figure


class Figure(NamedTuple):
    """Number with its unit and its source."""

    value: float
    unit: str
    source: str


@dataclass(frozen=True, eq=False)
class GpuSpec:
    """Kind of GPU in its usual node, in the units of hardware.json; equal to itself alone.

    Attributes:
        name: as users write it.
        sms: streaming multiprocessors.
        bf16_tflops: peak of bf16 products without sparsity.
        fp8_tflops: peak of FP8 products; 0: the GPU has none.
        bf16_reached: fraction of the peak that large products reach.
        fp8_reached: as `bf16_reached`, for FP8.
        hbm_gbs: peak of the memory, GB/s.
        hbm_reached: fraction of it that element-wise kernels reach.
        hbm_gib: size of the memory.
        nvlink_gbs: peak inside a node, GB/s each way and GPU.
        nvlink_reached: fraction that rings reach.
        node_latency_us: of a hop inside a node.
        network_gbs: peak between nodes, GB/s each way and GPU.
        network_reached: fraction that rings reach.
        network_latency_us: of a hop between nodes.
        launch_us: host time of an operator in eager mode.
        pass_us: measured start of an element-wise operator that no graph replays; 0: not known.
        per_node: GPUs of a node.
        generation: `A100`, `H100` or `B200`: whose attention kernels it runs.
        on_host: operators run where they are issued, as on a CPU: both times add up.
    """

    name: str
    sms: float
    bf16_tflops: float
    bf16_reached: float
    hbm_gbs: float
    hbm_reached: float
    hbm_gib: float
    nvlink_gbs: float
    nvlink_reached: float
    node_latency_us: float
    network_gbs: float
    network_reached: float
    network_latency_us: float
    launch_us: float
    l2_mib: float
    power_w: float
    fp8_tflops: float = 0.0
    fp8_reached: float = 0.0
    pass_us: float = 0.0
    per_node: int = 8
    generation: str = "H100"
    on_host: bool = False

    @property
    def figures(self) -> dict[str, Figure]:
        """Figures of the file by name."""
        if self.name.endswith(".json"):
            own = json.loads(Path(self.name).read_text())["figures"]
            return {name: Figure(value, "", "measured here") for name, value in own.items()}
        return {k: Figure(*v) for k, v in _file()["gpus"][self.name].items() if k != "aliases"}


class Rates(NamedTuple):
    """Constants of one GPU under one software family; 1.0 is what hardware.json says.

    A constant multiplies the speed, so 0.9 makes that part 11 % longer.
    """

    products: float = 1.0
    memory: float = 1.0
    attention: float = 1.0


@cache
def _file() -> dict[str, Any]:
    return json.loads(FILE.read_text())


def gpus() -> tuple[str, ...]:
    """Return the names of all GPUs."""
    return tuple(_file()["gpus"])


def gpu(name: str) -> GpuSpec:
    """Return a GPU by its name or by one of its other names, whatever the case.

    A name that ends in `.json` is a file, as `python -m bench.gpu --calibrate` writes it: `figures`
    of `GpuSpec`, and `products` as [m, n, k, layout, TFLOP/s].

    Raises:
        ConfigError: there is none of that name, or the file can't be read.
    """
    if name.endswith(".json"):
        return _from_file(name)
    wanted = name.upper()
    for own, figures in _file()["gpus"].items():
        if wanted in (own.upper(), *(other.upper() for other in figures["aliases"])):
            return _spec(own)
    rule = f"no such GPU is known ({', '.join(gpus())})"
    raise config_error("gpu", name, rule, "use --gpu H100")


@cache
def _spec(name: str) -> GpuSpec:
    values = {k: v[0] for k, v in _file()["gpus"][name].items() if k != "aliases"}
    kind = "A100" if name[0] == "A" else "B200" if name[0] == "B" else "H100"
    return GpuSpec(name, **values, generation=kind)


@cache
def _from_file(path: str) -> GpuSpec:
    try:
        content = json.loads(Path(path).read_text())
        found = GpuSpec(name=path, **content["figures"])
        wrong = _wrong(found, content.get("products", []))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        wrong = str(error)
    if wrong:
        rule = f"must be a file with the figures of a GPU ({wrong})"
        fix = "write one with python -m bench.gpu --calibrate --out FILE"
        raise config_error("gpu", path, rule, fix)
    return found


def _wrong(machine: GpuSpec, products: Any) -> str:
    """Return the first figure or product of a file that breaks a rule, and the rule; "": none."""
    for name in (field.name for field in fields(GpuSpec)[1:]):
        value = getattr(machine, name)
        if name == "generation":
            if value not in GENERATIONS:
                return f"{name}={value}: must be one of {', '.join(GENERATIONS)}"
        elif name == "on_host":
            if not isinstance(value, bool):
                return f"{name}={value}: must be true or false"
        elif not _is_number(value) or not (value or name in MAY_BE_0):
            above = "at least" if name in MAY_BE_0 else "above"
            return f"{name}={value}: must be a number {above} 0 and at most {MOST:g}"
        elif name.endswith("_reached") and value > 1:
            return f"{name}={value}: must be a fraction, at most 1"
        elif name in ("sms", "per_node") and value != int(value):
            return f"{name}={value}: must be a whole number"
    if machine.fp8_tflops and not machine.fp8_reached:
        return "fp8_reached=0: must be above 0 with fp8_tflops"
    for row in products if isinstance(products, list) else [products]:
        sizes = row[:3] + row[4:] if isinstance(row, list) and len(row) == 5 else []
        if not sizes or row[3] not in LAYOUTS or not all(_is_number(x) and x for x in sizes):
            return f"products: {row} must be [m, n, k, layout, TFLOP/s]"
    return ""


def _is_number(value: object) -> bool:
    """Return whether a value of a file is a number from 0 to `MOST`."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= MOST


def known(device_name: str) -> GpuSpec | None:
    """Return the GPU of a device by the name that its driver gives it; None: not known."""
    words = device_name.upper()
    if "B200" in words or "H200" in words or "B300" in words:
        return gpu(next(name for name in ("B200", "B300", "H200") if name in words))
    if "H100" in words:
        kind = "H100-PCIe" if "PCIE" in words else "H100-NVL" if "NVL" in words else "H100"
        return gpu(kind)
    if "A100" in words:
        size = "40GB" if "40GB" in words else "80GB"
        return gpu(f"A100-{size}" + ("-PCIe" if "PCIE" in words and size == "80GB" else ""))
    return None


@cache
def product_table(name: str) -> dict[tuple[int, int, int, str], float]:
    """Return measured bf16 products of a GPU: TFLOP/s by (m, n, k, layout); may be empty."""
    if name.endswith(".json"):
        found = {"products": json.loads(Path(name).read_text()).get("products", [])}
    else:
        found = _file()["tables"].get(name, {"products": []})
    return {(m, n, k, layout): speed for m, n, k, layout, speed in found["products"]}


@cache
def attention_rates(kernel: str, generation: str) -> tuple[float, float]:
    """Return TFLOP/s of a kernel's forward and backward on long rows, half the square counted.

    A generation that the file lacks has the nearest one's.
    """
    found = _file()["attention"][kernel]
    rates = found.get(generation) or found.get("H100") or found["A100"]
    return float(rates[0]), float(rates[1])
