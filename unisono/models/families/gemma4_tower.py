"""The vision tower of Gemma 4: its names, and its config.

Source of formulas and names: transformers, ``models/gemma4``.
"""

from __future__ import annotations

from typing import Any

from unisono.models.load.build import require
from unisono.models.vision.axial_tower import AxialTowerSpec
from unisono.models.vision.blocks import NORM_EPS
from unisono.models.vision.config import TowerSpec, VisionConfig

BLOCK = "vision.encoder.layers.*."
_PRODUCTS = {
    **{part: f"self_attn.{part}_proj" for part in ("q", "k", "v", "o")},
    **{part: f"mlp.{part}_proj" for part in ("gate", "up", "down")},
}
TOWER = {
    "patch_embed": "vision.patch_embedder.input_proj",
    "positions": "vision.patch_embedder.position_embedding_table",
    **{f"blocks.*.{ours}": BLOCK + theirs for ours, theirs in _PRODUCTS.items()},
    **{f"blocks.*.{ours}.linear": f"{BLOCK}{theirs}.linear" for ours, theirs in _PRODUCTS.items()},
    "blocks.*.q_norm": f"{BLOCK}self_attn.q_norm",
    "blocks.*.k_norm": f"{BLOCK}self_attn.k_norm",
    "blocks.*.norm1": f"{BLOCK}input_layernorm",
    "blocks.*.post_norm1": f"{BLOCK}post_attention_layernorm",
    "blocks.*.norm2": f"{BLOCK}pre_feedforward_layernorm",
    "blocks.*.post_norm2": f"{BLOCK}post_feedforward_layernorm",
    "bias": "vision.std_bias",
    "scale": "vision.std_scale",
    "project": "projector.embedding_projection",
}
TOWER_ROOTS: dict[str, str | None] = {"model.vision_tower.": "vision.", "model.embed_vision.": "projector."}


def read_tower(hf_config: Any) -> VisionConfig | None:
    """The tower, whose pictures have any shape; ``pooling_kernel_size`` squared patches are averaged to a token."""
    vision = getattr(hf_config, "vision_config", None)
    if vision is None:
        return None
    heads, kv_heads = vision.num_attention_heads, vision.num_key_value_heads
    require(heads == kv_heads, "vision_config.num_key_value_heads", kv_heads, f"it must be {heads}, as the heads")
    require(not vision.attention_bias, "vision_config.attention_bias", vision.attention_bias, "it must be false")
    eps, act = vision.rms_norm_eps, vision.hidden_activation
    require(eps == NORM_EPS, "vision_config.rms_norm_eps", eps, f"it must be {NORM_EPS}")
    require(act == "gelu_pytorch_tanh", "vision_config.hidden_activation", act, "it must be 'gelu_pytorch_tanh'")
    tower = AxialTowerSpec(
        vision.num_hidden_layers,
        vision.hidden_size,
        heads,
        vision.intermediate_size,
        rope_theta=float((vision.rope_parameters or {}).get("rope_theta", 100.0)),
        head_size=vision.head_dim,
        table=vision.position_embedding_size,
        clamped=bool(vision.use_clipped_linears),
        standardized=bool(vision.standardize),
    )
    return pictures_of_any_shape(hf_config, tower, vision.pooling_kernel_size, vision.patch_size)


def pictures_of_any_shape(hf_config: Any, tower: TowerSpec, merge: int, patch_size: int) -> VisionConfig:
    """The config of pictures of any shape, and of videos where the vocabulary has their token.

    merge: side of a token in patches. patch_size: of a patch in pixels.
    """
    text, image, video = hf_config.get_text_config(), hf_config.image_token_id, hf_config.video_token_id
    last = text.vocab_size - 1
    require(0 <= image <= last, "image_token_id", image, f"it must be a token; ids are 0 to {last}")
    return VisionConfig(
        merge=merge,
        patch_size=patch_size,
        temporal_patch_size=1,
        patch_elements=3 * patch_size**2,
        hidden_size=text.hidden_size,
        deepstack=0,
        image_token_id=image,
        video_token_id=-1 if video is None or video > last else video,
        vision_start_token_id=hf_config.boi_token_id,
        vision_end_token_id=hf_config.eoi_token_id,
        mrope_section=(),
        mrope_interleaved=False,
        tower=tower,
        both_ways=text.use_bidirectional_attention == "vision",
        placeholder_token_id=image,
        padding_token_id=text.pad_token_id or 0,
        frame_time="{} ",
        between_frames=" ",
    )
