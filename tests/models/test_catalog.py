"""The catalog names what exists, and says so when asked for what does not."""

from __future__ import annotations

from pathlib import Path

import pytest

from unisono.config import catalog
from unisono.models.config import Family
from unisono.types import CheckpointError, ConfigError


@pytest.mark.parametrize("name", catalog.models.names)
def test_every_model_loads(name):
    assert isinstance(catalog.models.load(name), Family)


@pytest.mark.parametrize("name", catalog.attention.names)
def test_every_attention_backend_loads(name):
    assert catalog.attention.load(name).name == name


def test_every_drafter_loads():
    for name in catalog.drafters.names:
        assert isinstance(catalog.drafters.load(name), type)


def test_unknown_names_list_the_supported_ones():
    with pytest.raises(CheckpointError, match=r"'GPT9'.*LlamaForCausalLM, .*Qwen3ForCausalLM"):
        catalog.models.load("GPT9")
    with pytest.raises(ConfigError, match=r"drafter 'crystal-ball'.*none"):
        catalog.drafters.load("crystal-ball")
    with pytest.raises(CheckpointError, match=r"'huge'.*tiny"):
        catalog.bundled_path("huge")


def test_a_bundled_name_stands_for_its_directory():
    assert catalog.resolve_name("tiny") == catalog.bundled_path("tiny")
    assert catalog.resolve_name("./tiny") == Path("tiny")
    assert catalog.resolve_name("./some/where") == Path("some/where")
    assert catalog.resolve_name("some/where/else") == Path("some/where/else")
    with pytest.raises(CheckpointError, match="'some/where' is not a directory here"):  # an id on the hub
        catalog.resolve_name("some/where")
