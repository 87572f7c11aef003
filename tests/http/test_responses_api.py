"""OpenAI's Responses API through the openai package: the fake engine repeats the rendered prompt up to its EOS."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.http.conftest import Server, Start, in_one_try, named_events, servers, until

PATH = "/v1/responses"


@pytest.fixture(scope="module")
def slow(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with servers(tmp_path_factory) as start:
        yield start(model_dir, step_seconds=0.05, prefill_seconds=0.2)


def events(server: Server, **body: Any) -> list[dict[str, Any]]:
    """The events of a stream."""
    return named_events(server.http.post(PATH, json={"stream": True, **body}).text)


def test_a_response(server: Server) -> None:
    response = server.openai.responses.create(model="fake", input="hi", metadata={"a": "b"})
    assert response.output_text == "user\nhi"
    assert (response.status, response.object, response.model) == ("completed", "response", "fake")
    assert response.id.startswith("resp_")
    assert [item.type for item in response.output] == ["message"]
    assert response.usage is not None
    assert response.usage.total_tokens == response.usage.input_tokens + response.usage.output_tokens > 4
    assert response.metadata == {"a": "b"}
    assert response.completed_at is not None
    assert response.completed_at >= response.created_at


def test_instructions_and_every_item(server: Server) -> None:
    """Rendered as a conversation of roles; ignore_eos (a field of the chat body) shows the whole of it."""
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "c", "annotations": []}]},
        {"role": "developer", "content": "d"},
        {"role": "user", "content": "e"},
    ]
    body = {"model": "fake", "input": items, "instructions": "be brief", "max_output_tokens": 120}
    extra = {"ignore_eos": True, "skip_special_tokens": False}
    text = server.openai.responses.create(**body, extra_body=extra).output_text  # type: ignore[call-overload]
    turns = [("system", "be brief"), ("user", "a\nb"), ("assistant", "c"), ("system", "d"), ("user", "e")]
    rendered = "".join(f"<|im_start|>{role}\n{content}<|im_end|>\n" for role, content in turns)
    assert text.startswith(rendered + "<|im_start|>assistant\n"[: len(text) - len(rendered)])


def test_the_stream_leads_to_the_response(server: Server) -> None:
    found = events(server, input="hi 🙂", seed=3)
    kinds = [event["type"].removeprefix("response.") for event in found]
    deltas = kinds.count("output_text.delta")
    assert kinds == [
        "created", "in_progress", "output_item.added", "content_part.added", *["output_text.delta"] * deltas,
        "output_text.done", "content_part.done", "output_item.done", "completed",
    ]  # fmt: skip
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    text = "".join(event["delta"] for event in found if event["type"].endswith("text.delta"))
    assert text == "user\nhi 🙂" == found[-4]["text"]
    whole = server.http.post(PATH, json={"input": "hi 🙂", "seed": 3}).json()
    last = found[-1]["response"]
    different = {"id", "created_at", "completed_at", "output"}
    assert {k: v for k, v in whole.items() if k not in different} == {
        k: v for k, v in last.items() if k not in different
    }
    assert [item["content"] for item in whole["output"]] == [item["content"] for item in last["output"]]
    assert found[0]["response"]["output"] == []
    assert len({event["item_id"] for event in found if "item_id" in event} | {last["output"][0]["id"]}) == 1


def test_through_openais_stream_helper(server: Server) -> None:
    with server.openai.responses.stream(model="fake", input="hello") as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_response()
    assert final.output_text == "user\nhello"
    assert {"response.created", "response.output_text.delta", "response.completed"} <= kinds


def test_stream_opens_with_the_first_token(slow: Server) -> None:
    begin = time.monotonic()
    with slow.http.stream("POST", PATH, json={"input": "hi", "stream": True, "max_output_tokens": 2}) as response:
        next(response.iter_raw())
        assert time.monotonic() - begin >= 0.2


def test_an_answer_cut_short_is_incomplete(server: Server) -> None:
    response = server.openai.responses.create(model="fake", input="hello", max_output_tokens=3)
    assert response.status == "incomplete"
    assert response.incomplete_details is not None
    assert response.incomplete_details.reason == "max_output_tokens"
    found = events(server, input="hello", max_output_tokens=3)
    assert found[-1]["type"] == "response.incomplete"
    assert found[-1]["response"]["output"][0]["status"] == "incomplete"


def test_logprobs(server: Server) -> None:
    include: Any = ["message.output_text.logprobs"]
    response = server.openai.responses.create(model="fake", input="hi", include=include, top_logprobs=2)
    part: Any = response.output[0].content[0]  # type: ignore[union-attr, index]
    assert "".join(one.token for one in part.logprobs).startswith("<|im_start|>user\nhi")
    assert all(len(one.top_logprobs) == 2 and one.logprob == -0.25 for one in part.logprobs)


def test_previous_response_id_continues_the_conversation(server: Server) -> None:
    def shown(**body: Any) -> Any:
        extra = {"ignore_eos": True, "skip_special_tokens": False}
        return server.openai.responses.create(model="fake", extra_body=extra, max_output_tokens=90, **body)

    first = server.openai.responses.create(model="fake", input="one", instructions="not carried over")
    second = shown(input="two", previous_response_id=first.id)
    rendered = "<|im_start|>user\none<|im_end|>\n<|im_start|>assistant\nsystem\nnot carried over<|im_end|>\n"
    assert second.output_text.startswith(rendered + "<|im_start|>user\ntwo<|im_end|>\n")
    assert second.previous_response_id == first.id
    listed = server.openai.responses.input_items.list(second.id, order="asc", limit=2)
    assert [item.type for item in listed.data] == ["message", "message"]
    assert listed.has_more is True
    reference = {"type": "item_reference", "id": first.output[0].id}
    third = shown(input=[{"role": "user", "content": "a"}, reference, {"role": "user", "content": "three"}])
    assert (
        "<|im_end|>\n<|im_start|>assistant\nsystem\nnot carried over<|im_end|>\n<|im_start|>user" in third.output_text
    )


def test_stored_responses_are_read_and_deleted(server: Server) -> None:
    client = server.openai.responses
    stored = client.create(model="fake", input="hi")
    assert client.retrieve(stored.id) == stored
    client.delete(stored.id)
    with pytest.raises(openai.NotFoundError, match=stored.id):
        client.retrieve(stored.id)
    unstored = client.create(model="fake", input="hi", store=False)
    assert unstored.store is False  # type: ignore[attr-defined]
    for call in (client.retrieve, client.delete, client.cancel):
        with pytest.raises(openai.NotFoundError, match="store=false"):
            call(unstored.id)
    with pytest.raises(openai.NotFoundError, match="resp_none"):
        client.create(model="fake", input="hi", previous_response_id="resp_none")


def test_a_background_response_is_polled_and_cancelled(slow: Server) -> None:
    client = slow.openai.responses
    body: Any = {"model": "fake", "input": "hi", "background": True, "extra_body": {"ignore_eos": True}}
    short = client.create(**body, max_output_tokens=3)
    assert short.status == "queued"
    with pytest.raises(openai.ConflictError, match="wait for its end"):
        client.create(model="fake", input="and?", previous_response_id=short.id)
    until(lambda: client.retrieve(short.id).status not in ("queued", "in_progress"))
    assert client.retrieve(short.id).status == "incomplete"
    cancelled: list[Any] = []

    def check() -> None:
        before = slow.info()["generated"]
        long = client.create(**body, max_output_tokens=400)
        until(lambda: slow.info()["generated"] >= before + 10)  # the first have no text
        cancelled.append(client.cancel(long.id))
        assert cancelled[-1].status == "cancelled"
        assert cancelled[-1].output_text

    in_one_try(check)  # the server may read what the engine made a moment later
    assert client.cancel(cancelled[-1].id).status == "cancelled"
    assert slow.info()["requests"]["running"] == 0
    assert slow.http.get("/load").json() == {"server_load": 0}


def test_a_stream_whose_client_leaves_is_cancelled(slow: Server) -> None:
    body = {"input": "hi", "stream": True, "ignore_eos": True, "max_output_tokens": 400}
    with slow.http.stream("POST", PATH, json=body) as response:
        first = json.loads(next(line for line in response.iter_lines() if line.startswith("data: "))[6:])
    until(lambda: slow.openai.responses.retrieve(first["response"]["id"]).status != "in_progress")
    assert slow.openai.responses.retrieve(first["response"]["id"]).status == "cancelled"


@pytest.mark.parametrize(
    ("body", "status", "param", "says"),
    [
        ({}, 400, "input", "input is missing"),
        ({"input": []}, 400, "input", "at least one item"),
        ({"input": 3}, 400, "input", "input=3"),
        ({"input": [3]}, 400, "input[0]", "object"),
        ({"input": [{"type": "wibble_call"}]}, 400, "input[0].type", "function_call_output"),
        ({"input": [{"role": "robot", "content": "a"}]}, 400, "input[0].role", '"robot"'),
        ({"input": ["a", {"role": "user"}][1:]}, 400, "input[0].content", "null"),
        ({"input": [{"role": "user", "content": [{"type": "input_file"}]}]}, 400, "input[0].content[0]", "input_text"),
        ({"input": [{"type": "item_reference", "id": "msg_9"}]}, 400, "input[0].id", "no stored item"),
        ({"input": "a", "max_output_tokens": 0}, 400, "max_output_tokens", "max_output_tokens=0"),
        ({"input": "a", "max_output_tokens": 9999}, 400, "max_output_tokens", "max_output_tokens is 9999"),
        ({"input": "a", "temperature": 101}, 400, "temperature", "temperature=101"),
        ({"input": "a", "temperature": "x"}, 400, "temperature", "a number"),
        ({"input": "x" * 600}, 400, "input", "Shorten"),
        ({"input": "a", "truncation": "left"}, 400, "truncation", "auto"),
        ({"input": "x" * 600, "truncation": "auto"}, 400, "input", "Shorten"),
        ({"input": "a", "tools": [{"type": "web_search"}]}, 400, "tools[0].type", "web_search"),
        ({"input": "a", "tool_choice": "required"}, 400, "tool_choice", "needs tools"),
        ({"input": "a", "include": ["x"]}, 400, "include", "encrypted"),
        ({"input": "a", "text": {"format": {"type": "yaml"}}}, 400, "text.format", "yaml"),
        ({"input": "a", "reasoning": {"summary": "detailed"}}, 400, "reasoning.summary", "auto"),
        ({"input": "a", "background": True, "stream": True}, 400, "background", "poll"),
        ({"input": "a", "background": True, "store": False}, 400, "background", "store"),
        ({"input": "a", "messages": []}, 400, "messages", "use input"),
        ({"input": "a", "temprature": 1}, 400, "temprature", "not a known field"),
        ({"input": "a", "conversation": "c"}, 404, "conversation", "no conversation"),
        ({"input": "a", "conversation": {"id": 3}}, 400, "conversation", "conv_"),
        ({"input": "a", "conversation": "c", "previous_response_id": "r"}, 404, "previous_response_id", "no response"),
        ({"input": "a", "model": "gpt"}, 404, "model", "fake, alias"),
    ],
)  # fmt: skip
def test_errors_name_the_fields_of_this_body(
    server: Server, body: dict[str, Any], status: int, param: str, says: str
) -> None:
    response = server.http.post(PATH, json=body)
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert error["param"] == param, error
    assert says in error["message"]
    assert "messages" in body or "messages" not in error["message"].replace("messages[", "[") or says == "Shorten"


def test_a_failure_in_the_stream_is_response_failed(start: Start, model_dir: Path) -> None:
    server = start(model_dir, step_seconds=0.05)
    found = []
    with server.http.stream("POST", PATH, json={"input": "hi", "stream": True, "ignore_eos": True}) as response:
        for line in response.iter_lines():
            if line.startswith("data: "):
                found.append(json.loads(line[6:]))
                if len(found) == 6:
                    os.kill(server.info()["pid"], signal.SIGKILL)
    assert found[-1]["type"] == "response.failed"
    assert "SIGKILL" in found[-1]["response"]["error"]["message"]
    assert found[-1]["response"]["status"] == "failed"
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    stored = server.openai.responses.retrieve(found[0]["response"]["id"])
    assert (stored.status, stored.output_text != "") == ("failed", True)


def test_thinking_is_an_item_of_its_own(model_dir: Path, start: Start) -> None:
    server = start(model_dir, reasoning_parser="qwen3")
    body = {"input": "step\n</think>\n\nTwo.", "chat_template_kwargs": {"opening": "<think>\n"}}
    whole = server.http.post(PATH, json=body).json()
    assert [item["type"] for item in whole["output"]] == ["reasoning", "message"]
    assert whole["output"][0]["content"] == [{"type": "reasoning_text", "text": "user\nstep"}]
    assert whole["output"][1]["content"][0]["text"] == "Two."
    assert 0 < whole["usage"]["output_tokens_details"]["reasoning_tokens"] < whole["usage"]["output_tokens"]
    found = events(server, **body)
    thought = "".join(e["delta"] for e in found if e["type"] == "response.reasoning_text.delta")
    assert thought == "user\nstep"
    kinds = [e["type"].removeprefix("response.") for e in found if "delta" not in e["type"]]
    assert kinds == [
        "created", "in_progress",
        "output_item.added", "content_part.added", "reasoning_text.done", "content_part.done", "output_item.done",
        "output_item.added", "content_part.added", "output_text.done", "content_part.done", "output_item.done",
        "completed",
    ]  # fmt: skip
    assert [e["output_index"] for e in found if e["type"].endswith("item.done")] == [0, 1]
    again = server.openai.responses.create(model="fake", input="and?", previous_response_id=whole["id"])
    assert again.status == "completed"


def test_structured_text(server: Server) -> None:
    form = {"type": "json_schema", "name": "x", "schema": {"type": "object"}, "strict": True}
    response = server.http.post(PATH, json={"input": "hi", "text": {"format": form, "verbosity": None}}).json()
    assert response["text"]["format"] == form
    assert response["status"] == "completed"
    broken = {**form, "schema": 3}
    refused = server.http.post(PATH, json={"input": "hi", "text": {"format": broken}}).json()["error"]
    assert refused["param"] == "text.format"


def test_counting_input_tokens(server: Server) -> None:
    counted = server.http.post(f"{PATH}/input_tokens", json={"input": "hi"}).json()
    made = server.openai.responses.create(model="fake", input="hi")
    assert made.usage is not None
    assert counted == {"object": "response.input_tokens", "input_tokens": made.usage.input_tokens}
