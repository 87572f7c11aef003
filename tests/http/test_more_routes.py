"""Tokens, SGLang's /generate and embeddings over HTTP; the fake engine repeats the prompt, so all is known."""

from __future__ import annotations

import base64
import json
import math
import struct
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.http.conftest import Server, Start, servers
from tests.http.fake_engine import HIDDEN_SIZE
from tests.http.tokenizers_ import byte_level

HELLO = "Hello wörld 🙂"
TOKENIZER = byte_level()
IDS = TOKENIZER.encode(HELLO)


def refused(server: Server, path: str, body: dict[str, Any]) -> dict[str, Any]:
    response = server.http.post(path, json=body)
    assert response.status_code == 400, response.text
    return response.json()["error"]


# ---- tokens -------------------------------------------------------------------------------------


def test_tokenize_and_back(server: Server) -> None:
    found = server.http.post("/tokenize", json={"prompt": HELLO, "return_token_strs": True}).json()
    assert (found["tokens"], found["count"], found["max_model_len"]) == (IDS, len(IDS), 512)
    assert found["token_strs"] == TOKENIZER.convert_ids_to_tokens(IDS)
    assert server.http.post("/detokenize", json={"tokens": IDS}).json() == {"prompt": HELLO, "text": HELLO}
    special = {"tokens": [*IDS, 2]}
    assert server.http.post("/detokenize", json=special).json()["text"] == HELLO + "<|im_end|>"
    assert server.http.post("/detokenize", json={**special, "skip_special_tokens": True}).json()["text"] == HELLO


def test_tokenize_messages_as_chat_does(server: Server) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], "chat_template_kwargs": {"opening": "So"}}
    found = server.http.post("/tokenize", json=body).json()
    text = server.http.post("/detokenize", json={"tokens": found["tokens"]}).json()["prompt"]
    assert text == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nSo"
    assert found["token_strs"] is None
    usage = server.http.post("/v1/chat/completions", json=body).json()["usage"]
    assert usage["prompt_tokens"] == found["count"]


def test_token_errors(server: Server) -> None:
    assert refused(server, "/tokenize", {})["param"] == "prompt"
    assert refused(server, "/tokenize", {"prompt": "a", "nope": 1})["param"] == "nope"
    assert "at most 262144" in refused(server, "/tokenize", {"prompt": "a" * (2**18 + 1)})["message"]
    assert (
        refused(server, "/tokenize", {"messages": [{"role": "robot", "content": "a"}]})["param"] == "messages[0].role"
    )
    assert "0 to 999" in refused(server, "/detokenize", {"tokens": [5, 1000]})["message"]
    assert "at most 262144" in refused(server, "/detokenize", {"tokens": [5] * (2**18 + 1)})["message"]
    assert refused(server, "/detokenize", {"tokens": "a"})["param"] == "tokens"


def test_tokenizer_info(server: Server, start: Start) -> None:
    info = server.http.get("/tokenizer_info").json()
    assert info["eos_token"] == "<|im_end|>"
    assert "<|im_start|>" in info["chat_template"]
    assert info["tokenizer_class"]
    without = start()
    assert without.http.get("/tokenizer_info").status_code == 400
    assert without.http.post("/tokenize", json={"prompt": "a"}).status_code == 400


# ---- SGLang -------------------------------------------------------------------------------------


def generate(server: Server, **body: Any) -> Any:
    response = server.http.post("/generate", json=body)
    assert response.status_code == 200, response.text
    return response.json()


def test_generate(server: Server) -> None:
    params = {"max_new_tokens": 2 * len(IDS), "temperature": 0, "sampling_seed": 7}
    answer = generate(server, text=HELLO, sampling_params=params, rid="mine")
    assert answer["text"] == HELLO * 2
    assert answer["output_ids"] == IDS * 2
    meta = answer["meta_info"]
    assert (meta["id"], meta["prompt_tokens"], meta["completion_tokens"]) == ("mine", len(IDS), 2 * len(IDS))
    assert meta["finish_reason"] == {"type": "length", "length": 2 * len(IDS)}
    assert meta["seed"] == 7
    assert meta["e2e_latency"] > 0
    assert generate(server, input_ids=IDS, sampling_params=params)["text"] == HELLO * 2
    assert generate(server, text="ab")["meta_info"]["completion_tokens"] == 128
    stopped = generate(server, text=HELLO, sampling_params={"stop": ["d 🙂"]})
    assert (stopped["text"], stopped["meta_info"]["finish_reason"]) == (
        "Hello wörl",
        {"type": "stop", "matched": "d 🙂"},
    )
    by_id = generate(server, text=HELLO, sampling_params={"stop_token_ids": [IDS[2]]})
    assert by_id["meta_info"]["finish_reason"] == {"type": "stop", "matched": IDS[2]}


