"""Clients that people use, as their documentation uses them, against ``unisono serve tiny``.

openai is always there; the others run where they are installed. None of them is told what server it talks to.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.server.conftest import Server

QUESTION = "Lena has 5 boxes with 12 pens each. She gives away 9 pens. How many pens are left?"
ASK: list[Any] = [{"role": "user", "content": QUESTION}]
SHORT: list[Any] = [{"role": "user", "content": "hi"}]
PENS = {
    "type": "object",
    "properties": {"pens": {"type": "integer", "minimum": 0, "maximum": 999}},
    "required": ["pens"],
    "additionalProperties": False,
}
TOOL: Any = {"type": "function", "function": {"name": "count_pens", "description": "Count.", "parameters": PENS}}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    directory = tmp_path_factory.mktemp("clients")
    command = [
        sys.executable,
        "-m",
        "unisono",
        "serve",
        "tiny",
        "--port",
        "0",
        "--device",
        "cpu",
        "--max-num-seqs",
        "4",
    ]
    command += ["--max-model-len", "1024", "--max-logprobs", "-1", "--scheduling-policy", "priority"]
    server = Server(command, directory / "log", directory)
    yield server.wait_ready()
    server.kill()


@pytest.fixture
def client(tiny: Server) -> openai.OpenAI:
    return tiny.openai


# ---- openai -------------------------------------------------------------------------------------


def test_openai_chats_and_streams(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {"model": "tiny", "messages": ASK, "max_completion_tokens": 24, "temperature": 0}
    whole = client.chat.completions.create(**options, logprobs=True, top_logprobs=2, user="me")
    content = whole.choices[0].message.content
    assert content
    assert whole.choices[0].logprobs is not None
    assert whole.usage is not None
    stream = list(client.chat.completions.create(**options, stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices) == content
    assert stream[-1].usage == whole.usage or stream[-1].usage.completion_tokens == whole.usage.completion_tokens


def test_openai_parses_a_schema(client: openai.OpenAI) -> None:
    from pydantic import BaseModel, Field

    class Pens(BaseModel):
        pens: int = Field(ge=0, le=999)

    answer = client.chat.completions.parse(model="tiny", messages=ASK, response_format=Pens, max_tokens=60, seed=1)
    assert isinstance(answer.choices[0].message.parsed, Pens)


def test_openai_calls_a_tool(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="tiny", messages=ASK, tools=[TOOL], tool_choice="required", parallel_tool_calls=False, max_tokens=150
    )
    [call] = answer.choices[0].message.tool_calls or []
    assert call.function.name == "count_pens"
    assert 0 <= json.loads(call.function.arguments)["pens"] <= 999
    history = [*ASK, answer.choices[0].message, {"role": "tool", "tool_call_id": call.id, "content": "51"}]
    again = client.chat.completions.create(model="tiny", messages=history, tools=[TOOL], max_tokens=8)
    assert again.choices[0].finish_reason


def test_openai_responses(client: openai.OpenAI) -> None:
    answer = client.responses.create(model="tiny", input=QUESTION, max_output_tokens=16, temperature=0)
    assert answer.output_text
    with client.responses.stream(model="tiny", input=QUESTION, max_output_tokens=16, temperature=0) as stream:
        text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
    assert text == answer.output_text


def test_openai_says_what_is_wrong(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="temperature=9999"):
        client.chat.completions.create(model="tiny", messages=SHORT, temperature=9999)
    assert [model.id for model in client.models.list()] == ["tiny"]


# ---- vLLM's and SGLang's fields, for real ---------------------------------------------------------


def complete(client: openai.OpenAI, **extra: Any) -> Any:
    options: dict[str, Any] = {"model": "tiny", "prompt": QUESTION, "max_tokens": 12, "seed": 3, "temperature": 1}
    known = {name: extra.pop(name) for name in ("n", "best_of", "logprobs", "max_tokens", "prompt") if name in extra}
    return client.completions.create(**{**options, **known}, extra_body=extra)


def test_salts_and_priorities(client: openai.OpenAI) -> None:
    """A salt decides what is shared, a priority when it runs; neither decides a byte."""
    prompt = "A prompt of its own. " * 6
    answers = [
        complete(client, prompt=prompt, **extra)
        for extra in ({}, {"cache_salt": "a"}, {"cache_salt": "a", "priority": -2}, {"cache_salt": "b"}, {})
    ]
    cached = [answer.usage.prompt_tokens_details.cached_tokens > 0 for answer in answers]
    assert cached == [False, False, True, False, True]
    assert len({answer.choices[0].text for answer in answers}) == 1


def test_grammars(client: openai.OpenAI) -> None:
    assert complete(client, regex="[ab]{6}").choices[0].text.strip("ab") == ""
    assert complete(client, ebnf='root ::= "yes" | "no"').choices[0].text in ("yes", "no")
    assert complete(client, guided_grammar='?start: "yes" | "no"  // Lark').choices[0].text in ("yes", "no")
    with pytest.raises(openai.BadRequestError, match="'x' is not defined"):
        complete(client, guided_grammar="start: x")
    pens = json.loads(complete(client, json_schema=json.dumps(PENS), max_tokens=60).choices[0].text)
    assert pens.keys() == {"pens"}


def test_best_of_is_the_likeliest(client: openai.OpenAI) -> None:
    every = complete(client, n=4, logprobs=0).choices
    sums = {sum(choice.logprobs.token_logprobs): choice.text for choice in every}
    best = complete(client, n=2, best_of=4).choices
    assert [choice.text for choice in best] == [sums[value] for value in sorted(sums, reverse=True)[:2]]


def test_beams(client: openai.OpenAI) -> None:
    """More likely than what is sampled, and one beam is the greedy text."""
    found = complete(client, use_beam_search=True, n=3, logprobs=0, length_penalty=0.0).choices
    sums = [sum(choice.logprobs.token_logprobs) for choice in found]
    assert sums == sorted(sums, reverse=True)
    sampled = complete(client, logprobs=0).choices[0]
    assert sums[0] >= sum(sampled.logprobs.token_logprobs) - 1e-3
    [one] = complete(client, use_beam_search=True, ignore_eos=True).choices
    greedy = client.completions.create(
        model="tiny", prompt=QUESTION, max_tokens=12, temperature=0, extra_body={"ignore_eos": True}
    )
    assert one.text == greedy.choices[0].text


def test_the_whole_vocabulary(client: openai.OpenAI) -> None:
    extra = {"return_tokens_as_token_ids": True}
    choice = complete(client, logprobs=-1, max_tokens=2, **extra).choices[0]
    assert all(len(position) > 1000 for position in choice.logprobs.top_logprobs)
    few = complete(client, logprobs=0, max_tokens=2, logprob_token_ids=[5, 6], **extra).choices[0]
    assert {"token_id:5", "token_id:6"} <= set(few.logprobs.top_logprobs[0])
    both = choice.logprobs.top_logprobs[0], few.logprobs.top_logprobs[0]
    assert both[0]["token_id:5"] == both[1]["token_id:5"]


def test_unknown_parameters_of_features(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match=r"vllm_xargs.*mood") as failed:
        complete(client, vllm_xargs={"mood": "glad"})
    assert failed.value.param == "vllm_xargs"


# ---- others -------------------------------------------------------------------------------------


def test_anthropic(tiny: Server) -> None:
    anthropic = pytest.importorskip("anthropic")
    client = anthropic.Anthropic(base_url=tiny.url, api_key="none", max_retries=0, timeout=60)
    answer = client.messages.create(model="tiny", max_tokens=16, temperature=0, messages=ASK, system="Be brief.")
    assert answer.content[0].text
    with client.messages.stream(model="tiny", max_tokens=16, temperature=0, messages=ASK, system="Be brief.") as stream:
        assert "".join(stream.text_stream) == answer.content[0].text
    assert client.messages.count_tokens(model="tiny", messages=SHORT).input_tokens > 0


def test_litellm(tiny: Server) -> None:
    litellm = pytest.importorskip("litellm")
    options = {"model": "openai/tiny", "api_base": f"{tiny.url}/v1", "api_key": "none", "messages": ASK}
    answer = litellm.completion(**options, max_tokens=16, temperature=0)
    text = answer.choices[0].message.content
    assert text
    stream = litellm.completion(**options, max_tokens=16, temperature=0, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == text


def test_langchain(tiny: Server) -> None:
    langchain = pytest.importorskip("langchain_openai")
    from pydantic import BaseModel, Field

    class Pens(BaseModel):
        """How many pens."""

        pens: int = Field(ge=0, le=999)

    model = langchain.ChatOpenAI(
        model="tiny", base_url=f"{tiny.url}/v1", api_key="none", max_tokens=150, temperature=0, max_retries=0
    )
    assert model.invoke(QUESTION).content
    assert "".join(chunk.content for chunk in model.stream(QUESTION)) == model.invoke(QUESTION).content
    for method in ("json_schema", "function_calling"):
        assert isinstance(model.with_structured_output(Pens, method=method).invoke(QUESTION), Pens), method


def test_instructor(tiny: Server) -> None:
    instructor = pytest.importorskip("instructor")
    from pydantic import BaseModel, Field

    class Pens(BaseModel):
        pens: int = Field(ge=0, le=999)

    for mode, extra in ((instructor.Mode.TOOLS, {"parallel_tool_calls": False}), (instructor.Mode.JSON_SCHEMA, {})):
        client = instructor.from_openai(tiny.openai, mode=mode)
        answer = client.chat.completions.create(
            model="tiny", messages=ASK, response_model=Pens, max_tokens=150, temperature=0, max_retries=0, **extra
        )
        assert isinstance(answer, Pens)


def test_pydantic_ai(tiny: Server) -> None:
    pytest.importorskip("pydantic_ai")
    from pydantic import BaseModel, Field
    from pydantic_ai import Agent
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    class Pens(BaseModel):
        pens: int = Field(ge=0, le=999)

    model = OpenAIChatModel("tiny", provider=OpenAIProvider(base_url=f"{tiny.url}/v1", api_key="none"))
    settings: Any = {"max_tokens": 100, "temperature": 0, "parallel_tool_calls": False}
    assert Agent(model, model_settings={"max_tokens": 8}).run_sync("hi").output
    answer = Agent(model, output_type=Pens, model_settings=settings).run_sync(QUESTION)
    assert isinstance(answer.output, Pens)
