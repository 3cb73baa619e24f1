"""Selection of the code for each hot operation on a host, with its reason; no torch import here.

An operation has backends by name, in the order in which `auto` tries them: it takes the first that
can run. A backend that is asked for by name (`--kernels.m2rnn triton`) and can't run is an error,
never replaced by another. Reasons why a backend can't run are in megacpp/kernels/support.py; the
backends are in megacpp/kernels/.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace

from megacpp.blocks.features import mixer_letters
from megacpp.config.schema import Config, KernelsConfig
from megacpp.errors import ConfigError, config_error
from megacpp.kernels.attention.support import ATTENTION
from megacpp.kernels.gated_delta_rule.support import GATED_DELTA_RULE
from megacpp.kernels.host import Host, installed
from megacpp.kernels.m2rnn.support import M2RNN
from megacpp.kernels.mamba3.support import MAMBA3
from megacpp.kernels.operation import Backend, Operation, definition
from megacpp.kernels.support import (
    always,
    dotted,
    triton_in_fp32,
    triton_kernels,
    whole_rows,
    whole_vocabulary,
)
from megacpp.versions import TORCH, TRITON

# What torch's builds for GPUs come with.
BROUGHT = {"torch": TORCH, "triton": TRITON[TORCH]}


@dataclass(frozen=True)
class BackendSelection:
    """Backend of an operation in a run.

    Attributes:
        operation: its name.
        backend: name of the selected one.
        asked: the setting: a backend's name, or `auto`.
        passed_over: of backends that `auto` would rather have taken, why they can't run.
        cost: what the backend needs beside its operation; empty: nothing.
    """

    operation: str
    backend: str
    asked: str
    passed_over: Mapping[str, str]
    cost: str = ""

    @property
    def reason(self) -> str:
        """Return `asked for by name`, or why backends that `auto` prefers can't run; its cost."""
        how = ["auto"] if self.asked == "auto" else ["asked for by name"]
        how += [f"{name}: {why}" for name, why in self.passed_over.items()]
        return "; ".join(how + [self.cost] * bool(self.cost))

    @property
    def taken(self) -> str:
        """Return the backend and the reason, such as `torch (auto; triton: needs a GPU)`."""
        return f"{self.backend} ({self.reason})"


OPERATIONS: dict[str, Operation] = {
    "attention": ATTENTION,
    "mamba3": MAMBA3,
    "m2rnn": M2RNN,
    "gated_delta_rule": GATED_DELTA_RULE,
    "short_conv": Operation(
        "the short convolutions in front of recurrent scans, with their SiLU",
        "RMG",
        (
            Backend("triton", "one pass over memory each way", triton_in_fp32),
            Backend("torch", "a shifted multiply-add for each tap", always),
            definition("one token after another under autograd", whole_rows),
        ),
    ),
    "gates": Operation(
        "decays of recurrent scans, norms of B and C of Mamba-3, gates of M2RNN and dense blocks",
        "RMGFE",
        (
            Backend("triton", "one pass over memory each way", triton_in_fp32),
            Backend("torch", "an operator for each step of the formula", always),
            definition("torch's operators under autograd"),
        ),
    ),
    "experts": Operation(
        "rows to the experts that they chose, and back",
        "E",
        (
            Backend("triton", "grouped products, Triton between them", triton_in_fp32),
            Backend("torch", "grouped products; a product per expert where torch has none", always),
            definition("one expert after another under autograd"),
        ),
    ),
    "cross_entropy": Operation(
        "a linear head and its loss, without logits of all tokens",
        "",
        (
            Backend("triton", "chunks of tokens, two passes over their logits", triton_kernels),
            Backend("torch", "chunks of tokens, elementwise passes by torch", always),
            definition("logits of all tokens under autograd", whole_vocabulary),
        ),
        {"soft cap and z-loss": {"model.logit_softcap": 30.0, "model.z_loss": 1e-4}},
    ),
    "rms_norm": Operation(
        "x / rms(x) * weight, computed in fp32",
        "",
        (
            Backend("triton", "one pass over memory each way", triton_in_fp32),
            Backend("torch", "torch's fused operator in fp32, casts around it", always),
            definition("torch's operator under autograd"),
        ),
    ),
}


def choose(config: Config, host: Host) -> dict[str, BackendSelection]:
    """Select the backend of every operation that the model has.

    Raises:
        ConfigError: a backend that is asked for by name can't run here.
    """
    letters = mixer_letters(config.model)
    found: dict[str, BackendSelection] = {}
    for name, operation in OPERATIONS.items():
        if not operation.letters or letters & set(operation.letters):
            found[name] = _choice(name, operation, config, host)
    return found


def _choice(name: str, operation: Operation, config: Config, host: Host) -> BackendSelection:
    asked = getattr(config.kernels, name)
    if asked != "auto":
        unsupported = operation.backend(asked).unsupported_reason(config, host)
        if unsupported:
            raise refused(name, asked, unsupported)
        return BackendSelection(name, asked, asked, {}, operation.backend(asked).cost(config))
    passed_over: dict[str, str] = {}
    for backend in operation.backends:
        if backend.by_itself:
            unsupported = backend.unsupported_reason(config, host)
            if unsupported is None:
                return BackendSelection(
                    name, backend.name, asked, passed_over, backend.cost(config)
                )
            passed_over[backend.name] = unsupported
    raise AssertionError(f"{name}: torch runs everywhere")


def plain_loss(found: Mapping[str, BackendSelection], host: Host) -> str | None:
    """Return a warning if the run's GPU has no kernel for the head; None: it has one.

    On a CPU the torch form is the only one, and a run that asks for it by name isn't warned.
    """
    choice = found["cross_entropy"]
    if host.device == "cpu" or choice.asked != "auto" or choice.backend != "torch":
        return None
    capability = f" ({dotted(host.capability)})" if host.capability else ""
    why = "; ".join(f"{name}: {why}" for name, why in choice.passed_over.items())
    name = f"{host.name or 'this GPU'}{capability}"
    return f"cross entropy: no native kernel for {name}: the chunked torch path ({why})"


def refused(operation: str, backend: str, why: str) -> ConfigError:
    """Return the error of a backend that was asked for by name."""
    return config_error(
        f"kernels.{operation}", backend, why, f"use kernels.{operation}=auto, or mend that"
    )


def kernel_rules(config: Config) -> Iterator[ConfigError]:
    """Yield errors of named backends that the configuration or the installed packages rule out."""
    device = "cpu" if config.train.device == "cpu" else "cuda"
    host = replace(planned_host(config, device), packages=installed())
    for name in (f.name for f in fields(KernelsConfig)):
        asked = getattr(config.kernels, name)
        if asked != "auto":
            unsupported = OPERATIONS[name].backend(asked).unsupported_reason(config, host)
            if unsupported:
                yield refused(name, asked, unsupported)


def planned_host(config: Config, device: str) -> Host:
    """Return a host for plans: a CPU, or a GPU of any kind with the packages of torch's builds.

    Plans must not depend on what is installed where they are made.
    """
    dtype = config.precision.dtype
    if dtype == "auto":
        dtype = "bf16" if device == "cuda" else "fp32"
    return Host(device, dtype, packages=BROUGHT)


def planned_kernels(config: Config, device: str) -> KernelsConfig:
    """Return backends with `auto` resolved for `planned_host`; named backends stay as they are."""
    found = choose(replace(config, kernels=KernelsConfig()), planned_host(config, device))
    free = {n: c.backend for n, c in found.items() if getattr(config.kernels, n) == "auto"}
    return replace(config.kernels, **free)
