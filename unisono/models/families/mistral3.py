"""Mistral 3: the text model of Mistral or Ministral 3, a row of the table of decoders, with a Pixtral tower.

Source of formulas and names: transformers, ``models/pixtral`` and ``models/mistral3``.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from unisono.models.config import DecoderConfig
from unisono.models.families.table import family_of
from unisono.models.load.build import require
from unisono.models.vision.config import ProjectorSpec, TowerSpec, VisionConfig

EPS = 1e-5
"""Epsilon of the tower's norms; no config.json has it."""

BLOCK = "vision.transformer.layers.*."
TOWER = {
    "patch_embed": "vision.patch_conv",
    "pre_norm": "vision.ln_pre",
    "blocks.*.norm1": f"{BLOCK}attention_norm",
    "blocks.*.norm2": f"{BLOCK}ffn_norm",
    **{f"blocks.*.qkv.{part}": f"{BLOCK}attention.{part}_proj" for part in "qkv"},
    "blocks.*.proj": f"{BLOCK}attention.o_proj",
    "blocks.*.mlp.gate_up.gate": f"{BLOCK}feed_forward.gate_proj",
    "blocks.*.mlp.gate_up.up": f"{BLOCK}feed_forward.up_proj",
    "blocks.*.mlp.down": f"{BLOCK}feed_forward.down_proj",
    "merger.norm": "projector.norm",
    "merger.merge": "projector.patch_merger.merging_layer",
    "merger.fc1": "projector.linear_1",
    "merger.fc2": "projector.linear_2",
}
TOWER_ROOTS: dict[str, str | None] = {
    outer + place: inside
    for outer in ("model.", "")
    for place, inside in {"vision_tower.": "vision.", "multi_modal_projector.": "projector."}.items()
}
TEXT = family_of("Mistral3ForConditionalGeneration")


def read_tower(hf_config: Any) -> VisionConfig | None:
    """The Pixtral tower: pictures of any shape, whose tokens lie in rows with a token after each."""
    vision, text = getattr(hf_config, "vision_config", None), hf_config.get_text_config()
    if vision is None:
        return None
    name, depth, patch = vision.model_type, vision.num_hidden_layers, vision.patch_size
    require(name == "pixtral", "vision_config.model_type", name, "it must be 'pixtral'")
    require(isinstance(patch, int) and patch >= 1, "vision_config.patch_size", patch, "it must be at least 1")
    layer, act = hf_config.vision_feature_layer, hf_config.projector_hidden_act
    last = layer in (-1, depth, [-1], [depth])
    require(last, "vision_feature_layer", layer, "the last layer's output alone is read: -1")
    require(act == "gelu", "projector_hidden_act", act, "it must be 'gelu'")
    rope = vision.rope_parameters or {}
    kind = rope.get("rope_type", "axial")
    require(kind == "axial", "vision_config.rope_parameters.rope_type", kind, "it must be 'axial'")
    image, most = hf_config.image_token_id, text.vocab_size - 1
    require(0 <= image <= most, "image_token_index", image, f"it must be a token; ids are 0 to {most}")
    tower = TowerSpec(
        depth,
        vision.hidden_size,
        vision.num_attention_heads,
        vision.intermediate_size,
        rope_theta=float(rope.get("rope_theta", 10_000.0)),
        gated=True,
        activation=vision.hidden_act,
        patch_bias=False,
        projector=ProjectorSpec(text.rms_norm_eps, bool(hf_config.multimodal_projector_bias)),
        apart=True,
        bias=False,
        pre_norm=True,
        eps=EPS,
        alternating=True,
    )
    return VisionConfig(
        merge=hf_config.spatial_merge_size,
        patch_size=patch,
        temporal_patch_size=1,
        patch_elements=vision.num_channels * patch**2,
        hidden_size=text.hidden_size,
        deepstack=0,
        image_token_id=image,
        video_token_id=-1,
        vision_start_token_id=-1,
        vision_end_token_id=-1,
        mrope_section=(),
        mrope_interleaved=False,
        tower=tower,
        row_end="[IMG_BREAK]",
        picture_end="[IMG_END]",
    )


def read(hf_config: Any) -> DecoderConfig:
    """Read the config: the row's text model, and the tower."""
    return replace(TEXT.read(hf_config), vision=read_tower(hf_config))


MISTRAL3 = replace(TEXT, read=read, tower=TOWER, tower_roots=TOWER_ROOTS)
