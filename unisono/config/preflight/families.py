"""The model types of each architecture, and the config.json fields that its family reads beside the common ones.

``formula`` checks a config.json by this table, for the early check and for the loader. An architecture of an installed
package (entry point ``unisono.models``) has no entry here; its own ``read`` checks the config.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from unisono.config.decoder_table import ALSO, ROWS, DecoderRow

ANY = object()
"""A value of :attr:`Facts.takes`: the family reads every value of the field, or its tensors are compared."""


@dataclass(frozen=True)
class Facts:
    """Values that an architecture's config.json may have.

    model_types: values of ``model_type``; None: it may be missing. text_types: values of ``text_config.model_type``, if
    the config has one.
    takes: field of config.json -> ANY, or the values that the family computes; a field of ``formula.FORMULA`` that is
    missing here must be neutral. windows: "by layer": ``layer_types`` chooses sliding windows; "all": every layer has
    ``sliding_window``; "none": no layer has one. experts: layers may have experts. partial_rotary: a fraction of a head
    may be rotated. rope_by_type: the rope parameters are those of layer types. rope_types: rope types that not every
    family has: "longrope", "dynamic", "alpha" for ``dynamic`` with a fixed alpha, and "mscale" for ``longrope`` with
    factors of cosines and sines.
    """

    model_types: Sequence[str | None]
    text_types: Sequence[str] = ()
    takes: Mapping[str, Any] = field(default_factory=dict)
    windows: str = "none"
    experts: bool = False
    partial_rotary: bool = False
    rope_by_type: bool = False
    rope_types: Sequence[str] = ()


def facts_of(row: DecoderRow) -> Facts:
    """The facts of a row of the table of decoders."""
    takes = {name: ANY if values is None else values for name, values in row.fields.items()}
    takes |= {name: ANY if values is None else values for name, values in row.takes.items()}
    if row.activation != "silu":
        same = (row.activation, "gelu_new") if row.activation == "gelu_pytorch_tanh" else (row.activation,)
        takes |= dict.fromkeys(("hidden_act", "activation_function", "mlp_hidden_act"), same)
    if row.windows == "by layer":
        takes["layer_types"] = ANY
    if row.query_scaling:
        takes["llama_4_scaling_beta"] = ANY
    return Facts(
        row.model_types,
        row.text_types,
        takes,
        row.windows,
        row.experts is not None,
        row.partial_rotary,
        row.rope_by_type,
        row.rope_types,
    )


_BIASES = {"attention_bias": ANY}
_QWEN2_BIASES = {"attention_bias": ANY, "qkv_bias": (True,), "use_qkv_bias": (True,), "add_qkv_bias": (True,)}
_HEAD_NORMS = {"use_qk_norm": (True,), "qk_norm": (True,), "qk_layernorm": (True,)}
_EXPERTS = {"num_experts": ANY, "num_local_experts": ANY, "num_experts_per_tok": ANY}
_SPARSE = {**_EXPERTS, "decoder_sparse_step": ANY, "mlp_only_layers": ANY}
_DEEPSEEK = dict.fromkeys(
    ("n_group", "topk_group", "routed_scaling_factor", "norm_topk_prob", "first_k_dense_replace", "n_shared_experts",
     "num_experts_per_tok", "num_local_experts", "scoring_func", "topk_method"), ANY
)  # fmt: skip
_NOT_LING = ("n_shared_experts", "norm_topk_prob", "num_local_experts", "scoring_func", "topk_method")
_SHORT_CONV = dict.fromkeys(("layer_types", "conv_L_cache", "norm_eps"), ANY)
_MAMBA2 = dict.fromkeys(("layer_types", "layers_block_type", "mamba_d_state", "mamba_expand"), ANY)
_LATENT = dict.fromkeys(("kv_lora_rank", "q_lora_rank", "v_head_dim", "rope_interleave"), ANY)
_MUP = dict.fromkeys(("scale_emb", "scale_depth", "dim_model_base"), ANY)
_LLAMA4 = {
    **_BIASES, **_EXPERTS,
    **dict.fromkeys(
        ("layer_types", "no_rope_layers", "no_rope_layer_interval", "interleave_moe_layer_step", "use_qk_norm",
         "attn_temperature_tuning", "attention_chunk_size"), ANY
    ),
}  # fmt: skip
_HYBRID = {
    **_BIASES, **_HEAD_NORMS, "layer_types": ANY, "attn_output_gate": ANY, "use_attention_gate": (True,),
    "shared_expert_intermediate_size": ANY,
}  # fmt: skip

_QWEN3_5 = Facts(("qwen3_5", "qwen3_5_text"), ("qwen3_5_text",), _HYBRID, partial_rotary=True)
_QWEN3_5_MOE = Facts(
    ("qwen3_5_moe", "qwen3_5_moe_text"),
    ("qwen3_5_moe_text",),
    {**_HYBRID, **_EXPERTS},
    experts=True,
    partial_rotary=True,
)

_GEMMA2 = {
    **_BIASES, "hidden_act": ("gelu_pytorch_tanh",), "hidden_activation": ("gelu_pytorch_tanh",), "layer_types": ANY,
    "query_pre_attn_scalar": ANY, "final_logit_softcapping": ANY, "attn_logit_softcapping": ANY,
}  # fmt: skip
_GEMMA3 = {
    **{name: values for name, values in _GEMMA2.items() if name != "attn_logit_softcapping"},
    "sliding_window_pattern": ANY, "_sliding_window_pattern": ANY, "rope_local_base_freq": ANY,
}  # fmt: skip

_GEMMA4 = {
    **{name: values for name, values in _GEMMA3.items() if name != "query_pre_attn_scalar"}, **_EXPERTS,
    **dict.fromkeys(
        ("attention_k_eq_v", "enable_moe_block", "hidden_size_per_layer_input", "num_kv_shared_layers",
         "per_layer_config", "top_k_experts", "use_double_wide_mlp"), ANY
    ),
    "use_bidirectional_attention": ("vision",),
}  # fmt: skip

HEADLESS: Mapping[str, str] = {
    **{
        f"{name}{kind}": f"{name}ForCausalLM"
        for kind in ("ForSequenceClassification", "Model")
        for name in ("Gemma2", "Llama", "Mistral", "Qwen2", "Qwen3", "Qwen3Moe")
    },
    "Gemma3TextForSequenceClassification": "Gemma3ForCausalLM",
    "Gemma3TextModel": "Gemma3ForCausalLM",
    "Qwen2ForProcessRewardModel": "Qwen2ForCausalLM",
    "Qwen2ForRewardModel": "Qwen2ForCausalLM",
}
"""Architectures without an LM head -> that of their decoder: classifiers, rerankers and reward models with a head
``score``, and embedding models."""

ENCODERS: Mapping[str, str] = {
    f"{name}{kind}": inside
    for name, base in (
        ("Bert", "bert."), ("ModernBert", "model."), ("Roberta", "roberta."), ("XLMRoberta", "roberta.")
    )
    for kind, inside in (("Model", ""), ("ForSequenceClassification", base))
}  # fmt: skip
"""Architectures of encoders -> prefix of the base model's tensors."""

