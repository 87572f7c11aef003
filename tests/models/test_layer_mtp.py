"""MTP modules that are a decoder layer of their target: names, block, router and attention against transformers."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.models.harness import load
from tests.models.make_layer_mtp import make_layer_mtp, make_nemotron_mtp
from tests.models.mtp_pass import open_modules, run
from unisono.drafters.from_checkpoint import carried_bytes, carried_speculation
from unisono.models.load.checkpoint import WEIGHTS

CASES = {
    "bailing_moe": {"num_hidden_layers": 3},
    "glm4_moe": {"num_hidden_layers": 3},
    "glm4_moe_lite": {"num_hidden_layers": 3},
    "deepseek_v3": {"num_hidden_layers": 3},
}
MAMBA_LAYERS = ["linear_attention", "moe", "full_attention", "mlp"]
NEMOTRON = {
    "nemotron_h": {"layers_block_type": MAMBA_LAYERS},
    "nemotron_h-latent": {"layers_block_type": MAMBA_LAYERS, "moe_latent_size": 24},
    "nemotron_h-mlp": {"layers_block_type": MAMBA_LAYERS, "feed_forward": "mlp"},
}


@pytest.fixture(scope="module", params=[*CASES, *NEMOTRON])
def made(request, tmp_path_factory):
    directory, name = tmp_path_factory.mktemp(request.param), request.param
    if name in NEMOTRON:
        return make_nemotron_mtp(directory, **NEMOTRON[name])
    return make_layer_mtp(directory, name, **CASES[name])


def test_the_module_computes_as_the_targets_layer(made):
    target = load(made.path)
    checkpoint, [module] = open_modules(made.path, target)
    assert checkpoint.depth == 1
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, 250, (37,), generator=generator, dtype=torch.int32)
    hidden = torch.randn(37, target.config.hidden_size, generator=generator)
    ours = module.finish(run(module, tokens, hidden))[0]
    torch.testing.assert_close(ours, made.forward(tokens.long(), hidden), atol=1e-4, rtol=0)


def test_mtp_layer_is_used_by_default(made):
    speculation, why = carried_speculation(made.path, load(made.path).config)
    assert speculation is not None, why
    assert speculation.method == "mtp"


def test_bytes_of_a_nemotron_module_are_those_of_both_layers(tmp_path):
    path = make_nemotron_mtp(tmp_path, **NEMOTRON["nemotron_h"]).path
    sizes = [tensor.nbytes for name, tensor in load_file(path / WEIGHTS).items() if name.startswith("mtp.")]
    assert carried_bytes(path) == sum(sizes)


@pytest.mark.parametrize("kinds", [["full_attention"], ["moe", "full_attention"], ["full_attention", "mlp"]])
def test_a_nemotron_module_of_other_layers_is_refused_by_name(tmp_path, kinds):
    path = make_nemotron_mtp(tmp_path, **NEMOTRON["nemotron_h"]).path
    raw = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**raw, "mtp_layers_block_type": kinds}))
    speculation, why = carried_speculation(path, load(path).config)
    assert speculation is None
    assert f"mtp_layers_block_type={kinds}" in why


def test_a_nemotron_module_with_a_recurrence_is_refused(tmp_path):
    path = make_nemotron_mtp(tmp_path, **NEMOTRON["nemotron_h"]).path
    tensors = load_file(path / WEIGHTS)
    save_file({**tensors, "mtp.layers.0.mixer.A_log": torch.zeros(6)}, path / WEIGHTS)
    speculation, why = carried_speculation(path, load(path).config)
    assert speculation is None
    assert "linear attention (mtp.layers.0.mixer.A_log)" in why
