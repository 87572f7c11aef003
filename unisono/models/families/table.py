"""Families that are rows of a table: Llama with other data (``config/decoder_table.py``).

:func:`family_of` makes a :class:`Family` of a row. The catalog names an attribute of this module for each architecture.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from unisono.config.decoder_names import LLAMA_NAMES
from unisono.config.decoder_table import ROWS, ConfigField, DecoderRow
from unisono.kernels.moe.scored_router import RouterScores
from unisono.layers.norm import NormKind
from unisono.layers.rotary import RotarySpec
from unisono.models.blocks.experts import ExpertsSpec
from unisono.models.blocks.head_steps import HeadStepsSpec
from unisono.models.blocks.layers import POST, PRE, SANDWICH, AttentionSpec, BlockSpec, LayerSpec, MLPSpec
from unisono.models.blocks.parallel import ParallelSpec
from unisono.models.blocks.plain_mlp import PlainMLPSpec
from unisono.models.config import (
    DecoderConfig,
    Family,
    Name,
    in_language_model,
    read_decoder_config,
    windows_by_layer_type,
)
from unisono.models.load.build import require

NORMS: dict[str, dict[str, Any]] = {
    "rms": {},
    "rms fp32": {"wide_norms": True},
    "rms plain": {"norms": NormKind(weight=False)},
    "layer": {"norms": NormKind(True, True, True)},
    "layer no bias": {"norms": NormKind(True)},
    "layer plain": {"norms": NormKind(True, weight=False)},
    "layer + 1": {"norms": NormKind(True, True, True), "zero_centered_norms": True},
}
"""Fields of a DecoderConfig for each kind of norm."""

ORDERS = {"pre": PRE, "post": POST, "sandwich": SANDWICH}


def __getattr__(architecture: str) -> Family:
    """The family of a row by its architecture. Raises AttributeError."""
    if architecture not in ROWS:
        raise AttributeError(architecture)
    return family_of(architecture)


@cache
def family_of(architecture: str) -> Family:
    """The family of a row."""
    row = ROWS[architecture]
    names: dict[str, Name] = {**LLAMA_NAMES, **row.names}
    if row.seen:
        names = in_language_model(names)
    return Family(
        lambda hf_config: _read(row, hf_config),
        names,
        _rows(row),
        tied_unless_stored=row.seen,
    )


def _read(row: DecoderRow, hf_config: Any) -> DecoderConfig:
    """The model of a transformers config."""
    text = hf_config.get_text_config()
    windows = {
        "none": lambda: (0,) * text.num_hidden_layers,
        "all": lambda: (text.sliding_window or 0,) * text.num_hidden_layers,
        "by layer": lambda: windows_by_layer_type(text),
    }[row.windows]()
    layers = [_layer(row, text, number, windows) for number in range(text.num_hidden_layers)]
    return read_decoder_config(
        hf_config,
        layers,
        rms_eps=_value(row.eps, text),
        embed_scale=_value(row.embed_scale, text),
        embed_norm=row.embed_norm,
        logit_scale=_value(row.logit_scale, text),
        logit_cap=_value(row.logit_cap, text),
        head_bias=bool(_value(row.head_bias, text)),
        **NORMS[row.norm],
    )


def _value(slot: Any, text: Any) -> Any:
    """A slot's value for a text model's config. Raises CheckpointError for a value that the row does not know."""
    if not isinstance(slot, ConfigField):
        return slot
    value = getattr(text, slot.name)
    if slot.values is not None:
        require(value in slot.values, slot.name, value, f"supported are {', '.join(map(str, slot.values))}")
        return slot.values[value]
    if slot.inverse:
        require(bool(value), slot.name, value, "it must not be 0")
        return 1.0 / value
    return value or 0


def _layer(row: DecoderRow, text: Any, number: int, windows: tuple[int, ...]) -> LayerSpec:
    """One layer of the model."""
    attention, order = _attention(row, text, number, windows), _value(row.order, text)
    feed_forward, times = _feed_forward(row, text, number), float(_value(row.residual_scale, text))
    require(times == 1 or order == "pre", "residual_multiplier", times, "it goes with norms before blocks only")
    if order == "parallel":
        return ParallelSpec(attention, feed_forward, times=times)
    return LayerSpec(attention, feed_forward, ORDERS[order], ORDERS[order], times=times)


def _feed_forward(row: DecoderRow, text: Any, number: int) -> BlockSpec:
    bias = bool(_value(row.mlp_bias, text))
    if row.experts is not None:
        found = [_value(slot, text) for slot in row.experts]
        count, top_k, normalise = (each[number] if isinstance(each, list) else each for each in found)
        size, shared = text.intermediate_size, int(_value(row.shared_size, text))
        scores = _scores(row, text, top_k)
        return ExpertsSpec(
            count, top_k, size, shared, normalize=bool(normalise), activation=row.activation, scores=scores
        )
    kind: Callable[..., BlockSpec] = MLPSpec if row.gated else PlainMLPSpec
    return kind(text.intermediate_size, bias, row.activation)


def _scores(row: DecoderRow, text: Any, top_k: int) -> RouterScores | None:
    """Scores of a router with a margin; None: by softmax."""
    if row.router_jitter == 0:
        return None
    jitter = float(_value(row.router_jitter, text))
    require(jitter > 0, "router_jitter_noise", jitter, "it must be above 0")
    require(top_k == 2, "num_experts_per_tok", top_k, "this router is defined for 2")
    return RouterScores(sigmoid=False, margin=2 * jitter)


def _attention(row: DecoderRow, text: Any, number: int, windows: tuple[int, ...]) -> AttentionSpec:
    heads, window, qk_norm = text.num_attention_heads, windows[number], _value(row.qk_norm, text)
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // heads
    rotary, turns = _rotary(row, text, number, windows, head_dim)
    steps = HeadStepsSpec(
        norm=qk_norm in ("layer", "layer apart"),
        apart=qk_norm == "layer apart",
        order=tuple(head_order(row.rotary, head_dim, head_dim)) if qk_norm == "layer" else (),
        clip=float(_value(row.clip, text)),
        rotate_first=qk_norm == "after" and turns,
        query_growth=_growth(row, text),
    )
    return AttentionSpec(
        heads,
        text.num_key_value_heads or heads,
        head_dim,
        rotary,
        window=window,
        scale=_value(row.scale, text),
        qk_norm=qk_norm in ("head", "after"),
        joint_qk_norm=qk_norm == "full",
        qkv_bias=bool(_value(row.qkv_bias, text)),
        o_bias=bool(_value(row.o_bias, text)),
        steps=None if steps == HeadStepsSpec() else steps,
    )


def _rotary(
    row: DecoderRow, text: Any, number: int, windows: tuple[int, ...], head_dim: int
) -> tuple[RotarySpec, bool]:
    """(the layer's rotary table, True if it rotates)."""
    still = {
        "": lambda: False,
        "list": lambda: not text.no_rope_layers[number],
        "full": lambda: windows[number] == 0,
        "full beside windows": lambda: windows[number] == 0 and text.sliding_window is not None,
    }[row.unrotated]()
    if still:
        return RotarySpec.none(head_dim), False
    found = dict(text.rope_parameters or {})
    if row.rope_by_type:
        found = dict(found.get(text.layer_types[number], found))
    if found.get("rope_type") == "dynamic" and "alpha" in row.rope_types:
        base, alpha = float(found["rope_theta"]), float(found.get("alpha") or 0)
        require(alpha > 0, "rope_parameters.alpha", alpha, "the length alone does not stretch this model's base")
        found = {"rope_type": "default", "rope_theta": base * alpha ** (head_dim / (head_dim - 2))}
    return RotarySpec.of(text, head_dim, found or None), True


def _growth(row: DecoderRow, text: Any) -> tuple[float, int, int] | None:
    """Growth of queries, if the config has it: see :class:`HeadStepsSpec`."""
    parameters = (text.rope_parameters or {}) if row.query_scaling else {}
    beta = parameters.get("llama_4_scaling_beta")
    return (float(beta), int(parameters["original_max_position_embeddings"]), 0) if beta else None


# ---- rows of checkpoint tensors ---------------------------------------------------------------------


def head_order(rotary: str, head_dim: int, rotating: int) -> list[int]:
    """Stored element of each element of a head, so that its rotated halves turn together.

    rotary: see :class:`DecoderRow`. rotating: elements that rotate, the first ones.
    """
    if rotary == "pairs":
        return [*range(0, rotating, 2), *range(1, rotating, 2), *range(rotating, head_dim)]
    if rotary == "swapped":
        return [*range(rotating // 2, rotating), *range(rotating // 2), *range(rotating, head_dim)]
    return list(range(head_dim))


def _rows(row: DecoderRow) -> dict[str, Callable[[LayerSpec], torch.Tensor]]:
    """Rows of the checkpoint's tensors for projections that share one, and for heads in another order."""
    found: dict[str, Callable[[LayerSpec], torch.Tensor]] = {}
    query = [f"layers.*.mixer.qkv.{name}" for name in "qkv"]
    packed = len({row.names.get(name, name) for name in query}) == 1
    if packed or row.rotary != "halves":
        for part in range(3 if packed else 2):
            found[query[part]] = lambda layer, part=part: _head_rows(row, layer, part, packed)  # type: ignore[misc]
    for inside in ("", "shared."):
        gates = [f"layers.*.feed_forward.{inside}gate_up.{name}" for name in ("gate", "up")]
        if gates[0] in row.names and row.names[gates[0]] == row.names[gates[1]]:
            for part, name in enumerate(gates):
                found[name] = lambda layer, part=part: _gate_rows(layer, part)  # type: ignore[misc]
    return found


def _head_rows(row: DecoderRow, layer: LayerSpec, part: int, packed: bool) -> torch.Tensor:
    """Rows of queries, keys or values (part 0, 1, 2)."""
    spec = layer.mixer
    assert isinstance(spec, AttentionSpec)
    counts = spec.num_heads, spec.num_kv_heads, spec.num_kv_heads
    first = sum(counts[:part]) if packed else 0
    numbers = torch.arange(first, first + counts[part])
    if row.grouped:
        each = spec.num_heads // spec.num_kv_heads
        by_group = torch.arange(sum(counts)).view(spec.num_kv_heads, each + 2)
        numbers = (by_group[:, :each], by_group[:, each], by_group[:, each + 1])[part].flatten()
    turns = json.loads(spec.rotary.parameters)["rope_type"] != "none"
    order = (
        head_order(row.rotary, spec.head_dim, 2 * spec.rotary.planes) if part < 2 and turns else range(spec.head_dim)
    )
    heads = numbers[:, None] * spec.head_dim
    return (heads + torch.tensor(list(order))).flatten()


def _gate_rows(layer: LayerSpec, part: int) -> torch.Tensor:
    """Rows of the gate or of up (part 0, 1), of an MLP or of a shared expert."""
    spec = layer.feed_forward
    assert isinstance(spec, (MLPSpec, ExpertsSpec))
    size = spec.shared_intermediate_size if isinstance(spec, ExpertsSpec) else spec.intermediate_size
    return torch.arange(part * size, (part + 1) * size)
