"""Quantised checkpoints with experts: logits are float64's in every layout and form, drafts change nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.models.harness import load, whole
from tests.models.make import make_checkpoint
from tests.models.quantised import LAYOUTS, quantise
from tests.models.quantised_experts import PROMPT, error, reference
from tests.ops import Ops
from unisono import LLM, SamplingParams
from unisono.distributed.gather import Ranks
from unisono.types import ConfigError, SpeculativeConfig

SIZES = {
    "hidden_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "moe_intermediate_size": 128,
    "num_experts": 5,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 2,
}
NAMES = ["fp8-blocks", "compressed-fp8-channel", "compressed-fp8-blocks", "awq", "gptq-asymmetric", "compressed-int4"]
NAMES += ["fp8-static", "compressed-nvfp4", "modelopt-nvfp4", "compressed-int8", "gptq-8-bits-asymmetric"]
NAMES += ["compressed-int8-a8"]


@pytest.fixture(scope="module")
def plain(tmp_path_factory) -> Path:
    directory = make_checkpoint(tmp_path_factory.mktemp("plain") / "model", "qwen3_moe", **SIZES)
    assert any(".experts.3.up_proj" in name for name in load_file(directory / "model.safetensors"))
    return directory


def fuse(directory: Path) -> None:
    """Store the experts of each layer as one tensor of each kind, as transformers has them."""
    tensors, path = load_file(directory / "model.safetensors"), directory / "model.safetensors"
    for first in [name for name in tensors if ".experts.0.gate_proj." in name]:
        stem, kind = first.split(".experts.0.gate_proj")
        end = kind.removeprefix(".weight")

        def take(expert: int, name: str, stem: str = stem, kind: str = kind) -> torch.Tensor:
            return tensors.pop(f"{stem}.experts.{expert}.{name}_proj{kind}").view(-1, 1).view(torch.uint8)

        shapes = [tensors[f"{stem}.experts.0.{name}_proj{kind}"] for name in ("gate", "down")]
        both = [torch.cat([take(e, "gate"), take(e, "up")]) for e in range(SIZES["num_experts"])]
        down = [take(e, "down") for e in range(SIZES["num_experts"])]
        for name, parts, like, times in (("gate_up", both, shapes[0], 2), ("down", down, shapes[1], 1)):
            rows = (len(parts), times * like.shape[0], *like.shape[1:])
            tensors[f"{stem}.experts.{name}_proj{end}"] = torch.stack(parts).view(like.dtype).view(rows)
    save_file(tensors, path, metadata={"format": "pt"})


@pytest.mark.parametrize("name", NAMES)
def test_logits_are_those_of_the_dequantised_weights(name: str, plain: Path, tmp_path: Path) -> None:
    layout = LAYOUTS[name]
    values = quantise(plain, tmp_path / "model", layout)
    assert any(".experts." in module for module in values)
    (got,) = whole(load(tmp_path / "model"), [PROMPT])
    assert error(got, reference(plain, values, layout.activations)) < (4e-3 if "fp8" in name or "a8" in name else 1e-5)


def test_fused_experts_and_those_made_while_loading_have_the_same_bits(plain: Path, tmp_path: Path) -> None:
    layout = LAYOUTS["fp8-blocks-bf16-scales"]
    published = type(layout)(LAYOUTS["fp8-blocks"].write, layout.config, layout.activations)
    quantise(plain, tmp_path / "single", published)
    (single,) = whole(load(tmp_path / "single"), [PROMPT])
    fuse(tmp_path / "single")
    (fused,) = whole(load(tmp_path / "single"), [PROMPT])
    assert torch.equal(fused, single)
    (online,) = whole(load(plain, quantization="fp8"), [PROMPT])
    assert torch.equal(online, load_fused_online(plain, tmp_path))
    assert error(online, single.double()) < 4e-3


def load_fused_online(plain: Path, tmp_path: Path) -> torch.Tensor:
    (tmp_path / "fused").mkdir()
    for file in plain.iterdir():
        (tmp_path / "fused" / file.name).write_bytes(file.read_bytes())
    fuse(tmp_path / "fused")
    assert any(name.endswith("experts.gate_up_proj") for name in load_file(tmp_path / "fused/model.safetensors"))
    return whole(load(tmp_path / "fused", quantization="fp8"), [PROMPT])[0]


def answers(path: Path, prompts: list[str], **flags: Any) -> list[list[int]]:
    with LLM(str(path), max_num_seqs=3, max_model_len=128, **flags) as llm:
        params = SamplingParams(temperature=0.8, seed=1, max_tokens=16)
        return [output.outputs[0].token_ids for output in llm.generate(prompts, params)]


@pytest.mark.parametrize("name", ["fp8-blocks", "gptq-asymmetric", "gptq-8-bits-asymmetric", "compressed-int8-a8"])
def test_the_text_depends_on_the_weights_alone(name: str, plain: Path, tmp_path: Path) -> None:
    quantise(plain, tmp_path / "model", LAYOUTS[name])
    prompts = ["one two one two one", "abcabcab", "x"]
    together = answers(tmp_path / "model", prompts)
    if "8-bits" not in name:  # they are near enough to leave these tokens as they are
        assert together != answers(plain, prompts), "quantising changed nothing"
    assert answers(tmp_path / "model", prompts[1:2]) == together[1:2]
    drafts = SpeculativeConfig("ngram", num_speculative_tokens=3)
    assert answers(tmp_path / "model", prompts, speculative=drafts) == together


@pytest.mark.parametrize("name", ["fp8-blocks", "compressed-fp8-channel"])
def test_experts_of_prompts_hand_on_e4m3(name: str, plain: Path, tmp_path: Path, monkeypatch) -> None:
    """With a proven kernel for prompts and block scales, the bits stay the same."""
    quantise(plain, tmp_path / "model", LAYOUTS[name])
    decoder, prompt = load(tmp_path / "model"), [7 * i % 251 for i in range(70)]
    (want,) = whole(decoder, [prompt])
    monkeypatch.setattr("unisono.kernels.moe.fp8.exact_fp8_experts.serves", lambda key: True)
    with Ops() as seen:
        (got,) = whole(decoder, [prompt])
    assert ("expert_fp8_gate_up_fp8" in seen.ours) is (name == "fp8-blocks")
    assert torch.equal(got, want)


def test_calibrated_scales_need_all_experts_on_a_rank(plain: Path, tmp_path: Path) -> None:
    quantise(plain, tmp_path / "model", LAYOUTS["fp8-static"])
    with pytest.raises(ConfigError, match="fp8 with scales of outputs has calibrated scales of activations"):
        load(tmp_path / "model", ranks=Ranks(0, 2, whole_experts=True))


@pytest.mark.parametrize("name", ["fp8-blocks", "awq"])
def test_dummy_weights(name: str, plain: Path, tmp_path: Path) -> None:
    quantise(plain, tmp_path / "model", LAYOUTS[name])
    (tmp_path / "model/model.safetensors").unlink()
    (logits,) = whole(load(tmp_path / "model", load_format="dummy"), [PROMPT])
    assert logits.isfinite().all()
