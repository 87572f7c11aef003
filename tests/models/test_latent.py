"""Latent attention from checkpoints: fp8 weights become what they stand for, ranks read their heads, refusals."""

from __future__ import annotations

import json
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.distributed.parts_ import loaded
from tests.models.harness import chunked, load, whole
from tests.models.make import make_checkpoint
from tests.models.quantised import IGNORED, LAYOUTS, Layout, compressed, int4, quantise
from tests.models.quantised_writers import awq, packed_int4
from unisono.distributed.gather import Ranks
from unisono.kernels.attention import latent_rows
from unisono.kernels.cache.kv_e4m3 import dequantised, quantised
from unisono.kernels.norm.rms_norm import rms_norm
from unisono.layers.formats.base import part_of
from unisono.models.load.checkpoint import WEIGHTS, Checkpoint
from unisono.models.load.loader import partial_update
from unisono.models.load.tensor_files import tensor
from unisono.models.load.update import Changes
from unisono.types import CheckpointError, ConfigError

SIZES: dict[str, Any] = {
    "num_attention_heads": 6,
    "num_key_value_heads": 6,
    "hidden_size": 256,
    "q_lora_rank": 128,
    "qk_nope_head_dim": 120,
    "kv_lora_rank": 64,
    "v_head_dim": 16,
    "intermediate_size": 256,
    "moe_intermediate_size": 128,
    "n_routed_experts": 4,
}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("plain"), "glm4_moe_lite", **SIZES)


KIMI = Layout(packed_int4(32, True), compressed(int4("group", 32, True), None, "pack-quantized"), plain=IGNORED)
"""As Kimi K2 Thinking's, but of every product."""
AWQ_32 = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
LAYOUTS_THERE = {"kimi": KIMI, "awq": Layout(awq(32), AWQ_32)} | {
    name: LAYOUTS[name]
    for name in ("fp8-blocks-bf16-scales", "compressed-fp8-tensor", "compressed-fp8-channel", "gptq-asymmetric-v2",
                 "gptq-8-bits-asymmetric")
}  # fmt: skip


@pytest.mark.parametrize("layout", LAYOUTS_THERE)
def test_the_expanding_product_is_dequantised(layout: str, plain: Path, tmp_path: Path) -> None:
    values = quantise(plain, tmp_path / "quantised", LAYOUTS_THERE[layout])
    decoder = load(tmp_path / "quantised")
    for number, layer in enumerate(decoder.layers):
        kv_b = layer.mixer.kv_b
        stored = values[f"model.layers.{number}.self_attn.kv_b_proj"].view(6, 136, 64)
        torch.testing.assert_close(kv_b.keys.double(), stored[:, :120].mT, atol=1e-6, rtol=1e-6)
        torch.testing.assert_close(kv_b.values.double(), stored[:, 120:], atol=1e-6, rtol=1e-6)
        of_rank = loaded(tmp_path / "quantised", Ranks(1, 2)).layers[number].mixer.kv_b
        assert torch.equal(of_rank.keys, kv_b.keys[3:])
        assert torch.equal(of_rank.values, kv_b.values[3:])
    rng = random.Random(0)
    prompts = [[rng.randrange(256) for _ in range(n)] for n in (40, 21)]
    for got, want in zip(chunked(decoder, prompts, 7), whole(decoder, prompts), strict=True):
        assert want.isfinite().all()
        assert torch.equal(got, want)


@pytest.mark.parametrize("layout", ["kimi", "fp8-blocks-bf16-scales"])
def test_an_expanding_product_is_pushed_with_its_scales(layout: str, plain: Path, tmp_path: Path) -> None:
    """A part alone is refused, and not used by the next push, whose scales come first."""
    quantise(plain, tmp_path / "quantised", LAYOUTS_THERE[layout])
    decoder, checkpoint = load(tmp_path / "quantised"), Checkpoint.open(tmp_path / "quantised")
    path = "model.layers.1.self_attn.kv_b_proj."
    stored = {name: info for name, info in checkpoint.tensors().items() if name.startswith(path)}
    weight = next(name for name in stored if name.startswith(f"{path}weight") and "scale" not in name)
    kv_b = decoder.layers[1].mixer.kv_b
    keys = kv_b.keys.clone()
    with pytest.raises(CheckpointError, match="push its weight and its scales together"):
        Changes([partial_update(decoder, checkpoint, {weight: stored[weight]})]).write()
    assert torch.equal(kv_b.keys, keys)
    kv_b.take(weight.removeprefix(path), torch.zeros_like(tensor(weight, stored)))  # of a read that failed
    kv_b.keys.zero_()
    scales_first = dict(sorted(stored.items(), key=lambda each: each[0] == weight))
    update = partial_update(decoder, checkpoint, scales_first)
    for name in scales_first:
        update.targets[name].fill(tensor(name, stored))
    assert torch.equal(kv_b.keys, keys)


