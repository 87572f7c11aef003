"""Every row of the table of decoders against transformers in fp32; every way of feeding tokens against one pass."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from tests.models.harness import Session, chunked, load, rounds, whole
from tests.models.hybrids import reference
from tests.models.make import make_checkpoint
from tests.models.table_cases import CASES, family_of, fields_of
from unisono.config.decoder_table import ROWS

LENGTHS = (90, 33)
"""The first one is beyond the original length (64) of the rope types with one, and crosses pages and windows."""


def test_every_row_has_a_case() -> None:
    assert {architecture for architecture, _ in CASES.values()} == ROWS.keys()


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    rng = random.Random(0)
    return [[rng.randrange(256) for _ in range(length)] for length in LENGTHS]


def made(case: str, directory: Path) -> Path:
    return make_checkpoint(directory, family_of(case), tokenizer=False, **fields_of(case))


@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_a_row_computes_what_transformers_computes(case: str, tmp_path: Path, prompts: list[list[int]]) -> None:
    """Logits within 1e-4, and within a chunk, a round or a pass of last tokens the bits of one pass."""
    directory = made(case, tmp_path)
    model, decoder = reference(directory), load(directory)
    long = decoder.config.hf_config.rope_parameters.get("rope_type") == "longrope"
    prompts = prompts[:1] if long else prompts  # transformers takes the short factors for a short prompt
    ours = whole(decoder, prompts)
    for prompt, logits in zip(prompts, ours, strict=True):
        theirs = model(torch.tensor([prompt])).logits[0]
        assert theirs.std() > 0.3, "a flat model would prove nothing"
        torch.testing.assert_close(logits, theirs, atol=1e-4, rtol=0)
    for other in (chunked(decoder, prompts, 7), rounds(decoder, prompts, 4)):
        assert all(map(torch.equal, other, ours))
    session = Session(decoder, len(prompts), max(map(len, prompts)))
    last = session.extend(dict(enumerate(prompts)), padding=3, last_tokens=True)
    assert all(torch.equal(last[i], logits[-1:]) for i, logits in enumerate(ours))
    exact = decoder.reference(torch.tensor(prompts[-1]))
    torch.testing.assert_close(ours[-1].double(), exact, atol=1e-4, rtol=0)


@torch.no_grad()
def test_dynamic_rope_stretches_its_base_for_the_longest_text(tmp_path: Path, prompts: list[list[int]]) -> None:
    """Beyond the trained length (64) the base is that of transformers for a text as long as ``max_positions``."""
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 3.0}
    fields = {"max_position_embeddings": 64, "rope_parameters": rope}
    directory = make_checkpoint(tmp_path, "llama", tokenizer=False, **fields)
    model, decoder = reference(directory), load(directory, max_positions=len(prompts[0]))
    assert decoder.config.max_positions == 192
    (ours,) = whole(decoder, prompts[:1])
    torch.testing.assert_close(ours, model(torch.tensor(prompts[:1])).logits[0], atol=1e-4, rtol=0)
    (within,) = whole(load(directory, max_positions=64), prompts[1:])
    torch.testing.assert_close(within, reference(directory)(torch.tensor(prompts[1:])).logits[0], atol=1e-4, rtol=0)


@pytest.mark.parametrize("case", ["phi3-longrope", "phimoe-longrope"])
@torch.no_grad()
def test_longrope_takes_the_short_factors_within_the_original_length(
    case: str, tmp_path: Path, prompts: list[list[int]]
) -> None:
    """``max_positions`` 64 is the original length; above it the text would be another one."""
    directory = made(case, tmp_path)
    (ours,) = whole(load(directory, max_positions=64), prompts[1:])
    torch.testing.assert_close(ours, reference(directory)(torch.tensor(prompts[1:])).logits[0], atol=1e-4, rtol=0)
    (other,) = whole(load(directory), prompts[1:])
    assert not torch.allclose(ours, other, atol=1e-2)
