"""Random checkpoints, made once per session."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.models.make import FAMILIES, make_checkpoint


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("checkpoints")
    return {family: make_checkpoint(root / family, family) for family in FAMILIES}


@pytest.fixture(scope="session")
def qwen3(checkpoints: dict[str, Path]) -> Path:
    return checkpoints["qwen3"]
