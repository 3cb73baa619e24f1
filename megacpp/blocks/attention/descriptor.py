"""Attention (A) as other packages read it: grouped-query, latent, sparse; no torch import here.

Letters: Q and K channels of queries and of keys or values, Kv keys and values of all heads of MLA
together, W its heads * value dim, N head of normalised queries and keys; of latents Lq that of
queries, Lk that of keys and values with the rotary key, Lv without; of an indexer X heads * head
dim, Xd head dim, Xh heads, Xq its queries' input. Heads are sharded, latents are whole; an indexer
is whole: every rank chooses for all tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from megacpp.blocks.attention.checks import checks, mesh_rules, policy_checks
from megacpp.blocks.attention.sizes import replayed, sends, shared_bytes
from megacpp.blocks.descriptor import (
    ALL_TOKENS,
    LOSS_BUFFERS,
    AllocationSettings,
    BlockKind,
    ContextExchange,
    ForeignTensor,
    Parameter,
    copies_weights,
)

if TYPE_CHECKING:
    from torch import Tensor, nn

    from megacpp.blocks.attention.compiled import Attention
    from megacpp.config.schema import CheckpointingPolicy, Config, MeshConfig, ModelConfig
    from megacpp.memory.forms.local_shapes import LocalShapes
    from megacpp.model.documents import Documents
    from megacpp.model.regions import Region


def build(kind: str, model: ModelConfig, layer: int) -> nn.Module:
    """Return the mixer of a layer `A`, `A+full`, `A.index` or `A.share`."""
    mla = is_mla(model)
    if kind.startswith("A."):
        from megacpp.blocks.attention.sparse import (
            SparseGroupedQueryAttention,
            SparseLatentAttention,
        )

        sparse = SparseLatentAttention if mla else SparseGroupedQueryAttention
        return sparse(model, kind, layer)
    if mla:
        from megacpp.blocks.attention.mla import MultiHeadLatentAttention

        return MultiHeadLatentAttention(model)
    from megacpp.blocks.attention.gqa import GroupedQueryAttention

    return GroupedQueryAttention(model, kind)


def is_mla(model: ModelConfig) -> bool:
    """Return whether attention is multi-head latent attention."""
    return model.attention.kind == "mla"


def is_gqa(model: ModelConfig) -> bool:
    """Return whether attention is grouped-query attention."""
    return not is_mla(model)


def latent_queries(model: ModelConfig) -> bool:
    """Return whether queries are projected from a latent."""
    return is_mla(model) and model.attention.q_lora_rank > 0


def direct_queries(model: ModelConfig) -> bool:
    """Return whether queries are projected directly from the input."""
    return not latent_queries(model)


def direct_latents(model: ModelConfig) -> bool:
    """Return whether queries of multi-head latent attention are projected directly."""
    return is_mla(model) and direct_queries(model)


def biased(model: ModelConfig) -> bool:
    """Return whether queries, keys and values of grouped-query attention have a bias."""
    return is_gqa(model) and model.attention.qkv_bias


def output_gated(model: ModelConfig) -> bool:
    """Return whether a projection of the input gates what the heads return."""
    return is_gqa(model) and model.attention.output_gate


def ungated(model: ModelConfig) -> bool:
    """Return whether grouped-query attention has no gate."""
    return is_gqa(model) and not model.attention.output_gate


def normed(model: ModelConfig) -> bool:
    """Return whether queries and keys of grouped-query attention are normalised."""
    return is_gqa(model) and model.attention.qk_norm


def normed_heads(model: ModelConfig) -> bool:
    """Return whether queries and keys are normalised head by head."""
    return normed(model) and not model.attention.qk_norm_wide


def normed_wide(model: ModelConfig) -> bool:
    """Return whether queries and keys are normalised over all heads at once."""
    return normed(model) and model.attention.qk_norm_wide


def dims(model: ModelConfig) -> dict[str, int]:
    """Sizes of the letters above."""
    a, d, sparse = model.attention, model.dim, model.attention.sparse
    indexer = {
        "X": sparse.num_heads * sparse.head_dim,
        "Xd": sparse.head_dim,
        "Xh": sparse.num_heads,
        "Xq": (a.q_lora_rank or d) if is_mla(model) else d,
    }
    if is_gqa(model):
        q, k = a.num_heads * a.head_dim, a.num_kv_heads * a.head_dim
        return {"Q": q, "K": k, "N": a.head_dim, **indexer}
    n = a.num_heads
    return {
        "Q": n * (a.qk_nope_head_dim + a.qk_rope_head_dim),  # exported settings are plain values
        "Kv": n * (a.qk_nope_head_dim + a.v_head_dim),
        "W": n * a.v_head_dim,
        "Lq": a.q_lora_rank,
        "Lk": a.kv_lora_rank + a.qk_rope_head_dim,
        "Lv": a.kv_lora_rank,
        **indexer,
    }


def latent_rows(model: ModelConfig) -> tuple[int, ...]:
    """Return the rows of the latent, and of the rotary key that all heads share."""
    return model.attention.kv_lora_rank, model.attention.qk_rope_head_dim


def key_value_rows(model: ModelConfig) -> tuple[int, ...]:
    """Return the rows of k and v of every head in turn."""
    a = model.attention
    return (a.qk_nope_head_dim, a.v_head_dim) * a.num_heads


PARAMETERS = (
    Parameter(("wq.weight",), "[Q_tp, D]", "muon", fp8=True, compress=True, when=direct_queries),
    Parameter(("wq.bias",), "[Q_tp]", "vector", when=biased),
    Parameter(("wk.weight",), "[K_tp, D]", "muon", fp8=True, compress=True, when=is_gqa),
    Parameter(("wk.bias",), "[K_tp]", "vector", when=biased),
    Parameter(("wv.weight",), "[K_tp, D]", "muon", fp8=True, compress=True, when=is_gqa),
    Parameter(("wv.bias",), "[K_tp]", "vector", when=biased),
    Parameter(("wg.weight",), "[Q_tp, D]", "muon", fp8=True, compress=True, when=output_gated),
    Parameter(("wq_a.weight",), "[Lq, D]", "muon", compress=True, when=latent_queries),
    Parameter(("q_norm.weight",), "[Lq]", "vector", fp32=True, when=latent_queries),
    Parameter(("wq_b.weight",), "[Q_tp, Lq]", "muon", when=latent_queries),
    Parameter(("wkv_a.weight",), "[Lk, D]", "muon", rows=latent_rows, compress=True, when=is_mla),
    Parameter(("kv_norm.weight",), "[Lv]", "vector", fp32=True, when=is_mla),
    Parameter(("wkv_b.weight",), "[Kv_tp, Lv]", "muon", rows=key_value_rows, when=is_mla),
    Parameter(("wo.weight",), "[D, Q_tp]", "muon", fp8=True, when=is_gqa),
    Parameter(("wo.weight",), "[D, W_tp]", "muon", fp8=True, when=is_mla),
    Parameter(("q_norm.weight",), "[N]", "vector", fp32=True, when=normed_heads),
    Parameter(("k_norm.weight",), "[N]", "vector", fp32=True, when=normed_heads),
    Parameter(("q_norm.weight",), "[Q_tp]", "vector", fp32=True, when=normed_wide),
    Parameter(("k_norm.weight",), "[K_tp]", "vector", fp32=True, when=normed_wide),
    Parameter(("indexer.wq_b.weight",), "[X, Xq]", "adamw", within=".index"),
    Parameter(("indexer.wk.weight",), "[Xd, D]", "adamw", within=".index"),
    Parameter(
        ("indexer.k_norm.weight", "indexer.k_norm.bias"),
        "[Xd]",
        "vector",
        fp32=True,
        within=".index",
    ),
    Parameter(("indexer.weights_proj.weight",), "[Xh, D]", "adamw", fp32=True, within=".index"),
)

HF = (
    ForeignTensor("self_attn.q_proj.weight", ("wq.weight",), "halves", when=ungated),
    ForeignTensor(
        "self_attn.q_proj.weight", ("wq.weight", "wg.weight"), "gated_queries", when=output_gated
    ),
    ForeignTensor("self_attn.k_proj.weight", ("wk.weight",), "halves", when=is_gqa),
    ForeignTensor("self_attn.v_proj.weight", ("wv.weight",), when=is_gqa),
    ForeignTensor("self_attn.q_proj.bias", ("wq.bias",), "halves", when=biased),
    ForeignTensor("self_attn.k_proj.bias", ("wk.bias",), "halves", when=biased),
    ForeignTensor("self_attn.v_proj.bias", ("wv.bias",), when=biased),
    ForeignTensor("self_attn.q_norm.weight", ("q_norm.weight",), "halves", when=normed),
    ForeignTensor("self_attn.k_norm.weight", ("k_norm.weight",), "halves", when=normed),
    ForeignTensor("self_attn.q_proj.weight", ("wq.weight",), when=direct_latents),
    ForeignTensor("self_attn.q_a_proj.weight", ("wq_a.weight",), when=latent_queries),
    ForeignTensor("self_attn.q_a_layernorm.weight", ("q_norm.weight",), when=latent_queries),
    ForeignTensor("self_attn.q_b_proj.weight", ("wq_b.weight",), when=latent_queries),
    ForeignTensor("self_attn.kv_a_proj_with_mqa.weight", ("wkv_a.weight",), when=is_mla),
    ForeignTensor("self_attn.kv_a_layernorm.weight", ("kv_norm.weight",), when=is_mla),
    ForeignTensor("self_attn.kv_b_proj.weight", ("wkv_b.weight",), when=is_mla),
    ForeignTensor("self_attn.o_proj.weight", ("wo.weight",)),
    *(
        ForeignTensor(f"self_attn.indexer.{name}", (f"indexer.{name}",), when=is_mla)
        for name in (
            "wq_b.weight",
            "wk.weight",
            "k_norm.weight",
            "k_norm.bias",
            "weights_proj.weight",
        )
    ),
)


def tensor_dims(model: ModelConfig) -> dict[str, int]:
    """Numbers of heads, and of key and value heads where they are sharded, by setting."""
    a = model.attention
    found = {"model.attention.num_heads": a.num_heads}
    return found | ({"model.attention.num_kv_heads": a.num_kv_heads} if is_gqa(model) else {})


def heads_exchanged(model: ModelConfig) -> tuple[str, int]:
    """Name and number of key and value heads: where these divide, so do the query heads."""
    name = "num_kv_heads" if is_gqa(model) else "num_heads"
    return f"model.attention.{name}", model.attention.num_key_heads


def seen(model: ModelConfig, seq_len: int) -> int:
    """Tokens of a row that a query is counted to see: all, or those of its window."""
    return min(seq_len, model.attention.window or seq_len)


def multiply_adds(model: ModelConfig, seq_len: int) -> float:
    """Multiply-adds a token of projections, scores and values over the whole row."""
    a, d = model.attention, model.dim
    if is_gqa(model):
        heads = (2 + a.output_gate) * a.num_heads + 2 * a.num_kv_heads
        projections = d * a.head_dim * heads
        return projections + 2 * seen(model, seq_len) * a.num_heads * a.head_dim
    (qk, v), n = a.head_dims, a.num_heads
    q = d * a.q_lora_rank + a.q_lora_rank * n * qk if a.q_lora_rank else d * n * qk
    kv = d * (a.kv_lora_rank + a.qk_rope_head_dim)
    expand = a.kv_lora_rank * n * (a.qk_nope_head_dim + v)
    return q + kv + expand + n * v * d + seq_len * n * (qk + v)


def last_product(model: ModelConfig) -> float:
    """Multiply-adds a token of the output projection."""
    size = dims(model)
    return float(model.dim * size["W" if is_mla(model) else "Q"])


def regions(policy: CheckpointingPolicy, model: ModelConfig) -> set[Region]:
    """Recompute regions: core attention, MLA's projections, the n-gram memory in front."""
    mla, selective = is_mla(model), policy.ablock == "selective"
    wanted: dict[Region, bool] = {
        "core_attn": selective or policy.core_attn,
        "mla_q_upproj": mla and (selective or policy.mla_q_upproj),
        "mla_kv": mla and (selective or policy.mla_kv),
        "engram": selective and bool(model.engram.layers),
    }
    return {region for region, is_wanted in wanted.items() if is_wanted}


