"""Models whose tokens see each other in both directions: transformers' values, and the same bytes in any batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers.processors import TemplateProcessing
from transformers import AutoConfig, AutoModel, AutoModelForSequenceClassification

from tests.engine.helpers import engine
from tests.models.fields import COMMON, FAMILIES
from tests.models.make import make_tokenizer, randomise
from tests.models.sentences import TEXTS, close, embedded, states, write_modules
from unisono import LLM, SamplingParams
from unisono.types import BadRequest

PROMPTS = {"query": "task: search result | query: ", "document": "title: none | text: "}
LONG = "the quick brown fox jumps over the lazy dog, twice; then it sleeps under a tree and dreams of dogs"
"""Longer than a window."""


SIZES: dict[str, Any] = {
    "vocab_size": 263, "hidden_size": 72, "num_hidden_layers": 3, "num_attention_heads": 6, "intermediate_size": 100,
    "max_position_embeddings": 130, "pad_token_id": 1,
}  # fmt: skip
ENCODERS: dict[str, dict[str, Any]] = {
    "bert": {**SIZES, "layer_norm_eps": 1e-3},
    "xlm-roberta": {**SIZES, "layer_norm_eps": 1e-3, "type_vocab_size": 1},
    "modernbert": {
        **SIZES, "num_hidden_layers": 4, "local_attention": 16, "norm_bias": True, "mlp_bias": True, "norm_eps": 1e-3,
        "bos_token_id": 257, "eos_token_id": 258, "cls_token_id": 257, "sep_token_id": 258,
    },
}  # fmt: skip


def make_encoder(directory: Path, family: str, labels: int = 0, **changes: Any) -> Path:
    """Write a random model and a tokenizer. labels: of its classifier; 0: without a head."""
    fields = ENCODERS[family] if family in ENCODERS else {**COMMON, **FAMILIES[family]}
    config = AutoConfig.for_model(family, **fields, **changes, **({"num_labels": labels} if labels else {}))
    made = AutoModelForSequenceClassification if labels else AutoModel
    model = made.from_config(config, dtype=torch.float32)
    randomise(model, 0)
    model.save_pretrained(directory)
    tokenizer = make_tokenizer()
    if family in ENCODERS:
        tokenizer.add_special_tokens({"additional_special_tokens": ["[CLS]", "[SEP]"]})
        tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
            single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 261), ("[SEP]", 262)]
        )
    tokenizer.save_pretrained(directory)
    return directory


@torch.no_grad()
def logits(path: Path, tokenizer: Any, *texts: str) -> torch.Tensor:
    """transformers' logits of a text, or of two as one, with the tokenizer's token types."""
    model = AutoModelForSequenceClassification.from_pretrained(path, dtype=torch.float32)
    inputs = tokenizer(*texts, return_tensors="pt", return_token_type_ids=model.config.model_type == "bert")
    return model(**inputs).logits[0]


def counted(llm: LLM) -> int:
    """Prompt passes of an engine, each of which replayed a graph or has a reason."""
    found = {key: count for key, count in llm.engine.runner.planner.passes.items() if key[0] in ("extend", "score")}
    assert all((kind == "eager") == bool(reason) for _, kind, reason in found)
    return sum(found.values())


@pytest.fixture(scope="module")
def embedding_gemma(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[torch.nn.Module]]:
    path = make_encoder(tmp_path_factory.mktemp("gemma") / "c", "gemma3_text", use_bidirectional_attention=True)
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
        again = llm.generate(texts, SamplingParams(max_tokens=1, return_hidden_states=True))
        assert [output.num_cached_tokens for output in again] == [0, 0, 0]
        assert torch.equal(again[0].prompt_hidden_states, again[2].prompt_hidden_states)
        with pytest.raises(BadRequest, match="fit a pass of 120 tokens"):
            llm.embed(LONG + LONG)
        with pytest.raises(BadRequest, match="writes no text"):
            llm.generate(LONG, SamplingParams(max_tokens=3, return_hidden_states=True))
    with LLM(str(path), dtype="float32", max_num_seqs=2) as llm:
        assert llm.engine.config.max_num_batched_tokens == 512, "the context"


@pytest.mark.parametrize(
    ("family", "mode"), [("bert", "cls_token"), ("xlm-roberta", "cls_token"), ("modernbert", "mean_tokens")]
)
def test_an_encoder_embeds_as_transformers_does(family: str, mode: str, tmp_path: Path) -> None:
    """Prompts that share passes have the bytes of prompts alone; each pass replays a graph captured at the start."""
    path = make_encoder(tmp_path / "c", family)
    layers = write_modules(path, mode, 72, [(40, "Tanh"), (50, "Identity")], bias=True)
    texts = [*TEXTS, LONG]
    with engine(path, dtype="float32", max_model_len=128) as llm:
        found = llm.embed(texts)
        assert 1 <= counted(llm) <= len(texts)
        for number, (text, output) in enumerate(zip(texts, found, strict=True), 2):
            theirs = states(path, output.prompt_token_ids)
            assert close(output.outputs.embedding, embedded(theirs, mode, layers))
            before = counted(llm)
            assert llm.embed(text)[0].outputs.embedding == output.outputs.embedding, "a batch changed a byte"
            assert counted(llm) == before + 1, number
        kinds = {kind for (program, kind, _) in llm.engine.runner.planner.passes if program == "extend"}
        assert kinds == {"tape"}, "every pass replays"
        with pytest.raises(BadRequest, match="writes no text"):
            llm.generate("Tom", SamplingParams(max_tokens=3))
        with pytest.raises(BadRequest, match="read at the start"):
            llm.update_weights(str(path))
    with engine(path, dtype="float32", max_model_len=128) as llm:  # which reads the stored config
        assert llm.embed(LONG)[0].outputs == found[-1].outputs


@pytest.mark.parametrize("family", ENCODERS)
def test_an_encoder_classifies_and_scores_pairs(family: str, tmp_path: Path) -> None:
    """The head of several layers, and the token types of the second text of a pair."""
    path = make_encoder(tmp_path / "c", family, labels=3)
    with engine(path, dtype="float32", max_model_len=128) as llm:
        for text, output in zip(TEXTS, llm.classify(TEXTS), strict=True):
            assert close(output.outputs.probs, logits(path, llm.tokenizer.backend, text).softmax(-1))
    path = make_encoder(tmp_path / "r", family, labels=1)
    with engine(path, dtype="float32", max_model_len=128) as llm:
        scores = llm.score(TEXTS[2], TEXTS)
        for text, output in zip(TEXTS, scores, strict=True):
            expected = float(logits(path, llm.tokenizer.backend, TEXTS[2], text).sigmoid()[0])
            assert output.outputs.score == pytest.approx(expected, abs=1e-5)
            assert llm.score(TEXTS[2], text)[0].outputs.score == output.outputs.score, "a batch changed a byte"
        assert len({output.outputs.score for output in scores}) > 1
