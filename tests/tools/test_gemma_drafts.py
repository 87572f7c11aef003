"""Assistants and EAGLE-3 heads that are trained for a Gemma 4: their steps are those of serving, and transformers reads
what is exported.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.models.fields import GEMMA4_EXPERTS, GEMMA4_SHARED
from tests.models.make import make_checkpoint
from tests.tools.untrained_drafts import made, prompts_file, quiet, texts, unrolled
from unisono.kernels.norm.sandwich_norm import add_normed
from unisono.models.load.checkpoint import Checkpoint
from unisono.tools.draft_training.answers import AnswerConfig
from unisono.tools.draft_training.batches import Batches
from unisono.tools.draft_training.command import Run, train
from unisono.tools.draft_training.draft import loss_of
from unisono.tools.draft_training.methods import METHODS, DraftShape
from unisono.tools.draft_training.teacher import Teacher
from unisono.tools.draft_training.trainer import Recipe, Trainer
from unisono.types import ConfigError

SHAPE = DraftShape(draft_vocab=131, hidden_size=64, layers=2)
TARGETS: dict[str, dict[str, Any]] = {"experts": GEMMA4_EXPERTS, "shared keys": GEMMA4_SHARED}


@pytest.fixture(scope="module", params=TARGETS, ids=list(TARGETS))
def target(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("gemma"), "gemma4_text", **TARGETS[request.param])


@torch.no_grad()
def test_transformers_drafts_what_training_saw(target: Path, tmp_path: Path) -> None:
    """Three steps of rounds after every prefix, where all keys are in the window."""
    teacher, found = made("mtp_frozen", target, tmp_path, SHAPE)
    found.save()
    tokens = [7 * i % 251 for i in range(16)]
    _, steps = unrolled(teacher, found, tokens)
    whole = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    whole.config.output_hidden_states = True
    theirs, loading = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, output_loading_info=True)
    assert type(theirs).__name__ == "Gemma4AssistantForCausalLM"
    assert not loading["missing_keys"] | loading["mismatched_keys"] | loading["unexpected_keys"]
    for last in range(2, 13):  # the last committed token
        out = whole.model(torch.tensor([tokens[:last]]), return_shared_kv_states=True)
        hidden = out.last_hidden_state[:, -1:]
        for step in range(3):
            embedded = whole.get_input_embeddings()(torch.tensor([[tokens[last + step]]]))
            made_ = theirs(
                inputs_embeds=torch.cat((embedded, hidden), -1), position_ids=torch.tensor([[last]]),
                shared_kv_states=out.shared_kv_states,
            )  # fmt: skip
            hidden = made_.last_hidden_state
            torch.testing.assert_close(steps[step][last - 1], made_.logits[0, 0], atol=1e-4, rtol=1e-4)


def test_gradients_reach_every_weight(target: Path, tmp_path: Path) -> None:
    for method in ("mtp_frozen", "eagle3"):
        torch.manual_seed(0)
        (out := tmp_path / method).mkdir()
        teacher = Teacher(Checkpoint.open(target), "cpu", 64)
        found = METHODS[method](teacher, SHAPE, texts(), out)
        trainer = Trainer(teacher, found, Batches(texts(), 256, 0), Recipe(steps=1), out)
        loss_of(found.draft, teacher.run(trainer.batches[0], found.draft.aux_layers), torch.float32).value.backward()
        without = [name for name, p in trainer.weights.items() if p.grad is None or not p.grad.abs().sum() > 0]
        assert without == [], method
        assert any("post_norm" in name for name in trainer.weights) == (method == "mtp_frozen")


def test_the_tail_has_the_gradient_of_its_formula() -> None:
    torch.manual_seed(0)
    x, residual, after, weight = torch.randn(3, 8), torch.randn(3, 8), torch.rand(8) + 0.5, torch.rand(8) + 0.5
    given = [t.double().requires_grad_() for t in (x, residual, after, torch.tensor([0.7]), weight)]

    def norm(y: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return y * torch.rsqrt(y.square().mean(-1, keepdim=True) + 1e-6) * w

    total = (norm(given[0], given[2]) + given[1]) * given[3]
    wanted = torch.autograd.grad((total.sin() + norm(total, given[4]).cos()).sum(), given)
    ours = [t.detach().float().requires_grad_() for t in given]
    summed, normed = add_normed(ours[0], ours[1], ours[2], 1e-6, ours[3], ours[4], 1e-6)
    found = torch.autograd.grad((summed.sin() + normed.cos()).sum(), ours)
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b.float(), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("method", ["mtp_frozen", "eagle3"])
def test_one_command_trains_and_measures(method: str, tmp_path: Path) -> None:
    target = make_checkpoint(tmp_path / "target", "gemma4_text", **GEMMA4_EXPERTS)
    recipe = Recipe(steps=6, batch_tokens=256, lr=1e-2, muon_lr=0.05, save_every=1e9)
    asking = AnswerConfig(temperature=0.0, max_tokens=12, longest=64)
    run, said = Run(method, str(target), tmp_path / "out", recipe, SHAPE, asking, "cpu"), list[str]()
    data = prompts_file(tmp_path / "data.jsonl", 12)
    trained = train(run, data, held_out=4, report=quiet, log=said.append, max_num_seqs=8, enforce_eager=True)
    assert f"mean accept length {trained.length:.2f} at k = 3" in said[-1]
    assert trained.drafted > 0
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    if method == "eagle3":
        assert config["rope_parameters"] == {"rope_type": "default", "rope_theta": 10_000.0}
    else:
        assert config["backbone_hidden_size"] == 72
        assert load_file(tmp_path / "out" / "model.safetensors")["pre_projection.weight"].shape == (64, 144)


def test_other_targets_are_refused(tmp_path: Path) -> None:
    target = make_checkpoint(tmp_path / "t", "llama", tokenizer=False)
    with pytest.raises(ConfigError, match="mtp_frozen is trained for targets of Gemma 4, not for a LlamaForCausalLM"):
        METHODS["mtp_frozen"](Teacher(Checkpoint.open(target), "cpu", 64), SHAPE, texts(), tmp_path)
