"""``--reasoning-parser``: thinking is told from what is said, wherever deltas cut the marks."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.http import tokenizers_
from tests.http.conftest import Server, Start
from unisono.frontend.input_processor import PreparedPrompt
from unisono.http.openai.chat import ChatFormat
from unisono.http.openai.protocol import ChatRequest
from unisono.text.reasoning import PARSERS, parser_named, parser_of
from unisono.types import ConfigError, EngineRequest, SamplingParams, StructuredOutputs

QWEN, R1, OSS = PARSERS["qwen3"], PARSERS["deepseek_r1"], PARSERS["openai_gptoss"]
GEMMA, MODEL = PARSERS["gemma4"], "<|turn>model\n"
ROLE, SAID = "<|end|><|start|>assistant", "<|start|>assistant<|channel|>final<|message|>"
TURN = "<|im_start|>assistant\n"
OPEN, CLOSED = TURN + "<think>\n", TURN + "<think>\n\n</think>\n\n"

# parser, end of the prompt, answer -> thinking, content
CASES = {
    "opened by the prompt": (QWEN, OPEN, "a < b\n</think>\n\nYes.\n", ("a < b", "Yes.\n")),
    "opened by the answer": (QWEN, TURN, "\n<think>\nstep </think>\nYes", ("step", "Yes")),
    "turned off": (QWEN, CLOSED, "Yes, <think> is a mark </think>.", ("", "Yes, <think> is a mark </think>.")),
    "no thought": (QWEN, TURN, "<thin air> it is", ("", "<thin air> it is")),
    "never closed": (QWEN, OPEN, "one\n\ntwo </thin", ("one\n\ntwo </thin", "")),
    "empty thought": (QWEN, OPEN, "\n</think>\n\nHello", ("", "Hello")),
    "near misses": (QWEN, OPEN, "<</thi </think </think>ok", ("<</thi </think", "ok")),
    "second close": (QWEN, OPEN, "a</think>b</think>c", ("a", "b</think>c")),
    "nothing": (QWEN, OPEN, "", ("", "")),
    "a blank answer": (QWEN, TURN, " \n", ("", " \n")),
    "gemma": (GEMMA, MODEL, "<|channel>thought\na < b\n<channel|>Yes.", ("a < b", "Yes.")),
    "gemma turned off": (GEMMA, MODEL + "<|channel>thought\n<channel|>", "Yes <channel|>", ("", "Yes <channel|>")),
    "r1 without an opening mark": (R1, TURN, "step\n</think>\nYes", ("step", "Yes")),
    "r1 never closed": (R1, TURN, "step by step", ("step by step", "")),
    "r1 turned off": (R1, CLOSED, "Yes", ("", "Yes")),
    "harmony": (
        OSS,
        ROLE,
        "<|channel|>analysis<|message|>a < b<|end|>" + SAID + " Yes.\n<|return|>",
        ("a < b", " Yes.\n"),
    ),
    "harmony without a thought": (OSS, ROLE, "<|channel|>final<|message|>Yes", ("", "Yes")),
    "harmony of many messages": (
        OSS,
        ROLE,
        "<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>commentary<|message|>Wait.<|end|>\n"
        "<|start|>assistant<|channel|>analysis<|message|>b" + SAID + "Yes<|end|>",
        ("a\nb", "Wait.\nYes"),
    ),
    "harmony with no end": (OSS, ROLE, "<|channel|>analysis<|message|>a <|en", ("a <|en", "")),
    "harmony opened by the prompt": (OSS, ROLE + OSS.start, "a<|end|>" + SAID + "Yes", ("a", "Yes")),
    "harmony in plain text": (OSS, ROLE, "To be", ("", "To be")),
    "harmony's calls that nobody reads": (
        OSS,
        ROLE,
        "<|channel|>commentary to=functions.f<|message|>{}<|call|>",
        ("{}", ""),
    ),
}


def split(parser: Any, prompt: str, pieces: list[str], prefix: str | None = None) -> tuple[str, str]:
    splitter = parser.splitter(prompt, prefix)
    found = [splitter.feed(piece) for piece in pieces] + [splitter.feed("", last=True)]
    return "".join(thinking for thinking, _ in found), "".join(content for _, content in found)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_reasoning_split_is_independent_of_delta_boundaries(case: tuple[Any, str, str, tuple[str, str]]) -> None:
    parser, prompt, answer, expected = case
    assert split(parser, prompt, [answer]) == expected
    assert split(parser, prompt, list(answer)) == expected
    for first in range(len(answer)):
        for second in range(first, len(answer)):
            pieces = [answer[:first], answer[first:second], answer[second:]]
            assert split(parser, prompt, pieces) == expected


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("hm\n<tool_call>x</think>y", ("hm", "<tool_call>x</think>y")),
        ("a <tool </think>\n<tool_call>", ("a <tool", "<tool_call>")),
        ("never <tool_cal", ("never <tool_cal", "")),
    ],
)
def test_tool_call_ends_unclosed_reasoning(answer: str, expected: tuple[str, str]) -> None:
    for first in range(len(answer)):
        for second in range(first, len(answer)):
            splitter = QWEN.splitter(OPEN, None, ["<tool_call>"])
            pieces = [answer[:first], answer[first:second], answer[second:]]
            found = [splitter.feed(piece) for piece in pieces] + [splitter.feed("", last=True)]
            assert tuple("".join(part) for part in zip(*found, strict=True)) == expected


def test_text_is_not_held_back_for_long() -> None:
    splitter = QWEN.splitter(OPEN)
    assert splitter.feed("a step, ") == ("a step,", "")
    assert splitter.feed("and </th") == (" and", "")
    assert splitter.feed("ing>") == (" </thing>", "")
    assert splitter.feed("</think>") == ("", "")
    assert splitter.feed("\n\nY") == ("", "Y")


@pytest.mark.parametrize(
    ("prefix", "expected"),
    [
        ("<think>\nfirst", ("next", "Yes")),
        ("<think>a</think>So", ("", "next</think>\nYes")),
        ("", ("", "next</think>\nYes")),
    ],
)
def test_continued_message_resumes_its_reasoning_state(prefix: str, expected: tuple[str, str]) -> None:
    if prefix:
        assert split(QWEN, "anything", ["next</think>\nYes"], prefix) == expected


def test_unknown_names_are_refused() -> None:
    assert parser_named(None) is None
    assert parser_named("none") is None
    assert parser_named("deepseek-r1") is R1
    with pytest.raises(ConfigError, match=r"'qwen'.*qwen3, deepseek_r1"):
        parser_named("qwen")


@pytest.mark.parametrize(
    ("template", "parser"),
    [
        ("{{ '<think>' }} {{ '</think>' }}", QWEN),
        ("{{ content.split('</think>') }}", R1),
        ("[THINK] [/THINK]", PARSERS["mistral"]),
        ("<seed:think></seed:think>", PARSERS["seed_oss"]),
        ("◁think▷◁/think▷", PARSERS["kimi"]),
        ("<|channel|>analysis<|message|> </think>", OSS),
        ("{{ messages }}", None),
    ],
)
def test_reasoning_parser_is_detected_from_the_template(template: str, parser: Any) -> None:
    assert parser_of(template) == parser


@pytest.mark.parametrize(
    ("parser", "prompt", "prefix", "state"),
    [
        (QWEN, OPEN, None, "thinking"),
        (QWEN, TURN, None, "begin"),
        (QWEN, CLOSED, None, "content"),
        (R1, TURN, None, "thinking"),
        (R1, CLOSED, None, "content"),
        (QWEN, "anything", "<think>\nso", "thinking"),
        (R1, "anything", "so", "content"),
        (OSS, ROLE, None, "begin"),
        (OSS, ROLE + OSS.start, None, "thinking"),
        (OSS, ROLE + SAID, None, "content"),
        (OSS, "anything", "so", "content"),
    ],
)
def test_initial_reasoning_state_from_prompt(parser: Any, prompt: str, prefix: str | None, state: str) -> None:
    assert parser.begins(prompt, prefix) == state


@pytest.fixture(scope="module")
def thinking(tmp_path_factory: pytest.TempPathFactory) -> Any:
    from tests.http.conftest import servers

    tokenizer = tokenizers_.byte_level()
    tokenizer.chat_template += (
        "{{ reasoning_effort }}{% if enable_thinking is defined and not enable_thinking %}off{% endif %}"
    )
    path = tmp_path_factory.mktemp("thinking")
    tokenizer.save_pretrained(path)
    with servers(tmp_path_factory) as start:
        yield start(path, reasoning_parser="qwen3")


def body(content: str, opening: str, **more: Any) -> dict[str, Any]:
    """The fake engine repeats the prompt up to the end of the user's turn."""
    return {"messages": [{"role": "user", "content": content}], "chat_template_kwargs": {"opening": opening}, **more}


