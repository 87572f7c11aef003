"""Encoders: BERT, RoBERTa, XLM-RoBERTa and ModernBERT, whose tokens see each other in both directions.

BERT and RoBERTa add learnt positions and token types, and norm sums; ModernBERT is a decoder's layer with LayerNorm,
two rotary tables and an MLP gated by GELU. None writes text. Source of formulas and names: transformers, ``bert``,
``xlm_roberta`` and ``modernbert``.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch

from unisono.config.preflight.families import ENCODERS
from unisono.layers.norm import LAYER, NormKind
from unisono.layers.rotary import RotarySpec
from unisono.models.blocks.input_tables import InputTablesSpec
from unisono.models.blocks.layers import AttentionSpec, LayerSpec, NormOrder
from unisono.models.blocks.plain_mlp import GeluGatedSpec, PlainMLPSpec
from unisono.models.blocks.post_norm import PostNormSpec
from unisono.models.config import DecoderConfig, Family, read_decoder_config
from unisono.models.load.build import require

BERT_LAYER = "encoder.layer.*."
BERT_NAMES = {
    "embed": "embeddings.word_embeddings",
    "input_tables.positions": "embeddings.position_embeddings",
    "input_tables.types": "embeddings.token_type_embeddings",
    "embed_norm": "embeddings.LayerNorm",
    "layers.*.mixer.qkv.q": f"{BERT_LAYER}attention.self.query",
    "layers.*.mixer.qkv.k": f"{BERT_LAYER}attention.self.key",
    "layers.*.mixer.qkv.v": f"{BERT_LAYER}attention.self.value",
    "layers.*.mixer.o": f"{BERT_LAYER}attention.output.dense",
    "layers.*.sum_norm": f"{BERT_LAYER}attention.output.LayerNorm",
    "layers.*.feed_forward.up": f"{BERT_LAYER}intermediate.dense",
    "layers.*.feed_forward.down": f"{BERT_LAYER}output.dense",
    "layers.*.last_norm": f"{BERT_LAYER}output.LayerNorm",
}
MODERN_NAMES = {
    "embed": "embeddings.tok_embeddings",
    "embed_norm": "embeddings.norm",
    "layers.*.mixer_norm": "layers.*.attn_norm",
    **{f"layers.*.mixer.qkv.{name}": "layers.*.attn.Wqkv" for name in "qkv"},
    "layers.*.mixer.o": "layers.*.attn.Wo",
    "layers.*.feed_forward_norm": "layers.*.mlp_norm",
    **{f"layers.*.feed_forward.gate_up.{name}": "layers.*.mlp.Wi" for name in ("gate", "up")},
    "layers.*.feed_forward.down": "layers.*.mlp.Wo",
    "norm": "final_norm",
}
HEADS = ("pooler.", "classifier.", "head.", "lm_head.", "cls.", "decoder.", "embeddings.position_ids")
SEPARATOR = "[SEP]"
KINDS = ("full_attention", "sliding_attention")


def __getattr__(architecture: str) -> Family:
    """The family of an encoder's architecture. Raises AttributeError."""
    if architecture not in ENCODERS:
        raise AttributeError(architecture)
    return family_of(architecture)


@cache
def family_of(architecture: str) -> Family:
    """The family of an encoder: its tensors have the prefix of the base model if there is a head."""
    modern, inside = architecture.startswith("ModernBert"), ENCODERS[architecture]
    names = {ours: inside + theirs for ours, theirs in (MODERN_NAMES if modern else BERT_NAMES).items()}
    reason = "a head: it is applied to the pooled states, or writes what no request asks for"
    unread = dict.fromkeys((*HEADS, *(inside + name for name in HEADS)), reason)
    return Family(_read_modern if modern else _read_bert, names | {"lm_head": "lm_head"}, _rows(modern), unread)


def _encoder(hf_config: Any, layers: list[LayerSpec], eps: float, **options: Any) -> DecoderConfig:
    config = read_decoder_config(hf_config, layers, rms_eps=eps, embed_norm=True, **options)
    return replace(config, tie_embeddings=True)


