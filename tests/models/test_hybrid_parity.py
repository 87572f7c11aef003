"""The families with recurrent layers against transformers in fp32, and every way of feeding them tokens."""

from __future__ import annotations

import random

import pytest
import torch

from tests.models.harness import chunked, load, rounds, together, whole
from tests.models.hybrids import CASES, reference
from tests.models.make import make_checkpoint

LENGTHS = (150, 33, 5)
"""None is a multiple of a page, a tile or a width."""

MORE = (
    "qwen3_5-vision-tied", "qwen3_5-heads-3x", "qwen3_next-plain-layers", "granitemoehybrid-dense", "nemotron_h-latent",
    "nemotron_h-biases",
)  # fmt: skip
"""Cases that are fed in every way only in the long matrix."""


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    rng = random.Random(0)
    return [[rng.randrange(256) for _ in range(n)] for n in LENGTHS]


@pytest.fixture(scope="module", params=CASES, ids=list(CASES))
def case(request, tmp_path_factory, prompts):
    family, overrides = CASES[request.param]
    directory = make_checkpoint(tmp_path_factory.mktemp(family), family, tokenizer=False, **overrides)
    decoder = load(directory)
    return directory, decoder, whole(decoder, prompts)


@torch.no_grad()
def test_logits_match_transformers(case, prompts, record_property):
    directory, _, ours = case
    model, worst = reference(directory), 0.0
    for prompt, logits in zip(prompts, ours, strict=True):
        theirs = model(torch.tensor([prompt])).logits[0]
        assert theirs.std() > 0.5, "a flat model would prove nothing"
        torch.testing.assert_close(logits, theirs, atol=1e-4, rtol=0)
        worst = max(worst, float((logits - theirs).abs().max()))
    record_property("largest logit error", f"{type(model).__name__} {worst:.1e}")


WAYS = {
    "batched": together,
    "chunks-of-19": lambda d, p: chunked(d, p, 19),
    "chunks-of-16": lambda d, p: chunked(d, p, 16),
    "rounds-of-1": lambda d, p: rounds(d, p, 1),
    "rounds-of-4": lambda d, p: rounds(d, p, 4),
}


@pytest.mark.parametrize("way", WAYS)
def test_logits_are_independent_of_chunking(way, case, prompts):
    _, decoder, expected = case
    for got, want in zip(WAYS[way](decoder, prompts), expected, strict=True):
        assert torch.equal(got, want), f"rows differ: {(got != want).any(-1).nonzero().flatten().tolist()[:8]}"