def whole(server: Server, **request: Any) -> dict[str, Any]:
    answer = server.http.post("/v1/chat/completions", json=request)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]


def streamed(server: Server, **request: Any) -> tuple[str, str, list[dict[str, Any]]]:
    choices = []
    with server.http.stream("POST", "/v1/chat/completions", json={"stream": True, **request}) as response:
        for line in response.iter_lines():
            if line.startswith("data: {"):
                choices += json.loads(line.removeprefix("data: "))["choices"]
    deltas = [choice["delta"] for choice in choices]
    assert not any("content" in d and "reasoning_content" in d for d in deltas)
    return (
        "".join(d.get("reasoning_content", "") for d in deltas),
        "".join(d.get("content", "") for d in deltas),
        choices,
    )


def test_answers_and_streams_are_split(thinking: Server) -> None:
    request = body("step one\n</think>\n\nThe answer is 2.", "<think>\n")
    message = whole(thinking, **request)["message"]
    assert message["reasoning_content"] == message["reasoning"] == "user\nstep one"
    assert message["content"] == "The answer is 2."
    reasoning, content, choices = streamed(thinking, **request, logprobs=True, return_token_ids=True)
    assert (reasoning, content) == ("user\nstep one", "The answer is 2.")
    ids = [token for choice in choices for token in choice.get("token_ids", [])]
    names = [entry for choice in choices if choice.get("logprobs") for entry in choice["logprobs"]["content"]]
    again = whole(thinking, **request, logprobs=True, return_token_ids=True)
    assert again["token_ids"] == ids
    assert len(again["logprobs"]["content"]) == len(names) == len(ids)


