"""Kimi Linear from checkpoints: the published config, quantised products beside plain gates, ranks, refusals."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.distributed.parts_ import loaded
from tests.models.harness import load, rounds, whole
from tests.models.hybrids import renamed
from tests.models.make import make_checkpoint
from tests.models.quantised import LAYOUTS, quantise
from unisono.distributed.gather import Ranks
from unisono.layers.formats.base import part_of
from unisono.models.blocks.decoder import Decoder
from unisono.models.blocks.kimi_delta import KimiDelta, KimiDeltaSpec
from unisono.models.load.build import Builder, no_attention
from unisono.models.load.checkpoint import WEIGHTS, Checkpoint
from unisono.types import CheckpointError

SHAPE = Path(__file__).parents[2] / "benchmarks" / "shapes" / "kimi-linear-48b-a3b"
SIZES: dict[str, Any] = {
    "hidden_size": 128,
    "linear_head_dim": 32,
    "kv_lora_rank": 64,
    "v_head_dim": 16,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "intermediate_size": 128,
    "moe_intermediate_size": 64,
}
PROMPT = [7 * i % 251 for i in range(40)]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("plain"), "kimi_linear", **SIZES)


def test_the_published_config_is_read() -> None:
    config = Checkpoint.open(SHAPE).config
    kinds = [isinstance(layer.mixer, KimiDeltaSpec) for layer in config.layers]
    assert [number for number, recurs in enumerate(kinds, 1) if not recurs] == [4, 8, 12, 16, 20, 24, 27]
    assert config.layers[0].mixer == KimiDeltaSpec(32, 128)
    assert config.attention_shapes == ((32, 1, 576),)
    assert config.attention.scale == pytest.approx(192**-0.5)
    builder = Builder(config.hidden_size, config.rms_eps, torch.bfloat16, "meta", no_attention, 1)
    elements = sum(p.numel() for p in Decoder(config, builder).parameters())
    assert elements == pytest.approx(49.1e9, rel=2e-3)


@pytest.mark.parametrize("gates", ["quantised", "plain"])
def test_quantised_products_are_those_of_their_weights(gates: str, plain: Path, tmp_path: Path) -> None:
    """The gates' small products are often left plain. The oracle is a checkpoint with the dequantised weights."""
    layout, kept = LAYOUTS["compressed-int8"], ["block_sparse_moe"]
    if gates == "plain":
        kept += [f"self_attn.{name}_proj" for name in ("f_a", "g_a", "b", "f_b", "g_b")]
    config = {**layout.config, "ignore": ["lm_head", *(f"re:.*{re.escape(each)}" for each in kept)]}
    values = quantise(plain, tmp_path / "int8", replace(layout, plain=tuple(kept), config=config))
    assert any(name.endswith("f_a_proj") for name in values) == (gates == "quantised")
    exact = renamed(plain, tmp_path / "exact", lambda t: t | {f"{n}.weight": v.float() for n, v in values.items()})
    decoder = load(tmp_path / "int8")
    mixer = decoder.layers[0].mixer
    assert isinstance(mixer, KimiDelta)
    assert mixer.gates is not None
    (got,), (want,) = whole(decoder, [PROMPT]), whole(load(exact), [PROMPT])
    torch.testing.assert_close(got, want, atol=1e-4, rtol=0)
    assert torch.equal(rounds(decoder, [PROMPT], 4)[0], got)


def test_a_rank_holds_its_heads(plain: Path) -> None:
    one = dict(loaded(plain, Ranks()).named_parameters())
    for index in range(2):
        for name, parameter in loaded(plain, Ranks(index, 2)).named_parameters():
            cut = part_of(parameter)
            assert torch.equal(parameter, one[name] if cut is None else cut.of(one[name])), name
            assert cut is not None or not name.endswith(("A_log", "dt_bias", "conv.weight")), name


def test_the_checkpoint_is_stored_as_published(plain: Path) -> None:
    """Otherwise the names in these tests would be ours alone."""
    tensors = load_file(plain / WEIGHTS)
    for name in ("0.self_attn.q_conv1d.weight", "0.self_attn.f_a_proj.weight", "0.mlp.gate_proj.weight",
                 "1.block_sparse_moe.experts.3.w2.weight", "1.block_sparse_moe.gate.e_score_correction_bias",
                 "1.self_attn.kv_a_proj_with_mqa.weight"):  # fmt: skip
        assert f"model.layers.{name}" in tensors
    assert tensors["model.layers.0.self_attn.A_log"].shape == (1, 1, 4, 1)


REFUSED: dict[str, dict[str, Any]] = {
    "moe_router_activation_func='softmax'": {"moe_router_activation_func": "softmax"},
    "mla_use_nope=False": {"mla_use_nope": False},
    "mla_use_output_gate=True": {"mla_use_output_gate": True},
    "num_nextn_predict_layers=1": {"num_nextn_predict_layers": 1},
    "linear_attn_config.gate_lower_bound=-5.0": {"linear_attn_config": {"gate_lower_bound": -5.0}},
    "linear_attn_config.use_full_rank_gate=True": {"linear_attn_config": {"use_full_rank_gate": True}},
    "linear_attn_config.head_dim=24": {"linear_head_dim": 24},
    "at least one layer must be full_attention": {"layer_types": ["linear_attention"] * 3},
}


@pytest.mark.parametrize("says", REFUSED)
def test_unsupported_kimi_linear_fields_raise(says: str, plain: Path, tmp_path: Path) -> None:
    raw = json.loads((plain / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(raw | REFUSED[says]))
    with pytest.raises(CheckpointError, match=re.escape(says)):
        Checkpoint.open(tmp_path)
