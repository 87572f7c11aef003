"""All ranks get new weights, or none does."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.engine.changed_weights import answers, other, speculation
from tests.engine.conftest import checkpoints, checkpoints_of  # noqa: F401
from tests.engine.helpers import engine
from unisono.types import CheckpointError


def test_two_ranks(checkpoints_of: Callable[[str], Any], tmp_path: Path) -> None:  # noqa: F811
    target, draft = checkpoints_of("eagle3")
    new, new_draft = other(target, tmp_path / "new"), other(draft, tmp_path / "draft")
    bad = other(target, tmp_path / "bad")
    tensors = load_file(file := next(bad.glob("*.safetensors")))
    weight = tensors["model.layers.0.mlp.down_proj.weight"]
    weight[-1, -1] = torch.nan  # in the part of the last rank alone
    save_file(tensors, file, {"format": "pt"})
    with engine(new, speculative=speculation("eagle3", new_draft)) as llm:
        expected = answers(llm)
    with engine(
        target,
        speculative=speculation("eagle3", draft),
        tensor_parallel_size=2,
        enable_sleep_mode=True,
    ) as llm:
        old = answers(llm)
        with pytest.raises(CheckpointError, match="NaN or infinite"):
            llm.update_weights(str(bad))
        assert answers(llm) == old
        llm.update_weights(str(new), str(new_draft))
        assert answers(llm) == expected != old

        for level in (1, 2):
            llm.sleep(level)
            llm.wake_up()
            assert answers(llm) == expected, "every rank got its part back"
