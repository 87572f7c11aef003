"""Rows whose tensors are packed, or whose heads lie in another order: quantised, and divided among ranks."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from tests.distributed.parts_ import loaded
from tests.models.harness import load, whole
from tests.models.make import make_checkpoint
from tests.models.quantised import LAYOUTS, quantise, reference
from tests.models.quantised_writers import untouched
from tests.models.table_cases import CASES, family_of, fields_of
from unisono.distributed.gather import Ranks
from unisono.layers.formats.base import part_of
from unisono.types import CheckpointError, ConfigError

BIG = {"hidden_size": 256, "intermediate_size": 384, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
ROUNDED = 0.02
"""Bound where inputs are rounded to 8 bits: fp32 and float64 round some to different neighbours. Rows in another order
give 1."""
PROMPT = random.Random(0).choices(range(256), k=40)
WITHOUT_HEAD_SIZE = {name: size for name, size in BIG.items() if name != "head_dim"}
OWN = {
    "phi3": {**WITHOUT_HEAD_SIZE, "num_key_value_heads": 4},
    "internlm2": {**WITHOUT_HEAD_SIZE, "num_attention_heads": 2, "num_key_value_heads": 1, "bias": False},
}
"""Sizes of families whose packed projections do not fit BIG. InternLM2's heads are a block of 128 rows each."""


@pytest.mark.parametrize(
    ("family", "layout"),
    [
        ("glm4", "compressed-fp8-channel"),
        ("glm4", "compressed-fp8-tensor"),
        ("glm4", "compressed-int4"),
        ("ernie4_5", "fp8-blocks"),
        ("phi3", "compressed-fp8-channel"),
        ("phi3", "compressed-fp8-tensor"),
        ("phi3", "fp8-blocks"),
        ("granite", "gptq"),
        ("internlm2", "compressed-fp8-channel"),
        ("internlm2", "compressed-fp8-tensor"),
        ("internlm2", "compressed-int4"),
        ("internlm2", "fp8-blocks"),
    ],
)
def test_logits_are_those_of_the_dequantised_weights(family: str, layout: str, tmp_path: Path) -> None:
    plain = make_checkpoint(tmp_path / "plain", family, tokenizer=False, num_hidden_layers=2, **OWN.get(family, BIG))
    values = quantise(plain, tmp_path / "model", LAYOUTS[layout])
    want = reference(plain, values, LAYOUTS[layout].activations, PROMPT)
    (got,) = whole(load(tmp_path / "model"), [PROMPT])
    inputs = LAYOUTS[layout].activations is not untouched
    assert float((got.double() - want).norm() / want.norm()) < (ROUNDED if inputs else 1e-5)


@pytest.mark.parametrize(
    ("family", "layout"), [("glm4", "gptq"), ("phi3", "awq"), ("ernie4_5", "awq"), ("internlm2", "awq")]
)
def test_a_layout_that_stores_outputs_in_columns_is_refused(family: str, layout: str, tmp_path: Path) -> None:
    plain = make_checkpoint(tmp_path / "plain", family, tokenizer=False, num_hidden_layers=2, **OWN.get(family, BIG))
    quantise(plain, tmp_path / "model", LAYOUTS[layout])
    with pytest.raises(CheckpointError, match="in which this layer is not quantised"):
        load(tmp_path / "model")


@pytest.mark.parametrize("case", CASES)
def test_a_rank_holds_its_part_or_is_refused(case: str, tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, family_of(case), tokenizer=False, **fields_of(case))
    ours = loaded(path, Ranks())
    layers = dict(ours.named_parameters())
    together = any(layer.mixer.spec.steps is not None and layer.mixer.spec.steps.norm for layer in ours.layers)
    for index in range(2):
        if together:
            with pytest.raises(ConfigError, match="weights of each head"):
                loaded(path, Ranks(index, 2))
            continue
        divided = 0
        for name, parameter in loaded(path, Ranks(index, 2)).named_parameters():
            cut = part_of(parameter)
            divided += cut is not None
            assert torch.equal(parameter, layers[name] if cut is None else cut.of(layers[name])), name
        assert divided > 10
