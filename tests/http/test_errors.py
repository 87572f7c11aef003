"""What is refused, and how: OpenAI's error JSON with the value, the limit and the way out."""

from __future__ import annotations

import json
import re
from typing import Any

import openai
import pytest

from tests.http.conftest import Server
from tests.http.fake_engine import Trick

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
HI = [{"role": "user", "content": "hi"}]
JSON = {"content-type": "application/json"}


def check(response: Any, status: int, param: str | None, *says: str) -> None:
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["param"] == param
    for part in says:
        assert re.search(part, error["message"]), error["message"]


SHARED = [
    ({"model": "gpt-5"}, 404, "model", ["gpt-5", "fake, alias"]),
    ({"model": 3}, 400, "model", ["model=3"]),
    ({"temperature": -0.5}, 400, "temperature", ["-0.5", "0 and 100"]),
    ({"temperature": "hot"}, 400, "temperature", ['"hot"', "a number"]),
    ({"temperature": True}, 400, "temperature", ["true", "a number"]),
    ({"top_p": 0}, 400, "top_p", ["0", "above 0"]),
    ({"top_p": 1.5}, 400, "top_p", ["1.5", "at most 1"]),
    ({"top_k": -2}, 400, "top_k", ["-2"]),
    ({"top_k": 1.5}, 400, "top_k", ["1.5", "whole number"]),
    ({"min_p": 2}, 400, "min_p", ["2", "between 0 and 1"]),
    ({"seed": -1}, 400, "seed", ["-1", str(2**63 - 1)]),
    ({"seed": 2**63}, 400, "seed", [str(2**63)]),
    ({"max_tokens": 0}, 400, "max_tokens", ["0", "≥ 1"]),
    ({"max_tokens": "5"}, 400, "max_tokens", ['"5"', "whole number"]),
    ({"max_tokens": 5000}, 400, "max_tokens", ["5000", "512", r"at most \d+ tokens"]),
    ({"stop": [""]}, 400, "stop", ["non-empty"]),
    ({"stop": 3}, 400, "stop", ["3", "a string or a list"]),
    ({"stop_token_ids": [1000]}, 400, "stop_token_ids", ["1000", "0 to 999"]),
    ({"stop_token_ids": list(range(20))}, 400, "stop_token_ids", ["20 entries", "at most 16"]),
    ({"stream": "yes"}, 400, "stream", ['"yes"', "true or false"]),
    ({"stream_options": {"include_usage": True}}, 400, "stream_options", ["stream=true"]),
    ({"stream": True, "stream_options": {"usage": True}}, 400, "stream_options", ["include_usage"]),
    ({"n": 0}, 400, "n", ["0", "from 1 to 128"]),
    ({"n": 129}, 400, "n", ["129", "from 1 to 128"]),
    ({"n": True}, 400, "n", ["n=true"]),
    ({"logprobs": "yes"}, 400, "logprobs", ['"yes"']),
    ({"presence_penalty": 2.5}, 400, "presence_penalty", ["2.5", "between -2 and 2"]),
    ({"frequency_penalty": -3}, 400, "frequency_penalty", ["-3", "between -2 and 2"]),
    ({"repetition_penalty": 0}, 400, "repetition_penalty", ["0", "above 0"]),
    ({"logit_bias": {"5": 101}}, 400, "logit_bias", ["101", "between -100 and 100"]),
    ({"logit_bias": {"five": 1}}, 400, "logit_bias", ["five", "token ids"]),
    ({"logit_bias": {"1000": 1}}, 400, "logit_bias", ["1000", "0 to 999"]),
    ({"logit_bias": {str(i): 1 for i in range(301)}}, 400, "logit_bias", ["301", "300"]),
    ({"logit_bias": [5]}, 400, "logit_bias", ["an object"]),
    ({"allowed_token_ids": []}, 400, "allowed_token_ids", ["at least one"]),
    ({"allowed_token_ids": [1000]}, 400, "allowed_token_ids", ["1000", "0 to 999"]),
    ({"bad_words": [""]}, 400, "bad_words", ["non-empty"]),
    ({"min_tokens": 9, "max_tokens": 5}, 400, "min_tokens", ["9", "max_tokens=5"]),
    ({"response_format": {"type": "yaml"}}, 400, "response_format", ["yaml", "json_schema"]),
    ({"response_format": {"type": "json_object", "schema": {}}}, 400, "response_format", ["schema", "json_object"]),
    ({"response_format": {"type": "json_schema"}}, 400, "response_format", ["json_schema", "schema"]),
    ({"response_format": "json"}, 400, "response_format", ["json", "object"]),
    ({"structured_outputs": {}}, 400, "structured_outputs", ["nothing"]),
    ({"structured_outputs": {"yaml": 1}}, 400, "structured_outputs", ["yaml", "regex"]),
    ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, 400, "structured_outputs", ["regex, choice", "one of"]),
    ({"structured_outputs": {"choice": []}}, 400, "structured_outputs", ["choice", "at least one"]),
    ({"structured_outputs": {"json": "{oops"}}, 400, "structured_outputs", ["oops", "not valid JSON"]),
    ({"structured_outputs": {"json_object": False}}, 400, "structured_outputs", ["json_object=False", "true"]),
    ({"guided_regex": ""}, 400, "guided_regex", ["regex", "not empty"]),
    ({"guided_regex": "a", "guided_json": {}}, 400, "guided_json", ["guided_json and guided_regex", "one"]),
    ({"suffix": "x"}, 400, "suffix", []),
    ({"best_of": 4, "n": 8}, 400, "best_of", []),
    ({"temprature": 1}, 400, "temprature", ["not a known field; did you mean temperature"]),
]


