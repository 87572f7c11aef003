"""vLLM's and SGLang's fields from outside, against a fake engine that repeats the prompt."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.http import tokenizers_
from tests.http.conftest import Server, Start, servers

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
HI = [{"role": "user", "content": "hi"}]
TOKENIZER = tokenizers_.byte_level()
INFILL = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>")


@pytest.fixture(scope="module")
def open_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server whose flags allow everything, with infill tokens."""
    path = tmp_path_factory.mktemp("infill")
    tokenizer = tokenizers_.byte_level()
    tokenizer.add_special_tokens({"additional_special_tokens": list(INFILL)})
    tokenizer.save_pretrained(path)
    flags = {"max_logprobs": -1, "scheduling_policy": "priority", "trust_request_chat_template": True}
    flags["reasoning_parser"] = "qwen3"
    with servers(tmp_path_factory) as start:
        yield start(path, step_seconds=0.001, **flags)


GATEWAY = {"x_gateway": {"trace": 1}}
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "object"}}}
NESTED: tuple[tuple[str, dict[str, Any], str], ...] = (
    (CHAT, {"messages": HI, **GATEWAY}, "x_gateway"),
    (CHAT, {"messages": [{**HI[0], **GATEWAY}]}, "messages[].x_gateway"),
    (
        CHAT,
        {"messages": [*HI, {"role": "assistant", "tool_calls": [{**CALL, **GATEWAY}]}, *HI]},
        "messages[].tool_calls[].x_gateway",
    ),
    (CHAT, {"messages": HI, "stream": True, "stream_options": GATEWAY}, "stream_options.x_gateway"),
    (CHAT, {"messages": HI, "speculative": {"enabled": False, **GATEWAY}}, "speculative.x_gateway"),
    (TEXT, {"prompt": "abc", "response_format": {**SCHEMA, **GATEWAY}}, "response_format.x_gateway"),
    (TEXT, {"prompt": "abc", **GATEWAY}, "x_gateway"),
    ("/v1/responses", {"input": "abc", **GATEWAY}, "x_gateway"),
    ("/v1/messages", {"messages": HI, "max_tokens": 3, **GATEWAY}, "x_gateway"),
    ("/generate", {"text": "abc", "sampling_params": GATEWAY}, "x_gateway"),
    ("/v1/embeddings", {"input": "abc", **GATEWAY}, "x_gateway"),
    ("/tokenize", {"prompt": "abc", **GATEWAY}, "x_gateway"),
)


def test_allow_unknown_fields_drops_them(start: Start, model_dir: Path, open_server: Server) -> None:
    server = start(model_dir, step_seconds=0.001, allow_unknown_fields=True)
    for path, body, name in NESTED:
        body = {"model": "fake", **body}
        assert open_server.http.post(path, json=body).status_code == 400, "by default it is an error"
        response = server.http.post(path, json=body)
        assert response.status_code == 200, (path, response.text)
        assert response.headers["x-unknown-fields"] == name
    plain = server.http.post(CHAT, json={"messages": HI})
    assert "x-unknown-fields" not in plain.headers
    same = server.http.post(CHAT, json={"messages": HI, "seed": 1, **GATEWAY}).json()["choices"]
    assert same == server.http.post(CHAT, json={"messages": HI, "seed": 1}).json()["choices"]
    refused(server, CHAT, "audio", "not supported", messages=HI, audio={"voice": "x"})
    refused(
        server, CHAT, "messages[0].function_call", "use tool_calls", messages=[{**HI[0], "function_call": {"a": 1}}]
    )
    for i in range(80):
        server.http.post("/tokenize", json={"prompt": "a", f"x_{i}": 1, "x\n{}": 2})
    metrics = server.http.get("/metrics").text
    fields = dict(re.findall(r'unknown_fields_total{engine="0",field="([^"]*)",.*} (\d+)', metrics))
    assert fields["x_gateway"] == "8", "once for each request that had it"
    assert fields["messages[].x_gateway"] == "1"
    assert fields["x???"] == "80"
    assert len(fields) == 51
    assert int(fields["other"]) == 80 - (50 - len({name for *_, name in NESTED}) - 1)
    assert server.log.read_text().count("Unknown field x_gateway ") == 1, "a new name is logged once"


