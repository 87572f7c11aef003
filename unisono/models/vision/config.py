"""Configuration of a vision tower, and of prompts with images. Family files read it from config.json.

Owns :class:`VisionConfig`, read by decoder config, engine and frontend, and :class:`TowerSpec`, the tower's own sizes.
Both are plain values: ``dataclasses.asdict`` makes a message of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from unisono.layers.rotary import rotary_axes
from unisono.models.load.build import require

MAX_GRID_SIDE = 8192
"""Patches along one side of a grid covered by the table of rotary angles."""


@dataclass(frozen=True)
class ProjectorSpec:
    """A merger that norms patches, merges those of a token by one product, and projects them by an MLP with GELU
    (Pixtral in Mistral 3).

    eps: of the norm. bias: both products of the MLP have one.
    """

    eps: float
    bias: bool = False


@dataclass(frozen=True)
class TowerSpec:
    """Sizes and kinds of a tower's modules.

    width: features of a patch.
    gated: RMSNorm and a gated MLP (Qwen2.5-VL); otherwise LayerNorm and a plain MLP.
    activation: of the MLP.
    position_side: side of the learned square of positions; 0: none.
    deepstack_blocks: blocks whose output is read by a merger of its own, one per level.
    window: side of an attention window in patches, a multiple of the merge size; 0: all blocks see a whole frame.
    full_blocks: blocks that see a whole frame despite a window.
    rope_theta: base of the axial rotary angles; 0: none.
    pooled: a token is the average of its patches after a last norm, normed again and projected (SigLIP in Gemma 3);
        otherwise an MLP reads its patches side by side.
    projector: the merger of Pixtral, in place of either; None: one of them.
    apart: queries, keys and values are stored apart, and the convolution of patches has no axis of frames.
    bias: products of the blocks have biases.
    pre_norm: patches are normed before the first block.
    eps: of norms.
    alternating: of the rotary frequencies of a head the even ones turn by the row and the odd ones by the column;
        otherwise both axes have all frequencies of half a head.

    Raises CheckpointError for values that cannot be computed.
    """

    depth: int
    width: int
    heads: int
    intermediate_size: int
    rope_theta: float = 10_000.0
    gated: bool = False
    activation: str = "gelu_pytorch_tanh"
    patch_bias: bool = True
    position_side: int = 0
    deepstack_blocks: tuple[int, ...] = ()
    window: int = 0
    full_blocks: tuple[int, ...] = ()
    pooled: bool = False
    projector: ProjectorSpec | None = None
    apart: bool = False
    bias: bool = True
    pre_norm: bool = False
    eps: float = 1e-6
    alternating: bool = False

    def __post_init__(self) -> None:
        for name in ("depth", "width", "heads", "intermediate_size"):
            value = getattr(self, name)
            require(value >= 1, f"vision_config.{name}", value, "it must be at least 1")
        sizes = f"{self.width} features must be {self.heads} heads whose size is a multiple of 4"
        require(self.width % (4 * self.heads) == 0, "vision_config.num_heads", self.heads, sizes)
        known = ("silu", "gelu") if self.gated else ("gelu_pytorch_tanh", "gelu", "quick_gelu")
        act = self.activation
        require(act in known, "vision_config.hidden_act", act, f"it must be {' or '.join(map(repr, known))}")
        levels = self.deepstack_blocks
        ordered = list(levels) == sorted({*levels}) and all(0 <= block < self.depth for block in levels)
        require(ordered, "vision_config.deepstack_visual_indexes", levels, f"blocks in order, below {self.depth}")

    @property
    def most_side(self) -> int:
        """Most rows and columns of a grid, patches."""
        return MAX_GRID_SIDE

    @property
    def head_dim(self) -> int:
        return self.width // self.heads


@dataclass(frozen=True)
class VisionConfig:
    """Vision settings of a model with a tower.

    merge: patches along each side of the square that becomes one token.
    patch_size: pixels along a patch's side.
    temporal_patch_size: images in a frame.
    patch_elements: elements of a patch, channels · temporal_patch_size · patch_size².
    hidden_size: of the text model.
    deepstack: levels output by the tower besides its main embedding; level i is added to the hidden states after text
        layer i.
    mrope_section: rotary planes of each axis (time, height, width); empty: pictures' tokens are rotated as text.
    mrope_interleaved: the planes of the axes alternate; otherwise they lie in blocks.
    tokens_per_second: a video's temporal positions are its seconds times this number; 0: every frame of a video is a
        grid of its own, and its time is text.
    even_frames: the frames of a video are one temporal position apart, whatever their times (Qwen2-VL).
    side: rows and columns of every picture, patches; 0: any.
    both_ways: in some text layers the tokens of a picture see each other in both directions.
    video_token_id: -1: the model takes no videos.
    padding_token_id: token whose inputs of layers those of a picture have (Gemma 4); -1: their own.
    placeholder_token_id: token that a prompt has for a picture, where that is not its marks and tokens; -1: it has
        these. around: text on both sides of the marks that take its place.
    frame_time, between_frames: text before each frame of a video, with its time in place of ``{}``, and before all
        frames but the first, if text gives their times.
    row_end, picture_end: text of the tokens after each row of a picture's tokens and after the last one; empty: its
        tokens follow each other.
    tile_marks: text of the tokens around a picture that is cut into tiles (Llama 4): before it, between two tiles of a
        row, after a row, before the tile of the whole picture (a prompt has this one alone for a picture), after it;
        empty: pictures are not cut. A tile is a frame of a picture's grid.

    Raises CheckpointError for values that cannot be computed.
    """

    merge: int
    patch_size: int
    temporal_patch_size: int
    patch_elements: int
    hidden_size: int
    deepstack: int
    image_token_id: int
    video_token_id: int
    vision_start_token_id: int
    vision_end_token_id: int
    mrope_section: tuple[int, ...]
    mrope_interleaved: bool
    tower: TowerSpec
    tokens_per_second: int = 0
    side: int = 0
    both_ways: bool = False
    placeholder_token_id: int = -1
    around: str = ""
    padding_token_id: int = -1
    row_end: str = ""
    picture_end: str = ""
    frame_time: str = "<{} seconds>"
    between_frames: str = ""
    tile_marks: tuple[str, ...] = ()
    even_frames: bool = False

    def __post_init__(self) -> None:
        for name in ("merge", "patch_size", "temporal_patch_size", "patch_elements"):
            value = getattr(self, name)
            require(value >= 1, f"vision_config: {name}", value, "it must be at least 1")
        section = self.mrope_section
        axes = not section or (len(section) == 3 and min(section) >= 0)
        require(axes, "rope_parameters.mrope_section", section, "it must have three numbers, none below 0")
        require(self.deepstack == len(self.tower.deepstack_blocks), "deepstack", self.deepstack, "one for each block")

    @property
    def frames_apart(self) -> bool:
        """True if the frames of a video are grids of their own, with text between them."""
        return not (self.tokens_per_second or self.even_frames)

    @property
    def deepstack_layers(self) -> tuple[int, ...]:
        """Text layers after which a level is added."""
        return tuple(range(self.deepstack))

    @property
    def unit(self) -> int:
        """Patches of one token."""
        return self.merge**2

    def rotary_axes(self, planes: int) -> tuple[int, ...]:
        """Axis (0 time, 1 height, 2 width) whose position rotates each of a text head's rotary planes.

        planes: number of planes of a head, half of its rotated dimensions.
        """
        time, height, width = self.mrope_section
        return rotary_axes((time, height, width), self.mrope_interleaved, planes)


def read_vision(
    hf_config: Any, read_tower: Callable[[Any], TowerSpec], section: tuple[int, int, int], interleaved: bool
) -> VisionConfig | None:
    """A VisionConfig from a transformers config with ``vision_config`` and ``text_config``; None without the former.

    section: the family's default of ``mrope_section``. Raises CheckpointError.
    """
    vision, text = getattr(hf_config, "vision_config", None), hf_config.get_text_config()
    if vision is None:
        return None
    tower = read_tower(vision)
    out, hidden = getattr(vision, "out_hidden_size", vision.hidden_size), text.hidden_size  # Qwen2-VL has the latter
    require(out == hidden, "vision_config.out_hidden_size", out, f"it must be the text model's hidden_size {hidden}")
    for name in ("image_token_id", "video_token_id"):
        token, last = getattr(hf_config, name), text.vocab_size - 1
        require(0 <= token <= last, name, token, f"it must be a token of the vocabulary, whose ids are 0 to {last}")
    patch, frames = _one("patch_size", vision), _one("temporal_patch_size", vision)
    rope = getattr(text, "rope_parameters", None) or {}
    return VisionConfig(
        merge=vision.spatial_merge_size,
        patch_size=patch,
        temporal_patch_size=frames,
        patch_elements=vision.in_channels * frames * patch**2,
        hidden_size=hidden,
        deepstack=len(tower.deepstack_blocks),
        image_token_id=hf_config.image_token_id,
        video_token_id=hf_config.video_token_id,
        vision_start_token_id=hf_config.vision_start_token_id,
        vision_end_token_id=hf_config.vision_end_token_id,
        mrope_section=tuple(rope.get("mrope_section") or section),
        mrope_interleaved=interleaved,
        tower=tower,
        tokens_per_second=getattr(vision, "tokens_per_second", 0),
    )


def _one(name: str, vision: Any) -> int:
    """A size that config.json may specify per axis."""
    value = getattr(vision, name)
    sizes = {value} if isinstance(value, int) else {*value}
    require(len(sizes) == 1, f"vision_config.{name}", value, "it must be one number for all axes")
    return sizes.pop()
