"""Table of the families that are Llama with other data: one row an architecture.

A row says what a family computes and how its checkpoints name tensors. It holds no torch, so the early check of a
config.json, the catalog and the documentation read the same row as ``models/families/table.py``, which builds the model
from it. A family that computes something for which a row has no slot has a file of its own in ``models/families``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from unisono.config.decoder_names import BIASED_FC, INTERNLM2, LAYER, OLMO2, PACKED, SANDWICHED, experts, shared


@dataclass(frozen=True)
class ConfigField:
    """A slot's value that config.json holds.

    name: the field. values: value of the field -> value of the slot; None: the value itself, null is 0. inverse: the
    slot is one divided by the value.
    """

    name: str
    values: Mapping[Any, Any] | None = None
    inverse: bool = False


Slot = Any
"""A constant of the family, or a :class:`ConfigField`."""


@dataclass(frozen=True)
class DecoderRow:
    """One architecture: Llama with these differences.

    model_types, text_types: see ``preflight.families.Facts``.
    models: the models, for the documentation. layers: their layers, for the documentation.
    names: module -> checkpoint module, instead of Llama's and beside them. Modules with one checkpoint module in common
        share its rows in their order.
    norm: "rms"; "rms fp32": the weight is multiplied in fp32; "rms plain": without a weight; "layer", "layer no bias",
        "layer plain"; "layer + 1": LayerNorm by 1 + w.
    eps: of all norms.
    order: norms of a layer: "pre", "post" (of outputs only), "sandwich", "parallel" (one norm, attention and MLP beside
        each other).
    qk_norm: "" for none; "head"; "after": of each head after rotation; "full": over all heads together; "layer":
        LayerNorm of each head with weights of its own; "layer apart": these are one tensor a head.
    qkv_bias, o_bias, mlp_bias: switches. gated: the MLP has a gate. activation: of the MLP.
    windows: see ``Facts``. rotary: order of a head's rotated elements: "halves", "pairs" or "swapped" halves.
    grouped: packed projections lie by KV head: its queries, its key, its value.
    unrotated: layers without rotation: "" for none; "list": zeros of ``no_rope_layers``; "full": all without a window;
        "full beside windows": these, if there is a window.
    rope_types: supported rope types beside the common ones; "alpha": ``dynamic`` with a fixed alpha; "mscale":
        ``longrope`` with factors of cosines and sines (``short_mscale``, ``long_mscale``).
    rope_by_type, partial_rotary: see ``Facts``. query_scaling: queries grow with the position by
        ``llama_4_scaling_beta``.
    scale, embed_scale, residual_scale, logit_scale: factors of scores, embeddings, blocks' outputs and logits.
    logit_cap: soft cap of logits. clip: limit of queries, keys and values. embed_norm: embeddings are normed.
    experts: fields with the numbers of experts and of experts a token, which may be lists by layer, and whether their
        weights are normalised. shared_size: size of an expert that every token uses; 0: none.
    router_jitter: half of ``RouterScores.margin``, for two experts a token; 0: experts are chosen by softmax.
    head_bias: the LM head has a bias.
    seen: the config describes a tower, which another module of the catalog reads. takes: further fields of config.json
        and their values.
    """

    model_types: tuple[str, ...]
    models: str
    layers: str
    text_types: tuple[str, ...] = ()
    names: Mapping[str, str] = field(default_factory=dict)
    norm: str = "rms"
    eps: Slot = ConfigField("rms_norm_eps")
    order: Slot = "pre"
    qk_norm: Slot = ""
    qkv_bias: Slot = False
    o_bias: Slot = False
    mlp_bias: Slot = False
    gated: bool = True
    activation: str = "silu"
    windows: str = "none"
    rotary: str = "halves"
    grouped: bool = False
    unrotated: str = ""
    rope_types: tuple[str, ...] = ()
    rope_by_type: bool = False
    partial_rotary: bool = False
    query_scaling: bool = False
    scale: Slot = None
    embed_scale: Slot = 1.0
    residual_scale: Slot = 1.0
    logit_scale: Slot = 1.0
    logit_cap: Slot = 0.0
    clip: Slot = 0.0
    embed_norm: bool = False
    experts: tuple[Slot, Slot, Slot] | None = None
    shared_size: Slot = 0
    router_jitter: Slot = 0.0
    head_bias: Slot = False
    seen: bool = False
    takes: Mapping[str, Any] = field(default_factory=dict)

    @property
    def fields(self) -> dict[str, tuple[Any, ...] | None]:
        """Fields of config.json that slots read, and their values; None: all values."""
        slots = [getattr(self, name) for name in self.__dataclass_fields__] + list(self.experts or ())
        found = {slot.name: slot.values for slot in slots if isinstance(slot, ConfigField)}
        return {name: None if values is None else tuple(values) for name, values in found.items()}


_BIAS = ConfigField("attention_bias")
_MLP_BIAS = ConfigField("mlp_bias")
_USE_BIAS = ConfigField("use_bias")
_LAYER_EPS = ConfigField("layer_norm_eps")
_QK_NORM = {True: "layer", False: "", None: ""}
_RELU2: dict[str, Any] = {"gated": False, "activation": "relu2"}
_GRANITE: dict[str, Any] = {
    "scale": ConfigField("attention_multiplier"),
    "embed_scale": ConfigField("embedding_multiplier"),
    "residual_scale": ConfigField("residual_multiplier"),
    "logit_scale": ConfigField("logits_scaling", inverse=True),
    "qkv_bias": _BIAS,
    "o_bias": _BIAS,
}
_COHERE: dict[str, Any] = {
    "norm": "layer no bias",
    "eps": _LAYER_EPS,
    "order": "parallel",
    "rotary": "pairs",
    "logit_scale": ConfigField("logit_scale"),
    "qkv_bias": _BIAS,
    "o_bias": _BIAS,
}
_GPTJ = {"position_embedding_type": ("rope_gptj",)}  # pairs
_GLM: dict[str, Any] = {"names": PACKED, "rotary": "pairs", "partial_rotary": True, "qkv_bias": _BIAS}

_HUNYUAN: dict[str, Any] = {"qk_norm": "after", "qkv_bias": _BIAS, "o_bias": _BIAS, "rope_types": ("alpha",)}
_HUNYUAN_TAKES = {"use_qk_norm": (True,), "qk_norm": (True,), "cla_share_factor": None}
_HUNYUAN_NORMS = {
    "layers.*.mixer.q_norm": LAYER + "self_attn.query_layernorm",
    "layers.*.mixer.k_norm": LAYER + "self_attn.key_layernorm",
}

ROWS: Mapping[str, DecoderRow] = {
    "ApertusForCausalLM": DecoderRow(
        ("apertus",),
        "Apertus 8B, 70B",
        "head norms; MLP without a gate, xIELU",
        qk_norm="head",
        qkv_bias=_BIAS,
        o_bias=_BIAS,
        gated=False,
        activation="xielu",
        takes={"qk_norm": (True,), "post_norm": (False,)},
        names={
            "layers.*.mixer_norm": LAYER + "attention_layernorm",
            "layers.*.feed_forward_norm": LAYER + "feedforward_layernorm",
            "layers.*.feed_forward.act": LAYER + "mlp.act_fn",
        },
    ),
    "ArceeForCausalLM": DecoderRow(
        ("arcee",), "AFM-4.5B", "MLP without a gate, ReLU²", qkv_bias=_BIAS, o_bias=_BIAS, mlp_bias=_MLP_BIAS, **_RELU2
    ),
    "CohereForCausalLM": DecoderRow(
        ("cohere",),
        "Command R, R+, Aya 23, Aya Expanse",
        "attention beside the MLP, LayerNorm, scaled logits",
        qk_norm=ConfigField("use_qk_norm", _QK_NORM),
        takes=_GPTJ,
        **_COHERE,
    ),
    "Cohere2ForCausalLM": DecoderRow(
        ("cohere2",),
        "Command R7B, Command A",
        "as Command R; a window in three layers of four, no rotation in the others",
        windows="by layer",
        unrotated="full",
        takes={**_GPTJ, "sliding_window_pattern": None, "_sliding_window_pattern": None},
        **_COHERE,
    ),
    "CwmForCausalLM": DecoderRow(("cwm",), "CWM 32B", "a window in three layers of four", windows="by layer"),
    "Ernie4_5ForCausalLM": DecoderRow(
        ("ernie4_5",),
        "ERNIE 4.5 0.3B",
        "rotation of pairs",
        rotary="pairs",
        qkv_bias=_USE_BIAS,
        o_bias=_USE_BIAS,
        mlp_bias=_USE_BIAS,
    ),
    "Exaone4ForCausalLM": DecoderRow(
        ("exaone4",),
        "EXAONE 4.0 1.2B, 32B",
        "norms of outputs only, head norms; a window in three layers of four, no rotation in the others",
        order="post",
        qk_norm="head",
        windows="by layer",
        unrotated="full beside windows",
        takes={"sliding_window_pattern": None},
        names=OLMO2,
    ),
    "GlmForCausalLM": DecoderRow(("glm",), "GLM-4-9B (HF)", "half of a head rotates, in pairs", **_GLM),
    "Glm4ForCausalLM": DecoderRow(
        ("glm4",),
        "GLM-4-0414, GLM-Z1",
        "norms before and after each block; half of a head rotates, in pairs",
        order="sandwich",
        **(_GLM | {"names": PACKED | SANDWICHED}),
    ),
    "GraniteForCausalLM": DecoderRow(
        ("granite",),
        "Granite 3.0 to 3.3, dense",
        "factors of embeddings, scores, blocks and logits",
        mlp_bias=_MLP_BIAS,
        **_GRANITE,
    ),
    "GraniteMoeForCausalLM": DecoderRow(
        ("granitemoe",),
        "Granite 3.x A400M, A800M, PowerMoE",
        "as Granite with experts",
        experts=(ConfigField("num_local_experts"), ConfigField("num_experts_per_tok"), True),
        names=experts("block_sparse_moe", "router.layer", "input_linear.weight", "output_linear.weight"),
        **_GRANITE,
    ),
    "GraniteMoeSharedForCausalLM": DecoderRow(
        ("granitemoeshared",),
        "Granite MoE with a shared expert",
        "as Granite with experts and a shared one",
        experts=(ConfigField("num_local_experts"), ConfigField("num_experts_per_tok"), True),
        shared_size=ConfigField("shared_intermediate_size"),
        names={
            **experts("block_sparse_moe", "router.layer", "input_linear.weight", "output_linear.weight"),
            **shared("shared_mlp.input_linear", "shared_mlp.input_linear", "shared_mlp.output_linear"),
        },
        **_GRANITE,
    ),
    "HeliumForCausalLM": DecoderRow(
        ("helium",),
        "Helium 1",
        "rotation of pairs",
        norm="rms fp32",
        rotary="pairs",
        qkv_bias=_BIAS,
        mlp_bias=_MLP_BIAS,
    ),
    "HunYuanDenseV1ForCausalLM": DecoderRow(
        ("hunyuan_v1_dense",),
        "Hunyuan 0.5B to 7B",
        "head norms after rotation",
        names=_HUNYUAN_NORMS,
        takes={**_HUNYUAN_TAKES, "moe_topk": None},
        **_HUNYUAN,
    ),
    "HunYuanMoEV1ForCausalLM": DecoderRow(
        ("hunyuan_v1_moe",),
        "Hunyuan A13B",
        "head norms after rotation; experts with a shared one",
        experts=(ConfigField("num_experts"), ConfigField("moe_topk"), True),
        shared_size=ConfigField("intermediate_size"),
        names={
            **_HUNYUAN_NORMS,
            **experts("mlp", "gate.wg", "experts.gate_up_proj", "experts.down_proj"),
            **shared("mlp.shared_mlp.gate_proj", "mlp.shared_mlp.up_proj", "mlp.shared_mlp.down_proj"),
        },
        takes=_HUNYUAN_TAKES,
        **_HUNYUAN,
    ),
    "InternLM2ForCausalLM": DecoderRow(
        ("internlm2",),
        "InternLM2, 2.5 1.8B to 20B",
        "queries, keys and values packed by KV head; dynamic rope",
        qkv_bias=ConfigField("bias"),
        o_bias=ConfigField("bias"),
        rope_types=("dynamic",),
        grouped=True,
        names=INTERNLM2,
    ),
    "InternLM3ForCausalLM": DecoderRow(
        ("internlm3",),
        "InternLM3 8B",
        "as Llama with dynamic rope",
        qkv_bias=_BIAS,
        o_bias=_BIAS,
        mlp_bias=_MLP_BIAS,
        rope_types=("dynamic",),
        takes={"qkv_bias": None},
    ),
    "Jais2ForCausalLM": DecoderRow(
        ("jais2",),
        "Jais 2",
        "LayerNorm, biases; MLP without a gate, ReLU²",
        norm="layer",
        eps=_LAYER_EPS,
        qkv_bias=_BIAS,
        o_bias=_BIAS,
        mlp_bias=_MLP_BIAS,
        **_RELU2,
    ),
    "MinistralForCausalLM": DecoderRow(
        ("ministral",), "Ministral 8B", "a window in three layers of four", windows="by layer"
    ),
    "Ministral3ForCausalLM": DecoderRow(
        ("ministral3",), "Ministral 3, text", "queries that grow with the position", windows="all", query_scaling=True
    ),
    "Mistral3ForConditionalGeneration": DecoderRow(
        ("mistral3",),
        "Mistral Small 3.1, 3.2, Magistral, Devstral Small 2, Ministral 3; pictures",
        "as Mistral, or as Ministral 3; Pixtral tower",
        text_types=("mistral", "ministral3"),
        windows="all",
        query_scaling=True,
        seen=True,
    ),
    "NanoChatForCausalLM": DecoderRow(
        ("nanochat",),
        "nanochat",
        "norms without weights, also of embeddings and heads; soft cap of logits; MLP without a gate, ReLU²",
        norm="rms plain",
        qk_norm="after",
        rotary="swapped",
        embed_norm=True,
        qkv_bias=_BIAS,
        o_bias=_BIAS,
        logit_cap=ConfigField("final_logit_softcapping"),
        names={
            "layers.*.feed_forward.up": LAYER + "mlp.fc1",
            "layers.*.feed_forward.down": LAYER + "mlp.fc2",
        },
        **_RELU2,
    ),
    "NemotronForCausalLM": DecoderRow(
        ("nemotron",),
        "Nemotron-4, Minitron",
        "LayerNorm by 1 + w; a part of a head rotates; MLP without a gate, ReLU²",
        norm="layer + 1",
        eps=ConfigField("norm_eps"),
        partial_rotary=True,
        qkv_bias=_BIAS,
        o_bias=_BIAS,
        mlp_bias=_MLP_BIAS,
        **_RELU2,
    ),
    "OlmoForCausalLM": DecoderRow(
        ("olmo",),
        "OLMo 1B, 7B (HF)",
        "LayerNorm without weights; clipped queries, keys and values",
        norm="layer plain",
        eps=1e-5,
        clip=ConfigField("clip_qkv"),
        qkv_bias=_BIAS,
        o_bias=_BIAS,
    ),
    "Olmo2ForCausalLM": DecoderRow(
        ("olmo2",),
        "OLMo 2 1B to 32B",
        "norms of outputs only; norms over all heads together",
        norm="rms fp32",
        order="post",
        qk_norm="full",
        qkv_bias=_BIAS,
        o_bias=_BIAS,
        names=OLMO2,
    ),
    "Olmo3ForCausalLM": DecoderRow(
        ("olmo3",),
        "OLMo 3 7B, 32B",
        "as OLMo 2; a window in three layers of four, with another rotary table",
        norm="rms fp32",
        order="post",
        qk_norm="full",
        qkv_bias=_BIAS,
        o_bias=_BIAS,
        windows="by layer",
        rope_by_type=True,
        names=OLMO2,
    ),
    "OlmoeForCausalLM": DecoderRow(
        ("olmoe",),
        "OLMoE 1B-7B",
        "norms over all heads together; experts",
        qk_norm="full",
        clip=ConfigField("clip_qkv"),
        qkv_bias=_BIAS,
        o_bias=_BIAS,
        experts=(ConfigField("num_experts"), ConfigField("num_experts_per_tok"), ConfigField("norm_topk_prob")),
        names={
            **experts("mlp", "gate", "experts.gate_up_proj", "experts.down_proj"),
        },
    ),
    "PhiForCausalLM": DecoderRow(
        ("phi",),
        "Phi-1, 1.5, 2",
        "attention beside the MLP, LayerNorm, biases, also of the LM head; half of a head rotates; MLP without a gate",
        norm="layer",
        eps=_LAYER_EPS,
        order="parallel",
        partial_rotary=True,
        qkv_bias=True,
        o_bias=True,
        mlp_bias=True,
        head_bias=True,
        gated=False,
        activation="gelu_pytorch_tanh",
        names={
            "layers.*.mixer.o": LAYER + "self_attn.dense",
            "layers.*.feed_forward.up": LAYER + "mlp.fc1",
            "layers.*.feed_forward.down": LAYER + "mlp.fc2",
            "norm": "model.final_layernorm",
        },
    ),
    "Phi3ForCausalLM": DecoderRow(
        ("phi3",),
        "Phi-3, Phi-3.5, Phi-4, Phi-4-mini",
        "packed projections; longrope; a part of a head rotates in Phi-4-mini",
        windows="all",
        partial_rotary=True,
        rope_types=("longrope",),
        names={
            **PACKED,
            **{f"layers.*.mixer.qkv.{name}": LAYER + "self_attn.qkv_proj" for name in ("q", "k", "v")},
        },
    ),
    "PhiMoEForCausalLM": DecoderRow(
        ("phimoe",),
        "Phi-3.5-MoE, Phi-mini-MoE, Phi-tiny-MoE; also as `PhimoeForCausalLM`",
        "LayerNorm, biases, also of the LM head; two experts by a softmax each; longrope with factors",
        norm="layer",
        qkv_bias=_BIAS,
        o_bias=_BIAS,
        head_bias=ConfigField("lm_head_bias"),
        windows="all",
        rope_types=("longrope", "mscale"),
        experts=(ConfigField("num_local_experts"), ConfigField("num_experts_per_tok"), False),
        router_jitter=ConfigField("router_jitter_noise"),
        names=experts("block_sparse_moe", "gate", "experts.gate_up_proj", "experts.down_proj", ("w1", "w3", "w2")),
    ),
    "SeedOssForCausalLM": DecoderRow(
        ("seed_oss",),
        "Seed-OSS 36B",
        "biases of q, k and v",
        qkv_bias=_BIAS,
        o_bias=ConfigField("attention_out_bias"),
        mlp_bias=_MLP_BIAS,
    ),
    "SmolLM3ForCausalLM": DecoderRow(
        ("smollm3",),
        "SmolLM3 3B",
        "no rotation in every fourth layer",
        qkv_bias=_BIAS,
        o_bias=_BIAS,
        mlp_bias=_MLP_BIAS,
        windows="by layer",
        unrotated="list",
        takes={"no_rope_layers": None, "no_rope_layer_interval": None},
    ),
    "StableLmForCausalLM": DecoderRow(
        ("stablelm",),
        "StableLM 3B, 2 1.6B",
        "LayerNorm; a quarter of a head rotates; attention may lie beside the MLP",
        norm="layer",
        eps=_LAYER_EPS,
        order=ConfigField("use_parallel_residual", {True: "parallel", False: "pre"}),
        partial_rotary=True,
        qkv_bias=ConfigField("use_qkv_bias"),
        qk_norm=ConfigField("qk_layernorm", {True: "layer apart", False: ""}),
        names={
            "layers.*.mixer.steps.q_norm.each.norm": LAYER + "self_attn.q_layernorm.norms.*",
            "layers.*.mixer.steps.k_norm.each.norm": LAYER + "self_attn.k_layernorm.norms.*",
        },
    ),
    "Starcoder2ForCausalLM": DecoderRow(
        ("starcoder2",),
        "StarCoder2 3B, 7B, 15B",
        "LayerNorm, biases, a window; MLP without a gate, GELU",
        norm="layer",
        eps=ConfigField("norm_epsilon"),
        qkv_bias=_USE_BIAS,
        o_bias=_USE_BIAS,
        mlp_bias=_USE_BIAS,
        gated=False,
        activation="gelu_pytorch_tanh",
        windows="all",
        takes={"norm_type": ("layer_norm",), "mlp_type": ("default",)},
        names=BIASED_FC,
    ),
}
"""By ``architectures[0]`` of config.json."""

ALSO: Mapping[str, str] = {"PhimoeForCausalLM": "PhiMoEForCausalLM"}
"""Another name of an architecture -> its row: transformers' class, where published checkpoints have another."""
