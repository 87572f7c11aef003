"""The adapters that the server serves: their names, and loading and unloading them while it runs.

The engine holds them (docs/adapters.md); this is what the routes know of them. Made once by ``run``.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from unisono.cluster.commands import CommandError
from unisono.cluster.engines import Engines
from unisono.http.errors import ApiError, show, unavailable
from unisono.types import ConfigError, EngineDead

LIMIT = 120.0
"""Seconds that reading an adapter may take."""

CONFIG = "adapter_config.json"


@dataclasses.dataclass(frozen=True)
class Adapter:
    """path: its directory. created: when it was loaded, in seconds since 1970."""

    name: str
    path: str
    created: int


class Adapters:
    """The adapters by name. names: what the base model is called. allowed: below which adapters may be loaded."""

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
        """The engine has started and has these. Raises ConfigError where one is called like the model."""
        told = info.get("adapters", [])
        self.found = {one["name"]: self._known(one) for one in told}
        if both := next((name for name in self.found if name in self._names), None):
            raise ConfigError(f"--lora-modules {both}: the base model is called so; give the adapter another name.")

    def _known(self, told: Mapping[str, Any]) -> Adapter:
        name, path = told["name"], told["path"]
        known = self.found.get(name)
        return known if known is not None and known.path == path else Adapter(name, path, int(time.time()))

    def amended(self, config: Any) -> Any:
        """The config of an engine that is started again: with the adapters that are served now and still there."""
        if not getattr(config, "enable_lora", False):
            return config
        there = [(one.name, one.path) for one in self.found.values() if (Path(one.path) / CONFIG).is_file()]
        return dataclasses.replace(config, lora_modules=tuple(there))

    async def load(self, name: str, path: str, again: bool = False) -> Adapter:
        """Serve the adapter of a directory. Raises ApiError."""
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
        """Serve an adapter no longer; answers under way are finished with it. Raises ApiError."""
        if name not in self.found:
            message = f"The lora adapter {show(name)} cannot be found."
            raise ApiError(404, message, "not_found_error", param="lora_name", code="model_not_found")
        del self.found[name]  # from here on no request is taken
        await self._call("unload_adapter", name=name)

    def _checked(self, path: str) -> Path:
        """The directory that a request names. Raises ApiError where the flags do not allow it."""
        if self._allowed is None:
            message = "Adapters are loaded at start only; start with --allowed-lora-path DIR to load others from there."
            raise ApiError(403, message, "permission_error", param="lora_path", code="adapters_fixed")
        allowed = self._allowed.resolve()
        try:
            where = (allowed / Path(path).expanduser()).resolve()
        except (OSError, RuntimeError, ValueError) as error:
            raise ApiError(400, f"lora_path={show(path)} is no path: {error}.", param="lora_path") from None
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
            raise unavailable(f"The engine does not answer: {error or 'it is busy'}.", "engine_unavailable") from None
