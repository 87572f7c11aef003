"""Weights that change in place: afterwards an engine answers as one that was started with them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.engine.changed_weights import GREEDY, PROMPTS, answers, other, speculation
from tests.engine.helpers import engine, tokens
from unisono.types import CheckpointError, ConfigError, EngineRequest, SamplingParams, SpeculativeConfig

METHODS = ["eagle3", "mtp", "mtp_frozen", "ngram", "standalone"]
OLD_AND_NEW = tuple[Path, Path | None]


@pytest.mark.parametrize("method", METHODS)
def test_answers_are_those_of_a_new_engine(
    checkpoints_of: Callable[[str], OLD_AND_NEW], method: str, tmp_path: Path
) -> None:
    target, draft = checkpoints_of(method)
    new, new_draft = other(target, tmp_path / "new"), None if draft is None else other(draft, tmp_path / "draft")
    with engine(new, speculative=speculation(method, new_draft)) as llm:
        expected = answers(llm)
    with engine(target, speculative=speculation(method, draft)) as llm:
        old = answers(llm)
        assert old[0] != expected[0]
        assert llm.engine.weight_version == "0"
        graphs = list(llm.engine.runner.planner.graphs())
        done = llm.update_weights(str(new), str(new_draft or ""), version="step 1")
        assert (done["weight_version"], done["recomputed_requests"]) == ("step 1", 0)
        assert done["freed_pages"] > 0
        assert answers(llm) == expected
        assert list(llm.engine.runner.planner.graphs()) == graphs
        assert not any(kind == "eager" for _, kind, _ in llm.engine.runner.planner.passes)
        assert llm.update_weights(str(target), str(draft or ""))["weight_version"] == "2"
        assert answers(llm) == old


def test_a_failure_leaves_the_old_weights(checkpoints_of: Callable[[str], OLD_AND_NEW], tmp_path: Path) -> None:
    """Before the first tensor is written, or after the last one was."""
    target, draft = checkpoints_of("eagle3")
    assert draft is not None
    with engine(target, speculative=speculation("eagle3", draft)) as llm:
        expected = answers(llm)
        missing = other(target, tmp_path / "missing")
        file = next(missing.glob("*.safetensors"))
        tensors = load_file(file)
        last = tensors.pop("model.norm.weight")
        save_file(tensors, file)
        nan = other(target, tmp_path / "nan")
        save_file({**tensors, "model.norm.weight": torch.full_like(last, torch.nan)}, next(nan.glob("*.safetensors")))
        for directory, draft_directory, says in (
            (missing, "", r"model\.norm\.weight .* is missing"),
            (nan, "", "NaN or infinite"),
            (other(target, tmp_path / "fine"), missing, "a head of 3 layers"),
            (tmp_path / "nowhere", "", "no directory"),
            (draft, "", "is a draft head"),
        ):
            with pytest.raises(CheckpointError, match=says):
                llm.update_weights(str(directory), str(draft_directory))
            assert answers(llm) == expected, says
        with pytest.raises(ConfigError, match="name a directory"):
            llm.update_weights()
        assert llm.engine.weight_version == "0"
        llm.engine.check_integrity()


def test_running_requests_continue_with_the_new_weights(qwen3: Path, tmp_path: Path) -> None:
    """The old weights' tokens stay; the rest is what the new ones write after them."""
    new = other(qwen3, tmp_path / "new")
    spec = SpeculativeConfig("ngram", num_speculative_tokens=2)
    with engine(qwen3, speculative=spec) as llm:
        ids = {f"r{number}": list(prompt) for number, prompt in enumerate(PROMPTS)}
        for name, prompt in ids.items():
            llm.engine.add(EngineRequest(name, prompt, GREEDY))
        said: dict[str, list[int]] = {name: [] for name in ids}

        def step() -> None:
            for delta in llm.engine.step():
                said[delta.request_id] += delta.token_ids

        for _ in range(4):
            step()
        recomputed = llm.engine.update_weights(str(new))["recomputed_requests"]
        assert recomputed > 0
        step()  # hands out the pass that was in flight
        kept = {name: len(one) for name, one in said.items()}
        old = {name: list(one) for name, one in said.items()}
        while llm.engine.has_work():
            step()
        llm.engine.check_integrity()
    with engine(new) as fresh:
        for name, prompt in ids.items():
            assert len(said[name]) == GREEDY.max_tokens
            rest = SamplingParams(temperature=0, max_tokens=12 - kept[name], ignore_eos=True, seed=0)
            assert said[name][: kept[name]] == old[name]
            if kept[name] < 12:
                assert said[name][kept[name] :] == tokens(fresh, [prompt + old[name]], [rest])[0]


def test_drafters_without_weights_have_none_to_update(qwen3: Path) -> None:
    spec = SpeculativeConfig("ngram", num_speculative_tokens=2)
    with engine(qwen3, speculative=spec) as llm, pytest.raises(ConfigError, match="ngram drafter has no weights"):
        llm.update_weights(draft_directory=str(qwen3))
