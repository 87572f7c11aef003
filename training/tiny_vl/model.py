"""``tiny-vl`` in training: transformers' Qwen3-VL modules, run over batches of pictures of one size.

Parameters, names and formulas are those of ``Qwen3VLForConditionalGeneration``. :class:`TinyVL` arranges the calls,
because transformers runs each picture's attention by itself and finds placeholders on the host. A test compares both.
Shapes: B rows, L tokens, N tokens of a picture, P patches (4 N), H hidden.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

PATCH, MERGE, FRAMES = 8, 2, 2
"""Pixels along a patch, patches along a token, pictures of a frame."""
LEAST_PIXELS, MOST_PIXELS = 64 * 64, 128 * 128
"""Pictures outside are resized by the processor."""


@dataclass(frozen=True)
class Sizes:
    """Sizes of the model."""

    vocab_size: int = 576
    hidden_size: int = 256
    intermediate_size: int = 576
    layers: int = 6
    heads: int = 8
    kv_heads: int = 2
    head_dim: int = 64
    max_positions: int = 4096
    vision_width: int = 128
    vision_intermediate: int = 384
    vision_layers: int = 6
    vision_heads: int = 4
    deepstack: tuple[int, ...] = (1, 3)
    grid: int = 16

    def config(self, ids: dict[str, int]) -> Any:
        """transformers' configuration. ids: of the special tokens."""
        from transformers import Qwen3VLConfig

        planes = self.head_dim // 2
        section = [planes - 2 * (planes // 3), planes // 3, planes // 3]
        rope = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": section, "mrope_interleaved": True}
        text = {
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "max_position_embeddings": self.max_positions,
            "rms_norm_eps": 1e-6,
            "rope_parameters": rope,
            "tie_word_embeddings": True,
            "pad_token_id": ids["pad"],
            "eos_token_id": ids["stop"],
        }
        vision = {
            "depth": self.vision_layers,
            "hidden_size": self.vision_width,
            "intermediate_size": self.vision_intermediate,
            "num_heads": self.vision_heads,
            "in_channels": 3,
            "patch_size": PATCH,
            "spatial_merge_size": MERGE,
            "temporal_patch_size": FRAMES,
            "out_hidden_size": self.hidden_size,
            "num_position_embeddings": self.grid**2,
            "deepstack_visual_indexes": list(self.deepstack),
        }
        marks: Any = {f"{name}_token_id": ids[name] for name in ("image", "video", "vision_start", "vision_end")}
        return Qwen3VLConfig(text_config=text, vision_config=vision, tie_word_embeddings=True, **marks)


class TinyVL(nn.Module):
    """The model to train. hf: transformers' model, which owns all parameters."""

    def __init__(self, config: Any) -> None:
        from transformers import Qwen3VLForConditionalGeneration

        super().__init__()
        config._attn_implementation = "sdpa"
        self.hf = Qwen3VLForConditionalGeneration(config)
        self.vision, self.text = self.hf.model.visual, self.hf.model.language_model
        self.hf.tie_weights()
        for name, parameter in self.hf.named_parameters():
            if parameter.ndim == 2:
                last = name.endswith(("o_proj.weight", "down_proj.weight", "attn.proj.weight", "mlp.linear_fc2.weight"))
                nn.init.normal_(parameter, std=0.02 / (4 if last else 1))

    # ---- the tower ----------------------------------------------------------------------------------

    def see(self, pictures: Tensor) -> tuple[Tensor, list[Tensor]]:
        """pictures [B, height, width, 3] uint8 -> (embeddings [B, N, H], deepstack levels [B, N, H])."""
        patches, (rows, columns) = patchify(pictures)
        batch, count = patches.shape[:2]
        conv = self.vision.patch_embed.proj
        x = F.linear(patches, conv.weight.flatten(1), conv.bias)
        indices, weights = grid_positions(rows, columns, round(self.vision.pos_embed.num_embeddings**0.5), x.device)
        x = x + (self.vision.pos_embed(indices) * weights[..., None]).sum(0).to(x.dtype)
        cos, sin = axial_angles(rows, columns, x.shape[-1] // self.vision.config.num_heads, x.device)
        levels, marks = [], list(self.vision.deepstack_visual_indexes)
        for number, block in enumerate(self.vision.blocks):
            x = self._block(block, x, cos, sin)
            if number in marks:
                merger = self.vision.deepstack_merger_list[marks.index(number)]
                levels.append(merger(x.reshape(batch * count, -1)).view(batch, count // MERGE**2, -1))
        merged = self.vision.merger(x.reshape(batch * count, -1))
        return merged.view(batch, count // MERGE**2, -1), levels

    def _block(self, block: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        heads = block.attn.num_heads
        q, k, v = block.attn.qkv(block.norm1(x)).unflatten(-1, (3, heads, -1)).permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(rotate(q, cos, sin), rotate(k, cos, sin), v)
        x = x + block.attn.proj(seen.transpose(1, 2).flatten(2))
        return x + block.mlp(block.norm2(x))

    # ---- the text model -----------------------------------------------------------------------------

    def merge(self, ids: Tensor, places: Tensor, seen: Tensor) -> Tensor:
        """Embeddings of tokens [B, L, H], the picture's in place of its placeholders."""
        x = self.text.embed_tokens(ids).to(seen.dtype)
        return x.scatter(1, places[..., None].expand_as(seen), seen)

    def read(
        self,
        x: Tensor,
        levels: list[Tensor],
        places: Tensor,
        positions: Tensor,
        mask: Tensor,
        aux: tuple[int, ...] = (),
    ) -> tuple[Tensor, Tensor | None]:
        """x [B, L, H], positions [B, 3, L], mask [B, 1, L, L] -> (states before the final norm, inputs of the layers
        ``aux`` side by side)."""
        angles = self.text.rotary_emb(x, positions.transpose(0, 1))
        kept = []
        for number, layer in enumerate(self.text.layers):
            if number in aux:
                kept.append(x)
            x = layer(x, attention_mask=mask, position_embeddings=angles)
            x = x[0] if isinstance(x, tuple) else x
            if number < len(levels):
                x = x.scatter_add(1, places[..., None].expand_as(levels[number]), levels[number].to(x.dtype))
        return x, torch.cat(kept, -1) if kept else None

    def head(self, x: Tensor) -> Tensor:
        """Logits."""
        return self.hf.lm_head(self.text.norm(x))


def visible(segments: Tensor) -> Tensor:
    """segments [B, L] -> what each token sees [B, 1, L, L] bool."""
    length = segments.shape[1]
    before = torch.ones(length, length, dtype=torch.bool, device=segments.device).tril()
    mine, other = segments[:, :, None], segments[:, None, :]
    itself = torch.eye(length, dtype=torch.bool, device=segments.device)
    return ((before & ((other == 0) | (other == mine)) & (mine >= 0)) | itself)[:, None]


def patchify(pictures: Tensor) -> tuple[Tensor, tuple[int, int]]:
    """Pictures [B, height, width, 3] uint8 as the processor makes them: patches [B, P, 3 · 2 · 8 · 8], (rows, columns).

    The four patches of a token follow each other.
    """
    x = pictures.float() / 127.5 - 1
    batch, height, width, _ = x.shape
    rows, columns = height // PATCH, width // PATCH
    x = x.view(batch, rows // MERGE, MERGE, PATCH, columns // MERGE, MERGE, PATCH, 3).permute(0, 1, 4, 2, 5, 7, 3, 6)
    x = x.unsqueeze(6).expand(*x.shape[:6], FRAMES, PATCH, PATCH)
    return x.reshape(batch, rows * columns, -1), (rows, columns)


def _in_tokens(rows: int, columns: int) -> tuple[Tensor, Tensor]:
    """(row, column) of each patch [P], in the order of patches."""
    r, c = torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij")
    shape = (rows // MERGE, MERGE, columns // MERGE, MERGE)
    r, c = (t.view(shape).permute(0, 2, 1, 3).flatten() for t in (r, c))
    return r, c


@functools.lru_cache(maxsize=32)
def grid_positions(rows: int, columns: int, side: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Bilinear sampling of the learned square of positions, corners aligned: (indices [4, P], weights [4, P])."""
    r, c = _in_tokens(rows, columns)
    y, x = torch.linspace(0, side - 1, rows)[r], torch.linspace(0, side - 1, columns)[c]
    y0, x0 = y.floor().long(), x.floor().long()
    y1, x1 = (y0 + 1).clamp_max(side - 1), (x0 + 1).clamp_max(side - 1)
    dy, dx = y - y0, x - x0
    indices = torch.stack((y0 * side + x0, y0 * side + x1, y1 * side + x0, y1 * side + x1))
    weights = torch.stack(((1 - dy) * (1 - dx), (1 - dy) * dx, dy * (1 - dx), dy * dx))
    return indices.to(device), weights.to(device)


@functools.lru_cache(maxsize=32)
def axial_angles(rows: int, columns: int, head_dim: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosines and sines of each patch [P, head_dim]: half of the planes turn by its row, half by its column."""
    frequencies = 1.0 / 10_000.0 ** (torch.arange(0, head_dim // 2, 2).float() / (head_dim // 2))
    r, c = _in_tokens(rows, columns)
    planes = torch.cat((r[:, None] * frequencies, c[:, None] * frequencies), 1)
    angles = torch.cat((planes, planes), 1)
    return angles.cos().to(device), angles.sin().to(device)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of [B, heads, L, D] in fp32; cos and sin [L, D] or [B, 1, L, D]."""
    wide = x.float()
    a, b = wide.chunk(2, -1)
    return (wide * cos + torch.cat((-b, a), -1) * sin).to(x.dtype)
