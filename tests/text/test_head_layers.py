"""Layers after a model, compared with PyTorch's, and sentence-transformers' files that are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from tests.models.sentences import write_modules
from unisono.frontend.classifier import classifier_of
from unisono.frontend.head_layers import ACTIVATIONS, HeadLayer, HeadNorm, folded
from unisono.frontend.pooling import pooling_of

RNG = np.random.default_rng(0)


def layer(outputs: int, inputs: int, activation: str = "identity", bias: bool = True) -> HeadLayer:
    return HeadLayer(RNG.normal(size=(outputs, inputs)), RNG.normal(size=outputs) if bias else None, activation)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_a_layer_is_pytorchs(activation: str) -> None:
    made, x = layer(5, 7, activation), RNG.normal(size=7)
    assert made.bias is not None
    norm = HeadNorm(RNG.normal(size=5), RNG.normal(size=5), 1e-3)
    y = torch.nn.functional.linear(torch.tensor(x), torch.tensor(made.weight), torch.tensor(made.bias))
    y = y if activation == "identity" else getattr(torch.nn.functional, activation)(y)
    np.testing.assert_allclose(made(x), y.numpy(), atol=1e-12)
    y = torch.nn.functional.layer_norm(y, (5,), torch.tensor(norm.weight), torch.tensor(norm.bias), 1e-3)
    np.testing.assert_allclose(HeadLayer(made.weight, made.bias, activation, norm)(x), y.numpy(), atol=1e-12)


@pytest.mark.parametrize("bias", [True, False])
def test_neighbours_without_an_activation_between_them_are_one(bias: bool) -> None:
    wide = [layer(40, 6, bias=bias), layer(6, 40, "tanh", bias), layer(6, 6, bias=bias)]
    found, x = folded(wide), RNG.normal(size=6)
    assert [each.weight.shape for each in found] == [(6, 6), (6, 6)]
    y, z = x, x
    for each in wide:
        y = each(y)
    for each in found:
        z = each(z)
    np.testing.assert_allclose(z, y, atol=1e-10)
    assert len(folded([layer(2, 60), layer(60, 2)])) == 2, "the product would be larger"


@pytest.mark.parametrize(
    ("file", "content", "word"),
    [
        ("modules.json", [{"type": "sentence_transformers.models.CNN", "path": "2_CNN"}], "models.CNN"),
        ("modules.json", [{"type": "x.Dense", "path": "../2_Dense"}], "outside the checkpoint"),
        ("modules.json", {}, "not a list"),
        ("1_Pooling/config.json", {"pooling_mode_cls_token": True, "include_prompt": False}, "include_prompt=false"),
        ("2_Dense/config.json", {"activation_function": "torch.nn.SELU"}, "'selu'"),
        ("2_Dense/config.json", {"activation_function": "torch.nn.Tanh"}, None),
    ],
)
def test_modules_that_are_not_computed_are_a_problem(tmp_path: Path, file: str, content: Any, word: str | None) -> None:
    write_modules(tmp_path, "cls_token", 8, [(6, "Identity")], prompts={"query": "q: "})
    assert pooling_of(tmp_path).problem is None
    (tmp_path / file).write_text(json.dumps(content))
    problem = pooling_of(tmp_path).problem
    assert problem is None if word is None else word in str(problem)


def test_a_dense_layer_that_does_not_fit_is_a_problem(tmp_path: Path) -> None:
    write_modules(tmp_path, "cls_token", 8, [(6, "Identity")])
    config = tmp_path / "1_Pooling" / "config.json"
    config.write_text(json.dumps({"pooling_mode_cls_token": True, "word_embedding_dimension": 9}))
    assert "it reads 9 values" in str(pooling_of(tmp_path).problem)
    (tmp_path / "2_Dense" / "model.safetensors").unlink()
    assert "no model.safetensors" in str(pooling_of(tmp_path).problem)


@pytest.mark.parametrize(
    ("fields", "activation"),
    [
        ({"sbert_ce_default_activation_function": "torch.nn.modules.linear.Identity"}, "identity"),
        ({"sentence_transformers": {"activation_fn": "torch.nn.modules.activation.Sigmoid"}}, "sigmoid"),
        ({"sentence_transformers": {"activation_fn": "torch.nn.Mish"}}, None),
        ({}, "sigmoid"),
    ],
)
def test_the_activation_of_a_cross_encoder(fields: dict[str, Any], activation: str | None, tmp_path: Path) -> None:
    names = {"bert.pooler.dense": (4, 4), "classifier": (1, 4)}
    save_file({f"{name}.weight": torch.ones(shape) for name, shape in names.items()}, tmp_path / "model.safetensors")
    config = {"architectures": ["BertForSequenceClassification"], "hidden_size": 4, **fields}
    (tmp_path / "config.json").write_text(json.dumps(config))
    if activation is None:
        with pytest.raises(ValueError, match="Mish"):
            classifier_of(tmp_path, {}, lambda token: None)
        return
    found = classifier_of(tmp_path, {}, lambda token: None)
    assert found is not None
    assert (found.activation, found.mode) == (activation, "cls")
