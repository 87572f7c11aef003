"""Whatever a client sends, it gets an answer of its own, never a 500, and the server goes on."""

from __future__ import annotations

import json
import socket
import time
from collections import Counter
from typing import Any

import pytest

from tests.http import fuzz
from tests.http.conftest import Server, servers

CHAT, TEXT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"
TOOL = '{"type": "function", "name": "f"}'
HEADERS = {"content-type": "application/json"}

HUGE, HALF = "9" * 5000, r'"\ud800"'
NAMED: list[tuple[str, str, str, str]] = [
    (TEXT, f'{{"prompt": "a", "seed": {2**64}}}', "seed", "64 bits"),
    (TEXT, f'{{"prompt": "a", "seed": {2**63}}}', "seed", "9223372036854775807"),
    (TEXT, f'{{"prompt": "a", "seed": {HUGE}}}', "seed", "5000 digits"),
    (TEXT, f'{{"prompt": "a", "max_tokens": -{HUGE}}}', "max_tokens", "5000 digits"),
    (TEXT, f'{{"prompt": [1, {2**70}]}}', "prompt", "prompt[1]"),
    (TEXT, f'{{"prompt": "a", "temperature": {HUGE}}}', "temperature", "digits"),
    (TEXT, f'{{"prompt": "a", "logit_bias": {{"{HUGE}": 1}}}}', "logit_bias", "logit_bias"),
    (TEXT, f'{{"prompt": "a", "metadata": {{"a": {2**80}}}}}', "metadata", "metadata.a"),
    (TEXT, f'{{"prompt": {HALF}}}', "prompt", "surrogate"),
    (TEXT, f'{{"prompt": "a", "stop": ["x", {HALF}]}}', "stop", "stop[1]"),
    (TEXT, f'{{"prompt": "a", "user": {HALF}}}', "user", "surrogate"),
    (CHAT, f'{{"messages": [{{"role": "user", "content": {HALF}}}]}}', "messages", "messages[0].content"),
    (CHAT, f'{{"messages": [{{"role": "user", "content": "a", {HALF}: 1}}]}}', "messages", "messages[0]"),
    (CHAT, f'{{"messages": [{{"role": "user", "content": "a"}}], "chat_template_kwargs": {{"a": {HALF}}}}}',
     "chat_template_kwargs", "surrogate"),
    (TEXT, '{"prompt": [-1], "echo": true}', "prompt", "token id -1"),
    (CHAT, '{"messages": [{"role": "user", "content": [{"type": ["text"], "text": "a"}]}]}', "messages[0].content[0]",
     "parts of the types text"),
    (RESPONSES, '{"input": [{"type": "reasoning", "content": [{"type": [1.5], "text": "t"}]}]}', "input[0].content[0]",
     "reasoning_text"),
    (RESPONSES, f'{{"input": "a", "tools": [{TOOL}], "tool_choice": '
     '{"type": "allowed_tools", "mode": "auto", "tools": [{"name": []}]}}', "tool_choice", "functions in tools"),
    (MESSAGES, '{"messages": [{"role": "user", "content": "a"}], "max_tokens": 3, '
     '"context_management": {"edits": true}}', "context_management.edits", "a list of edits"),
    (MESSAGES, '{"messages": [{"role": "user", "content": "a"}], "max_tokens": 3, "tools": [{"name": "f"}], '
     '"tool_choice": {"type": ["tool"]}}', "tool_choice.type", "auto, any, none"),
]  # fmt: skip


@pytest.mark.parametrize(("path", "body", "param", "says"), NAMED, ids=lambda value: value[:30])
def test_unrepresentable_values_return_400_with_the_field_name(
    server: Server, path: str, body: str, param: str, says: str
) -> None:
    answer = server.http.post(path, content=body, headers=HEADERS)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error.get("param", param) == param  # Anthropic's errors have the name in the message only
    assert param in error["message"]
    assert says in error["message"]
    assert len(error["message"]) < 400


def test_paired_surrogates_are_text(server: Server) -> None:
    answer = server.http.post(
        TEXT, content=r'{"prompt": "\ud83d\ude00", "max_tokens": 4, "echo": true}', headers=HEADERS
    )
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"][0]["text"].startswith("😀")


@pytest.mark.parametrize("value", fuzz.odd_tensors(), ids=lambda v: f"{type(v).__name__} {getattr(v, 'dtype', '')}")
def test_odd_embeddings(embeds_server: Server, value: Any) -> None:
    body = {"prompt_embeds": fuzz.encoded(value), "max_tokens": 2}
    answer = embeds_server.http.post(TEXT, json=body)
    assert answer.status_code in (200, 400), answer.text
    if answer.status_code == 400:
        assert answer.json()["error"]["param"] == "prompt_embeds"


@pytest.fixture(scope="module")
def embeds_server(tmp_path_factory: pytest.TempPathFactory, model_dir: Any) -> Any:
    with servers(tmp_path_factory) as start:
        yield start(model_dir, enable_prompt_embeds=True)


def assert_survives(server: Server, count: int, seed: int) -> Counter[int]:
    """Send that many bodies; each is answered in time, and not with 500."""
    statuses: Counter[int] = Counter()
    for path, body in fuzz.bodies(count, seed):
        before = time.monotonic()
        answer = server.http.post(path, content=body.encode("utf-8", "replace"), headers=HEADERS)
        taken = time.monotonic() - before
        statuses[answer.status_code] += 1
        assert answer.status_code in (200, 400, 404), f"{answer.status_code}: {answer.text}\n{path} {body[:2000]}"
        assert taken < 60, f"{taken:.1f} s for {path} {body[:2000]}"
        if answer.status_code != 200:
            assert json.loads(answer.text)["error"]["message"], body
    assert server.http.get("/health").status_code == 200
    return statuses


def test_a_short_fuzz(embeds_server: Server) -> None:
    statuses = assert_survives(embeds_server, 400, seed=1)
    assert statuses[200] > 20, "some are valid"
    assert statuses[400] > 100


@pytest.mark.full
@pytest.mark.parametrize("seed", range(2, 12))
def test_a_long_fuzz(embeds_server: Server, seed: int) -> None:
    assert_survives(embeds_server, 1500, seed)


def test_requests_that_are_cut_at_any_byte(slow_server: Server) -> None:
    server = slow_server
    host, port = server.url.removeprefix("http://").split(":")
    request = (
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: 30\r\n\r\n"
    )
    whole = request + b'{"prompt": [1, 2], "seed": 1} '
    for cut in range(0, len(whole), 5):
        with socket.create_connection((host, int(port))) as connection:
            connection.sendall(whole[:cut])
    assert server.http.post(TEXT, json={"prompt": [1, 2], "max_tokens": 2}).status_code == 200