def ask(server: Server, path: str = TEXT, **body: Any) -> dict[str, Any]:
    base = {"messages": HI} if path == CHAT else {"prompt": "abc"}
    response = server.http.post(path, json={**base, **body})
    assert response.status_code == 200, response.text
    return response.json()


def text(server: Server, **body: Any) -> str:
    return ask(server, **body)["choices"][0]["text"]


def refused(server: Server, path: str, param: str, *says: str, **body: Any) -> None:
    base = {"messages": HI} if path == CHAT else {"prompt": "abc"}
    response = server.http.post(path, json={**base, **body})
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["param"] == param, error
    for part in says:
        assert re.search(part, error["message"]), error["message"]


def streamed(server: Server, path: str, **body: Any) -> list[dict[str, Any]]:
    with server.http.stream("POST", path, json={"stream": True, **body}) as response:
        lines = [line for line in response.read().decode().split("\n\n") if line]
    assert lines.pop() == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines]


# ---- prompts ------------------------------------------------------------------------------------


def test_truncation(server: Server) -> None:
    """The fake engine repeats what is left of the prompt."""
    ids = TOKENIZER.encode("zqxjkvbp")
    assert len(ids) == 8
    assert text(server, prompt="zqxjkvbp", truncate_prompt_tokens=3, max_tokens=3) == "vbp"
    assert text(server, prompt=ids, truncate_prompt_tokens=3, max_tokens=3, truncation_side="right") == "zqx"
    assert text(server, prompt="zqxjkvbp", truncate_prompt_tokens=8, max_tokens=2) == "zq"
    assert text(server, prompt="zq", truncate_prompt_tokens=100, max_tokens=2) == "zq"
    assert text(server, prompt="zqxjkvbp", truncate_prompt_tokens=2, max_tokens=0, echo=True) == "bp"
    whole = ask(server, prompt="x" * 600 + "yz", truncate_prompt_tokens=-1, max_tokens=12)
    assert (whole["usage"]["prompt_tokens"], whole["choices"][0]["text"]) == (500, "x" * 12)
    chat = ask(server, CHAT, truncate_prompt_tokens=4, max_tokens=4, add_generation_prompt=False)
    assert chat["usage"]["prompt_tokens"] == 4
    for wrong, says in ((0, "≥ 1"), (-2, "≥ 1"), (512, "at most 511"), ("3", "a whole number")):
        refused(server, TEXT, "truncate_prompt_tokens", says, truncate_prompt_tokens=wrong)
    refused(server, TEXT, "truncation_side", "left", truncation_side="up")
    refused(server, TEXT, "prompt", "262144", prompt="x" * (2**18 + 1), truncate_prompt_tokens=3)


def test_special_tokens_of_prompts(tmp_path: Path, start: Any) -> None:
    """Byte-fallback tokenizers begin texts with a BOS; chats do so only where they are told to."""
    tokenizer = tokenizers_.byte_fallback()
    from tokenizers.processors import TemplateProcessing

    bos = tokenizer.bos_token_id
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", bos)])
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    tokenizer.save_pretrained(tmp_path)
    server = start(tmp_path)

    def first(path: str, **body: Any) -> int:
        answer = ask(server, path, return_token_ids=True, max_tokens=1, **body)
        return (answer if path == CHAT else answer["choices"][0])["prompt_token_ids"][0]

    assert first(TEXT) == bos
    assert first(TEXT, add_special_tokens=False) != bos
    assert first(CHAT) != bos
    assert first(CHAT, add_special_tokens=True) == bos
    pair = [bos, tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids("▁the")]
    options = {"prompt": pair, "max_tokens": 3, "skip_special_tokens": False, "ignore_eos": True}
    assert text(server, **options) == "<s></s> the"
    assert text(server, **options, spaces_between_special_tokens=False) == "<s></s> the"


def test_infill(open_server: Server, server: Server) -> None:
    vocabulary = {token: i for i, token in enumerate(INFILL, len(TOKENIZER))}
    answer = ask(open_server, suffix="xy", return_token_ids=True, max_tokens=4)
    encode = TOKENIZER.encode
    expected = [vocabulary[INFILL[0]], *encode("abc"), vocabulary[INFILL[1]], *encode("xy"), vocabulary[INFILL[2]]]
    assert answer["choices"][0]["prompt_token_ids"] == expected
    ids = ask(open_server, prompt=encode("abc"), suffix="xy", return_token_ids=True, max_tokens=4)
    assert ids["choices"][0]["prompt_token_ids"] == expected
    refused(server, TEXT, "suffix", "infill tokens", "Qwen2.5-Coder", suffix="xy")
    refused(open_server, TEXT, "echo", "suffix", suffix="xy", echo=True)
    refused(open_server, CHAT, "suffix", "/v1/completions", suffix="xy")


