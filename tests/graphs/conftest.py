"""The engine tests' checkpoints, here too."""

from tests.engine.conftest import checkpoints, qwen3

__all__ = ["checkpoints", "qwen3"]
