"""Ling 2.0 from checkpoints: the published config, names, quantised and divided tensors, an MTP module, refusals."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.distributed.parts_ import loaded
from tests.models.harness import load, rounds, whole
from tests.models.hybrids import fused, renamed
from tests.models.make import make_checkpoint
from tests.models.make_layer_mtp import make_layer_mtp
from tests.models.mtp_pass import open_modules, run
from tests.models.quantised import LAYOUTS, quantise, reference
from tests.models.quantised_writers import untouched
from unisono.distributed.gather import Ranks
from unisono.kernels.moe.scored_router import RouterScores
from unisono.layers.formats.base import part_of
from unisono.models.blocks.decoder import Decoder
from unisono.models.blocks.experts import ExpertsSpec
from unisono.models.blocks.layers import MLPSpec
from unisono.models.load.build import Builder, no_attention
from unisono.models.load.checkpoint import WEIGHTS, Checkpoint
from unisono.types import CheckpointError

SHAPE = Path(__file__).parents[2] / "benchmarks" / "shapes" / "ling-mini-2.0"
SIZES: dict[str, Any] = {
    "hidden_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "intermediate_size": 384,
    "moe_intermediate_size": 128,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "num_hidden_layers": 3,
}
"""Keys and values have 128 rows each, so that no block of a format cuts them."""
ROUNDED = 0.03
"""Bound where inputs are rounded to 8 bits: fp32 and float64 round some to different neighbours, and an expert may
change with them."""
PROMPT = [7 * i % 251 for i in range(40)]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("plain") / "model", "bailing_moe", **SIZES)


def test_the_published_config_is_read() -> None:
    config = Checkpoint.open(SHAPE).config
    attention = config.attention
    assert config.attention_shapes == ((16, 4, 128),)
    assert (attention.qk_norm, attention.rotary.planes) == (True, 32)
    assert config.layers[0].feed_forward == MLPSpec(5120)
    scores = RouterScores(correction=True, groups=8, top_groups=4, scale=2.5)
    assert config.layers[1].feed_forward == ExpertsSpec(256, 8, 512, 512, scores=scores)
    builder = Builder(config.hidden_size, config.rms_eps, torch.bfloat16, "meta", no_attention, 1)
    elements = sum(p.numel() for p in Decoder(config, builder).parameters())
    assert elements == pytest.approx(16.26e9, rel=1e-3)


def test_defaults_are_those_of_the_published_class(plain: Path, tmp_path: Path) -> None:
    raw = json.loads((plain / "config.json").read_text())
    for name in ("use_qk_norm", "num_shared_experts", "first_k_dense_replace", "num_nextn_predict_layers"):
        raw.pop(name, None)
    (tmp_path / "config.json").write_text(json.dumps(raw))
    assert Checkpoint.open(tmp_path).config == Checkpoint.open(plain).config


@pytest.mark.parametrize(
    "name",
    ["fp8-blocks", "compressed-fp8-channel", "compressed-fp8-blocks", "compressed-int4", "compressed-int8-a8",
     "compressed-nvfp4"],
)  # fmt: skip
def test_logits_are_those_of_the_dequantised_weights(name: str, plain: Path, tmp_path: Path) -> None:
    layout = LAYOUTS[name]
    values = quantise(plain, tmp_path / "model", layout)
    assert {"model.layers.1.attention.query_key_value", "model.layers.2.mlp.experts.5.down_proj"} <= values.keys()
    want = reference(plain, values, layout.activations, PROMPT)
    decoder = load(tmp_path / "model")
    (got,) = whole(decoder, [PROMPT])
    bound = 1e-5 if layout.activations is untouched else ROUNDED
    assert float((got.double() - want).norm() / want.norm()) < bound
    assert torch.equal(rounds(decoder, [PROMPT], 4)[0], got)


@pytest.mark.parametrize("name", ["awq", "gptq"])
def test_packed_projections_with_outputs_in_columns_are_refused(name: str, plain: Path, tmp_path: Path) -> None:
    quantise(plain, tmp_path / "model", LAYOUTS[name])
    with pytest.raises(CheckpointError, match=r"query_key_value\.\S+ has a value for each .* not quantised"):
        load(tmp_path / "model")


@pytest.mark.parametrize("whole_experts", [False, True])
def test_a_rank_holds_its_part(whole_experts: bool, plain: Path) -> None:
    one = dict(loaded(plain, Ranks()).named_parameters())
    for index in range(2):
        divided = 0
        for name, parameter in loaded(plain, Ranks(index, 2, whole_experts=whole_experts)).named_parameters():
            cut = part_of(parameter)
            divided += cut is not None
            assert torch.equal(parameter, one[name] if cut is None else cut.of(one[name])), name
        assert divided > 4


def test_fused_experts_have_the_same_bits(plain: Path, tmp_path: Path) -> None:
    (want,) = whole(load(plain), [PROMPT])
    assert torch.equal(whole(load(renamed(plain, tmp_path / "fused", fused)), [PROMPT])[0], want)


def test_a_module_in_fp8_computes_with_its_weights(tmp_path: Path) -> None:
    """Its projection is plain, as the published conversion leaves it. The oracle's weights are the dequantised ones."""
    made = make_layer_mtp(tmp_path / "plain", "bailing_moe", **SIZES)
    layout = replace(LAYOUTS["fp8-blocks"], plain=(*LAYOUTS["fp8-blocks"].plain, "eh_proj"))
    values = quantise(made.path, tmp_path / "fp8", layout)
    assert "model.layers.2.attention.query_key_value" in values
    made.model.take(values, layout.activations)
    _, [module] = open_modules(tmp_path / "fp8", load(tmp_path / "fp8"))
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, 250, (37,), generator=generator, dtype=torch.int32)
    hidden = torch.randn(37, SIZES["hidden_size"], generator=generator)
    want = made.forward(tokens.long(), hidden)
    got = module.finish(run(module, tokens, hidden))[0]
    assert float((got - want).norm() / want.norm()) < ROUNDED


