"""MTP modules from every key layout compute the paper's forward; what does not fit is refused by name."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, cache_utils, modeling_layers

from tests.models.harness import load, whole
from tests.models.make import make_checkpoint
from tests.models.make_mtp import (
    LAYOUTS,
    greedy_drafts,
    named,
    options,
    random_modules,
    reference,
    write_alone,
    write_beside,
)
from tests.models.mtp_pass import attention, open_modules, run
from unisono.drafters.mtp.checkpoint import MTPCheckpoint
from unisono.models.blocks.layers import LayerSpec, MLPSpec
from unisono.models.load.checkpoint import Checkpoint
from unisono.models.load.loader import load_model
from unisono.types import CheckpointError

TARGETS = {"deepseek": "llama", "qwen": "qwen3", "mimo": "qwen2", "mimo-v2": "llama"}
LAYERS, DEPTH, TOKENS = 3, 2, 21


@pytest.fixture(scope="module")
def targets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("targets")
    return {f: make_checkpoint(root / f, f, **options()) for f in sorted(set(TARGETS.values()))}


@pytest.mark.parametrize("beside", [True, False], ids=["beside the target", "alone"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_forward_is_the_papers(layout: str, beside: bool, targets: dict[str, Path], tmp_path: Path) -> None:
    path = targets[TARGETS[layout]]
    config = Checkpoint.open(path).config
    modules = random_modules(config, DEPTH, shared=layout == "qwen")
    tensors = named(modules, layout, LAYERS)
    if beside:
        path = directory = write_beside(shutil.copytree(path, tmp_path / "target"), tensors)
    else:
        directory = write_alone(tmp_path / "modules", tensors)
    target = load(path)  # the target's loader passes over the modules
    checkpoint, ours = open_modules(directory, target)
    assert checkpoint.depth == len(ours) == DEPTH
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(config.vocab_size, (TOKENS,), generator=generator, dtype=torch.int32)
    for module, weights in zip(ours, modules, strict=True):
        hidden = torch.randn(TOKENS, config.hidden_size, generator=generator)
        expected = reference(weights, layout, config, target.embed.weight[tokens.long()], hidden, first=0)
        got, logits = module.finish(run(module, tokens, hidden))
        torch.testing.assert_close(got, expected, atol=2e-5, rtol=0)
        torch.testing.assert_close(logits, expected @ target.lm_head.weight.T, atol=1e-4, rtol=0)


def test_modules_beside_a_target_change_nothing_of_it(targets: dict[str, Path], tmp_path: Path) -> None:
    alone = load(targets["llama"])
    modules = named(random_modules(alone.config, 1), "deepseek", LAYERS)
    both = load(write_beside(shutil.copytree(targets["llama"], tmp_path / "target"), modules))
    prompt = [[5, 77, 200, 31, 9]]
    assert torch.equal(whole(both, prompt)[0], whole(alone, prompt)[0])


def test_embedding_and_head_are_shared_unless_they_differ(targets: dict[str, Path], tmp_path: Path) -> None:
    target = load(targets["llama"])
    stored = {"embed": target.embed.weight.clone(), "head": target.lm_head.weight.clone()}
    modules = random_modules(target.config, 1)
    _, (copies,) = open_modules(write_alone(tmp_path / "a", named(modules, "deepseek", LAYERS, stored)), target)
    assert copies.embed is target.embed
    assert copies.lm_head is target.lm_head
    changed = {name: weight + 1 for name, weight in stored.items()}
    _, (own,) = open_modules(write_alone(tmp_path / "b", named(modules, "deepseek", LAYERS, changed)), target)
    assert torch.equal(own.embed.weight, changed["embed"])
    assert torch.equal(own.lm_head.weight, changed["head"])
    assert torch.equal(target.embed.weight, stored["embed"])


def test_block_shapes_are_the_modules_own(targets: dict[str, Path], tmp_path: Path) -> None:
    """A module's heads and MLP need not be the target's; its tensors tell."""
    target = load(targets["llama"])
    mixer = replace(target.config.attention, num_heads=4, num_kv_heads=2, qk_norm=True)
    config = replace(target.config, layers=(LayerSpec(mixer, MLPSpec(36)),))
    weights = random_modules(config, 1)
    checkpoint, (module,) = open_modules(write_alone(tmp_path, named(weights, "deepseek", LAYERS)), target)
    assert checkpoint.config.layers == config.layers
    tokens, hidden = torch.arange(9, dtype=torch.int32), torch.randn(9, config.hidden_size)
    expected = reference(weights[0], "deepseek", config, target.embed.weight[tokens.long()], hidden, first=0)
    torch.testing.assert_close(module.norm(run(module, tokens, hidden)), expected, atol=2e-5, rtol=0)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t.pop("model.layers.3.enorm.weight"), ("model.layers.3.enorm.weight", "missing")),
        (lambda t: t.pop("model.layers.3.self_attn.k_proj.weight"), ("self_attn.k_proj.weight", "missing")),
        (lambda t: t.pop("model.layers.3.eh_proj.weight"), ("no MTP modules", "mtp.fc", "eh_proj", "MiMo")),
        (
            lambda t: t.update({"model.layers.3.self_attn.kv_a_proj_with_mqa.weight": torch.zeros(4, 4)}),
            ("MLA", "kv_a_proj_with_mqa"),
        ),
        (
            lambda t: t.update({"model.layers.3.mlp.experts.0.up_proj.weight": torch.zeros(4, 4)}),
            ("mixture of experts", "mlp.experts.0"),
        ),
        (
            lambda t: t.update({"model.layers.3.eh_proj.weight": torch.zeros(64, 128)}),
            ("[64, 128]", "[90, 180]", "another model"),
        ),
        (
            lambda t: t.update({"model.layers.3.mlp.up_proj.weight": torch.zeros(99, 90)}),
            ("mlp.up_proj.weight", "[99, 90]", "[100, 90]"),
        ),
        (
            lambda t: t.update({"model.layers.3.self_attn.rotation.weight": torch.zeros(2)}),
            ("self_attn.rotation.weight", "unexpected"),
        ),
    ],
    ids=["no norm", "no keys", "no projection", "MLA", "MoE", "other hidden size", "misshapen", "unexpected"],
)
def test_missing_or_mismatched_mtp_tensors_are_named(change, words, targets: dict[str, Path], tmp_path: Path) -> None:
    target = load(targets["llama"])
    tensors = named(random_modules(target.config, 1), "deepseek", LAYERS)
    change(tensors)
    with pytest.raises(CheckpointError) as error:
        open_modules(write_alone(tmp_path / "modules", tensors), target)
    for word in words:
        assert word in str(error.value), f"{word!r} is not in: {error.value}"


def test_missing_mtp_directory_raises(targets: dict[str, Path], tmp_path: Path) -> None:
    config = Checkpoint.open(targets["llama"]).config
    with pytest.raises(CheckpointError, match="no directory"):
        MTPCheckpoint.open(tmp_path / "nowhere", config)
    with pytest.raises(CheckpointError, match="no MTP modules"):
        MTPCheckpoint.open(targets["llama"], config)


def test_a_layer_too_many_is_still_refused(targets: dict[str, Path], tmp_path: Path) -> None:
    """Only modules that name themselves are passed over by the target's loader."""
    tensors = named(random_modules(Checkpoint.open(targets["llama"]).config, 1), "deepseek", LAYERS)
    del tensors["model.layers.3.eh_proj.weight"]
    path = write_beside(shutil.copytree(targets["llama"], tmp_path / "target"), tensors)
    checkpoint = Checkpoint.open(path)
    with pytest.raises(CheckpointError, match=r"model\.layers\.3\..* is unexpected"):
        load_model(checkpoint, attention=attention, dtype=torch.float32, device="cpu", max_positions=64)


