"""The offline interface: ``LLM(model=…).generate(prompts, params)``, as vLLM's."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

from unisono.config import EngineConfig
from unisono.engine.engine import Engine
from unisono.frontend.input_processor import InputProcessor, ModelFacts, PromptType
from unisono.frontend.sequence_output import SequenceOutput
from unisono.tokenizer import Tokenizer
from unisono.types import (
    MAX_LOGPROBS,
    BadRequest,
    CompletionOutput,
    EngineRequest,
    FinishReason,
    RequestOutput,
    SamplingParams,
    TokenDelta,
    TokenLogprobs,
)


class LLM:
    """A model in this process. Keyword arguments are :class:`unisono.config.EngineConfig`'s fields.

    ``progress(stage, share)`` is called while loading and capturing. Use as a context manager, or call
    :meth:`shutdown`, to free the device. Raises CheckpointError and ConfigError.
    """

    def __init__(
        self, model: str = "tiny", *, progress: Callable[[str, float], None] = lambda stage, share: None, **flags: Any
    ) -> None:
        self.engine = Engine(EngineConfig(model=str(model), **flags), progress)
        try:
            self.tokenizer = Tokenizer.load(self.engine.checkpoint.path)
        except BaseException:
            self.engine.shutdown()  # the caller has no object to do it with
            raise
        self._inputs = InputProcessor(self.tokenizer, ModelFacts.of(self.engine.info(), self.tokenizer))
        self.eos_token_ids = self._inputs.model.eos_token_ids
        self._ids = itertools.count()

    def generate(
        self,
        prompts: PromptType | Sequence[PromptType],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Complete prompts; returns one RequestOutput each, in order.

        A prompt is a string, a list of token ids, ``{"prompt": …}`` or ``{"prompt_token_ids": …}``. These mappings may
        have ``"embedding_overrides"``, embeddings in place of those of some tokens: {position: vector} or (positions,
        tensor [n, hidden]). ``{"prompt_embeds": tensor [tokens, hidden]}`` is a prompt of embeddings alone.
        sampling_params: one for all prompts, or one each; None takes generation_config.json's.
        Raises BadRequest, before anything runs, if any of them is wrong.
        """
        batch = _as_list(prompts)
        params = self._params(sampling_params, len(batch))
        prepared = [self._prepare(p, q) for p, q in zip(batch, params, strict=True)]
        self._run([sequence for sequences in prepared for sequence in sequences])
        return [
            sequences[0].result([sequence.finished(i) for i, sequence in enumerate(sequences)])
            for sequences in prepared
        ]

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation, or several: lists of ``{"role": …, "content": …}``."""
        if not messages:
            raise BadRequest("messages is empty; give at least one.", param="messages")
        several = messages if not isinstance(messages[0], Mapping) else [messages]
        return self.generate([self.chat_prompt(m) for m in several], sampling_params)  # type: ignore[arg-type]

    def chat_prompt(self, messages: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """The prompt that the chat template makes of one conversation."""
        prompt = self._inputs.chat(messages)
        return {"prompt": prompt.text, "prompt_token_ids": prompt.token_ids}

    def stream(self, prompt_token_ids: Sequence[int], params: SamplingParams | None = None) -> Iterator[TokenDelta]:
        """Yield one request's tokens as they come. Leaving the loop early aborts it."""
        request = self._request(prompt_token_ids, params or self.engine.default_params())
        self.engine.add(request)
        try:
            while self.engine.has_work():
                for delta in self.engine.step():
                    if delta.request_id == request.request_id:
                        yield delta
                        if delta.finish is not FinishReason.RUNNING:
                            return
        finally:
            self.engine.abort(request.request_id)

    def shutdown(self) -> None:
        """Free the device's memory. The object is of no use afterwards."""
        if self.engine is not None:
            self.engine.shutdown()
            del self.engine
            self.engine = None  # type: ignore[assignment]

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *error: object) -> None:
        self.shutdown()

    def _params(self, given: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
        if given is None:
            return [self.engine.default_params()] * count
        if isinstance(given, SamplingParams):
            return [given] * count
        if len(given) != count:
            raise BadRequest(f"{len(given)} SamplingParams for {count} prompts; give one, or one each.")
        return list(given)

    def _prepare(self, given: PromptType, params: SamplingParams) -> list[_Running]:
        """Return the prompt's sequences: ``params.n`` of them."""
        prompt = self._inputs.prompt(given)
        sequences = self._inputs.request(str(next(self._ids)), prompt, params).sequences()
        self.engine.check(sequences[0])
        return [_Running(SequenceOutput(sequence, self.tokenizer), prompt.text) for sequence in sequences]

    def _request(self, prompt: PromptType, params: SamplingParams) -> EngineRequest:
        return self._inputs.request(str(next(self._ids)), self._inputs.prompt(prompt), params)

    def _run(self, states: list[_Running]) -> None:
        engine, running = self.engine, {s.request.request_id: s for s in states}
        with contextlib.ExitStack() as undo:
            for request_id, state in running.items():
                engine.add(state.request)
                undo.callback(engine.abort, request_id)  # does nothing for a request that has ended
            open_ids = set(running)
            while open_ids:
                for delta in engine.step():
                    if delta.request_id in open_ids and running[delta.request_id].take(delta):
                        open_ids.discard(delta.request_id)
                        engine.abort(delta.request_id)


class _Running:
    """One sequence of a ``generate`` call. prompt: its text, where it was given as text."""

    def __init__(self, output: SequenceOutput, prompt: str | None) -> None:
        self.output, self.request, self.prompt = output, output.request, prompt
        self.completion = CompletionOutput(0, [], "")
        self._logprobs: list[TokenLogprobs] = []
        self._prompt_logprobs: list[TokenLogprobs] = []

    def take(self, delta: TokenDelta) -> bool:
        """Take in new tokens. Returns whether the sequence has ended, by the engine's word or a stop string."""
        self.output.record(delta)
        new = self.output.detokenize(delta)
        self.completion.token_ids += new.token_ids
        self.completion.text += new.text
        self.completion.error = delta.error
        self._logprobs += new.logprobs or []
        self._prompt_logprobs += delta.prompt_logprobs or []
        for name, values in (delta.extra or {}).items():
            self.completion.extra.setdefault(name, []).extend(values)
        if new.finish is not FinishReason.RUNNING:
            self.completion.finish_reason = new.finish.text
        return new.finish is not FinishReason.RUNNING

    def finished(self, index: int) -> CompletionOutput:
        """Return the completion, as output ``index`` of its prompt."""
        completion, text_of = self.completion, self.output.token_text
        completion.index = index
        if self.request.params.logprobs is not None:
            pairs = zip(completion.token_ids, self._logprobs, strict=True)
            completion.logprobs = [one.named(token, text_of, len(one.top)) for token, one in pairs]
            completion.cumulative_logprob = sum(given.logprob for given in self._logprobs)
        if self.request.params.return_hidden_states:
            completion.hidden_states = self.output.hidden_states()
        return completion

    def result(self, completions: list[CompletionOutput]) -> RequestOutput:
        """Return the prompt's result, of whose sequences this is the first."""
        request, params = self.request, self.request.params
        assert params.seed is not None
        ids, cached = request.prompt_token_ids, self.output.cached_tokens
        result = RequestOutput(request.request_id, self.prompt, ids, completions, params.seed, cached)
        if params.prompt_logprobs is not None:
            result.prompt_logprobs = self.output.prompt_logprobs(self._prompt_logprobs, MAX_LOGPROBS)
        if params.return_hidden_states:
            result.prompt_hidden_states = self.output.prompt_hidden_states()
        return result


def _as_list(prompts: PromptType | Sequence[PromptType]) -> list[PromptType]:
    """Return one prompt or many as a list. A list of ints is one prompt of token ids."""
    if isinstance(prompts, (str, Mapping)):
        return [prompts]
    if prompts and isinstance(prompts[0], int):
        return [cast(Sequence[int], prompts)]
    return list(cast(Sequence[PromptType], prompts))
