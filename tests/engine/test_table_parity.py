"""32 greedy tokens of every row of the table of decoders equal transformers', with n-gram drafts and without."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.engine.helpers import engine, tokens
from tests.models.hybrids import reference
from tests.models.make import make_checkpoint
from tests.models.table_cases import CASES, family_of, fields_of
from unisono.types import SamplingParams, SpeculativeConfig

GREEDY = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True)
PROMPTS = [[7, 50, 91, 7, 50, 91, 7, 50] * 9, [3, 141, 59, 26]]
"""The first one is beyond the original length (64) of the rope types with one, and repeats, so that drafts exist."""
NGRAM = SpeculativeConfig("ngram", num_speculative_tokens=3)


@torch.inference_mode()
def expected(path: Path, prompt: list[int]) -> list[int]:
    """Greedy tokens of transformers without a cache, so that its tables fit the whole text."""
    model, ids = reference(path), list(prompt)
    for _ in range(GREEDY.max_tokens or 0):
        ids.append(int(model(torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
    return ids[len(prompt) :]


@pytest.mark.parametrize("case", CASES)
def test_greedy_tokens_equal_transformers(case: str, tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path / "c", family_of(case), tokenizer=False, **fields_of(case))
    with engine(path, dtype="float32", max_model_len=128) as llm:
        plain = tokens(llm, PROMPTS, GREEDY)
    with engine(path, dtype="float32", max_model_len=128, speculative=NGRAM) as llm:
        assert tokens(llm, PROMPTS, GREEDY) == plain, "drafts changed a token"
    long = "longrope" in case  # transformers takes the short factors for the second prompt, this engine one table
    for prompt, answer in list(zip(PROMPTS, plain, strict=True))[: 1 if long else 2]:
        assert answer == expected(path, prompt)
