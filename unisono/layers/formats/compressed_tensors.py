"""Reader of compressed-tensors' ``quantization_config``: groups of modules, each with a scheme of weights and
activations.

Supported schemes: fp8 weights with a scale per projection, output or block of 128 × 128 and fp8 activations
(``formats/fp8.py``); NVFP4 weights (``formats/nvfp4.py``); integer weights of 4 bits (``formats/int4.py``), and of 8
bits with or without int8 activations (``formats/int8.py``). ``config/preflight/compressed.py`` refuses others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from unisono.config.preflight.compressed import Scheme, compressed_schemes
from unisono.layers.formats.base import PLAIN, WeightFormat
from unisono.layers.formats.fp8 import BlockFp8, RowFp8
from unisono.layers.formats.int4 import PackedInt4
from unisono.layers.formats.int8 import Int8, PackedInt8
from unisono.layers.formats.module_patterns import targeted
from unisono.layers.formats.nvfp4 import NVFP4


def read(config: Mapping[str, Any]) -> Callable[[str], WeightFormat]:
    """Format of each module by its checkpoint name. Raises CheckpointError."""
    formats = [(targets, _format(scheme)) for targets, scheme in compressed_schemes(config)]
    ignored = tuple(config.get("ignore") or ())

    def choose(module: str) -> WeightFormat:
        if targeted(module, ignored):
            return PLAIN
        by_name = (format for targets, format in formats if targeted(module, targets))
        by_kind = (format for targets, format in formats if targeted(module, targets, ("Linear",)))
        return next(by_name, None) or next(by_kind, PLAIN)

    return choose


def _format(scheme: Scheme) -> WeightFormat:
    """The weight format of a scheme."""
    if scheme.kind == "fp8 block":
        return BlockFp8("weight_scale")
    if scheme.kind == "nvfp4":
        return NVFP4(input_kind="input_global_scale" if scheme.static else None)
    if scheme.kind == "int8":
        return Int8(scheme.by_projection, scheme.static, scheme.shifted)
    if scheme.kind == "int":
        if scheme.bits == 8:
            return PackedInt8(scheme.group, scheme.symmetric, scheme.packed)
        return PackedInt4(scheme.group, symmetric=scheme.symmetric)
    return RowFp8(scheme.by_projection, "input_scale" if scheme.static else None)
