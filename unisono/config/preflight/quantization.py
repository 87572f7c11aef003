"""Rules of ``quantization_config``: the supported schemes, decided from config.json alone.

The readers of weight formats (``layers/formats/``) call the same functions before they build a format, so that the
early check and the loader refuse the same configs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unisono.config.checkpoint_files import CONFIG, MODELOPT_CONFIG, OLD_GPTQ_CONFIG, read_object
from unisono.types import CheckpointError, ConfigError

BLOCK = 128
"""Side of a square block of fp8 weights with one scale: 128 outputs by 128 inputs."""

INT4_GROUPS = (32, 64, 128, -1)
"""Group sizes of 4-bit weights: inputs with one scale; -1: all inputs."""


def require(method: str, config: Mapping[str, Any], rules: Mapping[str, tuple[Any, ...]]) -> None:
    """Raise CheckpointError unless each field of a quantization_config has one of its supported values.

    rules: supported values by field; the first one is the meaning of an absent field.
    """
    for name, supported in rules.items():
        value = config.get(name, supported[0])
        if value not in supported:
            ways = " or ".join(repr(each) for each in supported)
            raise CheckpointError(f"quant_method {method!r} with {name}={value!r}: supported is {ways}.")


# ---- methods ----------------------------------------------------------------------------------------


def check_fp8(config: Mapping[str, Any]) -> None:
    """Check quant_method "fp8": e4m3 with blocks of 128 x 128, or one scale per projection."""
    block = config.get("weight_block_size")
    require("fp8", config, {"fmt": ("e4m3", "float8_e4m3fn"), "scale_fmt": ("float", None), "expert_dtype": ("fp8",)})
    require("fp8", config, {"weight_block_size": (None, [BLOCK, BLOCK]), "modules_to_convert": (None, [])})
    require("fp8", config, {"activation_scheme": ("dynamic",) if block else ("dynamic", "static")})


def check_awq(config: Mapping[str, Any]) -> None:
    """Check quant_method "awq": 4 bits, the gemm version, with zeros."""
    require("awq", config, {"bits": (4,), "version": ("gemm", "GEMM"), "zero_point": (True,)})
    require("awq", config, {"group_size": (128, *INT4_GROUPS)})


def check_gptq(config: Mapping[str, Any]) -> None:
    """Check quant_method "gptq": 4 bits without activation order; of dynamic rules only those that exclude modules."""
    versions = ("gptq", "gptq_v2")
    require("gptq", config, {"bits": (4,), "desc_act": (False,), "checkpoint_format": versions, "lm_head": (False,)})
    require("gptq", config, {"group_size": (128, *INT4_GROUPS)})
    own = [rule for rule in config.get("dynamic") or () if not rule.startswith("-:")]
    if own:
        raise CheckpointError(f"quant_method 'gptq' with dynamic={own[0]!r}: supported are rules that begin with '-:'.")


SUPPORTED = (
    "Supported are float weights of 8 bits (strategy tensor, channel or block [128, 128]) with float activations of 8 "
    "bits, and int weights of 4 bits (strategy group of 32, 64 or 128, or channel) without activations."
)

COMPRESSED_FORMATS = (None, "float-quantized", "naive-quantized", "pack-quantized", "mixed-precision")
"""Values of compressed-tensors' ``format``. It repeats what the schemes state about storage."""


@dataclass(frozen=True)
class Scheme:
    """Weight and activation formats of a group of modules in compressed-tensors.

    kind: "fp8 block", "fp8 row" or "int4". by_projection: one scale for all outputs of a projection. static: activation
    scales are in the checkpoint. group: inputs that share a scale of int4 weights. symmetric: int4 without zeros.
    """

    kind: str
    by_projection: bool = False
    static: bool = False
    group: int = -1
    symmetric: bool = True


def check_compressed(config: Mapping[str, Any]) -> None:
    """Check quant_method "compressed-tensors": every group has a supported scheme."""
    compressed_schemes(config)


def compressed_schemes(config: Mapping[str, Any]) -> list[tuple[tuple[str, ...], Scheme]]:
    """(targets, scheme) of each group of compressed-tensors. Raises CheckpointError."""
    if config.get("format") not in COMPRESSED_FORMATS:
        raise _refusal("format", config["format"])
    for name in ("kv_cache_scheme", "sparsity_config", "transform_config"):
        if config.get(name):
            raise _refusal(name, config[name])
    groups = config.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        raise _refusal("config_groups", groups)
    return [(tuple(group.get("targets") or ()), _scheme(group)) for group in groups.values()]


def _refusal(name: str, value: object) -> CheckpointError:
    return CheckpointError(f"compressed-tensors with {name}={value!r} is not supported. {SUPPORTED}")


def _scheme(group: Mapping[str, Any]) -> Scheme:
    weights, inputs = group.get("weights") or {}, group.get("input_activations")
    if group.get("output_activations"):
        raise _refusal("output_activations", group["output_activations"])
    kind = weights.get("type", "int"), weights.get("num_bits", 8)
    if kind == ("float", 8):
        return _fp8_scheme(weights, inputs)
    if kind == ("int", 4) and not inputs:
        return _int4_scheme(weights)
    of_weights, of_inputs = ({n: (args or {}).get(n) for n in ("type", "num_bits")} for args in (weights, inputs))
    raise _refusal("weights and input_activations", (of_weights, of_inputs))


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


