"""What a chat request asks of an answer beside its text: thinking and tool calls, on their way in and out.

:class:`ChatFormat` is made once, from the server's flags and the chat template. Its :class:`ChatPlan` of a request says
what the template gets, what constrains the answer, and makes the reader of each sequence.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from unisono.frontend.input_processor import InputProcessor, Prompt
from unisono.http.openai.hosted_tools import HostedTools
from unisono.http.openai.protocol import ChatRequest
from unisono.http.openai.tool_definitions import ToolUse, tool_use
from unisono.text.answer_reader import AnswerReader
from unisono.text.reasoning import OFF, Parser, parser_named, parser_of
from unisono.text.tool_parsers.base import Context, Format
from unisono.text.tool_parsers.formats import DEFAULT, format_named, format_of
from unisono.text.tool_parsers.structure import Structure
from unisono.types import BadRequest, EngineRequest, SamplingParams, Thinking


@dataclass(frozen=True)
class ChatPlan:
    """One request. params: with what constrains the answer. constrains: whether that comes of its tools.

    parser: of the model's thoughts; splits: whether the answer tells them from its content.
    """

    params: SamplingParams
    parser: Parser | None
    form: Format | None
    use: ToolUse | None
    prefix: str | None
    budget: int | None = None
    constrains: bool = False
    splits: bool = True

    @property
    def tools(self) -> Sequence[Mapping[str, Any]] | None:
        """Definitions for the chat template."""
        return None if self.use is None else self.use.given

    def sampling(self, prompt: Prompt) -> SamplingParams:
        """The request's parameters, with where its answer begins to think."""
        if self.parser is None:
            return self.params
        state = self.parser.begins(prompt.text or "", self.prefix)
        return replace(self.params, thinking=Thinking(self.parser.start, self.parser.end, state, self.budget))

    def reader(self, request: EngineRequest, prompt: Prompt) -> AnswerReader | None:
        """Reads a sequence's answer; None where there is nothing to tell apart."""
        splitter, reader = None, None
        if self.parser is not None and self.splits:
            followed = self.budget is not None or self.params.structured_outputs is not None
            interrupts = self.form.interrupts if self.form is not None and not followed else ()
            splitter = self.parser.splitter(prompt.text or "", self.prefix, interrupts, self.use is not None)
        if self.use is not None and self.form is not None:
            context = Context(self.use.callable, _ids(self.form, request), self.use.parallel)
            reader = self.form.reader(context)
        return None if splitter is None and reader is None else AnswerReader(splitter, reader, self.constrains)


def _ids(form: Format, request: EngineRequest) -> Any:
    """Makes the ids of calls: the same for the same prompt and seed, different ones in the turns of a conversation."""
    digest = hashlib.sha256(repr((request.prompt_token_ids, request.params.seed)).encode()).hexdigest()
    return lambda number: form.call_id(hashlib.sha256(f"{digest}{number}".encode()).hexdigest()[:24])


@dataclass(frozen=True)
class ChatFormat:
    """How this server's model thinks and calls.

    known: whether the template's form of tool calls is known; if it is not, requests with tools are refused.
    hosted: the rule for tools that are not functions.
    """

    parser: Parser | None = None
    form: Format = DEFAULT
    known: bool = True
    specials: Mapping[str, int] = field(default_factory=dict)
    hosted: HostedTools = field(default_factory=HostedTools)

    @classmethod
    def of(
        cls,
        inputs: InputProcessor,
        reasoning_parser: str | None,
        tool_call_parser: str | None,
        hosted: HostedTools | None = None,
    ) -> ChatFormat:
        """By the flags; where these say nothing, by the chat template. Raises ConfigError for unknown names."""
        parser, form = parser_named(reasoning_parser), format_named(tool_call_parser)
        tokenizer = inputs.tokenizer
        template = "" if tokenizer is None else tokenizer.chat_template or ""
        if parser is None and reasoning_parser != OFF:
            parser = parser_of(template)
        if form is None and (found := format_of(template)) is not None:
            form = found
        known = form is not None or not inputs.tool_template.tools
        specials = {} if tokenizer is None else tokenizer.special_tokens
        return cls(parser, form or DEFAULT, known, specials, hosted or HostedTools())

    def plan(self, request: ChatRequest, params: SamplingParams) -> ChatPlan:
        """Read a request's tools. Raises BadRequest."""
        tools, ignored = request.tools, self.hosted.request()
        if tools:
            tools = ignored.functions(tools)
            self.hosted.tell(ignored)
        use = tool_use(tools, request.tool_choice, request.parallel_tool_calls)
        if use is not None and not self.known:
            raise BadRequest(
                "tools: this model's chat template writes calls in a form that this server does not read; name the "
                "form with --tool-call-parser when starting it, or leave out tools.",
                "tools",
            )
        if request.thinking_token_budget is not None and self.parser is None:
            raise BadRequest(
                "thinking_token_budget needs a model that thinks between marks, and this one's chat template shows "
                "none; name them with --reasoning-parser when starting the server, or leave it out.",
                "thinking_token_budget",
            )
        marks = [] if self.parser is None else [self.parser.start, self.parser.end]
        asked = params.structured_outputs
        if use is not None:
            params = self._constrained(use, params)
            marks += self.form.marks
        if any(mark in self.specials for mark in marks):
            params = replace(params, skip_special_tokens=False)  # or the marks would not be in the text
        prefix = None
        if request.continue_final_message:
            content = request.conversation()[-1]["content"]
            prefix = content if isinstance(content, str) else ""
        if use is None and asked is not None and prefix is None and self.parser is not None:
            answer = Structure(self.form, self.specials).answer(asked)
            asked, params = answer, replace(params, structured_outputs=answer)
        constrains = params.structured_outputs is not asked
        form, budget = self.form if use else None, request.thinking_token_budget
        splits = request.separate_reasoning is not False
        return ChatPlan(params, self.parser, form, use, prefix, budget, constrains, splits)

    def _constrained(self, use: ToolUse, params: SamplingParams) -> SamplingParams:
        """``params`` with the grammar of calls that must come, or whose arguments must satisfy their schemas."""
        structure, asked = Structure(self.form, self.specials), params.structured_outputs
        if use.mode == "required":
            asked = structure.required(use.callable, use.parallel)
        elif asked is not None:
            asked = structure.either(use.callable, use.parallel, asked)
        elif use.strict:
            asked = structure.optional(use.callable, use.parallel)
        return replace(params, structured_outputs=asked)
