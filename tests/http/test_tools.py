"""Tools over HTTP: what the template is given, what comes back as calls, and what a grammar makes of a choice."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.http import tokenizers_
from tests.http.conftest import Server, Start, servers
from tests.http.tool_answers import CASES, WEATHER, put_together, tool

TEMPLATE = (
    "{% for message in messages %}{{ message.content or '' }}"
    "{% for call in message.tool_calls or [] %}<tool_call>{{ call | tojson }}</tool_call>{% endfor %}<|im_end|>"
    "{% endfor %}{% if tools %}TOOLS {{ tools | tojson }}{% endif %}"
)
"""The fake engine repeats its prompt, so an answer is the first message."""
TOOLS = [tool("get_weather", WEATHER), tool("now")]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    tokenizer = tokenizers_.byte_level()
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def echo(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with servers(tmp_path_factory) as start:
        yield start(model, max_model_len=4096, tokens_per_step=3)


def answer(server: Server, text: str, **options: Any) -> Any:
    messages: list[Any] = [{"role": "user", "content": text}]
    return server.openai.chat.completions.create(model="fake", messages=messages, tools=TOOLS, **options)


@pytest.mark.parametrize("case", ["hermes", "hermes two", "hermes between", "plain"])
def test_complete_and_streamed_tool_calls(echo: Server, case: str) -> None:
    _, text, (content, calls) = CASES[case]
    (choice,) = answer(echo, text, seed=1).choices
    message = choice.message
    assert choice.finish_reason == ("tool_calls" if calls else "stop")
    assert (message.content or "") == content
    assert [(c.function.name, c.function.arguments) for c in message.tool_calls or []] == calls
    if calls and not content:
        assert message.content is None
    streamed, pieces, finish = put_together(answer(echo, text, seed=1, stream=True))
    assert (streamed, finish) == (content, choice.finish_reason)
    assert pieces == [[c.id, c.function.name, c.function.arguments] for c in message.tool_calls or []]


def test_ids_are_repeatable_and_differ(echo: Server) -> None:
    text = CASES["hermes two"][1]

    def ids(text: str, seed: int) -> list[str]:
        return [call.id for call in answer(echo, text, seed=seed).choices[0].message.tool_calls]

    first = ids(text, 1)
    assert first == ids(text, 1)
    assert len({*first, *ids(text, 2), *ids(text + "\n", 1)}) == 6
    assert all(one.startswith("call_") for one in first)


def test_several_answers(echo: Server) -> None:
    given = answer(echo, CASES["hermes"][1], n=2)
    assert len({choice.message.tool_calls[0].id for choice in given.choices}) == 2


def test_an_answer_that_is_cut(echo: Server) -> None:
    text = CASES["hermes"][1]
    (choice,) = answer(echo, text, max_tokens=70).choices
    assert choice.finish_reason == "length"
    (call,) = choice.message.tool_calls
    assert CASES["hermes"][2][1][0][1].startswith(call.function.arguments)
    streamed = put_together(answer(echo, text, max_tokens=70, stream=True))
    assert streamed[1][0][2] == call.function.arguments


def test_none_and_parallel(echo: Server) -> None:
    text = CASES["hermes two"][1]
    free = answer(echo, text, tool_choice="none").choices[0]
    assert (free.message.content, free.message.tool_calls, free.finish_reason) == (text, None, "stop")
    (call,) = answer(echo, text, parallel_tool_calls=False).choices[0].message.tool_calls
    assert call.function.name == "get_weather"


def test_logprobs_and_tokens_stay_whole(echo: Server) -> None:
    options = {"logprobs": True, "extra_body": {"return_token_ids": True}}
    text = CASES["hermes"][1]
    whole = answer(echo, text, **options).choices[0].model_dump()
    chunks = [c.model_dump() for chunk in answer(echo, text, stream=True, **options) for c in chunk.choices]
    assert [i for c in chunks for i in c.get("token_ids") or []] == whole["token_ids"]
    assert [e["token"] for c in chunks if c["logprobs"] for e in c["logprobs"]["content"]] == [
        e["token"] for e in whole["logprobs"]["content"]
    ]


def prompt_of(server: Server, messages: list[Any], **options: Any) -> str:
    """The prompt's text. A fake answer repeats it up to the first end mark, which ignore_eos goes over."""
    extra = {"ignore_eos": True, "skip_special_tokens": False}
    asked = {"model": "fake", "messages": messages, **extra, "tool_choice": "none", **options}
    count = server.http.post("/v1/chat/completions", json={**asked, "max_tokens": 1}).json()["usage"]["prompt_tokens"]
    given = server.http.post("/v1/chat/completions", json={**asked, "max_tokens": count}).json()
    return given["choices"][0]["message"]["content"]


