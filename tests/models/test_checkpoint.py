"""Errors of a checkpoint are reported before it is loaded: the file, the tensor, the value."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.models.fields import END
from tests.models.make import make_checkpoint
from unisono.models.load.checkpoint import INDEX, WEIGHTS, Checkpoint
from unisono.types import CheckpointError


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("made"), "qwen2", tokenizer=False)


@pytest.fixture(scope="module")
def made_sharded(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("made"), "qwen2", tokenizer=False, max_shard_size="100KB")


@pytest.fixture
def directory(made, tmp_path):
    return shutil.copytree(made, tmp_path / "checkpoint")


@pytest.fixture
def sharded(made_sharded, tmp_path):
    return shutil.copytree(made_sharded, tmp_path / "checkpoint")


def edit(file, **changes):
    content = json.loads(file.read_text())
    content.update(changes)
    file.write_text(json.dumps(content))


def refused(path, *words):
    """Opening ``path`` and reading its headers is refused, and the error has all the words."""
    with pytest.raises(CheckpointError) as error:
        Checkpoint.open(path).tensors()
    for word in words:
        assert word in str(error.value), f"{word!r} is not in: {error.value}"


def test_open_reads_the_configs(directory):
    edit(directory / "config.json", eos_token_id=7, dtype="bfloat16")
    edit(directory / "generation_config.json", eos_token_id=[END, 9], temperature=0.7, top_k=20)
    checkpoint = Checkpoint.open(str(directory))
    assert checkpoint.config.architecture == "Qwen2ForCausalLM"
    assert checkpoint.config.attention_shapes == ((5, 1, 16),)
    assert checkpoint.dtype is torch.bfloat16
    assert checkpoint.eos_token_ids == (7, 9, END)
    assert (checkpoint.generation.temperature, checkpoint.generation.top_k) == (0.7, 20)
    assert checkpoint.generation.top_p is None


def test_configs_are_enough_to_open(directory):
    (directory / "generation_config.json").unlink()
    (directory / WEIGHTS).unlink()
    assert Checkpoint.open(directory).generation.temperature is None


def test_paths_that_are_no_checkpoint(directory, tmp_path):
    refused(tmp_path / "nowhere", "nowhere", "does not exist", "tiny")
    refused(directory / "config.json", "is a file", "directory")
    refused(tmp_path, "no config.json")
    refused("Qwen/Qwen3-8B", "'Qwen/Qwen3-8B'", "hub", "hf download")


def test_broken_config(directory):
    (directory / "config.json").write_text('{"architectures": [')
    refused(directory, "config.json", "JSON")
    (directory / "config.json").write_text("[]")
    refused(directory, "config.json", "object")


@pytest.mark.parametrize("architecture", ["GPT2LMHeadModel"])
def test_unsupported_architecture_lists_the_supported(directory, architecture):
    edit(directory / "config.json", architectures=[architecture])
    refused(directory, architecture, "LlamaForCausalLM", "Qwen3ForCausalLM")


@pytest.mark.parametrize("architectures", [[], None, "LlamaForCausalLM"])
def test_architectures_that_name_no_class(directory, architectures):
    edit(directory / "config.json", architectures=architectures)
    refused(directory, f"architectures={architectures}", "Qwen3ForCausalLM", "docs/reference/models.md")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("hidden_act", "gelu"),
        ("num_key_value_heads", 3),
        ("intermediate_size", 0),
        ("hidden_size", "wide"),
        ("model_type", "no-such-type"),
        ("layer_types", ["full_attention", "chunked_attention", "full_attention"]),
    ],
)
def test_config_values_that_are_not_computed(directory, field, value):
    edit(directory / "config.json", **{field: value})
    named = {"num_key_value_heads": "num_kv_heads", "model_type": "no-such"}
    refused(directory, "config.json", named.get(field, field))


def test_quantised_is_refused(directory):
    edit(directory / "config.json", quantization_config={"quant_method": "bitsandbytes"})
    refused(directory, "bitsandbytes", "unquantised")


@pytest.mark.parametrize("changes", [{"eos_token_id": "</s>"}, {"temperature": "hot"}])
def test_broken_generation_config(directory, changes):
    edit(directory / "generation_config.json", **changes)
    refused(directory, "generation_config.json", *map(str, changes.values()))


def test_truncated_file_is_named(directory):
    weights = directory / WEIGHTS
    size = len(weights.read_bytes())
    weights.write_bytes(weights.read_bytes()[:-1])
    refused(directory, str(weights), "truncated", f"{size - 1} bytes", "Download it again")


@pytest.mark.parametrize(
    ("content", "word"),
    [
        (b"", "truncated"),
        (b"\x10\0\0\0\0\0\0\0{}", "truncated"),
        (b"\x02\0\0\0\0\0\0\0[]", "header"),
        (b"\x02\0\0\0\0\0\0\0{{", "header"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "truncated"),
        (b'\x0b\0\0\0\0\0\0\0{"a": null}', "header"),
    ],
)
def test_invalid_safetensors_file_raises(directory, content, word):
    (directory / WEIGHTS).write_bytes(content)
    refused(directory, WEIGHTS, word)


def test_other_weight_formats(directory):
    (directory / WEIGHTS).rename(directory / "pytorch_model.bin")
    refused(directory, WEIGHTS, "pytorch_model.bin", "save_pretrained")


def test_missing_shard(sharded):
    lost = sorted(sharded.glob("model-*.safetensors"))[1]
    lost.unlink()
    refused(sharded, str(lost), "missing", INDEX)


def test_shard_without_a_promised_tensor(sharded):
    name, file = next(iter(json.loads((sharded / INDEX).read_text())["weight_map"].items()))
    tensors = load_file(sharded / file)
    tensors["other"] = tensors.pop(name)
    save_file(tensors, sharded / file)
    refused(sharded, file, name, "missing")


@pytest.mark.parametrize("content", ["{}", '{"weight_map": []}', "not json"])
def test_broken_index(sharded, content):
    (sharded / INDEX).write_text(content)
    refused(sharded, INDEX)
