"""Reads one golden file and makes sure that every tensor in it is used or compared.

A family lives in `check_<family>.py`:

    KNOWN = ("mla_*.safetensors",)         # fnmatch patterns of the file names it owns
    SKIP = ("*_cp*.safetensors",)          # optional: patterns it leaves to somebody else
    def check(golden: GoldenFile) -> None  # runs our code on golden.input(...), golden.expect(...)

`check` reads every shape and setting from the file (tensors, `golden.config`, `golden.metadata`),
never from constants, so that files with other seeds and shapes work. It is run twice: with
`golden.dtype` fp64 (absolute tolerance 1e-9) and fp32 (2e-6 of the largest reference value for
outputs, 1e-5 for gradients). A tensor that is neither read by `input` nor compared by `expect`
fails the file.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from megacpp.model.documents import Documents

FP64_ABS = 1e-9
FP32_REL = {"output": 2e-6, "gradient": 1e-5}


class GoldenFile:
    """Tensors and metadata of one file, at one dtype, with a record of what was compared.

    Inputs are on `device`; what is compared may be anywhere.
    """

    def __init__(
        self,
        path: Path,
        dtype: torch.dtype,
        device: torch.device = torch.device("cpu"),  # noqa: B008
    ) -> None:
        self.path, self.dtype, self.device = path, dtype, device
        with safe_open(str(path), "pt") as f:  # type: ignore[no-untyped-call]
            self.metadata: dict[str, str] = f.metadata() or {}
            self._tensors: dict[str, Tensor] = {k: f.get_tensor(k) for k in f.keys()}  # noqa: SIM118
        self.config: dict = json.loads(self.metadata.get("config", "{}"))
        self._touched: set[str] = set()
        self.compared: list[str] = []

    def names(self, prefix: str = "") -> list[str]:
        """Tensor names that start with `prefix`."""
        return [name for name in self._tensors if name.startswith(prefix)]

    def documents(self) -> Documents | None:
        """Documents of the one row, by the boundaries that are stored; None: none are."""
        return packed_row(self.input("cu_seqlens")) if "cu_seqlens" in self else None

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def input(self, name: str, grad: bool = False) -> Tensor:
        """An input tensor in this run's dtype (integers unchanged), a leaf if `grad`."""
        self._touched.add(name)
        t = self._tensors[name].to(self.device, copy=True)
        t = t.to(self.dtype) if t.is_floating_point() else t
        return t.requires_grad_() if grad else t

    def expect(self, name: str, got: Tensor | None, kind: str = "", rounding: float = 0.0) -> None:
        """Compares `got` with the stored tensor at the tolerance of this dtype.

        Args:
            name: of the stored tensor.
            got: what was computed.
            kind: "output" or "gradient"; by default names that start with "grad" are gradients.
            rounding: by how much the rounding of fp32 moves the stored tensor, where that is more.
        """
        self._touched.add(name)
        assert got is not None, f"{self.path.name}: {name}: nothing was computed"
        want, got = self._tensors[name], got.cpu()
        assert got.shape == want.shape, (
            f"{name}: shape {tuple(got.shape)}, want {tuple(want.shape)}"
        )
        self.compared.append(name)
        if not want.is_floating_point():
            assert torch.equal(got.to(want.dtype), want), f"{self.path.name}: {name} differs"
            return
        kind = kind or ("gradient" if name.startswith("grad") else "output")
        scale = want.double().abs().max().item() if want.numel() else 0.0
        limit = FP64_ABS if self.dtype == torch.float64 else max(FP32_REL[kind] * scale, rounding)
        error = (got.detach().double() - want.double()).abs().max().item() if want.numel() else 0.0
        assert error <= limit, f"{self.path.name}: {name} ({self.dtype}): {error:.2e} > {limit:.2e}"

    def expect_within(self, name: str, got: Tensor, limit: float) -> None:
        """Compares with an absolute limit of its own: for values stored at another precision."""
        self._touched.add(name)
        self.compared.append(name)
        error = (got.detach().cpu().double() - self._tensors[name].double()).abs().max().item()
        assert error <= limit, f"{self.path.name}: {name}: {error:.2e} > {limit:.2e}"

    def finish(self) -> None:
        """Fails when a tensor of the file was neither used nor compared, or nothing was."""
        left = sorted(set(self._tensors) - self._touched)
        assert not left, f"{self.path.name}: never checked: {', '.join(left)}"
        assert self.compared, f"{self.path.name}: nothing was compared"


def packed_row(cu_seqlens: Tensor) -> Documents:
    """Documents of one packed row, by their boundaries `[0, ..., T]`."""
    lengths = cu_seqlens.diff().to(torch.int64)
    ids_T = torch.repeat_interleave(torch.arange(len(lengths), device=lengths.device), lengths)
    return Documents.from_ids(ids_T[None])
