"""Which backend does an operation: by itself, by name, or not at all."""

from dataclasses import fields, replace
from typing import get_args, get_type_hints

import pytest
import torch

from megacpp.config.presets import tiny
from megacpp.config.schema import Config, KernelsConfig, MeshConfig, PrecisionConfig, TrainConfig
from megacpp.errors import ConfigError
from megacpp.kernels import chosen
from megacpp.kernels.backend import PLAIN_KERNELS, Kernels, set_kernels
from megacpp.kernels.chosen import choices, chosen_kernels, kernel_lines, kernel_record
from megacpp.kernels.host import Host
from megacpp.kernels.operation import Backend, Operation
from megacpp.kernels.selection import OPERATIONS, choose, kernel_rules
from megacpp.model.documents import Documents
from megacpp.model.hybrid import HybridLM
from parallel.build import build_model
from parallel.mesh import World

CPU = torch.device("cpu")
HERE = Host("cpu", "fp32")
DEFINED = [n for n, o in OPERATIONS.items() if "reference" in {b.name for b in o.backends}]


def test_every_operation_has_a_setting_that_names_its_backends() -> None:
    hints = get_type_hints(KernelsConfig)
    assert set(OPERATIONS) == set(hints) == {f.name for f in fields(Kernels)}
    for name, operation in OPERATIONS.items():
        names = [b.name for b in operation.backends]
        assert {"auto", *names} == set(get_args(hints[name]))
        assert len(set(names)) == len(names) and "torch" in names


def test_every_operation_can_be_done_on_a_cpu_by_torch() -> None:
    every = replace(tiny(), model=replace(tiny().model, pattern="AEMRG", depth=5))
    found = choose(every, HERE)
    assert set(found) == set(OPERATIONS)
    assert {c.backend for c in found.values()} == {"torch"}
    assert chosen_kernels(tiny(), CPU) == PLAIN_KERNELS


def test_only_what_a_model_has_is_chosen() -> None:
    dense = replace(tiny(), model=replace(tiny().model, pattern="AF", depth=2))
    assert set(choose(dense, HERE)) == {"attention", "gates", "cross_entropy", "rms_norm"}