@pytest.mark.skipif(not hasattr(modeling_layers, "MtpModel"), reason="this transformers has no MtpModel")
@pytest.mark.parametrize("depth", [1, 3])
@torch.no_grad()
def test_the_chain_of_modules_is_transformers(depth: int, targets: dict[str, Path]) -> None:
    """The reference that drafters are held to chains modules as transformers does: states, tokens and positions."""
    model = AutoModelForCausalLM.from_pretrained(targets["llama"], dtype=torch.float32, attn_implementation="eager")
    model.config.num_mtp_layers = depth
    theirs = modeling_layers.MtpModel(model, depth)
    config = Checkpoint.open(targets["llama"]).config
    modules = random_modules(config, depth)
    extra = {"enorm": "enorm.weight", "hnorm": "hnorm.weight", "proj": "eh_proj.weight", "norm": "post_norm.weight"}
    state = {
        f"layers.{i}.{extra.get(name, f'mtp_block.{name}')}": tensor
        for i, w in enumerate(modules)
        for name, tensor in w.items()
    }
    assert theirs.load_state_dict(state, strict=False).unexpected_keys == []
    ids = torch.randint(config.vocab_size, (1, 17), generator=torch.Generator().manual_seed(2))
    hidden = model.model(ids[:, :-1]).last_hidden_state
    _, logits, _ = theirs(
        input_ids=ids[:, 1:],
        last_hidden_states=hidden,
        attention_mask=torch.ones(1, 16, dtype=torch.long),  # transformers before 5.23 cannot do without
        position_ids=torch.arange(1, 17)[None],
        mtp_cache=cache_utils.MtpCache(config=theirs.config),
    )
    embed, head = model.get_input_embeddings().weight, model.lm_head.weight
    ours = greedy_drafts(modules, "deepseek", config, embed, head, ids[0].tolist(), hidden[0], depth)
    torch.testing.assert_close(torch.stack(ours), logits[0], atol=1e-3, rtol=0)
