"""Mistral's own form of a checkpoint: the bits of the same model in transformers' form, fp8, ranks, refusals."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.distributed.parts_ import loaded
from tests.models.harness import load, whole
from tests.models.make import make_checkpoint
from tests.models.make_native import make_native
from tests.models.quantised import LAYOUTS, quantise
from unisono.config.mistral import config_of, described, tensor_name
from unisono.distributed.gather import Ranks
from unisono.models.load.checkpoint import Checkpoint
from unisono.types import CheckpointError

PROMPTS = [[5, 9, 200, 31, 7], list(range(3, 90))]


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNISONO_CACHE", str(tmp_path_factory.mktemp("cache")))


@pytest.fixture(scope="module")
def usual(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With factors of YaRN that scale scores and not angles, as Mistral's own form has them."""
    path = make_checkpoint(tmp_path_factory.mktemp("usual"), "mistral4")
    config = json.loads((path / "config.json").read_text())
    rope = {**config["rope_parameters"], "mscale": 1.0, "mscale_all_dim": 1.0}
    (path / "config.json").write_text(json.dumps(config | {"rope_parameters": rope}))
    return path


def test_the_bits_are_those_of_the_usual_form(usual: Path, tmp_path: Path) -> None:
    native = make_native(usual, tmp_path / "native")
    checkpoint = Checkpoint.open(native)
    assert checkpoint.config.architecture == "MistralLarge3ForCausalLM"
    assert [(name, count) for name, count, _ in checkpoint.unread()] == [("vision_encoder.*", "1 tensors not read")]
    for got, want in zip(whole(load(native), PROMPTS), whole(load(usual), PROMPTS), strict=True):
        assert torch.equal(got, want)
    one, part = (loaded(path, Ranks(1, 2)).state_dict() for path in (usual, native))
    assert one.keys() == part.keys()
    assert all(torch.equal(one[name], part[name]) for name in one)


def test_scores_may_be_unscaled(usual: Path, tmp_path: Path) -> None:
    yarn = {"factor": 8.0, "original_max_position_embeddings": 16, "apply_scale": False}
    grows = {"beta": 0.4, "original_max_position_embeddings": 16}
    spec = (
        Checkpoint.open(make_native(usual, tmp_path / "one", yarn=yarn, llama_4_scaling=grows)).config.layers[0].mixer
    )
    assert spec.scale == (spec.nope_dim + spec.rope_dim) ** -0.5
    scaled = Checkpoint.open(
        make_native(usual, tmp_path / "two", yarn={**yarn, "apply_scale": True}, llama_4_scaling=grows)
    ).config.layers[0].mixer  # fmt: skip
    assert scaled.scale > spec.scale


