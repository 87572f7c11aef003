"""Reasoning and tool calls of chat requests: prompt, constraints and parsing of answers.

:class:`ChatFormat` is made once, from the server's flags and the chat template. Its :class:`ChatPlan` of a request has
the template's tools and the constraints of the answer, and makes the parser of each sequence.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from unisono.frontend.input_processor import InputProcessor, PreparedPrompt
from unisono.http.openai.hosted_tools import HostedTools
from unisono.http.openai.protocol import ChatRequest
from unisono.http.openai.tool_definitions import ToolUse, tool_use
from unisono.text.answer_parser import AnswerParser
from unisono.text.chat_parsers import call_ids
from unisono.text.reasoning import OFF, Parser, parser_named, parser_of
from unisono.text.tool_parsers.base import Format, ParserContext
from unisono.text.tool_parsers.formats import DEFAULT, format_named, format_of
from unisono.text.tool_parsers.structure import Structure
from unisono.types import BadRequest, EngineRequest, SamplingParams, Thinking


@dataclass(frozen=True)
class ChatPlan:
    """The plan of one request.

    params: with the constraints of the answer. constrains: its tools constrain the answer.

    parser: the model's reasoning parser. splits: the answer separates reasoning from content.
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
        return None if self.use is None else self.use.definitions

    def sampling(self, prompt: PreparedPrompt) -> SamplingParams:
        """The request's parameters, with the reasoning state of its answer's beginning."""
        if self.parser is None:
            return self.params
        state = self.parser.begins(prompt.text or "", self.prefix)
        return replace(self.params, thinking=Thinking(self.parser.start, self.parser.end, state, self.budget))

    def answer_parser(self, request: EngineRequest, prompt: PreparedPrompt) -> AnswerParser | None:
        """The parser of a sequence's answer; None if there is nothing to parse."""
        splitter, calls = None, None
        if self.parser is not None and self.splits:
            followed = self.budget is not None or self.params.structured_outputs is not None
            interrupts = self.form.interrupts if self.form is not None and not followed else ()
            splitter = self.parser.splitter(prompt.text or "", self.prefix, interrupts, self.use is not None)
        if self.use is not None and self.form is not None:
            ids = call_ids(self.form, request.prompt_token_ids, request.params.seed)
            context = ParserContext(self.use.callable, ids, self.use.parallel)
            calls = self.form.parser(context)
        return None if splitter is None and calls is None else AnswerParser(splitter, calls, self.constrains)


@dataclass(frozen=True)
class ChatFormat:
    """The reasoning and tool-call formats of this server's model.

    known: the template's format of tool calls is known; otherwise requests with tools are refused. hosted: the rule for
    tools that are not functions. variables: of the chat template, below those of a request.
    """

    parser: Parser | None = None
    form: Format = DEFAULT
    known: bool = True
    specials: Mapping[str, int] = field(default_factory=dict)
    hosted: HostedTools = field(default_factory=HostedTools)
    variables: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        inputs: InputProcessor,
        reasoning_parser: str | None,
        tool_call_parser: str | None,
        hosted: HostedTools | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> ChatFormat:
        """The formats of the flags, or by default of the chat template. Raises ConfigError for unknown names."""
        parser, form = parser_named(reasoning_parser), format_named(tool_call_parser)
        tokenizer = inputs.tokenizer
        template = "" if tokenizer is None else tokenizer.chat_template or ""
        if parser is None and reasoning_parser != OFF:
            parser = parser_of(template)
        if form is None and (found := format_of(template)) is not None:
            form = found
        known = form is not None or not inputs.tool_template.tools
        specials = {} if tokenizer is None else tokenizer.special_tokens
        return cls(parser, form or DEFAULT, known, specials, hosted or HostedTools(), variables or {})

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
        outputs = params.structured_outputs
        if use is not None:
            params = self._constrained(use, params)
            marks += self.form.marks
        if any(mark in self.specials for mark in marks):
            params = replace(params, skip_special_tokens=False)  # otherwise the marks would be missing in the text
        prefix = None
        if request.continue_final_message:
            content = request.conversation()[-1]["content"]
            prefix = content if isinstance(content, str) else ""
        if use is None and outputs is not None and prefix is None and self.parser is not None:
            answer = Structure(self.form, self.specials).answer(outputs)
            outputs, params = answer, replace(params, structured_outputs=answer)
        constrains = params.structured_outputs is not outputs
        form, budget = self.form if use else None, request.thinking_token_budget
        splits = request.separate_reasoning is not False
        return ChatPlan(params, self.parser, form, use, prefix, budget, constrains, splits)

    def _constrained(self, use: ToolUse, params: SamplingParams) -> SamplingParams:
        """``params`` with the grammar of required calls, or of calls whose arguments must satisfy their schemas."""
        structure, outputs = Structure(self.form, self.specials), params.structured_outputs
        if use.mode == "required":
            outputs = structure.required(use.callable, use.parallel)
        elif outputs is not None:
            outputs = structure.either(use.callable, use.parallel, outputs)
        elif use.strict:
            outputs = structure.optional(use.callable, use.parallel)
        return replace(params, structured_outputs=outputs)
