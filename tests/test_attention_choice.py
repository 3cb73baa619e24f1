"""Which backend attention and the experts get on a host, and what is said against the others."""

from dataclasses import replace

import pytest

from megacpp.blocks.attention.config import AttentionConfig
from megacpp.config.presets import nam56r, tiny
from megacpp.config.schema import Config, KernelsConfig, MeshConfig
from megacpp.errors import ConfigError
from megacpp.kernels.host import Host
from megacpp.kernels.selection import OPERATIONS, choose

PACKAGES = {"torch": "2.11.0+cu130", "triton": "3.6.0"}
H200 = Host("cuda", "bf16", (9, 0), "H200", PACKAGES)
WIDE = AttentionConfig(head_dim=64)
MLA = AttentionConfig(kind="mla", qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128)


def with_attention(attention: AttentionConfig, mesh: MeshConfig | None = None) -> Config:
    config = tiny()
    model = replace(config.model, attention=attention)
    return replace(config, model=model, mesh=mesh or config.mesh)


@pytest.mark.parametrize(
    ("attention", "mesh", "backend"),
    [
        (WIDE, MeshConfig(), "varlen"),
        (replace(WIDE, softcap=30.0), MeshConfig(), "flex"),
        (MLA, MeshConfig(), "flex"),
        (WIDE, MeshConfig(cp=2, cp_attention="heads"), "varlen"),
        (WIDE, MeshConfig(cp=2, cp_attention="all_gather"), "flex"),
        (WIDE, MeshConfig(cp=2, cp_attention="ring"), "merged"),
        (MLA, MeshConfig(cp=2, cp_attention="ring"), "merged"),
        (replace(WIDE, softcap=30.0), MeshConfig(cp=2, cp_attention="ring"), "torch"),
        (replace(WIDE, window=64), MeshConfig(cp=2, cp_attention="ring"), "torch"),
        (replace(WIDE, head_dim=8, softcap=30.0), MeshConfig(), "torch"),
    ],
)
def test_auto_on_a_modern_gpu(attention: AttentionConfig, mesh: MeshConfig, backend: str) -> None:
    assert choose(with_attention(attention, mesh), H200)["attention"].backend == backend


def test_experts_on_a_modern_gpu() -> None:
    assert choose(nam56r(), H200)["experts"].backend == "triton"
    assert choose(nam56r(), replace(H200, dtype="fp64"))["experts"].backend == "torch"


@pytest.mark.parametrize(
    ("name", "attention", "host", "why"),
    [
        ("varlen", WIDE, Host("cpu", "bf16"), "needs a GPU"),
        ("varlen", WIDE, replace(H200, dtype="fp32"), r"bf16 or fp16 \(precision.dtype=fp32\)"),
        ("varlen", WIDE, replace(H200, capability=(7, 5)), r"capability 8.0 \(H200: 7.5\)"),
        ("varlen", WIDE, replace(H200, packages={"torch": "2.9.1"}), r"torch 2.11 \(2.9.1\)"),
        ("varlen", MLA, H200, r"one head dim \(q and k: 192, v: 128; varlen_padded"),
        ("varlen", replace(WIDE, softcap=30.0), H200, r"no soft cap .*softcap=30\)"),
        ("varlen", replace(WIDE, head_dim=100), H200, r"multiple of 8 and at most 256 \(100\)"),
        ("varlen", replace(WIDE, head_dim=264), H200, r"at most 256 \(264\)"),
        ("varlen", replace(WIDE, head_dim=256), replace(H200, capability=(8, 9)), "above 192"),
        ("varlen_padded", replace(MLA, v_head_dim=272), H200, r"at most 256 \(272\)"),
        ("merged", WIDE, H200, r"is for a ring \(mesh.cp=1\)"),
        ("flex", WIDE, Host("cpu", "fp32"), "needs a GPU"),
        ("flex", WIDE, replace(H200, packages={}), "needs triton 3.5"),
        ("flex", replace(MLA, v_head_dim=8), H200, r"at least 16 \(8\)"),
    ],
)
def test_what_a_backend_does_not_take_is_refused(
    name: str, attention: AttentionConfig, host: Host, why: str
) -> None:
    config = with_attention(attention)
    named = replace(config, kernels=KernelsConfig(attention=name))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=f"kernels.attention={name}: .*{why}"):
        choose(named, host)


def test_padding_is_a_choice_by_name() -> None:
    named = replace(with_attention(MLA), kernels=KernelsConfig(attention="varlen_padded"))
    assert choose(named, H200)["attention"].reason == "asked for by name"
    assert not OPERATIONS["attention"].backend("varlen_padded").by_itself
    choice = choose(with_attention(MLA), H200)["attention"]
    assert "varlen_padded takes these" in choice.reason
