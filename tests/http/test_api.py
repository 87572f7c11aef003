"""The OpenAI API from outside: the openai package and raw HTTP against a server process with a fake engine.

The fake engine repeats the prompt, so every expected text is known.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.http.conftest import Server
from tests.http.fake_engine import VOCAB_SIZE
from tests.http.tokenizers_ import byte_level

HELLO = "Hello wörld 🙂"
TOKENIZER = byte_level()


def count(text: str) -> int:
    return len(TOKENIZER.encode(text))


def events(server: Server, path: str, **body: Any) -> list[dict[str, Any]]:
    """The events of a stream; checks the framing of each."""
    with server.http.stream("POST", path, json={"stream": True, **body}) as response:
        assert response.status_code == 200
        assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
        text = response.read().decode()
    frames = text.split("\n\n")
    assert frames.pop() == ""
    assert all(frame.startswith("data: ") for frame in frames)
    assert frames.pop() == "data: [DONE]"
    return [json.loads(frame.removeprefix("data: ")) for frame in frames]


def test_completion(server: Server) -> None:
    answer = server.openai.completions.create(model="fake", prompt=HELLO, max_tokens=2 * count(HELLO))
    assert answer.choices[0].text == HELLO * 2
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == count(HELLO)
    assert answer.usage.completion_tokens == 2 * count(HELLO)
    assert answer.usage.total_tokens == 3 * count(HELLO)
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == count(HELLO) // 2
    assert (answer.object, answer.model, answer.id[:5]) == ("text_completion", "fake", "cmpl-")
    assert answer.system_fingerprint is not None
    assert answer.system_fingerprint.startswith("fp_")


def test_completion_without_max_tokens_is_sixteen(server: Server) -> None:
    assert server.openai.completions.create(model="fake", prompt="ab").usage.completion_tokens == 16


def test_completion_stream_is_the_completion(server: Server) -> None:
    """Characters come whole, reasons once, usage when asked for."""
    stream = list(server.openai.completions.create(model="fake", prompt=HELLO, max_tokens=40, stream=True))
    texts = [chunk.choices[0].text for chunk in stream]
    assert "".join(texts) == server.openai.completions.create(model="fake", prompt=HELLO, max_tokens=40).choices[0].text
    assert any("🙂" in text for text in texts)
    assert not any("\ufffd" in text for text in texts)
    assert [chunk.choices[0].finish_reason for chunk in stream[-2:]] == [None, "length"]
    assert len({chunk.id for chunk in stream}) == 1


def test_every_form_of_prompt(server: Server) -> None:
    ids = TOKENIZER.encode(HELLO)
    for prompt, texts in [
        (HELLO, [HELLO]),
        (ids, [HELLO]),
        ([HELLO, "x" * len(ids)], [HELLO, "x" * len(ids)]),
        ([ids, ids[:3]], [HELLO, TOKENIZER.decode((ids[:3] * 9)[: len(ids)])]),
    ]:
        answer = server.openai.completions.create(model="fake", prompt=prompt, max_tokens=len(ids))
        assert [choice.text for choice in answer.choices] == texts
        assert [choice.index for choice in answer.choices] == list(range(len(texts)))


def test_streams_of_several_prompts_keep_apart(server: Server) -> None:
    prompts = [f"prompt {i} " for i in range(5)]
    texts = [""] * 5
    finished = []
    request = {"prompt": prompts, "max_tokens": 30, "stream_options": {"include_usage": True}}
    *chunks, last = events(server, "/v1/completions", **request)
    for chunk in chunks:
        [choice] = chunk["choices"]
        texts[choice["index"]] += choice["text"]
        finished += [choice["index"]] if choice["finish_reason"] else []
    assert sorted(finished) == list(range(5))
    assert [text.startswith(prompt) for text, prompt in zip(texts, prompts, strict=True)] == [True] * 5
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 150
    assert last["usage"]["prompt_tokens"] == sum(map(count, prompts))


def test_chat(server: Server) -> None:
    """The engine repeats the rendered prompt up to its first <|im_end|>, which is the model's EOS."""
    messages = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": "hi"}]
    answer = server.openai.chat.completions.create(model="fake", messages=messages)
    choice = answer.choices[0]
    assert choice.message.content == "system\nBe brief."
    assert (choice.message.role, choice.finish_reason, answer.object) == ("assistant", "stop", "chat.completion")
    rendered = TOKENIZER.encode("<|im_start|>system\nBe brief.<|im_end|>")
    assert answer.usage is not None
    assert answer.usage.completion_tokens == len(rendered)


