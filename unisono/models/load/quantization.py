"""Weight format of each module of a model: from config.json, or from ``--quantization``.

Called by ``models/load/checkpoint.py``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from unisono.config import catalog
from unisono.config.gguf.directory import source as gguf_source
from unisono.config.gguf.header import read_gguf
from unisono.config.gguf.packed import PACKED, packed_config, packed_reason
from unisono.config.preflight.quantization import quantization_method, stored_quantization
from unisono.layers.formats.base import PLAIN, WeightFormat
from unisono.models.load.build import plain
from unisono.types import CheckpointError

_OF_KV = r"(?:[qkv]|kv|prob|attn)_(?:output_)?(?:scale|zero_point)"
KV_SCALE = re.compile(rf"\.self_attn\.(?:[qkv]_proj\.)?{_OF_KV}$|[kv]_proj\.output_scale$")
"""Names of tensors with calibrated scales of attention and its KV cache."""

ONLINE = re.compile(r"layers\.\d+\.(mixer|feed_forward)\.")
"""Modules, by path in the model, quantised while a plain checkpoint is loaded …"""

KEPT_PLAIN = ("gates", "router", "shared_gate")
"""… unless a part of their path is one of these, which are small and sensitive."""


@dataclass(frozen=True)
class Quantization:
    """Storage format of a model's weights on the device.

    method: a name of ``catalog.formats``; None: plain.
    by_name: a module's format by its checkpoint name.
    kv_scales: the checkpoint has calibrated scales of a KV cache, which are not used.
    online: format applied to weights while they are loaded; None: as in the checkpoint.
    source: the sentence of :meth:`decision` on the weights' storage.
    """

    method: str | None = None
    by_name: Callable[[str], WeightFormat] = field(default=plain, repr=False)
    online: WeightFormat | None = None
    kv_scales: bool = False
    source: str = "quantization_config of the checkpoint"

    def format(self, module: str, name: str) -> WeightFormat:
        """Format of the module with this path in the model and this checkpoint name.

        A head of another name than ``lm_head`` is plain if either name is: tools leave heads plain unlisted.
        """
        if self.online is None:
            return PLAIN if module == "lm_head" and self.by_name(module) == PLAIN else self.by_name(name)
        return self.online if ONLINE.match(module) and not {*module.split(".")} & {*KEPT_PLAIN} else PLAIN

    def decision(self) -> tuple[str, str]:
        """(value, reason) for the start-up log: the method, and why."""
        if self.method is None:
            return "plain", self.source
        if self.online is None:
            kv = "; its scales of a KV cache are not used: --kv-cache-dtype fp8 computes one per token and head"
            return self.method, f"{self.source}{kv if self.kv_scales else ''}"
        stay = "embeddings, LM head, routers, norms and gates stay plain"
        return self.method, f"linear layers of mixers and feed-forwards are quantised while loading; {stay}"


PLAIN_WEIGHTS = Quantization(source="the checkpoint is not quantised; --quantization fp8 quantises while loading")
DEQUANTISED = Quantization(
    source="matrices of the GGUF file are dequantised while loading; --quantization gguf keeps those of "
    f"{', '.join(PACKED)} packed"
)


def has_kv_scales(config: Mapping[str, Any]) -> bool:
    """True if a quantization_config tells of scales of the KV cache."""
    return bool(config.get("kv_cache_scheme") or config.get("kv_cache_quant_algo"))


def find_quantization(raw: Mapping[str, Any], directory: Path, requested: str | None = None) -> Quantization:
    """Quantisation from config.json, and ``--quantization`` if set.

    Raises CheckpointError for a quantization_config that is not supported, ConfigError for a flag that contradicts it.
    """
    methods, online = catalog.formats.names, catalog.online_formats.names
    method = quantization_method(raw, directory, requested, methods, online)
    file = gguf_source(directory)
    if method is None:
        if requested is not None:
            return Quantization(requested, online=catalog.online_formats.load(requested))
        return PLAIN_WEIGHTS if file is None else DEQUANTISED
    if file is not None:
        header = read_gguf(file)
        config = packed_config(header)
        matrices = sum(len(tensor.shape) > 1 for tensor in header.tensors.values())
        return Quantization(
            method, catalog.formats.load(method)(config), source=packed_reason(config["types"], matrices)
        )
    config = stored_quantization(raw, directory)
    try:
        return Quantization(method, catalog.formats.load(method)(config), kv_scales=has_kv_scales(config))
    except CheckpointError as error:
        raise CheckpointError(f"{directory / 'config.json'}: quantization_config: {error}") from None
