"""Backend of the loss by device: a kernel, or the chunked torch path with a warning."""

from __future__ import annotations

import warnings
from dataclasses import replace

import pytest
import torch

from megacpp.config.presets import tiny
from megacpp.config.schema import Config, KernelsConfig, MeshConfig, TrainConfig
from megacpp.errors import ConfigError
from megacpp.kernels import chosen as kernels
from megacpp.kernels.chosen import choices, chosen_kernels, kernel_lines
from megacpp.kernels.host import Host
from megacpp.kernels.selection import choose, kernel_rules, plain_loss
from megacpp.kernels.support import version

WITH_TRITON = {"torch": "2.13.0", "triton": "3.7.1"}
CPU = Host("cpu", "fp32", name="cpu", packages=WITH_TRITON)


def gpu(capability: tuple[int, int], name: str = "a GPU", **packages: str) -> Host:
    return Host("cuda", "bf16", capability, name, packages or WITH_TRITON)


OLD = gpu((6, 1), "NVIDIA GeForce GTX 1080")
OLD_WARNING = (
    "cross entropy: no native kernel for NVIDIA GeForce GTX 1080 (6.1): the chunked torch path"
    " (triton: needs compute capability 8.0 (NVIDIA GeForce GTX 1080: 6.1))"
)


def named(backend: str) -> Config:
    return replace(tiny(), kernels=replace(KernelsConfig(), cross_entropy=backend))  # type: ignore[arg-type]


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (9, 0), (10, 0), (12, 1)])
def test_every_gpu_of_a_known_kind_has_a_kernel(capability: tuple[int, int]) -> None:
    host = gpu(capability)
    for config in (tiny(), replace(tiny(), mesh=MeshConfig(tp=2))):
        found = choose(config, host)
        assert found["cross_entropy"].taken == "triton (auto)"
        assert plain_loss(found, host) is None


def test_an_old_gpu_takes_the_torch_path_and_says_so() -> None:
    found = choose(tiny(), OLD)
    assert found["cross_entropy"].backend == "torch"
    assert plain_loss(found, OLD) == OLD_WARNING


@pytest.mark.parametrize(
    ("packages", "why"),
    [
        ({"torch": "2.13.0"}, "needs triton 3.5 (installed: none)"),
        ({"triton": "3.4.0"}, "needs triton 3.5 (installed: 3.4.0)"),
    ],
)
def test_without_a_fitting_triton(packages: dict[str, str], why: str) -> None:
    host = gpu((9, 0), "NVIDIA H200", **packages)
    found = choose(tiny(), host)
    assert found["cross_entropy"].backend == "torch"
    assert plain_loss(found, host) == (
        "cross entropy: no native kernel for NVIDIA H200 (9.0): the chunked torch path"
        f" (triton: {why})"
    )


def test_on_a_cpu_nothing_is_warned_of_but_the_header_says_it() -> None:
    found = choose(tiny(), CPU)
    assert plain_loss(found, CPU) is None
    (line,) = kernel_lines({"cross_entropy": found["cross_entropy"]})
    assert line == "cross_entropy: torch (auto; triton: needs a GPU)"


def test_a_run_warns_once_and_not_where_torch_was_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kernels, "host_of", lambda config, device: OLD)
    device = torch.device("cuda")
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        choices(tiny(), device)
        assert chosen_kernels(tiny(), device).cross_entropy == "torch"
        choices(named("torch"), device)
    assert [(str(w.message), w.category) for w in seen] == [(OLD_WARNING, RuntimeWarning)]


@pytest.mark.parametrize(
    ("host", "why"),
    [(OLD, "needs compute capability 8.0"), (CPU, "needs a GPU")],
    ids=["old", "cpu"],
)
def test_a_kernel_asked_for_by_name_that_cannot_run_is_an_error(host: Host, why: str) -> None:
    with pytest.raises(ConfigError, match=f"kernels.cross_entropy=triton: {why}"):
        choose(named("triton"), host)


def test_a_configuration_alone_tells_what_it_can() -> None:
    on_cpu = replace(named("triton"), train=TrainConfig(device="cpu"))
    (error,) = kernel_rules(on_cpu)
    assert "kernels.cross_entropy=triton: needs a GPU" in str(error)


def test_versions() -> None:
    assert version("3.6.0+git12ab") == (3, 6) and version("3.10.0") > (3, 5) > version("3.4.9")