def test_tool_messages_passed_to_the_chat_template(echo: Server) -> None:
    calls = [{"id": "x", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}]
    messages = [
        {"role": "user", "content": "Hi."},
        {"role": "assistant", "content": None, "tool_calls": calls, "refusal": None, "function_call": None},
        {"role": "tool", "content": [{"type": "text", "text": "one"}], "tool_call_id": "x"},
    ]
    text = prompt_of(echo, messages)
    assert '"arguments": {"a": 1}' in text, "arguments are objects"
    assert text.startswith("Hi.<|im_end|><tool_call>")
    assert text.endswith("one<|im_end|>")
    calls[0]["function"]["arguments"] = '{"a": '
    assert r'"arguments": "{\"a\": "' in prompt_of(echo, messages), "what a model has cut stays text"
    assert "TOOLS" not in prompt_of(echo, messages[:1], tools=TOOLS)
    told = prompt_of(echo, messages[:1], tools=[tool("f", strict=False)], tool_choice="auto")
    assert told.endswith('TOOLS [{"type": "function", "function": {"name": "f", "description": "Does f.", '
                         '"parameters": {"type": "object", "properties": {}}}}]')  # fmt: skip


def test_tools_are_described_to_templates_without_tool_support(model_dir: Path, start: Start) -> None:
    calls = [{"id": "x", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}]
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi."},
        {"role": "assistant", "content": None, "tool_calls": [*calls, *calls]},
        {"role": "tool", "content": "one", "tool_call_id": "x"},
        {"role": "tool", "content": "two", "tool_call_id": "x"},
    ]
    server = start(model_dir, max_model_len=4096, tokens_per_step=50)
    request = {"model": "fake", "messages": messages, "tools": [tool("f")], "max_tokens": 40}
    (choice,) = server.http.post("/v1/chat/completions", json=request).json()["choices"]
    assert choice["message"]["content"].startswith("system\nBe brief.\n\nYou can call these functions")
    text = prompt_of(server, messages)
    call = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
    assert f"assistant\n{call}\n{call}<|im_end|>" in text
    assert "user\n<tool_response>\none\n</tool_response>\n<tool_response>\ntwo\n</tool_response><|im_end|>" in text


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "no object": ({"tools": [3]}, "tools[0]"),
    "another type": ({"tools": [{"type": "web_search"}]}, "runs no tools of its own"),
    "no function": ({"tools": [{"type": "function"}]}, "tools[0].function"),
    "no name": ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name"),
    "a bad name": ({"tools": [tool("a b")]}, 'tools[0].function.name="a b"'),
    "two of a name": ({"tools": [tool("f"), tool("f")]}, "'f' twice"),
    "parameters": ({"tools": [tool("f", 3)]}, "tools[0].function.parameters"),  # type: ignore[arg-type]
    "an array": ({"tools": [tool("f", {"type": "array"})]}, "arguments are an object"),
    "strict": ({"tools": [tool("f", strict="yes")]}, "tools[0].function.strict"),
    "too many": ({"tools": [tool(f"f{i}") for i in range(129)]}, "at most 128"),
    "choice": ({"tools": TOOLS, "tool_choice": "always"}, 'tool_choice="always"'),
    "choice of no tools": ({"tool_choice": "required"}, "needs tools"),
    "an unknown function": (
        {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "g"}}},
        "no function 'g'",
    ),
    "parallel": ({"tools": TOOLS, "parallel_tool_calls": 1}, "parallel_tool_calls"),
    "old fields": ({"functions": [{"name": "f"}]}, "functions"),
    "no id": ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].tool_call_id"),
    "old role": ({"messages": [{"role": "function", "name": "f", "content": "x"}]}, "role tool"),
    "old call": (
        {"messages": [{"role": "assistant", "content": "", "function_call": {"name": "f"}}]},
        "use tool_calls",
    ),
    "call": ({"messages": [{"role": "assistant", "tool_calls": [{"id": "x"}]}]}, "messages[0].tool_calls[0]"),
    "calls of a user": ({"messages": [{"role": "user", "content": "x", "tool_calls": [1]}]}, "tool_calls"),
    "arguments": (
        {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": 3}}]}]},
        "function.arguments",
    ),
    "no content": ({"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
}


@pytest.mark.parametrize("case", BAD)
def test_invalid_tool_requests_return_400(echo: Server, case: str) -> None:
    request, says = BAD[case]
    given = echo.http.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "x"}], **request})
    assert given.status_code == 400, given.text
    assert says in given.json()["error"]["message"]
    assert len(given.json()["error"]["message"]) < 400


@pytest.mark.parametrize("case", ["mistral", "qwen3_coder"])
def test_the_form_may_be_named(model: Path, start: Start, case: str) -> None:
    form, text, (content, calls) = CASES[case]
    server = start(model, max_model_len=4096, tool_call_parser=form)
    message = answer(server, text).choices[0].message
    assert ((message.content or ""), [(c.function.name, c.function.arguments) for c in message.tool_calls]) == (
        content,
        calls,
    )
    if form == "mistral":
        assert all(len(call.id) == 9 and call.id.isalnum() for call in message.tool_calls)