_ENCODER = {"hidden_act": ("gelu",), "position_embedding_type": ("absolute",), "layer_norm_eps": ANY}
_MODERN = {
    **_BIASES, "mlp_bias": ANY, "hidden_activation": ("gelu",), "position_embedding_type": ("absolute",),
    "layer_types": ANY, "local_attention": ANY, "sliding_window": ANY, "global_attn_every_n_layers": ANY,
    "norm_eps": ANY, "layer_norm_eps": ANY,
}  # fmt: skip

_ENCODER_FACTS = {
    "Bert": Facts(("bert",), takes=_ENCODER),
    "ModernBert": Facts(("modernbert",), takes=_MODERN, windows="by layer", rope_by_type=True),
    "Roberta": Facts(("roberta",), takes=_ENCODER),
    "XLMRoberta": Facts(("xlm-roberta",), takes=_ENCODER),
}

ARCHITECTURES: Mapping[str, Facts] = {
    **{name: _ENCODER_FACTS[name.removesuffix("Model").removesuffix("ForSequenceClassification")] for name in ENCODERS},
    "Gemma2ForCausalLM": Facts(("gemma2",), takes=_GEMMA2, windows="by layer"),
    "Gemma3ForCausalLM": Facts(("gemma3_text",), takes=_GEMMA3, windows="by layer", rope_by_type=True),
    "Gemma3ForConditionalGeneration": Facts(
        ("gemma3",), ("gemma3_text",), _GEMMA3, windows="by layer", rope_by_type=True
    ),
    "Gemma4ForCausalLM": Facts(
        ("gemma4_text",), takes=_GEMMA4, windows="by layer", experts=True, partial_rotary=True, rope_by_type=True
    ),
    "Gemma4ForConditionalGeneration": Facts(
        ("gemma4",), ("gemma4_text",), _GEMMA4, "by layer", experts=True, partial_rotary=True, rope_by_type=True
    ),
    "Gemma4UnifiedForCausalLM": Facts(
        ("gemma4_unified_text",), takes=_GEMMA4, windows="by layer", partial_rotary=True, rope_by_type=True
    ),
    "Gemma4UnifiedForConditionalGeneration": Facts(
        ("gemma4_unified",), ("gemma4_unified_text",), _GEMMA4, "by layer", partial_rotary=True, rope_by_type=True
    ),
    "GptOssForCausalLM": Facts(
        ("gpt_oss",),
        takes={**_BIASES, **_EXPERTS, "swiglu_limit": ANY, "swiglu_alpha": ANY, "layer_types": ANY},
        windows="by layer",
        experts=True,
    ),
    "LlamaForCausalLM": Facts(("llama",), takes={**_BIASES, "mlp_bias": ANY}, rope_types=("dynamic",)),
    "Llama4ForCausalLM": Facts(("llama4_text",), takes=_LLAMA4, experts=True),
    "Llama4ForConditionalGeneration": Facts(("llama4",), ("llama4_text",), _LLAMA4, experts=True),
    "MiniCPMForCausalLM": Facts(
        ("minicpm", None), takes={**_BIASES, **_MUP}, rope_types=("dynamic", "longrope")
    ),
    "MiniCPM3ForCausalLM": Facts(
        ("minicpm3",),
        takes={
            **_BIASES, **_MUP, "mlp_bias": ANY,
            **{name: values for name, values in _LATENT.items() if name != "rope_interleave"},
        },
        rope_types=("longrope",),
    ),
    "MistralForCausalLM": Facts(("mistral",), windows="all"),
    "MixtralForCausalLM": Facts(("mixtral",), takes=_EXPERTS, windows="all", experts=True),
    "Qwen2ForCausalLM": Facts(("qwen2",), takes={**_QWEN2_BIASES, "layer_types": ANY}, windows="by layer"),
    "Qwen3ForCausalLM": Facts(("qwen3",), takes={**_BIASES, **_HEAD_NORMS, "layer_types": ANY}, windows="by layer"),
    "Qwen3NextForCausalLM": Facts(
        ("qwen3_next",),
        takes={**_HYBRID, **_SPARSE, "norm_topk_prob": ANY},
        experts=True,
        partial_rotary=True,
    ),
    "Qwen3_5ForCausalLM": _QWEN3_5,
    "Qwen3_5ForConditionalGeneration": Facts(("qwen3_5",), ("qwen3_5_text",), _HYBRID, partial_rotary=True),
    "Qwen3_5MoeForCausalLM": _QWEN3_5_MOE,
    "Qwen3_5MoeForConditionalGeneration": Facts(
        ("qwen3_5_moe",), ("qwen3_5_moe_text",), _QWEN3_5_MOE.takes, experts=True, partial_rotary=True
    ),
    "Qwen2VLForConditionalGeneration": Facts(
        ("qwen2_vl",), ("qwen2_vl_text",), {**_QWEN2_BIASES, "layer_types": ANY}, windows="by layer"
    ),
    "Qwen2_5_VLForConditionalGeneration": Facts(
        ("qwen2_5_vl",), ("qwen2_5_vl_text",), {**_QWEN2_BIASES, "layer_types": ANY}, windows="by layer"
    ),
    "Qwen3MoeForCausalLM": Facts(
        ("qwen3_moe",),
        takes={**_BIASES, **_HEAD_NORMS, **_SPARSE, "norm_topk_prob": ANY},
        windows="all",
        experts=True,
    ),
    "Qwen3VLForConditionalGeneration": Facts(("qwen3_vl",), ("qwen3_vl_text",), {**_BIASES, **_HEAD_NORMS}),
    "Qwen3VLMoeForConditionalGeneration": Facts(
        ("qwen3_vl_moe",), ("qwen3_vl_moe_text",), {**_BIASES, **_HEAD_NORMS, **_SPARSE}, experts=True
    ),
    "DeepseekV2ForCausalLM": Facts(
        ("deepseek_v2",), takes={**_BIASES, **_DEEPSEEK, **_LATENT, "norm_topk_prob": (False,)}, experts=True
    ),
    "DeepseekV3ForCausalLM": Facts(("deepseek_v3", "kimi_k2"), takes={**_BIASES, **_DEEPSEEK, **_LATENT}, experts=True),
    "KimiK25ForConditionalGeneration": Facts(
        ("kimi_k25",), ("deepseek_v3", "kimi_k2"), {**_BIASES, **_DEEPSEEK, **_LATENT}, experts=True
    ),
    "KimiLinearForCausalLM": Facts(
        ("kimi_linear",),
        takes={
            **_BIASES, **_EXPERTS, **{name: values for name, values in _DEEPSEEK.items() if name != "scoring_func"},
            **{name: values for name, values in _LATENT.items() if name != "rope_interleave"},
            **dict.fromkeys(
                ("layer_types", "linear_num_heads", "mlp_layer_types", "moe_renormalize", "num_expert_group",
                 "num_shared_experts"), ANY
            ),
        },
        experts=True,
    ),
    **dict.fromkeys(
        ("Mistral4ForCausalLM", "MistralLarge3ForCausalLM"),
        Facts(
            ("mistral4",), takes={**_BIASES, **_DEEPSEEK, **_LATENT, "llama_4_scaling_beta": ANY}, experts=True,
            partial_rotary=True,
        ),
    ),
    "Dots1ForCausalLM": Facts(
        ("dots1",), takes={**_BIASES, **_HEAD_NORMS, **_DEEPSEEK, "layer_types": ANY}, windows="by layer", experts=True
    ),
    "Ernie4_5_MoeForCausalLM": Facts(
        ("ernie4_5_moe",),
        takes={**_EXPERTS, "moe_num_shared_experts": ANY, "moe_layer_interval": ANY, "norm_topk_prob": (True,)},
        experts=True,
    ),
    "Glm4MoeForCausalLM": Facts(
        ("glm4_moe",), takes={**_BIASES, **_HEAD_NORMS, **_DEEPSEEK, "use_qk_norm": ANY}, experts=True,
        partial_rotary=True,
    ),
    "Glm4MoeLiteForCausalLM": Facts(
        ("glm4_moe_lite",), takes={**_BIASES, **_DEEPSEEK, **_LATENT, "mlp_layer_types": ANY}, experts=True
    ),
    "BailingMoeV2ForCausalLM": Facts(
        ("bailing_moe", "bailing_moe_v2"),
        takes={
            **_EXPERTS, **{name: values for name, values in _DEEPSEEK.items() if name not in _NOT_LING},
            **dict.fromkeys(
                ("moe_router_enable_expert_bias", "num_shared_experts", "rotary_dim", "score_function", "use_bias",
                 "use_qk_norm", "use_qkv_bias"), ANY
            ),
        },
        experts=True,
        partial_rotary=True,
    ),
    "BambaForCausalLM": Facts(
        ("bamba",), takes={**_BIASES, **_MAMBA2, "attn_layer_indices": ANY, "mlp_bias": ANY}, partial_rotary=True
    ),
    "GraniteMoeHybridForCausalLM": Facts(
        ("granitemoehybrid",),
        takes={
            **_BIASES, **_EXPERTS, **_MAMBA2, "position_embedding_type": (None, "nope", "rope"),
            **dict.fromkeys(
                ("attention_multiplier", "embedding_multiplier", "logits_scaling", "residual_multiplier",
                 "shared_intermediate_size"), ANY
            ),
        },
        experts=True,
    ),
    "Lfm2ForCausalLM": Facts(("lfm2",), takes=_SHORT_CONV),
    "Lfm2MoeForCausalLM": Facts(
        ("lfm2_moe",),
        takes={
            **_SHORT_CONV, **_EXPERTS, "num_dense_layers": ANY, "use_expert_bias": ANY, "norm_topk_prob": ANY,
            "routed_scaling_factor": ANY,
        },
        experts=True,
    ),
    "MiniMaxM2ForCausalLM": Facts(
        ("minimax_m2",), takes={**_EXPERTS, "rotary_dim": ANY, "scoring_func": ANY, "use_qk_norm": ANY},
        experts=True, partial_rotary=True,
    ),
    "NemotronHForCausalLM": Facts(
        ("nemotron_h",),
        takes={
            **_MAMBA2, **_EXPERTS, "mlp_hidden_act": ("relu2",),
            **dict.fromkeys(
                ("layer_norm_epsilon", "mlp_bias", "n_group", "n_shared_experts", "norm_topk_prob",
                 "routed_scaling_factor", "ssm_state_size", "topk_group", "use_bias", "use_conv_bias"), ANY
            ),
        },
        experts=True,
    ),
    "Qwen2MoeForCausalLM": Facts(
        ("qwen2_moe",),
        takes={**_QWEN2_BIASES, **_SPARSE, "qkv_bias": ANY, "norm_topk_prob": ANY, "layer_types": ANY,
               "shared_expert_intermediate_size": ANY},
        windows="by layer", experts=True,
    ),
    **{name: facts_of(row) for name, row in ROWS.items()},
    **{name: facts_of(ROWS[row]) for name, row in ALSO.items()},
}  # fmt: skip
_BOTH_WAYS = {"use_bidirectional_attention": (True, False)}


