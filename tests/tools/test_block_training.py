"""A DFlash head in training computes what is drafted, learns, and is served from what it wrote."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.drafters.make_blocks import MASK, Block, reference
from tests.drafters.make_heads import THETA
from tests.engine.helpers import engine, mixed_params, prompts, tokens
from tests.models.make import make_checkpoint
from unisono.models.load.checkpoint import Checkpoint
from unisono.tools.draft_training.answers import AnswerConfig, Text
from unisono.tools.draft_training.batches import Batches
from unisono.tools.draft_training.block import draw_anchors
from unisono.tools.draft_training.command import Run, measure_acceptance, train_on_texts
from unisono.tools.draft_training.data import TrainingPrompt
from unisono.tools.draft_training.draft import loss_of
from unisono.tools.draft_training.held_out import ReplayedRounds, accepted_drafts, set_aside
from unisono.tools.draft_training.measure import measure
from unisono.tools.draft_training.methods import METHODS, DraftShape
from unisono.tools.draft_training.teacher import Teacher
from unisono.tools.draft_training.trainer import Recipe
from unisono.types import SpeculativeConfig

SHAPE = DraftShape(layers=2, block_size=4)
FAST = {"enforce_eager": True, "max_num_seqs": 4}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rope = {"rope_type": "default", "rope_theta": THETA}
    path = tmp_path_factory.mktemp("target")
    return make_checkpoint(path, "llama", num_hidden_layers=4, rope_parameters=rope, tie_word_embeddings=False)


def texts(count: int = 12) -> list[Text]:
    rng = random.Random(0)
    used = [token for token in range(250) if token != MASK]
    return [Text([rng.choice(used) for _ in range(rng.randrange(8, 40))], rng.randrange(2, 6)) for _ in range(count)]


def test_reference_forward_reads_the_exported_checkpoint(target: Path, tmp_path: Path) -> None:
    """The exported tensors in the paper's forward, after every prefix of a text."""
    torch.manual_seed(1)
    teacher = Teacher(Checkpoint.open(target), "cpu", 64)
    found = METHODS["dflash"](teacher, SHAPE, texts(), tmp_path)
    own = {id(p) for p in teacher.decoder.parameters()}
    with torch.no_grad():
        for parameter in found.draft.module.parameters():
            if parameter.ndim == 2 and id(parameter) not in own:
                parameter.normal_(0, 0.8 / parameter.shape[1] ** 0.5)
    found.save()
    config = json.loads((tmp_path / "config.json").read_text())
    layers = tuple(i + 1 for i in config["dflash_config"]["target_layer_ids"])
    assert found.draft.aux_layers == layers
    text = texts(1)[0].token_ids[:14]
    batch = Batches([Text(text, 1)], 64, 0)[0]
    seen = teacher.run(batch, layers)
    with torch.no_grad():
        steps = list(found.draft.unroll(seen, torch.float32))
    assert len(steps) == 3
    block = Block(tmp_path, load_file(tmp_path / "model.safetensors"), config, layers, ((0, False),) * 2)
    mask, embed, head = config["dflash_config"]["mask_token_id"], teacher.decoder.embed, teacher.decoder.lm_head
    table = embed.weight.clone()
    table[MASK] = embed.weight[mask]  # the reference's mask token
    assert seen.aux is not None
    for anchor in range(1, len(text) - 3):
        ids = text[: anchor + 1]
        want, _ = reference(block, table, head.weight, ids, seen.aux[0, :anchor], [0] * 3)
        for step, (places, logits) in enumerate(steps):
            (row,) = (places == anchor + step).nonzero()[:, 0].tolist()
            torch.testing.assert_close(logits[row].double(), want[step], rtol=1e-4, atol=1e-4)


def test_two_steps_learn_and_are_served(target: Path, tmp_path: Path) -> None:
    losses: list[Any] = []
    run = Run(
        "dflash", str(target), tmp_path / "out", Recipe(steps=2, batch_tokens=256), SHAPE,
        AnswerConfig(longest=64, max_tokens=20), "cpu",
    )  # fmt: skip
    run.out.mkdir()
    run.check(resume=False)
    train_on_texts(run, texts(), False, lambda *_: None, losses.append)
    weights = load_file(run.out / "model.safetensors")
    assert all(bool(t.isfinite().all()) for t in weights.values())
    assert {"fc.weight", "hidden_norm.weight", "layers.1.self_attn.k_proj.weight", "norm.weight"} <= weights.keys()
    batch, params = prompts(4, 250, seed=8), mixed_params(4)
    with engine(target) as llm:
        expected = tokens(llm, batch, params)
    with engine(target, speculative=SpeculativeConfig("dflash", str(run.out), 3)) as llm:
        assert tokens(llm, batch, params) == expected