def test_templates_and_documents(open_server: Server, server: Server) -> None:
    template = "{% for d in documents %}[{{ d.title }}]{% endfor %}{{ messages[0].content }}|"
    body = {"chat_template": template, "documents": [{"title": "one"}, {"title": "two"}], "return_prompt_text": True}
    answer = ask(open_server, CHAT, max_tokens=9, **body)
    assert answer["prompt_text"] == "[one][two]hi|"
    assert answer["choices"][0]["message"]["content"] == "[one][two"[: len("[one][two")][:9] or ""
    chunks = streamed(open_server, CHAT, messages=HI, max_tokens=3, **body)
    assert [chunk.get("prompt_text") for chunk in chunks] == ["[one][two]hi|", *[None] * (len(chunks) - 1)]
    refused(server, CHAT, "chat_template", "--trust-request-chat-template", chat_template=template)
    for attack in (
        "{{ messages.__class__.__mro__ }}",
        "{{ ''.__class__.__subclasses__() }}",
        "{% for x in ().__class__.__base__.__subclasses__() %}{{ x }}{% endfor %}",
        "{{ messages.append({}) }}",
    ):
        refused(open_server, CHAT, "chat_template", "request's chat template", chat_template=attack)
    refused(open_server, CHAT, "chat_template", "refuses", chat_template="{% for %}")
    refused(open_server, CHAT, "documents", "list of objects", documents=["a"])


def test_default_template_variables(tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("variables")
    tokenizer = tokenizers_.byte_level()
    tokenizer.chat_template = "{{ a }}{{ enable_thinking }}{{ messages[0].content }}|"
    tokenizer.save_pretrained(path)
    with servers(tmp_path_factory) as start:
        server = start(path, default_chat_template_kwargs={"a": "A", "enable_thinking": False})

        def prompt(**body: Any) -> Any:
            return ask(server, CHAT, max_tokens=1, return_prompt_text=True, **body)["prompt_text"]

        assert prompt() == "AFalsehi|"
        assert prompt(chat_template_kwargs={"a": "B"}) == "BFalsehi|"
        assert prompt(enable_thinking=True) == "ATruehi|"


# ---- where answers end --------------------------------------------------------------------------


def test_stop_expressions(server: Server) -> None:
    """The text ends before the first match, whole and streamed, and however tokens come."""
    body = {"prompt": "go 12 go 345 on", "max_tokens": 60}
    answer = ask(server, **body, stop_regex=r"\d{3}")["choices"][0]
    assert (answer["text"], answer["finish_reason"], answer["stop_reason"]) == ("go 12 go ", "stop", "345")
    chunks = streamed(server, TEXT, **body, stop_regex=r"\d{3}")
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "go 12 go "
    assert text(server, **body, stop_regex=[r"5\s", "zzz"], no_stop_trim=True) == "go 12 go 345 "
    assert text(server, **body, stop_regex=r"o.*n") == "g"
    assert text(server, **body, stop_regex=r"o.*n", stop="12") == "go "
    assert text(server, **body, stop_regex=r"\s1", stop="12") == "go"
    assert text(server, **body, stop_regex="go", min_tokens=3).startswith("go 12 ")
    assert "345" in text(server, **body, stop_regex="never")
    for wrong, says in (
        ("(", "not valid"),
        ("a*", "empty"),
        ("^a", "anchors"),
        ("a" * 1001, "1000"),
        ("", "non-empty"),
    ):
        refused(server, TEXT, "stop_regex", says, stop_regex=wrong)
    refused(server, TEXT, "stop_regex", "at most 16", stop_regex=["a"] * 17)
    refused(server, TEXT, "no_stop_trim", "differ", no_stop_trim=True, include_stop_str_in_output=False)


def test_detokenize_false(server: Server) -> None:
    ids = TOKENIZER.encode("abc")
    answer = ask(server, detokenize=False, return_token_ids=True, logprobs=1, max_tokens=3)["choices"][0]
    assert (answer["text"], answer["token_ids"]) == ("", ids)
    assert answer["logprobs"]["tokens"] == [f"token_id:{i}" for i in ids]
    refused(server, TEXT, "stop", "detokenize", detokenize=False, stop="a")


# ---- choices ------------------------------------------------------------------------------------


def test_best_of(server: Server) -> None:
    """The fake engine's tokens are all equally likely, so the longest answer is the least likely one."""
    answer = ask(server, n=2, best_of=4, seed=7, max_tokens=3)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1]
    assert [choice["seed"] for choice in answer["choices"]] == [7, 8]
    assert answer["usage"]["completion_tokens"] == 12
    assert all(choice["logprobs"] is None for choice in answer["choices"])
    reported = ask(server, n=1, best_of=2, logprobs=1, max_tokens=3, prompt=["abc", "xyz"])["choices"]
    assert [choice["text"] for choice in reported] == ["abc", "xyz"]
    assert [len(choice["logprobs"]["tokens"]) for choice in reported] == [3, 3]
    assert len(ask(server, best_of=1)["choices"]) == 1
    refused(server, TEXT, "best_of", "from n=3", n=3, best_of=2)
    refused(server, TEXT, "best_of", "stream", best_of=2, stream=True)
    refused(server, TEXT, "best_of", "1280|2000|1280 sequences", best_of=128, prompt=["a"] * 10)
    refused(server, CHAT, "best_of", "Use n", best_of=2)


