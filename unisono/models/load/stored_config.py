"""Cache of transformers' parsed configs as JSON, so that later starts need not import transformers.

The import takes 2 to 5 seconds, mostly for libraries that a configuration does not use. The parsed config depends only
on the file's bytes and on transformers' version, so these are the key of the file in ``$UNISONO_CACHE/configs`` (by
default ``~/.cache/unisono``). A missing, damaged or unwritable file is not an error: transformers reads the
configuration. It also does if positions are scaled, because its functions need its own objects, and if fields differ by
layer. Called by ``models/load/checkpoint.py`` and ``drafters/eagle/checkpoint.py``.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import os
import tempfile
from collections.abc import Callable
from contextlib import nullcontext, suppress
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from unisono.config import env

FORMAT = 1
"""Version of the files. Change it with their contents."""

TROUBLE = (OSError, RuntimeError, ValueError, TypeError, KeyError, AttributeError)
"""Errors of the cache that are ignored: transformers reads the config, or nothing is stored."""

DTYPES = {str(dtype): dtype for dtype in (torch.float32, torch.float16, torch.bfloat16)}


class StoredConfig(SimpleNamespace):
    """A configuration's public attributes by name; nested configurations are StoredConfigs too."""

    def get_text_config(self) -> StoredConfig:
        """Configuration of the text model: a part, or the whole."""
        return getattr(self, self._text) if self._text else self


class _Unstorable(ValueError):
    """A value that JSON would not restore."""


def stored_config(source: bytes, name_or_path: str, read: Callable[[], Any]) -> Any:
    """Result of ``read``, a transformers configuration, or a :class:`StoredConfig` with its attributes.

    source: the bytes that ``read`` depends on, besides transformers' version. name_or_path: of the configuration.
    """
    key = hashlib.sha256(b"\n".join((version("transformers").encode(), b"%d" % FORMAT, source))).hexdigest()
    with suppress(*TROUBLE):
        found = _decoded(json.loads((env.cache_directory() / "configs" / f"{key}.json").read_text()))
        if isinstance(found, StoredConfig):
            found.name_or_path = name_or_path
            return found
    config = read()
    with suppress(*TROUBLE):
        text = config.get_text_config()
        if not _scales_positions(text) and not hasattr(text, "per_layer_config"):
            _write(env.cache_directory() / "configs" / f"{key}.json", json.dumps(_encoded(config)))
    return config


def _write(file: Path, text: str) -> None:
    """Write a file atomically, so that readers see all of it or nothing."""
    file.parent.mkdir(parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(dir=file.parent)
    try:
        with os.fdopen(descriptor, "w") as out:
            out.write(text)
        os.replace(name, file)
    except OSError:
        os.unlink(name)
        raise


def _scales_positions(text: Any) -> bool:
    """True if transformers' functions compute a text model's rotary tables."""
    parameters = getattr(text, "rope_parameters", None) or {}
    kinds = [parameters, *(each for each in parameters.values() if isinstance(each, dict))]
    return any(each.get("rope_type", "default") != "default" for each in kinds)


def _encoded(value: Any) -> Any:
    """A value as JSON for :func:`_decoded`. Raises _Unstorable."""
    from transformers import PretrainedConfig

    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, list):
        return [_encoded(each) for each in value]
    if isinstance(value, tuple):
        return {"tuple": [_encoded(each) for each in value]}
    if isinstance(value, (set, frozenset)):
        return {"set": [_encoded(each) for each in sorted(value)]}
    if isinstance(value, dict):
        return {"dict": [[_encoded(key), _encoded(each)] for key, each in value.items()]}
    if str(value) in DTYPES:
        return {"dtype": str(value)}
    if isinstance(value, PretrainedConfig):
        return {"config": _encoded_config(value)}
    raise _Unstorable(repr(value))


def _encoded_config(config: Any) -> dict[str, Any]:
    text, names = config.get_text_config(), {*vars(config), *dir(type(config)), *config.attribute_map}
    values = {name: getattr(config, name) for name in sorted(names) if _is_public(config, name)}
    of_text = [name for name, value in values.items() if value is text]
    if text is not config and not of_text:
        raise _Unstorable("the text model's configuration")
    encoded = {"_text": "" if text is config else of_text[0]}
    for name, value in values.items():
        with nullcontext() if name in vars(config) else suppress(_Unstorable):  # a class attribute may be unstorable
            encoded[name] = _encoded(value)
    return encoded


def _is_public(config: Any, name: str) -> bool:
    """True if this is an attribute of a configuration, or an alias of one; not a method or a property."""
    if name.startswith("_") or isinstance(inspect.getattr_static(type(config), name, None), property):
        return False
    return hasattr(config, name) and not callable(getattr(config, name))


def _decoded(value: Any) -> Any:
    if isinstance(value, list):
        return [_decoded(each) for each in value]
    if not isinstance(value, dict):
        return value
    ((kind, held),) = value.items()
    if kind == "tuple":
        return tuple(_decoded(each) for each in held)
    if kind == "set":
        return set(_decoded(held))
    if kind == "dict":
        return {_decoded(key): _decoded(each) for key, each in held}
    if kind == "dtype":
        return DTYPES[held]
    return StoredConfig(**{name: _decoded(each) for name, each in held.items()})