def test_the_loss_falls_on_one_batch(target: Path, tmp_path: Path) -> None:

    torch.manual_seed(0)
    teacher = Teacher(Checkpoint.open(target), "cpu", 64)
    found = METHODS["dflash"](teacher, SHAPE, texts(), tmp_path)
    own = {id(p) for p in teacher.decoder.parameters()}
    weights = [p.requires_grad_() for p in found.draft.module.parameters() if id(p) not in own]
    outputs = teacher.run(Batches(texts(), 128, 0)[0], found.draft.aux_layers)
    optimizer, values = torch.optim.Adam(weights, 5e-3), []
    for _ in range(8):
        loss = loss_of(found.draft, outputs, torch.float32)
        optimizer.zero_grad()
        loss.value.backward()
        assert all(p.grad is not None and bool((p.grad != 0).any()) for p in weights)
        optimizer.step()
        values.append(float(loss.value.detach()))
    assert values[-1] < values[0] - 0.05


def test_replayed_rounds_accept_what_the_engine_accepts(target: Path, tmp_path: Path) -> None:
    """Greedy answers of the engine, replayed, have its accept length. A trained head accepts some drafts, not all."""
    run = Run(
        "dflash", str(target), tmp_path, Recipe(steps=30, batch_tokens=256), SHAPE,
        AnswerConfig(temperature=0, longest=64, max_tokens=40), "cpu",
    )  # fmt: skip
    asked = [TrainingPrompt(text.token_ids[:8]) for text in texts()]
    plain = measure(str(target), asked, None, max_tokens=40, longest=64, device="cpu", **FAST)
    learnt = [
        Text([*p.token_ids, *answer], len(p.token_ids), greedy=True)
        for p, answer in zip(asked, plain.answers, strict=True)
    ]
    run.check(resume=False)
    train_on_texts(run, learnt, False, lambda *_: None, lambda _: None)
    drafted = measure_acceptance(run, asked, **FAST)
    assert drafted.answers == plain.answers
    assert 1.1 < drafted.length < 4

    teacher = Teacher(Checkpoint.open(target), "cpu", 64)
    found = METHODS["dflash"](teacher, SHAPE, learnt, tmp_path)
    opened = load_file(tmp_path / "model.safetensors")
    with torch.no_grad():
        for name, parameter in found.stored().items():
            parameter.copy_(opened[name])
    replayed = ReplayedRounds()
    for batch in Batches(learnt, 256, 0).epoch():
        outputs = teacher.run(batch, found.draft.aux_layers)
        replayed.add(batch, accepted_drafts(found.draft, outputs, torch.float32))
    assert replayed.accept_length == pytest.approx(drafted.length, abs=0.02)


def test_few_anchors_are_drawn_inside_the_answers() -> None:
    mask = torch.zeros(3, 20, dtype=torch.bool)
    mask[0, 4:18], mask[1, 10:13] = True, True
    all_of_them, some = draw_anchors(mask, 64, seed=1), draw_anchors(mask, 5, seed=1)
    assert all_of_them[0].tolist() == [*range(4, 18)]
    assert all_of_them[1].tolist() == [10, 11, 12, *[-1] * 11]
    assert some.shape == (3, 5)
    assert set(some[0].tolist()) < set(range(4, 18))
    assert some[1].tolist() == [10, 11, 12, -1, -1]
    assert some[2].tolist() == [-1] * 5
    assert not torch.equal(some[0], draw_anchors(mask, 5, seed=2)[0])


def test_greedy_answers_are_set_aside() -> None:
    made = [Text([n, 1, 2], 1, greedy=n % 2 == 0) for n in range(80)]
    learnt, held = set_aside(made)
    assert [text.token_ids[0] for text in held] == [0, 40]
    assert len(learnt) == 78
    assert set_aside(texts()) == (texts(), [])
