"""Exports of the families with Gated DeltaNet layers: names, forms of experts, what is passed over, what is refused."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from tests.engine.helpers import engine
from tests.models.fields import END
from tests.models.harness import load, whole
from tests.models.hybrids import FULL, LINEAR, fused, one_by_one, renamed
from tests.models.make import make_checkpoint
from unisono.drafters.mtp.checkpoint import MTPCheckpoint
from unisono.layers.formats.base import WeightTarget
from unisono.models.blocks.decoder import Decoder
from unisono.models.load.build import Builder, no_attention
from unisono.models.load.checkpoint import WEIGHTS, Checkpoint
from unisono.models.load.loader import Shared
from unisono.tools.draft_training.answers import Text
from unisono.tools.draft_training.batches import Batches
from unisono.tools.draft_training.methods import METHODS, DraftShape
from unisono.tools.draft_training.teacher import Teacher
from unisono.types import CheckpointError

SHAPES = Path(__file__).parents[2] / "benchmarks" / "shapes"
PROMPT = [[7, 200, 31, 5, 90, 90, 14, 3, 77, 120, 9, 64, 8, 19, 2, 33, 101, 250, 42, 6]]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("hybrids")
    families = "qwen3_5_text", "qwen3_5", "qwen3_5_moe_text", "qwen3_next"
    return {f: make_checkpoint(root / f, f, tokenizer=f == "qwen3_5") for f in families}


def logits(directory: Path) -> torch.Tensor:
    return whole(load(directory), PROMPT)[0]


def moved(tensors: dict[str, torch.Tensor], old: str, new: str) -> dict[str, torch.Tensor]:
    return {re.sub(f"^{re.escape(old)}", new, name): tensor for name, tensor in tensors.items()}


@pytest.mark.parametrize("family", ["qwen3_5_moe_text", "qwen3_next"])
def test_experts_fused_or_one_by_one_are_the_same(family: str, made: dict[str, Path], tmp_path: Path) -> None:
    together = renamed(made[family], tmp_path / "fused", fused)
    apart = renamed(together, tmp_path / "apart", one_by_one)
    assert any(name.endswith("experts.gate_up_proj") for name in load_file(together / WEIGHTS))
    assert any(".experts.9.down_proj.weight" in name for name in load_file(apart / WEIGHTS))
    assert torch.equal(logits(together), logits(apart))
    assert torch.equal(logits(made[family]), logits(apart))


def test_fused_experts_may_be_stored_as_columns(made: dict[str, Path], tmp_path: Path) -> None:
    """As the hub's Qwen3-VL-30B-A3B has them: [experts, inputs, outputs]."""
    source = renamed(made["qwen3_5_moe_text"], tmp_path / "fused", fused)

    def columns(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {n: t.mT if ".experts." in n and t.dim() == 3 else t for n, t in tensors.items()}

    turned = renamed(source, tmp_path / "columns", columns)
    shapes = {tuple(t.shape) for n, t in load_file(turned / WEIGHTS).items() if n.endswith("experts.down_proj")}
    assert shapes == {(10, 48, 80)}
    assert torch.equal(logits(turned), logits(source))


@pytest.mark.parametrize("prefix", ["model.language_model.", "language_model.model.", ""])
def test_a_text_models_names_may_have_another_prefix(prefix: str, made: dict[str, Path], tmp_path: Path) -> None:
    source = made["qwen3_5_text"]
    other = renamed(source, tmp_path / "other", lambda t: moved(t, "model.", prefix))
    assert torch.equal(logits(other), logits(source))


def test_a_text_only_export_of_the_model_with_a_tower(made: dict[str, Path], tmp_path: Path) -> None:
    def text_only(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        text = {n: t for n, t in tensors.items() if ".visual." not in n}
        return moved(text, "model.language_model.", "model.")

    assert torch.equal(logits(renamed(made["qwen3_5"], tmp_path / "text", text_only)), logits(made["qwen3_5"]))


def test_the_tower_and_modules_are_passed_over(made: dict[str, Path], tmp_path: Path) -> None:
    more = {"mtp.fc.weight": torch.zeros(2, 2), "mtp.layers.0.mlp.up_proj.weight": torch.zeros(2, 2)}
    both = renamed(made["qwen3_5"], tmp_path / "both", lambda t: t | more)
    assert torch.equal(logits(both), logits(made["qwen3_5"]))
    assert Checkpoint.open(both).unread() == []  # the tower is read, by load_tower


def test_a_causal_lm_passes_over_a_tower(made: dict[str, Path], tmp_path: Path) -> None:
    more = {"model.visual.merger.norm.weight": torch.zeros(2)}
    both = renamed(made["qwen3_5_text"], tmp_path / "both", lambda t: t | more)
    assert torch.equal(logits(both), logits(made["qwen3_5_text"]))
    ((beginning, count, why),) = Checkpoint.open(both).unread()
    assert (beginning, count) == ("model.visual.*", "1 tensors not read")
    with engine(both, max_model_len=64, max_num_seqs=2) as llm:
        found = {d["name"]: d for d in llm.engine.info()["decisions"]}
    assert why == found["model.visual.*"]["reason"]
    assert "pictures are refused" in why


def test_an_unknown_tensor_is_refused(made: dict[str, Path], tmp_path: Path) -> None:
    more = {"model.language_model.layers.0.linear_attn.in_proj_c.weight": torch.zeros(2, 2)}
    with pytest.raises(CheckpointError, match=r"in_proj_c.weight \[2, 2\] is unexpected"):
        load(renamed(made["qwen3_5"], tmp_path / "more", lambda t: t | more))


def test_a_missing_tensor_is_named_as_packed(made: dict[str, Path], tmp_path: Path) -> None:
    name = "model.layers.0.linear_attn.in_proj_qkvz.weight"
    with pytest.raises(CheckpointError, match=rf"{name} \[320, 80\] is missing"):
        load(renamed(made["qwen3_next"], tmp_path / "less", lambda t: {n: v for n, v in t.items() if n != name}))


def changed(source: Path, directory: Path, **fields: Any) -> Path:
    """A directory with the same config.json but for these fields, and no weights."""
    raw = json.loads((source / "config.json").read_text())
    raw.get("text_config", raw).update(fields)
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(raw))
    return directory


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"output_gate_type": "sigmoid"}, "output_gate_type='sigmoid'"),
        ({"mamba_ssm_dtype": "bfloat16"}, "mamba_ssm_dtype='bfloat16'"),
        ({"layer_types": [LINEAR] * 6}, "at least one layer must be full_attention"),
        ({"layer_types": [FULL, "sliding_attention"] * 3}, "layer_types='sliding_attention'"),
        ({"linear_num_value_heads": 3}, "linear_num_value_heads=3"),
    ],
    ids=["output gate", "state dtype", "no attention", "window", "value heads"],
)
@pytest.mark.parametrize("family", ["qwen3_5_text", "qwen3_5"])
def test_unsupported_hybrid_config_fields_raise(
    fields: dict[str, Any], words: str, family: str, made: dict[str, Path], tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match=re.escape(words)):
        Checkpoint.open(changed(made[family], tmp_path / "config", **fields))


