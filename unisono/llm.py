"""The offline interface: ``LLM(model=…).generate(prompts, params)``, as vLLM's."""

from __future__ import annotations

import contextlib
import itertools
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

from unisono import vectors
from unisono.config import EngineConfig
from unisono.engine.engine import Engine
from unisono.tokenizer import Detokenizer, Tokenizer
from unisono.types import (
    MAX_LOGPROBS,
    BadRequest,
    CompletionOutput,
    EngineRequest,
    FinishReason,
    Logprob,
    RequestOutput,
    SamplingParams,
    TokenDelta,
    TokenLogprobs,
)

Prompt = str | Sequence[int] | Mapping[str, Any]


class LLM:
    """A model in this process. Keyword arguments are :class:`unisono.config.EngineConfig`'s fields.

    ``progress(stage, share)`` is called while loading and capturing. Use as a context manager, or call
    :meth:`shutdown`, to free the device. Raises CheckpointError and ConfigError.
    """

    def __init__(
        self, model: str = "tiny", *, progress: Callable[[str, float], None] = lambda stage, share: None, **flags: Any
    ) -> None:
        self.engine = Engine(EngineConfig(model=str(model), **flags), progress)
        checkpoint = self.engine.checkpoint
        try:
            self.tokenizer = Tokenizer.load(checkpoint.path)
        except BaseException:
            self.engine.shutdown()  # nobody else could
            raise
        own = self.tokenizer.eos_token_ids if self.tokenizer else ()
        self.eos_token_ids = tuple(sorted({*checkpoint.eos_token_ids, *own}))
        self._ids = itertools.count()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Complete prompts; returns one RequestOutput each, in order.

        A prompt is a string, a list of token ids, or ``{"prompt": …}`` / ``{"prompt_token_ids": …}``, where
        ``"embedding_overrides"`` may give embeddings that stand in for those of some tokens: {position: vector} or
        (positions, tensor [n, hidden]); or ``{"prompt_embeds": tensor [tokens, hidden]}`` alone. One SamplingParams
        serves all prompts, or give one each; None takes generation_config.json's.
        Raises BadRequest before anything runs if any of them is wrong.
        """
        batch = _as_list(prompts)
        params = self._params(sampling_params, len(batch))
        prepared = [self._prepare(p, q) for p, q in zip(batch, params, strict=True)]
        self._run([sequence for sequences in prepared for sequence in sequences])
        return [_output(sequences) for sequences in prepared]

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
        tokenizer = self._need_tokenizer()
        text = tokenizer.apply_chat_template(messages)
        return {"prompt": text, "prompt_token_ids": tokenizer.encode(text, add_special_tokens=False)}

    def stream(self, prompt_token_ids: Sequence[int], params: SamplingParams | None = None) -> Iterator[TokenDelta]:
        """One request's tokens as they come. Leaving the loop early aborts it."""
        request = self._request(list(prompt_token_ids), params or self.engine.default_params())
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

    def _prepare(self, prompt: Prompt, params: SamplingParams) -> list[_Running]:
        """The prompt's sequences: ``params.n`` of them."""
        text, ids = self._tokens(prompt)
        overrides = None
        if isinstance(prompt, Mapping) and "embedding_overrides" in prompt:
            ids, overrides = vectors.overridden(ids, prompt["embedding_overrides"])
        elif isinstance(prompt, Mapping) and "prompt_embeds" in prompt:
            ids, overrides = vectors.embedded_prompt(prompt["prompt_embeds"])
        request = replace(self._request(ids, params), overrides=overrides)
        sequences = request.sequences()
        self.engine.check(sequences[0])
        if params.stop:
            self._need_tokenizer()
        return [_Running(sequence, text, self.tokenizer) for sequence in sequences]

    def _tokens(self, prompt: Prompt) -> tuple[str | None, list[int]]:
        if isinstance(prompt, str):
            return prompt, self._need_tokenizer().encode(prompt)
        if isinstance(prompt, Mapping):
            _check_mapping(prompt)
            if "prompt_embeds" in prompt:
                return None, []
            if "prompt_token_ids" in prompt:
                return prompt.get("prompt"), list(prompt["prompt_token_ids"])
            if isinstance(prompt.get("prompt"), str):
                return prompt["prompt"], self._need_tokenizer().encode(prompt["prompt"])
            raise BadRequest(
                f"a prompt mapping needs 'prompt', 'prompt_token_ids' or 'prompt_embeds'; it has {sorted(prompt)}.",
                "prompt",
            )
        return None, list(prompt)

    def _request(self, ids: list[int], params: SamplingParams) -> EngineRequest:
        if params.seed is None:
            params = replace(params, seed=secrets.randbits(53))
        eos = () if params.ignore_eos else self.eos_token_ids
        stop_ids = tuple(dict.fromkeys((*eos, *params.stop_token_ids)))
        bad_words = self._need_tokenizer().bad_words(params.bad_words) if params.bad_words else ()
        return EngineRequest(str(next(self._ids)), ids, params, stop_ids, bad_words=bad_words)

    def _need_tokenizer(self) -> Tokenizer:
        if self.tokenizer is None:
            path = self.engine.checkpoint.path
            raise BadRequest(
                f"{path} has no tokenizer: give prompts as token ids, without stop strings.", param="prompt"
            )
        return self.tokenizer

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
    """One sequence of a ``generate`` call on its way."""

    def __init__(self, request: EngineRequest, prompt: str | None, tokenizer: Tokenizer | None) -> None:
        self.request, self.prompt, self._tokenizer = request, prompt, tokenizer
        self._detokenizer = None if tokenizer is None else Detokenizer.of(tokenizer, request)
        self._token_ids: list[int] = []
        self._logprobs: list[TokenLogprobs] = []
        self._prompt_logprobs: list[TokenLogprobs] = []
        self._returned = vectors.Returned()
        self._extra: dict[str, list[Any]] = {}
        self._text = ""
        self._finish = ""
        self._error: str | None = None
        self.cached = 0

    def take(self, delta: TokenDelta) -> bool:
        """Take in new tokens; True when this request has ended, by the engine's word or a stop string."""
        self.cached = max(self.cached, delta.cached_tokens)
        self._token_ids += delta.token_ids
        self._logprobs += delta.logprobs or []
        self._prompt_logprobs += delta.prompt_logprobs or []
        self._returned.take(delta)
        for name, values in (delta.extra or {}).items():
            self._extra.setdefault(name, []).extend(values)
        if delta.finish is not FinishReason.RUNNING:
            self._finish, self._error = delta.finish.text, delta.error
        if self._detokenizer is not None:
            self._text += self._detokenizer.feed(delta.token_ids, delta.finish)
            if self._detokenizer.stop_string is not None:
                self._finish = FinishReason.STOP.text
                del self._token_ids[self._detokenizer.num_tokens :], self._logprobs[self._detokenizer.num_tokens :]
        return bool(self._finish)

    def output(self, index: int) -> CompletionOutput:
        completion = CompletionOutput(
            index, self._token_ids, self._text, self._finish, error=self._error, extra=self._extra
        )
        if self.request.params.logprobs is not None:
            completion.logprobs = self._named(self._token_ids, self._logprobs)
            completion.cumulative_logprob = sum(given.logprob for given in self._logprobs)
        if self.request.params.return_hidden_states:
            completion.hidden_states = self._returned.own(len(self._token_ids))
        return completion

    def prompt_hidden_states(self) -> Any:
        """A tensor [prompt tokens, hidden], or None where the request did not ask for it."""
        return self._returned.prompt() if self.request.params.return_hidden_states else None

    def prompt_logprobs(self) -> list[dict[int, Logprob] | None] | None:
        if self.request.params.prompt_logprobs is None:
            return None
        ids, first = self.request.prompt_token_ids, self.request.first_scored
        return [*[None] * len(ids[:first]), *self._named(ids[first:], self._prompt_logprobs)]

    def _named(self, token_ids: list[int], given: list[TokenLogprobs]) -> list[dict[int, Logprob]]:
        return [one.named(token, self._text_of, MAX_LOGPROBS) for token, one in zip(token_ids, given, strict=True)]

    def _text_of(self, token_id: int) -> str | None:
        return None if self._tokenizer is None else self._tokenizer.decode([token_id], skip_special_tokens=False)


