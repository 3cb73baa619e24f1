"""Parameter table: complete, without overlap, and with the promised matrices."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from checkpointing.compress import compress_linears
from megacpp.blocks.attention.config import AttentionConfig
from megacpp.blocks.engram.config import EngramConfig
from megacpp.blocks.experts.config import MoEConfig
from megacpp.blocks.hyper_connections.config import HyperConnectionConfig
from megacpp.blocks.m2rnn.config import M2RNNConfig
from megacpp.blocks.mamba3.config import Mamba3Config
from megacpp.blocks.mtp.config import MTPConfig
from megacpp.blocks.ngram.config import NgramConfig
from megacpp.blocks.top.config import TOPConfig
from megacpp.config.checks.optimizer import layer_of
from megacpp.config.presets import PRESETS
from megacpp.config.schema import ModelConfig, OptimConfig
from megacpp.errors import ConfigError
from megacpp.model.hybrid import HybridLM
from optim.build import groups
from optim.groups import TABLE, Assignment, OptimizerRow, _place, assign, table_lines
from optim.ownership import MatrixView
from tests.model.small import variants

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
ENGRAM = replace(
    SMALL,
    pattern="A",
    depth=1,
    engram=EngramConfig(layers="all", heads=2, table_size=20, dim=8, lr_factor=3.0),
    mhc=HyperConnectionConfig(streams=2),
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
AROUND = replace(SMALL, top=TOPConfig(0.3), ngram=NgramConfig(heads=2, table_size=20, dim=3))


def meta(config: ModelConfig) -> HybridLM:
    with torch.device("meta"):
        return HybridLM(config)


def assignments(config: ModelConfig) -> dict[str, Assignment]:
    return {a.name: a for a in assign(meta(config), "muon_adamw")}


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_is_covered(name: str) -> None:
    """Exactly one row per parameter, a view that fits it, a positive rate, and one group."""
    config = PRESETS[name]()
    model = meta(config.model)
    found = assign(model, "muon_adamw")
    names = [name for name, _ in model.named_parameters()]
    assert [a.name for a in found] == names
    for a in found:
        letter, short = _place(model, a.name)
        assert [row for row in TABLE if row.matches(letter, short)] == [a.row]
        assert a.lr(config.optim) > 0
        if a.algorithm == "muon":
            a.view.heights(a.parameter.shape)
    grouped = [name for group in groups(found, config.optim) for name, _ in group["params"]]
    assert sorted(grouped) == sorted(names)


def test_rates_by_hand() -> None:
    """Zero means `lr`, a row's factor multiplies, and without Muon its rows have `lr`."""
    found = assignments(SMALL)
    config = OptimConfig(lr=0.5, muon_lr=0.25, vector_lr=0.125, embed_lr=1.0)
    rates = {name: a.lr(config) for name, a in found.items()}
    assert rates["embed.weight"] == 1.0 and rates["head.weight"] == 0.5
    assert rates["blocks.0.mixer.wq.weight"] == rates["blocks.2.mixer.experts.w1"] == 0.25
    assert rates["blocks.2.mixer.router.weight"] == rates["blocks.1.mixer.mimo_x"] == 0.5
    vectors = {name for name, rate in rates.items() if rate == 0.125}
    assert {"norm.weight", "blocks.1.mixer.dt_bias", "blocks.3.mixer.D"} <= vectors
    assert all(found[name].decay(config) == 0 for name in vectors)
    row = replace(found["blocks.0.mixer.wq.weight"].row, lr_factor=0.5)
    assert replace(found["blocks.0.mixer.wq.weight"], row=row).lr(config) == 0.125
    alone = {a.name: a.lr(config) for a in assign(meta(SMALL), "adamw")}
    assert alone["blocks.0.mixer.wq.weight"] == 0.5


def test_named_layers_belong_to_adamw() -> None:
    """By the name of the layer, in every block that has it: experts and dense ones alike."""
    found = assign(meta(SMALL), "muon_adamw", by_adamw=frozenset({"wo", "w2"}))
    before = assign(meta(SMALL), "muon_adamw")
    moved = {a.name for a, b in zip(found, before, strict=True) if a.algorithm != b.algorithm}
    assert moved == {b.name for b in before if layer_of(b.name) in ("wo", "w2")}
    assert {name.rpartition("mixer.")[2] for name in moved} >= {"wo.weight", "experts.w2"}
    config = OptimConfig(lr=0.5, muon_lr=0.25)
    assert all(a.lr(config) == 0.5 for a in found if a.name in moved)


