"""Models whose tokens see each other in both directions: transformers' values, and the same bytes in any batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModel

from tests.engine.helpers import engine
from tests.engine.test_pooling import TEXTS, close, states
from tests.models.make import COMMON, FAMILIES, make_tokenizer, randomise
from tests.models.sentences import embedded, write_modules
from unisono import LLM, SamplingParams
from unisono.types import BadRequest

PROMPTS = {"query": "task: search result | query: ", "document": "title: none | text: "}
LONG = "the quick brown fox jumps over the lazy dog, twice; then it sleeps under a tree and dreams of dogs"
"""Longer than a window."""


def make_encoder(directory: Path, family: str, **changes: Any) -> Path:
    """Write a random model without a head and a tokenizer."""
    config = AutoConfig.for_model(family, **{**COMMON, **FAMILIES[family], **changes})
    model = AutoModel.from_config(config, dtype=torch.float32)
    randomise(model, 0)
    model.save_pretrained(directory)
    make_tokenizer().save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def embedding_gemma(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[torch.nn.Module]]:
    path = make_encoder(
        tmp_path_factory.mktemp("gemma") / "c", "gemma3_text", use_bidirectional_attention=True, sliding_window=16
    )
    dense = [(150, "Identity"), (72, "Identity")]
    return path, write_modules(path, "mean_tokens", 72, dense, prompts=PROMPTS)


def test_embedding_gemma_is_sentence_transformers(embedding_gemma: tuple[Path, list[torch.nn.Module]]) -> None:
    """Mean pooling, two dense layers, length 1; dimensions, prompts, and the bytes of a text in any batch."""
    path, layers = embedding_gemma
    texts = [*TEXTS, LONG]
    with engine(path, dtype="float32") as llm:
        found = llm.embed(texts)
        for text, output in zip(texts, found, strict=True):
            theirs = states(path, output.prompt_token_ids)
            assert close(output.outputs.embedding, embedded(theirs, "mean_tokens", layers))
            assert llm.embed(text)[0].outputs.embedding == output.outputs.embedding, "a batch changed a byte"
        assert [o.outputs for o in llm.embed(list(reversed(texts)))] == [o.outputs for o in reversed(found)]
        ids = found[-1].prompt_token_ids
        (short,) = llm.embed(LONG, dimensions=16)
        assert close(short.outputs.embedding, embedded(states(path, ids), "mean_tokens", layers, 16))
        for name, beginning in PROMPTS.items():
            (named,) = llm.embed(LONG, prompt_name=name)
            assert named.prompt_token_ids == llm.tokenizer.encode(beginning + LONG)
        with pytest.raises(BadRequest, match="'query', 'document'"):
            llm.embed(LONG, prompt_name="poem")
        with pytest.raises(BadRequest, match="give texts"):
            llm.embed([[5, 6]], prompt_name="query")
        with pytest.raises(BadRequest, match="dimensions=73"):
            llm.embed(LONG, dimensions=73)


def test_a_whole_prompt_is_one_pass(embedding_gemma: tuple[Path, list[torch.nn.Module]]) -> None:
    """No chunk, no cached prefix, no text; prompts that do not fit a pass together wait for the next."""
    path, _ = embedding_gemma
    with engine(path, dtype="float32", max_num_batched_tokens=120) as llm:
        texts = [LONG, LONG + "!", LONG]
        found = llm.embed(texts)
        assert found[0].outputs == found[2].outputs
        assert [o.outputs for o in llm.embed(texts)] == [o.outputs for o in found]
        assert llm.engine.counters.cached_tokens == 0
        with pytest.raises(BadRequest, match="fit a pass of 120 tokens"):
            llm.embed(LONG + LONG)
        with pytest.raises(BadRequest, match="writes no text"):
            llm.generate(LONG, SamplingParams(max_tokens=3, return_hidden_states=True))
    with LLM(str(path), dtype="float32", max_num_seqs=2) as llm:
        assert llm.engine.config.max_num_batched_tokens == 512, "the context"
