"""Classes of Hugging Face, a row each: which settings they express, under which names.

No torch import here.
"""

from __future__ import annotations

from megacpp.interop import keys
from megacpp.interop.hf_class import Change, HFClass
from megacpp.interop.keys import COMMON, DENSE
from megacpp.interop.layer_types import BY_LAYER, WINDOW
from megacpp.interop.rewrites import (
    EMPTY,
    FOLDED,
    FROM_ZERO,
    GATE,
    GATED_SHARED,
    GRANITE_EXPERTS,
    INTO_PAIRS,
    ONE_SHARED,
    PADDED,
    route_scale,
    twice_if_no_output_gate,
)

# ---- features and rules that classes share ------------------------------------------------------

ANY = ("yes", "no")
NEVER = {
    "sparse": ("none",),
    "Gated DeltaNet": ("no",),
    "groups of experts": ("no",),
    "query latent": ("no",),
    "qkv_bias": ("no",),
    "partial rotary": ("no",),
    "norms behind mixers": ("no",),
    "output gate": ("no",),
    "window": ("no",),
    "heads divide the width": ANY,
}
PLAIN = {
    **NEVER,
    "attention": ("gqa",),
    "shared expert": ("none",),
    "activation of F": ("none", "swiglu"),
}
DENSE_ONLY = {**PLAIN, "feed-forward": ("F alone",), "router": ("none",)}
LLAMA = {**DENSE_ONLY, "qk_norm": ("no",), "heads divide the width": ("yes",)}
OLMO = {**DENSE_ONLY, "qk_norm": ("wide",), "norms behind mixers": ("yes",)}
OLMO_IMPLIED = {"attention.qk_norm": True, "attention.qk_norm_wide": True, "post_norm": True}
LATENT = {
    **NEVER,
    "attention": ("mla",),
    "qk_norm": ("no",),
    "query latent": ANY,
    "activation of F": ("none", "swiglu"),
}
SOFTMAX = ("softmax post", "softmax pre")
MIXED = ("E alone", "E and F", "F, then E")
LEADING = ("E alone", "F, then E")
SIGMOID = {
    "feed-forward": LEADING,
    "router": ("sigmoid",),
    "shared expert": ("plain", "none"),
    "groups of experts": ANY,
}
BASIC = {"hidden_act": "silu", "attention_bias": False}
DEFAULTS = {"rms_norm_eps": 1e-6, "rope_theta": 1e4, "attention_bias": False, "hidden_act": "silu"}
DEEPSEEK = (
    *COMMON,
    keys.MLA,
    DENSE,
    keys.experts("n_routed_experts"),
    keys.SCALED,
    keys.SHARED_NUMBER,
)
BIASED = {"scoring_func": "sigmoid", "topk_method": "noaux_tc"}  # vLLM's router goes by them
SPARSE = {**LATENT, **SIGMOID, "query latent": ("yes",)}
SPARSE_FIXED = {
    **BASIC, **BIASED, "norm_topk_prob": True, "mlp_bias": False,
    "num_nextn_predict_layers": 0,
}  # fmt: skip
SPARSE_DEFAULTS = {
    **DEFAULTS, **BIASED, "norm_topk_prob": True, "mlp_bias": False,
    "first_k_dense_replace": 3, "n_shared_experts": 1, "routed_scaling_factor": 2.5,
}  # fmt: skip
SIGMOID_IMPLIED = {"moe.score": "sigmoid", "moe.shared_gate": False}


