"""Structured outputs over HTTP: OpenAI's ``response_format`` and vLLM's fields, through the openai package."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import openai
import pytest
import zmq

from tests.http.conftest import Server, serving
from tests.http.fake_engine import FakeConfig, FakeEngine
from unisono.cluster import engine_process, ipc
from unisono.types import EngineRequest, SamplingParams

MESSAGES: list[Any] = [{"role": "user", "content": "Describe a cat as JSON."}]
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer", "minimum": 0, "maximum": 30}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
CAT = {"type": "json_schema", "json_schema": {"name": "cat", "schema": SCHEMA, "strict": True}}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    flags = ["--max-num-seqs", "4", "--max-model-len", "512", "--speculative-method", "ngram", "--enforce-eager"]
    with serving(tmp_path_factory.mktemp("tiny"), *flags, "--served-model-name", "tiny") as server:
        yield server


def chat(server: Server, **options: Any) -> Any:
    given = {"model": "tiny", "messages": MESSAGES, "max_tokens": 200, "temperature": 1, "seed": 5, **options}
    return server.openai.chat.completions.create(**given)


def assert_a_cat(text: str) -> None:
    cat = json.loads(text)
    assert cat.keys() == {"name", "age"}
    assert isinstance(cat["name"], str)
    assert len(cat["name"]) <= 8
    assert type(cat["age"]) is int
    assert 0 <= cat["age"] <= 30


def test_a_json_schema(tiny: Server) -> None:
    answer = chat(tiny, response_format=CAT, n=3, logprobs=True, top_logprobs=2)
    for choice in answer.choices:
        assert choice.finish_reason == "stop"
        assert_a_cat(choice.message.content)
        assert "".join(token.token for token in choice.logprobs.content[:-1]) == choice.message.content
    assert len({choice.message.content for choice in answer.choices}) > 1
    streamed = chat(tiny, response_format=CAT, stream=True)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in streamed)
    assert text == answer.choices[0].message.content, "a stream brings the same bytes"


def test_any_json_object(tiny: Server) -> None:
    (choice,) = chat(tiny, response_format={"type": "json_object"}, max_tokens=400).choices
    if choice.finish_reason == "stop":
        assert isinstance(json.loads(choice.message.content), dict)
    assert choice.message.content.startswith("{")


@pytest.mark.parametrize(
    ("field", "value", "pattern"),
    [
        ("structured_outputs", {"regex": r"[a-f]{3}-\d{2,4}"}, r"[a-f]{3}-\d{2,4}"),
        ("structured_outputs", {"choice": ["yes", "no", "it \"depends\"\n"]}, 'yes|no|it "depends"\n'),
        ("structured_outputs", {"grammar": 'root ::= "(" in ")"\nin ::= "x" | "y"'}, r"\([xy]\)"),
        ("guided_regex", r"\d{1,3} cats", r"\d{1,3} cats"),
        ("guided_choice", ["red", "blue"], "red|blue"),
        ("guided_grammar", 'root ::= [a-c] [x-z]', "[a-c][x-z]"),
    ],
)  # fmt: skip
def test_other_forms_in_completions(tiny: Server, field: str, value: Any, pattern: str) -> None:
    answer = tiny.openai.completions.create(
        model="tiny", prompt="Say:", max_tokens=60, temperature=1, seed=2, extra_body={field: value}
    )
    assert answer.choices[0].finish_reason == "stop"
    assert re.fullmatch(pattern, answer.choices[0].text)


def test_guided_json(tiny: Server) -> None:
    for schema in (SCHEMA, json.dumps(SCHEMA)):
        assert_a_cat(chat(tiny, extra_body={"guided_json": schema}).choices[0].message.content)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"response_format": CAT | {"json_schema": {"name": "x", "schema": {"type": "wibble"}}}}, "wibble"),
        ({"extra_body": {"structured_outputs": {"regex": "(ab"}}}, "is not closed"),
        ({"extra_body": {"structured_outputs": {"grammar": "root ::= foo"}}}, '"foo", which is not defined'),
        ({"extra_body": {"guided_json": {"$ref": "#/nowhere"}}}, "nowhere"),
        ({"extra_body": {"guided_json": "[" * 5000 + "]" * 5000}}, "nested deeper than 64"),
    ],
    ids=["schema", "regex", "EBNF", "reference", "depth"],
)
def test_uncompilable_structured_outputs_return_400(tiny: Server, options: dict[str, Any], says: str) -> None:
    with pytest.raises(openai.BadRequestError, match=re.escape(says)):
        chat(tiny, **options)
    assert_a_cat(chat(tiny, response_format=CAT).choices[0].message.content)


def test_grammar_compilation_does_not_block_other_requests() -> None:
    """It is answered when that is done; what came later runs meanwhile, and what left is forgotten."""
    compiling: dict[str, Future[None]] = {"slow": Future(), "left": Future()}
    with zmq.Context() as context, context.socket(zmq.PAIR) as ours, context.socket(zmq.PAIR) as theirs:
        ours.bind("inproc://loop")
        theirs.connect("inproc://loop")
        engine = FakeEngine(FakeConfig(), lambda stage, share: None)
        engine.prepare = lambda request: compiling.get(request.request_id)  # type: ignore[method-assign]
        loop = threading.Thread(target=engine_process.EngineServer(engine, theirs).run)
        loop.start()
        for name in ("slow", "left", "quick"):
            ours.send(ipc.encode(ipc.Add(EngineRequest(name, [1, 2], SamplingParams(seed=0, max_tokens=2)))))
        ours.send(ipc.encode(ipc.Abort("left")))
        heard = list(messages(ours, until=lambda m: isinstance(m, ipc.Deltas) and m.deltas[-1].finish.value))
        assert [m.request_id for m in heard if isinstance(m, ipc.Accepted)] == ["quick"]
        assert compiling["left"].cancelled(), "nobody waits for it"
        compiling["slow"].set_result(None)
        heard = list(messages(ours, until=lambda m: isinstance(m, ipc.Deltas) and m.deltas[-1].finish.value))
        assert [m.request_id for m in heard if isinstance(m, ipc.Accepted)] == ["slow"]
        assert {delta.request_id for m in heard if isinstance(m, ipc.Deltas) for delta in m.deltas} == {"slow"}
        ours.send(ipc.encode(ipc.Shutdown()))
        loop.join(10)
        assert not loop.is_alive()


def messages(socket: zmq.Socket, until: Callable[[Any], object]) -> Iterator[Any]:
    """What the engine's side says, up to and with the message that ``until`` is true of."""
    while True:
        assert socket.poll(10_000), "nothing more comes"
        yield (message := ipc.decode_from_engine(socket.recv()))
        if until(message):
            return