def params_of(usual: Path, tmp_path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((make_native(usual, tmp_path / "native") / "params.json").read_text())
    return found


@pytest.mark.parametrize("absent", [True, False], ids=["absent", "null"])
def test_fields_that_may_be_absent(absent: bool, usual: Path, tmp_path: Path) -> None:
    params = params_of(usual, tmp_path)
    optional = ("first_k_dense_replace", "routed_scale", "num_expert_groups", "num_expert_groups_per_tok")
    for fields, names in ((params["moe"], optional), (params, ("rope_theta", "dtype", "max_position_embeddings"))):
        for name in names:
            if absent:
                del fields[name]
            else:
                fields[name] = None
    config = config_of(params, tmp_path / "params.json")
    names = "first_k_dense_replace", "routed_scaling_factor", "n_group", "topk_group", "dtype"
    assert [config[name] for name in names] == [0, 1.0, 1, 1, "bfloat16"]
    assert config["rope_parameters"]["rope_theta"] == 10_000
    assert config["max_position_embeddings"] == 128_000


def test_betas_of_yarn(usual: Path, tmp_path: Path) -> None:
    """Their names: ``beta`` bounds the fast planes, ``alpha`` the slow ones."""
    params = params_of(usual, tmp_path)
    params["yarn"] |= {"beta": 24, "alpha": 2}
    rope = config_of(params, tmp_path / "params.json")["rope_parameters"]
    assert (rope["beta_fast"], rope["beta_slow"]) == (24, 2)
    del params["yarn"]["beta"], params["yarn"]["alpha"]
    rope = config_of(params, tmp_path / "params.json")["rope_parameters"]
    assert (rope["beta_fast"], rope["beta_slow"]) == (32, 1)


@pytest.mark.parametrize(("scheme", "kind"), [("NO_SCALES", "dynamic"), ("TENSOR", "static"), (None, "static")])
def test_scales_of_activations(scheme: str | None, kind: str, usual: Path, tmp_path: Path) -> None:
    params = params_of(usual, tmp_path) | {"quantization": {"qformat_weight": "fp8_e4m3", "qscheme_act": scheme}}
    assert config_of(params, tmp_path / "params.json")["quantization_config"]["activation_scheme"] == kind


def test_fp8_with_fixed_scales(usual: Path, tmp_path: Path) -> None:
    """The bits are those of the same tensors in the usual form, experts one by one; what has no scale stays plain."""
    plain = make_native(usual, tmp_path / "plain")
    each = {tensor_name(name): tensor for name, tensor in load_file(plain / "consolidated.safetensors").items()}
    each = {name: tensor for name, tensor in each.items() if not name.startswith("vision")}
    shutil.copytree(usual, tmp_path / "each")
    save_file(each, tmp_path / "each" / "model.safetensors", metadata={"format": "pt"})
    quantise(tmp_path / "each", tmp_path / "usual", LAYOUTS["fp8-static"])
    scheme = {"qformat_weight": "fp8_e4m3", "qscheme_act": "TENSOR"}
    native = make_native(tmp_path / "usual", tmp_path / "native", quantization=scheme)
    config = json.loads((described(native) / "config.json").read_text())["quantization_config"]
    assert "model.layers.0.mlp.gate" in config["modules_to_not_convert"]
    for got, want in zip(whole(load(native), PROMPTS), whole(load(tmp_path / "usual"), PROMPTS), strict=True):
        assert want.isfinite().all()
        assert torch.equal(got, want)


def test_names() -> None:
    names = {
        "tok_embeddings.weight": "model.embed_tokens.weight",
        "layers.3.attention.wkv_b.qscale_weight": "model.layers.3.self_attn.kv_b_proj.weight_scale",
        "layers.12.experts.7.w2.qscale_act": "model.layers.12.mlp.experts.7.down_proj.input_scale",
        "layers.12.shared_experts.w3.weight_packed": "model.layers.12.mlp.shared_experts.up_proj.weight_packed",
        "vision_encoder.transformer.layers.0.attention.wq.weight": (
            "vision_encoder.transformer.layers.0.attention.wq.weight"
        ),
    }
    assert {name: tensor_name(name) for name in names} == names


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "without experts": ({"moe": None}, "describes no model with latent attention and experts"),
    "a field that is missing": ({"kv_lora_rank": 32, "v_head_dim": None}, "has no v_head_dim"),
    "an unknown field": ({"n_frobs": 3}, "fields that are not known: n_frobs"),
    "biases": ({"use_biases": True}, "use_biases=True is not supported, only False"),
    "another format": ({"quantization": {"qformat_weight": "int4"}}, "quantization=.* is not supported"),
    "two numbers of positions": (
        {"llama_4_scaling": {"beta": 0.1, "original_max_position_embeddings": 7}}, "different numbers of positions",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_params_that_are_refused(case: str, usual: Path, tmp_path: Path) -> None:
    changes, says = REFUSED[case]
    with pytest.raises(CheckpointError, match=says):
        Checkpoint.open(make_native(usual, tmp_path / "native", **changes))


def test_missing_tensors_are_named(usual: Path, tmp_path: Path) -> None:
    native = make_native(usual, tmp_path / "native")
    (native / "consolidated.safetensors").unlink()
    with pytest.raises(
        CheckpointError, match=r"has neither consolidated\.safetensors nor consolidated\.safetensors\.ind"
    ):
        load(native)
