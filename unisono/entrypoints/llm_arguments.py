"""Mapping from ``LLM``'s keywords to the fields of ``EngineConfig``: our names, vLLM's, and SGLang's
(``flag_table``).
"""

from __future__ import annotations

import dataclasses
import functools
import json
import types
import typing
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from unisono.config import EngineConfig
from unisono.config.flag_aliases import (
    ACCEPTED,
    ALGORITHMS,
    QUANTIZATIONS,
    RENAMED,
    SWITCHES,
    attention_backend,
    check_accepted,
    nearest,
    refuse,
)
from unisono.config.flag_effects import NOTED_SWITCHES, NOTED_VALUES, REFUSED
from unisono.config.preflight.model import read_overrides, with_method
from unisono.types import ConfigError, SpeculativeConfig
from unisono.types.lora import read_modules

FIELDS = {one.name for one in dataclasses.fields(EngineConfig)} - {"model"}

MEDIA = {
    "allowed_media_domains", "allowed_local_media_path", "limit_mm_per_prompt", "mm_processor_kwargs",
    "media_io_kwargs", "media_max_mb", "media_max_pixels", "media_max_frames", "media_timeout",
    "mm_processor_cache_gb", "media_processes",
}  # fmt: skip
"""Keywords that limit media: the fields of ``media.settings.MediaSettings``."""

SPECULATIVE = {
    "speculative_method": "method", "speculative_algorithm": "method", "speculative_model": "model",
    "speculative_draft_model_path": "model", "draft_model": "model", "num_speculative_tokens": "num_speculative_tokens",
    "speculative_num_steps": "num_speculative_tokens", "speculative_topk": "topk", "speculative_eagle_topk": "topk",
    "speculative_tree_nodes": "num_draft_tokens", "speculative_num_draft_tokens": "num_draft_tokens",
    "speculative_draft_quantization": "draft_quantization",
}  # fmt: skip
"""Command-line flags that are parts of ``speculative_config`` here, and their names in it."""

SERVER_ONLY = {"served_model_name", "api_key", "host", "port", "log_level"}
"""Keywords of other engines' offline classes that only a server uses; any value is accepted."""


def check_constructor(model: Any, revision: Any, chat_template: Any, progress: Any) -> None:
    """Raise ConfigError for arguments of ``LLM`` of a wrong type that no field of ``EngineConfig`` checks."""
    for name, value, ok, words in (
        ("model", model, isinstance(model, (str, Path)), "a directory, a bundled name or a hub id"),
        ("revision", revision, revision is None or isinstance(revision, str), "a string"),
        ("chat_template", chat_template, chat_template is None or isinstance(chat_template, str), "a Jinja template"),
        ("progress", progress, progress is None or callable(progress), "a function of (stage, share)"),
    ):
        if not ok:
            raise ConfigError(f"{name}={value!r}: give {words}.")


def media_arguments(keywords: dict[str, Any]) -> dict[str, Any]:
    """Remove and return the keywords for media."""
    if keywords.pop("disable_mm_preprocessor_cache", False):
        keywords.setdefault("mm_processor_cache_gb", 0.0)
    names = {name: _name(RENAMED.get(_flag(name), _flag(name))) for name in keywords}
    return {renamed: keywords.pop(name) for name, renamed in names.items() if renamed in MEDIA}


def engine_arguments(keywords: Mapping[str, Any]) -> dict[str, Any]:
    """Return the EngineConfig fields for these keywords. Raises ConfigError naming the keyword."""
    fields: dict[str, Any] = {}
    for name, value in keywords.items():
        renamed = _name(RENAMED.get(_flag(name), _flag(name)))
        if renamed == "lora_modules":
            if value is not None and not isinstance(value, (list, tuple, Mapping)):
                raise ConfigError(f"{name}={value!r}: give a list of 'name=path', or a dict of name to path.")
            value = read_modules(value or ())
        if renamed == "hf_overrides":
            value = read_overrides(name, value or {})
        if renamed == "speculative_config":
            renamed, value = "speculative", _speculative(value)
        if renamed in SERVER_ONLY or _is_neutral(name, value):
            continue
        if (switch := SWITCHES.get(_flag(name))) is not None:
            name_of, equals, preset = switch.partition("=")
            renamed = _name(name_of.replace("--no-", "--"))
            if equals and _is_set(renamed, keywords):
                continue
            value = float(preset) if equals else not switch.startswith("--no-")
        if renamed not in FIELDS:
            raise ConfigError(f"LLM takes no keyword {name}. {_instead(name, keywords)}")
        if renamed in fields:
            raise ConfigError(f"{name}={value!r}: {renamed} is given twice; leave one of them out.")
        fields[renamed] = _plain(renamed, value)
    return fields


