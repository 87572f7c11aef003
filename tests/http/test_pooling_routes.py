"""Classes, scores and ranks over HTTP. The fake engine's states are known: [token, position, 1, 0, 0, 2]."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests.http.conftest import Server, servers
from tests.http.fake_engine import HIDDEN_SIZE
from tests.http.tokenizers_ import byte_level

TOKENIZER = byte_level()
PATHS = ("/score", "/v1/score", "/rerank", "/v1/rerank", "/v2/rerank")


def head(path: Path, weight: list[list[float]]) -> Path:
    """A directory with a tokenizer and a classifier's head, labels "no" and "yes" at most."""
    TOKENIZER.save_pretrained(path)
    config = {
        "architectures": ["Qwen3ForSequenceClassification"],
        "hidden_size": HIDDEN_SIZE,
        "id2label": {"0": "no", "1": "yes"},
    }
    (path / "config.json").write_text(json.dumps(config))
    save_file({"score.weight": torch.tensor(weight)}, path / "model.safetensors")
    return path


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    path = head(tmp_path_factory.mktemp("c"), [[0.01, 0, 0, 0, 0, 0], [0, 0.1, 0, 0, 0, 0]])
    with servers(tmp_path_factory) as start:
        yield start(path)


@pytest.fixture(scope="module")
def reranker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    path = head(tmp_path_factory.mktemp("r"), [[0.01, 0, 0, 0, 0, 0]])
    with servers(tmp_path_factory) as start:
        yield start(path)


def post(server: Server, path: str, body: dict[str, Any]) -> dict[str, Any]:
    response = server.http.post(path, json=body)
    assert response.status_code == 200, response.text
    found: dict[str, Any] = response.json()
    return found


def sigmoid(value: float) -> float:
    return 1 / (1 + math.exp(-value))


def last(text: str) -> int:
    return int(TOKENIZER.encode(text)[-1])


def test_classes_have_labels_and_probabilities(classifier: Server) -> None:
    found = post(classifier, "/classify", {"input": ["ab", "abcdefghij" * 3]})
    for text, one in zip(("ab", "abcdefghij" * 3), found["data"], strict=True):
        ids = TOKENIZER.encode(text)
        no, yes = 0.01 * ids[-1], 0.1 * (len(ids) - 1)
        assert one["probs"] == pytest.approx([sigmoid(no - yes), sigmoid(yes - no)], abs=1e-6)
        assert one["label"] == ("yes" if yes > no else "no")
        assert one["num_classes"] == 2
    assert found["object"] == "list"
    assert found["usage"]["total_tokens"] == sum(len(TOKENIZER.encode(text)) for text in ("ab", "abcdefghij" * 3))


def test_pooling_output_by_task(classifier: Server) -> None:
    ids = [[5, 9], [7]]
    tokens = post(classifier, "/pooling", {"input": ids, "task": "token_classify", "use_activation": False})
    expected = [[[0.05, 0.0], [0.09, 0.1]], [[0.07, 0.0]]]
    for one, values in zip(tokens["data"], expected, strict=True):
        assert torch.allclose(torch.tensor(one["data"]), torch.tensor(values), atol=1e-6)
    states = post(classifier, "/pooling", {"input": ids, "task": "token_embed", "normalize": False})
    assert states["data"][0]["data"] == [[5, 0, 1, 0, 0, 2], [9, 1, 1, 0, 0, 2]]
    short = post(classifier, "/pooling", {"input": ids, "task": "embed", "normalize": False, "dimensions": 2})
    assert [one["data"] for one in short["data"]] == [[9, 1], [7, 0]]
    assert post(classifier, "/pooling", {"input": [5]})["data"][0]["object"] == "pooling"


def test_pooling_gives_the_ends_of_steps(classifier: Server) -> None:
    body = {"input": [[5, 9, 7, 9], [7]], "task": "token_classify", "use_activation": False}
    found = post(classifier, "/pooling", body | {"step_tag_id": 9, "returned_token_ids": [1]})
    assert [len(one["data"]) for one in found["data"]] == [2, 0]
    assert [value for (value,) in found["data"][0]["data"]] == pytest.approx([0.1, 0.3])
    for wrong in ({"task": "classify", "step_tag_id": 9}, {"returned_token_ids": [2]}, {"returned_token_ids": []}):
        assert classifier.http.post("/pooling", json=body | wrong).status_code == 400


def test_scores_of_pairs(reranker: Server) -> None:
    for path in PATHS[:2]:
        found = post(reranker, path, {"text_1": "query", "text_2": ["one", "two!"]})
        assert [one["score"] for one in found["data"]] == pytest.approx(
            [sigmoid(0.01 * last("one")), sigmoid(0.01 * last("two!"))], abs=1e-6
        )


