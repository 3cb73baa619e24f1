"""Where mamba-ssm's Mamba-3 kernels are refused, and why."""

from __future__ import annotations

import tomllib
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from megacpp.config.presets import hybrid_400m, hybrid_mimo, nam56r, nam56r_quarter, tiny
from megacpp.config.schema import Config, KernelsConfig, MeshConfig
from megacpp.kernels.host import Host
from megacpp.kernels.mamba3.support import mamba3_mimo, mamba3_siso
from megacpp.kernels.selection import choose, kernel_rules
from megacpp.model.count import count_parameters

INSTALLED = {
    "triton": "3.7.1",
    "mamba-ssm": "2.3.2.post1",
    "einops": "0.8.2",
    "tilelang": "0.1.8",
}
H200 = Host("cuda", "bf16", (9, 0), "NVIDIA H200", INSTALLED)
B200 = replace(H200, capability=(10, 0), name="NVIDIA B200")
SISO = {"d_state": 64, "headdim": 64, "chunk_size": 64}
MIMO = {"d_state": 128, "headdim": 64, "mimo_rank": 4, "chunk_size": 16}


def model(mamba: dict[str, Any], **others: Any) -> Config:
    config = tiny()
    found = replace(config.model, dim=256, mamba3=replace(config.model.mamba3, **mamba))
    return replace(config, model=found, **others)


def test_taken_where_nothing_speaks_against_it() -> None:
    assert mamba3_siso(model(SISO), H200) is None
    assert mamba3_mimo(model(MIMO), H200) is None
    assert choose(model(SISO), H200)["mamba3"].backend == "mamba_ssm"
    found = choose(model(MIMO), H200)["mamba3"]
    assert found.backend == "tilelang"
    assert "mamba_ssm: is for SISO (model.mamba3.mimo_rank=4)" in found.reason
    # Nobody has looked at the GPU yet: a capability that is not known refuses nothing.
    assert mamba3_siso(model(SISO), replace(B200, capability=None)) is None


@pytest.mark.parametrize("preset", [nam56r, nam56r_quarter])
def test_large_presets_have_shapes_that_the_kernel_takes(preset: Any) -> None:
    assert mamba3_siso(preset(), H200) is None


@pytest.mark.parametrize(
    ("host", "why"),
    [
        (Host("cpu", "fp32", packages=INSTALLED), "needs a GPU"),
        (replace(H200, packages={"triton": "3.7.1"}), "mamba-ssm is not installed (make kernels)"),
        (replace(H200, packages={"mamba-ssm": "2.3.2"}), "einops is not installed"),
        (replace(H200, packages=INSTALLED | {"mamba-ssm": "2.3.1"}), "needs mamba-ssm 2.3.2"),
        (
            replace(H200, packages=INSTALLED | {"triton": "3.4.0"}),
            "needs triton 3.5, here is 3.4.0",
        ),
        (replace(H200, dtype="fp16"), "computes in bf16, not in fp16"),
        (replace(H200, capability=(7, 5)), "needs compute capability 8.0"),
        (replace(H200, capability=(8, 9)), "shared memory of 8.0 or 9.0, here is 8.9"),
        (B200, "wrong outputs on compute capability 10.0 without an error"),
    ],
)
def test_hosts_that_the_siso_kernel_refuses(host: Host, why: str) -> None:
    found = mamba3_siso(model(SISO), host)
    assert found is not None and why in found


def test_a_later_release_is_trusted_on_blackwell() -> None:
    later = replace(B200, packages=INSTALLED | {"mamba-ssm": "2.3.3"})
    assert mamba3_siso(model(SISO), later) is None


@pytest.mark.parametrize(
    ("mamba", "why"),
    [
        ({"mimo_rank": 2}, "is for SISO"),
        ({"d_state": 48}, "not model.mamba3.d_state=48"),
        ({"headdim": 8}, "not model.mamba3.headdim=8"),
        ({"chunk_size": 48}, "not 48"),
        ({"d_state": 256, "headdim": 256}, "up to 32768, not 65536"),
        ({"d_state": 128, "headdim": 128, "chunk_size": 128}, "chunks of 64 tokens"),
        ({"rope_fraction": 0.1}, "even number of angles, not 3"),
    ],
)
def test_shapes_that_the_siso_kernel_refuses(mamba: dict[str, Any], why: str) -> None:
    found = mamba3_siso(model(SISO | mamba), H200)
    assert found is not None and why in found


