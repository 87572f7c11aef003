"""Configurations that are kept say what transformers says, of every family, and spare its import."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoConfig

from tests.models.fields import FAMILIES, HYBRIDS, SEEING
from tests.models.make import make_checkpoint
from unisono.config import catalog
from unisono.models.load.checkpoint import Checkpoint
from unisono.models.load.stored_config import StoredConfig, stored_config

TRANSFORMERS = {"llama", "gpt_oss", "gemma3_text", "gemma4_text", "gemma4_unified_text", "deepseek_v3", "mistral4"}
"""Families of these tests with scaled positions, or with fields that differ by layer."""

SHAPES = sorted(Path(__file__).parents[2].glob("benchmarks/shapes/*/config.json"))


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("UNISONO_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "configs"


@pytest.mark.parametrize("family", [*FAMILIES, *HYBRIDS, *SEEING])
def test_a_kept_configuration_is_read_as_the_first(family: str, tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path / "model", family)
    first, second = Checkpoint.open(path), Checkpoint.open(path)
    assert not isinstance(first.config.hf_config, StoredConfig)
    assert isinstance(second.config.hf_config, StoredConfig) == (family not in TRANSFORMERS)
    assert second.config == first.config
    assert (second.eos_token_ids, second.dtype) == (first.eos_token_ids, first.dtype)
    assert second.config.hf_config.name_or_path == str(path)


@pytest.mark.parametrize("file", SHAPES, ids=lambda file: file.parent.name)
def test_published_shapes(file: Path) -> None:
    """A family reads the same from a stored config of a target. Nothing is stored if positions are scaled."""
    raw = json.loads(file.read_text())
    if raw.get("architectures", [""])[0] not in catalog.models:
        pytest.skip("a draft head")
    first, second = Checkpoint.open(file.parent), Checkpoint.open(file.parent)
    assert second.config == first.config
    scaled = {'"yarn"', '"proportional"'}
    assert isinstance(second.config.hf_config, StoredConfig) == (not any(kind in file.read_text() for kind in scaled))


def test_another_file_and_a_damaged_one_are_read_by_transformers(cache: Path) -> None:
    def read(size: int) -> object:
        return stored_config(b"%d" % size, "here", lambda: AutoConfig.for_model("llama", hidden_size=size))

    assert read(64).hidden_size == read(64).hidden_size == 64
    assert read(32).hidden_size == 32
    assert isinstance(read(32), StoredConfig)
    for damage in ("", "{", "[]", '{"config": []}', '{"a": 1, "b": 2}', "7"):
        for file in cache.iterdir():
            file.write_text(damage)
        assert read(64).hidden_size == 64
        assert read(64).hidden_size == 64
    assert len(list(cache.iterdir())) == 2, "files that were being written are left"


def test_a_folder_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("UNISONO_CACHE", str(tmp_path / "file"))
    assert stored_config(b"", "", lambda: AutoConfig.for_model("llama", hidden_size=64)).hidden_size == 64


def test_scaled_positions_are_not_kept(cache: Path) -> None:
    scaled = {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}
    for _ in range(2):
        read = stored_config(b"", "", lambda: AutoConfig.for_model("llama", rope_parameters=scaled))
        assert not isinstance(read, StoredConfig)
    assert not cache.exists()


def test_a_second_start_imports_no_transformers() -> None:
    """With a draft head, whose layer is read by a family too."""
    code = """
import sys
from unisono.models.load.checkpoint import Checkpoint
from unisono.drafters.eagle.checkpoint import open_eagle3
target = Checkpoint.open("tiny")
open_eagle3("tiny-eagle3", target.config)
print("transformers" in sys.modules)
"""
    found = [
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120).stdout
        for _ in range(2)
    ]
    assert [each.split()[-1] for each in found] == ["True", "False"]
