"""Golden: hyper-connections of DeepSeek-V4 and Megatron-LM, three orders of Sinkhorn's steps."""

from __future__ import annotations

import torch
from torch import Tensor

from megacpp.kernels.hyper_connections.reference import Coefficients, mix, projected, read
from megacpp.kernels.hyper_connections.sinkhorn import Ordering, sinkhorn
from tests.golden.harness import GoldenFile

KNOWN = ("mhc_*.safetensors",)
ORDERINGS: dict[str, Ordering] = {"rowcol": "megatron", "colrow": "paper", "v4": "deepseek_v4"}


def check(golden: GoldenFile) -> None:
    if "logits" in golden:
        check_sinkhorn(golden)
    else:
        check_block(golden)


def check_sinkhorn(golden: GoldenFile) -> None:
    for name, ordering in ORDERINGS.items():
        logits = golden.input("logits", grad=True)
        matrices = sinkhorn(logits, ordering, golden.config["iters"])
        golden.expect(f"M_{name}", matrices)
        matrices.backward(golden.input("d_M"))
        golden.expect(f"grad_M_{name}", logits.grad, "gradient")


def check_block(golden: GoldenFile) -> None:
    c, v4 = golden.config, "comb" in golden
    ordering: Ordering = "deepseek_v4" if v4 else "megatron"
    how = Coefficients(c["n"], ordering, c["iters"], c.get("rms_eps", 0.0))
    names = ("x", "fn", "scale", "base", "A")
    given = {name: golden.input(name, grad=True) for name in names}
    x = given["x"]
    x_SnD = x.flatten(0, 1)
    u_SD, post_Sn, res_Snn = read(x_SnD, given["fn"], given["scale"], given["base"], how)

    def rows(t: Tensor) -> Tensor:
        return t.unflatten(0, x.shape[:2])

    golden.expect("collapsed" if v4 else "aggregated", rows(u_SD))
    golden.expect("h_post", rows(post_Sn))
    golden.expect("comb" if v4 else "h_res", rows(how.turned(res_Snn)))
    if not v4:
        m_SK, _ = projected(x_SnD, given["fn"], how)
        logits_Sn = how.logits(m_SK, given["scale"], given["base"])[0]
        golden.expect("h_pre", rows(how.pre(logits_Sn)))
    out_SnD = mix(x_SnD, torch.tanh(u_SD @ given["A"]), post_Sn, res_Snn)
    golden.expect("out", rows(out_SnD))
    rows(out_SnD).backward(golden.input("d_out"))
    for name, leaf in given.items():
        golden.expect(f"grad_{name}", leaf.grad)