def test_generate_for_several_prompts(server: Server) -> None:
    answers = generate(server, text=["ab", "cd"], sampling_params={"max_new_tokens": 4, "n": 2})
    assert [answer["text"][:2] for answer in answers] == ["ab", "ab", "cd", "cd"]
    assert len({answer["meta_info"]["id"] for answer in answers}) == 4


def test_generate_streams_the_text_so_far(server: Server) -> None:
    body = {"text": HELLO, "stream": True, "sampling_params": {"max_new_tokens": len(IDS)}}
    *frames, done, end = server.http.post("/generate", json=body).text.split("\n\n")
    assert (done, end) == ("data: [DONE]", "")
    answers = [json.loads(frame[6:]) for frame in frames]
    assert all(later["text"].startswith(before["text"]) for before, later in pairwise(answers))
    assert answers[-1]["text"] == HELLO
    counts = [answer["meta_info"]["completion_tokens"] for answer in answers]
    assert counts[0] > 0
    assert counts == sorted(counts)
    assert [answer["meta_info"]["finish_reason"] is None for answer in answers] == [*[True] * (len(answers) - 1), False]


def test_generate_logprobs(server: Server) -> None:
    body = {"text": "ab", "sampling_params": {"max_new_tokens": 2}, "return_logprob": True, "top_logprobs_num": 2}
    ids = TOKENIZER.encode("ab")
    meta = generate(server, **body, logprob_start_len=0, return_text_in_logprobs=True)["meta_info"]
    assert meta["output_token_logprobs"] == [[-0.25, ids[0], "a"], [-0.25, ids[1], "b"]]
    assert [[pair[:2] for pair in tops] for tops in meta["output_top_logprobs"]] == [
        [[-0.25, one], [-0.75, one + 1]] for one in ids
    ]
    assert meta["input_token_logprobs"] == [[None, None, None], [-0.25, ids[1], "b"]]
    assert "input_token_logprobs" not in generate(server, **body)["meta_info"]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "text"),
        ({"text": "a", "input_ids": [5]}, "text"),
        ({"text": 3}, "text"),
        ({"text": "a", "sampling_params": {"max_new_tokens": 0.5}}, "sampling_params.max_new_tokens"),
        ({"text": "a", "sampling_params": {"temperature": -1}}, "sampling_params.temperature"),
        ({"text": "a", "sampling_params": {"regex": ""}}, "sampling_params.regex"),
        ({"text": "a", "sampling_params": {"nope": 1}}, "sampling_params.nope"),
        ({"text": "", "sampling_params": {}}, "text"),
        ({"text": "a", "lora_path": ["x", None]}, "lora_path"),
        ({"text": "a", "top_logprobs_num": 2}, "top_logprobs_num"),
    ],
)
def test_generate_errors_name_its_fields(server: Server, body: dict[str, Any], param: str) -> None:
    assert refused(server, "/generate", body)["param"] == param