def test_beams(server: Server) -> None:
    """The fake engine's likeliest next token is the prompt's first, then the ids after it, half a nat apart each."""
    first = TOKENIZER.encode("abc")[0]
    body = {"use_beam_search": True, "n": 3, "max_tokens": 2, "return_token_ids": True, "logprobs": 1}
    answer = ask(server, **body)
    assert [choice["token_ids"] for choice in answer["choices"]] == [
        [first, first],
        [first, first + 1],
        [first + 1, first],
    ]
    assert answer["choices"][1]["logprobs"]["token_logprobs"] == [-0.25, -0.75]
    assert answer["usage"]["completion_tokens"] == 6
    assert answer["usage"]["prompt_tokens"] == 3
    texts: dict[int, str] = {}
    for chunk in streamed(server, TEXT, prompt="abc", **body):
        choice = chunk["choices"][0]
        texts[choice["index"]] = texts.get(choice["index"], "") + choice["text"]
    assert texts == {choice["index"]: choice["text"] for choice in answer["choices"]}
    chat = ask(server, CHAT, use_beam_search=True, n=2, max_tokens=2, temperature=0, return_token_ids=True)
    assert len({tuple(choice["token_ids"]) for choice in chat["choices"]}) == 2
    for name, value in (("stop", "a"), ("logit_bias", {"5": 1}), ("min_tokens", 1), ("prompt_logprobs", 1)):
        refused(server, TEXT, name, "no effect on beams", use_beam_search=True, **{name: value})
    refused(server, TEXT, "n", "at most 10 beams", "--max-logprobs", use_beam_search=True, n=11)
    refused(server, TEXT, "length_penalty", "use_beam_search", length_penalty=2.0)
    for extreme in (1e308, -1000):
        refused(server, TEXT, "length_penalty", "-10 and 10", use_beam_search=True, length_penalty=extreme)
    refused(server, TEXT, "use_beam_search", "best_of", use_beam_search=True, best_of=3)
    assert server.info()["requests"]["running"] == 0


def test_beams_end_at_end_tokens(server: Server) -> None:
    """The id before the EOS is likeliest, the EOS next; length_penalty=0 compares sums, so that short ones win."""
    eos = TOKENIZER.eos_token_id
    body = {"prompt": [eos - 1], "use_beam_search": True, "n": 2, "max_tokens": 3, "return_token_ids": True}
    found = {tuple(c["token_ids"]): c["finish_reason"] for c in ask(server, **body)["choices"]}
    assert found == {(eos - 1, eos - 1, eos - 1): "length", (eos - 1, eos - 1, eos): "stop"}
    short = {tuple(c["token_ids"]) for c in ask(server, **body, length_penalty=0.0)["choices"]}
    assert short == {(eos - 1, eos - 1, eos - 1), (eos,)}
    free = ask(server, **body, ignore_eos=True)["choices"]
    assert {c["finish_reason"] for c in free} == {"length"}


