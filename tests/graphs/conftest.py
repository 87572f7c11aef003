"""The engine tests' checkpoints, here too."""

from tests.engine.conftest import checkpoints, checkpoints_of, qwen3

__all__ = ["checkpoints", "checkpoints_of", "qwen3"]
