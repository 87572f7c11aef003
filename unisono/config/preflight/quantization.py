"""Rules of ``quantization_config``: the supported schemes, decided from config.json alone.

The readers of weight formats (``layers/formats/``) call the same functions before they build a format, so that the
early check and the loader refuse the same configs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from unisono.config.checkpoint_files import CONFIG, MODELOPT_CONFIG, OLD_GPTQ_CONFIG, read_object
from unisono.config.gguf.directory import source as gguf_source
from unisono.config.gguf.packed import METHOD as GGUF
from unisono.config.preflight.compressed import check_compressed
from unisono.config.preflight.quantization_rules import BLOCK, INT_GROUPS, require
from unisono.types import CheckpointError, ConfigError

# ---- methods ----------------------------------------------------------------------------------------


def check_fp8(config: Mapping[str, Any]) -> None:
    """Check quant_method "fp8": e4m3 with blocks of 128 x 128, or one scale per projection."""
    block = config.get("weight_block_size")
    require(
        "fp8",
        config,
        {"fmt": ("e4m3", "float8_e4m3fn"), "scale_fmt": ("float", None, "ue8m0"), "expert_dtype": ("fp8",)},
    )
    require("fp8", config, {"weight_block_size": (None, [BLOCK, BLOCK]), "modules_to_convert": (None, [])})
    require("fp8", config, {"activation_scheme": ("dynamic",) if block else ("dynamic", "static")})


def check_awq(config: Mapping[str, Any]) -> None:
    """Check quant_method "awq": 4 bits, the gemm version, with zeros."""
    require("awq", config, {"bits": (4,), "version": ("gemm", "GEMM"), "zero_point": (True,)})
    require("awq", config, {"group_size": (128, *INT_GROUPS)})


def check_gptq(config: Mapping[str, Any]) -> None:
    """Check quant_method "gptq": 4 or 8 bits; of dynamic rules those that exclude modules."""
    versions = ("gptq", "gptq_v2")
    require(
        "gptq", config, {"bits": (4, 8), "desc_act": (False, True), "checkpoint_format": versions, "lm_head": (False,)}
    )
    require("gptq", config, {"group_size": (128, *INT_GROUPS)})
    own = [rule for rule in config.get("dynamic") or () if not rule.startswith("-:")]
    if own:
        raise CheckpointError(f"quant_method 'gptq' with dynamic={own[0]!r}: supported are rules that begin with '-:'.")


def check_modelopt(config: Mapping[str, Any]) -> None:
    """Check quant_method "modelopt": fp8 by projection or output, NVFP4 by groups of 16, or one of them by module."""
    algorithms = ("FP8", "FP8_PER_CHANNEL_PER_TOKEN", "NVFP4")
    require("modelopt", {"quant_algo": None, **config}, {"quant_algo": (*algorithms, "MIXED_PRECISION")})
    if config["quant_algo"] == "MIXED_PRECISION":
        layers = config.get("quantized_layers")
        if not isinstance(layers, dict) or not all(isinstance(each, dict) for each in layers.values()):
            raise CheckpointError(
                f"quant_method 'modelopt' with quant_algo='MIXED_PRECISION' and quantized_layers={layers!r}: it must "
                "name the quant_algo of each module."
            )
        for each in layers.values():
            require("modelopt", {"quant_algo": None, **each}, {"quant_algo": algorithms})
            if each["quant_algo"] == "NVFP4":
                require("modelopt", each, {"group_size": (16,)})
    if config["quant_algo"] == "NVFP4":
        require("modelopt", config, {"group_size": (16,)})
    require("modelopt", config, {"has_zero_point": (None, False), "pre_quant_scale": (None, False)})


def check_fbgemm(config: Mapping[str, Any]) -> None:
    """Check quant_method "fbgemm_fp8": a bound of activations above 0."""
    bound = config.get("activation_scale_ub")
    if not isinstance(bound, (int, float)) or isinstance(bound, bool) or not bound > 0:
        raise CheckpointError(f"quant_method 'fbgemm_fp8' with activation_scale_ub={bound!r}: it must be above 0.")


def check_auto_round(config: Mapping[str, Any]) -> None:
    """Check quant_method "auto-round": GPTQ's packing with 4 or 8 bits, AWQ's with 4; modules of 16 bits stay plain."""
    packings = ("auto_round:auto_gptq", "auto_round:auto_awq", "auto_gptq", "auto_awq")
    require("auto-round", {"packing_format": None, **config}, {"packing_format": packings})
    bits = (4,) if config["packing_format"].endswith("awq") else (4, 8)
    require("auto-round", config, {"bits": bits})
    require("auto-round", config, {"data_type": ("int",), "group_size": (128, *INT_GROUPS)})
    require("auto-round", config, {"act_bits": (16, None)})
    for module, own in (config.get("extra_config") or {}).items():
        if own.get("bits", 16) < 16:
            raise CheckpointError(
                f"quant_method 'auto-round' with extra_config[{module!r}]={own!r}: supported is bits=16."
            )


def check_gguf(config: Mapping[str, Any]) -> None:
    """Refuse quant_method "gguf" in config.json: the types of weights are in a GGUF file."""
    raise CheckpointError("quant_method 'gguf': weights in GGUF are read from a GGUF file: give the file.")


CHECKS: Mapping[str, Callable[[Mapping[str, Any]], None]] = {
    "auto-round": check_auto_round,
    "awq": check_awq,
    "compressed-tensors": check_compressed,
    "fbgemm_fp8": check_fbgemm,
    "fp8": check_fp8,
    "gguf": check_gguf,
    "gptq": check_gptq,
    "modelopt": check_modelopt,
}
"""By quant_method; a method of the catalog without an entry has no rules."""

# ---- a checkpoint's method --------------------------------------------------------------------------


def quantization_config(raw: Mapping[str, Any]) -> Any:
    """The quantization_config of a config.json or of its text_config; None without one."""
    of_text = raw.get("text_config")
    inner = of_text.get("quantization_config") if isinstance(of_text, dict) else None
    return raw.get("quantization_config") or raw.get("compression_config") or inner


def stored_quantization(raw: Mapping[str, Any], directory: Path) -> Any:
    """:func:`quantization_config`, or that of ModelOpt's side file in the same form."""
    found = quantization_config(raw)
    if not found and (directory / MODELOPT_CONFIG).is_file():
        side = read_object(directory / MODELOPT_CONFIG)
        inner = side.get("quantization") if isinstance(side, dict) else None
        if isinstance(inner, dict) and inner.get("quant_algo"):
            return {**inner, "quant_method": "modelopt"}
    return found


