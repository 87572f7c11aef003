"""Adapters (LoRA) as callers name them: vLLM's ``LoRARequest``, and the values of ``--lora-modules``."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from unisono.types.errors import BadRequest, ConfigError


@dataclass(frozen=True)
class LoRARequest:
    """``LoRARequest("name", 1, "directory")``: generate with the adapter of this directory.

    It is loaded on first use. lora_int_id: a number from 1 on, unique to the adapter.
    """

    lora_name: str
    lora_int_id: int = 1
    lora_path: str = ""

    def __post_init__(self) -> None:
        if not self.lora_name:
            raise BadRequest("lora_name is empty; give the adapter a name.", "lora_request")
        if isinstance(self.lora_int_id, bool) or not isinstance(self.lora_int_id, int) or self.lora_int_id < 1:
            raise BadRequest(f"lora_int_id={self.lora_int_id!r}: give a whole number from 1 on.", "lora_request")
        if not str(self.lora_path):
            raise BadRequest("lora_path is empty; give the adapter's directory.", "lora_request")


def one_each(modules: object, count: int) -> list[LoRARequest | None]:
    """The adapter of each of ``count`` prompts: one for all of them, or a list. Raises BadRequest."""
    each = [modules] * count if modules is None or isinstance(modules, LoRARequest) else modules
    if not isinstance(each, list | tuple) or not all(one is None or isinstance(one, LoRARequest) for one in each):
        kind = type(modules).__name__
        raise BadRequest(f"lora_request is a {kind}; give a LoRARequest, or a list with one for each.", "lora_request")
    if len(each) != count:
        raise BadRequest(f"{len(each)} lora_requests for {count} prompts; give one each.", "lora_request")
    return list(each)


def read_modules(modules: Sequence[Any] | Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    """(name, directory) of each value of ``--lora-modules``: ``name=path``, or JSON with name and path, or a list.

    ``base_model_name`` in JSON is ignored. Raises ConfigError.
    """
    if isinstance(modules, Mapping):
        return tuple((str(name), str(path)) for name, path in modules.items())
    found: list[tuple[str, str]] = []
    for value in modules:
        if isinstance(value, str) and value.lstrip().startswith(("{", "[")):
            try:
                value = json.loads(value)
            except ValueError as error:
                raise ConfigError(f"--lora-modules {value[:80]}: not valid JSON: {error}.") from None
        for one in value if isinstance(value, list) else [value]:
            found.append(_module(one))
    return tuple(found)


def _module(value: Any) -> tuple[str, str]:
    if isinstance(value, (tuple, list)) and len(value) == 2:
        name, path = value
    elif isinstance(value, Mapping):
        if unknown := sorted(value.keys() - {"name", "path", "base_model_name"}):
            raise ConfigError(f"--lora-modules: {unknown} is unknown; give name and path.")
        name, path = value.get("name"), value.get("path")
    else:
        name, _, path = str(value).partition("=")
    if not (isinstance(name, str) and isinstance(path, str) and name and path):
        raise ConfigError(f'--lora-modules {str(value)[:80]}: give name=path, or {{"name": …, "path": …}}.')
    return name, path