def region_multiply_adds(region: Region, model: ModelConfig, seq_len: int) -> float:
    """Multiply-adds a token of scores and values, or of projections from latents."""
    a, (query, _) = model.attention, model.attention.head_dims
    if region == "core_attn":
        return 2.0 * seen(model, seq_len) * a.num_heads * query
    if region == "mla_q_upproj":
        return float((a.q_lora_rank or model.dim) * a.num_heads * query)
    if region == "mla_kv":
        return float(a.kv_lora_rank * a.num_heads * (a.qk_nope_head_dim + a.v_head_dim))
    return 0.0


def once(model: ModelConfig, mesh: MeshConfig) -> bool:
    """Whether keys are gathered together with those of an indexer.

    The gather then belongs to the path of the inputs and to the loss of the indexer, which scales
    its gradients in place.
    """
    return bool(model.attention.sparse.layers)


def context_traffic(own: LocalShapes) -> Iterator[tuple[str, int]]:
    """Exchanges of one layer over `cp` in a forward and a backward, with their bytes."""
    a, kind = own.config.model.attention, own.config.mesh.cp_attention
    grouped, everyone = a.kind == "gqa", own.rows * own.row
    heads = a.num_heads // own.tp
    if grouped:
        shared = a.num_kv_heads // own.tp * 2 * a.head_dim
    else:
        shared = a.kv_lora_rank + a.qk_rope_head_dim
    if kind == "all_gather":
        yield "keys and values", 2 * everyone * shared * own.compute
    elif kind == "ring":  # blocks around in both walks, their gradients in fp32 home
        block = own.tokens * shared
        yield "keys and values", (own.cp - 1) * 2 * 2 * block * own.compute
        yield "keys and values", (own.cp - 1) * 2 * block * own.wide
    else:
        numbers = heads * sum(a.head_dims) + shared * grouped
        yield "heads", 2 * own.tokens * numbers * own.compute
        if not grouped:
            yield "keys and values", 2 * everyone * shared * own.compute


