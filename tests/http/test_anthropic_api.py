"""Anthropic's Messages API over HTTP; the fake engine repeats the rendered prompt up to its EOS."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.http.conftest import Server, Start, named_events, servers

PATH = "/v1/messages"
HI = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def thinking(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with servers(tmp_path_factory) as start:
        yield start(model_dir, reasoning_parser="qwen3", prefill_seconds=0.1)


def ask(server: Server, **body: Any) -> dict[str, Any]:
    response = server.http.post(PATH, json={"model": "fake", "max_tokens": 100, "messages": HI, **body})
    assert response.status_code == 200, response.text
    return response.json()


def events(server: Server, **body: Any) -> list[dict[str, Any]]:
    """The events of a stream."""
    body = {"model": "fake", "max_tokens": 100, "messages": HI, "stream": True, **body}
    return named_events(server.http.post(PATH, json=body).text)


def test_a_message(server: Server) -> None:
    message = ask(server, metadata={"user_id": "me"}, service_tier="auto")
    assert message["content"] == [{"type": "text", "text": "user\nhi"}]
    assert (message["type"], message["role"], message["model"]) == ("message", "assistant", "fake")
    assert (message["stop_reason"], message["stop_sequence"]) == ("end_turn", None)
    assert message["id"].startswith("msg_")
    usage = message["usage"]
    counted = server.http.post(f"{PATH}/count_tokens", json={"model": "fake", "messages": HI}).json()
    assert counted == {"input_tokens": usage["input_tokens"] + usage["cache_read_input_tokens"]}
    assert usage["cache_read_input_tokens"] > 0
    assert usage["output_tokens"] > 3


def test_system_and_every_block(server: Server) -> None:
    """Shown whole by ignore_eos, a field of the chat body. Thinking goes to the template as reasoning_content."""
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}},
                                     {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": [{"type": "thinking", "thinking": "hm", "signature": ""},
                                          {"type": "redacted_thinking", "data": "x"}, {"type": "text", "text": "c"}]},
        {"role": "user", "content": "d"},
    ]  # fmt: skip
    system = [{"type": "text", "text": "be"}, {"type": "text", "text": "brief"}]
    body = {"messages": messages, "system": system, "ignore_eos": True, "skip_special_tokens": False}
    turns = [("system", "be\nbrief"), ("user", "a\nb"), ("assistant", "c"), ("user", "d")]
    rendered = "".join(f"<|im_start|>{role}\n{content}<|im_end|>\n" for role, content in turns)
    assert ask(server, **body)["content"][0]["text"].startswith(rendered + "<|im_start|>assistant\n")


def test_prefilled_assistant_message_is_continued(server: Server) -> None:
    messages = [*HI, {"role": "assistant", "content": "Well"}]
    text = ask(server, messages=messages, ignore_eos=True, skip_special_tokens=False)["content"][0]["text"]
    assert "<|im_start|>assistant\nWell<|im_start|>user" in text


def test_the_stream_leads_to_the_message(server: Server) -> None:
    found = events(server, seed=5)
    kinds = [event["type"] for event in found]
    deltas = kinds.count("content_block_delta")
    assert kinds == [
        "message_start", "content_block_start", *["content_block_delta"] * deltas, "content_block_stop",
        "message_delta", "message_stop",
    ]  # fmt: skip
    assert "".join(event["delta"]["text"] for event in found if event["type"] == "content_block_delta") == "user\nhi"
    start, whole = found[0]["message"], ask(server, seed=5)
    assert (start["content"], start["stop_reason"]) == ([], None)
    assert start["usage"]["input_tokens"] == whole["usage"]["input_tokens"]
    assert found[-2]["delta"] == {"stop_reason": "end_turn", "stop_sequence": None}
    assert found[-2]["usage"] == whole["usage"]


def test_stop_reasons(server: Server) -> None:
    assert ask(server, max_tokens=2)["stop_reason"] == "max_tokens"
    stopped = ask(server, stop_sequences=["zz", "r\nh"])
    assert (stopped["stop_reason"], stopped["stop_sequence"]) == ("stop_sequence", "r\nh")
    assert stopped["content"][0]["text"] == "use"
    assert events(server, stop_sequences=["r\nh"])[-2]["delta"]["stop_sequence"] == "r\nh"


def test_thinking_blocks(thinking: Server) -> None:
    body = {
        "messages": [{"role": "user", "content": "step\n</think>\n\nTwo."}],
        "chat_template_kwargs": {"opening": "<think>\n"},
        "thinking": {"type": "adaptive"},
    }
    message = ask(thinking, **body)
    assert message["content"] == [
        {"type": "thinking", "thinking": "user\nstep", "signature": ""},
        {"type": "text", "text": "Two."},
    ]
    begin = time.monotonic()
    found = events(thinking, **body)
    assert time.monotonic() - begin >= 0.1
    starts = [(e["index"], e["content_block"]["type"]) for e in found if e["type"] == "content_block_start"]
    assert starts == [(0, "thinking"), (1, "text")]
    thought = "".join(e["delta"].get("thinking", "") for e in found if e["type"] == "content_block_delta")
    assert thought == "user\nstep"
    continued = [*body["messages"], {"role": "assistant", "content": message["content"]}, *HI]
    assert ask(thinking, messages=continued)["type"] == "message"


def test_stream_opens_with_the_first_token(thinking: Server) -> None:
    begin = time.monotonic()
    body = {"model": "fake", "max_tokens": 9, "messages": HI, "stream": True}
    with thinking.http.stream("POST", PATH, json=body) as response:
        next(response.iter_raw())
        assert time.monotonic() - begin >= 0.1


def test_json_schema(server: Server) -> None:
    form = {"type": "json_schema", "schema": {"type": "object"}}
    ask(server, output_config={"format": form})
    error = refused(server, 400, output_config={"format": {"type": "json_schema", "schema": 3}})
    assert "output_config.format" in error["message"]


def refused(server: Server, status: int, **body: Any) -> dict[str, Any]:
    body = {"model": "fake", "max_tokens": 10, "messages": HI, **body}
    response = server.http.post(PATH, json={name: value for name, value in body.items() if value != "absent"})
    assert response.status_code == status, response.text
    found = response.json()
    assert found["type"] == "error"
    assert found["request_id"] == response.headers["x-request-id"]
    return found["error"]


@pytest.mark.parametrize(
    ("body", "status", "kind", "says"),
    [
        ({"max_tokens": "absent"}, 400, "invalid_request_error", "max_tokens is missing"),
        ({"max_tokens": 0}, 400, "invalid_request_error", "max_tokens=0"),
        ({"messages": []}, 400, "invalid_request_error", "at least one"),
        ({"messages": "hi"}, 400, "invalid_request_error", "list of messages"),
        ({"messages": [{"role": "robot", "content": "a"}]}, 400, "invalid_request_error", "messages[0].role"),
        ({"system": "s", "messages": [{"role": "user", "content": 3}]}, 400, "invalid_request_error", "messages[0].c"),
        ({"messages": [*HI, {"role": "user", "content": [{"type": "image"}]}]}, 400, "invalid_request_error",
         "messages[1].content[0]"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, 400, "invalid_request_error",
         "[0].text=null"),
        ({"stop_sequences": [""]}, 400, "invalid_request_error", "stop_sequences"),
        ({"temperature": 200}, 400, "invalid_request_error", "temperature=200"),
        ({"thinking": {"type": "enabled"}}, 400, "invalid_request_error", "thinking.budget_tokens"),
        ({"thinking": {"type": "so"}}, 400, "invalid_request_error", "thinking.type"),
        ({"tools": [{"type": "web_search_20250305", "name": "w"}]}, 400, "invalid_request_error", "tools[0].type"),
        ({"tool_choice": {"type": "any"}}, 400, "invalid_request_error", "needs tools"),
        ({"stop": "a"}, 400, "invalid_request_error", "use stop_sequences"),
        ({"temprature": 1}, 400, "invalid_request_error", "not a known field"),
        ({"context_management": {"edits": [{"type": "x"}]}}, 400, "invalid_request_error", "edits[0]"),
        ({"model": "claude"}, 404, "not_found_error", "fake, alias"),
    ],
)  # fmt: skip
def test_errors_are_in_anthropics_form(server: Server, body: dict[str, Any], status: int, kind: str, says: str) -> None:
    error = refused(server, status, **body)
    assert error["type"] == kind
    assert says in error["message"], error


def test_the_key_may_come_as_x_api_key(start: Start, model_dir: Path) -> None:
    server = start(model_dir, api_key="secret")
    body = {"model": "fake", "max_tokens": 5, "messages": HI}
    without = server.http.post(PATH, json=body)
    assert (without.status_code, without.json()["error"]["type"]) == (401, "authentication_error")
    assert server.http.post(PATH, json=body, headers={"x-api-key": "wrong"}).status_code == 401
    for headers in ({"x-api-key": "secret"}, {"authorization": "Bearer secret"}):
        assert server.http.post(PATH, json=body, headers=headers).status_code == 200


def test_through_anthropics_own_client(server: Server) -> None:
    anthropic = pytest.importorskip("anthropic")
    client = anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0)
    body: Any = {"model": "fake", "max_tokens": 50, "messages": HI}
    assert client.messages.create(**body).content[0].text == "user\nhi"
    with client.messages.stream(**body) as stream:
        assert "".join(stream.text_stream) == "user\nhi"
        assert stream.get_final_message().stop_reason == "end_turn"
    with pytest.raises(anthropic.BadRequestError, match="max_tokens=0"):
        client.messages.create(**{**body, "max_tokens": 0})