def test_chat_stream(server: Server) -> None:
    messages = [{"role": "user", "content": [{"type": "text", "text": "äö"}, {"type": "text", "text": "ü"}]}]
    chunks = events(server, "/v1/chat/completions", messages=messages, stream_options={"include_usage": True})
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert "".join(c["choices"][0]["delta"].get("content", "") for c in chunks[:-1]) == "user\näö\nü"
    assert chunks[-2]["choices"][0] | {"logprobs": None} == {
        "index": 0, "delta": {}, "finish_reason": "stop", "stop_reason": None, "logprobs": None,
    }  # fmt: skip
    assert [chunk["usage"] for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["total_tokens"] > 0
    plain = events(server, "/v1/chat/completions", messages=messages)
    assert all("usage" not in chunk for chunk in plain)
    continuous = {"include_usage": True, "continuous_usage_stats": True}
    counts = [
        chunk["usage"]["completion_tokens"]
        for chunk in events(server, "/v1/chat/completions", messages=messages, stream_options=continuous)
    ]
    assert counts == sorted(counts)
    assert 0 < counts[0] < counts[-1]


def test_chat_through_openais_own_streaming(server: Server) -> None:
    messages = [{"role": "user", "content": "hi"}]
    stream = server.openai.chat.completions.create(model="alias", messages=messages, stream=True)
    chunks = list(stream)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "user\nhi"
    assert {chunk.model for chunk in chunks} == {"alias"}


def test_a_returned_assistant_message_is_accepted(server: Server) -> None:
    """What openai's model_dump() makes of an answer, null fields and all, may come back as history."""
    messages: list[Any] = [{"role": "user", "content": "hi"}]
    answer = server.openai.chat.completions.create(model="fake", messages=messages)
    messages += [answer.choices[0].message.model_dump(), {"role": "user", "content": "and?"}]
    server.openai.chat.completions.create(model="fake", messages=messages)


def test_template_options(server: Server) -> None:
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    body = {"messages": messages, "max_tokens": 200, "ignore_eos": True, "skip_special_tokens": False}

    def rendered(**extra: Any) -> str:
        answer = server.http.post("/v1/chat/completions", json=body | extra).json()
        return answer["choices"][0]["message"]["content"]

    turns = "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\nb"
    assert rendered().startswith(turns + "<|im_end|>\n<|im_start|>assistant\n<|im_start|>user")
    assert rendered(add_generation_prompt=False).startswith(turns + "<|im_end|>\n<|im_start|>user")
    assert rendered(continue_final_message=True).startswith(turns + "<|im_start|>user")
    opened = turns + "<|im_end|>\n<|im_start|>assistant\nWell<|im_start|>"
    assert rendered(chat_template_kwargs={"opening": "Well"}).startswith(opened)


def test_max_tokens_absent_goes_to_the_end_of_the_context(server: Server) -> None:
    messages = [{"role": "user", "content": "hi"}]
    answer = server.openai.chat.completions.create(model="fake", messages=messages, extra_body={"ignore_eos": True})
    assert answer.usage is not None
    assert answer.usage.total_tokens == 512
    assert answer.choices[0].finish_reason == "length"


@pytest.mark.parametrize("stream", [False, True])
def test_stop_strings_end_text_and_count(server: Server, stream: bool) -> None:
    body = {"prompt": HELLO, "max_tokens": 60, "stop": ["zzz", "d 🙂H"], "stream": stream}
    if stream:
        chunks = events(server, "/v1/completions", **body, stream_options={"include_usage": True})
        text = "".join(chunk["choices"][0]["text"] for chunk in chunks[:-1])
        last, usage = chunks[-2]["choices"][0], chunks[-1]["usage"]
    else:
        answer = server.http.post("/v1/completions", json=body).json()
        last, usage = answer["choices"][0], answer["usage"]
        text = last["text"]
    assert text == "Hello wörl"
    assert (last["finish_reason"], last["stop_reason"]) == ("stop", "d 🙂H")
    assert usage["completion_tokens"] == count(HELLO) + 1


def test_stop_token_ids_and_token_ids_back(server: Server) -> None:
    ids = TOKENIZER.encode("abc")
    body = {"prompt": ids, "stop_token_ids": [ids[2]], "return_token_ids": True}
    choice = server.http.post("/v1/completions", json=body).json()["choices"][0]
    assert (choice["text"], choice["token_ids"], choice["finish_reason"]) == ("ab", ids, "stop")
    chunks = events(server, "/v1/completions", **body)
    assert [i for chunk in chunks for i in chunk["choices"][0].get("token_ids", [])] == ids


def test_seeds_are_reported(server: Server) -> None:
    def seed(**body: Any) -> int:
        answer = server.http.post("/v1/completions", json={"prompt": "a", "max_tokens": 1, **body}).json()
        return answer["choices"][0]["seed"]

    assert seed(seed=2**63 - 1) == 2**63 - 1
    chosen = {seed() for _ in range(8)}
    assert len(chosen) == 8
    assert all(0 <= value < 2**53 for value in chosen)
    first, *rest = events(server, "/v1/completions", prompt="a", max_tokens=2, seed=5)
    assert first["choices"][0]["seed"] == 5
    assert all("seed" not in chunk["choices"][0] for chunk in rest)


def test_neutral_values_and_labels_are_accepted(server: Server) -> None:
    server.openai.chat.completions.create(
        model="fake", messages=[{"role": "user", "content": "a"}], n=1, logprobs=False, presence_penalty=0,
        frequency_penalty=0.0, logit_bias={}, tools=[], tool_choice="auto", response_format={"type": "text"},
        user="me", metadata={"a": "b"}, store=True,
    )  # fmt: skip
    server.openai.completions.create(model="fake", prompt="a", best_of=1, echo=False, suffix=None, logprobs=None)


def test_models_and_info(server: Server) -> None:
    models = server.openai.models.list().data
    assert [model.id for model in models] == ["fake", "alias"]
    assert models[0].model_dump()["max_model_len"] == 512
    info = server.http.get("/server_info").json()
    assert info["server"]["model"]["generation_defaults"] == {"top_k": 40}
    assert info["server"]["model"]["eos_token_ids"] == [2]
    assert info["engine"]["vocab_size"] == VOCAB_SIZE
    assert server.http.get("/health").json() == {"status": "ok"}


def test_metrics(server: Server) -> None:
    def value(name: str) -> float:
        lines = server.http.get("/metrics").text.splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name))

    seconds = ("time_to_first_token", "inter_token_latency", "e2e_request_latency")
    names = [f"unisono:{name}" for name in (*(f"{s}_seconds_count" for s in seconds), "generation_tokens_total")]
    before = [value(name) for name in names]
    server.openai.completions.create(model="fake", prompt="ab", max_tokens=7)
    first, between, request, tokens = (value(name) - old for name, old in zip(names, before, strict=True))
    assert (first, request, tokens) == (1, 1, 7)
    assert 0 < between <= 6  # tokens that come together with the first wait for nothing
    assert (
        value('unisono:passes_total{engine="0",kind="eager",model_name="fake",program="round",reason="DISABLED"}') > 0
    )
    assert value('unisono:request_success_total{engine="0",finished_reason="length",model_name="fake"}') > 0
    assert value("unisono:num_requests_running") == 0


def test_64_clients_at_once(server: Server) -> None:
    """Each streams its own text; none gets a neighbour's."""

    def client(i: int) -> bool:
        prompt = f"client {i}: " + "x" * i
        limit = 3 * count(prompt)
        stream = server.openai.completions.create(model="fake", prompt=prompt, max_tokens=limit, stream=True)
        return "".join(chunk.choices[0].text for chunk in stream) == prompt * 3

    with ThreadPoolExecutor(64) as pool:
        assert all(pool.map(client, range(64)))
    assert server.info()["requests"]["running"] == 0


@pytest.mark.skipif(shutil.which("curl") is None, reason="no curl here")
def test_curl(server: Server) -> None:
    command = ["curl", "-sN", f"{server.url}/v1/completions", "-H", "Content-Type: application/json"]
    body = json.dumps({"prompt": "ab", "max_tokens": 4, "stream": True})
    output = subprocess.run([*command, "-d", body], capture_output=True, text=True, timeout=30, check=True).stdout
    assert output.endswith("data: [DONE]\n\n")
    assert 2 <= output.count("data: {") <= 5  # four tokens that may come together, closing
