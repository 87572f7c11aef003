"""Quantised checkpoints in every published layout: logits are float64's, the text depends on the weights alone."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.models.harness import Session, load, whole
from tests.models.make import make_checkpoint
from tests.models.quantised import LAYOUTS, float4, int8, quantise, reference
from tests.models.quantised_writers import by_token_and_group, fp8_blocks
from unisono import LLM, SamplingParams
from unisono.config import catalog
from unisono.layers.formats.base import Share
from unisono.layers.linear import Linear
from unisono.models.load.checkpoint import Checkpoint
from unisono.models.load.tensor_files import read_header
from unisono.models.load.weights import check, fill, weight_targets
from unisono.types import CheckpointError, ConfigError, SpeculativeConfig

BIG = {"hidden_size": 256, "intermediate_size": 384, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
ODD = {"hidden_size": 168, "intermediate_size": 200, "num_attention_heads": 5, "num_key_value_heads": 1, "head_dim": 40}
"""Nothing is a multiple of 128: scales of merged projections do not lie side by side."""

EXPERTS = {**BIG, "moe_intermediate_size": 64, "num_experts": 2, "num_experts_per_tok": 1}

PROMPT = [random.Random(0).randrange(256) for _ in range(40)]


@pytest.fixture(scope="module")
def plain(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("plain") / "model"
    return make_checkpoint(directory, "qwen2", num_hidden_layers=2, **BIG)


@pytest.fixture(scope="module")
def odd(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("odd") / "model"
    return make_checkpoint(directory, "qwen3", num_hidden_layers=2, tokenizer=False, **ODD)


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.double() - want).norm() / want.norm())


@pytest.mark.parametrize("name", LAYOUTS)
def test_logits_are_those_of_the_dequantised_weights(name: str, plain: Path, tmp_path: Path) -> None:
    """4e-3: of 10,000 inputs a few lie so near the middle of two e4m3 values that fp32 rounds them the other way."""
    layout = LAYOUTS[name]
    values = quantise(plain, tmp_path / "model", layout)
    want = reference(plain, values, layout.activations, PROMPT)
    (got,) = whole(load(tmp_path / "model"), [PROMPT])
    assert error(got, want) < (4e-3 if "fp8" in name or "-a8" in name else 1e-5)
    assert error(reference(plain, {}, layout.activations, PROMPT), want) > (
        5e-3 if "int8" in name or "8-bits" in name else 2e-2
    )


@pytest.mark.parametrize("online", [False, True])
@pytest.mark.parametrize("model", ["plain", "odd"])
def test_fp8_made_while_loading_is_published_fp8(online, model, request, tmp_path) -> None:
    """--quantization fp8 gives the bits of a checkpoint that was quantised by blocks before, at any size."""
    source, layout = request.getfixturevalue(model), LAYOUTS["fp8-blocks-bf16-scales"]
    layout = type(layout)(fp8_blocks("weight_scale_inv"), layout.config, by_token_and_group)
    values = quantise(source, tmp_path / "model", layout)
    (got,) = whole(load_online(source) if online else load(tmp_path / "model"), [PROMPT])
    assert error(got, reference(source, values, by_token_and_group, PROMPT)) < 4e-3


def load_online(directory: Path) -> Any:
    return load(directory, quantization="fp8")


@pytest.mark.parametrize(
    "name",
    ["fp8-blocks", "compressed-fp8-channel", "gptq-desc-act", "compressed-nvfp4", "compressed-int8-a8-shifted"],
)
def test_rows_do_not_depend_on_the_pass(name: str, plain: Path, tmp_path: Path) -> None:
    """One pass, uneven chunks and rounds give the same bits."""
    quantise(plain, tmp_path / "model", LAYOUTS[name])
    decoder = load(tmp_path / "model")
    (want,) = whole(decoder, [PROMPT])
    session = Session(decoder, 2, 64)
    parts = [session.extend({0: PROMPT[:17], 1: PROMPT[:5]})[0], session.extend({0: PROMPT[17:30]}, padding=3)[0]]
    parts += [session.round(4, {0: PROMPT[30:34]})[0], session.round(6, {0: PROMPT[34:]}, padding=2)[0]]
    assert torch.equal(torch.cat(parts), want)


def answers(path: Path, prompts: list[str], **flags: Any) -> list[list[int]]:
    with LLM(str(path), max_num_seqs=3, max_model_len=128, **flags) as llm:
        params = SamplingParams(temperature=0.8, seed=1, max_tokens=20)
        return [output.outputs[0].token_ids for output in llm.generate(prompts, params)]


@pytest.mark.parametrize(
    "name", ["fp8-blocks", "awq", "compressed-nvfp4", "compressed-int8-a8", "gptq-8-bits-desc-act", "online"]
)
def test_the_text_depends_on_the_weights_alone(name: str, plain: Path, tmp_path: Path) -> None:
    path, flags = plain, {"quantization": "fp8"}
    if name in LAYOUTS:
        path, flags = tmp_path / "model", {}
        quantise(plain, path, LAYOUTS[name])
    prompts = ["one two one two one", "abcabcab", "x"]
    together = answers(path, prompts, **flags)
    assert together != answers(plain, prompts), "quantising changed nothing"
    assert answers(path, prompts[1:2], **flags) == together[1:2]
    drafts = SpeculativeConfig("ngram", num_speculative_tokens=3)
    assert answers(path, prompts, speculative=drafts, **flags) == together


def test_explain_reports_quantised_weights(plain: Path) -> None:
    with LLM(str(plain), max_num_seqs=2, max_model_len=64, load_format="dummy", quantization="fp8") as llm:
        info = llm.engine.info()
        assert llm.generate(["a"], SamplingParams(max_tokens=3))[0].outputs[0].token_ids
    (decision,) = [d for d in info["decisions"] if d["name"] == "weights"]
    assert decision["value"] == "fp8"
    assert "while loading" in decision["reason"]
    assert info["settings"]["quantization"] == "fp8"


@pytest.mark.parametrize("name", ["fp8-static", "awq", "compressed-int4-asymmetric", "modelopt-nvfp4", "gptq-desc-act"])
def test_dummy_weights(name: str, plain: Path, tmp_path: Path) -> None:
    quantise(plain, tmp_path / "model", LAYOUTS[name])
    (tmp_path / "model/model.safetensors").unlink()
    (logits,) = whole(load(tmp_path / "model", load_format="dummy"), [PROMPT])
    assert logits.isfinite().all()
    assert logits.std() > 0


def edit(directory: Path, **changes: Any) -> Path:
    config = json.loads((directory / "config.json").read_text())
    config["quantization_config"] |= changes
    (directory / "config.json").write_text(json.dumps(config))
    return directory


GROUP = LAYOUTS["compressed-fp8-channel"].config["config_groups"]["group_0"]
REFUSED = {
    "another block": ("fp8-blocks", {"weight_block_size": [64, 128]}, "weight_block_size=[64, 128]"),
    "fixed scales of blocks": ("fp8-blocks", {"activation_scheme": "static"}, "activation_scheme='static'"),
    "e5m2": ("fp8-blocks", {"fmt": "e5m2"}, "fmt='e5m2'"),
    "another form of scales": ("fp8-blocks", {"scale_fmt": "e4m3"}, "scale_fmt='e4m3'"),
    "three bits": ("awq", {"bits": 3}, "bits=3"),
    "gemv": ("awq", {"version": "gemv"}, "version='gemv'"),
    "a group of 16": ("awq", {"group_size": 16}, "group_size=16"),
    "desc_act": ("gptq", {"desc_act": "static"}, "desc_act='static'"),
    "rules": ("gptq", {"dynamic": {"+:.*": {"bits": 8}}}, "dynamic='+:.*'"),
    "int8": (
        "compressed-fp8-channel",
        {"config_groups": {"g": GROUP | {"input_activations": {"num_bits": 8, "type": "int"}}}},
        "'type': 'int'",
    ),
    "weights alone": ("compressed-fp8-channel", {"config_groups": {"g": GROUP | {"input_activations": None}}}, "None"),
    "groups of 32 in NVFP4": (
        "compressed-nvfp4",
        {"config_groups": {"g": {"weights": float4(group_size=32), "targets": ["Linear"]}}},
        "('tensor_group', 32)",
    ),
    "a fixed zero point": (
        "compressed-int8-a8",
        {"config_groups": {"g": {"weights": int8("channel"), "input_activations": int8("tensor", symmetric=False)}}},
        "{'dynamic': False, 'symmetric': False}",
    ),
    "another algorithm": ("modelopt-fp8", {"quant_algo": "W4A8_AWQ"}, "quant_algo='W4A8_AWQ'"),
    "no bound": ("fbgemm-fp8", {"activation_scale_ub": None}, "activation_scale_ub=None"),
    "mixed bits": ("auto-round-awq", {"extra_config": {"lm_head": {"bits": 8}}}, "extra_config['lm_head']"),
    "hqq": ("awq", {"quant_method": "hqq"}, "quant_method='hqq'"),
    "torchao": ("awq", {"quant_method": "torchao"}, "in compressed-tensors."),
    "bitsandbytes": ("awq", {"quant_method": "bitsandbytes"}, "--quantization fp8"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_unsupported_quantisation_configs_raise(name: str, plain: Path, tmp_path: Path) -> None:
    layout, changes, named = REFUSED[name]
    quantise(plain, tmp_path / "model", LAYOUTS[layout])
    with pytest.raises(CheckpointError) as caught:
        Checkpoint.open(edit(tmp_path / "model", **changes))
    assert named in str(caught.value)
    assert str(tmp_path) in str(caught.value)


@pytest.mark.parametrize("name", ["modelopt-fp8", "modelopt-nvfp4"])
def test_modelopts_side_file_is_read(name: str, plain: Path, tmp_path: Path) -> None:
    quantise(plain, tmp_path / "model", LAYOUTS[name])
    (want,) = whole(load(tmp_path / "model"), [PROMPT])
    file = tmp_path / "model/config.json"
    config = json.loads(file.read_text())
    del config["quantization_config"]
    file.write_text(json.dumps(config))
    side = {"producer": {"name": "modelopt"}, "quantization": {**LAYOUTS[name].config, "quant_method": None}}
    (tmp_path / "model/hf_quant_config.json").write_text(json.dumps(side))
    (got,) = whole(load(tmp_path / "model"), [PROMPT])
    assert torch.equal(got, want)


def test_scales_of_a_cache_are_noted_and_not_used(plain: Path, tmp_path: Path) -> None:
    quantise(plain, tmp_path / "model", LAYOUTS["compressed-fp8-channel"])
    (want,) = whole(load(tmp_path / "model"), [PROMPT])
    tensors = load_file(tmp_path / "model/model.safetensors")
    for layer in range(2):
        for name in ("k_scale", "v_scale", "k_proj.k_scale", "v_proj.output_scale"):
            tensors[f"model.layers.{layer}.self_attn.{name}"] = torch.tensor([0.5])
    save_file(tensors, tmp_path / "model/model.safetensors")
    edit(tmp_path / "model", kv_cache_scheme={"num_bits": 8, "type": "float"})
    (got,) = whole(load(tmp_path / "model"), [PROMPT])
    assert torch.equal(got, want)
    assert "scales of a KV cache are not used" in Checkpoint.open(tmp_path / "model").quantization.decision()[1]


@pytest.mark.parametrize(
    ("kind", "value"), [("weight_scale", float("nan")), ("weight_global_scale", 0.0), ("weight_global_scale", 0.4)]
)
def test_scales_out_of_range_raise(kind: str, value: float, plain: Path, tmp_path: Path) -> None:
    quantise(plain, tmp_path / "model", LAYOUTS["compressed-nvfp4"])
    tensors = load_file(tmp_path / "model/model.safetensors")
    name = next(name for name in tensors if name.endswith(kind))
    changed = tensors[name].float()
    changed.view(-1)[0] = value
    tensors[name] = changed.to(tensors[name].dtype)
    save_file(tensors, tmp_path / "model/model.safetensors")
    with pytest.raises(CheckpointError, match="NVFP4"):
        load(tmp_path / "model")


@pytest.mark.parametrize(
    ("layout", "change", "named"),
    [
        ("gptq", lambda groups: groups.flip(0), "Set desc_act to true"),
        ("gptq-desc-act", lambda groups: groups.flip(0), "g_idx differs among projections"),
        ("gptq-desc-act", lambda groups: groups.clamp_min(1), "groups of 64 inputs are expected"),
    ],
    ids=["undeclared", "of one projection", "uneven"],
)
def test_other_orders_of_inputs_are_refused(layout, change, named, plain: Path, tmp_path: Path) -> None:
    quantise(plain, tmp_path / "model", LAYOUTS[layout])
    tensors = load_file(tmp_path / "model/model.safetensors")
    name = "model.layers.0.self_attn.k_proj.g_idx"
    tensors[name] = change(tensors[name]).contiguous()
    save_file(tensors, tmp_path / "model/model.safetensors")
    with pytest.raises(CheckpointError, match=named):
        load(tmp_path / "model")


def test_experts_in_activation_order_are_refused(tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path / "plain", "qwen3_moe", num_hidden_layers=1, tokenizer=False, **EXPERTS)
    quantise(source, tmp_path / "model", LAYOUTS["gptq-desc-act"])
    with pytest.raises(CheckpointError, match=r"experts in format 'GPTQ, 4 bits in activation order \(desc_act\)'"):
        load(tmp_path / "model")


def test_the_flag_and_the_checkpoint_agree(plain: Path, tmp_path: Path) -> None:
    quantise(plain, tmp_path / "model", LAYOUTS["awq"])
    assert Checkpoint.open(tmp_path / "model", "awq").quantization.method == "awq"
    for path, asked, named in (
        (tmp_path / "model", "fp8", "'awq'"),
        (plain, "gptq", "--quantization fp8"),
        (plain, "int3", "auto-round, awq, compressed-tensors, fbgemm_fp8, fp8, gguf, gptq"),
    ):
        with pytest.raises(ConfigError) as caught:
            Checkpoint.open(path, asked)
        assert named in str(caught.value)
        assert f"--quantization {asked}".replace("int3", "'int3'") in str(caught.value)


@pytest.mark.parametrize("name", LAYOUTS)
def test_ranks_read_their_part(name: str, tmp_path: Path) -> None:
    """Half of each projection's outputs on each of two ranks, in every layout; activations are not the question."""
    sizes, generator = {"q": 512, "k": 256, "v": 256}, torch.Generator().manual_seed(0)
    stored = {}
    for projection, outputs in sizes.items():
        tensors, _ = LAYOUTS[name].write(torch.randn(outputs, 256, generator=generator))
        stored |= {f"{projection}.{kind}": tensor for kind, tensor in tensors.items()}
    save_file(stored, tmp_path / "layer.safetensors")
    format = catalog.formats.load(LAYOUTS[name].config["quant_method"])(LAYOUTS[name].config)(
        "layers.0.self_attn.q_proj"
    )

    def loaded(share: Share) -> Linear:
        layer = Linear(256, sizes, False, torch.float32, "cpu", format, share)
        wanted = {f"{path}.{kind}".strip("."): place for path, kind, place in weight_targets(layer)}
        check(wanted, read_header(tmp_path / "layer.safetensors"), tmp_path, lambda name: "nothing wants it")
        fill(wanted, read_header(tmp_path / "layer.safetensors"), "cpu")
        return layer

    x = torch.randn(3, 256, generator=generator)
    of_ranks = [loaded(Share(rank, 2))(x).split([256, 128, 128], 1) for rank in range(2)]
    joined = torch.cat([part for projection in zip(*of_ranks, strict=True) for part in projection], 1)
    torch.testing.assert_close(joined, loaded(Share())(x), rtol=1e-5, atol=1e-5)


def test_biases_of_zeros_that_gptq_adds_are_passed_over(plain: Path, tmp_path: Path) -> None:
    quantise(plain, tmp_path / "model", LAYOUTS["gptq"])
    path = tmp_path / "model/model.safetensors"
    tensors = load_file(path)
    (want,) = whole(load(tmp_path / "model"), [PROMPT])
    tensors["model.layers.0.mlp.down_proj.bias"] = torch.zeros(256)
    save_file(tensors, path)
    (got,) = whole(load(tmp_path / "model"), [PROMPT])
    assert torch.equal(got, want)
    tensors["model.layers.0.mlp.down_proj.bias"][3] = 1
    save_file(tensors, path)
    with pytest.raises(CheckpointError, match=r"down_proj\.bias"):
        load(tmp_path / "model")