def why_eager(mixer: nn.Module) -> str | None:
    """Return the reason why a block can't be one compiled graph, or None."""
    from megacpp.blocks.attention.compiled import why_eager

    return why_eager(mixer)


def graph_inputs(mixer: Attention, docs: Documents, x_BTD: Tensor) -> Documents:
    """Return the documents with the cached values that a compiled block reads."""
    from megacpp.blocks.attention.compiled import graph_inputs

    return graph_inputs(mixer, docs, x_BTD)


def gathers(model: ModelConfig, kind: str, by_heads: bool) -> tuple[str, str]:
    """Return the name and letter of keys and values, with the key of an indexer."""
    what, dims = ("latent", "L") if is_mla(model) else ("k, v", "K")
    return what + ", index key" * ("A.index" in kind), dims


def lines(config: Config) -> Iterator[str]:
    """Yield what the header of a run says of sparse layers."""
    from megacpp.blocks.attention.sparse_checks import sparse_lines

    yield from sparse_lines(config)


def _products(own: LocalShapes) -> tuple[int, ...]:
    """Return what decides about operators of a compiled block: copies of the inputs' weights."""
    sizes = dims(own.config.model)
    if not own.compiled:
        return (0,)
    if "K" in sizes:
        return (copies_weights(own, 3, sizes["Q"] + 2 * sizes["K"]),)
    return (copies_weights(own, 2, own.tp * (sizes["Lq"] + sizes["Lk"])),)  # whole on each rank


ATTENTION = BlockKind(
    letter="A",
    name="attention",
    build=build,
    parameters=PARAMETERS,
    dims=dims,
    checks=checks,
    tensor_dims=tensor_dims,
    layouts=(ALL_TOKENS,),
    multiply_adds=multiply_adds,
    allocations=AllocationSettings("attention", kernel="attention", same=_products),
    shared_bytes=shared_bytes,
    sends=sends,
    replayed=replayed,
    policy_checks=policy_checks,
    mesh_rules=mesh_rules,
    buffer_numbers=lambda model, kind: (LOSS_BUFFERS * ("A.index" in kind), 0),
    why_eager=why_eager,
    graph_inputs=graph_inputs,
    regions=regions,
    region_multiply_adds=region_multiply_adds,
    whole="ablock",
    last_product=last_product,
    before=lambda kind: ("A.index",) if kind.startswith("A.share") else (),
    context=ContextExchange(
        "cp_attention", heads_exchanged, "all_gather", context_traffic, gathers, once=once
    ),
    lines=lines,
    hf=HF,
)
