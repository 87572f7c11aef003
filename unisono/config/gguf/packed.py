"""Matrices of a GGUF file that stay packed on the device with ``--quantization gguf``. Imports the header only.

A block of these types is a scale and 32 integers, so the formats of 4- and 8-bit integers hold its values exactly. The
other types are dequantised: Q4_1 and Q5_1 add a minimum that is no multiple of the scale, and types of 256 elements
have such minima, or scales of 16 elements.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from typing import Any

from unisono.config.gguf.header import GGUFHeader
from unisono.config.gguf.model import checkpoint_name

METHOD = "gguf"
"""Value of ``--quantization``."""

PACKED = ("Q4_0", "Q5_0", "Q8_0")
"""Names of the types."""

_MATRIX = re.compile(r"(model\.layers\.\d+\.(?:self_attn|mlp)\.(?:experts\.\*\.)?)(\w+_proj)\.weight")
_EXPERT = re.compile(r"\.experts\.(?:(?:\d+|\*)\.)?")
_PRODUCTS = {"q_proj": "qkv", "k_proj": "qkv", "v_proj": "qkv", "gate_proj": "gate_up", "up_proj": "gate_up"}


def packed_types(header: GGUFHeader) -> dict[str, str]:
    """Type of each matrix that stays packed, by its module's name with ``*`` for the number of an expert.

    Embedding, LM head and routers are dequantised, and so is a product of several projections that has several types.
    """
    products: dict[str, dict[str, str]] = defaultdict(dict)
    for tensor in header.tensors.values():
        if match := _MATRIX.fullmatch(checkpoint_name(tensor.name)):
            place, projection = match.groups()
            product = "" if "*" in place else _PRODUCTS.get(projection, projection)  # all experts have one format
            products[place + product][place + projection] = tensor.type.name
    return {
        module: kind
        for types in products.values()
        if len({*types.values()}) == 1
        for module, kind in types.items()
        if kind in PACKED
    }


def packed_config(header: GGUFHeader) -> dict[str, Any]:
    """The ``quantization_config`` of a file whose matrices stay packed."""
    return {"quant_method": METHOD, "types": packed_types(header)}


def type_of(types: dict[str, str], module: str) -> str | None:
    """Type of a module in :func:`packed_types`; None: it is dequantised."""
    return types.get(_EXPERT.sub(".experts.*.", module))


def packed_reason(types: dict[str, str], matrices: int) -> str:
    """The sentence of ``explain`` on what stays packed. matrices: number of the file's matrices."""
    found = ", ".join(f"{count} of {kind}" for kind, count in sorted(Counter(types.values()).items()))
    rest = f"{matrices - len(types)} matrices are dequantised while loading"
    return f"matrices that stay integers with a scale for 32 inputs: {found or 'none'}; {rest}"
