"""Embeddings, classes and scores: those of transformers, and the same bytes in any batch."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification

from tests.engine.helpers import engine
from tests.models.make import make_checkpoint
from tests.models.make_classifier import make_classifier
from tests.models.sentences import TEXTS, close, embedded, states, write_modules
from unisono import LLM, PoolingParams, SamplingParams
from unisono.frontend.pooling import pooling_of
from unisono.types import BadRequest, CheckpointError, ConfigError

SCORE_TEMPLATE = (
    "<q>{{ (messages | selectattr('role', 'eq', \"query\") | first).content }}</q>"
    "<d>{{ (messages | selectattr('role', 'eq', \"document\") | first).content }}</d>"
)


@torch.no_grad()
def classes(path: Path, ids: list[int]) -> torch.Tensor:
    model = AutoModelForSequenceClassification.from_pretrained(path, dtype=torch.float32)
    return model(torch.tensor([ids])).logits[0]


@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral", "qwen2", "gemma2"])
def test_classes_are_those_of_transformers_in_any_batch(family: str, tmp_path: Path) -> None:
    path = make_classifier(tmp_path / family, family, 3, id2label={0: "bad", 1: "fair", 2: "good"})
    with engine(path, dtype="float32") as llm:
        whole = llm.classify(TEXTS)
        for text, output in zip(TEXTS, whole, strict=True):
            ids = output.prompt_token_ids
            assert close(output.outputs.probs, classes(path, ids).softmax(-1))
            (alone,) = llm.classify(text)
            assert alone.outputs.probs == output.outputs.probs, "a batch changed a byte"
        logits = llm.encode(TEXTS[0], PoolingParams(use_activation=False)).pop().outputs.data
        assert close(logits, classes(path, whole[0].prompt_token_ids))
        (each,) = llm.encode(TEXTS[0], pooling_task="token_classify")
        assert each.outputs.data.shape == (len(each.prompt_token_ids), 3)
        assert each.outputs.data[-1].tolist() == whole[0].outputs.probs
        with pytest.raises(BadRequest, match="writes no text"):
            llm.generate("Tom", SamplingParams(max_tokens=3))
        with pytest.raises(BadRequest, match="head was read at the start"):
            llm.update_weights(str(path))
        with pytest.raises(BadRequest, match="3 labels"):
            llm.score("a", "b")


def test_a_reranker_scores_pairs(tmp_path: Path) -> None:
    """One label: a sigmoid of the head over both texts, written by the tokenizer or by a score template."""
    path = make_classifier(tmp_path / "c", "qwen3", 1)
    with engine(path, dtype="float32") as llm:
        scores = llm.score("Where is Paris?", TEXTS)
        for text, output in zip(TEXTS, scores, strict=True):
            ids = llm.tokenizer.encode("Where is Paris?") + llm.tokenizer.encode(text)
            assert output.prompt_token_ids == ids
            assert output.outputs.score == pytest.approx(float(classes(path, ids).sigmoid()[0]), abs=1e-5)
        (written,) = llm.score("q", "d", chat_template=SCORE_TEMPLATE)
        assert llm.tokenizer.decode(written.prompt_token_ids) == "<q>q</q><d>d</d>"
        with pytest.raises(BadRequest, match="data_1"):
            llm.score(["a", "b"], ["c"])
    with engine(path, dtype="float32", chat_template=SCORE_TEMPLATE) as llm:
        assert llm.score("q", "d").pop().prompt_token_ids == written.prompt_token_ids


@pytest.mark.parametrize("tied", [True, False])
def test_a_generative_reranker_scores_by_two_tokens(tied: bool, tmp_path: Path) -> None:
    """Qwen3-Reranker's own form: the softmax over the logits of no and yes."""
    path = make_checkpoint(tmp_path / "c", "qwen3", tie_word_embeddings=tied)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    overrides = {"architectures": ["Qwen3ForSequenceClassification"], "classifier_from_token": ["n", "y"]}
    for given in (overrides, {"classifier_from_token": ["n", "y"]}):
        with engine(path, dtype="float32", hf_overrides=given) as llm:
            (output,) = llm.score("Where?", "Here.")
            with torch.no_grad():
                logits = model(torch.tensor([output.prompt_token_ids])).logits[0, -1]
            no, yes = (llm.tokenizer.token_id(token) for token in ("n", "y"))
            expected = float(logits[[no, yes]].softmax(0)[1])
            assert output.outputs.score == pytest.approx(expected, abs=1e-5)
    with pytest.raises(CheckpointError, match="'nothing' is not one token"):
        LLM(str(path), max_model_len=64, hf_overrides={"classifier_from_token": ["nothing", "y"]})