# ---- embeddings ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def embedding(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    path = tmp_path_factory.mktemp("embedding")
    TOKENIZER.save_pretrained(path)
    (path / "1_Pooling").mkdir()
    (path / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode_mean_tokens": True, "x": 3}))
    with servers(tmp_path_factory) as start:
        yield start(path)


@pytest.fixture(scope="module")
def generative(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with servers(tmp_path_factory) as start:
        yield start(model_dir)


def state(token: int, place: float) -> list[float]:
    """What the fake engine says of a token at a position."""
    return [token, place, 1, 0, 0, 2]


def unit(vector: list[float]) -> list[float]:
    length = math.sqrt(sum(one * one for one in vector))
    return [one / length for one in vector]


def test_the_mean_of_all_tokens(embedding: Server) -> None:
    found = embedding.openai.embeddings.create(model="fake", input=[HELLO, "a"])  # asks for base64
    assert [one.index for one in found.data] == [0, 1]
    mean = state(sum(IDS) / len(IDS), (len(IDS) - 1) / 2)  # type: ignore[arg-type]
    assert found.data[0].embedding == pytest.approx(unit(mean), abs=1e-5)
    assert found.usage.prompt_tokens == found.usage.total_tokens == len(IDS) + 1
    whole = embedding.http.post("/v1/embeddings", json={"input": HELLO}).json()
    assert whole["data"][0]["embedding"] == pytest.approx(unit(mean), abs=1e-5)
    assert "note" not in whole


def test_embeddings_of_a_generative_model_carry_a_note(generative: Server) -> None:
    """The last token's state, and a note that nobody trained it for this."""
    found = generative.http.post("/v1/embeddings", json={"input": [IDS], "normalize": False}).json()
    assert found["data"][0]["embedding"] == state(IDS[-1], len(IDS) - 1)
    assert "generative" in found["note"]
    assert "Qwen3-Embedding" in found["note"]


def test_dimensions_and_formats(generative: Server) -> None:
    body = {"input": HELLO, "dimensions": 2, "encoding_format": "base64"}
    packed = generative.http.post("/v1/embeddings", json=body).json()["data"][0]["embedding"]
    numbers = struct.unpack("<2f", base64.b64decode(packed))
    assert numbers == pytest.approx(unit(state(IDS[-1], len(IDS) - 1)[:2]))
    for dimensions in (0, HIDDEN_SIZE + 1):
        assert refused(generative, "/v1/embeddings", {"input": "a", "dimensions": dimensions})["param"] == "dimensions"


def test_embeddings_need_no_flag_and_hidden_states_do(generative: Server) -> None:
    assert generative.http.post("/v1/embeddings", json={"input": "a"}).status_code == 200
    body = {"prompt": "a", "max_tokens": 1, "return_hidden_states": True}
    assert refused(generative, "/v1/completions", body)["param"] == "return_hidden_states"


def test_a_prompt_that_fills_the_context(generative: Server) -> None:
    """512 tokens: embeddings and scores take them all, a completion needs room for one more."""
    full, long = [7] * 512, [7] * 513
    found = generative.http.post("/v1/embeddings", json={"input": [full, [7]], "normalize": False}).json()
    assert [one["embedding"] for one in found["data"]] == [state(7, 511), state(7, 0)]
    for kept in (512, -1):
        body = {"input": [[9, *full]], "truncate_prompt_tokens": kept, "normalize": False}
        assert generative.http.post("/v1/embeddings", json=body).json()["data"][0]["embedding"] == state(7, 511)
    assert refused(generative, "/v1/embeddings", {"input": full, "truncate_prompt_tokens": 513})["param"] == (
        "truncate_prompt_tokens"
    )
    error = refused(generative, "/v1/embeddings", {"input": [long]})
    assert (error["param"], error["code"]) == ("input", "context_length_exceeded")
    assert "513 tokens; the model's context is 512 tokens" in error["message"]
    scored = {"prompt": full, "echo": True, "max_tokens": 0, "logprobs": 0}
    choice = generative.http.post("/v1/completions", json=scored).json()["choices"][0]
    assert (len(choice["logprobs"]["token_logprobs"]), choice["finish_reason"]) == (512, "length")
    assert refused(generative, "/v1/completions", {**scored, "prompt": long})["code"] == "context_length_exceeded"
    for prompt, tokens in ((full, 1), (full, None), (full[1:], 2), (long, 1)):
        error = refused(generative, "/v1/completions", {"prompt": prompt, "max_tokens": tokens})
        assert error["code"] == "context_length_exceeded"
        assert "512" in error["message"]
    body = {"prompt": full[1:], "max_tokens": 1}
    assert generative.http.post("/v1/completions", json=body).json()["usage"]["completion_tokens"] == 1


def test_embedding_errors(generative: Server) -> None:
    for body, param in [
        ({}, "input"), ({"input": []}, "input"), ({"input": ""}, "input"), ({"input": {}}, "input"),
        ({"input": "x" * 600}, "input"), ({"input": [1000]}, "input"),
        ({"input": "a", "encoding_format": "int"}, "encoding_format"),
        ({"input": "a", "nope": 1}, "nope"),
    ]:  # fmt: skip
        assert refused(generative, "/v1/embeddings", body)["param"] == param, body


def test_a_checkpoints_pooling(tmp_path: Path) -> None:
    from unisono.frontend.pooling import pooling_of

    assert pooling_of(tmp_path).meant is False
    file = tmp_path / "1_Pooling" / "config.json"
    file.parent.mkdir()
    for text, mode, problem in [
        ('{"pooling_mode_lasttoken": true, "pooling_mode_mean_tokens": false}', "last", None),
        ('{"pooling_mode": "cls"}', "cls", None),
        ('{"pooling_mode_weightedmean_tokens": true}', "weightedmean", None),
        ('{"pooling_mode_cls_token": true, "pooling_mode_mean_tokens": true}', "cls+mean", None),
        ("{", "last", "cannot be read"),
        ("[]", "last", "not an object"),
    ]:
        file.write_text(text)
        found = pooling_of(tmp_path)
        assert (found.mode, found.meant) == (mode, True)
        assert (found.problem is None) if problem is None else problem in str(found.problem)
