"""Random checkpoints, made once per session."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.engine.helpers import lazy_engine, tokens
from tests.engine.matrix import DRAFTERS, PARAMS, PROMPTS
from tests.models.fields import FAMILIES
from tests.models.make import make_checkpoint


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("checkpoints")
    return {family: make_checkpoint(root / family, family) for family in FAMILIES}


@pytest.fixture(scope="session")
def qwen3(checkpoints: dict[str, Path]) -> Path:
    return checkpoints["qwen3"]


@pytest.fixture(scope="session")
def checkpoints_of(
    checkpoints: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], tuple[Path, Path | None]]:
    """Method -> (target, draft checkpoint), made once per session."""
    return functools.cache(lambda method: DRAFTERS[method](checkpoints, tmp_path_factory.mktemp(method)))


@pytest.fixture(scope="session")
def plain() -> Callable[..., list[list[int]]]:
    """(target, count) -> the token ids of the matrix's first requests without speculation, by default of all."""

    @functools.cache
    def run(target: Path, count: int = len(PROMPTS)) -> list[list[int]]:
        with lazy_engine(target, enforce_eager=True) as llm:
            return tokens(llm, PROMPTS[:count], PARAMS[:count])

    return run
