"""Architectures that are refused with the block that is missing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from unisono.config import catalog
from unisono.config.preflight.missing import MISSING
from unisono.config.preflight.model import check_config
from unisono.types import CheckpointError


def test_missing_architectures_are_not_in_the_catalog() -> None:
    assert not MISSING.keys() & {*catalog.models.names}


def test_the_documentation_lists_each_with_its_block() -> None:
    rows = (Path(__file__).parents[2] / "docs" / "reference" / "models.md").read_text().splitlines()
    for architecture, block in MISSING.items():
        assert any(f"`{architecture}`" in row and row.endswith(f"| {block} |") for row in rows), architecture


@pytest.mark.parametrize(("architecture", "block"), MISSING.items())
def test_the_refusal_names_the_block(architecture: str, block: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": [architecture], "model_type": "other"}))
    with pytest.raises(CheckpointError, match=f"'{architecture}' is not supported: missing is ") as refusal:
        check_config(tmp_path, None, None)
    assert block in str(refusal.value)
    assert "Supported: " in str(refusal.value)
