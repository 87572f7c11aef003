"""Configuration: EngineConfig and its resolution, checkpoints by path or hub id, checks before anything is loaded."""

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
