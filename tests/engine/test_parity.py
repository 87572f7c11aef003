"""20 greedy tokens equal transformers' for every family: alone, batched, chunked, and after a prefix hit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.engine.helpers import lazy_engine, prompts, tokens
from tests.models.fields import FAMILIES
from tests.models.hybrids import greedy_tokens
from tests.models.hybrids import reference as of_transformers
from tests.models.plain_decoder import PlainDecoder
from unisono.types import SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
PROMPTS = prompts(6, 250, low=2, high=70)


@torch.inference_mode()
def reference(path: Path) -> list[list[int]]:
    model = of_transformers(path)
    if isinstance(model, PlainDecoder):
        return [greedy_tokens(path, prompt, 20) for prompt in PROMPTS]
    model.generation_config.eos_token_id = None
    outputs = []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=20, pad_token_id=0
        )
        outputs.append(out[0, len(prompt) :].tolist())
    return outputs


@pytest.mark.parametrize("family", list(FAMILIES))
def test_greedy_tokens_equal_transformers(family: str, checkpoints: dict[str, Path]) -> None:
    expected = reference(checkpoints[family])
    with lazy_engine(checkpoints[family], dtype="float32") as llm:
        assert tokens(llm, PROMPTS, GREEDY) == expected, "batched"
        hits = llm.engine.scheduler.prefix_hits
        assert tokens(llm, PROMPTS, GREEDY) == expected, "after a prefix hit"
        assert llm.engine.scheduler.prefix_hits > hits
    with lazy_engine(checkpoints[family], dtype="float32", max_num_batched_tokens=16) as llm:
        assert [tokens(llm, [p], GREEDY)[0] for p in PROMPTS[:3]] == expected[:3], "alone, in chunks of 16"