def test_scores_take_the_other_names_of_texts(reranker: Server) -> None:
    """vLLM's, in answers and in errors."""
    expected = post(reranker, "/score", {"text_1": "query", "text_2": ["one", "two!"]})["data"]
    for first, second in (("data_1", "data_2"), ("queries", "documents"), ("queries", "items")):
        body = {first: "query", second: ["one", "two!"]}
        assert post(reranker, "/score", body)["data"] == expected
        for wrong, param, word in (
            ({**body, second: []}, second, f"{second} is empty"),
            ({**body, first: 3}, first, f"{first}=3 is not valid"),
            ({first: ["a", "b"], second: ["c"]}, first, f"{first} has 2 texts and {second} 1"),
            ({second: ["c"]}, first, f"{first} is missing"),
            ({**body, "text_1": "a"}, first, f"{first} is not a known field"),
            ({**body, "text_2": "c" * 2_000_000}, first, f"{first} is not a known field"),
        ):
            answer = reranker.http.post("/score", json=wrong)
            assert answer.status_code == 400, wrong
            error = answer.json()["error"]
            assert error["param"] == param, error
            assert word in error["message"]


def test_ranks_of_documents(reranker: Server) -> None:
    """Jina's and Cohere's answer: best first, with the documents unless they are not wanted."""
    texts = ["az", "a!", "aM"]
    order = sorted(range(3), key=lambda index: -last(texts[index]))
    for path in PATHS[2:]:
        documents = [texts[0], {"text": texts[1]}, texts[2]]
        found = post(reranker, path, {"query": "q", "documents": documents, "top_n": 2})
        assert [one["index"] for one in found["results"]] == order[:2]
        assert found["results"][0]["document"] == {"text": texts[order[0]]}
        assert found["results"][0]["relevance_score"] >= found["results"][1]["relevance_score"]
    bare = post(reranker, "/rerank", {"query": "q", "documents": texts, "return_documents": False})
    assert [one.keys() for one in bare["results"]] == [{"index", "relevance_score"}] * 3


def test_a_model_without_a_head_scores_by_cosine(server: Server) -> None:
    found = post(server, "/score", {"text_1": ["ab", "abc"], "text_2": ["xy", "abc"]})
    scores = [one["score"] for one in found["data"]]
    assert scores[1] == pytest.approx(1)
    assert 0 < scores[0] < 1


@pytest.mark.parametrize(
    ("path", "body", "word"),
    [
        ("/classify", {"input": "a"}, "no classifier"),
        ("/pooling", {"input": "a", "task": "token_classify"}, "no classifier"),
        ("/pooling", {"input": "a", "task": "other"}, "task"),
        ("/pooling", {"input": "a", "dimensions": HIDDEN_SIZE + 1}, "dimensions"),
        ("/pooling", {"input": "a", "prompt_name": "query"}, "prompt_name"),
        ("/v1/embeddings", {"input": "a", "prompt_name": "query"}, "prompt_name"),
        ("/score", {"text_1": ["a", "b"], "text_2": ["c"]}, "text_1"),
        ("/score", {"text_1": "a", "text_2": []}, "text_2"),
        ("/rerank", {"query": "a", "documents": []}, "documents"),
        ("/rerank", {"query": "a", "documents": ["b"], "top_n": -1}, "top_n"),
        ("/rerank", {"query": "a", "documents": ["b"], "rank_fields": []}, "rank_fields"),
    ],
)
def test_invalid_pooling_requests_return_400(server: Server, path: str, body: dict[str, Any], word: str) -> None:
    answer = server.http.post(path, json=body)
    assert answer.status_code == 400, answer.text
    assert word in answer.json()["error"]["message"]


def test_weights_of_a_classifier_are_not_replaced(classifier: Server, tmp_path: Path) -> None:
    answer = classifier.http.post("/update_weights_from_disk", json={"model_path": str(tmp_path)})
    assert answer.status_code == 400
    assert "head was read at the start" in answer.json()["error"]["message"]


def test_several_labels_give_no_score(classifier: Server) -> None:
    answer = classifier.http.post("/score", json={"text_1": "a", "text_2": "b"})
    assert answer.status_code == 400
    assert "2 labels" in answer.json()["error"]["message"]


def test_texts_beyond_the_context_are_refused_before_they_are_tokenized(reranker: Server) -> None:
    for path, body, field in (
        ("/score", {"text_1": "a", "text_2": ["b", "c" * 2_000_000]}, "text_2"),
        ("/rerank", {"query": "q" * 2_000_000, "documents": ["b"]}, "query"),
    ):
        answer = reranker.http.post(path, json=body)
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == field
    body = {"query": "q", "documents": ["b" * 600], "truncate_prompt_tokens": 8}
    assert reranker.http.post("/rerank", json=body).json()["usage"]["total_tokens"] == 8