WAYS_OUT = {
    "bitsandbytes": "its weights are quantised anew at each load: give the unquantised checkpoint, with --quantization "
    "fp8 to take half the memory",
    "torchao": "it stores tensors as Python objects: give the unquantised checkpoint, or one in compressed-tensors",
    "hqq": "give the unquantised checkpoint, or one in GPTQ, AWQ or compressed-tensors",
    "quanto": "give the unquantised checkpoint, or one in compressed-tensors",
    "aqlm": "give the unquantised checkpoint, or one in GPTQ, AWQ or compressed-tensors",
    "eetq": "give the unquantised checkpoint, or one in compressed-tensors with int8 weights",
    "quark": "give the unquantised checkpoint, or one in compressed-tensors or ModelOpt",
}
"""Advice for known methods that are not read."""


def quantization_method(
    raw: Mapping[str, Any], directory: Path, flag: str | None, methods: tuple[str, ...], online: tuple[str, ...]
) -> str | None:
    """The method in which a checkpoint's weights are stored; None for plain weights.

    raw: config.json. flag: ``--quantization``. methods: the supported ones. online: those that quantise a plain
    checkpoint while loading. Raises CheckpointError for a quantization that is not supported, ConfigError for a flag
    that the checkpoint contradicts.
    """
    config = stored_quantization(raw, directory)
    if flag is not None and flag not in methods:
        raise ConfigError(f"--quantization {flag!r} is unknown; choose one of {', '.join(methods)}.")
    if flag == GGUF:
        if gguf_source(directory) is None:
            raise ConfigError(f"--quantization gguf: {directory} is not made from a GGUF file. Give such a file.")
        return flag
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
            f"{_READ}{', '.join(methods)}. {_sentence(WAYS_OUT.get(str(method), 'give the unquantised checkpoint'))}"
        )
    try:
        if (check := CHECKS.get(method)) is not None and isinstance(config, dict):
            check(config)
    except CheckpointError as error:
        raise CheckpointError(f"{directory / CONFIG}: quantization_config: {error}") from None
    except (TypeError, ValueError, KeyError, AttributeError) as error:  # other tools write other types
        raise CheckpointError(f"{directory / CONFIG}: quantization_config: {error!r}.") from None
    return str(method)


def _sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}."


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