def test_an_unknown_form_ends_the_start(start: Start) -> None:
    server = start(ready=False, tool_call_parser="wibble")
    assert server.wait() == 1
    assert "hermes" in server.log.read_text()


# ---- a real model, whose calls a grammar writes ----------------------------------------------------

TIGHT = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 6},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
        "unit": {"enum": ["C", "F"]},
    },
    "required": ["city", "days", "unit"],
    "additionalProperties": False,
}
REAL = [tool("weather", TIGHT), tool("clock", {"type": "object", "properties": {"utc": {"type": "boolean"}}})]
QUESTION: list[Any] = [{"role": "user", "content": "What is the weather in Oslo?"}]


def tiny_server(directories: pytest.TempPathFactory, *flags: str) -> Server:
    directory = directories.mktemp("tiny")
    command = ["unisono", "serve", "--port", "0", "--device", "cpu", "--max-num-seqs", "4"]
    command += ["--max-model-len", "1024", "--served-model-name", "tiny", "--enable-auto-tool-choice", *flags]
    return Server(command, directory / "log", directory)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = tiny_server(tmp_path_factory, "--speculative-method", "ngram", "--enforce-eager")
    yield server.wait_ready()
    server.kill()


def ask(server: Server, **options: Any) -> Any:
    given = {"model": "tiny", "messages": QUESTION, "tools": REAL, "max_tokens": 200, "temperature": 1, "seed": 5}
    return server.openai.chat.completions.create(**{**given, **options})


def assert_valid(call: Any) -> None:
    arguments = json.loads(call.function.arguments)
    if call.function.name == "weather":
        assert arguments.keys() == {"city", "days", "unit"}
        assert len(arguments["city"]) <= 6
        assert arguments["days"] in range(1, 10)
        assert arguments["unit"] in ("C", "F")
    else:
        assert call.function.name == "clock"
        assert arguments.keys() <= {"utc"}


NAMED = {"type": "function", "function": {"name": "weather"}}


@pytest.mark.parametrize("choice", ["required", NAMED], ids=["required", "named"])
def test_a_call_that_must_come_validates(tiny: Server, choice: Any) -> None:
    given = ask(tiny, tool_choice=choice, parallel_tool_calls=False, n=3)
    for one in given.choices:
        assert one.finish_reason == "tool_calls"
        assert one.message.content is None
        (call,) = one.message.tool_calls
        assert_valid(call)
        assert choice == "required" or call.function.name == "weather"
    streamed = put_together(ask(tiny, tool_choice=choice, parallel_tool_calls=False, stream=True))
    first = given.choices[0].message.tool_calls[0]
    assert streamed == ("", [[first.id, first.function.name, first.function.arguments]], "tool_calls")


def test_several_calls_validate(tiny: Server) -> None:
    for choice in ask(tiny, tool_choice="required", n=3).choices:
        calls = choice.message.tool_calls
        for call in calls if choice.finish_reason == "tool_calls" else calls[:-1]:
            assert_valid(call)


def test_allowed_tools(tiny: Server) -> None:
    allowed = {"mode": "required", "tools": [{"type": "function", "function": {"name": "clock"}}]}
    choice = {"type": "allowed_tools", "allowed_tools": allowed}
    (call,) = ask(tiny, tool_choice=choice, parallel_tool_calls=False).choices[0].message.tool_calls
    assert call.function.name == "clock"


def test_strict_tools_leave_text_free(tiny: Server) -> None:
    """And equal bytes: the same answer with and without, where nothing is called."""
    plain = ask(tiny, max_tokens=40).choices[0]
    strict = [tool(one["function"]["name"], one["function"]["parameters"], strict=True) for one in REAL]
    assert plain.message.tool_calls is None
    assert ask(tiny, tools=strict, max_tokens=40).choices[0].message.content


def test_uncompilable_tool_schema_raises(tiny: Server) -> None:
    bad = [tool("f", {"type": "object", "properties": {"a": {"$ref": "#/nowhere"}}, "required": ["a"]})]
    with pytest.raises(openai.BadRequestError, match="tools cannot be made a grammar") as error:
        ask(tiny, tools=bad, tool_choice="required")
    assert error.value.param == "tools"
    assert ask(tiny, tools=bad, max_tokens=5).choices[0].finish_reason == "length"


def test_calls_or_a_schema(tiny: Server) -> None:
    """tool_choice auto with response_format: the answer is one of the two."""
    schema = {
        "type": "object",
        "properties": {"ok": {"type": "boolean"}},
        "required": ["ok"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    for choice in ask(tiny, response_format=form, n=3, parallel_tool_calls=False).choices:
        if choice.message.tool_calls is None:
            assert json.loads(choice.message.content).keys() == {"ok"}
