"""The engine: takes requests, returns tokens. :meth:`Engine.step` is the whole loop.

A pass is launched before the last one is read, so the host works while the device does. The state of a round lies on
the device; the host learns of tokens, stops and lengths one round late.
"""

from __future__ import annotations

import itertools
import socket
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np
import torch

from unisono.config import EngineConfig, Hardware, ResolvedConfig, resolve
from unisono.engine import report
from unisono.engine.disaggregation.prefill_client import RemotePrompt
from unisono.engine.disaggregation.roles import Roles
from unisono.engine.failures import Failures, RequestErrors, is_engine_error, kept
from unisono.engine.offload import make_offload
from unisono.engine.scheduling.arrivals import ArrivalGate, Arrivals
from unisono.engine.scheduling.default_drafts import with_default_drafts
from unisono.engine.scheduling.draft_controller import DraftController
from unisono.engine.scheduling.fewer_drafts import note_drafts
from unisono.engine.scheduling.mixing import Mixing
from unisono.engine.scheduling.prompt_budget import PromptBudget
from unisono.engine.scheduling.scheduler import Scheduler
from unisono.engine.sequence import Extend, Pass, Round, Sequence, States
from unisono.engine.sleep import SleepState
from unisono.engine.startup.model_size import with_fitting_sizes
from unisono.engine.startup.self_test import run_self_test
from unisono.engine.weight_changes import change_weights, weight_commands
from unisono.engine.worker.batch import BatchBuilder, Launched
from unisono.engine.worker.device_state import DeviceState, StateSizes
from unisono.engine.worker.runner import Runner
from unisono.engine.worker.slots import SlotPool
from unisono.kv.branch_points import BranchPoints
from unisono.kv.offload.offloader import PAUSE_SECONDS, Offload
from unisono.kv.rank_pages import page_pool
from unisono.kv.specs import ALL
from unisono.models.load.checkpoint import Checkpoint, sampling_defaults
from unisono.passes.features.base import Committed, Metric
from unisono.types import (
    BadRequest,
    ConfigError,
    EngineDead,
    EngineRequest,
    FinishReason,
    SamplingParams,
    TokenDelta,
)
from unisono.types.checks import check_request

NOTHING = np.empty((0, 2), dtype=np.int32)
"""Result of a pass that commits nothing."""

NO_DRAFTS = np.empty(0, dtype=np.int32)

REASONS, RUNNING = tuple(FinishReason), int(FinishReason.RUNNING)  # by the number that the device writes


