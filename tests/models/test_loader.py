"""Weights reach the right places from every layout; what does not fit is named."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.models.harness import load, whole
from tests.models.make import make_checkpoint
from unisono.models.load import tensor_files
from unisono.models.load.checkpoint import WEIGHTS, Checkpoint
from unisono.types import CheckpointError

PROMPT = [[5, 77, 200, 31, 9]]


def logits(directory, **options):
    return whole(load(directory, **options), PROMPT)[0]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("made"), "llama", tokenizer=False)


@pytest.fixture(scope="module")
def made_tied(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("made"), "llama", tokenizer=False, tie_word_embeddings=True)


@pytest.fixture
def directory(made, tmp_path):
    return shutil.copytree(made, tmp_path / "checkpoint")


@pytest.fixture
def tied(made_tied, tmp_path):
    return shutil.copytree(made_tied, tmp_path / "checkpoint")


def rewrite(directory, change):
    """Change the tensors of an unsharded checkpoint: ``change(tensors)`` edits or returns them."""
    tensors = load_file(directory / WEIGHTS)
    tensors = change(tensors) or tensors
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, directory / WEIGHTS)


def refused(directory, *words):
    with pytest.raises(CheckpointError) as error:
        load(directory)
    for word in words:
        assert word in str(error.value), f"{word!r} is not in: {error.value}"


def test_shards_and_one_file_are_the_same_model(made, tmp_path):
    sharded = make_checkpoint(tmp_path, "llama", tokenizer=False, max_shard_size="50KB")
    assert len(list(sharded.glob("*.safetensors"))) > 3
    assert torch.equal(logits(sharded), logits(made))


def test_config_json_of_older_transformers(directory, made):
    """Rope parameters as every Llama 3 repository spells them, and torch_dtype."""
    file = directory / "config.json"
    config = json.loads(file.read_text())
    rope = config.pop("rope_parameters")
    config["rope_theta"] = rope.pop("rope_theta")
    config["rope_scaling"] = rope
    config["torch_dtype"] = config.pop("dtype")
    file.write_text(json.dumps(config))
    assert Checkpoint.open(directory).dtype is torch.float32
    assert torch.equal(logits(directory), logits(made))


def test_base_model_names_without_prefix(directory, made):
    rewrite(directory, lambda tensors: {n.removeprefix("model."): t for n, t in tensors.items()})
    assert torch.equal(logits(directory), logits(made))


def test_old_rotary_buffers_are_ignored(directory, made):
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    rewrite(directory, lambda tensors: tensors.update({name: torch.ones(12)}))
    assert torch.equal(logits(directory), logits(made))


def test_tied_head_is_the_embedding(tied):
    decoder = load(tied)
    assert decoder.lm_head.weight is decoder.embed.weight
    assert not any(p.requires_grad for p in decoder.parameters())


def test_tied_head_may_be_stored_too(tied, made_tied):
    rewrite(tied, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    assert torch.equal(logits(tied), logits(made_tied))


def test_tied_head_that_differs_is_refused(tied):
    rewrite(tied, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"] + 1}))
    refused(tied, "lm_head.weight", "differs", "tie_word_embeddings")


@pytest.mark.parametrize("stored", [torch.float16, torch.bfloat16])
def test_weights_are_converted(directory, stored):
    rewrite(directory, lambda tensors: {n: t.to(stored) for n, t in tensors.items()})
    decoder = load(directory, dtype=torch.float32)
    expected = load_file(directory / WEIGHTS)["model.norm.weight"].float()
    assert decoder.norm.weight.dtype is torch.float32
    assert torch.equal(decoder.norm.weight, expected)
    assert load(directory, dtype=torch.bfloat16).embed.weight.dtype is torch.bfloat16


def test_missing_tensor(directory):
    name = "model.layers.1.self_attn.k_proj.weight"
    rewrite(directory, lambda tensors: {n: t for n, t in tensors.items() if n != name})
    refused(directory, WEIGHTS, name, "missing", "[72, 90]")


def test_unexpected_tensor(directory):
    name = "model.layers.2.self_attn.q_proj.bias"
    rewrite(directory, lambda tensors: tensors.update({name: torch.zeros(144)}))
    refused(directory, WEIGHTS, name, "[144]", "unexpected")


def test_wrong_shape(directory):
    name = "model.layers.0.mlp.up_proj.weight"
    rewrite(directory, lambda tensors: tensors.update({name: tensors[name][:-1]}))
    refused(directory, WEIGHTS, name, "[99, 90]", "[100, 90]")


def test_unsupported_dtype(directory):
    name = "model.layers.0.mlp.up_proj.weight"
    rewrite(directory, lambda tensors: tensors.update({name: tensors[name].to(torch.float8_e4m3fn)}))
    refused(directory, WEIGHTS, name, "F8_E4M3", "BF16")


def test_dummy_needs_config_json_only(directory):
    for file in directory.iterdir():
        if file.name != "config.json":
            file.unlink()
    first, again = logits(directory, load_format="dummy"), logits(directory, load_format="dummy")
    assert torch.equal(first, again)
    assert first.isfinite().all()
    assert not torch.equal(first, logits(directory, load_format="dummy", seed=1))
    assert load(directory, load_format="dummy").norm.weight.eq(1).all()


def test_dummy_weights_depend_on_seed_and_name_alone(directory):
    """So the first layers of a model are a smaller model's: a draft that is right some of the time."""
    whole = load(directory, load_format="dummy").state_dict()
    file = directory / "config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps(config | {"num_hidden_layers": config["num_hidden_layers"] - 1}))
    shallow = load(directory, load_format="dummy").state_dict()
    assert 0 < len(shallow) < len(whole)
    for name, tensor in shallow.items():
        assert torch.equal(tensor, whole[name]), name
    assert not torch.equal(*(whole[f"layers.{i}.feed_forward.gate_up.weight"] for i in (0, 1)))


def test_progress_grows_to_all_of_the_bytes(made):
    calls = []
    load(made, progress=lambda stage, share: calls.append((stage, share)))
    assert {stage for stage, _ in calls} == {"load"}
    shares = [share for _, share in calls]
    assert len(shares) > 20
    assert sorted(shares) == shares
    assert shares[-1] == 1


def test_headers_are_read_once_until_the_file_changes(tmp_path, monkeypatch):
    opened = []
    safe_open = tensor_files.safe_open
    monkeypatch.setattr(tensor_files, "safe_open", lambda *a, **k: opened.append(a) or safe_open(*a, **k))
    file = tmp_path / "model.safetensors"
    save_file({"a": torch.zeros(3)}, file)
    first = tensor_files.read_header(file)
    first["mine"] = first["a"]
    assert list(tensor_files.read_header(file)) == ["a"], "what a caller does to its own is its own affair"
    assert len(opened) == 1
    save_file({"b": torch.zeros(70)}, file)
    assert list(tensor_files.read_header(file)) == ["b"]