# ---- what is reported ---------------------------------------------------------------------------


def test_tokens_as_ids(server: Server) -> None:
    ids = TOKENIZER.encode("abc")
    body = {"logprobs": 2, "return_tokens_as_token_ids": True, "max_tokens": 3}
    found = ask(server, **body)["choices"][0]["logprobs"]
    assert found["tokens"] == [f"token_id:{i}" for i in ids]
    assert set(found["top_logprobs"][0]) == {f"token_id:{ids[0]}", f"token_id:{ids[0] + 1}"}
    chat = ask(server, CHAT, logprobs=True, return_tokens_as_token_ids=True, max_tokens=2)
    assert chat["choices"][0]["logprobs"]["content"][0]["token"].startswith("token_id:")


def test_prompt_token_ids(server: Server) -> None:
    ids = TOKENIZER.encode("abc")
    whole = ask(server, prompt=["abc", "ab"], return_token_ids=True, max_tokens=1)
    assert [choice["prompt_token_ids"] for choice in whole["choices"]] == [ids, ids[:2]]
    chunks = streamed(server, TEXT, prompt="abc", return_token_ids=True, max_tokens=3)
    assert [chunk["choices"][0].get("prompt_token_ids") for chunk in chunks] == [ids, *[None] * (len(chunks) - 1)]
    chat = ask(server, CHAT, return_token_ids=True, max_tokens=1)
    assert chat["prompt_token_ids"] == TOKENIZER.encode("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")
    chunks = streamed(server, CHAT, messages=HI, return_prompt_token_ids=True, max_tokens=2)
    assert chunks[0]["prompt_token_ids"] == chat["prompt_token_ids"]
    assert not any("prompt_token_ids" in chunk for chunk in chunks[1:])
    assert "token_ids" not in chunks[1]["choices"][0]


def test_limits_of_logprobs(server: Server, open_server: Server) -> None:
    refused(server, TEXT, "logprobs", "0 to 20", "--max-logprobs", logprobs=-1)
    refused(server, CHAT, "top_logprobs", "21", "0 to 20", logprobs=True, top_logprobs=21)
    refused(server, TEXT, "logprobs", "≥ 0", logprobs=-2)
    refused(server, TEXT, "logprob_token_ids", "needs logprobs", logprob_token_ids=[1])
    refused(server, TEXT, "logprob_token_ids", "1 to 128", logprobs=0, logprob_token_ids=[])
    refused(server, TEXT, "logprob_token_ids", "0 to 999", logprobs=0, logprob_token_ids=[1000])
    refused(open_server, TEXT, "logprobs", "echo", logprobs=-1, echo=True)
    ask(open_server, logprobs=-1)
    ask(open_server, CHAT, logprobs=True, top_logprobs=500)


def test_echo_in_chat(server: Server) -> None:
    """The answer begins with the message that it continues, and only then."""
    begun = [*HI, {"role": "assistant", "content": "I say"}]
    options = {"messages": begun, "max_tokens": 2, "add_generation_prompt": False, "continue_final_message": True}
    bare = ask(server, CHAT, **options)["choices"][0]["message"]["content"]
    echoed = ask(server, CHAT, **options, echo=True)["choices"][0]["message"]["content"]
    assert echoed == "I say" + bare
    chunks = streamed(server, CHAT, **options, echo=True)
    assert "".join(c["choices"][0]["delta"].get("content", "") for c in chunks) == echoed
    assert ask(server, CHAT, max_tokens=2, echo=True) | {"id": 0, "created": 0, "choices": 0} == ask(
        server, CHAT, max_tokens=2
    ) | {"id": 0, "created": 0, "choices": 0}


def test_include_and_separate_reasoning(open_server: Server) -> None:
    body = {"messages": [{"role": "user", "content": "<think>so</think>yes"}], "max_tokens": 40}
    template = {"chat_template_kwargs": {"opening": "<think>"}}

    def message(**extra: Any) -> dict[str, Any]:
        return ask(open_server, CHAT, **body, **template, **extra)["choices"][0]["message"]

    split = message()
    assert split["reasoning_content"]
    hidden = message(include_reasoning=False)
    assert hidden["content"] == split["content"]
    assert "reasoning_content" not in hidden
    raw = message(separate_reasoning=False)
    assert "</think>" in raw["content"]
    assert "reasoning_content" not in raw
    chunks = streamed(open_server, CHAT, **body, **template, include_reasoning=False)
    assert not any("reasoning_content" in chunk["choices"][0]["delta"] for chunk in chunks)
    assert "".join(c["choices"][0]["delta"].get("content", "") for c in chunks) == hidden["content"]


