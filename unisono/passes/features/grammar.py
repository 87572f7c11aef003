"""Structured outputs and thinking budgets: what each position may sample follows from the tokens before it.

The grammar gives a bitmask for each position, drafts included, and only the host can compute it. So the rounds of such
requests are two passes (``round.draft_program``, ``round.verify_program``): the host reads the drafts between them.
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import torch

from unisono.grammar.compiler import Grammars
from unisono.grammar.matcher import ALL, GrammarError, Matcher
from unisono.grammar.thinking import ThinkingMatcher, Thoughts
from unisono.passes.features.base import Committed, Feature, FeatureContext, HostPass, PassKind, RequestState
from unisono.program import NO_FEATURES, Buffers, Features, Field
from unisono.types import BadRequest, EngineRequest, FinishReason, TokenDelta

MASKS = Features(masks=True)


class Grammar(Feature):
    """Field: ``mask`` [R, P, W, words]: bit i % 32 of word i // 32 allows token i. Padding allows all."""

    name = "grammar"
    asks = MASKS
    reads_drafts = True

    def __init__(self, context: FeatureContext) -> None:
        super().__init__(context)
        self._grammars = Grammars(context.directory, context.vocab_size, context.eos)
        self._thoughts = Thoughts(context.directory, context.vocab_size)
        self._words = -(-context.vocab_size // 32)

    def fields(self, kind: PassKind) -> tuple[Field, ...]:
        if kind == "round":
            return ()
        rows, width = self.context.sampled(kind)
        paths = 1 if kind == "extend" else self.context.paths
        return (Field("mask", torch.int32, (rows, paths, width, self._words), pad=-1, feature=MASKS),)

    def prepare(self, request: EngineRequest) -> Future[Any] | None:
        asked, thinking = request.params.structured_outputs, request.params.followed_thinking
        marks = None if thinking is None else self._thoughts.prepare(thinking)
        grammar = None if asked is None else self._grammars.prepare(asked)
        return both(marks, grammar) if marks and grammar else marks or grammar

    def begin(self, request: EngineRequest) -> RequestState | None:
        """Waits until the grammar is compiled and the marks of thoughts are found."""
        asked, thinking = request.params.structured_outputs, request.params.followed_thinking
        if asked is None and thinking is None:
            return None
        if self.context.synthetic:
            name = "thinking_token_budget" if asked is None else "structured_outputs"
            raise BadRequest(
                f"{name} needs drafts that are verified; this server runs with synthetic acceptance, "
                "which accepts them unseen.",
                name,
            )
        compiled = None if asked is None else self._grammars.get(asked)
        inner = None if compiled is None else Matcher(compiled, request.params)
        eos = () if compiled is None else compiled.eos
        if thinking is None:
            assert inner is not None
            return _State(inner, eos)
        marks = self._thoughts.prepare(thinking).result()
        return _State(ThinkingMatcher(thinking, marks, inner, eos, request.params), eos)

    def fill(self, host: HostPass) -> tuple[Features, dict[str, np.ndarray]]:
        rows = [row for row in host.rows if row.samples]
        if not rows:
            return NO_FEATURES, {}
        drafts = np.empty((host.count, 1, 0), dtype=np.int32) if host.drafts is None else host.drafts
        masks = np.full((host.count, drafts.shape[1], 1 + drafts.shape[2], self._words), ALL, dtype=np.int32)
        _fill([row.state.matcher for row in rows], drafts, masks, [row.index for row in rows])
        return MASKS, {"mask": masks}

    def allowed_tokens(self, buffers: Buffers, rows: int) -> torch.Tensor | None:
        mask = buffers.find("mask")
        if mask is None:
            return None
        return mask[:, : rows // mask.shape[0]].reshape(-1, self._words)  # without drafts all paths are one

    def close(self) -> None:
        self._grammars.close()
        self._thoughts.close()


def both(first: Future[Any], second: Future[Any]) -> Future[None]:
    """Done when both are, whatever became of them."""
    done: Future[None] = Future()
    left = [first, second]
    lock = threading.Lock()

    def one(future: Future[Any]) -> None:
        with lock:
            left.remove(future)
            last = not left
        if last:
            done.set_result(None)

    for future in (first, second):
        future.add_done_callback(one)
    return done


class _State(RequestState):
    """Follows the request's output. EOS always ends it: masks forbid it as long as the grammar can go on without."""

    def __init__(self, matcher: Matcher | ThinkingMatcher, eos: tuple[int, ...]) -> None:
        self.stop_ids, self.matcher = eos, matcher

    def deliver(self, delta: TokenDelta, committed: Committed) -> None:
        try:
            self.matcher.accept(committed.tokens)
        except GrammarError as error:
            delta.finish, delta.error = FinishReason.ABORT, f"{error}."


def _fill(
    matchers: Sequence[Matcher | ThinkingMatcher], drafts: np.ndarray, masks: np.ndarray, rows: Iterable[int]
) -> None:
    """Have each matcher fill its row of masks: of several rows in threads, for a matcher releases the GIL."""
    jobs = [functools.partial(m.masks, drafts[row], masks[row]) for m, row in zip(matchers, rows, strict=True)]
    if len(jobs) < 2:
        for job in jobs:
            job()
        return
    for done in [_threads().submit(job) for job in jobs]:
        done.result()


@functools.cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(max(1, len(os.sched_getaffinity(0)) - 1), "grammar masks")
