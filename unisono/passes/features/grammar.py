"""Structured outputs and reasoning budgets: the allowed tokens of a position depend on the tokens before it.

The grammar computes a bitmask for each position, including drafts, and can do so only on the host. The rounds of such
requests are therefore split into two passes (``round.draft_program``, ``round.verify_program``), and the host reads the
drafts between them.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from unisono.graphs import NO_FEATURES, Buffers, Features, Field
from unisono.passes.features.base import Committed, Feature, FeatureContext, HostPass, PassKind, RequestState
from unisono.structured_output.matcher import ALL, Follower, GrammarError, Matcher, fill, restricting
from unisono.structured_output.thinking import MarksCache, ThinkingMatcher
from unisono.structured_output.workers.grammars import Compiled, Grammars
from unisono.structured_output.workers.walk import allow, forbid
from unisono.types import BadRequest, EngineRequest, FinishReason, TokenDelta

MASKS = Features(masks=True)


class Grammar(Feature):
    """Field: ``mask`` [R, P, W, words]: bit i % 32 of word i // 32 allows token i. Padding allows all."""

    name = "grammar"
    requested_by = ("params.structured_outputs", "params.thinking")
    needs = MASKS
    reads_drafts = True

    def __init__(self, context: FeatureContext) -> None:
        super().__init__(context)
        self._grammars = Grammars(context.directory, context.vocab_size, context.eos)
        self._thoughts = MarksCache(context.directory, context.vocab_size)
        self._words = -(-context.vocab_size // 32)

    def fields(self, kind: PassKind) -> tuple[Field, ...]:
        if kind == "round":
            return ()
        rows, width = self.context.sampled(kind)
        paths = 1 if kind == "extend" else self.context.paths
        return (Field("mask", torch.int32, (rows, paths, width, self._words), pad=-1, feature=MASKS),)

    def prepare(self, request: EngineRequest) -> Future[Any] | None:
        outputs, thinking = request.params.structured_outputs, request.params.followed_thinking
        marks = None if thinking is None else self._thoughts.prepare(thinking)
        grammar = None if outputs is None else self._grammars.prepare(outputs)
        return both(marks, grammar) if marks and grammar else marks or grammar

    def begin(self, request: EngineRequest) -> RequestState | None:
        """Wait until the grammar is compiled and the reasoning markers are found."""
        params = request.params
        outputs, thinking = params.structured_outputs, params.followed_thinking
        if outputs is None and thinking is None:
            return None
        if self.context.synthetic:
            name = "thinking_token_budget" if outputs is None else "structured_outputs"
            raise BadRequest(
                f"{name} needs drafts that are verified; this server runs with synthetic acceptance, "
                "which accepts them unseen.",
                name,
            )
        compiled = None if outputs is None else self._grammars.get(outputs)
        if compiled is not None:
            check_first_token(compiled, request)
        if thinking is None:
            assert compiled is not None
            return GrammarState(Matcher(compiled, params), compiled.eos)
        marks = self._thoughts.prepare(thinking).result()
        return GrammarState(
            ThinkingMatcher(thinking, marks, compiled, params), () if compiled is None else compiled.eos
        )

    def fill(self, host: HostPass) -> tuple[Features, dict[str, np.ndarray]]:
        rows = [row for row in host.rows if row.samples]
        if not rows:
            return NO_FEATURES, {}
        drafts = np.empty((host.count, 1, 0), dtype=np.int32) if host.drafts is None else host.drafts
        masks = np.full((host.count, drafts.shape[1], 1 + drafts.shape[2], self._words), ALL, dtype=np.int32)
        fill([row.state.matcher for row in rows], drafts, masks, [row.index for row in rows])
        return MASKS, {"mask": masks}

    def allowed_tokens(self, buffers: Buffers, rows: int) -> torch.Tensor | None:
        mask = buffers.find("mask")
        if mask is None:
            return None
        return mask[:, : rows // mask.shape[0]].reshape(-1, self._words)  # without drafts all paths are equal

    def close(self) -> None:
        self._grammars.close()
        self._thoughts.close()


def both(marks: Future[Any], grammar: Future[Any]) -> Future[None]:
    """A future that is done when both are, with any outcome. Cancelling it cancels the grammar only; the markers are
    shared."""
    done: Future[None] = Future()

    def one(future: Future[Any]) -> None:
        if marks.done() and grammar.done():
            with suppress(InvalidStateError):
                done.set_result(None)

    done.add_done_callback(lambda future: grammar.cancel() if future.cancelled() else None)
    for future in (marks, grammar):
        future.add_done_callback(one)
    return done


def check_first_token(compiled: Compiled, request: EngineRequest) -> None:
    """Raise BadRequest if allowed_token_ids or bad_words leave no token that begins the request's structured output."""
    params = request.params
    banned = [word[0] for word in request.bad_words if len(word) == 1]
    if params.allowed_token_ids is None and not banned:
        return
    matcher = Matcher(compiled, replace(params, min_tokens=0))
    try:
        mask = matcher.first_mask()
    except GrammarError as error:
        raise BadRequest(f"structured_outputs: {error}.", error.param or "structured_outputs") from None
    finally:
        matcher.close()
    if params.allowed_token_ids is not None:
        allowed = np.zeros_like(mask)
        allow(allowed, params.allowed_token_ids)
        mask = mask & allowed
    forbid(mask, banned)
    if not mask.any():
        param = restricting(params) or "bad_words"
        kept = f"{param} leaves none of the tokens that can begin" if param == "bad_words" else (
            f"none of the {len(params.allowed_token_ids or ())} ids of {param} can begin"
        )  # fmt: skip
        raise BadRequest(f"{kept} the structured output: allow more tokens, or leave one of the two out.", param)


class GrammarState(RequestState):
    """Follows the request's output. EOS always ends it: masks forbid EOS until the grammar is complete."""

    def __init__(self, matcher: Follower, eos: tuple[int, ...]) -> None:
        self.stop_ids, self.matcher = eos, matcher

    def forced(self) -> Sequence[int]:
        return self.matcher.forced()

    def deliver(self, delta: TokenDelta, committed: Committed) -> None:
        try:
            self.matcher.accept(committed.tokens)
        except GrammarError as error:
            delta.finish, delta.error, delta.error_param = FinishReason.ABORT, f"{error}.", error.param
