"""Writes a random checkpoint of transformers again in each published quantised layout, and computes it in float64.

``quantised_writers.py`` packs the weights. The reference is transformers' model in float64 whose linear layers have
these weights and, for fp8, quantise their inputs.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM

from tests.models.make_plain import ARCHITECTURES
from tests.models.plain_decoder import PlainDecoder
from tests.models.quantised_writers import (
    Activations,
    Written,
    awq,
    bounded,
    by_token,
    by_token_and_group,
    eights,
    fixed,
    fours,
    fp8_blocks,
    fp8_rows,
    gptq,
    gptq8,
    in_activation_order,
    int8_by_token,
    int8_fixed,
    int8_rows,
    int8_shifted,
    int8_weights,
    nvfp4,
    packed_int4,
    powers_of_two,
    untouched,
    without,
)


@dataclass(frozen=True)
class Layout:
    """A published layout: how a weight is written, config.json's quantization_config, and what becomes of inputs."""

    write: Callable[[torch.Tensor], Written]
    config: dict[str, Any]
    activations: Activations = untouched
    plain: tuple[str, ...] = field(default=())


def compressed(weights: dict[str, Any], inputs: dict[str, Any] | None, format: str) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": format,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head", "re:.*layers.1.mlp.*"],
        "kv_cache_scheme": None,
        "quantization_status": "compressed",
    }


def float8(strategy: str, **more: Any) -> dict[str, Any]:
    return {"num_bits": 8, "type": "float", "symmetric": True, "strategy": strategy, "dynamic": False, **more}


def int4(strategy: str, group: int | None, symmetric: bool) -> dict[str, Any]:
    return {"num_bits": 4, "type": "int", "symmetric": symmetric, "strategy": strategy, "group_size": group}


def int8(strategy: str, **more: Any) -> dict[str, Any]:
    return {"num_bits": 8, "type": "int", "symmetric": True, "strategy": strategy, "dynamic": False, **more}


def float4(**more: Any) -> dict[str, Any]:
    return {"num_bits": 4, "type": "float", "symmetric": True, "strategy": "tensor_group", "group_size": 16, **more}