@pytest.mark.parametrize(("body", "status", "param", "says"), SHARED, ids=[json.dumps(row[0])[:40] for row in SHARED])
@pytest.mark.parametrize(("path", "base"), [(CHAT, {"messages": HI}), (TEXT, {"prompt": "hi"})], ids=["chat", "text"])
def test_fields_of_both(
    server: Server, path: str, base: dict[str, Any], body: dict[str, Any], status: int, param: str, says: list[str]
) -> None:
    check(server.http.post(path, json=base | body), status, param, *says)


@pytest.mark.parametrize(
    ("messages", "param", "says"),
    [
        ([], "messages", ["at least one"]),
        ("hi", "messages", ["list of messages"]),
        (["hi"], "messages[0]", ['"hi"']),
        ([{"content": "hi"}], "messages[0].role", ["null", "system, developer, user, assistant"]),
        ([*HI, {"role": "robot", "content": "hi"}], "messages[1].role", ['"robot"']),
        ([{"role": "tool", "content": "hi"}], "messages[0].tool_call_id", []),
        ([{"role": "user"}], "messages[0].content", ["null"]),
        ([{"role": "user", "content": 5}], "messages[0].content", ["5"]),
        ([{"role": "user", "content": []}], "messages[0].content", []),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "messages[0].content[0]", ["has no content"]),
        ([{"role": "user", "content": ["hi"]}], "messages[0].content[0]", []),
        ([{"role": "user", "content": "hi", "name": 3}], "messages[0].name", ["string"]),
        ([{"role": "user", "content": "hi", "mood": "glad"}], "messages[0].mood", ["glad"]),
        ([{"role": "assistant", "content": "a", "tool_calls": [{}]}], "messages[0].tool_calls[0]", []),
        ([{"role": "assistant", "content": "hi"}], "messages", ["the user speaks first"]),
        ([{"role": "user", "content": "x" * 600}], "messages", ["512", "Shorten"]),
    ],
)  # fmt: skip
def test_messages(server: Server, messages: Any, param: str, says: list[str]) -> None:
    check(server.http.post(CHAT, json={"messages": messages}), 400, param, *says)


@pytest.mark.parametrize(
    ("body", "param", "says"),
    [
        ({}, "prompt", ["missing"]),
        ({"prompt": None}, "prompt", ["null"]),
        ({"prompt": ""}, "prompt", ["empty"]),
        ({"prompt": []}, "prompt", ["empty"]),
        ({"prompt": ["a", ""]}, "prompt", ["empty"]),
        ({"prompt": [[1], []]}, "prompt", ["empty"]),
        ({"prompt": {"a": 1}}, "prompt", ["a string, a list"]),
        ({"prompt": [1, "a"]}, "prompt", ["a string, a list"]),
        ({"prompt": [1.5]}, "prompt", []),
        ({"prompt": [True]}, "prompt", []),
        ({"prompt": [1, 1000]}, "prompt", ["1000", "0 to 999"]),
        ({"prompt": [-1]}, "prompt", ["-1", "0 to 999"]),
        ({"prompt": [10**30]}, "prompt", [str(10**30)]),
        ({"prompt": ["a"] * 1025}, "prompt", ["1025", "1024"]),
        ({"prompt": ["a"] * 10, "n": 128}, "n", ["1280 sequences", "1024"]),
        ({"prompt": "a", "logprobs": 21}, "logprobs", ["21", "0 to 20"]),
        ({"prompt": "a", "echo": 1}, "echo", ["true or false"]),
        ({"prompt": "a", "prompt_logprobs": 21}, "prompt_logprobs", ["21", "from 0 to 20"]),
        ({"prompt": "a", "prompt_logprobs": -1}, "prompt_logprobs", ["-1", "from 0 to 20"]),
        ({"prompt": "a", "prompt_logprobs": True}, "prompt_logprobs", ["true", "a whole number"]),
        ({"prompt": "a", "prompt_logprobs": 0, "stream": True}, "prompt_logprobs", ["whole answers only", "stream"]),
        ({"prompt": "a", "logprobs": True}, "logprobs", ["whole number"]),
        ({"prompt": "a", "top_logprobs": 2}, "top_logprobs", ["not a field of /v1/completions"]),
        ({"prompt": [1] * 512}, "prompt", ["512 tokens", "room for 511"]),
        ({"prompt": [1] * 500, "max_tokens": 13}, "max_tokens", ["500", "13", "513", "512", "at most 12"]),
        ({"prompt": [1] * 500}, "max_tokens", ["at most 12"]),
        ({"prompt": "x" * 10**6}, "prompt", ["1000000 characters", "512"]),
        ({"prompt": "a", "messages": HI}, "messages", ["/v1/chat/completions"]),
        ({"prompt": [Trick.REJECT]}, "prompt", ["the fake engine refuses"]),
        ({"prompt": [[5], [Trick.REJECT]], "stream": True}, "prompt", ["the fake engine refuses"]),
    ],
)  # fmt: skip
def test_prompts(server: Server, body: dict, param: str, says: list[str]) -> None:
    check(server.http.post(TEXT, json=body), 400, param, *says)
    assert server.info()["requests"]["running"] == 0


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "not valid JSON"),
        (b"{", "not valid JSON"),
        (b'{"prompt": "a",}', "not valid JSON"),
        (b'{"prompt": NaN}', "not valid JSON"),
        (b"[" * 100_000, "recursion"),
        (b'{"prompt": "\xff"}', "not valid JSON"),
        (b'"prompt"', "must be a JSON object"),
        (b"null", "must be a JSON object"),
    ],
)
def test_bodies(server: Server, content: bytes, says: str) -> None:
    check(server.http.post(TEXT, content=content, headers=JSON), 400, None, says)


