"""``--quantization gguf``: weights of a GGUF file that stay packed have the bits of dequantised ones, and take less."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from gguf import GGMLQuantizationType as Type

from tests.models.gguf_files import BIG, PLAIN_ROPE, PROMPT, answers, error, reference, write_gguf
from tests.models.harness import load, whole
from tests.models.make import make_checkpoint
from unisono.config.gguf.directory import described
from unisono.config.gguf.header import read_gguf
from unisono.config.gguf.packed import PACKED, packed_types
from unisono.config.preflight.model import check_config
from unisono.engine.startup.model_size import module_bytes
from unisono.layers.formats.base import PLAIN
from unisono.layers.linear import Linear
from unisono.models.blocks.decoder import Decoder
from unisono.models.load.checkpoint import Checkpoint
from unisono.types import CheckpointError, ConfigError, SpeculativeConfig


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("UNISONO_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def llama(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("llama") / "model"
    fields = {"num_hidden_layers": 2, "rope_parameters": PLAIN_ROPE, "tie_word_embeddings": False}
    return make_checkpoint(directory, "llama", tokenizer=False, **fields, **BIG)


@pytest.fixture(scope="module")
def files(llama: Path, tmp_path_factory) -> dict[str, tuple[Path, dict[str, torch.Tensor]]]:
    """By type: (a file, its weights in float64)."""
    home = tmp_path_factory.mktemp("files")
    return {name: (home / f"{name}.gguf", write_gguf(llama, home / f"{name}.gguf", Type[name])) for name in PACKED}


def linears(decoder: Decoder) -> dict[str, Linear]:
    return {name: module for name, module in decoder.named_modules() if isinstance(module, Linear)}


def weight_of(layer: Linear) -> torch.Tensor:
    """The weight that a layer multiplies with: its product with the identity matrix."""
    return layer(torch.eye(layer.inputs, dtype=layer.dtype)).t()


@pytest.mark.parametrize("name", PACKED)
def test_packed_weights_have_the_bits_of_dequantised_ones(name: str, files) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        packed, plain = (load(files[name][0], each, dtype=dtype) for each in ("gguf", None))
        others = linears(plain)
        kept = {path for path, layer in linears(packed).items() if layer.format is not PLAIN}
        assert len(kept) == 2 * 4, "qkv, o, gate with up, and down of both layers"
        for path, layer in linears(packed).items():
            assert torch.equal(weight_of(layer), others[path].weight), path
        share = sum(module_bytes(linears(packed)[path]) / module_bytes(others[path]) for path in kept) / len(kept)
        bits = 5 if name == "Q4_0" else 9
        assert share == pytest.approx(bits / (8 * dtype.itemsize)), "integers and an fp32 scale for 32 of them"


@pytest.mark.parametrize("name", PACKED)
def test_logits_of_packed_weights_are_float64s(name: str, llama: Path, files) -> None:
    file, values = files[name]
    (got,) = whole(load(file, "gguf"), [PROMPT])
    assert error(got, reference(llama, values)) < 1e-5


def test_experts_stay_packed(tmp_path: Path) -> None:
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": True}
    fields = {"num_hidden_layers": 1, "rope_parameters": PLAIN_ROPE, "tie_word_embeddings": False}
    made = make_checkpoint(tmp_path / "model", "qwen3_moe", tokenizer=False, **fields, **BIG, **experts)
    for name in PACKED:
        file = tmp_path / f"{name}.gguf"
        want = reference(made, write_gguf(made, file, Type[name]))
        decoder = load(file, "gguf")
        stacks = decoder.layers[0].feed_forward.stacks
        assert [stack.format.name for stack in stacks] == [f"GGUF, {name}"] * 2
        (got,) = whole(decoder, [PROMPT])
        assert error(got, want) < 1e-5


def test_the_text_depends_on_the_weights_alone(files) -> None:
    file, prompts = files["Q4_0"][0], ["one two one two one", "abcabcab", "x"]
    together = answers(file, prompts, quantization="gguf")
    assert together == answers(file, prompts), "in fp32, with these sizes, as dequantised weights"
    assert answers(file, prompts[1:2], quantization="gguf") == together[1:2]
    drafts = SpeculativeConfig("ngram", num_speculative_tokens=3)
    assert answers(file, prompts, quantization="gguf", speculative=drafts) == together


def test_products_of_several_types_are_dequantised(llama: Path, tmp_path: Path) -> None:
    kinds = {"blk.0.attn_v.weight": Type.Q4_0, "blk.1.ffn_down.weight": Type.Q4_1, "blk.1.ffn_up.weight": Type.Q5_1}
    file = tmp_path / "mixed.gguf"
    want = reference(llama, write_gguf(llama, file, Type.Q8_0, kinds=kinds))
    kept = packed_types(read_gguf(file))
    assert {name.removeprefix("model.layers.") for name in kept} == {
        *("0.self_attn.o_proj", "0.mlp.gate_proj", "0.mlp.up_proj", "0.mlp.down_proj"),
        *(f"1.self_attn.{name}_proj" for name in "qkvo"),
    }
    decoder = load(file, "gguf")
    formats = {name: layer.format.name for name, layer in linears(decoder).items()}
    assert [formats[f"layers.0.mixer.{name}"] for name in ("qkv", "o")] == ["plain", "GGUF, Q8_0"]
    (got,) = whole(decoder, [PROMPT])
    assert error(got, want) < 1e-5
    value, reason = Checkpoint.open(file, "gguf").quantization.decision()
    assert value == "gguf"
    assert "8 of Q8_0; 8 matrices are dequantised" in reason


def test_other_types_are_dequantised(llama: Path, tmp_path: Path) -> None:
    write_gguf(llama, tmp_path / "m.gguf", Type.Q4_1)
    quantization = Checkpoint.open(tmp_path / "m.gguf", "gguf").quantization
    assert "for 32 inputs: none; 16 matrices are dequantised" in quantization.decision()[1]
    assert quantization.format("layers.0.mixer.o", "model.layers.0.self_attn.o_proj") is PLAIN


def test_a_file_is_dequantised_without_the_flag(files) -> None:
    value, reason = Checkpoint.open(files["Q8_0"][0]).quantization.decision()
    assert value == "plain"
    assert "--quantization gguf keeps those of Q4_0, Q5_0, Q8_0 packed" in reason


def test_ranks_read_their_rows_of_blocks(files) -> None:
    from unisono.layers.formats.base import Slices
    from unisono.models.load.tensor_files import read

    tensors = Checkpoint.open(files["Q8_0"][0], "gguf").tensors()
    for name in ("self_attn.q_proj", "mlp.up_proj"):
        name = f"model.layers.0.{name}.weight"
        rows = tensors[name].shape[0]
        ((_, all_rows),) = read({name: None}, tensors, "cpu")
        ((_, half),) = read({name: Slices(0, ((rows // 2, rows),))}, tensors, "cpu")
        assert (all_rows.dtype, all_rows.shape) == (torch.uint8, (rows, 256 // 32 * 34))
        assert torch.equal(half, all_rows[rows // 2 :])


def test_gguf_is_refused_for_other_checkpoints(llama: Path) -> None:
    with pytest.raises(ConfigError, match=r"--quantization gguf: .* is not made from a GGUF file"):
        check_config(llama, "gguf")
    with pytest.raises(CheckpointError, match=r"quant_method 'gguf'.*give the file"):
        check_config(llama, overrides={"quantization_config": {"quant_method": "gguf", "types": {}}})


def test_another_method_than_gguf_is_refused_for_a_file(files) -> None:
    with pytest.raises(ConfigError, match="--quantization awq"):
        check_config(described(files["Q8_0"][0]), "awq")


def test_weights_of_other_forms_are_refused_by_a_packed_model(files, llama: Path) -> None:
    from dataclasses import replace

    from unisono.models.load.loader import decoder_update

    served = Checkpoint.open(files["Q8_0"][0], "gguf")
    pushed = replace(served, path=llama)
    with pytest.raises(CheckpointError, match=r"down_proj.weight has shape \[256, 512\]"):
        decoder_update(load(files["Q8_0"][0], "gguf"), pushed)
