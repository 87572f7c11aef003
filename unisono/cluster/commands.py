"""Operators' commands in the engine process, run between two steps.

:class:`OperatorCommands` is made once by the engine process. A command that fails raises CommandError and changes
nothing.
"""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from unisono.types import UnisonoError


class CommandError(Exception):
    """A command cannot run now."""


class CommandTarget(Protocol):
    """Engine interface that commands use."""

    def reset_prefix_cache(self) -> int: ...
    def update_weights(self, directory: str, draft_directory: str, version: str | None) -> dict[str, Any]: ...
    def command(self, command: str, arguments: Mapping[str, Any]) -> Any: ...


class OperatorCommands:
    """Commands by name; other names are features' commands (``Engine.command``)."""

    def __init__(self, engine: CommandTarget) -> None:
        self._engine = engine
        self._profiler: Any = None
        self._directory = Path()
        self._by_name: Mapping[str, Callable[..., Any]] = {
            "reset_prefix_cache": self.reset_prefix_cache,
            "update_weights": self.update_weights,
            "free_memory": self.free_memory,
            "start_profile": self.start_profile,
            "stop_profile": self.stop_profile,
        }

    def run(self, name: str, arguments: Mapping[str, Any]) -> Any:
        """Return the result of a command, JSON-ready. Raises CommandError."""
        try:
            if name not in self._by_name:
                return self._engine.command(name, arguments)
            return self._by_name[name](**arguments)
        except UnisonoError as error:
            raise CommandError(str(error)) from None
        except (
            Exception
        ) as error:  # for example a full disk, a profiler that CUPTI refuses, a file that is not an adapter
            raise CommandError(f"{name} failed: {' '.join(str(error).split())}") from error

    def reset_prefix_cache(self) -> int:
        """Forget every cached prefix that no request uses; returns the pages freed."""
        return self._engine.reset_prefix_cache()

    def update_weights(self, directory: str, draft_directory: str, version: str | None) -> dict[str, Any]:
        """See ``Engine.update_weights``."""
        return self._engine.update_weights(directory, draft_directory, version)

    def free_memory(self) -> int:
        """Return unused memory of the allocator to the device; returns the bytes."""
        import torch

        gc.collect()
        if not torch.cuda.is_initialized():
            return 0
        before = torch.cuda.memory_reserved()
        torch.cuda.empty_cache()
        return before - torch.cuda.memory_reserved()

    def start_profile(self, directory: str) -> None:
        """Begin to record the engine's work, for :meth:`stop_profile` to write into ``directory``."""
        if self._profiler is not None:
            raise CommandError("A profile is being recorded; POST /stop_profile first.")
        from torch import profiler

        self._directory = Path(directory)
        self._directory.mkdir(parents=True, exist_ok=True)
        recording = profiler.profile(activities=list(profiler.supported_activities()))
        recording.start()
        self._profiler = recording

    def stop_profile(self) -> str:
        """Write the record as a Chrome trace; returns its path."""
        recording, self._profiler = self._profiler, None
        if recording is None:
            raise CommandError("No profile is being recorded; POST /start_profile first.")
        recording.stop()
        path = self._directory / f"unisono-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}.json.gz"
        recording.export_chrome_trace(str(path))
        return str(path)