@pytest.mark.parametrize("format", ["auto", "dummy"])
def test_a_rank_holds_its_heads(format: Any, plain: Path) -> None:
    one = dict(loaded(plain, Ranks(), load_format=format).named_parameters())
    for index, count in ((0, 2), (2, 3)):
        for name, parameter in loaded(plain, Ranks(index, count), load_format=format).named_parameters():
            cut = part_of(parameter)
            assert torch.equal(parameter, one[name] if cut is None else cut.of(one[name])), name
            assert cut is not None or ".kv_b." not in name


def test_the_checkpoint_is_stored_as_published(plain: Path) -> None:
    """Otherwise the names in these tests would be ours alone."""
    names = load_file(plain / WEIGHTS).keys()
    for name in ("self_attn.kv_a_proj_with_mqa.weight", "mlp.gate.e_score_correction_bias",
                 "mlp.experts.3.down_proj.weight", "mlp.shared_experts.up_proj.weight"):  # fmt: skip
        assert f"model.layers.1.{name}" in names


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "a latent too large": ({"kv_lora_rank": 1024}, "kv_lora_rank=1024: the kernel computes up to 512"),
    "groups that do not divide": ({"n_group": 3}, "n_group=3: it must divide 4 experts"),
    "groups too small": ({"n_group": 4, "topk_group": 2}, "must hold num_experts_per_tok=3"),
    "another router": ({"topk_method": "greedy"}, "topk_method='greedy': only 'noaux_tc' is supported"),
    "another score": ({"scoring_func": "softmax"}, "scoring_func='softmax': only 'sigmoid' is supported"),
    "partial rotation": (
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
        "partial_rotary_factor=0.5",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_unsupported_mla_config_fields_raise(case: str, plain: Path, tmp_path: Path) -> None:
    changes, says = REFUSED[case]
    raw = json.loads((plain / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(raw | changes))
    with pytest.raises(CheckpointError, match=says):
        load(tmp_path, load_format="dummy")


def test_nvfp4_of_the_expanding_product_is_refused(plain: Path, tmp_path: Path) -> None:
    quantise(plain, tmp_path / "nvfp4", LAYOUTS["compressed-nvfp4-weights"])
    with pytest.raises(CheckpointError, match=r"kv_b is stored in format 'NVFP4.*integers without int8 activations"):
        load(tmp_path / "nvfp4")


def test_an_fp8_cache_holds_e4m3_latents(plain: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The logits are those of plain pages that hold the rounded latents."""
    decoder = load(plain, kv_dtype=torch.float8_e4m3fn)
    specs = decoder.layers[0].mixer.state_specs()
    rope = decoder.layers[0].mixer.spec.rope_dim
    assert [(spec.shape[2], spec.dtype) for spec in specs] == [
        (64, torch.float8_e4m3fn), (rope, torch.float32), (1, torch.uint8),
    ]  # fmt: skip
    rng = random.Random(0)
    prompts = [[rng.randrange(256) for _ in range(n)] for n in (40, 21)]
    found, exact = whole(decoder, prompts), whole(load(plain), prompts)
    for got, want in zip(chunked(decoder, prompts, 7), found, strict=True):
        assert torch.equal(got, want)

    def rounded(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return dequantised(*quantised(rms_norm.cpu(x, weight, eps)))

    monkeypatch.setattr(latent_rows, "rms_norm", SimpleNamespace(cpu=rounded))
    for got, want, other in zip(found, whole(load(plain), prompts), exact, strict=True):
        torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)
        assert not torch.allclose(got, other, atol=1e-2)


def test_an_fp8_cache_needs_whole_words(plain: Path, tmp_path: Path) -> None:
    raw = json.loads((plain / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(raw | {"kv_lora_rank": 62}))
    with pytest.raises(ConfigError, match="needs a kv_lora_rank of a multiple of 4, not 62"):
        load(tmp_path, load_format="dummy", kv_dtype=torch.float8_e4m3fn)


def test_kimi_k2_is_read_as_deepseek_v3(tmp_path: Path) -> None:
    """Its config.json has a model type, and code of its own, that transformers does not know."""
    sizes = {"n_group": 1, "topk_group": 1, "rope_parameters": {"rope_type": "default", "rope_theta": 5e4}}
    path = make_checkpoint(tmp_path, "deepseek_v3", **sizes)
    prompt = [[5, 9, 200, 31, 7]]
    expected = whole(load(path), prompt)
    raw = json.loads((path / "config.json").read_text())
    code = {"AutoConfig": "configuration_deepseek.DeepseekV3Config"}
    (path / "config.json").write_text(json.dumps(raw | {"model_type": "kimi_k2", "auto_map": code}))
    assert torch.equal(whole(load(path), prompt)[0], expected[0])