def test_a_name_that_cannot_run_is_an_error_and_auto_says_what_it_passed_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With a backend that no machine has."""

    def never(config: Config, host: Host) -> str:
        return "needs an abacus"

    there = OPERATIONS["m2rnn"].backends
    abacus = Operation("counts", "R", (Backend("abacus", "beads", never), *there))
    monkeypatch.setitem(OPERATIONS, "m2rnn", abacus)
    found = choose(tiny(), HERE)["m2rnn"]
    assert found.backend == "torch" and found.passed_over["abacus"] == "needs an abacus"
    assert "abacus: needs an abacus" in kernel_lines({"m2rnn": found})[0]
    named = replace(tiny(), kernels=replace(KernelsConfig(), m2rnn="abacus"))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="m2rnn=abacus: needs an abacus"):
        choose(named, HERE)
    assert [str(e) for e in kernel_rules(named)] == [
        "kernels.m2rnn=abacus: needs an abacus. Fix: use --kernels.m2rnn auto, or mend that."
    ]


def test_definitions_are_taken_by_name_alone() -> None:
    by_name = replace(tiny(), kernels=KernelsConfig(attention="reference"))
    found = choices(by_name, CPU)["attention"]
    assert (found.backend, found.reason) == ("reference", "asked for by name")
    assert kernel_record({"attention": found}) == {
        "attention": {"backend": "reference", "asked": "reference", "passed_over": {}}
    }


def test_definitions_train_the_same_model() -> None:
    """Loss and every gradient of all kinds of block: within 1e-12 of the fast forms, in fp64."""
    config = replace(tiny(), precision=PrecisionConfig("fp64"))
    model = replace(config.model, depth=5, pattern="AMERF", vocab_size=64, dim=32)
    config = replace(config, model=model)
    slow = replace(config, kernels=KernelsConfig(**dict.fromkeys(DEFINED, "reference")))
    torch.manual_seed(0)
    tokens = torch.randint(64, (2, 9))
    ids = torch.tensor([[0] * 4 + [1] * 5, [2] * 9])
    docs = Documents.from_ids(ids)
    losses, gradients = [], []
    for one in (config, slow):
        built = build_model(one, World(0, 1, CPU))
        out = built(tokens, tokens, docs)
        out.loss_sum.backward()
        losses.append(out.loss_sum.detach())
        gradients.append({n: p.grad for n, p in built.named_parameters()})
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-12, atol=0)
    for name, gradient in gradients[0].items():
        largest = 1e-12 * max(1.0, float(gradient.abs().max()))
        torch.testing.assert_close(gradients[1][name], gradient, rtol=0, atol=largest, msg=name)


@pytest.mark.parametrize(
    ("operation", "mesh"),
    [
        ("attention", MeshConfig(cp=2)),
        ("m2rnn", MeshConfig(cp=2)),
        ("cross_entropy", MeshConfig(tp=2)),
    ],
)
def test_definitions_know_whole_rows_and_vocabularies_alone(
    operation: str, mesh: MeshConfig
) -> None:
    kernels = replace(KernelsConfig(), **{operation: "reference"})
    cut = replace(tiny(), kernels=kernels, mesh=mesh, train=TrainConfig(device="cpu"))
    (error,) = kernel_rules(cut)
    assert f"kernels.{operation}=reference: needs" in str(error)


def test_every_module_that_has_hot_operations_is_told() -> None:
    with torch.device("meta"):
        model = HybridLM(tiny().model)
    other = Kernels(m2rnn="reference")
    set_kernels(model, other)
    told = {type(m).__name__ for m in model.modules() if getattr(m, "kernels", None) == other}
    assert {"CoreAttention", "Mamba3Scan", "M2RNNScan", "Experts", "LanguageModelHead"} <= told
    assert not any(getattr(m, "kernels", other) != other for m in model.modules())


PACKAGES = {"torch": "2.13.0", "triton": "3.7.1", "mamba-ssm": "2.3.2", "einops": "0.8.2"}


def test_a_triton_that_cannot_start_is_passed_over() -> None:
    """On a GPU whose machine has no C compiler every Triton kernel is refused, torch's is not."""
    able = Host("cuda", "bf16", (9, 0), "NVIDIA H200", PACKAGES)
    unable = replace(able, trouble="Failed to find C compiler.")
    base = tiny()
    siso = replace(base, model=replace(base.model, mamba3=replace(base.model.mamba3, d_state=64)))
    assert choose(siso, able)["mamba3"].backend == "mamba_ssm"
    found = choose(siso, unable)
    assert found.pop("attention").backend == "varlen"
    assert {c.backend for c in found.values()} == {"torch"}
    assert "triton can't start: Failed to find C compiler." in found["gates"].reason
    flex = replace(base.model.attention, softcap=30.0)
    capped = replace(base, model=replace(base.model, attention=flex))
    assert choose(capped, able)["attention"].backend == "flex"
    assert choose(capped, unable)["attention"].backend == "torch"


@pytest.mark.parametrize(
    ("compiler", "trouble"),
    [("false", "false can't compile"), (None, "Failed to find C compiler. Please specify")],
)
def test_what_keeps_triton_from_starting(
    compiler: str | None, trouble: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By Triton's own build: a compiler that fails, as without Python's headers, and none."""
    build = pytest.importorskip("triton.runtime.build")

    class Driver:
        @property
        def active(self) -> object:
            return build.compile_module_from_src("#include <Python.h>", f"by_{compiler}")

    monkeypatch.setattr("triton.runtime.driver", Driver())
    if compiler is None:
        monkeypatch.delenv("CC", raising=False)
        monkeypatch.setenv("PATH", "")
    else:
        monkeypatch.setenv("CC", compiler)
    chosen.triton_trouble.cache_clear()
    found = chosen.triton_trouble()
    chosen.triton_trouble.cache_clear()
    assert found.startswith(trouble), found


def test_compiled_blocks_need_a_triton_that_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    config = replace(tiny(), train=replace(tiny().train, compile="inductor"))
    gpu = torch.device("cuda", 0)
    monkeypatch.setattr(chosen, "triton_trouble", lambda: "Failed to find C compiler.")
    with pytest.raises(ConfigError, match="triton can't start: Failed to find"):
        chosen.check_compiler(config, gpu)
    chosen.check_compiler(config, CPU)
    chosen.check_compiler(tiny(), gpu)
