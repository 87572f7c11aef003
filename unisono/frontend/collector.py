"""Collects the engine's deltas of a prompt's sequences into the ``RequestOutput`` of offline callers."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

from unisono.frontend.sequence_output import SequenceOutput
from unisono.text.tokenizer import Tokenizer
from unisono.types import (
    MAX_LOGPROBS,
    CompletionOutput,
    EngineRequest,
    FinishReason,
    Logprob,
    RequestMetrics,
    RequestOutput,
    RequestOutputKind,
    TokenDelta,
    TokenLogprobs,
)
from unisono.types.acceptance import DraftCount
from unisono.types.vectors import unpack


class Collector:
    """The sequences of one prompt.

    requests: one per sequence, as submitted to the engine.

    request_id: the caller's. prompt: its text, if it was a text. eos: ids that are not reported as stop reasons.
    speculation: the drafter's name, and its largest number of drafts per step.
    """

    def __init__(
        self,
        request_id: str,
        requests: Sequence[EngineRequest],
        tokenizer: Tokenizer | None,
        prompt: str | None,
        eos: Sequence[int] = (),
        speculation: tuple[str, int] = ("none", 0),
    ) -> None:
        self.request_id, self.requests, self.prompt = request_id, list(requests), prompt
        self.metrics = RequestMetrics(arrival_time=time.time(), queued_ts=time.monotonic())
        self._sequences = {
            request.request_id: _Sequence(SequenceOutput(request, tokenizer), index, eos, speculation)
            for index, request in enumerate(requests)
        }

    @property
    def open(self) -> list[str]:
        """Ids of the sequences that have not ended."""
        return [name for name, one in self._sequences.items() if not one.completion.finished()]

    def take(self, delta: TokenDelta, now: float) -> bool:
        """Add a delta that left the engine at ``now`` (``time.monotonic``).

        Returns True if its sequence ended here while the engine continues: the caller aborts it. Later deltas of a
        sequence that has ended are ignored.
        """
        sequence, metrics = self._sequences[delta.request_id], self.metrics
        if sequence.completion.finished():
            return False
        count = sequence.take(delta)
        metrics.num_generation_tokens += count
        if count:
            metrics.last_token_ts = now
            if not metrics.first_token_ts:
                metrics.first_token_ts, metrics.first_token_latency = now, now - metrics.queued_ts
        return sequence.completion.finished() and delta.finish is FinishReason.RUNNING

    def abort_rest(self) -> None:
        """Mark the sequences that have not ended as aborted."""
        for name in self.open:
            self._sequences[name].completion.finish_reason = FinishReason.ABORT.text

    def output(self, kind: RequestOutputKind = RequestOutputKind.CUMULATIVE) -> RequestOutput:
        """The request's current state. With DELTA, the part that is new since the last call."""
        first = next(iter(self._sequences.values()))
        params, output = self.requests[0].params, first.output
        assert params.seed is not None
        outputs = [one.snapshot(kind is RequestOutputKind.DELTA) for one in self._sequences.values()]
        result = RequestOutput(
            self.request_id,
            self.prompt,
            self.requests[0].prompt_token_ids,
            outputs,
            params.seed,
            output.cached_tokens,
            finished=not self.open,
            metrics=replace(self.metrics),
        )
        if params.prompt_logprobs is not None and first.started:
            result.prompt_logprobs = output.prompt_logprobs(first.prompt_logprobs, MAX_LOGPROBS)
        if params.return_hidden_states:
            result.prompt_hidden_states = unpack(output.prompt_hidden_states())
        if output.prompt_routed_experts is not None:
            result.prompt_routed_experts = output.prompt_routed_experts.array()
        return result


class _Sequence:
    def __init__(self, output: SequenceOutput, index: int, eos: Sequence[int], speculation: tuple[str, int]) -> None:
        self._drafts, self._speculation = DraftCount(), speculation
        self.output, self.started, self._params, self._eos = output, False, output.request.params, eos
        self.prompt_logprobs: list[TokenLogprobs] = []
        self.completion = CompletionOutput(index, [], "")
        if self._params.logprobs is not None:
            self.completion.logprobs, self.completion.cumulative_logprob = [], 0.0
        self._told_tokens = self._told_text = 0

    def take(self, delta: TokenDelta) -> int:
        """Add new tokens, up to the end by the engine or by a stop string; returns their number."""
        self.started = True
        self.output.record(delta)
        new, completion = self.output.detokenize(delta), self.completion
        self._drafts.add(delta.rounds, len(new.token_ids), delta.fewer_drafts)
        completion.token_ids += new.token_ids
        completion.text += new.text
        completion.error = delta.error
        self.prompt_logprobs += delta.prompt_logprobs or []
        for name, values in (delta.extra or {}).items():
            completion.extra.setdefault(name, []).extend(values)
        if completion.logprobs is not None:
            completion.logprobs += self._named(new.token_ids, new.logprobs or [])
            for one in new.logprobs or []:
                completion.cumulative_logprob = (completion.cumulative_logprob or 0.0) + one.logprob
        if new.finish is not FinishReason.RUNNING:
            completion.finish_reason = new.finish.text
            if self._speculation[0] != "none":
                completion.acceptance = self._drafts.result(*self._speculation, detailed=True)
            completion.stop_reason = new.stop_string
            last = new.token_ids[-1] if new.token_ids else None
            if new.finish is FinishReason.STOP and new.stop_string is None and last not in self._eos:
                completion.stop_reason = last
            if self._params.return_hidden_states:
                completion.hidden_states = unpack(self.output.hidden_states())
            if (experts := self.output.routed_experts()) is not None:
                completion.routed_experts = experts.array()
        return len(new.token_ids)

    def _named(self, ids: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> list[dict[int, Logprob]]:
        text_of = self.output.token_text
        return [one.named(token, text_of, len(one.top)) for token, one in zip(ids, logprobs, strict=True)]

    def snapshot(self, only_new: bool) -> CompletionOutput:
        """A copy of everything so far, or of the part that is new since the last call."""
        done, tokens, text = self.completion, 0, 0
        if only_new:
            tokens, self._told_tokens = self._told_tokens, len(done.token_ids)
            text, self._told_text = self._told_text, len(done.text)
        logprobs = None if done.logprobs is None else done.logprobs[tokens:]
        return replace(done, token_ids=done.token_ids[tokens:], text=done.text[text:], logprobs=logprobs)