def test_usage_counts_tokens_of_thinking(thinking: Server) -> None:
    """A token of these is a byte, but for the mark; a stream's usage is the whole answer's."""

    def counted(**request: Any) -> int:
        answer = thinking.http.post("/v1/chat/completions", json=request).json()["usage"]
        options = {"stream": True, "stream_options": {"include_usage": True}}
        with thinking.http.stream("POST", "/v1/chat/completions", json={**request, **options}) as response:
            *_, last, _, _, _ = response.iter_lines()
        assert json.loads(last.removeprefix("data: "))["usage"] == answer
        return answer["completion_tokens_details"]["reasoning_tokens"]

    thought = "user\nstep one"
    assert counted(**body("step one\n</think>\n\nThe answer is 2.", "<think>\n")) == pytest.approx(len(thought), abs=1)
    assert counted(**body("a long thought", "<think>\n", max_tokens=4)) == 4
    assert counted(**body("plain", "<think>\n\n</think>\n\n")) == 0


def test_an_answer_cut_off_while_thinking(thinking: Server) -> None:
    request = body("a long thought", "<think>\n", max_tokens=5)
    choice = whole(thinking, **request)
    assert choice["finish_reason"] == "length"
    assert choice["message"]["content"] == ""
    assert choice["message"]["reasoning_content"]
    assert streamed(thinking, **request)[:2] == (choice["message"]["reasoning_content"], "")