@pytest.mark.parametrize(
    ("mamba", "why"),
    [
        ({"mimo_rank": 1}, "is for MIMO"),
        ({"mimo_rank": 3}, "2, 4 or 8 ranks"),
        ({"chunk_size": 64}, "chunks of 8 to 16 tokens"),
        ({"d_state": 128, "headdim": 128}, "chunks of 8 to 8 tokens"),
        ({"mimo_rank": 2, "chunk_size": 8}, "chunks of 16 to 32 tokens"),
        ({"d_state": 16, "headdim": 64, "chunk_size": 8}, "chunks of 16 to 16 tokens"),
        ({"d_state": 256, "mimo_rank": 2}, "has no chunk size for mimo_rank=2"),
        (
            {"d_state": 256, "mimo_rank": 8, "chunk_size": 8},
            "asks for 377,936 bytes of shared memory, there are 232,448",
        ),
        ({"d_state": 256, "headdim": 128, "chunk_size": 8}, "may not compile for d_state=256"),
        ({"d_state": 64, "headdim": 256}, "headdim of 32 to 128"),
        ({"rope_fraction": 0.25}, "turns all or half of d_state=128"),
    ],
)
def test_shapes_that_the_mimo_kernel_refuses(mamba: dict[str, Any], why: str) -> None:
    found = mamba3_mimo(model(MIMO | mamba), H200)
    assert found is not None and why in found


@pytest.mark.parametrize(
    ("host", "why"),
    [
        (
            replace(H200, packages=INSTALLED | {"tilelang": "0.1.15"}),
            "tilelang 0.1.8, here is 0.1.15",
        ),
        (replace(H200, capability=(12, 1)), "tile-ai/tilelang#3071"),
        (replace(H200, capability=(12, 0)), "compute capability 9.0, here is 12.0"),
        (replace(H200, dtype="fp32"), "computes in bf16, not in fp32"),
    ],
)
def test_hosts_that_the_mimo_kernel_refuses(host: Host, why: str) -> None:
    found = mamba3_mimo(model(MIMO), host)
    assert found is not None and why in found


def test_groups_are_repeated_for_heads_at_a_cost() -> None:
    """2 tensors of bf16, 4 rows x 256 tokens, rank 4, state 128: 6 heads more than 2 groups.

    Two groups of eight heads are one of four on each of two ranks of `tp`.
    """
    grouped = MIMO | {"ngroups": 2}
    assert mamba3_mimo(model(grouped), H200) is None
    words = "B and C of 2 groups repeated for 8 heads, 12.0 MiB more a layer and microbatch"
    found = choose(model(grouped), H200)["mamba3"]
    assert found.reason.endswith(f"; {words}")
    named = model(grouped, kernels=KernelsConfig(mamba3="tilelang"))
    assert choose(named, H200)["mamba3"].reason == f"asked for by name; {words}"
    for config in (model(MIMO), model(grouped, mesh=MeshConfig(tp=2)), model(SISO)):
        assert not choose(config, H200)["mamba3"].cost


def test_the_mimo_preset_is_served_at_the_production_shape() -> None:
    config = hybrid_mimo()
    m = config.model.mamba3
    assert (m.ngroups, m.mimo_rank, m.chunk_size) == (8, 4, 16)
    assert choose(config, H200)["mamba3"].backend == "tilelang"
    total, siso = (count_parameters(c.model).total for c in (config, hybrid_400m()))
    assert abs(total / siso - 1) < 5e-4


def test_rows_of_one_token() -> None:
    config = model(MIMO)
    short = replace(config, data=replace(config.data, seq_len=1))
    found = mamba3_mimo(short, H200)
    assert found is not None and "state-spaces/mamba#985" in found


def test_by_name_it_is_an_error_before_anything_starts() -> None:
    named = model(SISO, kernels=KernelsConfig(mamba3="mamba_ssm"))
    named = replace(named, train=replace(named.train, device="cpu"))
    (error,) = kernel_rules(named)
    assert str(error).startswith("kernels.mamba3=mamba_ssm: needs a GPU. Fix: use")


def test_the_extra_asks_for_what_the_package_asks_for() -> None:
    """Pins of pyproject.toml against the metadata of the installed mamba-ssm."""
    try:
        wanted = metadata.requires("mamba-ssm") or []
    except metadata.PackageNotFoundError:
        pytest.skip("mamba-ssm is not installed (make kernels)")
    project = tomllib.loads(Path("pyproject.toml").read_text())["project"]
    extra = project["optional-dependencies"]["kernels"]
    assert f"mamba-ssm=={metadata.version('mamba-ssm')}" in extra
    always = [line for line in wanted if "extra" not in line]
    pinned = [line for line in always if "==" in line or "<" in line]
    assert pinned and set(pinned) <= set(extra)