IGNORED = ("layers.1.mlp",)
"""Modules that the layouts with a list keep plain, besides the LM head."""
BLOCK_CONFIG = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [128, 128]}
TOKEN, TENSOR = float8("token", dynamic=True), float8("tensor")
MODELOPT = {"quant_method": "modelopt", "exclude_modules": ["lm_head", "model.layers.1.mlp*"]}
AUTO_ROUND = {"quant_method": "auto-round", "bits": 4, "group_size": 128, "sym": True, "data_type": "int"}
LAYOUTS = {
    "fp8-blocks": Layout(
        fp8_blocks("weight_scale_inv"),
        BLOCK_CONFIG | {"modules_to_not_convert": ["lm_head", "model.layers.1.mlp.gate_proj", "model.layers.1.mlp"]},
        by_token_and_group,
        IGNORED,
    ),
    "fp8-blocks-bf16-scales": Layout(fp8_blocks("weight_scale_inv", torch.bfloat16), BLOCK_CONFIG, by_token_and_group),
    "fp8-static": Layout(
        fp8_rows(True, (), torch.float32, True),
        {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]},
        fixed,
    ),
    "compressed-fp8-channel": Layout(
        fp8_rows(False, (-1, 1), torch.bfloat16, False),
        compressed(float8("channel"), TOKEN, "float-quantized"),
        by_token,
        IGNORED,
    ),
    "compressed-fp8-tensor": Layout(
        fp8_rows(True, (1,), torch.float32, False),
        compressed(TENSOR, TOKEN, "float-quantized"),
        by_token,
        IGNORED,
    ),
    "compressed-fp8-static": Layout(
        fp8_rows(True, (1,), torch.bfloat16, True),
        compressed(TENSOR, TENSOR, "float-quantized"),
        fixed,
        IGNORED,
    ),
    "compressed-fp8-blocks": Layout(
        fp8_blocks("weight_scale"),
        compressed(
            float8("block", block_structure=[128, 128]),
            float8("group", dynamic=True, group_size=128),
            "float-quantized",
        ),
        by_token_and_group,
        IGNORED,
    ),
    "awq": Layout(
        awq(128),
        {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}
        | {"modules_to_not_convert": ["layers.1.mlp"]},
        plain=IGNORED,
    ),
    "awq-64": Layout(
        awq(64), {"quant_method": "awq", "bits": 4, "group_size": 64, "zero_point": True, "version": "gemm"}
    ),
    "gptq": Layout(
        gptq(128, True, 1), {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True}
    ),
    "gptq-asymmetric-v2": Layout(
        gptq(32, False, 0),
        {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": False}
        | {"checkpoint_format": "gptq_v2", "dynamic": {"-:.*layers.1.mlp": {}}},
        plain=IGNORED,
    ),
    "gptq-asymmetric": Layout(
        gptq(128, False, 1), {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": False}
    ),
    "compressed-int4": Layout(
        packed_int4(128, True), compressed(int4("group", 128, True), None, "pack-quantized"), plain=IGNORED
    ),
    "compressed-int4-asymmetric": Layout(
        packed_int4(64, False), compressed(int4("group", 64, False), None, "pack-quantized"), plain=IGNORED
    ),
    "compressed-nvfp4": Layout(
        nvfp4(False), compressed(float4(), float4(dynamic="local"), "nvfp4-pack-quantized"), plain=IGNORED
    ),
    "compressed-nvfp4-weights": Layout(
        nvfp4(False, False), compressed(float4(), None, "nvfp4-pack-quantized"), plain=IGNORED
    ),
    "modelopt-nvfp4": Layout(
        nvfp4(True), {**MODELOPT, "quant_algo": "NVFP4", "group_size": 16, "kv_cache_quant_algo": "FP8"}, plain=IGNORED
    ),
    "modelopt-fp8": Layout(
        fp8_rows(True, (), torch.float32, True), {**MODELOPT, "quant_algo": "FP8"}, fixed, plain=IGNORED
    ),
    "fbgemm-fp8": Layout(
        fp8_rows(False, (-1, 1), torch.float32, False),
        {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1.5},
        bounded,
    ),
    "fp8-powers-of-two": Layout(
        powers_of_two(torch.float8_e8m0fnu), BLOCK_CONFIG | {"scale_fmt": "ue8m0"}, by_token_and_group
    ),
    "compressed-int8-a8": Layout(
        int8_rows(False, False),
        compressed(int8("channel"), int8("token", dynamic=True), "int-quantized"),
        int8_by_token,
        IGNORED,
    ),
    "compressed-int8-a8-shifted": Layout(
        int8_rows(False, False),
        compressed(int8("channel"), int8("token", dynamic=True, symmetric=False), "int-quantized"),
        int8_shifted,
        IGNORED,
    ),
    "compressed-int8-a8-static": Layout(
        int8_rows(True, True), compressed(int8("tensor"), int8("tensor"), "int-quantized"), int8_fixed, IGNORED
    ),
    "compressed-int8": Layout(
        int8_weights(-1, True), compressed(int8("channel"), None, "pack-quantized"), plain=IGNORED
    ),
    "compressed-int8-asymmetric": Layout(
        int8_weights(64, False),
        compressed(int8("group", group_size=64, symmetric=False), None, "pack-quantized"),
        plain=IGNORED,
    ),
    "compressed-int8-unpacked": Layout(
        int8_weights(-1, True, False), compressed(int8("channel"), None, "int-quantized"), plain=IGNORED
    ),
    "gptq-8-bits": Layout(
        gptq8(128, True), {"quant_method": "gptq", "bits": 8, "group_size": 128, "desc_act": False, "sym": True}
    ),
    "gptq-8-bits-asymmetric": Layout(
        gptq8(32, False), {"quant_method": "gptq", "bits": 8, "group_size": 32, "desc_act": False, "sym": False}
    ),
    "gptq-desc-act": Layout(
        in_activation_order(gptq(64, False, 1), eights),
        {"quant_method": "gptq", "bits": 4, "group_size": 64, "desc_act": True, "sym": False},
    ),
    "gptq-8-bits-desc-act": Layout(
        in_activation_order(gptq8(128, True), fours),
        {"quant_method": "gptq", "bits": 8, "group_size": 128, "desc_act": True, "sym": True},
    ),
    "auto-round-gptq": Layout(
        without("g_idx", gptq(128, True, 1)),
        {**AUTO_ROUND, "packing_format": "auto_round:auto_gptq", "extra_config": {"model.layers.1.mlp": {"bits": 16}}},
        plain=IGNORED,
    ),
    "auto-round-8-bits": Layout(
        without("g_idx", gptq8(128, True)), {**AUTO_ROUND, "bits": 8, "packing_format": "auto_round:auto_gptq"}
    ),
    "auto-round-awq": Layout(awq(128), {**AUTO_ROUND, "packing_format": "auto_round:auto_awq"}),
    "compressed-int4-channel": Layout(
        packed_int4(-1, True), compressed(int4("channel", None, True), None, "pack-quantized"), plain=IGNORED
    ),
}


PROJECTIONS = tuple(
    f"{name}.weight"
    for name in (
        "_proj", "_proj_with_mqa", ".attention.query_key_value", ".attention.dense", ".attention.wqkv", ".attention.wo",
        ".feed_forward.w1", ".feed_forward.w2", ".feed_forward.w3",
    )
)  # fmt: skip
"""Ends of the names of weights that a layout stores."""


def quantise(source: Path, target: Path, layout: Layout) -> dict[str, torch.Tensor]:
    """Write ``source`` with its projections in a layout; returns these weights in float64, by their modules' names."""
    shutil.copytree(source, target)
    tensors, values = load_file(source / "model.safetensors"), {}
    for name in [name for name in tensors if name.endswith(PROJECTIONS)]:
        module = name.removesuffix(".weight")
        if not any(plain in module for plain in layout.plain):
            stored, values[module] = layout.write(tensors.pop(name))
            tensors |= {f"{module}.{kind}": tensor for kind, tensor in stored.items()}
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(config | {"quantization_config": layout.config}))
    return values


class Dequantised(nn.Module):
    """A linear layer of the reference: float64 weights, inputs as the layout has them."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, activations: Activations) -> None:
        super().__init__()
        self.weight, self.bias, self.activations = weight, bias, activations

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(self.activations(x, 0.011), self.weight, self.bias)


@torch.no_grad()
def reference(
    source: Path, values: dict[str, torch.Tensor], activations: Activations, tokens: list[int]
) -> torch.Tensor:
    """Logits [len(tokens), V] in float64 of ``source`` with these weights in place of its own."""
    if json.loads((source / "config.json").read_text())["architectures"][0] in ARCHITECTURES.values():
        plain = PlainDecoder(source)
        plain.take(values, activations)
        return plain(torch.tensor([tokens])).logits[0].double()
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float64, attn_implementation="eager")
    for name, weight in values.items():
        old = model.get_submodule(name)
        model.set_submodule(name, Dequantised(weight, old.bias, activations))
    return model(torch.tensor([tokens])).logits[0]
