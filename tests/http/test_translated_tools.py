"""Tool calls through the Responses and the Messages API, whole, streamed and sent back."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.http import tokenizers_
from tests.http.conftest import Server, servers

TEMPLATE = (
    "{% for message in messages %}{{ message.role }}:{{ message.content or '' }}"
    "{% for call in message.tool_calls or [] %}<call>{{ call | tojson }}</call>{% endfor %}"
    "{% if message.tool_call_id %}({{ message.tool_call_id }}){% endif %}<|im_end|>"
    "{% endfor %}{% if tools %}<tool_call> TOOLS {{ tools | tojson }}{% endif %}"
)
"""The fake engine repeats its prompt up to the first <|im_end|>: an answer is the first message."""
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
CALLS = (
    'Let me see.<tool_call>{"name": "weather", "arguments": {"city": "Köln"}}</tool_call>'
    '<tool_call>{"name": "now", "arguments": {}}</tool_call>'
)


@pytest.fixture(scope="module")
def echo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    path: Path = tmp_path_factory.mktemp("model")
    tokenizer = tokenizers_.byte_level()
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(path)
    with servers(tmp_path_factory) as start:
        yield start(path, max_model_len=4096, tokens_per_step=3)


def events(server: Server, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    lines = server.http.post(path, json={**body, "stream": True}).text.splitlines()
    return [json.loads(line[6:]) for line in lines if line.startswith("data: ")]


def shown(server: Server, path: str, body: dict[str, Any]) -> str:
    """The rendered prompt."""
    answer = server.http.post(path, json={**body, "ignore_eos": True, "skip_special_tokens": False})
    assert answer.status_code == 200, answer.text
    content = answer.json().get("output") or [answer.json()]
    return "".join(part.get("text") or "" for item in content for part in item.get("content") or [])


# ---- Responses ----------------------------------------------------------------------------------

FUNCTIONS = [
    {"type": "function", "name": "weather", "description": "d", "parameters": SCHEMA, "strict": None},
    {"type": "function", "name": "now", "parameters": {"type": "object", "properties": {}}},
]


def test_responses(echo: Server) -> None:
    body = {"input": CALLS, "tools": FUNCTIONS, "seed": 1}
    response = echo.openai.responses.create(
        model="fake",
        input=CALLS,
        tools=FUNCTIONS,
        extra_body={"seed": 1},  # type: ignore[arg-type]
    )
    assert [item.type for item in response.output] == ["message", "function_call", "function_call"]
    assert response.output_text == "user:Let me see."
    calls: list[Any] = [item for item in response.output if item.type == "function_call"]
    assert [(call.name, json.loads(call.arguments)) for call in calls] == [("weather", {"city": "Köln"}), ("now", {})]
    assert response.status == "completed"
    found = events(echo, "/v1/responses", body)
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    for index, call in enumerate(calls, 1):
        mine = [event for event in found if event.get("output_index") == index]
        assert mine[0]["type"] == "response.output_item.added"
        assert (mine[0]["item"]["name"], mine[0]["item"]["arguments"]) == (call.name, "")
        deltas = [e["delta"] for e in mine if e["type"] == "response.function_call_arguments.delta"]
        done = next(e for e in mine if e["type"] == "response.function_call_arguments.done")
        assert "".join(deltas) == done["arguments"] == call.arguments == mine[-1]["item"]["arguments"]
        assert mine[-1]["item"]["call_id"] == mine[0]["item"]["call_id"] == call.call_id
    assert len({item["id"] for item in found[-1]["response"]["output"]}) == 3


def test_responses_calls_come_back(echo: Server) -> None:
    """By id or as items, the conversation is the same: one assistant message with text and calls, then results."""
    first = echo.openai.responses.create(model="fake", input=CALLS, tools=FUNCTIONS)  # type: ignore[arg-type]
    calls: list[Any] = [item for item in first.output if item.type == "function_call"]
    results = [
        {"type": "function_call_output", "call_id": call.call_id, "output": f"r{i}"} for i, call in enumerate(calls)
    ]
    by_id = shown(echo, "/v1/responses", {"previous_response_id": first.id, "input": results, "max_output_tokens": 700})
    history = [{"role": "user", "content": CALLS}, *(item.to_dict() for item in first.output), *results]
    by_items = shown(echo, "/v1/responses", {"input": history, "max_output_tokens": 700})
    assert by_id == by_items
    assert (
        '<|im_end|>assistant:user:Let me see.<call>{"type": "function", "function": {"name": "weather", "arg' in by_id
    )
    assert f"tool:r0({calls[0].call_id})<|im_end|>tool:r1({calls[1].call_id})<|im_end|>" in by_id


def test_responses_choose_tools(echo: Server) -> None:
    only = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "now"}]}
    body = {"input": "a", "tools": FUNCTIONS, "max_output_tokens": 600}
    assert '"weather"' in shown(echo, "/v1/responses", body)
    assert '"weather"' not in shown(echo, "/v1/responses", {**body, "tool_choice": only})
    named = {**body, "tool_choice": {"type": "function", "name": "nope"}}
    refused = echo.http.post("/v1/responses", json=named)
    assert (refused.status_code, "nope" in refused.text) == (400, True)
    error = echo.http.post("/v1/responses", json={"input": "a", "tools": [{**FUNCTIONS[0], "name": 3}]}).json()["error"]
    assert error["param"].startswith("tools[0]")


# ---- Messages -----------------------------------------------------------------------------------

TOOLS = [
    {"name": "weather", "description": "d", "input_schema": SCHEMA},
    {"name": "now", "input_schema": {"type": "object"}},
]


def message(**body: Any) -> dict[str, Any]:
    return {
        "model": "fake",
        "max_tokens": 700,
        "messages": [{"role": "user", "content": CALLS}],
        "tools": TOOLS,
        **body,
    }


def test_messages(echo: Server) -> None:
    whole = echo.http.post("/v1/messages", json=message(seed=1)).json()
    text, *calls = whole["content"]
    assert text == {"type": "text", "text": "user:Let me see."}
    assert [(call["type"], call["name"], call["input"]) for call in calls] == [
        ("tool_use", "weather", {"city": "Köln"}), ("tool_use", "now", {}),
    ]  # fmt: skip
    assert whole["stop_reason"] == "tool_use"
    found = events(echo, "/v1/messages", message(seed=1))
    starts = [e["content_block"] for e in found if e["type"] == "content_block_start"]
    assert starts == [{"type": "text", "text": ""}, *({**call, "input": {}} for call in calls)]
    for index, call in enumerate(calls, 1):
        deltas = [e["delta"] for e in found if e["type"] == "content_block_delta" and e["index"] == index]
        assert json.loads("".join(delta["partial_json"] for delta in deltas) or "{}") == call["input"]
    assert next(e for e in found if e["type"] == "message_delta")["delta"]["stop_reason"] == "tool_use"


def test_messages_calls_come_back(echo: Server) -> None:
    whole = echo.http.post("/v1/messages", json=message()).json()
    calls = [block for block in whole["content"] if block["type"] == "tool_use"]
    results = [
        {"type": "tool_result", "tool_use_id": calls[0]["id"], "content": "sunny"},
        {"type": "tool_result", "tool_use_id": calls[1]["id"], "content": [{"type": "text", "text": "noon"}]},
        {"type": "text", "text": "and?"},
    ]
    turns = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": whole["content"]},
        {"role": "user", "content": results},
    ]
    rendered = shown(echo, "/v1/messages", message(messages=turns, tools=None))
    assert rendered.startswith(
        'user:q<|im_end|>assistant:user:Let me see.<call>{"type": "function", "function": {"name": "weather"'
    )
    assert f"tool:sunny({calls[0]['id']})<|im_end|>tool:noon({calls[1]['id']})<|im_end|>user:and?" in rendered


def test_messages_choose_tools(echo: Server) -> None:
    for choice in ({"type": "auto", "disable_parallel_tool_use": True}, {"type": "none"}):
        assert echo.http.post("/v1/messages", json=message(tool_choice=choice)).status_code == 200
    refused = echo.http.post("/v1/messages", json=message(tool_choice={"type": "tool", "name": "nope"}))
    assert refused.status_code == 400
    assert "nope" in refused.json()["error"]["message"]
    bad = echo.http.post("/v1/messages", json=message(tool_choice={"type": "so"})).json()["error"]["message"]
    assert "tool_choice.type" in bad