def test_http(server: Server) -> None:
    check(server.http.post(TEXT, data={"prompt": "a"}), 415, None, "x-www-form-urlencoded", "application/json")
    check(server.http.post(TEXT, content=b"{}"), 415, None, "application/json")
    check(server.http.get(TEXT), 405, None, "Method Not Allowed")
    check(server.http.post("/v1/nothing", json={}), 404, None, "/v1/nothing")
    response = server.http.post(TEXT, json={"prompt": "a"}, headers={"content-type": "Application/JSON; charset=utf-8"})
    assert response.status_code == 200


def test_a_huge_body_is_cut_off(server: Server) -> None:
    sent = 0

    def body():
        nonlocal sent
        for _ in range(80):
            sent += 1
            yield b" " * 2**20

    check(server.http.post(TEXT, content=body(), headers=JSON), 413, None, "64 MiB")


def test_chat_only(server: Server) -> None:
    def post(**extra: Any) -> Any:
        return server.http.post(CHAT, json={"messages": HI, **extra})

    check(post(max_tokens=1, max_completion_tokens=2), 400, "max_tokens", "differ")
    check(post(continue_final_message=True, add_generation_prompt=True), 400, "continue_final_message", "exclude")
    check(post(chat_template_kwargs={"tokenize": True}), 400, "chat_template_kwargs", "tokenize")
    check(post(chat_template_kwargs=[1]), 400, "chat_template_kwargs", "object")
    check(post(prompt="a"), 400, "prompt", "not a field of /v1/chat/completions")
    check(post(echo=1), 400, "echo", "true or false")
    check(post(top_logprobs=3), 400, "top_logprobs", "needs logprobs=true")
    check(post(top_logprobs=21, logprobs=True), 400, "top_logprobs", "21", "0 to 20")
    check(post(logprobs=1), 400, "logprobs", "true or false")


def test_a_request_that_fails_in_the_engine(server: Server) -> None:
    check(server.http.post(TEXT, json={"prompt": [Trick.FAIL]}), 500, None, "a fake failure")
    with pytest.raises(openai.APIError, match="a fake failure"):
        list(server.openai.completions.create(model="fake", prompt=[Trick.FAIL], stream=True))
    assert server.http.get("/health").status_code == 200


def test_request_without_allowed_tokens_returns_400(server: Server) -> None:
    """As where allowed_token_ids forbid what its structured output needs next: 400, and an event of that kind."""
    body = {"prompt": [Trick.STUCK], "max_tokens": 5}
    check(server.http.post(TEXT, json=body), 400, "structured_outputs", "cannot go on", "no token continues")
    events = server.http.post(TEXT, json={**body, "stream": True}).text.strip().split("\n\n")
    error = json.loads(events[-2].removeprefix("data: "))["error"]
    assert (error["type"], error["param"]) == ("invalid_request_error", "structured_outputs")


def test_openai_raises_its_own_errors(server: Server) -> None:
    with pytest.raises(openai.NotFoundError, match="not served here"):
        server.openai.completions.create(model="nope", prompt="a")
    with pytest.raises(openai.BadRequestError, match="at most 498 tokens"):
        server.openai.chat.completions.create(model="fake", messages=HI, max_tokens=10_000)
