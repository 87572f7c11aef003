"""Llama 4: the text model of a checkpoint with a tower, texts beyond one chunk, and values that are not computed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.helpers import engine, tokens
from tests.engine.tile_pictures import make_llama4
from tests.models.harness import chunked as in_chunks
from tests.models.harness import load, rounds, whole
from tests.models.hybrids import greedy_tokens, reference
from tests.models.make import make_checkpoint
from unisono.models.load.checkpoint import Checkpoint
from unisono.types import CheckpointError, SamplingParams, SpeculativeConfig

GREEDY = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True)
PROMPTS = [[7, 50, 91, 7, 50, 91, 7, 50] * 9, [3, 141, 59, 26]]


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A whole Llama 4, as the hub's are."""
    return make_llama4(tmp_path_factory.mktemp("llama4"))


@torch.no_grad()
def test_the_text_of_a_seeing_checkpoint_is_transformers(seeing: Path) -> None:
    assert not Checkpoint.open(seeing).unread(), "the tower is read"
    (ours,) = whole(load(seeing), PROMPTS[:1])
    theirs = reference(seeing).language_model(torch.tensor(PROMPTS[:1])).logits[0]
    assert theirs.std() > 0.5
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0)


def test_drafts_change_no_byte(seeing: Path) -> None:
    with engine(seeing, dtype="float32", max_model_len=128) as llm:
        plain = tokens(llm, PROMPTS, GREEDY)
    with engine(seeing, dtype="float32", max_model_len=128, speculative=SpeculativeConfig("ngram")) as llm:
        assert tokens(llm, PROMPTS, GREEDY) == plain


@pytest.fixture(scope="module")
def chunked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama 4 whose chunks are 24 positions: no multiple of a page."""
    return make_checkpoint(tmp_path_factory.mktemp("chunked"), "llama4_text", tokenizer=False, attention_chunk_size=24)


def test_context_is_that_of_the_config(seeing: Path) -> None:
    assert Checkpoint.open(seeing).config.max_positions == 512


@torch.no_grad()
def test_logits_of_several_chunks_are_transformers(chunked: Path) -> None:
    decoder = load(chunked)
    assert sum(layer.mixer.spec.window == -24 for layer in decoder.layers) == 3
    (ours,) = whole(decoder, PROMPTS[:1])
    torch.testing.assert_close(ours, reference(chunked)(torch.tensor(PROMPTS[:1])).logits[0], atol=1e-4, rtol=0)
    exact = decoder.reference(torch.tensor(PROMPTS[0]))
    torch.testing.assert_close(ours.double(), exact, atol=1e-4, rtol=0)
    for other in (in_chunks(decoder, PROMPTS[:1], 7), rounds(decoder, PROMPTS[:1], 4)):
        assert torch.equal(other[0], ours)


def test_tokens_across_chunks_are_transformers_in_every_pass(chunked: Path) -> None:
    """Chunks end at 24, 48, 72 and 96: within the prompt, and in rounds of up to four tokens. Prompts of 72 tokens are
    computed whole, 16 tokens at a time, and from a cached prefix."""
    flags: dict[str, Any] = {"dtype": "float32", "max_model_len": 128}
    with engine(chunked, **flags) as llm:
        plain = tokens(llm, PROMPTS, GREEDY)
        assert tokens(llm, PROMPTS, GREEDY) == plain, "a prefix hit changed a token"
        assert llm.engine.scheduler.prefix_hits > 0
    for prompt, answer in zip(PROMPTS, plain, strict=True):
        assert answer == greedy_tokens(chunked, prompt)
    drafts = SpeculativeConfig("ngram", num_speculative_tokens=3)
    for extra in ({}, {"max_num_batched_tokens": 16}):
        with engine(chunked, **flags, **extra, speculative=drafts) as llm:
            assert tokens(llm, PROMPTS, GREEDY) == plain, extra
    with engine(chunked, **flags, attention_backend="torch") as llm:
        assert tokens(llm, PROMPTS, GREEDY) == plain


def test_values_that_are_not_computed(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path / "c", "llama4_text", tokenizer=False)
    raw = json.loads((path / "config.json").read_text())
    for name, value, message in (
        ("num_experts_per_tok", 2, "one expert a token is computed where its input is multiplied"),
        ("layer_types", ["sliding_attention"] * 4, "full_attention and chunked_attention"),
    ):
        (path / "config.json").write_text(json.dumps({**raw, name: value}))
        with pytest.raises(CheckpointError, match=message):
            Checkpoint.open(path)
