"""Drafter tests run on the engine tests' checkpoints."""

from tests.engine.conftest import checkpoints, qwen3

__all__ = ["checkpoints", "qwen3"]
