"""The catalog: every model, drafter, attention backend and bundled checkpoint, in one place.

Entries are strings, so that reading the catalog imports nothing; :meth:`Registry.load` imports the one
entry that is used. Nothing registers itself at import time: what is listed here is what there is.
Imports types only; anyone may import it.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unisono.types import CheckpointError, ConfigError, UnisonoError


@dataclass(frozen=True)
class Registry:
    """Names of one kind of thing and where each lives: ``"module:attribute"``.

    ``kind`` is how errors call it; ``error`` is what an unknown name raises.
    """

    kind: str
    entries: Mapping[str, str]
    error: type[UnisonoError] = ConfigError

    @property
    def names(self) -> tuple[str, ...]:
        """The supported names, sorted."""
        return tuple(sorted(self.entries))

    def __contains__(self, name: object) -> bool:
        return name in self.entries

    def load(self, name: str) -> Any:
        """Import entry ``name`` and return its attribute. Raises ``error`` listing what is supported."""
        if name not in self.entries:
            raise self.error(f"Unknown {self.kind} {name!r}. Supported: {', '.join(self.names)}.")
        module, _, attribute = self.entries[name].partition(":")
        return getattr(importlib.import_module(module), attribute)


models = Registry(
    "model architecture",
    {
        "LlamaForCausalLM": "unisono.models.llama:LLAMA",
        "MistralForCausalLM": "unisono.models.mistral:MISTRAL",
        "Qwen2ForCausalLM": "unisono.models.qwen2:QWEN2",
        "Qwen3ForCausalLM": "unisono.models.qwen3:QWEN3",
    },
    error=CheckpointError,
)
"""By ``architectures[0]`` of config.json; each entry is a ``models.config.Family``."""

drafters = Registry("drafter", {"none": "unisono.drafters.none:NoDrafter"})

attention = Registry("attention backend", {"triton": "unisono.attention.triton:TritonAttention"})

bundled: Mapping[str, Path] = {"tiny": Path(__file__).parent / "bundled" / "tiny"}
"""Checkpoints inside the package, by the name that stands wherever a PATH may."""


def bundled_path(name: str) -> Path:
    """The directory of bundled checkpoint ``name``. Raises CheckpointError listing the bundled names."""
    if name not in bundled:
        raise CheckpointError(f"Unknown bundled checkpoint {name!r}. Bundled: {', '.join(bundled)}.")
    return bundled[name]


def resolve_name(path: str | Path) -> Path:
    """A PATH as users give it: a bundled name gives its directory, anything else is a path.

    A bundled name wins over a directory of the same name; write ``./tiny`` for the directory.
    """
    return bundled[path] if isinstance(path, str) and path in bundled else Path(path).expanduser()