def test_a_module_with_an_unexpected_tensor_is_refused(tmp_path: Path) -> None:
    made = make_layer_mtp(tmp_path, "bailing_moe", num_hidden_layers=3)
    tensors = load_file(made.path / WEIGHTS)
    save_file({**tensors, "model.layers.2.gate.weight": torch.zeros(3)}, made.path / WEIGHTS)
    with pytest.raises(CheckpointError, match=r"model\.layers\.2\.gate\.weight \[3\] is unexpected"):
        open_modules(made.path, load(made.path))


REFUSED: dict[str, dict[str, Any]] = {
    "score_function='softmax'": {"score_function": "softmax"},
    "moe_router_enable_expert_bias=False": {"moe_router_enable_expert_bias": False},
    "norm_topk_prob=False": {"norm_topk_prob": False},
    "norm_head=True": {"norm_head": True},
    "use_rmsnorm=False": {"use_rmsnorm": False},
    "rotary_dim=48": {"rotary_dim": 48},
    "hidden_act='gelu'": {"hidden_act": "gelu"},
    "n_group=4": {"n_group": 4},
    "topk_group=3": {"topk_group": 3},
    "first_k_dense_replace=9": {"first_k_dense_replace": 9},
    "sliding_window=64": {"sliding_window": 64},
    "model_type='bailing_hybrid'": {"model_type": "bailing_hybrid"},
}


@pytest.mark.parametrize("says", REFUSED)
def test_unsupported_fields_are_refused_by_name(says: str, plain: Path, tmp_path: Path) -> None:
    raw = json.loads((plain / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(raw | REFUSED[says]))
    with pytest.raises(CheckpointError, match=re.escape(says)):
        Checkpoint.open(tmp_path)
