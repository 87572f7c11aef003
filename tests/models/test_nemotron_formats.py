"""Nemotron-H in the formats of its checkpoints: logits are float64's, experts without a gate and Mamba2 included."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from torch import float32

from tests.models.harness import load, whole
from tests.models.make import make_checkpoint
from tests.models.quantised import LAYOUTS, MODELOPT, Layout, fixed, fp8_rows, quantise
from tests.models.quantised_experts import PROMPT, error, reference
from unisono.types import CheckpointError

SIZES = {
    "hidden_size": 256,
    "layers_block_type": ["linear_attention", "moe", "full_attention"],
    "num_attention_heads": 4,
    "head_dim": 64,
    "mamba_num_heads": 8,
    "moe_intermediate_size": 128,
    "moe_shared_expert_intermediate_size": 128,
}
NAMES = ["compressed-fp8-channel", "modelopt-fp8", "modelopt-nvfp4", "compressed-int4", "compressed-int8"]
OTHERS = ("layers.0", "layers.2")
EXPERTS_ALONE = replace(
    LAYOUTS["modelopt-fp8"],
    plain=OTHERS,
    config={**MODELOPT, "quant_algo": "FP8", "exclude_modules": [f"*{each}.*" for each in OTHERS]},
)
"""With more layers a value that e4m3 rounds up here and down there has to be expected."""


@pytest.fixture(scope="module", params=[None, 128], ids=["whole", "latent"])
def plain(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("plain") / "model"
    return make_checkpoint(directory, "nemotron_h", **SIZES, moe_latent_size=request.param)


@pytest.mark.parametrize("name", NAMES)
def test_logits_are_those_of_the_dequantised_weights(name: str, plain: Path, tmp_path: Path) -> None:
    layout = EXPERTS_ALONE if name == "modelopt-fp8" else LAYOUTS[name]
    values = quantise(plain, tmp_path / "model", layout)
    assert any(".experts.3.up_proj" in module for module in values)
    (got,) = whole(load(tmp_path / "model"), [PROMPT])
    assert error(got, reference(plain, values, layout.activations)) < 1e-5


def mixed(**changes: object) -> Layout:
    """Mamba2 in fp8, everything else plain, as ModelOpt's MIXED_PRECISION says it."""
    layers = {"backbone.layers.0.mixer.*": {"quant_algo": "FP8", **changes}}
    config = {**MODELOPT, "quant_algo": "MIXED_PRECISION", "quantized_layers": layers}
    return Layout(fp8_rows(True, (), float32, True), config, fixed, ("layers.1", "layers.2"))


def test_mixed_precision_has_an_algorithm_for_each_module(plain: Path, tmp_path: Path) -> None:
    values = quantise(plain, tmp_path / "model", mixed())
    assert {module.split(".")[2] for module in values} == {"0"}
    (got,) = whole(load(tmp_path / "model"), [PROMPT])
    assert error(got, reference(plain, values, fixed)) < 1e-5


def test_packed_outputs_of_reordered_rows_are_refused(plain: Path, tmp_path: Path) -> None:
    quantise(plain, tmp_path / "model", LAYOUTS["gptq"])
    with pytest.raises(CheckpointError, match=r"in_proj\.qweight has a value for each"):
        load(tmp_path / "model")


def test_mixed_precision_of_an_unknown_algorithm_is_refused(plain: Path, tmp_path: Path) -> None:
    quantise(plain, tmp_path / "model", mixed(quant_algo="MXFP8"))
    with pytest.raises(CheckpointError, match="MXFP8"):
        load(tmp_path / "model")