def _output(sequences: list[_Running]) -> RequestOutput:
    """What came of one prompt."""
    first = sequences[0]
    request, completions = first.request, [sequence.output(i) for i, sequence in enumerate(sequences)]
    assert request.params.seed is not None
    ids, cached, scores = request.prompt_token_ids, first.cached, first.prompt_logprobs()
    return RequestOutput(
        request.request_id, first.prompt, ids, completions, request.params.seed, cached, prompt_logprobs=scores,
        prompt_hidden_states=first.prompt_hidden_states(),
    )  # fmt: skip


def _check_mapping(prompt: Mapping[str, Any]) -> None:
    """Raises BadRequest for keys that nobody knows, and for those that exclude each other."""
    known = {"prompt", "prompt_token_ids", "prompt_embeds", "embedding_overrides"}
    unknown = sorted(prompt.keys() - known)
    if unknown:
        raise BadRequest(f"a prompt mapping has the keys {unknown}; known ones are {sorted(known)}.", "prompt")
    others = sorted(prompt.keys() - {"prompt_embeds"})
    if "prompt_embeds" in prompt and others:
        raise BadRequest(f"prompt_embeds are a whole prompt by themselves; leave out {others}.", "prompt_embeds")


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt or many: a list of ints is one prompt of token ids."""
    if isinstance(prompts, (str, Mapping)):
        return [prompts]
    if prompts and isinstance(prompts[0], int):
        return [cast(Sequence[int], prompts)]
    return list(cast(Sequence[Prompt], prompts))
