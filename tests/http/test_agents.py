"""Requests of agents (Codex, Claude Code) that ended a conversation, or kept one from starting."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.http import tokenizers_
from tests.http.conftest import Server, servers

STRICT = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
    "{{ raise_exception('System message must be at the beginning.') }}{% endif %}"
    "{{ m.content }}{% for c in m.tool_calls or [] %}[{{ c.function.name }}"
    "{% for k, v in c.function.arguments|items %} {{ k }}={{ v }}{% endfor %}]{% endfor %}<|im_end|>{% endfor %}"
    "{% for tool in tools or [] %}{{ tool.function.name }} {% endfor %}{# <think> </think> <tool_call> #}"
)
"""Takes one leading system message, and arguments that are objects. A fake answer is the first message's content."""
CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
WHOLE = {"ignore_eos": True, "skip_special_tokens": False}
FUNCTION = {"type": "function", "name": "f", "parameters": {"type": "object", "properties": {}}}
Q = {"role": "user", "content": "<think>hmmm so</think>yes"}


@pytest.fixture(scope="module")
def agents(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server with a strict template that leaves out hosted tools."""
    path = tmp_path_factory.mktemp("model")
    tokenizer = tokenizers_.byte_level()
    tokenizer.chat_template = STRICT
    tokenizer.save_pretrained(path)
    with servers(tmp_path_factory) as start:
        yield start(path, max_model_len=4096, tokens_per_step=3, ignore_hosted_tools=True)


def post(server: Server, path: str, **body: Any) -> Any:
    answer = server.http.post(path, json={"max_tokens": 4, **body} if path != RESPONSES else body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def prompt(server: Server, path: str, **body: Any) -> str:
    """The rendered prompt: a fake answer repeats it."""
    limit = {"max_output_tokens" if path == RESPONSES else "max_tokens": 400}
    message = post(server, path, **WHOLE, **limit, separate_reasoning=False, **body)
    if path == RESPONSES:
        text = "".join(part["text"] for item in message["output"] for part in item.get("content", []))
    elif path == MESSAGES:
        text = "".join(block["text"] for block in message["content"])
    else:
        text = message["choices"][0]["message"]["content"]
    return text[: text.find(text[:12], 12)] if text.find(text[:12], 12) > 0 else text


def test_response_truncated_in_reasoning_can_be_continued(agents: Server) -> None:
    cut: dict[str, Any] = {"input": [Q], "max_output_tokens": 10}
    first = post(agents, RESPONSES, **cut)
    assert (first["status"], [item["type"] for item in first["output"]]) == ("incomplete", ["reasoning"])
    post(agents, RESPONSES, previous_response_id=first["id"], input="go on")
    post(agents, RESPONSES, previous_response_id=first["id"], input="go on", truncation="auto")
    post(agents, RESPONSES, input=[Q, *first["output"], {"role": "user", "content": "go on"}])
    post(agents, RESPONSES, input=[Q, *first["output"]])
    conversation = agents.http.post("/v1/conversations", json={}).json()["id"]
    post(agents, RESPONSES, **cut, conversation=conversation)
    post(agents, RESPONSES, conversation=conversation, input="go on")
    body = {"previous_response_id": first["id"], "input": "x"}
    assert agents.http.post("/v1/responses/input_tokens", json=body).json()["input_tokens"] > 10


@pytest.mark.parametrize(
    "reasoning",
    [
        {"summary": [{"type": "summary_text", "text": "s"}]},
        {"summary": [], "encrypted_content": "gAAAAB"},
        {"summary": [], "content": []},
        {"summary": [], "content": None, "encrypted_content": None, "status": None},
        {"summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
    ],
)
def test_reasoning_items_of_every_form(agents: Server, reasoning: dict[str, Any]) -> None:
    item = {"type": "reasoning", "id": "rs_1", **reasoning}
    assert "yes<|im_end|>" in prompt(agents, RESPONSES, input=[Q, item, {"role": "user", "content": "go"}])
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    output = {"type": "function_call_output", "call_id": "c", "output": "r"}
    text = prompt(agents, RESPONSES, input=[Q, item, item, call, output, {"role": "user", "content": "go"}])
    assert "yes<|im_end|>[f]<|im_end|>r<|im_end|>go<|im_end|>" in text


@pytest.mark.parametrize("content", [{"content": None}, {}, {"content": []}])
def test_messages_without_content(agents: Server, content: dict[str, Any]) -> None:
    """An assistant that was cut inside its reasoning has none; a tool may return nothing."""
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages = [
        Q, {"role": "assistant", "reasoning_content": "hm", **content}, {"role": "user", "content": "b"},
        {"role": "assistant", "tool_calls": [call], **content}, {"role": "tool", "tool_call_id": "c", **content},
        {"role": "assistant", "tool_calls": [], **content},
    ]  # fmt: skip
    text = prompt(agents, CHAT, messages=messages)
    assert text.endswith("<|im_end|><|im_end|>b<|im_end|>[f]<|im_end|><|im_end|><|im_end|>")


@pytest.mark.parametrize(
    "content",
    [[], "", [{"type": "thinking", "thinking": "hm", "signature": ""}], [{"type": "redacted_thinking", "data": "x"}]],
)
def test_anthropics_answers_without_text_are_taken_back(agents: Server, content: Any) -> None:
    answer = {"role": "assistant", "content": content}
    text = prompt(agents, MESSAGES, messages=[Q, answer, {"role": "user", "content": "go on"}])
    assert text.endswith("yes<|im_end|><|im_end|>go on<|im_end|>")
    assert prompt(agents, MESSAGES, messages=[Q, answer]).startswith(Q["content"] + "<|im_end|>")


BROKEN = {
    '{"x": "cut': "[f]", '{"a": "He said "x""}': "[f]", "null": "[f]", "[1]": "[f]", "3": "[f]", "": "[f]",
    '"{\\"x\\":1}"': "[f x=1]", '{"x": 2}': "[f x=2]",
}  # fmt: skip


@pytest.mark.parametrize("arguments", BROKEN)
def test_arguments_in_the_history_that_are_no_object(agents: Server, arguments: str) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    result = {"role": "tool", "tool_call_id": "c1", "content": "failed"}
    expected = f"yes<|im_end|>{BROKEN[arguments]}<|im_end|>failed<|im_end|>"
    text = prompt(agents, CHAT, messages=[Q, {"role": "assistant", "content": None, "tool_calls": [call]}, result])
    assert text.endswith(expected)
    items = [
        {"type": "function_call", "call_id": "c1", "name": "f", "arguments": arguments, "status": "incomplete"},
        {"type": "function_call_output", "call_id": "c1", "output": [{"type": "input_text", "text": "failed"}]},
    ]
    assert prompt(agents, RESPONSES, input=[Q, *items]).endswith(expected)
    use = {"type": "tool_use", "id": "c1", "name": "f", "input": arguments}
    back = {"type": "tool_result", "tool_use_id": "c1", "content": "failed"}
    turns = [Q, {"role": "assistant", "content": [use]}, {"role": "user", "content": [back]}]
    assert prompt(agents, MESSAGES, messages=turns).endswith(expected)


def test_arguments_that_are_a_list_or_null_in_anthropics_history(agents: Server) -> None:
    for given in ([1], None, {}, 3, [], "x"):
        use = {"type": "tool_use", "id": "c1", "name": "f", "input": given}
        text = prompt(
            agents, MESSAGES, messages=[Q, {"role": "assistant", "content": [use]}, {"role": "user", "content": "z"}]
        )
        assert text.endswith("[f]<|im_end|>z<|im_end|>")


def test_leading_system_messages_are_one(agents: Server) -> None:
    developer, user = {"role": "developer", "content": "the developer's"}, {"role": "user", "content": "x"}
    parts = [{"type": "input_text", "text": "the"}, {"type": "input_text", "text": "second"}]
    expected = "the instructions\n\nthe developer's<|im_end|>x<|im_end|>"
    assert prompt(agents, RESPONSES, instructions="the instructions", input=[developer, user]) == expected
    later = [user, {"role": "developer", "content": parts}]
    assert prompt(agents, RESPONSES, instructions="the instructions", input=later).startswith(
        "the instructions\n\nthe\nsecond<|im_end|>x<|im_end|>"
    )
    system = {"role": "system", "content": "the instructions"}
    assert prompt(agents, CHAT, messages=[system, developer, user]) == expected
    blocks = [{"type": "text", "text": "the instructions", "cache_control": {"type": "ephemeral"}}]
    reminder = {"role": "system", "content": "the developer's"}
    assert prompt(agents, MESSAGES, system=blocks, messages=[reminder, user]) == expected
    assert prompt(agents, MESSAGES, system=blocks, messages=[user, reminder]) == expected
    assert prompt(agents, MESSAGES, messages=[user, {"role": "system", "content": "the instructions"}]).startswith(
        "the i"
    )


def test_leading_system_messages_are_one_for_every_template(server: Server) -> None:
    """Also where the template would take two: a fake answer is the first message."""
    systems = [{"role": "system", "content": "a"}, {"role": "developer", "content": "b"}]
    body = {"messages": [*systems, {"role": "user", "content": "x"}], "max_tokens": 40}
    answer = server.http.post(CHAT, json=body).json()
    assert answer["choices"][0]["message"]["content"] == "system\na\n\nb"


HOSTED = [
    {"type": "web_search"}, {"type": "web_search_preview"}, {"type": "web_search_preview_2025_03_11"},
    {"type": "file_search", "vector_store_ids": ["v"]}, {"type": "code_interpreter", "container": {"type": "auto"}},
    {"type": "computer_use_preview", "display_width": 1}, {"type": "image_generation"}, {"type": "local_shell"},
    {"type": "mcp", "server_label": "m"}, {"type": "custom", "name": "apply_patch", "format": {"type": "text"}},
]  # fmt: skip
SERVERS = [
    {"type": "web_search_20250305", "name": "web_search", "max_uses": 2}, {"type": "bash_20250124", "name": "bash"},
    {"type": "code_execution_20250825", "name": "code_execution"}, {"type": "text_editor_20250728", "name": "e"},
]  # fmt: skip
ANTHROPIC = {"name": "f", "input_schema": {"type": "object", "properties": {}}}


def counted(server: Server) -> dict[str, float]:
    lines = [line for line in server.http.get("/metrics").text.splitlines() if "ignored_tools_total{" in line]
    return {line.partition('type="')[2].partition('"')[0]: float(line.rpartition(" ")[2]) for line in lines}


def test_hosted_tools_are_left_out_and_counted(agents: Server) -> None:
    before = counted(agents)
    response = post(agents, RESPONSES, input=[Q], tools=[FUNCTION, *HOSTED], include=["web_search_call.results"])
    assert response["tools"] == [FUNCTION]
    assert response["ignored_tools"] == [tool["type"] for tool in HOSTED]
    assert prompt(agents, RESPONSES, input=[Q], tools=[*HOSTED, FUNCTION], tool_choice="auto").endswith("<|im_end|>f ")
    assert "ignored_tools" not in post(agents, RESPONSES, input=[Q], tools=[FUNCTION])
    message = post(agents, MESSAGES, messages=[Q], tools=[ANTHROPIC, *SERVERS], mcp_servers=[{"type": "url"}])
    assert message["ignored_tools"] == [tool["type"] for tool in SERVERS]
    post(agents, CHAT, messages=[Q], tools=[{"type": "web_search"}])
    counts = {kind: count - before.get(kind, 0) for kind, count in counted(agents).items()}
    assert counts["web_search"] == 4
    assert counts["computer_use"] == counts["local_shell"] == counts["custom"] == 2
    assert counts["code_execution"] == counts["text_editor"] == counts["bash"] == counts["web_search_call"] == 1
    log = agents.log.read_text()
    assert log.count("--ignore-hosted-tools): web_search") == 1, "each type is logged once"


def test_hosted_tool_items_in_history_are_accepted(agents: Server) -> None:
    search = {
        "type": "web_search_call",
        "id": "ws_1",
        "status": "completed",
        "action": {"type": "search", "query": "q"},
    }
    patch = {"type": "custom_tool_call", "call_id": "c", "name": "apply_patch", "input": "*** Begin"}
    output = {"type": "custom_tool_call_output", "call_id": "c", "output": "done"}
    text = prompt(agents, RESPONSES, input=[Q, search, patch, output])
    assert text.endswith("yes<|im_end|>[apply_patch input=*** Begin]<|im_end|>done<|im_end|>")
    made = agents.http.post("/v1/conversations", json={"items": [Q, search]})
    post(agents, RESPONSES, conversation=made.json()["id"], input="x")
    blocks = [
        {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {"query": "q"}},
        {"type": "web_search_tool_result", "tool_use_id": "s", "content": []},
        {"type": "text", "text": "found"},
    ]
    assert prompt(agents, MESSAGES, messages=[Q, {"role": "assistant", "content": blocks}]).endswith(
        "yes<|im_end|>found"
    )


def test_a_choice_of_a_hosted_tool_is_refused(agents: Server) -> None:
    search, hosted = {"type": "web_search"}, [FUNCTION, {"type": "web_search"}]
    refused: list[tuple[str, dict[str, Any]]] = [
        (RESPONSES, {"input": "x", "tools": hosted, "tool_choice": search}),
        (RESPONSES, {"input": "x", "tools": [search], "tool_choice": "required"}),
        (
            RESPONSES,
            {
                "input": "x",
                "tools": hosted,
                "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [search]},
            },
        ),
        (MESSAGES, {"tools": [ANTHROPIC, SERVERS[0]], "tool_choice": {"type": "tool", "name": "web_search"}}),
        (MESSAGES, {"tools": SERVERS, "tool_choice": {"type": "any"}}),
        (CHAT, {"tools": [search], "tool_choice": "required"}),
    ]
    for path, body in refused:
        extra = {} if path == RESPONSES else {"messages": [Q], "max_tokens": 4}
        answer = agents.http.post(path, json={**extra, **body})
        assert answer.status_code == 400, (path, body)
        assert "tool_choice" in answer.json()["error"]["message"]
    allowed = {"type": "allowed_tools", "mode": "auto", "tools": [search, {"type": "function", "name": "f"}]}
    post(agents, RESPONSES, input="x", tools=hosted, tool_choice=allowed)


def test_without_the_flag_hosted_tools_are_refused_with_its_name(server: Server) -> None:
    chat, search = {"messages": [Q], "max_tokens": 4}, {"type": "web_search_call", "id": "w"}
    refused: list[tuple[str, dict[str, Any], str]] = [
        *((RESPONSES, {"input": "x", "tools": [FUNCTION, tool]}, "tools[1].type") for tool in HOSTED),
        *((MESSAGES, {**chat, "tools": [tool]}, "tools[0].type") for tool in SERVERS),
        (MESSAGES, {**chat, "mcp_servers": [{"type": "url"}]}, "mcp_servers"),
        (CHAT, {**chat, "tools": [{"type": "web_search"}]}, "tools[0].type"),
        (RESPONSES, {"input": [Q, search]}, "input[1].type"),
        (RESPONSES, {"input": "x", "include": ["file_search_call.results"]}, "include"),
    ]
    for path, body, where in refused:
        answer = server.http.post(path, json=body)
        assert answer.status_code == 400, (path, body)
        message = answer.json()["error"]["message"]
        assert where in message
        assert "--ignore-hosted-tools" in message
    unknown = server.http.post(RESPONSES, json={"input": "x", "tools": [{"type": "wibble"}]}).json()["error"]["message"]
    assert "wibble" in unknown
    assert "--ignore-hosted-tools" not in unknown
