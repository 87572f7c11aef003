"""Heads that fit load as they are; heads that do not are refused with what does not fit; what is inferred is logged."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.drafters.make_heads import layer_fields, make_eagle, make_eagle3, make_speculators
from tests.models.harness import load
from tests.models.make import make_checkpoint
from unisono.attention.triton import TritonAttention
from unisono.drafters.eagle.checkpoint import DraftCheckpoint, infer_aux_layers, open_eagle, open_eagle3
from unisono.drafters.eagle.model import Eagle3Head, EagleHead
from unisono.layers.rotary import RotarySpec
from unisono.models.blocks.layers import AttentionSpec, LayerSpec, MLPSpec
from unisono.models.config import DecoderConfig
from unisono.types import CheckpointError

LAYER = LayerSpec(AttentionSpec(6, 3, 24, RotarySpec.of(None, 24)), MLPSpec(100))
TARGET = DecoderConfig(
    architecture="LlamaForCausalLM", vocab_size=263, hidden_size=90, layers=(LAYER,) * 8, rms_eps=1e-3,
    max_positions=512,
)  # fmt: skip


# ---- which layers ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "layers", "convention", "speculators", "expected", "sure"),
    [
        ([2, 18, 33], 36, "auto", False, (2, 18, 33), True),
        ([1, 17, 32], 36, "auto", False, (2, 18, 33), True),
        ([2, 18, 33], 36, "auto", True, (2, 18, 33), True),
        ([1, 46, 90], 94, "auto", True, (2, 47, 91), False),
        ([24, 30, 36], 36, "auto", False, (24, 30, 36), True),
        ([1, 18, 36], 36, "auto", False, (1, 18, 36), True),
        ([5, 18, 30], 36, "auto", False, (5, 18, 30), False),
        ([5, 18, 30], 36, "auto", True, (5, 18, 30), True),
        ([5, 18, 30], 36, "output", False, (6, 19, 31), True),
        ([1, 17, 32], 36, "input", False, (1, 17, 32), True),
    ],
)
def test_layer_ids_are_inferred(given, layers, convention, speculators, expected, sure) -> None:
    inferred, why, beyond_doubt = infer_aux_layers(given, layers, convention, speculators)
    assert (inferred, beyond_doubt) == (expected, sure)
    assert why


def test_inferred_layer_ids_are_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "unisono")
    head = make_eagle3(tmp_path / "outputs", TARGET, (2, 4, 5), aux=[1, 3, 4])
    assert open_eagle3(head.path, TARGET).config.aux_layers == (2, 4, 5)
    assert "inputs of the target's layers [2, 4, 5]: [1, 3, 4] starts at 1, so it names outputs" in caplog.text
    head = make_eagle3(tmp_path / "default", TARGET, (2, 4, 5))
    assert open_eagle3(head.path, TARGET).config.aux_layers == (2, 4, 5)
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
    head = make_eagle3(tmp_path / "doubt", TARGET, (), aux=[3, 5, 7])
    assert open_eagle3(head.path, TARGET).config.aux_layers == (3, 5, 7)
    (warning,) = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert "starts at neither 1 nor 2" in warning.getMessage()
    assert 'set "aux_layers" to "input" or "output"' in warning.getMessage()
    assert open_eagle3(head.path, TARGET, convention="output").config.aux_layers == (4, 6, 8)


# ---- what is shared ---------------------------------------------------------------------------------------


def test_draft_head_shares_equal_embedding_and_lm_head(tmp_path: Path) -> None:
    target = load(make_checkpoint(tmp_path / "target", "llama", tokenizer=False))
    embed, lm_head = target.embed.weight, target.lm_head.weight

    def built(opened: DraftCheckpoint) -> EagleHead | Eagle3Head:
        return opened.build(target, lambda q, kv: TritonAttention(q, kv, "cpu"), 64, torch.float32, "cpu")

    published = built(open_eagle(make_eagle(tmp_path / "published", target.config, embed).path, target.config))
    assert published.embed is target.embed
    assert published.lm_head is target.lm_head
    own = built(open_eagle(make_eagle(tmp_path / "own", target.config, embed + 1).path, target.config))
    assert torch.equal(own.embed.weight, embed + 1)
    assert own.lm_head is target.lm_head
    tied = make_eagle(tmp_path / "tied", target.config, embed + 1, tie_word_embeddings=True)
    assert built(open_eagle(tied.path, target.config)).lm_head.weight.data_ptr() != lm_head.data_ptr()
    assert torch.equal(built(open_eagle(tied.path, target.config)).lm_head.weight, embed + 1)
    head = make_speculators(tmp_path / "wide", target.config, (2, 1, 0), {}, draft_vocab=100, hidden_size=66)
    wide = built(open_eagle3(head.path, target.config))
    assert (wide.embed.weight.shape, wide.lm_head.weight.shape) == ((263, 66), (100, 66))
    assert torch.equal(wide.ids.long(), head.ids)


# ---- what is refused --------------------------------------------------------------------------------------


def edit_config(directory: Path, edit: Callable[[dict[str, Any]], None]) -> None:
    file = directory / "config.json"
    config = json.loads(file.read_text())
    edit(config)
    file.write_text(json.dumps(config))


def edit_tensors(directory: Path, edit: Callable[[dict[str, torch.Tensor]], None]) -> None:
    file = directory / "model.safetensors"
    tensors = load_file(file)
    edit(tensors)
    save_file(tensors, file)


CONFIGS: dict[str, tuple[dict[str, Any], str]] = {
    "another target's vocabulary": ({"vocab_size": 300}, "vocab_size is 300, the target's 263: it was made for"),
    "another target's hidden size": ({"target_hidden_size": 64}, "hidden states of size 64, the target's have 90"),
    "several layers": ({"num_hidden_layers": 2}, "a head of 2 layers is not supported"),
    "unknown layers": ({"model_type": "mamba"}, "model_type 'mamba' is not supported. Supported: llama, mistral"),
    "activation": ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
    "values": ({"rms_norm_eps": "small"}, "not a valid config"),
    "more draft tokens than there are": ({"draft_vocab_size": 264}, "draft_vocab_size=264: it must be from 1 to"),
    "P-EAGLE": ({"mask_token_id": 3}, "P-EAGLE"),
    "one layer's states": ({"eagle_config": {"use_aux_hidden_state": False}}, "use_aux_hidden_state is false"),
    "layers beyond": ({"eagle_aux_hidden_state_layer_ids": [2, 5, 9]}, r"inputs of layers \[2, 5, 9\] .* 8 layers"),
    "no layers": ({"eagle_aux_hidden_state_layer_ids": [2, "x", 9]}, r"\[2, 'x', 9\] must list layer numbers"),
    "four layers": ({"eagle_aux_hidden_state_layer_ids": [2, 3, 4, 5]}, r"shape \[90, 270\]; .* \[90, 360\]"),
    "speculators": ({"speculators_model_type": "mlp"}, "speculators_model_type='mlp' is not supported"),
    "nothing nested": ({"speculators_model_type": "eagle3"}, "no transformer_layer_config"),
    "two norms": ({"norm_before_fc": True, "fc_norm": True}, "norm_before_fc and fc_norm exclude each other"),
    "a missing norm": ({"norm_before_fc": True}, r"tensor input_norm.weight \[270\] is missing, and 0 more"),
    "more heads": ({"num_attention_heads": 10}, r"o_proj.weight has shape \[90, 120\]; .* \[90, 200\]"),
}  # fmt: skip


@pytest.mark.parametrize(("change", "words"), CONFIGS.values(), ids=CONFIGS)
def test_configs_that_do_not_fit(tmp_path: Path, change: dict[str, Any], words: str) -> None:
    make_eagle3(tmp_path, TARGET, (2, 4, 5), draft_vocab=101)
    edit_config(tmp_path, lambda config: config.update(change))
    with pytest.raises(CheckpointError, match=words) as caught:
        open_eagle3(tmp_path, TARGET)
    assert str(tmp_path) in str(caught.value)


Tensors = dict[str, torch.Tensor]
Q = "midlayer.self_attn.q_proj.weight"
TENSORS: dict[str, tuple[Callable[[Tensors], Any], str]] = {
    "missing": (lambda t: t.pop(Q), r"layers.0.self_attn.q_proj.weight \[120, 180\] is missing, and 0 more of the 13"),
    "unexpected": (lambda t: t.update(extra=torch.ones(3)), r"tensor extra \[3\] is unexpected"),
    "shape": (lambda t: t.update({Q: t[Q][:, :90].contiguous()}), r"has shape \[120, 90\]; .* asks for \[120, 180\]"),
    "dtype": (lambda t: t.update({Q: t[Q].int()}), "dtype I32; supported are F32, F16, BF16"),
    "no map": (lambda t: t.pop("d2t"), "tensor d2t is missing: it must say which of the target's 263 tokens"),
    "map of another size": (lambda t: t.update(d2t=t["d2t"][:50].clone()), r"d2t is \[50\] of torch.int64"),
    "ids for offsets": (lambda t: t.update(d2t=t["d2t"] + torch.arange(101)), "d2t holds offsets, not token ids"),
    "not ascending": (lambda t: t.update(d2t=t["d2t"].flip(0)), "must ascend"),
    "two maps": (lambda t: t["t2d"].zero_(), "t2d and d2t name different draft tokens"),
    "no LM head": (lambda t: t.pop("lm_head.weight"), "lm_head.weight is missing: draft_vocab_size is 101"),
    "EAGLE-1": (lambda t: t.pop("midlayer.hidden_norm.weight"), "is no EAGLE-3 head: .* goes with the method eagle"),
}


@pytest.mark.parametrize(("edit", "words"), TENSORS.values(), ids=TENSORS)
def test_tensors_that_do_not_fit(tmp_path: Path, edit: Callable[[Tensors], Any], words: str) -> None:
    make_eagle3(tmp_path, TARGET, (2, 4, 5), draft_vocab=101)
    edit_tensors(tmp_path, edit)
    with pytest.raises(CheckpointError, match=words):
        open_eagle3(tmp_path, TARGET)


def test_a_head_of_another_hidden_size_needs_its_own_ends(tmp_path: Path) -> None:
    make_speculators(tmp_path, TARGET, (2, 4, 5), {}, draft_vocab=101, hidden_size=66)
    edit_tensors(tmp_path, lambda tensors: tensors.pop("embed_tokens.weight"))
    with pytest.raises(CheckpointError, match=r"hidden size is 66, the target's 90: it needs embed_tokens.weight and"):
        open_eagle3(tmp_path, TARGET)


def test_targets_that_the_default_layers_do_not_fit(tmp_path: Path) -> None:
    make_eagle3(tmp_path, TARGET, (2, 4, 5))
    small = replace(TARGET, layers=(LAYER,) * 2)
    with pytest.raises(CheckpointError, match=re.escape("the default [2, 1, -1] does not fit a target of 2 layers")):
        open_eagle3(tmp_path, small)


def test_eagle_heads_that_do_not_fit(tmp_path: Path) -> None:
    three = make_eagle3(tmp_path / "three", TARGET, (2, 4, 5)).path
    with pytest.raises(CheckpointError, match=r"is an EAGLE-3 head \(it has a hidden_norm\): give the method eagle3"):
        open_eagle(three, TARGET)
    vllm = make_speculators(tmp_path / "vllm", TARGET, (2, 4, 5), {}).path
    with pytest.raises(CheckpointError, match="speculators head of type 'eagle3' is not read by the method eagle"):
        open_eagle(vllm, TARGET)
    (tmp_path / "wide").mkdir()
    (tmp_path / "wide" / "config.json").write_text(
        json.dumps(layer_fields(TARGET, hidden_size=96, target_hidden_size=90))
    )
    with pytest.raises(CheckpointError, match="hidden size is 96, the target's 90; an EAGLE-1 head"):
        open_eagle(tmp_path / "wide", TARGET, dummy=True)
    one = make_eagle(tmp_path / "one", TARGET).path
    edit_tensors(one, lambda tensors: tensors.update({"fc.weight": torch.ones(90, 90)}))
    with pytest.raises(CheckpointError, match=r"fc.weight has shape \[90, 90\]; config.json asks for \[90, 180\]"):
        open_eagle(one, TARGET)


def test_broken_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="does not exist"):
        open_eagle3(tmp_path / "nothing", TARGET)
    pickled = make_eagle(tmp_path / "pickled", TARGET, torch.randn(263, 90)).path
    assert open_eagle(pickled, TARGET).config.fc_bias
    (pickled / "pytorch_model.bin").write_bytes((pickled / "pytorch_model.bin").read_bytes()[:2000])
    with pytest.raises(CheckpointError, match=r"pytorch_model.bin cannot be read"):
        open_eagle(pickled, TARGET)
    safe = make_eagle3(tmp_path / "safe", TARGET, (2, 4, 5)).path
    (safe / "model.safetensors").write_bytes((safe / "model.safetensors").read_bytes()[:-1000])
    with pytest.raises(CheckpointError, match=r"model.safetensors is truncated"):
        open_eagle3(safe, TARGET)
