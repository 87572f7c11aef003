"""gpt-oss's format over HTTP: answers of the fake engine in all three APIs, history, and grammars on a real model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from tests.http import tokenizers_
from tests.http.conftest import Server, named_events, servers
from tests.http.tool_answers import WEATHER, put_together, tool
from tests.models.make import make_checkpoint, make_tokenizer
from unisono.text.harmony import MARKS

# What matters of gpt-oss's: a message's form, one call in a message, thoughts as `thinking`, none of earlier turns.
TEMPLATE = """\
{%- for message in messages -%}
{%- if message.role == 'assistant' and message.tool_calls -%}
{%- if message.content and message.thinking -%}{{ raise_exception('both content and thinking') }}{%- endif -%}
{%- if message.thinking -%}<|start|>assistant<|channel|>analysis<|message|>{{ message.thinking }}<|end|>{%- endif -%}
{%- set call = message.tool_calls[0].function -%}{%- set last = namespace(name=call.name) -%}
<|start|>assistant to=functions.{{ call.name }}<|channel|>commentary json<|message|>
{{- call.arguments | tojson }}<|call|>
{%- elif message.role == 'assistant' -%}
<|start|>assistant<|channel|>final<|message|>{{ message.content }}<|end|>
{%- elif message.role == 'tool' -%}
<|start|>functions to=assistant<|channel|>commentary<|message|>{{ message.content | tojson }}<|end|>
{%- elif message.content.startswith('<|channel|>') -%}{{ message.content }}
{%- else -%}<|start|>{{ message.role }}<|message|>{{ message.content }}<|end|>{%- endif -%}
{%- endfor -%}
{%- if tools -%}TOOLS{{ tools | tojson }}{%- endif -%}
{%- if reasoning_effort -%}Reasoning: {{ reasoning_effort }}{%- endif -%}
{%- if add_generation_prompt -%}<|start|>assistant{%- endif -%}
{%- if opens -%}<|channel|>analysis<|message|>{%- endif -%}
"""
"""A user's message in the form of an answer stands first: the fake engine, which repeats its prompt, says it."""
CALL = '<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{"city": "Paris"}<|call|>'
THOUGHT, SAID = "<|channel|>analysis<|message|>So Paris.<|end|>", "<|channel|>final<|message|>It is <b> warm.<|return|>"
NEXT = "<|start|>assistant"
TOOLS = [tool("get_weather", WEATHER)]


def harmony(tokenizer: PreTrainedTokenizerFast) -> PreTrainedTokenizerFast:
    tokenizer.add_special_tokens({"additional_special_tokens": list(MARKS), "eos_token": "<|return|>"})
    tokenizer.chat_template = TEMPLATE
    return tokenizer


@pytest.fixture(scope="module")
def echo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    path = tmp_path_factory.mktemp("harmony")
    harmony(tokenizers_.byte_level()).save_pretrained(path)
    with servers(tmp_path_factory) as start:
        yield start(path, max_model_len=4096, tokens_per_step=3)


def chat(server: Server, text: str, **body: Any) -> Any:
    return server.openai.chat.completions.create(model="fake", messages=[{"role": "user", "content": text}], **body)


@pytest.mark.parametrize("tools", [False, True])
def test_an_answer_and_its_stream(echo: Server, tools: bool) -> None:
    options: dict[str, Any] = {"tools": TOOLS} if tools else {}
    choice = chat(echo, THOUGHT + NEXT + SAID, **options).choices[0]
    assert choice.message.content == "It is <b> warm."
    assert choice.message.reasoning_content == choice.message.reasoning == "So Paris."
    assert (choice.finish_reason, choice.message.tool_calls) == ("stop", None)
    thought, said = "", ""
    for chunk in chat(echo, THOUGHT + NEXT + SAID, stream=True, **options):
        delta = chunk.choices[0].delta
        thought += getattr(delta, "reasoning_content", None) or ""
        said += delta.content or ""
        assert not said or thought == "So Paris."
    assert (thought, said) == ("So Paris.", "It is <b> warm.")


def test_a_call_ends_the_answer(echo: Server) -> None:
    text = THOUGHT + NEXT + CALL + NEXT + SAID
    choice = chat(echo, text, tools=TOOLS, seed=1).choices[0]
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
    assert choice.message.reasoning_content == "So Paris."
    (call,) = choice.message.tool_calls
    assert (call.function.name, call.function.arguments) == ("get_weather", '{"city": "Paris"}')
    content, calls, finish = put_together(chat(echo, text, tools=TOOLS, seed=1, stream=True))
    assert (content, finish) == ("", "tool_calls")
    assert calls == [[call.id, "get_weather", '{"city": "Paris"}']]
    none = chat(echo, text, tools=TOOLS, tool_choice="none").choices[0].message
    assert (none.tool_calls, none.content) == (None, "")
    preamble = "<|channel|>commentary<|message|>I look.<|end|>" + NEXT + CALL
    both = chat(echo, preamble, tools=TOOLS).choices[0].message
    assert (both.content, len(both.tool_calls)) == ("I look.", 1)


