"""The table of parameters: complete, without overlap, and with the matrices that it promises."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from megacpp.config import AttentionConfig, M2RNNConfig, Mamba3Config, ModelConfig, MoEConfig
from megacpp.errors import ConfigError
from megacpp.model.hybrid import HybridLM
from megacpp.presets import PRESETS
from optim.groups import TABLE, Assignment, Row, assign, table_lines
from optim.ownership import MatrixView

SMALL = ModelConfig(
    dim=24,
    depth=5,
    pattern="AMERF",
    vocab_size=40,
    attention=AttentionConfig(num_heads=4, num_kv_heads=2, head_dim=6, qk_norm=True),
    mamba3=Mamba3Config(d_state=8, headdim=8, mimo_rank=2, ngroups=3, out_norm=True, conv_kernel=4),
    m2rnn=M2RNNConfig(num_heads=4, num_q_heads=2, num_k_heads=1, key_dim=5, value_dim=6),
    moe=MoEConfig(num_experts=4, hidden_dim=12, shared_hidden_dim=10, shared_gate=True),
)
MLA = replace(
    SMALL,
    pattern="A",
    depth=1,
    attention=AttentionConfig(
        kind="mla",
        num_heads=3,
        q_lora_rank=9,
        kv_lora_rank=8,
        qk_nope_head_dim=5,
        qk_rope_head_dim=4,
        v_head_dim=7,
    ),
)


def meta(config: ModelConfig) -> HybridLM:
    with torch.device("meta"):
        return HybridLM(config)


def assignments(config: ModelConfig) -> dict[str, Assignment]:
    return {a.name: a for a in assign(meta(config), "muon_adamw")}


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_is_covered(name: str) -> None:
    model = meta(PRESETS[name]().model)
    found = assign(model, "muon_adamw")
    assert [a.name for a in found] == [name for name, _ in model.named_parameters()]
    for a in found:  # every view fits its parameter
        if a.algorithm == "muon":
            a.view.heights(a.parameter.shape)


def test_every_row_is_used() -> None:
    used = {id(a.row) for config in (SMALL, MLA) for a in assignments(config).values()}
    assert [row.names for row in TABLE if id(row) not in used] == []


def test_what_goes_where_by_hand() -> None:
    """One layer of each letter: every name, and the matrices of every Muon parameter."""
    found = assignments(SMALL)
    muon = {name: str(a.view) for name, a in found.items() if a.algorithm == "muon"}
    assert muon == {
        **{f"blocks.0.mixer.w{x}.weight": "whole" for x in "qkvo"},
        **{f"blocks.1.mixer.in_{part}.weight": "whole" for part in "zxBC"},
        "blocks.1.mixer.out_proj.weight": "whole",
        **{f"blocks.2.mixer.experts.w{x}": "each expert" for x in "123"},
        **{f"blocks.2.mixer.shared.w{x}.weight": "whole" for x in "123"},
        "blocks.3.mixer.in_q.weight": "rows 2 x 5",
        "blocks.3.mixer.in_k.weight": "rows 5",
        "blocks.3.mixer.in_v.weight": "rows 4 x 6",
        "blocks.3.mixer.in_gate.weight": "whole",
        "blocks.3.mixer.output_projection.weight": "whole",
        **{f"blocks.4.mixer.w{x}.weight": "whole" for x in "123"},
    }
    decaying = {n for n, a in found.items() if a.algorithm == "adamw" and a.row.decays}
    assert decaying == {
        "embed.weight",
        "head.weight",
        *(f"blocks.1.mixer.in_{part}.weight" for part in ("dt", "A", "trap", "angles")),
        "blocks.3.mixer.in_forget.weight",
        "blocks.2.mixer.router.weight",
        "blocks.2.mixer.shared.gate.weight",
    }


def test_latent_attention_by_hand() -> None:
    found = assignments(MLA)
    views = {name.split(".")[3]: str(found[name].view) for name in found if "mixer" in name}
    assert views["wkv_a"] == "rows 8 | 4"
    assert found["blocks.0.mixer.wkv_b.weight"].view == MatrixView((5, 7) * 3)
    assert views["wq_a"] == views["wq_b"] == views["wo"] == "whole"


def test_tied_embeddings_are_one_parameter() -> None:
    found = assignments(replace(SMALL, tie_embeddings=True))
    assert "embed.weight" in found and "head.weight" not in found


def test_adamw_alone_takes_every_row() -> None:
    found = assign(meta(SMALL), "adamw")
    assert {a.algorithm for a in found} == {"adamw"}
    assert {str(a.view) for a in found} == {"whole"}
    assert all(a.row.decays == (a.parameter.dim() >= 2) for a in found if "blocks.0" in a.name)


def test_an_unknown_parameter_is_named() -> None:
    model = meta(SMALL)
    model.blocks["4"].mixer.register_parameter(  # type: ignore[union-attr,operator]
        "w4", nn.Parameter(torch.empty(3, 3, device="meta"))
    )
    with pytest.raises(ConfigError, match=r"blocks\.4\.mixer\.w4: .*matches none\). Fix: "):
        assign(model, "muon_adamw")


def test_a_parameter_in_two_rows_is_named() -> None:
    table = (*TABLE, Row("A", ("w?.weight",), "adamw", True))
    with pytest.raises(ConfigError, match=r"blocks\.0\.mixer\.wq\.weight: .* and \('w\?\.weight"):
        assign(meta(SMALL), "muon_adamw", table)


def test_a_row_of_another_letter_does_not_match() -> None:
    assert not any(row.matches("M", "wq.weight") for row in TABLE)
    assert not any(row.matches("", "wq.weight") for row in TABLE)
    assert [row.letters for row in TABLE if row.matches("R", "D")] == ["R"]


def test_the_printed_table_accounts_for_every_parameter() -> None:
    found = assign(meta(SMALL), "muon_adamw")
    lines = table_lines(found)
    tensors = sum(int(line.split()[2]) for line in lines)
    numel = sum(int(line.split()[4].replace(",", "")) for line in lines)
    assert tensors == len(found) and numel == sum(a.parameter.numel() for a in found)
    assert any(line.endswith("R: in_v.weight  [rows 4 x 6]") for line in lines)