@pytest.mark.parametrize("family", ["qwen3_5_text", "qwen3_5", "qwen3_5_moe_text"])
def test_text_config_fields_are_read(family: str, made: dict[str, Path], tmp_path: Path) -> None:
    fields = {"mtp_num_hidden_layers": 1, "attn_output_gate": False, "eos_token_id": 5, "output_gate_type": "swish"}
    path = changed(made[family], tmp_path / "config", **fields, full_attention_interval=4, mamba_ssm_dtype="float32")
    checkpoint = Checkpoint.open(path)
    config = checkpoint.config
    assert config.mtp_modules == 1
    assert config.zero_centered_norms
    assert config.attention_shapes == ((4, 2, 32),)
    assert not config.attention.output_gate
    assert checkpoint.eos_token_ids == (5,)
    assert checkpoint.dtype is torch.float32
    assert config.hf_config.name_or_path == str(path)
    assert END not in checkpoint.eos_token_ids


def test_layers_by_interval(made: dict[str, Path], tmp_path: Path) -> None:
    path = changed(made["qwen3_next"], tmp_path / "config", layer_types=None, full_attention_interval=3)
    kinds = [type(layer.mixer).__name__ for layer in Checkpoint.open(path).config.layers]
    assert kinds == ["GatedDeltaSpec", "GatedDeltaSpec", "AttentionSpec", "GatedDeltaSpec"]