def test_the_other_apis(echo: Server) -> None:
    text = THOUGHT + NEXT + CALL
    given = TOOLS[0]["function"]
    response = echo.openai.responses.create(model="fake", input=text, tools=[{"type": "function", **given}])
    assert [item.type for item in response.output] == ["reasoning", "function_call"]
    assert response.output[0].content[0].text == "So Paris."
    assert (response.output[1].name, response.output[1].arguments) == ("get_weather", '{"city": "Paris"}')
    body = {"model": "fake", "max_tokens": 200, "messages": [{"role": "user", "content": text}]}
    body["tools"] = [{"name": given["name"], "input_schema": given["parameters"]}]
    message = echo.http.post("/v1/messages", json=body).json()
    assert message["stop_reason"] == "tool_use"
    blocks = {block["type"]: block for block in message["content"]}
    assert blocks["tool_use"]["input"] == {"city": "Paris"}
    body["messages"][0]["content"] = THOUGHT + NEXT + SAID
    events = named_events(echo.http.post("/v1/messages", json={**body, "stream": True}).text)
    texts = [e["delta"]["text"] for e in events if e.get("delta", {}).get("type") == "text_delta"]
    assert "".join(texts) == "It is <b> warm."


def rendered(server: Server, messages: list[Any], **options: Any) -> str:
    asked = {"model": "fake", "messages": messages, **options}
    ids = server.http.post("/tokenize", json=asked).json()["tokens"]
    return server.http.post("/detokenize", json={"model": "fake", "tokens": ids}).json()["prompt"]


def test_history(echo: Server) -> None:
    def call(number: int) -> dict[str, Any]:
        return {"id": f"c{number}", "type": "function", "function": {"name": "f", "arguments": f'{{"a": {number}}}'}}

    messages = [
        {"role": "user", "content": "Hi."},
        {"role": "assistant", "content": "I look.", "reasoning_content": "Hm.", "tool_calls": [call(1), call(2)]},
        {"role": "tool", "content": "one", "tool_call_id": "c1"},
        {"role": "tool", "content": "two", "tool_call_id": "c2"},
    ]

    def called(number: int, result: str) -> str:
        said = f'<|start|>assistant to=functions.f<|channel|>commentary json<|message|>{{"a": {number}}}<|call|>'
        return f'{said}<|start|>functions to=assistant<|channel|>commentary<|message|>"{result}"<|end|>'

    thought = "<|start|>assistant<|channel|>analysis<|message|>Hm.\n\nI look.<|end|>"
    expected = "<|start|>user<|message|>Hi.<|end|>" + thought + called(1, "one") + called(2, "two")
    assert rendered(echo, messages) == expected + NEXT
    del messages[1]["reasoning_content"], messages[1]["tool_calls"][1], messages[3]
    assert rendered(echo, messages) == expected.replace("Hm.\n\n", "").replace(called(2, "two"), "") + NEXT
    assert rendered(echo, messages[:1], reasoning_effort="high").endswith("Reasoning: high" + NEXT)


# ---- a real model -----------------------------------------------------------------------------------

TIGHT = {
    "type": "object",
    "properties": {"unit": {"enum": ["C", "F"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["unit", "days"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A random gpt-oss with MXFP4 experts. It thinks for ever, so requests give it a budget."""
    directory, tokenizer = tmp_path_factory.mktemp("real"), harmony(make_tokenizer())
    sizes = {
        "vocab_size": 280,
        "num_hidden_layers": 2,
        "max_position_embeddings": 1024,
        "eos_token_id": tokenizer.eos_token_id,
    }
    make_checkpoint(directory, "gpt_oss", tokenizer=False, **sizes)
    (directory / "generation_config.json").unlink()  # where <|end|> ends an answer
    tokenizer.save_pretrained(directory)
    command = ["unisono", "serve", str(directory), "--port", "0", "--device", "cpu"]
    command += ["--max-num-seqs", "4", "--served-model-name", "fake", "--enforce-eager"]
    command += ["--speculative-method", "ngram"]
    server = Server(command, directory / "log", directory)
    yield server.wait_ready()
    server.kill()


def test_grammars_begin_with_a_head(real: Server) -> None:
    extra: dict[str, Any] = {"thinking_token_budget": 6, "chat_template_kwargs": {"opens": True}}
    options: dict[str, Any] = {"max_tokens": 200, "temperature": 1, "seed": 3, "extra_body": extra}
    strict = [tool("weather", TIGHT, strict=True)]
    for choice in ("required", {"type": "function", "function": {"name": "weather"}}):
        given = chat(real, "Oslo?", tools=strict, tool_choice=choice, parallel_tool_calls=False, **options).choices[0]
        assert given.finish_reason == "tool_calls"
        (call,) = given.message.tool_calls
        arguments = json.loads(call.function.arguments)
        assert (arguments["unit"] in "CF", arguments["days"] in range(1, 10)) == (True, True)
        assert given.message.reasoning_content
        assert given.message.content is None
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": TIGHT}}
    given = chat(real, "Oslo?", response_format=form, **options).choices[0]
    assert json.loads(given.message.content).keys() == {"unit", "days"}
    assert given.finish_reason == "stop"
    assert given.message.reasoning_content
    options["extra_body"] = {**extra, "separate_reasoning": False}
    raw = chat(real, "Oslo?", response_format=form, **options).choices[0].message.content
    assert f"<|end|>{NEXT}<|channel|>final<|message|>{{" in "".join(raw.split())
    del options["extra_body"]  # the answer begins with a thought that never ends, or with the form's head
    started = chat(real, "Oslo?", response_format=form, **options).choices[0].message
    assert not started.content or json.loads(started.content).keys() == {"unit", "days"}