CLASSES = (
    HFClass(
        "LlamaForCausalLM",
        "llama",
        LLAMA,
        (*COMMON, keys.GQA, DENSE, keys.alike("AF")),
        {**BASIC, "mlp_bias": False},
        {**DEFAULTS, "mlp_bias": False},
    ),
    HFClass(
        "ArceeForCausalLM",
        "arcee",
        {**LLAMA, "activation of F": ("relu2",)},
        (*COMMON, keys.GQA, DENSE, keys.alike("AF")),
        {**BASIC, "mlp_bias": False, "hidden_act": "relu2"},
        {**DEFAULTS, "mlp_bias": False, "hidden_act": "relu2", "rms_norm_eps": 1e-5},
        {"mlp.activation": "relu2"},
    ),
    HFClass(
        "Qwen3ForCausalLM",
        "qwen3",
        {**DENSE_ONLY, "qk_norm": ("yes",)},
        (*COMMON, keys.GQA, DENSE, keys.alike("AF")),
        {**BASIC, "use_sliding_window": False},
        {**DEFAULTS, "use_sliding_window": False, "head_dim": 128},
        {"attention.qk_norm": True},
    ),
    HFClass(
        "Qwen2ForCausalLM",
        "qwen2",
        {**LLAMA, "qkv_bias": ("yes",)},
        (*COMMON, keys.GQA, DENSE, keys.alike("AF")),
        {"hidden_act": "silu", "use_sliding_window": False},
        {**DEFAULTS, "use_sliding_window": False},
        {"attention.qkv_bias": True},
    ),
    HFClass(
        "Olmo2ForCausalLM",
        "olmo2",
        OLMO,
        (*COMMON, keys.GQA, DENSE, keys.alike("AF")),
        BASIC,
        {**DEFAULTS, "rms_norm_eps": 1e-5},
        OLMO_IMPLIED,
    ),
    HFClass(
        "Olmo3ForCausalLM",
        "olmo3",
        {**OLMO, "window": ("some layers",)},
        (*BY_LAYER, keys.GQA, DENSE, keys.alike("AF")),
        BASIC,
        {**DEFAULTS, "rms_norm_eps": 1e-5, "rope_theta": 5e5, "sliding_window": 4096},
        OLMO_IMPLIED,
    ),
    HFClass(
        "OlmoeForCausalLM",
        "olmoe",
        {
            **PLAIN,
            "feed-forward": ("E alone",),
            "router": SOFTMAX,
            "qk_norm": ("wide",),
            "heads divide the width": ("yes",),
        },
        (
            *COMMON,
            keys.GQA,
            keys.experts("num_experts", "intermediate_size"),
            keys.SOFTMAX_ORDER,
            keys.alike("AE"),
        ),
        {**BASIC, "clip_qkv": None},
        {**DEFAULTS, "rms_norm_eps": 1e-5, "norm_topk_prob": False},
        {
            "attention.qk_norm": True, "attention.qk_norm_wide": True, "moe.score": "softmax",
            "moe.num_shared": 0,
        },
        changes=FOLDED,
    ),
    HFClass(
        "MixtralForCausalLM",
        "mixtral",
        {**PLAIN, "feed-forward": ("E alone",), "router": ("softmax post",), "qk_norm": ("no",)},
        (
            *COMMON,
            keys.GQA,
            keys.experts("num_local_experts", "intermediate_size"),
            keys.alike("AE"),
        ),
        {"hidden_act": "silu", "sliding_window": None},
        {**DEFAULTS, "sliding_window": None, "rms_norm_eps": 1e-5, "rope_theta": 1e6},
        {"moe.score": "softmax", "moe.num_shared": 0},
        rename=(
            ("mlp.", "block_sparse_moe."),
            (".gate_proj.", ".w1."),
            (".up_proj.", ".w3."),
            (".down_proj.", ".w2."),
        ),
        changes=FOLDED,
    ),
    HFClass(
        "Qwen3MoeForCausalLM",
        "qwen3_moe",
        {**PLAIN, "feed-forward": MIXED, "router": SOFTMAX, "qk_norm": ("yes",)},
        (
            *COMMON,
            keys.GQA,
            DENSE,
            keys.experts("num_experts"),
            keys.SOFTMAX_ORDER,
            keys.DENSE_NAMED,
        ),
        {**BASIC, "use_sliding_window": False},
        {
            **DEFAULTS, "use_sliding_window": False, "norm_topk_prob": False,
            "decoder_sparse_step": 1,
        },
        {"attention.qk_norm": True, "moe.score": "softmax", "moe.num_shared": 0},
        changes=FOLDED,
    ),
    HFClass(
        "GraniteMoeSharedForCausalLM",
        "granitemoeshared",
        {
            **PLAIN,
            "feed-forward": ("E alone",),
            "router": ("softmax post",),
            "shared expert": ("plain",),
            "qk_norm": ("no",),
        },
        (
            *COMMON,
            keys.GQA,
            keys.ATTENTION_SCALE,
            keys.experts("num_local_experts", "intermediate_size"),
            keys.shared_width("shared_intermediate_size"),
            keys.alike("AE"),
        ),
        {**BASIC, "embedding_multiplier": 1.0, "residual_multiplier": 1.0, "logits_scaling": 1.0},
        {
            **DEFAULTS, "embedding_multiplier": 1.0, "residual_multiplier": 1.0,
            "logits_scaling": 1.0, "attention_multiplier": 1.0,
        },
        {"moe.score": "softmax", "moe.shared_gate": False},
        changes={"block_sparse_moe.output_linear.weight": Change(scale=route_scale)},
        tensors={"E": GRANITE_EXPERTS},
    ),
    HFClass(
        "Qwen2MoeForCausalLM",
        "qwen2_moe",
        {
            **PLAIN,
            "feed-forward": MIXED,
            "router": SOFTMAX,
            "shared expert": ("plain", "gated"),
            "qk_norm": ("no",),
            "qkv_bias": ANY,
        },
        (
            *COMMON,
            keys.GQA,
            DENSE,
            keys.experts("num_experts"),
            keys.SOFTMAX_ORDER,
            keys.shared_width("shared_expert_intermediate_size"),
            keys.bias("qkv_bias"),
            keys.DENSE_NAMED,
        ),
        {"hidden_act": "silu", "use_sliding_window": False},
        {
            **DEFAULTS, "qkv_bias": True, "use_sliding_window": False, "norm_topk_prob": False,
            "decoder_sparse_step": 1,
        },
        {"moe.score": "softmax", "moe.shared_gate": True},
        rename=ONE_SHARED,
        changes=GATED_SHARED,
        zeros=(GATE,),
    ),
    HFClass(
        "Qwen3NextForCausalLM",
        "qwen3_next",
        {
            **PLAIN,
            "feed-forward": MIXED,
            "router": SOFTMAX,
            "shared expert": ("plain", "gated"),
            "qk_norm": ("yes",),
            "Gated DeltaNet": ANY,
            "partial rotary": ANY,
            "output gate": ANY,
        },
        (
            *COMMON,
            keys.GQA,
            keys.PARTIAL,
            DENSE,
            keys.experts("num_experts"),
            keys.SOFTMAX_ORDER,
            keys.shared_width("shared_expert_intermediate_size"),
            keys.DELTA,
            keys.TYPED,
        ),
        BASIC,
        {
            **DEFAULTS, "partial_rotary_factor": 0.25, "norm_topk_prob": True, "head_dim": 256,
            "decoder_sparse_step": 1, "full_attention_interval": 4,
        },
        {
            "attention.qk_norm": True, "attention.output_gate": True, "moe.score": "softmax",
            "moe.shared_gate": True,
        },
        rename=ONE_SHARED,
        changes={
            **GATED_SHARED,
            "self_attn.q_proj.weight": Change(order="gated_queries"),
            "self_attn.o_proj.weight": Change(scale=twice_if_no_output_gate),
            "self_attn.q_norm.weight": FROM_ZERO,
            "self_attn.k_norm.weight": FROM_ZERO,
            "input_layernorm.weight": FROM_ZERO,
            "post_attention_layernorm.weight": FROM_ZERO,
            "model.norm.weight": FROM_ZERO,
        },
        zeros=(GATE,),
    ),
    HFClass(
        "Glm4MoeForCausalLM",
        "glm4_moe",
        {**PLAIN, **SIGMOID, "qk_norm": ANY, "qkv_bias": ANY, "partial rotary": ANY},
        (
            *COMMON,
            keys.GQA,
            keys.PARTIAL,
            keys.HEAD_NORMS,
            keys.bias("attention_bias"),
            DENSE,
            keys.experts("n_routed_experts"),
            keys.SCALED,
            keys.GROUPED,
            keys.SHARED_NUMBER,
            keys.LEADING,
        ),
        {
            "hidden_act": "silu", "norm_topk_prob": True,
            "num_nextn_predict_layers": 0,
        },
        {
            **DEFAULTS, "rms_norm_eps": 1e-5, "partial_rotary_factor": 0.5, "norm_topk_prob": True,
            "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "n_shared_experts": 1,
            "routed_scaling_factor": 1.0,
        },
        SIGMOID_IMPLIED,
        changes=PADDED,
        zeros=EMPTY,
    ),
    HFClass(
        "DeepseekV2ForCausalLM",
        "deepseek_v2",
        {
            **LATENT,
            "feed-forward": LEADING,
            "router": ("softmax pre",),
            "shared expert": ("none", "plain"),
            "heads divide the width": ("yes",),
        },
        (*DEEPSEEK, keys.ONE_GROUP, keys.LEADING),
        {
            **BASIC, "topk_method": "greedy", "norm_topk_prob": False, "mlp_bias": False,
            "scoring_func": "softmax",
        },
        {
            **DEFAULTS, "topk_method": "greedy", "norm_topk_prob": False, "mlp_bias": False,
            "scoring_func": "softmax", "first_k_dense_replace": 0, "n_shared_experts": 2,
            "routed_scaling_factor": 1.0, "q_lora_rank": 1536,
        },
        {"moe.score": "softmax", "moe.softmax_order": "pre", "moe.shared_gate": False},
        changes=PADDED,
        zeros=EMPTY,
    ),
    HFClass(
        "DeepseekV3ForCausalLM",
        "deepseek_v3",
        {**LATENT, **SIGMOID, "feed-forward": (*LEADING, "F alone"), "router": ("none", "sigmoid")},
        (*DEEPSEEK, keys.GROUPED, keys.LEADING),
        {
            **BASIC, **BIASED, "norm_topk_prob": True, "rope_interleave": True,
            "num_nextn_predict_layers": 0,
        },
        {
            **DEFAULTS, **BIASED, "norm_topk_prob": True, "rope_interleave": True,
            "n_shared_experts": 1, "first_k_dense_replace": 3, "n_group": 8, "topk_group": 4,
            "q_lora_rank": 1536, "routed_scaling_factor": 2.5,
        },
        SIGMOID_IMPLIED,
        changes=PADDED,
        zeros=EMPTY,
    ),
    HFClass(
        "DeepseekV32ForCausalLM",
        "deepseek_v32",
        {**SPARSE, "sparse": ("each layer",)},
        (*DEEPSEEK, keys.GROUPED, keys.INDEXER, keys.EACH_INDEXES, keys.TYPED_LEADING),
        SPARSE_FIXED,
        {**SPARSE_DEFAULTS, "n_group": 8, "topk_group": 4, "q_lora_rank": 1536},
        SIGMOID_IMPLIED,
        changes=PADDED,
        zeros=EMPTY,
    ),
    HFClass(
        "GlmMoeDsaForCausalLM",
        "glm_moe_dsa",
        {**SPARSE, "sparse": ("choices shared",)},
        (*DEEPSEEK, keys.GROUPED, keys.INDEXER, keys.INDEXERS, keys.TYPED_LEADING),
        SPARSE_FIXED,
        {
            **SPARSE_DEFAULTS, "rms_norm_eps": 1e-5, "n_group": 1, "topk_group": 1,
            "q_lora_rank": 2048,
        },
        SIGMOID_IMPLIED,
        changes={**PADDED, **INTO_PAIRS},
        zeros=EMPTY,
    ),
    HFClass(
        "MistralForCausalLM",
        "mistral",
        {**DENSE_ONLY, "qk_norm": ("no",), "window": ("yes",)},
        (*COMMON, keys.GQA, WINDOW, DENSE, keys.alike("AF")),
        {"hidden_act": "silu"},
        {**DEFAULTS, "sliding_window": 4096},
    ),
)  # fmt: skip
