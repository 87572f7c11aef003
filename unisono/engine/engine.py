"""The engine: requests in, tokens out. :meth:`Engine.step` is the whole loop.

One pass is launched before the last one is read, so the host works while the device does. Everything a
round needs is on the device; the host learns of tokens, stops and lengths one round late.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace

import numpy as np
import torch

from unisono.config import EngineConfig, Hardware, ResolvedConfig, resolve
from unisono.engine import report
from unisono.engine.draft_controller import DraftController
from unisono.engine.hidden import HiddenStates
from unisono.engine.overrides import Embedded
from unisono.engine.runner import Launched, Runner
from unisono.engine.scheduler import Extend, Round, Scheduler, Sequence
from unisono.engine.self_test import run_self_test
from unisono.engine.slots import SlotPool
from unisono.grammar.compiler import Compiled, Grammars
from unisono.grammar.matcher import GrammarError, Matcher
from unisono.models.checkpoint import Checkpoint
from unisono.request_checks import check_request
from unisono.sampling.logprobs import unpack_logprobs
from unisono.state.pages import PagePool
from unisono.types import BadRequest, ConfigError, EngineRequest, FinishReason, SamplingParams, TokenDelta


class Engine:
    """An engine in this process. Not thread-safe: one thread calls ``add``, ``abort`` and ``step``.

    Raises CheckpointError and ConfigError for what cannot be served.
    """

    def __init__(
        self, config: EngineConfig, progress: Callable[[str, float], None] = lambda stage, share: None
    ) -> None:
        started = time.perf_counter()
        checkpoint = Checkpoint.open(config.model)
        resolved = resolve(config, Hardware.detect(config.device), checkpoint)
        self.checkpoint = checkpoint
        with torch.inference_mode():
            self.runner = Runner(resolved, checkpoint, progress)
            self.worker = self.runner.worker
            self._begin()
            self.pin_drafts(self.runner.choices[-1])
            if run_self_test(self):
                self.runner.forget()
                self._begin()
            self.pin_drafts(None)
        self.grammars = Grammars(checkpoint.path, checkpoint.config.vocab_size, checkpoint.eos_token_ids)
        self.start_seconds = time.perf_counter() - started

    def _begin(self) -> None:
        """Have no requests, no cached prefixes, nothing counted."""
        self.pool = PagePool(self.worker.num_pages)
        self.scheduler = Scheduler(
            self.pool,
            SlotPool(self.config.max_num_seqs, self.checkpoint.config.vocab_size, self.runner.send),
            self.runner.width,
            self.config.max_num_batched_tokens,
            self.runner.max_extend_rows,
        )
        self.draft_controller = DraftController(self.runner)
        self._sequences: dict[str, Sequence] = {}
        self._in_flight: Launched | None = None
        self._order = itertools.count()
        self.counters = report.Counters.of(self.runner.width - 1)

    @property
    def config(self) -> ResolvedConfig:
        """The settings with nothing left open, and the reason of each choice."""
        return self.runner.config

    # ---- requests -----------------------------------------------------------------------------

    def add(self, request: EngineRequest) -> None:
        """Queue a request. Raises BadRequest, leaving the engine as it was, for one that cannot run."""
        request, compiled = self._checked(request)
        limit = self.config.max_model_len
        if request.params.max_tokens is not None:
            limit = min(limit, len(request.prompt_token_ids) + request.params.max_tokens)
        sequence = Sequence(request, list(request.prompt_token_ids), limit, next(self._order))
        if request.params.prompt_logprobs is not None:
            sequence.prompt_logprobs = {}
        sequence.embedded = Embedded.of(request, self.config.dtype)
        if request.params.return_hidden_states:
            # Those of a prompt with several sequences come with the first of them.
            known = 0 if request.shares_with is None else sequence.prompt_len
            dtype = str(self.config.dtype).removeprefix("torch.")
            sequence.hidden = HiddenStates(known, sequence.prompt_len, dtype, self.checkpoint.config.hidden_size)
        if compiled is not None:
            sequence.matcher = Matcher(compiled, request.params)
        if request.shares_with is not None:
            sequence.leader = self._sequences.get(request.shares_with)
        self._sequences[request.request_id] = sequence
        self.scheduler.add(sequence)
        self.counters.requests += 1

    def prepare(self, request: EngineRequest) -> Future[Compiled] | None:
        """Begin what :meth:`check` and :meth:`add` would wait for, and return it; None where there is nothing."""
        asked = request.params.structured_outputs
        return None if asked is None else self.grammars.prepare(asked)

    def _grammar(self, request: EngineRequest) -> Compiled | None:
        """The grammar that the request asks for. Raises BadRequest for one that cannot be had."""
        asked = request.params.structured_outputs
        if asked is None:
            return None
        if self.config.asked.synthetic:
            raise BadRequest(
                "structured_outputs needs drafts that are verified; this server runs with synthetic acceptance, "
                "which accepts them unseen.",
                "structured_outputs",
            )
        return self.grammars.get(asked)

    def check(self, request: EngineRequest) -> None:
        """Raises BadRequest, naming the value and the limit, for a request that this engine cannot run.

        Of one that wants a structured output it waits until the grammar is compiled; see :meth:`prepare`.
        """
        self._checked(request)

    def _checked(self, request: EngineRequest) -> tuple[EngineRequest, Compiled | None]:
        """:meth:`check`; returns the request with the stop ids that its grammar needs, and the grammar."""
        params, model = request.params, self.checkpoint.config
        if request.request_id in self._sequences:
            raise BadRequest(f"request id {request.request_id!r} is running already.", param="request_id")
        if params.n != 1 or params.seed is None:
            raise BadRequest(
                f"n={params.n}, seed={params.seed}: one request is one sequence here, with a seed; see "
                "EngineRequest.sequences.",
                "n" if params.n != 1 else "seed",
            )
        compiled = self._grammar(request)
        if compiled is not None:
            request = replace(request, stop_ids=_with_eos(request.stop_ids, compiled))
        check_request(request, self.config.max_model_len, model.vocab_size, model.hidden_size)
        return request, compiled

    def abort(self, request_id: str) -> None:
        """Forget a request and free its pages; unknown ids are ignored, for it may just have ended."""
        sequence = self._sequences.pop(request_id, None)
        if sequence is not None:
            self.scheduler.retire(sequence, FinishReason.ABORT)

    def reset_prefix_cache(self) -> int:
        """Forget every cached prefix that no request uses; returns the pages freed."""
        return self.pool.drop_cached()

    def has_work(self) -> bool:
        return self.scheduler.has_work or self._in_flight is not None

    # ---- the loop -----------------------------------------------------------------------------

    @torch.inference_mode()
    def step(self) -> list[TokenDelta]:
        """Launch the next pass, then read the one before it; returns the tokens that it brought.

        Where a request needs masks it is the other way round.
        """
        deltas = self._read_in_flight() if self.scheduler.waits_for_tokens else []
        work = self.draft_controller.launching(self.scheduler.schedule())
        launched = self.runner.launch(work) if work is not None else None
        deltas += self._read_in_flight()
        self._in_flight = launched
        return deltas

    def _read_in_flight(self) -> list[TokenDelta]:
        """Read the pass in flight, if there is one."""
        launched, self._in_flight = self._in_flight, None
        return self._read(launched) if launched is not None else []

    def _read(self, launched: Launched) -> list[TokenDelta]:
        outputs = launched.wait()
        result, logprobs = outputs["result"], outputs["logprobs"]
        work = launched.work
        self.draft_controller.read(work, result)
        if isinstance(work, Extend):
            for chunk in work.chunks:
                if chunk.sequence.finish is FinishReason.RUNNING:
                    self.scheduler.commit_prompt(chunk)
            if work.scores:
                _read_scores(work, outputs["prompt_logprobs"])
            if "hidden" in outputs:
                _read_hidden(work, outputs["hidden"])
            rows = [(i, chunk.sequence) for i, chunk in enumerate(work.chunks) if chunk.last]
        else:
            rows = list(enumerate(work.sequences))
        deltas = []
        for row, sequence in rows:
            sequence.in_flight -= 1
            count, status = int(result[row, 0]), FinishReason(int(result[row, 1]))
            # A row that ended before this pass, as the host has learnt since, brings nothing.
            if sequence.finish is FinishReason.RUNNING and count:
                if isinstance(work, Round) and sequence.hidden is not None:
                    sequence.hidden.read(len(sequence.tokens) - 1, outputs["hidden"][row, :count])
                delta = self._commit(sequence, result[row, 2 : 2 + count].tolist(), status)
                if isinstance(work, Round) and sequence.request.params.max_drafts != 0:
                    delta.drafted_tokens, delta.accepted_tokens = int(outputs["drafted"][row]), count - 1
                    self.counters.count_round(work.drafts, delta.drafted_tokens, delta.accepted_tokens)
                if (wanted := sequence.request.params.logprobs) is not None:
                    delta.logprobs = unpack_logprobs(logprobs[row, :count], wanted)
                deltas.append(delta)
        return deltas

    def _commit(self, sequence: Sequence, tokens: list[int], status: FinishReason) -> TokenDelta:
        delta = TokenDelta(sequence.request.request_id, tokens, status, sequence.cached_tokens or 0)
        if len(sequence.tokens) == sequence.prompt_len:
            self.counters.prompt_tokens += sequence.prompt_len
            if sequence.prompt_logprobs is not None:
                delta.prompt_logprobs = [sequence.prompt_logprobs[i] for i in sequence.scored]
            if sequence.hidden is not None:
                delta.prompt_hidden_states = sequence.hidden.take_prompt()
        if sequence.hidden is not None:
            delta.hidden_states = sequence.hidden.take_output()
        sequence.tokens.extend(tokens)
        self.counters.generation_tokens += len(tokens)
        delta.finish, delta.error = _follow(sequence, tokens, status)
        if delta.finish is not FinishReason.RUNNING:
            self.scheduler.retire(sequence, delta.finish)
            del self._sequences[sequence.request.request_id]
        return delta

    # ---- what it tells ------------------------------------------------------------------------

    def generation_defaults(self) -> dict[str, float]:
        """The sampling parameters that generation_config.json sets."""
        g = self.checkpoint.generation
        given = {"temperature": g.temperature, "top_p": g.top_p, "top_k": g.top_k, "min_p": g.min_p}
        return {name: value for name, value in given.items() if value is not None}

    def default_params(self) -> SamplingParams:
        """Sampling parameters where a request is silent."""
        return replace(SamplingParams(), **self.generation_defaults())  # type: ignore[arg-type]

    def info(self) -> dict[str, object]:
        """The resolved configuration, its reasons, the graphs and the eager passes, as JSON-ready data."""
        return report.info(self)

    def metrics(self) -> list[report.Metric]:
        """Counters and gauges for ``/metrics``."""
        return report.metrics(self)

    @torch.inference_mode()
    def capture_missing(self) -> int:
        """Capture one graph that passes wanted and none served, if that pays; the idle engine calls this.

        Returns how many were captured, 0 or 1. Nothing may be in flight.
        """
        return 0 if self.has_work() else self.runner.planner.capture_missing()

    def pin_drafts(self, drafts: int | None) -> None:
        """Have every round draft so many tokens, one of ``runner.choices``; None: as many as pay. For measurements."""
        if drafts is not None and drafts not in self.runner.choices:
            raise ConfigError(f"{drafts} drafts a round: this engine has captured rounds with {self.runner.choices}.")
        self.draft_controller.pin(drafts)

    def check_integrity(self) -> None:
        """Prove the page bookkeeping; the idle engine calls this. Raises RuntimeError naming the breach."""
        self.pool.check_integrity()

    def shutdown(self) -> None:
        """Drop every request and free the device."""
        for request_id in list(self._sequences):
            self.abort(request_id)
        if self._in_flight is not None:
            self._in_flight.wait()
            self._in_flight = None
        self.grammars.close()
        self.runner.close()


def _with_eos(stop_ids: tuple[int, ...], compiled: Compiled) -> tuple[int, ...]:
    """EOS always ends a structured output: its masks forbid it as long as the request can be spared it."""
    return tuple(dict.fromkeys((*compiled.eos, *stop_ids)))


def _follow(sequence: Sequence, tokens: list[int], status: FinishReason) -> tuple[FinishReason, str | None]:
    """Tell a sequence's matcher its new tokens: the status with which it goes on, and why it cannot."""
    if sequence.matcher is not None:
        try:
            sequence.matcher.accept(tokens)
        except GrammarError as error:
            return FinishReason.ABORT, f"{error}."
    return status, None


def _read_scores(work: Extend, words: np.ndarray) -> None:
    """Hand each sequence the log-probabilities of the prompt tokens behind those of its chunk that are scored."""
    at = 0
    for chunk in work.chunks:
        sequence, scored = chunk.sequence, chunk.scored
        wanted = sequence.request.params.prompt_logprobs
        if sequence.prompt_logprobs is not None and wanted is not None and scored:
            given = unpack_logprobs(words[at : at + len(scored)], wanted)
            sequence.prompt_logprobs |= zip((p + 1 for p in scored), given, strict=True)
            at += len(scored)


def _read_hidden(work: Extend, words: np.ndarray) -> None:
    """Hand each sequence that wants them the hidden states of its chunk."""
    at = 0
    for chunk in work.chunks:
        count = chunk.end - chunk.start
        if chunk.sequence.hidden is not None:
            chunk.sequence.hidden.read(chunk.start, words[at : at + count])
        at += count
