"""Answers of a model in this process."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from unisono.entrypoints.llm import LLM
from unisono.text.detokenizer import Detokenizer
from unisono.text.reasoning import Splitter, parser_of
from unisono.tools.chat.answers import AnswerFigures, ChatPiece, DraftedToken, Message
from unisono.types import BadRequest, FinishReason, SamplingParams, TokenDelta, request_failure

TEMPLATE_PARAMETERS = ("enable_thinking", "reasoning_effort")
"""Parameters that the chat template reads."""
SHOWN = ("temperature", "top_k", "top_p", "min_p")


class OfflineModel:
    """An :class:`unisono.entrypoints.llm.LLM`. Raises BadRequest for a checkpoint without a tokenizer."""

    prompt_interrupts = False

    def __init__(self, llm: LLM, name: str) -> None:
        if llm.tokenizer is None:
            raise BadRequest(f"{name} has no tokenizer, so it cannot take text.")
        self._llm, self.name, self._tokenizer = llm, name, llm.tokenizer
        self._parser = parser_of(llm.tokenizer.chat_template or "")

    def banner(self) -> Sequence[str]:
        info: Any = self._llm.engine.info()
        settings, speculation = info["settings"], info["speculation"]
        facts = f"{info['architecture']}, {settings['dtype']} on {settings['device']}"
        lines = [f"{self.name} · {facts} · context {settings['max_model_len']} tokens"]
        reason = next((row["reason"] for row in info["decisions"] if row["name"] == "speculative"), "")
        if speculation["drafter"] != "none":
            drafts = f"speculates with {speculation['drafter']}, k = {speculation['num_speculative_tokens']}"
            lines.append(drafts + (f" ({reason})" if reason else ""))
        else:
            lines.append("no speculation" + (f" ({reason})" if reason else ""))
        return lines

    def defaults(self) -> Mapping[str, Any]:
        params = self._llm.get_default_sampling_params()
        return {name: getattr(params, name) for name in SHOWN} | {"max_tokens": None, "seed": None}

    def check(self, params: Mapping[str, Any]) -> None:
        self._params(params)

    def answer(
        self, messages: Sequence[Message], params: Mapping[str, Any], figures: AnswerFigures, stop: Callable[[], object]
    ) -> Iterator[ChatPiece]:
        template = {name: params[name] for name in TEMPLATE_PARAMETERS if name in params}
        prompt = self._llm.chat_prompt(messages, chat_template_kwargs=template or None)
        sampling = self._params(params)
        splitter = None
        if self._parser is not None:
            splitter = self._parser.splitter(prompt["prompt"])
            if {self._parser.start, self._parser.end} & set(self._tokenizer.special_tokens):
                sampling = replace(sampling, skip_special_tokens=False)
        ids = prompt["prompt_token_ids"]
        figures.prompt_tokens, figures.seed, figures.rounds = len(ids), sampling.seed, 0
        detokenizer = Detokenizer(self._tokenizer, sampling, ids)
        for delta in self._llm.stream(ids, sampling):
            if delta.finish is FinishReason.ABORT:
                raise request_failure(delta.error, delta.error_param)
            figures.tick(len(delta.token_ids))
            yield from _pieces(delta, detokenizer, splitter, figures)
            if delta.finish is not FinishReason.RUNNING:
                figures.finish = delta.finish.text
            if detokenizer.stop_string is not None or (stop() and not figures.finish):
                figures.finish = "stop" if detokenizer.stop_string is not None else "abort"
                break
        if splitter is not None:
            yield ChatPiece(*splitter.feed("", last=True))

    def _params(self, params: Mapping[str, Any]) -> SamplingParams:
        """The checkpoint's defaults, the user's settings, and a seed. Raises BadRequest."""
        own = {name: value for name, value in params.items() if name not in TEMPLATE_PARAMETERS}
        if isinstance(own.get("stop"), str):
            own["stop"] = (own["stop"],)
        defaults = {name: value for name, value in self.defaults().items() if name in SHOWN}
        try:
            return SamplingParams(**defaults | {"seed": secrets.randbits(31), "max_tokens": None} | own)
        except TypeError:
            unknown = next(name for name in own if name not in SamplingParams.__dataclass_fields__)
            raise BadRequest(f"{unknown} is not a sampling parameter.", unknown) from None


def _pieces(
    delta: TokenDelta, detokenizer: Detokenizer, splitter: Splitter | None, figures: AnswerFigures
) -> Iterator[ChatPiece]:
    """The pieces of a delta, token by token, each with its origin."""
    done, last = 0, len(delta.token_ids) - 1
    for tokens, drafted, accepted in delta.rounds:
        figures.rounds = (figures.rounds or 0) + 1 if drafted else figures.rounds
        figures.drafted, figures.accepted = figures.drafted + drafted, figures.accepted + accepted
        for place in range(tokens):
            finish = delta.finish if done == last else FinishReason.RUNNING
            text = detokenizer.feed([delta.token_ids[done]], finish)
            reasoning, content = ("", text) if splitter is None else splitter.feed(text)
            yield ChatPiece(reasoning, content, DraftedToken(place if place < accepted else None, drafted, accepted))
            done += 1
    if not delta.token_ids and (text := detokenizer.feed([], delta.finish)):
        reasoning, content = ("", text) if splitter is None else splitter.feed(text)
        yield ChatPiece(reasoning, content)