@pytest.mark.parametrize("mode", ["lasttoken", "mean_tokens"])
def test_embeddings_are_those_of_transformers(mode: str, tmp_path: Path) -> None:
    """Pooled as configured; dimensions keep the first values, scaled again; scores are cosines."""
    path = make_checkpoint(tmp_path / "c", "qwen3")
    (path / "1_Pooling").mkdir()
    (path / "1_Pooling" / "config.json").write_text(json.dumps({f"pooling_mode_{mode}": True}))
    with engine(path, dtype="float32") as llm:
        found = llm.embed(TEXTS)
        for text, output in zip(TEXTS, found, strict=True):
            theirs = states(path, output.prompt_token_ids)
            vector = theirs[-1] if mode == "lasttoken" else theirs.mean(0)
            assert close(output.outputs.embedding, vector / vector.norm())
            assert llm.embed(text)[0].outputs.embedding == output.outputs.embedding, "a batch changed a byte"
        (short,) = llm.embed(TEXTS[0], dimensions=5)
        first = np.array(found[0].outputs.embedding[:5])
        assert close(short.outputs.embedding, first / np.linalg.norm(first))
        assert llm.encode(TEXTS[0], PoolingParams(dimensions=5)).pop().outputs.data.tolist() == pytest.approx(
            short.outputs.embedding
        )
        score = llm.score(TEXTS[0], TEXTS[2]).pop().outputs.score
        assert score == pytest.approx(float(np.dot(found[0].outputs.embedding, found[2].outputs.embedding)), abs=1e-6)
        with pytest.raises(BadRequest, match="no classifier"):
            llm.classify("a")
        (cut,) = llm.embed(TEXTS[2], pooling_params=PoolingParams(truncate_prompt_tokens=4))
        assert cut.prompt_token_ids == found[2].prompt_token_ids[-4:]


SWITCHES = ("cls_token", "mean_tokens", "max_tokens", "mean_sqrt_len_tokens", "weightedmean_tokens", "lasttoken")
"""As sentence-transformers writes them."""


def by_formula(states: torch.Tensor, mode: str) -> torch.Tensor:
    """sentence-transformers' pooling of a text's states [tokens, hidden]."""
    count, weights = len(states), torch.arange(1.0, len(states) + 1)[:, None]
    return {
        "cls_token": states[0],
        "max_tokens": states.max(0)[0],
        "mean_tokens": states.mean(0),
        "mean_sqrt_len_tokens": states.sum(0) / count**0.5,
        "weightedmean_tokens": (states * weights).sum(0) / weights.sum(),
        "lasttoken": states[-1],
    }[mode]


def test_files_of_sentence_transformers(tmp_path: Path) -> None:
    """``modules.json``, each mode of ``1_Pooling`` alone and joined, and ``sentence_bert_config.json``."""
    path = make_checkpoint(tmp_path / "c", "qwen3")
    write_modules(path, "mean_tokens", 84)
    pooling = path / "1_Pooling" / "config.json"
    (path / "sentence_bert_config.json").write_text('{"max_seq_length": 40, "do_lower_case": true}')
    with engine(path, dtype="float32", max_model_len=None) as llm:
        assert llm.engine.config.max_model_len == 40
        (output,) = llm.embed("Tom has 3 BOXES")
        ids = output.prompt_token_ids
        assert ids == llm.tokenizer.encode("tom has 3 boxes") != llm.tokenizer.encode("Tom has 3 BOXES")
        with pytest.raises(BadRequest, match="context of 40"):
            llm.embed("word " * 20)
        (cut,) = llm.embed("word " * 20, pooling_params=PoolingParams(truncate_prompt_tokens=-1))
        assert len(cut.prompt_token_ids) == 39
        found = states(path, ids)
        for modes in (*((mode,) for mode in SWITCHES), ("mean_tokens", "cls_token"), ("lasttoken", "max_tokens")):
            switches = {f"pooling_mode_{mode}": mode in modes for mode in (*modes, *SWITCHES)}
            pooling.write_text(json.dumps({"word_embedding_dimension": 84, **switches, "include_prompt": True}))
            ordered = sorted(modes, key=["cls_token", "max_tokens", "mean_tokens", "lasttoken", *SWITCHES].index)
            theirs = torch.cat([by_formula(found, mode) for mode in ordered])
            pooling_here = pooling_of(path)
            assert close(pooling_here.pool(found.numpy(), None, True), theirs / theirs.norm()), modes
            assert close(pooling_here.pool(found.numpy(), None, False), theirs), modes
    pooling_of(path).check_dimensions(168, 84)
    with pytest.raises(ConfigError, match="max_seq_length"), engine(path, dtype="float32", max_model_len=64):
        pass
    (path / "sentence_bert_config.json").write_text('{"max_seq_length": "long"}')
    with pytest.raises(CheckpointError, match="max_seq_length='long'"), engine(path, dtype="float32"):
        pass


