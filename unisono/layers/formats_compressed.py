"""Reads compressed-tensors' ``quantization_config``: groups of modules, each with a scheme of weights and activations.

Supported schemes: fp8 weights with a scale for a projection, an output or a block of 128 × 128 and fp8 activations
(``formats_fp8``); packed 4-bit integer weights (``formats_int4``). Anything else is refused by name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from unisono.layers.formats import PLAIN, WeightFormat
from unisono.layers.formats_fp8 import BlockFp8, RowFp8
from unisono.layers.formats_int4 import GROUPS, PackedInt4
from unisono.layers.quantization_config import targeted
from unisono.types import CheckpointError

SUPPORTED = (
    "Supported are float weights of 8 bits (strategy tensor, channel or block [128, 128]) with float activations of 8 "
    "bits, and int weights of 4 bits (strategy group of 32, 64 or 128, or channel) without activations."
)

FORMATS = (None, "float-quantized", "naive-quantized", "pack-quantized", "mixed-precision")
"""What ``format`` may be; it says how tensors are stored, which the schemes say too."""


def read(config: Mapping[str, Any]) -> Callable[[str], WeightFormat]:
    """From the config to the format of each module, by its name in the checkpoint. Raises CheckpointError."""
    if config.get("format") not in FORMATS:
        raise _refusal("format", config["format"])
    for name in ("kv_cache_scheme", "sparsity_config", "transform_config"):
        if config.get(name):
            raise _refusal(name, config[name])
    groups = config.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        raise _refusal("config_groups", groups)
    formats = [(tuple(scheme.get("targets") or ()), _format(scheme)) for scheme in groups.values()]
    ignored = tuple(config.get("ignore") or ())

    def choose(module: str) -> WeightFormat:
        if targeted(module, ignored):
            return PLAIN
        by_name = (format for targets, format in formats if targeted(module, targets))
        by_kind = (format for targets, format in formats if targeted(module, targets, ("Linear",)))
        return next(by_name, None) or next(by_kind, PLAIN)

    return choose


def _refusal(name: str, value: object) -> CheckpointError:
    return CheckpointError(f"compressed-tensors with {name}={value!r} is not supported. {SUPPORTED}")


def _format(scheme: Mapping[str, Any]) -> WeightFormat:
    """The weight format of one group."""
    weights, inputs = scheme.get("weights") or {}, scheme.get("input_activations")
    if scheme.get("output_activations"):
        raise _refusal("output_activations", scheme["output_activations"])
    kind = weights.get("type", "int"), weights.get("num_bits", 8)
    if kind == ("float", 8):
        return _fp8(weights, inputs)
    if kind == ("int", 4) and not inputs:
        return _int4(weights)
    of_weights, of_inputs = ({n: (args or {}).get(n) for n in ("type", "num_bits")} for args in (weights, inputs))
    raise _refusal("weights and input_activations", (of_weights, of_inputs))


def _fp8(weights: Mapping[str, Any], inputs: Mapping[str, Any] | None) -> WeightFormat:
    if not inputs or (inputs.get("type"), inputs.get("num_bits")) != ("float", 8) or not weights.get("symmetric", True):
        raise _refusal("input_activations", inputs)
    strategy, dynamic = weights.get("strategy"), inputs.get("dynamic", False)
    way = inputs.get("strategy")
    if strategy == "block":
        block, columns = weights.get("block_structure"), inputs.get("group_size")
        if list(block or ()) != [128, 128] or dynamic is not True or (way, columns) != ("group", 128):
            raise _refusal("block_structure and input_activations", (block, way, columns))
        return BlockFp8("weight_scale")
    if strategy not in ("tensor", "channel"):
        raise _refusal("strategy", strategy)
    if dynamic is True and way == "token":
        return RowFp8(strategy == "tensor")
    if dynamic is False and way == "tensor":
        return RowFp8(strategy == "tensor", "input_scale")
    raise _refusal("input_activations", {"strategy": way, "dynamic": dynamic})


def _int4(weights: Mapping[str, Any]) -> WeightFormat:
    strategy, group = weights.get("strategy"), weights.get("group_size")
    group = -1 if strategy == "channel" else group
    if strategy not in ("group", "channel") or group not in GROUPS:
        raise _refusal("strategy and group_size", (strategy, weights.get("group_size")))
    if weights.get("actorder") in ("group", "dynamic", True):
        raise _refusal("actorder", weights["actorder"])
    return PackedInt4(group, symmetric=weights.get("symmetric", True))
