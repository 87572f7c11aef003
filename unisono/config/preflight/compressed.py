"""Rules of compressed-tensors' ``quantization_config``: the supported schemes of weights and activations.

``layers/formats/compressed_tensors.py`` makes a format of each scheme.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from unisono.config.preflight.quantization_rules import BLOCK, INT_GROUPS
from unisono.types import CheckpointError

SUPPORTED = (
    "Supported are float weights of 8 bits (strategy tensor, channel or block [128, 128]) with float activations of 8 "
    "bits; float weights of 4 bits (NVFP4: strategy tensor_group of 16); int weights of 4 or 8 bits (strategy group of "
    "32, 64 or 128, or channel) without activations; int weights of 8 bits (strategy tensor or channel) with int "
    "activations of 8 bits."
)

COMPRESSED_FORMATS = (
    None, "float-quantized", "int-quantized", "naive-quantized", "pack-quantized", "nvfp4-pack-quantized",
    "mixed-precision",
)  # fmt: skip
"""Values of compressed-tensors' ``format``. It repeats what the schemes state about storage."""


@dataclass(frozen=True)
class Scheme:
    """Weight and activation formats of a group of modules in compressed-tensors.

    kind: "fp8 block", "fp8 row", "nvfp4", "int" or, with int8 activations, "int8". by_projection: one scale for all
    outputs of a projection. static: activation scales are in the checkpoint. group: inputs that share a scale of int
    weights. symmetric: int weights without zeros. bits: of int weights. shifted: activations with a zero point.
    packed: int weights lie in int32.
    """

    kind: str
    by_projection: bool = False
    static: bool = False
    group: int = -1
    symmetric: bool = True
    bits: int = 4
    shifted: bool = False
    packed: bool = True


def check_compressed(config: Mapping[str, Any]) -> None:
    """Check quant_method "compressed-tensors": every group has a supported scheme."""
    compressed_schemes(config)


def compressed_schemes(config: Mapping[str, Any]) -> list[tuple[tuple[str, ...], Scheme]]:
    """(targets, scheme) of each group of compressed-tensors. Raises CheckpointError."""
    if config.get("format") not in COMPRESSED_FORMATS:
        raise _refusal("format", config["format"])
    for name in ("sparsity_config", "transform_config"):
        if config.get(name):
            raise _refusal(name, config[name])
    groups = config.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        raise _refusal("config_groups", groups)
    form = config.get("format")
    return [
        (tuple(group.get("targets") or ()), _scheme(group, group.get("format") or form)) for group in groups.values()
    ]


def _refusal(name: str, value: object) -> CheckpointError:
    return CheckpointError(f"compressed-tensors with {name}={value!r} is not supported. {SUPPORTED}")


def _scheme(group: Mapping[str, Any], form: str | None) -> Scheme:
    weights, inputs = group.get("weights") or {}, group.get("input_activations")
    if group.get("output_activations"):
        raise _refusal("output_activations", group["output_activations"])
    kind = weights.get("type", "int"), weights.get("num_bits", 8)
    if kind == ("float", 8):
        return _fp8_scheme(weights, inputs)
    if kind == ("float", 4):
        return _nvfp4_scheme(weights, inputs)
    if kind in (("int", 4), ("int", 8)) and not inputs:
        return _int_scheme(weights, kind[1], form != "int-quantized")
    if kind == ("int", 8) and inputs is not None and (inputs.get("type", "int"), inputs.get("num_bits")) == ("int", 8):
        return _int8_scheme(weights, inputs)
    of_weights, of_inputs = ({n: (args or {}).get(n) for n in ("type", "num_bits")} for args in (weights, inputs))
    raise _refusal("weights and input_activations", (of_weights, of_inputs))


def _nvfp4_scheme(weights: Mapping[str, Any], inputs: Mapping[str, Any] | None) -> Scheme:
    """Weights of 4 bits. Activations of 4 bits are read as weights alone: their calibrated scales are not used."""
    if (weights.get("strategy"), weights.get("group_size")) != ("tensor_group", 16):
        raise _refusal("strategy and group_size", (weights.get("strategy"), weights.get("group_size")))
    if inputs and (inputs.get("type"), inputs.get("num_bits")) != ("float", 4):
        raise _refusal("input_activations", inputs)
    return Scheme("nvfp4", static=bool(inputs))


def _int8_scheme(weights: Mapping[str, Any], inputs: Mapping[str, Any]) -> Scheme:
    """int8 weights by channel and int8 activations by token, or with fixed scales."""
    strategy, of_inputs, dynamic = weights.get("strategy"), inputs.get("strategy"), inputs.get("dynamic", False)
    if strategy not in ("tensor", "channel") or not weights.get("symmetric", True):
        raise _refusal("strategy and symmetric", (strategy, weights.get("symmetric")))
    if (dynamic, of_inputs) not in ((True, "token"), (False, "tensor")):
        raise _refusal("input_activations", {"strategy": of_inputs, "dynamic": dynamic})
    shifted = not inputs.get("symmetric", True)
    if shifted and not dynamic:
        raise _refusal("input_activations", {"dynamic": False, "symmetric": False})
    return Scheme("int8", strategy == "tensor", static=not dynamic, bits=8, shifted=shifted)


def _fp8_scheme(weights: Mapping[str, Any], inputs: Mapping[str, Any] | None) -> Scheme:
    if not inputs or (inputs.get("type"), inputs.get("num_bits")) != ("float", 8) or not weights.get("symmetric", True):
        raise _refusal("input_activations", inputs)
    strategy, dynamic = weights.get("strategy"), inputs.get("dynamic", False)
    of_inputs = inputs.get("strategy")
    if strategy == "block":
        block, columns = weights.get("block_structure"), inputs.get("group_size")
        if list(block or ()) != [BLOCK, BLOCK] or dynamic is not True or (of_inputs, columns) != ("group", BLOCK):
            raise _refusal("block_structure and input_activations", (block, of_inputs, columns))
        return Scheme("fp8 block")
    if strategy not in ("tensor", "channel"):
        raise _refusal("strategy", strategy)
    if dynamic is True and of_inputs == "token":
        return Scheme("fp8 row", strategy == "tensor")
    if dynamic is False and of_inputs == "tensor":
        return Scheme("fp8 row", strategy == "tensor", static=True)
    raise _refusal("input_activations", {"strategy": of_inputs, "dynamic": dynamic})


def _int_scheme(weights: Mapping[str, Any], bits: int, packed: bool) -> Scheme:
    strategy, group = weights.get("strategy"), weights.get("group_size")
    group = -1 if strategy == "channel" else group
    if strategy not in ("group", "channel") or group not in INT_GROUPS:
        raise _refusal("strategy and group_size", (strategy, weights.get("group_size")))
    if weights.get("actorder") in ("group", "dynamic", True):
        raise _refusal("actorder", weights["actorder"])
    symmetric = weights.get("symmetric", True)
    if not packed and (bits == 4 or not symmetric):
        raise _refusal("format", "int-quantized")
    return Scheme("int", group=int(group), symmetric=symmetric, bits=bits, packed=packed)
