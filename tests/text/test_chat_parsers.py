"""``LLM.chat(reasoning_parser=…, tool_parser=…)``: reasoning, content and calls of whole answers."""

from __future__ import annotations

import json

import pytest

from unisono import LLM, SamplingParams
from unisono.text.chat_parsers import ChatParsers
from unisono.types import BadRequest, CompletionOutput, RequestOutput, StructuredOutputs

CALL = '{"name": "add", "arguments": {"a": 1}}'
ANSWER = f"<think>\nAdd them.\n</think>\n\nI call it.\n<tool_call>\n{CALL}\n</tool_call>"
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]


def output(*texts: str, prompt: str = "Q", seed: int = 7) -> RequestOutput:
    return RequestOutput("r", prompt, [1, 2], [CompletionOutput(i, [], text) for i, text in enumerate(texts)], seed)


def test_parts_of_an_answer() -> None:
    found = output(ANSWER, "Plain.")
    ChatParsers.of(None, "qwen3", "hermes").parse(found, TOOLS, None)
    first, second = found.outputs
    assert (first.reasoning, first.content, first.text) == ("Add them.", "I call it.", ANSWER)
    (call,) = first.tool_calls
    assert (call.name, json.loads(call.arguments)) == ("add", {"a": 1})
    assert (second.reasoning, second.content, second.tool_calls) == ("", "Plain.", [])
    again = output(ANSWER)
    ChatParsers.of(None, "qwen3", "hermes").parse(again, TOOLS, None)
    assert again.outputs[0].tool_calls == first.tool_calls, "ids follow from prompt and seed"


def test_one_parser_and_none() -> None:
    found = output(ANSWER)
    ChatParsers.of(None, None, None).parse(found, TOOLS, None)
    assert (found.outputs[0].reasoning, found.outputs[0].content, found.outputs[0].tool_calls) == (None, None, [])
    ChatParsers.of(None, "qwen3", None).parse(found, TOOLS, None)
    assert found.outputs[0].reasoning == "Add them."
    assert CALL in (found.outputs[0].content or "")


@pytest.mark.parametrize("keyword", ["reasoning_parser", "tool_parser"])
def test_unknown_names(keyword: str) -> None:
    names = {"reasoning_parser": None, "tool_parser": None} | {keyword: "psychic"}
    with pytest.raises(BadRequest, match=rf"{keyword}='psychic' is unknown; choose auto or one of"):
        ChatParsers.of(None, **names)


def test_llm_chat() -> None:
    """A grammar makes the bundled model write the answer; the parsers of the call read it."""
    choice = StructuredOutputs(choice=(ANSWER,))
    params = SamplingParams(temperature=0, max_tokens=300, seed=1, structured_outputs=choice)
    with LLM("tiny", max_model_len=1024, max_num_seqs=2, enforce_eager=True) as llm:
        question = [{"role": "user", "content": "Add."}]
        (plain,) = llm.chat(question, params)
        (parsed,) = llm.chat(question, params, tools=TOOLS, reasoning_parser="qwen3", tool_parser="auto")
    assert plain.outputs[0].text == parsed.outputs[0].text == ANSWER
    assert plain.outputs[0].content is None
    (one,) = parsed.outputs
    assert (one.reasoning, one.content, [call.name for call in one.tool_calls]) == ("Add them.", "I call it.", ["add"])