def test_a_model_without_a_head_embeds(tmp_path: Path) -> None:
    """``MistralModel`` and its like (E5-Mistral): no prefix, no LM head."""
    path = make_checkpoint(tmp_path / "c", "mistral")
    base = AutoModel.from_pretrained(path, dtype=torch.float32)
    base.save_pretrained(tmp_path / "b")
    with engine(path, dtype="float32") as llm, engine(tmp_path / "b", dtype="float32") as bare:
        ids = [[5, 9, 77], [1, 2]]
        assert [o.outputs for o in bare.embed(ids)] == [o.outputs for o in llm.embed(ids)]
        with pytest.raises(BadRequest, match="writes no text"):
            bare.generate([[5]], SamplingParams(max_tokens=3))


@torch.no_grad()
@pytest.mark.parametrize("labels", [1, 2])
def test_a_reward_model_has_a_head_of_two_layers(labels: int, tmp_path: Path) -> None:
    """``Qwen2ForRewardModel``, and the step rewards of ``Qwen2ForProcessRewardModel``."""
    path = make_checkpoint(tmp_path / "c", "qwen2")
    base, size = AutoModel.from_pretrained(path, dtype=torch.float32), 80
    head = torch.nn.Sequential(torch.nn.Linear(size, size), torch.nn.ReLU(), torch.nn.Linear(size, labels))
    for parameter in head.parameters():
        parameter.normal_(0, size**-0.5, generator=torch.Generator().manual_seed(parameter.numel()))
    tensors = {f"model.{name}": tensor for name, tensor in base.state_dict().items()}
    save_file(tensors | {f"score.{name}": each for name, each in head.state_dict().items()}, path / "model.safetensors")
    kind = "Qwen2ForRewardModel" if labels == 1 else "Qwen2ForProcessRewardModel"
    config = json.loads((path / "config.json").read_text()) | {"architectures": [kind], "num_labels": labels}
    (path / "config.json").write_text(json.dumps(config))
    ids, tag = [5, 9, 77, 30, 9, 8], 9
    each = head(base(torch.tensor([ids])).last_hidden_state[0])
    with engine(path, dtype="float32") as llm:
        (whole,) = llm.reward([ids])
        assert close(whole.outputs.data, each[-1])
        params = PoolingParams(step_tag_id=tag)
        (steps,) = llm.encode([ids], params, pooling_task="token_classify")
        expected = each[[1, 4]] if labels == 1 else each[[1, 4]].softmax(-1)
        torch.testing.assert_close(steps.outputs.data, expected, atol=1e-5, rtol=0)
        (none,) = llm.encode([ids], PoolingParams(step_tag_id=200), pooling_task="token_classify")
        assert none.outputs.data.shape == (0, labels)
        if labels == 2:
            chosen = PoolingParams(step_tag_id=tag, returned_token_ids=[1], use_activation=False)
            (second,) = llm.encode([ids], chosen, pooling_task="token_classify")
            torch.testing.assert_close(second.outputs.data, each[[1, 4]][:, 1:], atol=1e-5, rtol=0)
        with pytest.raises(BadRequest, match="labels 0 to"):
            llm.encode([ids], PoolingParams(returned_token_ids=[7]), pooling_task="token_classify")
        with pytest.raises(BadRequest, match="go with task token_classify"):
            llm.encode([ids], params, pooling_task="classify")


def test_prompts_and_sizes_of_a_card(tmp_path: Path) -> None:
    """The default prompt of a card goes before texts; ``matryoshka_dimensions`` are the only sizes."""
    path = make_checkpoint(tmp_path / "c", "qwen3")
    layers = write_modules(path, "lasttoken", 84, prompts={"query": "Instruct: ", "document": ""}, default="query")
    config = json.loads((path / "config.json").read_text()) | {"matryoshka_dimensions": [8, 16]}
    (path / "config.json").write_text(json.dumps(config))
    with engine(path, dtype="float32") as llm:
        (output,) = llm.embed("Tom")
        assert output.prompt_token_ids == llm.tokenizer.encode("Instruct: Tom")
        assert close(output.outputs.embedding, embedded(states(path, output.prompt_token_ids), "lasttoken", layers))
        assert llm.embed({"prompt": "Tom"})[0].outputs == output.outputs
        assert llm.embed("Tom", prompt_name="document")[0].prompt_token_ids == llm.tokenizer.encode("Tom")
        assert len(llm.embed([[5, 6]], dimensions=8)[0].outputs.embedding) == 8
        with pytest.raises(BadRequest, match="trained for 8, 16"):
            llm.embed("Tom", dimensions=9)