class Engine:
    """An engine in this process. Not thread-safe: one thread calls ``add``, ``abort`` and ``step``.

    ``admitted`` is called with the ids of requests that got slots, before the first pass that may compute them. Raises
    CheckpointError and ConfigError if the model or the configuration is not supported.
    """

    def __init__(
        self, config: EngineConfig, progress: Callable[[str, float], None] = lambda stage, share: None
    ) -> None:
        started = time.perf_counter()
        checkpoint = self.checkpoint = Checkpoint.open(config.model, config.quantization, config.hf_overrides)
        resolved = with_default_drafts(resolve(config, Hardware.detect(config.device), checkpoint), checkpoint)
        resolved = with_fitting_sizes(resolved, checkpoint)
        self._offload: Offload | None = None
        self.roles, self.sleep = Roles(), SleepState()
        self.weight_version, self.weight_updates, self.paused = "0", 0, False
        self.admitted: Callable[[list[str]], None] = lambda request_ids: None
        with torch.inference_mode():
            self.runner = Runner(resolved, checkpoint, progress)
            self.worker = self.runner.worker
            self._begin()
            self.pin_drafts(self.runner.choices[-1])
            if run_self_test(self):
                self.runner.forget()
                self._begin()
            self.pin_drafts(None)
            self.roles = Roles(self.config, self.runner)
        self.start_seconds = time.perf_counter() - started

    def _begin(self) -> None:
        """Reset: no requests, no cached prefixes, zero counters."""
        runner, worker = self.runner, self.worker
        windows = {window_group: count for window_group, count in worker.num_pages.items() if window_group != ALL}
        snapshots = worker.snapshots if worker.store.recurrent else None
        self._offload = make_offload(self.config, worker, runner.send, runner.ask, self._offload)
        hits = self.config.requested.enable_prefix_caching
        self.pool = page_pool(worker.num_pages[ALL], worker.page_ranks, windows, snapshots, hits, self._offload)
        budget = PromptBudget(
            self.config.requested.max_stall_ms,
            self.config.max_num_batched_tokens,
            runner.extend_ms,
            runner.attention_share,
            runner.launched_ms,
        )
        vocab_size, schema = self.checkpoint.config.vocab_size, worker.slots.schema
        slots = SlotPool(self.config.max_num_seqs, vocab_size, runner.send, schema)
        self.draft_controller = DraftController(runner, slots.progress)
        sizes = StateSizes(runner.widths.reading, self.config.max_num_batched_tokens, self.config.max_model_len)
        points = BranchPoints(self.config.requested.snapshot_points, frozenset(self.checkpoint.eos_token_ids))
        device = DeviceState(self.pool, sizes, runner.send, points)
        self.scheduler = Scheduler(
            self.pool,
            slots,
            device,
            runner.widths,
            runner.max_extend_rows,
            budget,
            self.config.requested.scheduling_policy == "priority",
            runner.pass_ms,
            Mixing(runner, self.draft_controller),
            runner.filling,
            self._failed,
            self.draft_controller,
        )
        self.arrivals = Arrivals()
        self.failures = Failures()
        self._batches = BatchBuilder(self.runner, slots.progress)
        self._sequences: dict[str, Sequence] = {}
        self._in_flight: Launched | None = None
        self._late: list[TokenDelta] = []  # read between two steps
        self._order = itertools.count()
        self.counters = report.Counters.of(runner.widths.reading - 1)

    @property
    def config(self) -> ResolvedConfig:
        """The resolved settings, and the reason of each choice."""
        return self.runner.config

    # ---- requests -----------------------------------------------------------------------------

    def add(self, request: EngineRequest) -> None:
        """Queue a request. Raises BadRequest for one that cannot run. After any exception the engine is unchanged."""
        with self.failures.arriving():
            request, states = self._checked(request)
            limit = self.config.max_model_len
            if request.params.max_tokens is not None:
                limit = min(limit, len(request.prompt_token_ids) + request.params.max_tokens)
            sequence = Sequence(request, list(request.prompt_token_ids), limit, next(self._order), states)
            if request.shares_with is not None:
                sequence.leader = self._sequences.get(request.shares_with)
            self._arrive(sequence)
            self._sequences[request.request_id] = sequence
            self.counters.requests += 1

    def _arrive(self, sequence: Sequence) -> None:
        """Queue a request, or hold it until its files and remote pages have arrived."""
        gates: list[ArrivalGate] = []
        if self._offload is not None and (read := self._offload.read_ahead(self.pool, sequence.keys)) is not None:
            gates.append(read)
        client = self.roles.client
        if client is not None and (prompt := client.request(sequence, self.pool)) is not None:
            gates.append(prompt)
        if gates:
            self.arrivals.add(sequence, gates)
        else:
            self.scheduler.add(sequence)

    def prepare(self, request: EngineRequest) -> Future[Any] | None:
        """Begin the preparation that :meth:`check` and :meth:`add` would wait for; return None if there is none."""
        begun = (feature.prepare(request) for feature in self.runner.request_features)
        return next((future for future in begun if future is not None), None)

    def check(self, request: EngineRequest) -> None:
        """Raises BadRequest, naming the value and the limit, for a request that this engine cannot run.

        May wait for the preparation of a feature; see :meth:`prepare`.
        """
        self._checked(request)

    def _checked(self, request: EngineRequest) -> tuple[EngineRequest, States]:
        """Check a request; return it with all its stop ids, and the features' states."""
        params, model = request.params, self.checkpoint.config
        if request.request_id in self._sequences:
            raise BadRequest(f"request id {request.request_id!r} is running already.", param="request_id")
        if params.n != 1 or params.seed is None:
            name, value = ("n", params.n) if params.n != 1 else ("seed", params.seed)
            raise BadRequest(f"{name}={value}: one sequence with a seed; see EngineRequest.sequences.", name)
        states = self._begin_features(request)
        own = (i for state in states.values() for i in state.stop_ids)
        stop_ids = tuple(dict.fromkeys((*own, *request.stop_ids)))
        if stop_ids != request.stop_ids:
            request = replace(request, stop_ids=stop_ids)
        check_request(request, self.config.max_model_len, model.vocab_size, model.hidden_size)
        return request, states

    def _begin_features(self, request: EngineRequest) -> States:
        """Return the state of each feature that the request uses."""
        features = self.runner.request_features
        if names := request.params.extra_args.keys():
            known = {name for feature in features for name in feature.extra_args}
            if unknown := sorted(names - known):
                raise BadRequest(
                    f"extra_args (vllm_xargs) has {unknown}; the features here read {sorted(known)}.", "extra_args"
                )
        if self.runner.is_plain(request):
            return {}
        begun = ((feature, feature.begin(request)) for feature in features)
        return {feature: state for feature, state in begun if state is not None}

    @torch.inference_mode()
    def abort(self, request_id: str) -> None:
        """Forget a request and free its pages; unknown ids are ignored, since it may just have ended."""
        sequence = self._sequences.pop(request_id, None)
        if sequence is None:
            return
        if (gates := self.arrivals.remove(request_id)) is not None:
            sequence.finish = FinishReason.ABORT
            for gate in gates:
                if isinstance(gate, RemotePrompt) and self.roles.client is not None:
                    self.roles.client.drop(gate)
        else:
            self.scheduler.retire(sequence, FinishReason.ABORT)

    def reset_prefix_cache(self) -> int:
        """Forget every cached prefix that no request uses; returns the pages freed."""
        return self.pool.drop_cached()

    @torch.inference_mode()
    def update_weights(self, directory: str = "", draft_directory: str = "", version: str | None = None) -> Any:
        """Replace the weights between two passes; see :func:`unisono.engine.weight_changes.change_weights`."""
        return change_weights(self, directory, draft_directory, version)

    def finish_pass(self) -> None:
        """Read the pass in flight; the next step returns its tokens."""
        self._late += self._read_in_flight()

    def command(self, command: str, arguments: Mapping[str, Any]) -> Any:
        """Run a feature's command (``Feature.commands``), or one of ``weight_commands``, between two steps. Raises
        ConfigError for an unknown one."""
        calls = {name: call for feature in self.runner.request_features for name, call in feature.commands().items()}
        calls |= weight_commands(self)
        if command not in calls:
            raise ConfigError(f"no feature has a command {command!r}.")
        return calls[command](**arguments)

    def has_work(self) -> bool:
        peer_waits = self.roles.service is not None and self.roles.service.has_news
        return self.scheduler.has_work or bool(self._in_flight or self._late or self.arrivals) or peer_waits

    @property
    def wakes(self) -> socket.socket | None:
        """Socket that becomes readable when a peer engine sends a request. Add it to the idle poll set."""
        return self.roles.wakes

    # ---- the loop -----------------------------------------------------------------------------

    @torch.inference_mode()
    def step(self) -> list[TokenDelta]:
        """Launch the next pass, then read the one before it; return its tokens.

        If the next pass depends on the one before it, that one is read first. A request with an error of its own ends
        with that error, and the others go on (``failures.py``); an exception of this method ends the engine.
        """
        deltas, self._late = self._late, []
        self._let_in()
        work = self._next_pass()
        if work is None and self._in_flight is not None:
            deltas, work = self._read_in_flight(), self._next_pass()
        launched = self._launch(work) if work is not None else None
        deltas += self._read_in_flight()
        self._in_flight = launched
        if launched is None:
            self._pause()
        if self.failures:
            deltas += self.failures.take()
            self.check_integrity()
        return deltas if self.roles.service is None else self.roles.service.finished(deltas)

    def _pause(self) -> None:
        """Idle: sleep briefly if a transfer or a remote prompt is pending, or while passes are held."""
        if self._offload is not None:
            self._offload.pause()
        if self.arrivals or self.paused:
            time.sleep(PAUSE_SECONDS)

    def _let_in(self) -> None:
        """Queue the held requests that are ready."""
        if self._offload is not None:
            self._offload.poll_files()
        self.roles.poll(self.add, self.abort)
        if self.arrivals:
            for sequence in self.arrivals.ready():
                self.scheduler.add(sequence)

    def _next_pass(self) -> Pass | None:
        """Return the next pass to launch, or None."""
        work = None if self.paused else self.scheduler.schedule()
        if self.scheduler.started:
            self.admitted(self.scheduler.started)
            self.scheduler.started = []
        return work

    def _launch(self, work: Pass) -> Launched:
        dropped: frozenset[int] = frozenset()
        while True:
            try:
                launched = self._batches.launch(work, dropped)
                break
            except RequestErrors as error:
                failing = self._owners(error.states)
                if not failing:
                    raise error.cause from None
                for sequence in failing:
                    dropped |= {id(state) for state in sequence.states.values()}
                    self.scheduler.fail(sequence, "batch", error.cause)
        if launched.kind == "draft" and isinstance(work, Round):
            self.scheduler.drafting(work)
        return launched

    def _failed(self, sequence: Sequence, stage: str, error: Exception) -> None:
        """Record that a request ends with an error of its own. Raises the error if it is the engine's."""
        self.failures.add(sequence.request_id, stage, error)
        self._sequences.pop(sequence.request_id, None)

    def _owners(self, states: Iterable[Any]) -> list[Sequence]:
        """Return the requests that have slots and one of these states."""
        ids = {id(state) for state in states}
        return [one for one in self.scheduler.active if any(id(state) in ids for state in one.states.values())]

    def _read_in_flight(self) -> list[TokenDelta]:
        """Read the pass in flight, if there is one."""
        launched, self._in_flight = self._in_flight, None
        return self._read(launched) if launched is not None else []

    def _read(self, launched: Launched) -> list[TokenDelta]:
        outputs, work = launched.wait(), launched.work
        if launched.kind == "draft":
            self.scheduler.drafted(outputs["drafts"])
            return []
        result = outputs.get("result", NOTHING)
        self.draft_controller.read(work, result, outputs)
        self.scheduler.budget.read(work, launched.outputs.device_ms)
        if isinstance(work, Extend):
            self._read_prompts(work, launched.dropped, outputs)
        return self._commit(launched, outputs, result)

    def _read_prompts(self, work: Extend, dropped: Collection[int], outputs: Mapping[str, np.ndarray]) -> None:
        """Process the results of a prompt pass for each of its prompts."""
        for chunk in work.chunks:
            if chunk.sequence.finish is FinishReason.RUNNING:
                self.scheduler.commit_prompt(chunk)
                if self.roles.service is not None:
                    self.roles.service.committed(chunk.sequence)
        for feature, every in work.feature_rows.items():
            rows = kept(every, dropped)
            try:
                feature.read_prompt(rows, outputs)
                failing = {id(row.state): error for row in rows for error in row.errors}
            except Exception as error:
                failing = {id(row.state): error for row in rows}
            for sequence in self._owners([row.state for row in rows if id(row.state) in failing]):
                self.scheduler.fail(sequence, "result", failing[id(sequence.states[feature])])

    def _commit(self, launched: Launched, outputs: Mapping[str, np.ndarray], result: np.ndarray) -> list[TokenDelta]:
        """Add the committed tokens of a pass to its requests. result [rows, width + 2] int32: count, status, tokens."""
        work, rows = launched.work, launched.work.committing
        drafts = work.most if isinstance(work, Round) else 0
        result = result[work.places]
        committed = self.scheduler.committed(rows, result[:, 0], result[:, 1] == RUNNING)
        every = len(committed) == len(result)
        result = result if every else result[committed]
        counts, running = result[:, 0], result[:, 1] == RUNNING
        drafted = outputs["drafted"][committed] if drafts else NO_DRAFTS
        found = outputs["found"][committed] if "found" in outputs else None
        self.counters.generation_tokens += int(counts.sum())
        if drafts:
            drafting = self.scheduler.progress.max_drafts[rows.slots[committed]] > 0
            shared = None if found is None else found[drafting]
            self.counters.count_round(drafts, drafted[drafting], counts[drafting] - 1, shared)
            if isinstance(work, Round) and work.forced is not None:
                self.counters.count_forced((work.forced[committed] >= 0).sum(1), counts - 1)
        sequences = rows.sequences if every else [rows.sequences[row] for row in committed.tolist()]
        tokens = result[:, 2:].tolist()
        if result.shape[1] > 3 or not counts.all():  # a round of one token brings one
            for index in np.flatnonzero(counts < result.shape[1] - 2).tolist():
                del tokens[index][counts[index] :]
        deltas, reporting = list[TokenDelta](), list[int]()
        for sequence, new in zip(sequences, tokens, strict=True):
            if sequence.reports:  # needs the tokens before these, too
                reporting.append(len(deltas))
            else:
                sequence.tokens += new
            deltas.append(TokenDelta(sequence.request_id, new))
        note_drafts(work, committed, deltas, drafted, found, counts, self.scheduler.progress, self.runner.choices[-1])
        ended = set() if running.all() else set(np.flatnonzero(~running).tolist())
        for index in ended:
            deltas[index].finish = REASONS[result[index, 1]]
        for index in reporting:
            self._report(sequences[index], deltas[index], launched.kind, int(work.places[committed[index]]), outputs)
            if deltas[index].finish is not FinishReason.RUNNING:
                ended.add(index)
            sequences[index].tokens += tokens[index]
        for index in sorted(ended):
            self.scheduler.retire(sequences[index], deltas[index].finish)
            del self._sequences[sequences[index].request_id]
        return deltas

    def _report(
        self, sequence: Sequence, delta: TokenDelta, kind: str, place: int, outputs: Mapping[str, np.ndarray]
    ) -> None:
        """Complete a delta whose tokens are not in the sequence yet. place: its row in the pass's outputs."""
        position = len(sequence.tokens)
        first = position == sequence.prompt_len
        if first:
            delta.queued_seconds, delta.cached_tokens = sequence.queued_seconds, sequence.cached_tokens or 0
            self.counters.prompt_tokens += sequence.prompt_len
        for state in sequence.states.values():
            try:
                state.deliver(delta, Committed(kind, place, delta.token_ids, position, first, outputs))
            except Exception as error:  # an error of one request ends that request
                if is_engine_error(error):
                    raise
                delta.finish, delta.error = FinishReason.ABORT, f"{type(error).__name__}: {error}."
                self.failures.count("result")
        sequence.reports = bool(sequence.states)

    # ---- reports ------------------------------------------------------------------------------

    def generation_defaults(self) -> dict[str, float]:
        """Return the sampling parameters that generation_config.json sets, or the file of ``--generation-config``."""
        return self._generation_defaults

    @cached_property
    def _generation_defaults(self) -> dict[str, float]:
        return sampling_defaults(self.checkpoint.generation, self.config.requested.generation_config)

    def default_params(self) -> SamplingParams:
        """Return the default sampling parameters."""
        return replace(SamplingParams(), **self.generation_defaults())  # type: ignore[arg-type]

    def info(self) -> dict[str, object]:
        """Return the resolved configuration, its reasons, the graphs and the eager passes, as JSON-ready data."""
        return report.info(self)

    def metrics(self) -> list[Metric]:
        """Return counters and gauges for ``/metrics``."""
        return report.metrics(self)

    @torch.inference_mode()
    def capture_missing(self) -> int:
        """Capture one graph that passes needed and none served, if that pays; the idle engine calls this.

        Return the number of captures, 0 or 1. Nothing may be in flight.
        """
        return 0 if self.has_work() or self.paused else self.runner.planner.capture_missing()

    def pin_drafts(self, drafts: int | None) -> None:
        """Fix the drafts of every round to one of ``runner.choices``; None: adapt. For measurements."""
        if drafts is not None and drafts not in self.runner.choices:
            raise ConfigError(f"{drafts} drafts a round: this engine has captured rounds with {self.runner.choices}.")
        self.draft_controller.pin(drafts)

    @property
    def failing(self) -> int | None:
        """File descriptor that becomes readable once a rank has failed; None without other ranks."""
        return None if self.runner.team is None else self.runner.team.failed

    def check_ranks(self) -> None:
        """Raise EngineDead if a rank of the model has failed."""
        if self.runner.team is not None:
            self.runner.team.check()

    def check_integrity(self) -> None:
        """Check the bookkeeping of pages and slots; the idle engine does. Raises RuntimeError naming the breach."""
        self.pool.check_integrity()
        self.scheduler.check_integrity()

    def shutdown(self) -> None:
        """Drop every request and free the device."""
        with suppress(EngineDead):  # of a failed rank: the pass in flight never ends
            self.check_ranks()  # a step may have been interrupted amid its bookkeeping
            for request_id in list(self._sequences):
                self.abort(request_id)
            if self._in_flight is not None:
                self._in_flight.wait()
        self._in_flight = None
        self.roles.close()
        if self._offload is not None:
            with suppress(EngineDead):
                self._offload.close()
        self.runner.close()
