"""MTP modules that are a decoder layer of their target: names, block, router and attention against transformers."""

from __future__ import annotations

import pytest
import torch

from tests.models.harness import load
from tests.models.make_layer_mtp import make_layer_mtp
from tests.models.mtp_pass import open_modules, run
from unisono.drafters.from_checkpoint import carried_speculation

CASES = {
    "glm4_moe": {"num_hidden_layers": 3},
    "glm4_moe_lite": {"num_hidden_layers": 3},
    "deepseek_v3": {"num_hidden_layers": 3},
}


@pytest.fixture(scope="module", params=CASES)
def made(request, tmp_path_factory):
    return make_layer_mtp(tmp_path_factory.mktemp(request.param), request.param, **CASES[request.param])


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
