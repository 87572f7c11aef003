"""What tests of draft training share: texts, untrained drafts with weights that matter, their steps, prompt files."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import torch

from unisono.models.load.checkpoint import Checkpoint
from unisono.tools.draft_training.answers import Text
from unisono.tools.draft_training.batches import Batches
from unisono.tools.draft_training.methods import METHODS, DraftShape
from unisono.tools.draft_training.teacher import Teacher, TeacherOutputs

SHAPE = DraftShape(draft_vocab=131, hidden_size=64, layers=1)


def texts(count: int = 12, seed: int = 0) -> list[Text]:
    rng = random.Random(seed)
    return [Text([rng.randrange(256) for _ in range(rng.randrange(8, 40))], rng.randrange(2, 6)) for _ in range(count)]


def made(method: str, target: Path, out: Path, shape: DraftShape = SHAPE) -> tuple[Teacher, Any]:
    """A teacher, and an untrained draft whose weights are large enough to matter."""
    torch.manual_seed(1)
    out.mkdir(exist_ok=True)
    teacher = Teacher(Checkpoint.open(target), "cpu", 64)
    found = METHODS[method](teacher, shape, texts(), out)
    own = {id(p) for p in teacher.decoder.parameters()}
    with torch.no_grad():
        for parameter in found.draft.module.parameters():
            if parameter.ndim == 2 and id(parameter) not in own:
                parameter.normal_(0, 0.8 / parameter.shape[1] ** 0.5)
            elif id(parameter) not in own:
                parameter.normal_(1, 0.2)
    return teacher, found


def shown(teacher: Teacher, found: Any, tokens: list[int]) -> TeacherOutputs:
    (batch,) = [Batches([Text(tokens, 1)], 64, 0)[0]]
    return teacher.run(batch, found.draft.aux_layers)


def unrolled(teacher: Teacher, found: Any, tokens: list[int]) -> tuple[TeacherOutputs, dict[int, torch.Tensor]]:
    """Each step's logits at every position of the tokens (rows before the step's first are left out)."""
    seen = shown(teacher, found, tokens)
    with torch.no_grad():
        steps = dict(enumerate(found.draft.unroll(seen, torch.float32)))
    count = len(tokens)
    assert [first for first, _ in steps.values()] == [1, 2, 3]
    return seen, {s: logits[0, : count - first] for s, (first, logits) in steps.items()}


def prompts_file(file: Path, count: int = 40) -> Path:
    rng = random.Random(1)
    with file.open("w") as lines:
        for i in range(count):
            words = " ".join(rng.choice(["red", "blue", "tree", "house", "sea"]) for _ in range(4))
            entry = {"messages": [{"role": "user", "content": words}]} if i % 2 else {"prompt": words}
            lines.write(json.dumps(entry) + "\n")
    return file


def quiet(*_: object) -> None:
    """No progress."""
