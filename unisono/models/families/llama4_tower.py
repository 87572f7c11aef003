"""Llama 4's vision tower: its config and the names of its tensors.

Source of formulas and names: transformers, ``models/llama4``. What its modules take from no config.json (biases, the
activation, the epsilon of norms) is refused if a config.json differs.
"""

from __future__ import annotations

from typing import Any

from unisono.models.load.build import require
from unisono.models.vision.config import VisionConfig
from unisono.models.vision.tile_tower import TileTowerSpec, pairs_in_halves

EPS = 1e-5
"""Epsilon of the tower's norms."""
MARKS = ("<|image_start|>", "<|tile_x_separator|>", "<|tile_y_separator|>", "<|image|>", "<|image_end|>")
"""See ``VisionConfig.tile_marks``."""

BLOCK = "vision.model.layers.*."
TOWER = {
    "patch_embed": "vision.patch_embedding.linear",
    "class_token": "vision.class_embedding",
    "positions": "vision.positional_embedding_vlm",
    "pre_norm": "vision.layernorm_pre",
    "post_norm": "vision.layernorm_post",
    "blocks.*.norm1": f"{BLOCK}input_layernorm",
    "blocks.*.norm2": f"{BLOCK}post_attention_layernorm",
    **{f"blocks.*.qkv.{part}": f"{BLOCK}self_attn.{part}_proj" for part in "qkv"},
    "blocks.*.proj": f"{BLOCK}self_attn.o_proj",
    "blocks.*.mlp.up": f"{BLOCK}mlp.fc1",
    "blocks.*.mlp.down": f"{BLOCK}mlp.fc2",
    "fc1": "vision.vision_adapter.mlp.fc1",
    "fc2": "vision.vision_adapter.mlp.fc2",
    "project": "projector.linear_1",
}
TOWER_ROOTS: dict[str, str | None] = {
    outer + place: inside
    for outer in ("model.", "")
    for place, inside in {"vision_model.": "vision.", "multi_modal_projector.": "projector."}.items()
}
TOWER_ROWS = {"blocks.*.qkv.q": pairs_in_halves, "blocks.*.qkv.k": pairs_in_halves}


def read_tower(hf_config: Any) -> VisionConfig | None:
    """Read the tower: square tiles whose 1 / ``pixel_shuffle_ratio``² neighbouring patches are a token."""
    vision, text = getattr(hf_config, "vision_config", None), hf_config.get_text_config()
    if vision is None:
        return None
    kind, ratio = vision.model_type, vision.pixel_shuffle_ratio
    require(kind == "llama4_vision_model", "vision_config.model_type", kind, "it must be 'llama4_vision_model'")
    patch, image = vision.patch_size, vision.image_size
    merge = round(1 / ratio) if 0 < ratio <= 1 else 0
    share = "it must be 1 divided by a whole number"
    require(merge >= 1 and merge * ratio == 1, "vision_config.pixel_shuffle_ratio", ratio, share)
    whole = isinstance(patch, int) and isinstance(image, int) and patch >= 1 and image >= 1
    sides = f"it must be a multiple of {merge} patches of {patch} pixels"
    require(whole and image % (merge * patch) == 0, "vision_config.image_size", image, sides)
    unit, width = merge**2, vision.hidden_size
    for name, value, meant in (
        ("intermediate_size", vision.intermediate_size, width * unit),  # the MLP of tokens has it as its input
        ("projector_output_dim", vision.projector_output_dim, vision.projector_input_dim),
        ("vision_output_dim", vision.vision_output_dim, vision.projector_output_dim),
        ("hidden_act", vision.hidden_act, "gelu"),
        ("norm_eps", vision.norm_eps, EPS),
        ("vision_feature_select_strategy", vision.vision_feature_select_strategy, "default"),
        ("multi_modal_projector_bias", bool(vision.multi_modal_projector_bias), False),
    ):
        require(value == meant, f"vision_config.{name}", value, f"it must be {meant!r}")
    token, most = hf_config.image_token_id, text.vocab_size - 1
    require(0 <= token <= most, "image_token_index", token, f"it must be a token; ids are 0 to {most}")
    tower = TileTowerSpec(
        vision.num_hidden_layers,
        width,
        vision.num_attention_heads,
        vision.intermediate_size,
        rope_theta=float((vision.rope_parameters or {}).get("rope_theta", 10_000.0)),
        activation="gelu",
        apart=True,
        eps=EPS,
        adapter_size=vision.projector_input_dim,
    )
    return VisionConfig(
        merge=merge,
        patch_size=patch,
        temporal_patch_size=1,
        patch_elements=vision.num_channels * patch**2,
        hidden_size=text.hidden_size,
        deepstack=0,
        image_token_id=token,
        video_token_id=-1,
        vision_start_token_id=-1,
        vision_end_token_id=-1,
        mrope_section=(),
        mrope_interleaved=False,
        tower=tower,
        side=image // patch,
        tile_marks=MARKS,
    )
