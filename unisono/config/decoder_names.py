"""Names that checkpoints of the families of ``decoder_table`` give to modules. Llama's are in :data:`LLAMA_NAMES`."""

from __future__ import annotations

LAYER = "model.layers.*."

LLAMA_NAMES = {
    "embed": "model.embed_tokens",
    "layers.*.mixer_norm": LAYER + "input_layernorm",
    "layers.*.mixer.qkv.q": LAYER + "self_attn.q_proj",
    "layers.*.mixer.qkv.k": LAYER + "self_attn.k_proj",
    "layers.*.mixer.qkv.v": LAYER + "self_attn.v_proj",
    "layers.*.mixer.o": LAYER + "self_attn.o_proj",
    "layers.*.feed_forward_norm": LAYER + "post_attention_layernorm",
    "layers.*.feed_forward.gate_up.gate": LAYER + "mlp.gate_proj",
    "layers.*.feed_forward.gate_up.up": LAYER + "mlp.up_proj",
    "layers.*.feed_forward.up": LAYER + "mlp.up_proj",
    "layers.*.feed_forward.down": LAYER + "mlp.down_proj",
    "layers.*.mixer.q_norm": LAYER + "self_attn.q_norm",
    "layers.*.mixer.k_norm": LAYER + "self_attn.k_norm",
    "layers.*.mixer.steps.q_norm": LAYER + "self_attn.q_norm",
    "layers.*.mixer.steps.k_norm": LAYER + "self_attn.k_norm",
    "norm": "model.norm",
    "lm_head": "lm_head",
}
"""Names that most families share, also of modules that only some of them have."""

OLMO2 = {
    "layers.*.mixer_post_norm": LAYER + "post_attention_layernorm",
    "layers.*.feed_forward_post_norm": LAYER + "post_feedforward_layernorm",
}
"""Norms of outputs only."""

INTERNLM2 = {
    "embed": "model.tok_embeddings",
    "layers.*.mixer_norm": LAYER + "attention_norm",
    **{f"layers.*.mixer.qkv.{name}": LAYER + "attention.wqkv" for name in ("q", "k", "v")},
    "layers.*.mixer.o": LAYER + "attention.wo",
    "layers.*.feed_forward_norm": LAYER + "ffn_norm",
    "layers.*.feed_forward.gate_up.gate": LAYER + "feed_forward.w1",
    "layers.*.feed_forward.gate_up.up": LAYER + "feed_forward.w3",
    "layers.*.feed_forward.down": LAYER + "feed_forward.w2",
    "lm_head": "output",
}

PACKED = {
    "layers.*.feed_forward.gate_up.gate": LAYER + "mlp.gate_up_proj",
    "layers.*.feed_forward.gate_up.up": LAYER + "mlp.gate_up_proj",
}
"""Gate and up in one tensor."""

SANDWICHED = {
    "layers.*.mixer_post_norm": LAYER + "post_self_attn_layernorm",
    "layers.*.feed_forward_norm": LAYER + "post_attention_layernorm",
    "layers.*.feed_forward_post_norm": LAYER + "post_mlp_layernorm",
}

BIASED_FC = {
    "layers.*.feed_forward.up": LAYER + "mlp.c_fc",
    "layers.*.feed_forward.down": LAYER + "mlp.c_proj",
}


def shared(gate: str, up: str, down: str) -> dict[str, str]:
    """Names of a layer's shared expert: checkpoint modules inside the layer, of which the first two may be one."""
    return {
        "layers.*.feed_forward.shared.gate_up.gate": LAYER + gate,
        "layers.*.feed_forward.shared.gate_up.up": LAYER + up,
        "layers.*.feed_forward.shared.down": LAYER + down,
    }


def experts(
    block: str, router: str, gate_up: str, down: str, each: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
) -> dict[str, str]:
    """Names of a layer's router and experts. block: of the layer; gate_up, down: of the tensors of all experts; each:
    of one expert's gate, up and down."""
    here = LAYER + block
    return {
        "layers.*.feed_forward.router": f"{here}.{router}",
        "layers.*.feed_forward.experts.gate_up": f"{here}.{gate_up}",
        "layers.*.feed_forward.experts.down": f"{here}.{down}",
        "layers.*.feed_forward.experts.each.gate": f"{here}.experts.*.{each[0]}",
        "layers.*.feed_forward.experts.each.up": f"{here}.experts.*.{each[1]}",
        "layers.*.feed_forward.experts.each.down": f"{here}.experts.*.{each[2]}",
    }
