"""Clients that people use, as their documentation uses them, against ``unisono serve tiny``.

openai, anthropic, llm and pydantic-ai come with the development tools; the others run where they are installed:
``make clients`` installs them, those of Node.js too, in an environment of their own. None of them is told what server
it talks to.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.http.conftest import PLAIN, ROOT, Server, serving

QUESTION = "Lena has 5 boxes with 12 pens each. She gives away 9 pens. How many pens are left?"
ASK: list[Any] = [{"role": "user", "content": QUESTION}]
GREEDY = {"temperature": 0}
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
    flags = ["tiny", "--max-num-seqs", "4", "--max-model-len", "1024"]
    more = ["--max-logprobs", "-1", "--scheduling-policy", "priority", *PLAIN]
    with serving(tmp_path_factory.mktemp("clients"), *flags, *more) as server:
        yield server


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


def test_openai_client_raises_bad_request(client: openai.OpenAI) -> None:
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


def test_salts_are_pairs(client: openai.OpenAI) -> None:
    """cache_salt and extra_key keep prompts apart as a pair, whatever the two spell when they are joined."""
    prompt = "Nobody else knows this one. " * 6
    texts = ["a", "ab", "abc", "bc", "c", '["a", "bc"]', None]
    pairs = [(salt, key) for salt in texts for key in texts if salt in (None, "a", "ab", "abc") or key is None]

    def cached(salt: str | None, key: str | None) -> bool:
        extra = {name: value for name, value in (("cache_salt", salt), ("extra_key", key)) if value is not None}
        usage = complete(client, prompt=prompt, max_tokens=1, **extra).usage
        return bool(usage.prompt_tokens_details.cached_tokens)

    for pair in pairs:
        assert [cached(*pair), cached(*pair)] == [False, True], pair


def test_grammars(client: openai.OpenAI) -> None:
    assert complete(client, regex="[ab]{6}").choices[0].text.strip("ab") == ""
    assert complete(client, ebnf='root ::= "yes" | "no"').choices[0].text in ("yes", "no")
    assert complete(client, guided_grammar='?start: "yes" | "no"  // Lark').choices[0].text in ("yes", "no")
    with pytest.raises(openai.BadRequestError, match='unknown name: "x"'):
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
    asked: Any = {"model": "tiny", "max_tokens": 16, "messages": ASK, "system": "Be brief.", "extra_body": GREEDY}
    answer = client.messages.create(**asked)
    assert answer.content[0].text
    with client.messages.stream(
        model="tiny", max_tokens=16, messages=ASK, system="Be brief.", extra_body=GREEDY
    ) as stream:
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
    default = langchain.ChatOpenAI(model="tiny", base_url=f"{tiny.url}/v1", api_key="none", max_retries=0)
    for options in ({}, {"method": "function_calling"}):  # no limit of tokens: the answer ends by itself
        assert isinstance(default.with_structured_output(Pens, **options).invoke(QUESTION), Pens), options


def test_instructor(tiny: Server) -> None:
    instructor = pytest.importorskip("instructor")
    from pydantic import BaseModel, Field

    class Pens(BaseModel):
        pens: int = Field(ge=0, le=999)

    for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA):
        client = instructor.from_openai(tiny.openai, mode=mode)
        options: dict[str, Any] = {"model": "tiny", "messages": ASK, "response_model": Pens, "max_retries": 0}
        assert isinstance(client.chat.completions.create(**options, max_tokens=150, temperature=0), Pens)
    default = instructor.from_openai(tiny.openai)  # no limit of tokens: a tool that is named is called once
    assert isinstance(default.chat.completions.create(model="tiny", messages=ASK, response_model=Pens), Pens)


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


def test_llama_index(tiny: Server) -> None:
    like = pytest.importorskip("llama_index.llms.openai_like")
    from llama_index.core.llms import ChatMessage
    from llama_index.core.tools import FunctionTool
    from pydantic import BaseModel, Field

    class Pens(BaseModel):
        pens: int = Field(ge=0, le=999)

    def count_pens(some: bool) -> int:
        """Count."""
        return int(some)

    options = {"model": "tiny", "api_base": f"{tiny.url}/v1", "api_key": "none", "max_retries": 0, "temperature": 0}
    model = like.OpenAILike(**options, is_chat_model=True, is_function_calling_model=True, max_tokens=100)
    text = model.chat([ChatMessage(role="user", content=QUESTION)]).message.content
    assert text
    assert list(model.stream_chat([ChatMessage(role="user", content=QUESTION)]))[-1].message.content == text
    assert isinstance(model.as_structured_llm(Pens).complete(QUESTION).raw, Pens)
    tool = FunctionTool.from_defaults(count_pens)
    answer = model.chat_with_tools([tool], user_msg=QUESTION, tool_required=True, allow_parallel_tool_calls=False)
    assert model.get_tool_calls_from_response(answer)[0].tool_name == "count_pens"
    assert model.chat_with_tools([tool], user_msg=QUESTION).message.content is not None


def test_dspy(tiny: Server) -> None:
    dspy = pytest.importorskip("dspy")
    options = {"api_base": f"{tiny.url}/v1", "api_key": "none", "cache": False, "num_retries": 0, "max_tokens": 20}
    assert dspy.LM("openai/tiny", **options)(QUESTION)[0]
    assert dspy.LM("openai/tiny", model_type="text", **options)(QUESTION)[0]


def test_outlines(tiny: Server) -> None:
    outlines = pytest.importorskip("outlines")
    from typing import Literal

    from pydantic import BaseModel, Field

    class Pens(BaseModel):
        pens: int = Field(ge=0, le=999)

    for make in (outlines.from_openai, outlines.from_vllm, outlines.from_sglang):
        model = make(tiny.openai, "tiny")
        assert model(QUESTION, max_tokens=5)
        Pens.model_validate_json(model(QUESTION, Pens, max_tokens=80))
    model = outlines.from_vllm(tiny.openai, "tiny")
    assert model(QUESTION, Literal["yes", "no"], max_tokens=20) in ("yes", "no")
    assert model(QUESTION, outlines.types.Regex("[ab]{3}"), max_tokens=20).strip("ab") == ""
    assert model(QUESTION, outlines.types.CFG('?start: "yes" | "no"'), max_tokens=20) in ("yes", "no")
    assert "".join(model.stream(QUESTION, max_tokens=5))


def run(*command: str, **environment: str) -> str:
    """What a program prints; it must end well."""
    done = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


def test_llm(tiny: Server, tmp_path: Path) -> None:
    pytest.importorskip("llm")
    model = {"model_id": "here", "model_name": "tiny", "api_base": f"{tiny.url}/v1", "supports_schema": True}
    (tmp_path / "extra-openai-models.yaml").write_text(json.dumps([model]))  # JSON is YAML
    ask = [sys.executable, "-m", "llm", "-m", "here", "-o", "temperature", "0", "-o", "max_tokens", "60"]
    known = {"LLM_USER_PATH": str(tmp_path), "OPENAI_API_KEY": "none"}
    assert run(*ask, QUESTION, **known) == run(*ask, "--no-stream", QUESTION, **known) != "\n"
    assert json.loads(run(*ask, "--schema", "some bool", QUESTION, **known)).keys() == {"some"}


TASK = {
    "test_split": "test",
    "dataset_path": "json",
    "doc_to_text": "{{q}}",
    "doc_to_target": "{{a}}",
}
GENERATE = {
    "output_type": "generate_until",
    "generation_kwargs": {"until": ["\n"], "max_gen_toks": 5, "do_sample": False},
    "metric_list": [{"metric": "exact_match"}],
}
LIKELIHOOD = {"output_type": "loglikelihood", "metric_list": [{"metric": "perplexity"}]}


@pytest.mark.parametrize(("kind", "route"), [("local-completions", "completions"), ("local-chat-completions", "chat")])
def test_lm_eval(tiny: Server, tmp_path: Path, kind: str, route: str) -> None:
    pytest.importorskip("lm_eval")
    (tmp_path / "data.jsonl").write_text('{"q": "1 + 1 =", "a": " 2"}\n{"q": "2 + 2 =", "a": " 4"}\n')
    own = {**TASK, "dataset_kwargs": {"data_files": {"test": str(tmp_path / "data.jsonl")}}}
    chat = route == "chat"
    for name, task in {"writes": GENERATE, **({} if chat else {"likely": LIKELIHOOD})}.items():
        (tmp_path / f"{name}.yaml").write_text(json.dumps({"task": name, **own, **task}))
    url = f"{tiny.url}/v1/chat/completions" if chat else f"{tiny.url}/v1/completions"
    tokenizer = "" if chat else f",tokenizer={ROOT / 'unisono' / 'bundled' / 'tiny'}"
    command = [sys.executable, "-m", "lm_eval", "run", "--model", kind, "--include_path", str(tmp_path)]
    command += ["--model_args", f"model=tiny,base_url={url},max_retries=1{tokenizer}"]
    command += ["--tasks", "writes" if chat else "writes,likely", *(["--apply_chat_template"] if chat else [])]
    assert "exact_match" in run(*command, OPENAI_API_KEY="none", HF_HOME=str(tmp_path))


def test_node(tiny: Server) -> None:
    """openai's and Vercel's packages, by ``clients.mjs``."""
    packages = ROOT / ".venv-clients" / "node"
    node = shutil.which("node")
    if node is None or not (packages / "node_modules").is_dir():
        pytest.skip("make clients installs the packages of Node.js")
    script = shutil.copy(Path(__file__).with_name("clients.mjs"), packages)
    assert run(node, str(script), f"{tiny.url}/v1").splitlines()[-1] == "all is well"