def test_blocks_of_outputs_move_whole_or_are_refused() -> None:
    """A tensor with a value for each 2 outputs: rows that keep pairs together move its values, others are refused."""
    first, second = torch.zeros(2, 1), torch.zeros(1, 1)
    rows = torch.tensor([4, 5, 0, 1])
    joined = Shared.of("scale", WeightTarget(first, (2, 1)), rows, None)
    joined = Shared.of("scale", WeightTarget(second, (1, 1)), torch.tensor([2, 3]), joined)
    assert joined.shape == (3, 1)
    joined.fill(torch.tensor([[10.0], [11.0], [12.0]]))
    assert first.flatten().tolist() == [12, 10]
    assert second.item() == 11
    with pytest.raises(CheckpointError, match="a value for each 2 outputs"):
        Shared.of("scale", WeightTarget(first, (2, 1)), torch.tensor([1, 2, 5, 0]), None)


@pytest.mark.parametrize("method", ["eagle", "eagle3", "mtp"])
def test_heads_with_a_layer_of_the_target_are_not_trained_for_hybrids(
    method: str, made: dict[str, Path], tmp_path: Path
) -> None:
    teacher = Teacher(Checkpoint.open(made["qwen3_5_text"]), "cpu", longest=32)
    with pytest.raises(CheckpointError, match="layer 0 has a recurrence, and 3 more have. " + method):
        METHODS[method](teacher, DraftShape(), [], tmp_path)


def test_teacher_states_of_hybrids_are_those_of_serving(made: dict[str, Path]) -> None:
    """Rows of training, of different lengths, beside each text alone."""
    texts = [[(7 * i + row) % 90 + 3 for i in range(length)] for row, length in enumerate((37, 20, 33))]
    teacher = Teacher(Checkpoint.open(made["qwen3_5_text"]), "cpu", longest=64)
    batch = Batches([Text(ids, 1) for ids in texts], 256, seed=0)[0]
    outputs, served = teacher.run(batch), load(made["qwen3_5_text"])
    for row, length in enumerate(outputs.loss_mask.sum(1).tolist()):
        ids = batch.token_ids[row, : length + 2].tolist()
        want = whole(served, [ids])[0][1:-1]
        rows = outputs.logit_rows[row][outputs.loss_mask[row]]
        torch.testing.assert_close(outputs.logits[rows], want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("shape", ["qwen3.5-9b", "qwen3.5-35b-a3b"])
def test_benchmark_shapes_are_the_models_sizes(shape: str) -> None:
    """As many elements as transformers' text model has, without memory; and a module that goes with it."""
    config = Checkpoint.open(SHAPES / shape).config
    builder = Builder(config.hidden_size, config.rms_eps, torch.bfloat16, "meta", no_attention, 1)
    target = Decoder(config, builder)
    hf_config = AutoConfig.from_pretrained(SHAPES / shape)
    with torch.device("meta"):
        theirs = AutoModelForCausalLM.from_config(hf_config.text_config)
    assert sum(p.numel() for p in target.parameters()) == sum(p.numel() for p in theirs.parameters())
    modules = MTPCheckpoint.open(SHAPES / shape, config, dummy=True)
    assert modules.depth == 1
    module = modules.load(target, 0, no_attention, torch.bfloat16)
    assert module.embed is target.embed
    assert module.layer.mixer.spec.output_gate