def _is_set(field: str, keywords: Mapping[str, Any]) -> bool:
    """True if another keyword sets this field."""
    return any(_name(RENAMED.get(_flag(name), _flag(name))) == field for name in keywords)


def _is_neutral(name: str, value: Any) -> bool:
    """True if this keyword has no effect with this value. Raises ConfigError for an unsupported one."""
    flag = _flag(name)
    flag = long if (long := RENAMED.get(flag)) in ACCEPTED else flag
    known = flag in ACCEPTED or flag in REFUSED or flag in SWITCHES or flag in NOTED_VALUES or flag in NOTED_SWITCHES
    if known and (value is None or value is False or value in ({}, [], ())):
        return True
    if flag in ACCEPTED:
        check_accepted(flag, json.dumps(value) if isinstance(value, Mapping) else str(value), _name)
        return True
    if flag in REFUSED:
        refuse(flag, _name)
    return flag in NOTED_VALUES or flag in NOTED_SWITCHES


def _plain(name: str, value: Any) -> Any:
    """Normalise values of vLLM's callers: a torch.dtype to its name, None to "auto"."""
    if name == "dtype":
        return str(value).removeprefix("torch.")
    if name == "load_format" and value == "safetensors":
        return "auto"
    if name == "attention_backend" and isinstance(value, str):
        return attention_backend(value)
    if name == "quantization" and value in QUANTIZATIONS:
        return QUANTIZATIONS[value]
    if name in ("tokenizer", "generation_config") and isinstance(value, Path):
        return str(value)
    if value is None:
        return next(one.default for one in dataclasses.fields(EngineConfig) if one.name == name)
    for kind, (words, ok) in _KINDS.items():
        if kind in _hints()[name] and not ok(value):
            raise ConfigError(f"{name}={value!r}: give {words}.")
    return value


_KINDS: dict[Any, tuple[str, Callable[[Any], bool]]] = {
    int: ("a whole number", lambda value: isinstance(value, int) and not isinstance(value, bool)),
    float: ("a number", lambda value: isinstance(value, (int, float)) and not isinstance(value, bool)),
    bool: ("True or False", lambda value: isinstance(value, bool)),
    str: ("a string", lambda value: isinstance(value, str)),
}
"""By type: a description of the accepted values, and their check."""


@functools.cache
def _hints() -> dict[str, tuple[Any, ...]]:
    """Return the plain types of each field; none if ``EngineConfig`` checks the values itself."""
    hints = typing.get_type_hints(EngineConfig)
    unions = {name: typing.get_args(hint) for name, hint in hints.items() if isinstance(hint, types.UnionType)}
    return {name: (hint,) if isinstance(hint, type) else () for name, hint in hints.items()} | unions


def _speculative(config: Any) -> SpeculativeConfig | None:
    if config is None or isinstance(config, SpeculativeConfig):
        return config
    try:
        config = json.loads(config) if isinstance(config, str) else config
    except ValueError as error:
        raise ConfigError(f"speculative_config is not valid JSON: {error}.") from None
    if not isinstance(config, Mapping):
        raise ConfigError(f"speculative_config={config!r}: give a dict.")
    return SpeculativeConfig.parse(with_method(config))


def _instead(name: str, keywords: Mapping[str, Any]) -> str:
    """Return the advice about keyword ``name``: the form to write instead."""
    if name not in SPECULATIVE:
        return _nearest(name)
    parts = {SPECULATIVE[key]: value for key, value in keywords.items() if key in SPECULATIVE and value is not None}
    method = parts.get("method")
    if isinstance(method, str):
        parts["method"] = ALGORITHMS.get(method.upper(), method)
    return f"Write speculative_config={ {'method': 'ngram, eagle3, mtp …', **parts} } (docs/guide/speculate.md)."


def _nearest(name: str) -> str:
    tables = (RENAMED, SWITCHES, ACCEPTED)
    known = sorted(FIELDS | MEDIA | {"speculative_config"} | {_name(flag) for table in tables for flag in table})
    near = nearest(name, known)
    return f"{f'The nearest one is {near}; ' if near else ''}docs/guide/offline.md lists all."


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _name(flag: str) -> str:
    return flag.removeprefix("--").replace("-", "_")