def test_every_row_is_used() -> None:
    longer = replace(SMALL, pattern=f"{SMALL.pattern}F", depth=SMALL.depth + 1)
    compressed = meta(longer), meta(variants()["gated_deltanet"])
    for model in compressed:
        compress_linears(model, ratio=0.25, seed=0)
    ahead = meta(replace(SMALL, mtp=MTPConfig(depths=1)))
    streams = meta(replace(SMALL, mhc=HyperConnectionConfig(streams=2)))
    sparse, around = meta(variants()["mla_sparse"]), (meta(AROUND), meta(ENGRAM))
    around += (meta(variants()["gated_deltanet"]),)
    models = meta(SMALL), meta(MLA), *around, ahead, streams, sparse, *compressed
    used = {id(a.row) for model in models for a in assign(model, "muon_adamw")}
    assert [row.names for row in TABLE if id(row) not in used] == []


def test_parts_of_a_gated_deltanet_are_matrices_of_their_own() -> None:
    """Upstream's fused stack holds q, k, v and z of each key head; here none is fused."""
    found = assignments(variants()["gated_deltanet"])
    of_layer = {n.removeprefix("blocks.0.mixer."): a for n, a in found.items() if ".0.mixer" in n}
    muon = {name: str(a.view) for name, a in of_layer.items() if a.algorithm == "muon"}
    parts = *(f"in_{part}.weight" for part in "qkvz"), "out_proj.weight"
    assert muon == dict.fromkeys(parts, "whole")
    decayed = {name for name, a in of_layer.items() if a.decay(OptimConfig(muon_weight_decay=1))}
    assert decayed == {*parts, "in_a.weight", "in_b.weight"}


def test_what_goes_where_by_hand() -> None:
    """Check one layer of each letter: every name, and the matrices of every Muon parameter."""
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


def test_memories_by_hand() -> None:
    """Tables at a rate of their own, without decay; the keys of each stream are a matrix."""
    prefix = "blocks.0.engram."
    found = {n.removeprefix(prefix): a for n, a in assignments(ENGRAM).items() if prefix in n}
    config = OptimConfig(lr=0.5, muon_lr=0.25, vector_lr=0.125)
    rates = {name: (a.algorithm, a.lr(config), a.decay(config) > 0) for name, a in found.items()}
    vectors = ("wk.bias", "wv.bias", "key_norm.weight", "x_norm.weight", "value_norm.weight")
    assert rates == {
        "tables.weight": ("adamw", 1.5, False),
        "wk.weight": ("muon", 0.25, False),  # optim.muon_weight_decay is 0
        "wv.weight": ("muon", 0.25, False),
        "conv.weight": ("adamw", 0.5, False),
        **{name: ("adamw", 0.125, False) for name in vectors},
    }
    assert found["tables.weight"].lr(replace(config, embed_lr=2.0)) == 6.0
    assert str(found["wk.weight"].view) == "rows 2 x 24" and str(found["wv.weight"].view) == "whole"
    assert found["wk.weight"].row.decays and not found["tables.weight"].row.decays


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
    table = (*TABLE, OptimizerRow("A", ("w?.weight",), "adamw", True))
    with pytest.raises(ConfigError, match=r"blocks\.0\.mixer\.wq\.weight: .* and \('w\?\.weight"):
        assign(meta(SMALL), "muon_adamw", table)


def test_a_row_of_another_letter_does_not_match() -> None:
    assert not any(row.matches("M", "wq.weight") for row in TABLE)
    assert not any(row.matches("", "wq.weight") for row in TABLE)
    assert [row.letters for row in TABLE if row.matches("R", "D")] == ["R"]


def test_the_printed_table_accounts_for_every_parameter() -> None:
    found = assign(meta(SMALL), "muon_adamw")
    lines = table_lines(found, OptimConfig(lr=0.5, muon_lr=0.25, vector_lr=0.125))
    tensors = sum(int(line.split()[4]) for line in lines)
    numel = sum(int(line.split()[6].replace(",", "")) for line in lines)
    assert {(line.split()[0], line.split()[2]) for line in lines} == {
        ("muon", "0.25"),
        ("adamw", "0.5"),
        ("adamw", "0.125"),
    }
    assert tensors == len(found) and numel == sum(a.parameter.numel() for a in found)
    assert any(line.endswith("R: in_v.weight  [rows 4 x 6]") for line in lines)