def _int4_scheme(weights: Mapping[str, Any]) -> Scheme:
    strategy, group = weights.get("strategy"), weights.get("group_size")
    group = -1 if strategy == "channel" else group
    if strategy not in ("group", "channel") or group not in INT4_GROUPS:
        raise _refusal("strategy and group_size", (strategy, weights.get("group_size")))
    if weights.get("actorder") in ("group", "dynamic", True):
        raise _refusal("actorder", weights["actorder"])
    return Scheme("int4", group=int(group), symmetric=weights.get("symmetric", True))


CHECKS: Mapping[str, Callable[[Mapping[str, Any]], None]] = {
    "awq": check_awq,
    "compressed-tensors": check_compressed,
    "fp8": check_fp8,
    "gptq": check_gptq,
}
"""By quant_method; a method of the catalog without an entry has no rules."""

# ---- a checkpoint's method --------------------------------------------------------------------------


def quantization_config(raw: Mapping[str, Any]) -> Any:
    """The quantization_config of a config.json or of its text_config; None without one."""
    of_text = raw.get("text_config")
    inner = of_text.get("quantization_config") if isinstance(of_text, dict) else None
    return raw.get("quantization_config") or raw.get("compression_config") or inner


def quantization_method(
    raw: Mapping[str, Any], directory: Path, flag: str | None, methods: tuple[str, ...], online: tuple[str, ...]
) -> str | None:
    """The method in which a checkpoint's weights are stored; None for plain weights.

    raw: config.json. flag: ``--quantization``. methods: the supported ones. online: those that quantise a plain
    checkpoint while loading. Raises CheckpointError for a quantization that is not supported, ConfigError for a flag
    that the checkpoint contradicts.
    """
    config = quantization_config(raw)
    if flag is not None and flag not in methods:
        raise ConfigError(f"--quantization {flag!r} is unknown; choose one of {', '.join(methods)}.")
    if not config:
        _check_other_tools(raw, directory, methods)
        if flag is not None and flag not in online:
            raise ConfigError(
                f"--quantization {flag}: {directory} is not quantised, and only {', '.join(online)} is made while "
                f"loading. Give a checkpoint with quant_method {flag!r}, or --quantization {', '.join(online)}."
            )
        return None
    method = config.get("quant_method", "unknown") if isinstance(config, dict) else config
    if method == "unknown" and _is_mlx(config):
        raise _of_another_tool(directory, "MLX", CONFIG, config, methods)
    if flag is not None and flag != method:
        raise ConfigError(
            f"--quantization {flag}: {directory} is quantised already, with quant_method {method!r}. "
            f"Leave the flag out, or give the unquantised checkpoint."
        )
    if method not in methods:
        raise CheckpointError(
            f"{directory} is quantised (quant_method={method!r}), which is not supported: weights are read in "
            f"{_READ}{', '.join(methods)}. Give the unquantised checkpoint."
        )
    try:
        if (check := CHECKS.get(method)) is not None and isinstance(config, dict):
            check(config)
    except CheckpointError as error:
        raise CheckpointError(f"{directory / CONFIG}: quantization_config: {error}") from None
    except (TypeError, ValueError, KeyError, AttributeError) as error:  # other tools write other types
        raise CheckpointError(f"{directory / CONFIG}: quantization_config: {error!r}.") from None
    return str(method)


_READ = "bfloat16, float16, float32 and "


def _is_mlx(config: Any) -> bool:
    return isinstance(config, dict) and {"group_size", "bits"} <= config.keys()


def _check_other_tools(raw: Mapping[str, Any], directory: Path, methods: tuple[str, ...]) -> None:
    """Refuse quantisation that is declared elsewhere than in quantization_config."""
    if _is_mlx(raw.get("quantization")):
        raise _of_another_tool(directory, "MLX", CONFIG, raw["quantization"], methods)
    for name, tool in ((MODELOPT_CONFIG, "ModelOpt"), (OLD_GPTQ_CONFIG, "GPTQ")):
        if (directory / name).is_file():
            found = read_object(directory / name)
            found = found if isinstance(found, dict) else {}
            inner = found.get("quantization")
            raise _of_another_tool(directory, tool, name, inner if isinstance(inner, dict) else found, methods)


def _of_another_tool(
    directory: Path, tool: str, file: str, config: Mapping[str, Any], methods: tuple[str, ...]
) -> CheckpointError:
    names = ("quant_algo", "kv_cache_quant_algo", "bits", "group_size", "desc_act")
    settings = ", ".join(f"{name}={config[name]!r}" for name in names if config.get(name) is not None)
    return CheckpointError(
        f"{directory} is quantised with {tool} ({file}{': ' if settings else ''}{settings}), and config.json has no "
        f"quantization_config that says how: weights are read in {_READ}{', '.join(methods)}. Give the unquantised "
        "checkpoint or one in these formats."
    )
