"""Lines of `megacpp doctor` about the versions that it finds."""

from __future__ import annotations

import pytest

from megacpp.cli import doctor
from megacpp.versions import remark


@pytest.mark.parametrize(
    ("torch", "said"),
    [
        ("2.10.0+cpu", "too old; supported: 2.11.0 to 2.15.0; tested: "),
        ("2.11.0", "supported: 2.11.0 to 2.15.0; tested: "),
        ("2.15.1+cu132", "supported: 2.11.0 to 2.15.0; tested: "),
        ("2.16.0", "newer than supported; supported: "),
        ("3.0.0", "newer than supported; supported: "),
    ],
)
def test_a_torch_is_placed(torch: str, said: str) -> None:
    assert remark(torch).startswith(said)


@pytest.mark.parametrize(
    ("here", "ok", "said"),
    [
        ({"torch": "2.13.0+cpu"}, None, "requires 3.7.1"),
        ({"torch": "2.13.0", "triton": "3.7.1"}, True, "3.7.1; torch 2.13.0 for GPUs requires"),
        ({"torch": "2.15.0", "triton": "3.7.1"}, True, "3.7.1; torch 2.15.0 for GPUs requires 3.9"),
        ({"torch": "2.16.0", "triton": "4.0.0"}, True, "4.0.0; not tested"),
    ],
)
def test_triton_beside_the_one_that_torch_requires(
    here: dict[str, str], ok: bool | None, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "installed", lambda: here)
    found = doctor._triton()
    assert found.ok is ok and said in found.detail