def _headless(architecture: str, decoder: str) -> Facts:
    """The facts of an architecture without an LM head: a Gemma 3 may attend both ways (EmbeddingGemma)."""
    facts = ARCHITECTURES[decoder]
    return replace(facts, takes={**facts.takes, **_BOTH_WAYS}) if architecture.startswith("Gemma3") else facts


ARCHITECTURES = {**ARCHITECTURES, **{name: _headless(name, decoder) for name, decoder in HEADLESS.items()}}
"""By ``architectures[0]``; the keys are those of ``catalog.models`` (a test compares them)."""

_LING: Mapping[str, Any] = {
    "model_type": "llama", "first_k_dense_replace": 1, "head_dim": 128, "n_group": 8, "num_nextn_predict_layers": 0,
    "num_shared_experts": 1, "routed_scaling_factor": 1.0, "topk_group": 4, "use_bias": False, "use_qk_norm": True,
    "use_qkv_bias": False,
}  # fmt: skip

READ_AS: Mapping[str, Mapping[str, Any]] = {
    "bailing_moe": _LING,
    "bailing_moe_v2": _LING,
    "internlm2": {"model_type": "llama", "bias": True},
    "kimi_k2": {"model_type": "deepseek_v3"},
    "minicpm": {"model_type": "llama", "tie_word_embeddings": True},
}
"""Model types that transformers does not know -> the one whose configuration has their fields or keeps them, and their
own defaults."""


def read_as(raw: Mapping[str, Any]) -> dict[str, Any] | None:
    """config.json under a model type that transformers knows; None if it knows the file's own.

    raw: config.json. A file without a model type has that of its architecture.
    """
    facts = ARCHITECTURES.get(str((raw.get("architectures") or [None])[0]))
    kind = raw.get("model_type") or (facts.model_types[0] if facts else None)
    known = READ_AS.get(str(kind))
    if known is None:
        return None
    own = {name: value for name, value in raw.items() if name not in ("auto_map", "model_type")}
    return {**known, **own}


DRAFT_LAYERS: Mapping[str, str] = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
"""The architecture whose family reads a draft head's layer, by its ``model_type``."""
