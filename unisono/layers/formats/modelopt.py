"""Reader of NVIDIA ModelOpt's quantisation: of ``quantization_config``, or of its side file hf_quant_config.json.

``FP8`` has e4m3 weights with a scale per projection and a calibrated scale of activations,
``FP8_PER_CHANNEL_PER_TOKEN`` a scale per output, ``NVFP4`` weights of 4 bits (``formats/nvfp4.py``).
``MIXED_PRECISION`` names one of them for each module in ``quantized_layers``; other modules are plain.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from typing import Any

from unisono.config.preflight.quantization import check_modelopt
from unisono.layers.formats.base import PLAIN, WeightFormat
from unisono.layers.formats.fp8 import RowFp8
from unisono.layers.formats.module_patterns import named
from unisono.layers.formats.nvfp4 import NVFP4

FORMATS: Mapping[str, WeightFormat] = {
    "FP8": RowFp8(True, "input_scale"),
    "FP8_PER_CHANNEL_PER_TOKEN": RowFp8(False),
    "NVFP4": NVFP4("weight", "weight_scale_2", "input_scale", divides=False),
}
"""By ``quant_algo``."""


def read(config: Mapping[str, Any]) -> Callable[[str], WeightFormat]:
    """Format of each module by its checkpoint name. Raises CheckpointError."""
    check_modelopt(config)
    kept = (*(config.get("exclude_modules") or ()), *(config.get("ignore") or ()), "lm_head")
    mixed = config["quant_algo"] == "MIXED_PRECISION"
    layers: Mapping[str, Any] = config["quantized_layers"] if mixed else {}

    def of_module(module: str) -> WeightFormat:
        if not mixed:
            return FORMATS[config["quant_algo"]]
        own = layers.get(module) or next((each for name, each in layers.items() if _covers(name, module)), None)
        return PLAIN if own is None else FORMATS[own["quant_algo"]]

    def choose(module: str) -> WeightFormat:
        is_plain = named(module, (each for each in kept if "*" not in each))
        return PLAIN if is_plain or any(_covers(each, module) for each in kept if "*" in each) else of_module(module)

    return choose


def _covers(pattern: str, module: str) -> bool:
    """True if a pattern with ``*`` matches a module or one above it."""
    return fnmatchcase(module, pattern) or fnmatchcase(module, f"{pattern}.*")