def test_thinking_turned_off_by_the_template(thinking: Server) -> None:
    message = whole(thinking, **body("plain", "<think>\n\n</think>\n\n"))["message"]
    assert message["reasoning_content"] is None
    assert message["content"] == "user\nplain"


def test_several_answers_and_structured_ones(thinking: Server) -> None:
    request = body("x</think>y", "<think>\n", n=2)
    answer = thinking.http.post("/v1/chat/completions", json=request).json()
    assert [c["message"]["reasoning_content"] for c in answer["choices"]] == ["user\nx"] * 2
    reasoning, content, _ = streamed(thinking, **request)
    assert (len(reasoning), content) == (2 * len("user\nx"), "yy")
    structured = whole(thinking, **body("x</think>y", "<think>\n"), structured_outputs={"regex": ".*"})["message"]
    assert (structured["reasoning_content"], structured["content"]) == ("user\nx", "y")


def test_reasoning_content_in_history_is_accepted(thinking: Server) -> None:
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "ho", "reasoning_content": "hm"},
        {"role": "user", "content": "x</think>y"},
    ]
    whole(thinking, messages=messages)
    bad = thinking.http.post("/v1/chat/completions", json={"messages": [{**messages[1], "reasoning_content": 3}]})
    assert bad.status_code == 400
    assert "reasoning_content" in bad.json()["error"]["message"]


def test_without_a_parser_nothing_changes(server: Server) -> None:
    message = whole(server, **body("x</think>y", "<think>\n"))["message"]
    assert message["content"] == "user\nx</think>y"
    assert "reasoning_content" not in message


def test_request_fields_enable_thinking(thinking: Server) -> None:
    """Fields become variables of the template; the fake engine repeats what it writes."""
    request = {"messages": [{"role": "user", "content": "x"}], "ignore_eos": True}

    def written(**more: Any) -> str:
        given = thinking.http.post("/v1/chat/completions", json={**request, **more, "max_tokens": 40}).json()
        count = given["usage"]["prompt_tokens"]
        given = thinking.http.post("/v1/chat/completions", json={**request, **more, "max_tokens": count}).json()
        return given["choices"][0]["message"]["content"].removeprefix("user\nx\nassistant\n")

    assert written() == ""
    assert written(enable_thinking=False) == "off"
    assert written(reasoning_effort="none") == "noneoff"
    assert written(reasoning_effort="high") == "high"
    assert written(enable_thinking=False, chat_template_kwargs={"enable_thinking": True}) == ""
    for bad in ({"reasoning_effort": "extreme"}, {"enable_thinking": "no"}, {"thinking_token_budget": "5"}):
        answer = thinking.http.post("/v1/chat/completions", json={**request, **bad})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, *bad)
    answer = thinking.http.post("/v1/chat/completions", json={**request, "thinking_token_budget": -1})
    assert "thinking_token_budget=-1" in answer.json()["error"]["message"]


def test_thinking_budget_needs_reasoning_tags(server: Server) -> None:
    answer = server.http.post("/v1/chat/completions", json=body("x", "", thinking_token_budget=3))
    assert answer.status_code == 400
    assert "--reasoning-parser" in answer.json()["error"]["message"]


def test_an_unknown_parser_ends_the_start(start: Start) -> None:
    server = start(ready=False, reasoning_parser="qwen")
    assert server.wait() == 1
    assert "deepseek_r1" in server.log.read_text()


def test_separate_reasoning_false_keeps_reasoning_in_the_text() -> None:
    """separate_reasoning: false leaves the thought in the text; a grammar still begins after it."""
    params = SamplingParams(structured_outputs=StructuredOutputs(regex="a"))
    request = ChatRequest(messages=[{"role": "user", "content": "x"}], separate_reasoning=False)
    plan, prompt = ChatFormat(QWEN).plan(request, params), PreparedPrompt([1], OPEN)
    assert plan.answer_parser(EngineRequest("x", [1], params), prompt) is None
    thinking = plan.sampling(prompt).followed_thinking
    assert thinking is not None
    assert (thinking.start, thinking.end, thinking.state) == ("<think>", "</think>", "thinking")
