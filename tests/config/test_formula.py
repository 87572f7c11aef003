"""A checkpoint of another model under a supported name is refused by the field that tells; published ones are not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tests.config.configs import GRANITE, LLAMA_31_8B, PUBLISHED, of_class, write
from tests.models.fields import FAMILIES, HYBRIDS, SEEING
from tests.models.make_plain import ARCHITECTURES as WITHOUT_CLASS
from unisono.cli.main import app
from unisono.config import catalog
from unisono.config.preflight.families import ARCHITECTURES
from unisono.config.preflight.model import check_config
from unisono.models.load.checkpoint import Checkpoint
from unisono.types import CheckpointError


def refusal(directory: Path) -> str:
    """What ``unisono explain`` says on standard error, on one line. It must end with status 1."""
    result = CliRunner().invoke(app, ["explain", str(directory), "--load-format", "dummy"])
    assert result.exit_code == 1, result.output
    assert "Traceback" not in result.output
    return " ".join(result.output.split())


def test_the_table_has_every_architecture_of_the_catalog() -> None:
    assert ARCHITECTURES.keys() == catalog.models.entries.keys()


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configs_are_read(name: str, tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(write(tmp_path / "c", PUBLISHED[name]))
    text = PUBLISHED[name]
    assert checkpoint.config.num_layers == text["num_hidden_layers"]
    assert checkpoint.config.attention_shapes[0][:2] == (text["num_attention_heads"], text["num_key_value_heads"])


@pytest.mark.parametrize("model_type", sorted({*FAMILIES, *HYBRIDS, *SEEING} - {*WITHOUT_CLASS}))
def test_default_configs_of_supported_model_types_are_read(model_type: str, tmp_path: Path) -> None:
    by_type = {kind: name for name, facts in ARCHITECTURES.items() for kind in facts.model_types}
    config = of_class(model_type, architectures=[by_type[model_type]])
    assert check_config(write(tmp_path / "c", config))["model_type"] == model_type


FOREIGN: dict[str, dict[str, Any]] = {
    "granite": GRANITE, "smollm3": {}, "olmo2": {}, "phi3": {}, "gemma": {}, "gemma2": {}, "cohere": {}, "stablelm": {},
    "olmo": {"clip_qkv": 8.0}, "glm4": {}, "qwen2": {}, "mistral": {}, "helium": {}, "ernie4_5": {}, "nemotron": {},
    "starcoder2": {}, "exaone4": {}, "hunyuan_v1_dense": {}, "seed_oss": {}, "falcon_h1": {}, "minicpm3": {},
}  # fmt: skip


@pytest.mark.parametrize("model_type", FOREIGN)
def test_another_model_renamed_to_llama_is_refused_by_its_model_type(model_type: str, tmp_path: Path) -> None:
    config = of_class(model_type, **FOREIGN[model_type])
    said = refusal(write(tmp_path / "c", config, architectures=["LlamaForCausalLM"]))
    assert f"model_type='{model_type}'" in said
    assert "'llama'" in said


FIELDS: dict[str, tuple[dict[str, Any], str]] = {
    "granite": (GRANITE, "embedding_multiplier=12.0"),
    "smollm3": ({}, "no_rope_layer"),
    "gemma": ({}, "hidden_act"),
    "gemma2": ({}, "attn_logit_softcapping=50.0"),
    "cohere": ({}, "logit_scale=0.0625"),
    "olmo": ({"clip_qkv": 8.0}, "clip_qkv=8.0"),
    "phi3": ({"partial_rotary_factor": 0.75}, "partial_rotary_factor=0.75"),
    "stablelm": ({}, "partial_rotary_factor=0.25"),
    "glm4": ({}, "partial_rotary_factor=0.5"),
    "nemotron": ({}, "hidden_act='relu2'"),
    "ministral": ({"sliding_window": 4096}, "sliding_window=4096"),
    "ministral3": ({}, "llama_4_scaling_beta"),
    "deepseek_v3": ({}, "routed_scaling_factor=2.5"),
    "minicpm3": ({}, "scale_emb=12"),
    "gpt_neox": ({}, "use_parallel_residual=True"),
    "olmo3": ({}, "layer_types"),
    "mixtral": ({}, "num_local_experts=8"),
    "llama4_text": ({}, "attn_temperature_tuning"),
    "seed_oss": ({"attention_out_bias": True}, "attention_out_bias=True"),
    "apertus": ({}, "hidden_act='xielu'"),
}


@pytest.mark.parametrize("model_type", FIELDS)
def test_relabelled_model_is_refused_by_its_fields(model_type: str, tmp_path: Path) -> None:
    fields, named = FIELDS[model_type]
    names = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
    said = refusal(write(tmp_path / "c", of_class(model_type, **fields), **names))
    assert named in said
    assert "LlamaForCausalLM" in said


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"embedding_multiplier": 12.0}, "embedding_multiplier=12.0"),
        ({"residual_multiplier": 0.22}, "residual_multiplier=0.22"),
        ({"attention_multiplier": 0.5}, "attention_multiplier=0.5"),
        ({"logits_scaling": 8}, "logits_scaling=8"),
        ({"no_rope_layers": [1, 1, 1, 0] * 8}, "no_rope_layers"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping=30.0"),
        ({"query_pre_attn_scalar": 256}, "query_pre_attn_scalar=256"),
        ({"sliding_window": 4096}, "sliding_window=4096"),
        ({"layer_types": ["full_attention", "sliding_attention"] * 16}, "layer_types"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
        ({"rope_scaling": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "partial_rotary_factor=0.5"),
        ({"rope_scaling": {"full_attention": {"rope_type": "default", "rope_theta": 1e4}}}, "full_attention"),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 4.0}}, "longrope"),
        ({"rope_scaling": {"type": "dynamic", "factor": 4.0, "alpha": 1000.0}}, "alpha"),
        ({"rms_norm_eps": None, "layer_norm_eps": 1e-5}, "layer_norm_eps"),
        ({"use_qk_norm": True}, "use_qk_norm"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ({"num_experts": 8}, "num_experts=8"),
        ({"is_causal": False}, "is_causal=False"),
        ({"model_type": None}, "model_type"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_fields_unsupported_for_llama_raise(changes: dict[str, Any], named: str, tmp_path: Path) -> None:
    assert named in refusal(write(tmp_path / "c", LLAMA_31_8B, **changes))


@pytest.mark.parametrize(
    "neutral",
    [
        {"embedding_multiplier": 1.0, "residual_multiplier": 1, "logits_scaling": 1.0},
        {"attention_multiplier": 128**-0.5, "query_pre_attn_scalar": 128},
        {"no_rope_layers": [1] * 32, "no_rope_layer_interval": 4},
        {"sliding_window": 4096, "use_sliding_window": False},
        {"sliding_window": 131072},
        {"layer_types": ["full_attention"] * 32},
        {"clip_qkv": None, "attn_logit_softcapping": None, "num_experts": 0, "use_qk_norm": False},
        {"partial_rotary_factor": 1.0, "rotary_pct": 1},
        {"layer_norm_eps": 1e-5},
        {"activation": "swiglu", "attn_factor": 0.8},  # as in Falcon3's config.json
    ],
    ids=lambda value: next(iter(value)),
)
def test_a_value_that_changes_nothing_is_taken(neutral: dict[str, Any], tmp_path: Path) -> None:
    opened = Checkpoint.open(write(tmp_path / "c", LLAMA_31_8B, **neutral))
    assert (opened.config.num_layers, {*opened.config.windows}) == (32, {0})
    assert opened.config.attention.rotary.planes == 64


@pytest.mark.parametrize(
    ("name", "changes", "named"),
    [
        ("Mistral-7B-v0.1", {"layer_types": ["sliding_attention", "full_attention"] * 16}, "layer_types"),
        ("Mistral-7B-v0.1", {"attention_bias": True}, "attention_bias=True"),
        ("Mistral-7B-v0.1", {"mlp_bias": True}, "mlp_bias=True"),
        ("Mixtral-8x7B", {"norm_topk_prob": False}, "norm_topk_prob=False"),
        ("Qwen2.5-7B", {"use_qk_norm": True}, "use_qk_norm=True"),
        ("Qwen3-0.6B", {"attn_output_gate": True}, "attn_output_gate=True"),
        ("Qwen3-Coder-30B-A3B", {"shared_expert_intermediate_size": 512}, "shared_expert_intermediate_size=512"),
        ("Qwen3-Coder-30B-A3B", {"scoring_func": "sigmoid"}, "scoring_func='sigmoid'"),
        ("Qwen3-Coder-30B-A3B", {"n_group": 8}, "n_group=8"),
        ("gpt-oss-20b", {"model_type": "mixtral"}, "model_type='mixtral'"),
        ("Qwen2.5-VL-7B", {"text_config": {"model_type": "llama"}}, "text_config.model_type='llama'"),
    ],
)
def test_fields_that_other_families_do_not_read(name: str, changes: dict[str, Any], named: str, tmp_path: Path) -> None:
    assert named in refusal(write(tmp_path / "c", PUBLISHED[name], **changes))


def test_unsupported_architecture_is_reported_before_its_fields(tmp_path: Path) -> None:
    """Phi-4-mini-flash: nobody should be told to change a rope that would not help."""
    config = of_class("phi3", rope_scaling={"type": "longrope", "long_factor": [1.0] * 48, "short_factor": [1.0] * 48})
    said = refusal(write(tmp_path / "c", config, architectures=["Phi4FlashForCausalLM"]))
    assert "'Phi4FlashForCausalLM' is not supported" in said
    assert "rope" not in said


def test_the_loader_checks_the_same(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="residual_multiplier"):
        Checkpoint.open(write(tmp_path / "c", LLAMA_31_8B, residual_multiplier=0.5))
