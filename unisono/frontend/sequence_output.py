"""The output of one sequence from the engine's deltas: text, tokens up to its end, log-probabilities, hidden states."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from unisono.text.detokenizer import Detokenizer, TokenOffsets
from unisono.text.tokenizer import Tokenizer
from unisono.types import EngineRequest, FinishReason, Logprob, TokenDelta, TokenLogprobs, Vectors
from unisono.types.expert_ids import ExpertIds


@dataclass(frozen=True, slots=True)
class NewTokens:
    """The new part of a delta.

    Tokens after a stop string are left out.

    text: the text that later tokens cannot change; it may come later than its tokens. logprobs: one entry per token, or
    None. finish: STOP if a stop string ended the text, else the engine's. stop_string: that string, or None.
    """

    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None
    finish: FinishReason
    stop_string: str | None


class SequenceOutput:
    """One sequence's output.

    There is no text if ``tokenizer`` is None or the request turns ``detokenize`` off. num_tokens: tokens so far.
    cached_tokens: prompt tokens from the prefix cache. prompt_routed_experts: of a prompt's first sequence; None
    otherwise.
    """

    def __init__(self, request: EngineRequest, tokenizer: Tokenizer | None) -> None:
        self.request = request
        self.num_tokens = self.cached_tokens = 0
        self._tokenizer = tokenizer = tokenizer if request.params.detokenize else None
        prompt, params = request.prompt_token_ids, request.params
        self._detokenizer = None if tokenizer is None else Detokenizer(tokenizer, params, prompt)
        self._offsets: TokenOffsets | None = None
        self._hidden: list[Vectors] = []
        self._prompt_hidden = Vectors("float32", 0, b"")
        self._experts: ExpertIds | None = None
        self._expert_parts: list[bytes] = []
        self.prompt_routed_experts: ExpertIds | None = None

    def record(self, delta: TokenDelta) -> None:
        """Record the fields of a delta beside its tokens."""
        self.cached_tokens = max(self.cached_tokens, delta.cached_tokens)
        if delta.prompt_hidden_states is not None:
            self._prompt_hidden = delta.prompt_hidden_states
        if delta.hidden_states is not None:
            self._hidden.append(delta.hidden_states)
        if delta.prompt_routed_experts is not None:
            self.prompt_routed_experts = delta.prompt_routed_experts
        if delta.routed_experts is not None:
            self._experts = self._experts or replace(delta.routed_experts, data=b"")
            self._expert_parts.append(delta.routed_experts.data)

    def detokenize(self, delta: TokenDelta) -> NewTokens:
        """Add a delta's tokens."""
        ids, text, finish, stop = delta.token_ids, "", delta.finish, None
        if self._detokenizer is not None:
            text, stop = self._detokenizer.feed(ids, finish), self._detokenizer.stop_string
            ids = ids[: self._detokenizer.num_tokens - self.num_tokens]
        self.num_tokens += len(ids)
        logprobs = None if delta.logprobs is None else delta.logprobs[: len(ids)]
        return NewTokens(text, ids, logprobs, finish if stop is None else FinishReason.STOP, stop)

    def offsets(self, token_ids: Sequence[int]) -> list[int]:
        """Characters of the output before each of the next tokens.

        Call it for every delta in order; see :class:`TokenOffsets`.
        """
        if self._tokenizer is None:
            return [0] * len(token_ids)
        if self._offsets is None:
            self._offsets = TokenOffsets(self._tokenizer, self.request.params, self.request.prompt_token_ids)
        return [self._offsets.next(token_id) for token_id in token_ids]

    def prompt_offsets(self, text: str) -> list[int]:
        """Characters of the prompt's ``text`` before each of its tokens."""
        ids = self.request.prompt_token_ids
        if self._tokenizer is None:
            return [0] * len(ids)
        if (found := self._tokenizer.offsets(text, ids)) is not None:
            return found
        offsets = TokenOffsets(self._tokenizer, self.request.params, [])
        return [offsets.next(token_id) for token_id in ids]

    def token_bytes(self, token_id: int) -> bytes | None:
        """The bytes of a token by itself; None without a tokenizer."""
        return None if self._tokenizer is None else self._tokenizer.token_bytes(token_id)

    def token_text(self, token_id: int) -> str | None:
        """The text of a token by itself; None without a tokenizer."""
        return None if self._tokenizer is None else self._tokenizer.decode([token_id], skip_special_tokens=False)

    def prompt_logprobs(self, scores: list[TokenLogprobs], most: int) -> list[dict[int, Logprob] | None]:
        """An entry per prompt token: None before the first scored one, then the token's own and the ``most`` likeliest
        ones.

        scores: log-probabilities of the scored tokens.
        """
        ids, first = self.request.prompt_token_ids, self.request.first_scored
        pairs = zip(ids[first:], scores, strict=True)
        return [*[None] * len(ids[:first]), *(score.named(token, self.token_text, most) for token, score in pairs)]

    def hidden_states(self) -> Vectors:
        """The hidden states of each generated token but the last, [tokens - 1, hidden]."""
        first = self._hidden[0] if self._hidden else Vectors("float32", 0, b"")
        return replace(first, data=b"".join(rows.data for rows in self._hidden)).head(max(0, self.num_tokens - 1))

    def routed_experts(self) -> ExpertIds | None:
        """The experts of each generated token but the last; None if not reported."""
        if self._experts is None:
            return None
        return replace(self._experts, data=b"".join(self._expert_parts)).head(max(0, self.num_tokens - 1))

    def prompt_hidden_states(self) -> Vectors:
        """The hidden states of each prompt token, [tokens, hidden]; empty except for a prompt's first sequence."""
        return self._prompt_hidden

    def forget_prompt_hidden_states(self) -> None:
        """Free the hidden states of the prompt's tokens."""
        self._prompt_hidden = Vectors("float32", 0, b"")
