"""Reasoning and tool calls of complete chat answers, for ``LLM.chat``.

The server parses streams with the same parsers (``http/openai/chat.py``).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from unisono.text.answer_parser import AnswerParser
from unisono.text.reasoning import PARSERS, Parser, parser_of
from unisono.text.tokenizer import Tokenizer
from unisono.text.tool_parsers.base import Format, ParserContext, Tool
from unisono.text.tool_parsers.formats import ALIASES, DEFAULT, NAMES, format_of
from unisono.types import BadRequest, CompletionOutput, RequestOutput, SamplingParams
from unisono.types.outputs import ParsedToolCall

AUTO = "auto"
"""The parser of the chat template."""


def call_ids(form: Format, prompt_token_ids: Sequence[int], seed: int | None) -> Callable[[int], str]:
    """A function from a call's number to its id: equal for equal prompt and seed, different in later turns."""
    digest = hashlib.sha256(repr((list(prompt_token_ids), seed)).encode()).hexdigest()
    return lambda number: form.call_id(hashlib.sha256(f"{digest}{number}".encode()).hexdigest()[:24])


@dataclass(frozen=True)
class ChatParsers:
    """The parsers of a call of ``LLM.chat``. None: no parsing. specials: the tokenizer's special tokens."""

    reasoning: Parser | None = None
    calls: Format | None = None
    specials: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, tokenizer: Tokenizer | None, reasoning_parser: Any, tool_parser: Any) -> ChatParsers:
        """The parsers by name, or of the chat template (``auto``). Raises BadRequest for an unknown name."""
        template = "" if tokenizer is None else tokenizer.chat_template or ""
        specials = {} if tokenizer is None else tokenizer.special_tokens
        reasoning = (
            parser_of(template) if reasoning_parser == AUTO else _named("reasoning_parser", reasoning_parser, PARSERS)
        )
        aliases = {name: NAMES[known] for name, known in ALIASES.items()}
        named = _named("tool_parser", tool_parser, {**NAMES, **aliases}) if tool_parser != AUTO else format_of(template)
        return cls(reasoning, named or (DEFAULT if tool_parser == AUTO else None), specials)

    def sampling(self, params: SamplingParams) -> SamplingParams:
        """``params`` with special tokens in the text, if any of them is a mark of the parsers."""
        marks = [] if self.reasoning is None else [self.reasoning.start, self.reasoning.end]
        marks += [] if self.calls is None else self.calls.marks
        return replace(params, skip_special_tokens=False) if any(mark in self.specials for mark in marks) else params

    def parse(self, output: RequestOutput, tools: Sequence[Mapping[str, Any]] | None, prefix: str | None) -> None:
        """Set ``reasoning``, ``content`` and ``tool_calls`` of the output's sequences.

        tools: definitions in OpenAI's form. prefix: the beginning of the answer, if the conversation's last message is
        continued.
        """
        if self.reasoning is not None or self.calls is not None:
            functions = [one["function"] for one in tools or ()]
            known = [Tool(one["name"], one.get("parameters") or {}) for one in functions]
            for one in output.outputs:
                self._parse(one, output, known, prefix)

    def _parse(self, one: CompletionOutput, output: RequestOutput, tools: list[Tool], prefix: str | None) -> None:
        splitter = parser = None
        if self.reasoning is not None:
            interrupts = self.calls.interrupts if self.calls is not None else ()
            splitter = self.reasoning.splitter(output.prompt or "", prefix, interrupts, self.calls is not None)
        if self.calls is not None:
            ids = call_ids(self.calls, output.prompt_token_ids, (output.seed + one.index) % 2**63)
            parser = self.calls.parser(ParserContext(tools, ids))
        parts = AnswerParser(splitter, parser).feed(one.text, last=True)
        found: dict[int, ParsedToolCall] = {}
        for delta in parts.calls:
            call = found.setdefault(delta.index, ParsedToolCall(delta.id or "", delta.name or "", ""))
            found[delta.index] = replace(call, arguments=call.arguments + delta.arguments)
        one.reasoning = parts.reasoning if splitter is not None else None
        one.content, one.tool_calls = parts.content, list(found.values())


def _named(keyword: str, name: Any, choices: Mapping[str, Any]) -> Any:
    if name is None:
        return None
    if not isinstance(name, str) or name not in choices:
        raise BadRequest(
            f"{keyword}={name!r} is unknown; choose {AUTO} or one of {', '.join(sorted(choices))}.", keyword
        )
    return choices[name]
