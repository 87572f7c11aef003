"""Prompt lookup in front of a draft model: which drafts a row gets, and that texts stay."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.drafters.make_blocks import make_dflash
from tests.drafters.make_heads import make_eagle3
from tests.engine.helpers import lazy_engine, mixed_params, prompts, tokens
from tests.engine.matrix import config_of
from tests.models.hybrid_mtp import with_module
from tests.models.make import make_checkpoint
from unisono.config.preflight.model import with_method
from unisono.drafters.base import PausableDrafter
from unisono.drafters.combined import CombinedDrafter
from unisono.types import CheckpointError, ConfigError, SamplingParams, SpeculativeConfig


def proposed(llm: Any) -> list[tuple[list[int], list[int], list[int]]]:
    """(committed tokens, the model's drafts, the drafts) of each row, recorded in an eager engine."""
    drafter, slots, seen = llm.engine.worker.drafter, llm.engine.worker.slots, []
    of_model, propose = drafter.model.propose, drafter.propose

    def recording(rows: Any, drafts: Any) -> None:
        kept: list[Any] = []

        def model(rows: Any, drafts: Any) -> None:
            of_model(rows, drafts)
            kept.append(drafts.clone())

        drafter.model.propose = model
        propose(rows, drafts)
        for row, slot in enumerate(rows.tolist()):
            length = int(slots.length[slot])
            if length:
                ids = slots.history[slot, :length].tolist()
                seen.append((ids, kept[0][row].tolist(), drafts[row].tolist()))

    drafter.propose = recording
    return seen


def continuation(ids: list[int], shortest: int) -> int | None:
    """The token after the latest longest earlier occurrence of the last ``shortest`` … 16 tokens."""
    for size in range(16, shortest - 1, -1):
        for end in range(len(ids) - 2, size - 2, -1):
            if ids[end - size + 1 : end + 1] == ids[-size:]:
                return ids[end + 1]
    return None


@pytest.mark.parametrize(("method", "shortest"), [("dflash", 2), ("dflash", 8), ("mtp", 2)])
def test_long_ngram_match_replaces_model_drafts(
    checkpoints: dict[str, Path], tmp_path: Path, method: str, shortest: int
) -> None:
    """In front of a block drafter, and of the MTP module of a hybrid, which needs no directory of its own."""
    options = {"prompt_lookup_min": shortest, "shared_tokens": 0}
    if method == "mtp":
        target = with_module(make_checkpoint(tmp_path / "target", "qwen3_5_text", tokenizer=False)).path
        spec = SpeculativeConfig("combined", None, 3, options)
    else:
        target = checkpoints["mistral"]
        spec = SpeculativeConfig("combined", str(make_dflash(tmp_path, config_of(target)).path), 3, options)
    batch = [p * 4 for p in prompts(3, 250, 5, 9, seed=2)] + prompts(3, 250, 20, 30, seed=3)
    few = [(40,), (40, 41), (40, 41, 42), None, None, None]  # allowed tokens: few of them repeat themselves
    params = [
        SamplingParams(temperature=i % 2, seed=i, max_tokens=24, ignore_eos=True, allowed_token_ids=allowed)
        for i, allowed in enumerate(few)
    ]
    with lazy_engine(target) as llm:
        expected = tokens(llm, batch, params)
    with lazy_engine(target, speculative=spec, enforce_eager=True) as llm:
        assert llm.engine.worker.drafter.model.name == method
        seen = proposed(llm)
        assert tokens(llm, batch, params) == expected
    replaced = 0
    for ids, of_model, drafts in seen:
        found = continuation(ids, shortest)
        replaced += found is not None
        assert drafts[0] == found if found is not None else drafts == of_model
    assert 0 < replaced < len(seen)


def test_combined_drafter_is_pausable_if_its_model_is(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    """EAGLE-3 catches up after rounds without drafts; a block drafter has nothing to catch up with."""
    target = config_of(checkpoints["mistral"])
    eagle = make_eagle3(tmp_path / "eagle", target, (2, 1, 3), aux=[2, 1, 3]).path
    block = make_dflash(tmp_path / "block", target).path
    pauses = [
        isinstance(CombinedDrafter(SpeculativeConfig("combined", str(head), 3), target), PausableDrafter)
        for head in (eagle, block)
    ]
    assert pauses == [True, False]
    spec, batch, params = SpeculativeConfig("combined", str(eagle), 3), prompts(5, 250, seed=5), mixed_params(5)
    with lazy_engine(checkpoints["mistral"]) as llm:
        expected = tokens(llm, batch, params)
    with lazy_engine(checkpoints["mistral"], speculative=spec, adaptive=True) as llm:
        assert tokens(llm, batch, params) == expected
        assert tokens(llm, batch, params) == expected


def test_the_directory_names_the_method(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    target = config_of(checkpoints["mistral"])
    make_dflash(tmp_path, target)
    assert with_method({"model": str(tmp_path)})["method"] == "dflash"
    assert with_method({"model": "tiny-eagle3"})["method"] == "eagle3"
    assert "method" not in with_method({"model": "tiny-mtp"})


@pytest.mark.parametrize(
    ("model", "options", "says"),
    [
        ("tiny-draft", {}, "name the method of the draft model"),
        ("tiny-eagle3", {"draft_method": "ngram"}, "'ngram' of the method combined"),
        ("tiny-eagle3", {"prompt_lookup_min": 0}, "prompt_lookup_min=0: give 1"),
        ("tiny-eagle3", {"window": 3}, "'eagle3' has no option 'window'"),
    ],
)
def test_invalid_combined_drafter_options_raise(model: str, options: dict[str, Any], says: str) -> None:
    with pytest.raises((ConfigError, CheckpointError), match=says):
        CombinedDrafter(SpeculativeConfig("combined", model, 3, options), config_of_tiny())


def config_of_tiny() -> Any:
    from unisono.config import catalog

    return config_of(catalog.bundled_path("tiny"))