# ---- how requests are served --------------------------------------------------------------------


def test_request_ids(server: Server, slow_server: Server) -> None:
    assert ask(server, request_id="my-id.1:2_3")["id"] == "cmpl-my-id.1:2_3"
    assert ask(server, CHAT, rid="abc")["id"] == "chatcmpl-abc"
    response = server.http.post(TEXT, json={"prompt": "a", "request_id": "body"}, headers={"X-Request-Id": "head"})
    assert response.json()["id"] == "cmpl-body"
    response = server.http.post(TEXT, json={"prompt": "a"}, headers={"X-Request-Id": "head"})
    assert (response.json()["id"], response.headers["x-request-id"]) == ("cmpl-head", "head")
    for wrong in ("", "a b", "a\n", "x" * 129, "ü", "a/b"):
        refused(server, TEXT, "request_id", "1 to 128 characters", request_id=wrong)
    refused(server, TEXT, "rid", "differ", rid="a", request_id="b")
    response = server.http.post(TEXT, json={"prompt": "a"}, headers={"X-Request-Id": "a b"})
    assert response.json()["id"].removeprefix("cmpl-").isalnum(), "a header that is no id is replaced"
    body = {"prompt": [5], "max_tokens": 30, "request_id": "twice", "n": 2}
    answers: list[Any] = []
    first = threading.Thread(target=lambda: answers.append(slow_server.http.post(TEXT, json=body)))
    first.start()
    while slow_server.info()["requests"]["running"] == 0:
        pass
    second = slow_server.http.post(TEXT, json=body)
    assert second.status_code == 400
    assert (second.json()["error"]["param"], "running already" in second.text) == ("request_id", True)
    proxied = {"prompt": [5], "max_tokens": 8}
    with ThreadPoolExecutor(3) as pool:
        answer = lambda _: slow_server.http.post(TEXT, json=proxied, headers={"X-Request-Id": "same"})  # noqa: E731
        shared = [one.json()["id"] for one in pool.map(answer, range(3))]
    assert len(set(shared)) == 3, "proxies give one id to several requests"
    assert "cmpl-same" in shared
    first.join()
    assert answers[0].status_code == 200, "the first goes on"
    assert len(answers[0].json()["choices"]) == 2
    assert slow_server.http.post(TEXT, json=body | {"max_tokens": 1}).status_code == 200, "its id is free again"


def test_priorities_and_salts(server: Server, open_server: Server) -> None:
    ask(open_server, priority=-3)
    ask(server, priority=0)
    refused(server, TEXT, "priority", "--scheduling-policy priority", priority=1)
    refused(server, CHAT, "priority", "whole number", priority=1.5)
    for name in ("cache_salt", "extra_key"):
        ask(server, **{name: "pepper"})
        refused(server, TEXT, name, "1 to 1024", **{name: ""})
        refused(server, TEXT, name, "1024", **{name: "x" * 1025})
        refused(server, CHAT, name, "a string", **{name: 5})


def test_parameters_of_features(server: Server) -> None:
    """The fake engine knows no features and takes them; the real one refuses unknown names."""
    ask(server, vllm_xargs={"a": 1})
    refused(server, TEXT, "vllm_xargs", "object", vllm_xargs=[1])


@pytest.mark.parametrize("name", ["regex", "ebnf", "json_schema"])
def test_grammars_by_sglangs_names(server: Server, name: str) -> None:
    """That they constrain is tested on the real engine; here, that they are read as structured_outputs are."""
    good = {"regex": "a+", "ebnf": 'root ::= "a"', "json_schema": '{"type": "object"}'}[name]
    ask(server, **{name: good})
    refused(server, TEXT, name, "not empty|not valid", **{name: ""})
    refused(server, TEXT, "guided_choice", "one form", name, **{name: good, "guided_choice": ["a"]})
