"""The adapters that the server offers: their names, and loading and unloading at run time.

The engine holds the weights (docs/guide/adapters.md); the routes read this registry. Created once by ``serve``.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from unisono.cluster.commands import CommandError
from unisono.cluster.engines import Engines
from unisono.http.errors import ApiError, no_answer, show
from unisono.types import ConfigError, EngineDead

LIMIT = 120.0
"""Timeout of loading an adapter, seconds."""

CONFIG = "adapter_config.json"


@dataclasses.dataclass(frozen=True)
class Adapter:
    """An adapter. path: its directory. created: load time, seconds since 1970."""

    name: str
    path: str
    created: int


class AdapterRegistry:
    """The adapters by name. names: the base model's. allowed: the directory below which adapters may be loaded."""

    def __init__(self, client: Engines | None = None, names: Iterable[str] = (), allowed: Path | None = None):
        self._client, self._names, self._allowed = client, tuple(names), allowed
        self.found: dict[str, Adapter] = {}

    def __contains__(self, name: object) -> bool:
        return name in self.found

    def __iter__(self) -> Iterator[str]:
        return iter(self.found)

    def __len__(self) -> int:
        return len(self.found)

    def take(self, info: Mapping[str, Any]) -> None:
        """Take over the adapters of a started engine. Raises ConfigError if one has the name of the model."""
        entries = info.get("adapters", [])
        self.found = {one["name"]: self._known(one) for one in entries}
        if both := next((name for name in self.found if name in self._names), None):
            raise ConfigError(f"--lora-modules {both}: the base model is called so; give the adapter another name.")

    def _known(self, entries: Mapping[str, Any]) -> Adapter:
        name, path = entries["name"], entries["path"]
        known = self.found.get(name)
        return known if known is not None and known.path == path else Adapter(name, path, int(time.time()))

    def amended(self, config: Any) -> Any:
        """The config for a restart of the engine: with the current adapters whose files still exist."""
        if not getattr(config, "enable_lora", False):
            return config
        there = [(one.name, one.path) for one in self.found.values() if (Path(one.path) / CONFIG).is_file()]
        return dataclasses.replace(config, lora_modules=tuple(there))

    async def load(self, name: str, path: str, again: bool = False) -> Adapter:
        """Load the adapter of a directory. Raises ApiError."""
        where = self._checked(path)
        if name in self._names:
            raise ApiError(
                400, f"lora_name={show(name)} is what the base model is called; give another.", param="lora_name"
            )
        if name in self.found and not again:
            message = (
                f"The lora adapter {show(name)} has already been loaded. If you want to load the adapter in place, "
                "set 'load_inplace' to True."
            )
            raise ApiError(400, message, param="lora_name", code="adapter_loaded")
        await self._call("load_adapter", name=name, directory=str(where), again=again)
        self.found[name] = Adapter(name, str(where), int(time.time()))
        return self.found[name]

    async def unload(self, name: str) -> None:
        """Remove an adapter; running answers finish with it. Raises ApiError."""
        if name not in self.found:
            message = f"The lora adapter {show(name)} cannot be found."
            raise ApiError(404, message, "not_found_error", param="lora_name", code="model_not_found")
        del self.found[name]  # from here on requests for it are refused
        await self._call("unload_adapter", name=name)

    def _checked(self, path: str) -> Path:
        """The directory in a request. Raises ApiError if the flags do not allow it."""
        if self._allowed is None:
            message = "Adapters are loaded at start only; start with --allowed-lora-path DIR to load others from there."
            raise ApiError(403, message, "permission_error", param="lora_path", code="adapters_fixed")
        allowed = self._allowed.resolve()
        try:
            where = (allowed / Path(path).expanduser()).resolve()
        except (OSError, RuntimeError, ValueError) as error:
            raise ApiError(400, f"lora_path={show(path)} is not a path: {error}.", param="lora_path") from None
        if not where.is_relative_to(allowed):
            message = f"lora_path={show(path)} is not below --allowed-lora-path {allowed}."
            raise ApiError(403, message, "permission_error", param="lora_path", code="path_not_allowed")
        return where

    async def _call(self, command: str, **arguments: Any) -> Any:
        assert self._client is not None
        try:
            return await self._client.call(command, LIMIT, **arguments)
        except CommandError as error:
            raise ApiError(400, str(error), param="lora_path", code="adapter_refused") from None
        except (EngineDead, TimeoutError) as error:
            raise no_answer(error) from None
