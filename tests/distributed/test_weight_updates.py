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
from tests.models.make import make_checkpoint
from unisono.types import CheckpointError, ConfigError


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


def test_missing_experts_of_another_rank_keep_the_engine_asleep(tmp_path: Path) -> None:
    """Rank 0 holds experts 0 and 1, rank 1 the others: it alone knows that they are missing. A push that rank 1 refuses
    has written over an expert of rank 0, which is missing again.
    """
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "n_routed_experts": 4}
    path = make_checkpoint(tmp_path / "experts", "glm4_moe_lite", **heads)
    stored = load_file(next(path.glob("*.safetensors")))
    late = {name: tensor for name, tensor in stored.items() if ".experts.2." in name or ".experts.3." in name}
    assert late
    flags = {"enable_expert_parallel": True, "enable_sleep_mode": True}
    first, second, last = (next(n for n in stored if f".experts.{expert}.down" in n) for expert in (0, 1, 3))
    with engine(path, tensor_parallel_size=2, **flags) as llm:
        expected = answers(llm)
        llm.sleep(2)
        llm.wake_up(["weights"], reload=False)
        llm.update_weights_from_tensor({name: stored[name] for name in stored.keys() - late.keys() - {second}})
        bad = {first: stored[first] + 1, last: torch.full_like(stored[last], torch.nan)}
        with pytest.raises(CheckpointError, match="NaN or infinite"):
            llm.update_weights_from_tensor(bad)
        llm.update_weights_from_tensor({second: stored[second]})
        with pytest.raises(ConfigError, match=r"1 dropped tensors, such as .*experts\.0\.down"):
            llm.wake_up(["kv_cache"])
        llm.update_weights_from_tensor({first: stored[first]})
        with pytest.raises(ConfigError, match=r"dropped tensors, such as .*experts\.2\."):
            llm.wake_up(["kv_cache"])
        assert llm.is_sleeping
        llm.update_weights_from_tensor(late)
        assert not llm.wake_up(["kv_cache"])["is_sleeping"]
        assert answers(llm) == expected
