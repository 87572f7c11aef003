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


@pytest.mark.parametrize(("architecture", "block"), MISSING.items())
def test_the_refusal_names_the_block(architecture: str, block: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": [architecture], "model_type": "other"}))
    with pytest.raises(CheckpointError, match=f"'{architecture}' is not supported: missing is ") as refusal:
        check_config(tmp_path, None, None)
    assert block in str(refusal.value)
    assert "Supported: " in str(refusal.value)
