"""Configuration: EngineConfig and its resolution, checkpoints by path or hub id, checks before anything is loaded."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from unisono.config.engine import (
        GRAPH_PROGRAMS,
        CheckpointFacts,
        Decision,
        EngineConfig,
        Hardware,
        ResolvedConfig,
        parse_graphs,
        resolve,
    )

__all__ = [
    "GRAPH_PROGRAMS",
    "CheckpointFacts",
    "Decision",
    "EngineConfig",
    "Hardware",
    "ResolvedConfig",
    "parse_graphs",
    "resolve",
]


def __getattr__(name: str) -> Any:
    """Import ``engine`` on first use: ``unisono.config.env`` is read before anything else is imported."""
    if name not in __all__:
        raise AttributeError(f"module 'unisono.config' has no attribute {name!r}")
    from unisono.config import engine

    return getattr(engine, name)
