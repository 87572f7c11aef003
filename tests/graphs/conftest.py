"""The engine tests' checkpoints, here too."""

from tests.engine.conftest import checkpoints  # noqa: F401
