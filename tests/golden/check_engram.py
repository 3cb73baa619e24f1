"""Engram against the authors' demonstration: hashes, output, gradients; two residual streams."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from megacpp.blocks.engram.config import EngramConfig
from megacpp.blocks.engram.module import NORM_EPS, Engram, layer_hash
from megacpp.config.schema import ModelConfig
from megacpp.model.documents import Documents
from megacpp.model.primes import primes_from
from tests.golden.harness import GoldenFile

KNOWN = ("engram*.safetensors",)
# Our names of their modules, one per stream where they have a list.
NORMS = {"norm1": "key_norm", "norm2": "x_norm", "short_conv.norms": "value_norm"}


def model_config(golden: GoldenFile) -> ModelConfig:
    """Our configuration from the stored one; every stored key is used."""
    stored = dict(golden.config)
    layers = stored.pop("layer_ids")
    heads, order = stored.pop("heads"), stored.pop("max_ngram")
    sizes = golden.input("table_sizes").tolist()
    before = layers.index(stored.pop("layer_id")) * len(sizes)
    # The sizes are the primes from table_size on that earlier layers have left.
    table_size = sizes[0]
    while primes_from(table_size, before + 1)[-1] > sizes[0]:
        table_size -= 1
    engram = EngramConfig(
        layers=",".join(map(str, layers)),
        heads=heads,
        max_order=order,
        table_size=table_size,
        dim=stored.pop("n_embed_per_ngram"),
        conv_kernel=stored.pop("kernel_size"),
        seed=stored.pop("seed"),
    )
    assert stored.pop("dilation") == order
    assert "1e-5 in the conv" in stored["rmsnorm_eps"] and NORM_EPS == 1e-5
    assert "finfo(fp64).eps for norm1/norm2" in stored.pop("rmsnorm_eps")
    depth = max(layers) + 1
    base = replace(ModelConfig(), pattern="A", depth=depth, vocab_size=len(golden.input("lookup")))
    return replace(base, dim=stored.pop("D"), engram=engram)


def theirs_of(golden: GoldenFile, engram: Engram) -> dict[str, Tensor]:
    """Under their names, the views of our parameters that are theirs."""
    D, streams = engram.config.dim, engram.streams
    tables = engram.tables.weight
    theirs: dict[str, Tensor] = {}
    name = "multi_head_embedding.embedding.weight"
    theirs[name] = tables[: len(golden.input(f"param.{name}"))]  # ours has further rows
    theirs["short_conv.conv.weight"] = engram.conv.weight
    theirs["value_proj.weight"], theirs["value_proj.bias"] = engram.wv.weight, engram.wv.bias
    for i in range(streams):
        rows = slice(i * D, (i + 1) * D)
        theirs[f"key_projs.{i}.weight"] = engram.wk.weight[rows]
        theirs[f"key_projs.{i}.bias"] = engram.wk.bias[rows]
        for part, ours in NORMS.items():
            theirs[f"{part}.{i}.weight"] = getattr(engram, ours).weight[rows]
    return theirs


def check(golden: GoldenFile) -> None:
    config, layer = model_config(golden), golden.config["layer_id"]
    engram = Engram(config, layer, golden.config["hc"]).to(golden.dtype)
    engram.lookup_V, engram.pad = golden.input("lookup"), golden.config["pad_id"]
    assert engram.lookup_V[engram.pad].item() == golden.config["pad_id_compressed"]
    hashes = layer_hash(config, layer, int(engram.lookup_V.max()) + 1)
    golden.expect("multipliers", torch.tensor(hashes.multipliers))
    golden.expect("table_sizes", torch.tensor(hashes.primes).flatten())
    tokens_BT = golden.input("tokens")
    docs = Documents.rows(*tokens_BT.shape, tokens_BT.device).with_tokens(tokens_BT, tokens_BT)
    golden.expect("hash_ids", engram.rows(docs) - torch.tensor(hashes.offsets))
    with torch.no_grad():
        for name, view in theirs_of(golden, engram).items():
            view.copy_(golden.input(f"param.{name}"))
    h = golden.input("h", grad=True)
    y = engram(h, docs)
    y.backward(golden.input("d_y"))
    golden.expect("y", y)
    golden.expect("grad.h", h.grad)
    for parameter in engram.parameters():
        assert parameter.grad is not None
        parameter.data = parameter.grad  # so that the views below are those of gradients
    for name, view in theirs_of(golden, engram).items():
        golden.expect(f"grad.{name}", view)