def _attention(c: Any, rotary: RotarySpec, bias: bool, window: int = 0) -> AttentionSpec:
    heads, dim = c.num_attention_heads, c.hidden_size // c.num_attention_heads
    require(dim * heads == c.hidden_size, "num_attention_heads", heads, f"it must divide {c.hidden_size}")
    return AttentionSpec(heads, heads, dim, rotary, window, qkv_bias=bias, o_bias=bias, whole_text=True)


def _read_bert(c: Any) -> DecoderConfig:
    """Read the config of a BERT, or of a RoBERTa, whose positions begin after ``pad_token_id``."""
    require(not c.is_decoder and not c.add_cross_attention, "is_decoder", True, "a causal BERT is not computed")
    bert = c.model_type == "bert"
    offset = 0 if bert else c.pad_token_id + 1
    rotary = RotarySpec.none(c.hidden_size // c.num_attention_heads)
    layer = PostNormSpec(_attention(c, rotary, True), PlainMLPSpec(c.intermediate_size, True, c.hidden_act))
    separator = separator_of(Path(c.name_or_path)) if bert and c.type_vocab_size > 1 else None
    tables = InputTablesSpec(c.max_position_embeddings, offset, c.type_vocab_size, separator)
    layers: list[LayerSpec] = [layer] * c.num_hidden_layers
    config = _encoder(c, layers, c.layer_norm_eps, input_tables=tables, final_norm=False, norms=LAYER)
    return replace(config, max_positions=c.max_position_embeddings - offset)


def _read_modern(c: Any) -> DecoderConfig:
    """Read the config of a ModernBERT. A layer with a window sees half of ``local_attention`` tokens on each side."""
    dim, mlp = c.hidden_size // c.num_attention_heads, GeluGatedSpec(c.intermediate_size, c.mlp_bias)
    layers = []
    for number, kind in enumerate(c.layer_types):
        require(kind in KINDS, f"layer_types[{number}]", kind, f"supported are {' and '.join(KINDS)}")
        rotary = RotarySpec.of(c, dim, dict(c.rope_parameters[kind]))
        attention = _attention(c, rotary, c.attention_bias, c.local_attention // 2 + 1 if kind == KINDS[1] else 0)
        layers.append(LayerSpec(attention, mlp, NormOrder(before=number > 0)))
    return _encoder(c, layers, c.norm_eps, norms=NormKind(True, True, c.norm_bias))


def separator_of(directory: Path) -> int | None:
    """Id of the token that ends a text in a BERT's prompt, from its tokenizer's files; None without one."""
    file, vocabulary = directory / "tokenizer.json", directory / "vocab.txt"
    if file.is_file():
        added = json.loads(file.read_text(encoding="utf-8")).get("added_tokens") or ()
        return next((int(token["id"]) for token in added if token.get("content") == SEPARATOR), None)
    if vocabulary.is_file():
        lines = vocabulary.read_text(encoding="utf-8").split("\n")
        return lines.index(SEPARATOR) if SEPARATOR in lines else None
    return None


# ---- rows of ModernBERT's packed tensors -------------------------------------------------------------


def _rows(modern: bool) -> dict[str, Callable[[LayerSpec], torch.Tensor]]:
    if not modern:
        return {}
    found: dict[str, Callable[[LayerSpec], torch.Tensor]] = {}
    for part, name in enumerate("qkv"):
        found[f"layers.*.mixer.qkv.{name}"] = partial(_part, part, True)
    for part, name in enumerate(("gate", "up")):
        found[f"layers.*.feed_forward.gate_up.{name}"] = partial(_part, part, False)
    return found


def _part(part: int, of_attention: bool, layer: LayerSpec) -> torch.Tensor:
    """Rows of an equal part of a packed tensor."""
    attention, mlp = layer.mixer, layer.feed_forward
    assert isinstance(attention, AttentionSpec)
    assert isinstance(mlp, GeluGatedSpec)
    size = attention.num_heads * attention.head_dim if of_attention else mlp.intermediate_size
    return torch.arange(part * size, (part + 1) * size)
