"""The runner: rank 0's host side of a worker. Owns the planner, and the build of rank 0's worker.

``batch.py`` launches passes through it. It does not choose the requests that run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from unisono.config import ResolvedConfig
from unisono.engine.disaggregation.page_bytes import PageBytes, SharedPages
from unisono.engine.sequence import Extend
from unisono.engine.startup.capture_candidates import CPU_COST, check_full
from unisono.engine.startup.start_notes import StartNotes, shape_files
from unisono.engine.worker.build import Build
from unisono.engine.worker.commands import Command, FileOutcomes, ResetSlots
from unisono.engine.worker.ranks import Team, ranks_of
from unisono.graphs import GraphKey, PassShape, PendingOutputs, Replay
from unisono.graphs.buckets import Buckets
from unisono.graphs.planner import Planner
from unisono.layers.experts import products_per_token
from unisono.models.config import attention_of
from unisono.models.load.checkpoint import Checkpoint
from unisono.passes.features.base import plain_requests
from unisono.passes.round import shared_round

ATTENTION_RATE = 1.45
"""Time of an operation of attention relative to one of a GEMM: 532 against 768 TFLOP/s on an H200."""

FILLED_SHARE = 0.75
"""Least fraction of its tokens that a prompt pass keeps when it is cut to fill a graph, while running requests wait."""


class Runner:
    """Build rank 0's worker, have its graphs captured, then launch passes.

    progress: called with a stage's name and its completed fraction, 0 … 1, while loading and capturing. Raises
    ConfigError if the device's memory does not hold the model and one request.
    """

    def __init__(self, config: ResolvedConfig, checkpoint: Checkpoint, progress: Callable[[str, float], None]) -> None:
        self.team: Team | None = None
        ranks = ranks_of(config, checkpoint.config)
        if ranks.count > 1:
            self.team = Team(config, ranks)
        try:
            self._start(config, checkpoint, progress)
        except BaseException:
            if self.team is not None:
                self.team.close()
            raise

    def _start(self, config: ResolvedConfig, checkpoint: Checkpoint, progress: Callable[[str, float], None]) -> None:
        notes = StartNotes.of(config, shape_files(config, checkpoint.path), ranks_of(config, checkpoint.config).count)
        with notes.proving():
            self._build = build = Build(config, checkpoint, progress, self.team, notes)
        if self.team is not None:
            self.team.exchange("ready")
        self.worker, self.seconds, self.decide = build.worker, build.seconds, build.decide
        self.choices, self.width, self.paths = build.choices, build.widths.plain, build.paths
        self.widths, self.shared = build.widths, build.shared
        self.max_unobserved, self.max_extend_rows = build.max_unobserved, build.max_extend_rows
        self.decode_sizes = build.decode_sizes
        self.features = self.worker.drafter.features
        self.request_features = build.request_features
        self.is_plain = plain_requests(self.request_features)
        for feature in self.request_features:
            feature.start(self.send)
        known = notes.costs_known
        self.planner = Planner(self.worker.graphs, self.send, budget=self.config.graph_bytes, known=known)
        with build.stage("capture"):
            self.planner.capture(self.buckets(), lambda share: progress("capture", share))
        notes.save(self.planner.measured)
        if notes.costs is not None:
            self.decide(*notes.decision())
        check_full(self.config, self.planner.graphs())

    @property
    def config(self) -> ResolvedConfig:
        """The resolved configuration, with every decision so far."""
        return self._build.config

    def buckets(self) -> list[Buckets]:
        """Capture candidates of the worker's programs."""
        return self._build.buckets(self.worker.graphs.programs)

    def send(self, command: Command) -> PendingOutputs | None:
        """Have every rank execute a command; return the outputs of rank 0's worker.

        Raises EngineDead if another rank has failed.
        """
        if self.team is None:
            return self.worker.execute(command)
        return self.team.send(command, self.worker)

    def launch(
        self, key: GraphKey, batch: Mapping[str, object], waited: bool = False, timed: bool = False
    ) -> PendingOutputs:
        """Launch a pass as the planner decides, on every rank; see :meth:`Planner.launch`. Return its outputs."""
        outputs = self.send(self.planner.launch(key, batch, waited, timed))
        assert outputs is not None
        return outputs

    def ask(self, command: FileOutcomes) -> list[list[int]]:
        """Return every rank's answer to a query. Raises EngineDead if another rank has failed."""
        return [self.worker.answer(command)] if self.team is None else self.team.ask(command, self.worker)

    def share_pages(self) -> SharedPages:
        """Return the pages as bytes on all ranks, for an engine that exchanges them."""
        own = self.worker.page_bytes = PageBytes(self.worker.store)
        return SharedPages(self.worker.store, own, self.send, self.team.pages if self.team is not None else ())

    def reset(self) -> None:
        """Reset slots and counts. No request may hold a slot."""
        self.send(ResetSlots())
        self.planner.reset_counts()

    def round_key(self, rows: int, drafts: int) -> GraphKey:
        """Return the key of a round with this number of requests, and of drafts for each or shared by all."""
        if drafts in self.shared:
            return GraphKey(shared_round(drafts), PassShape(rows, self.width), self.features)
        return GraphKey("round", PassShape(rows, 1 + drafts), self.features)

    def shared_drafts(self, rows: int, drafts: int) -> int:
        """Return the drafts of all requests in a round that shares ``drafts`` per row of its graph."""
        answer = self.planner.plan(self.round_key(rows, drafts))
        held = answer.graph.key.shape.rows if isinstance(answer, Replay) else rows
        return held * (1 + drafts) - rows

    def mixed_key(self, tokens: int, decodes: int) -> GraphKey:
        """Return the key of a mixed pass with this number of prompt tokens and this decode capacity."""
        return GraphKey("mixed", PassShape(tokens + decodes, 1 + decodes), self.features)

    def tokens_filling_graph(self, tokens: int, decodes: int) -> int:
        """Return the prompt tokens, at most ``tokens``, that fill a graph; ``tokens`` if that would leave out many.

        decodes: decode capacity of the graph; 0 for prompt passes.
        """
        key = self.mixed_key(tokens, decodes) if decodes else GraphKey("extend", PassShape(tokens), self.features)
        filled = self.planner.full_graph_rows(key) - decodes
        return filled if filled >= FILLED_SHARE * tokens else tokens

    @property
    def attention_share(self) -> float:
        """Attention cost per visible key, relative to the GEMM cost of a prefill token."""
        model = self.worker.model
        heads = sum(spec.num_heads * spec.head_dim for spec in map(attention_of, model.config.layers) if spec)
        heads //= model.builder.ranks.count // self.worker.page_ranks
        return ATTENTION_RATE * 2 * heads / max(1, products_per_token(model.layers))

    def catch_up_key(self, rows: int) -> GraphKey:
        """Return the key of a catch-up pass of the drafter for this number of requests."""
        return GraphKey("catch_up", PassShape(rows, self.max_unobserved))

    def extend_ms(self, tokens: int) -> float:
        """Milliseconds of a prompt pass of this size on padding; a fixed figure on a CPU, so that runs repeat."""
        if self.config.device.type == "cpu":
            return CPU_COST.replay(tokens)
        return self.planner.expected_ms(GraphKey("extend", PassShape(tokens), self.features))

    def launched_ms(self, work: Extend) -> float:
        """Milliseconds of this prompt pass on padding, with the rows of the graph that it replays; see extend_ms."""
        if self.config.device.type == "cpu":
            return CPU_COST.replay(work.tokens)
        prompts = work.tokens - len(work.decodes)
        mixed = self.mixed_key(prompts, work.decode_rows) if work.decodes else None
        return self.planner.launched_ms(mixed or GraphKey("extend", PassShape(prompts), self.features))

    def pass_ms(self, key: GraphKey) -> float:
        """Milliseconds of a pass of a feature's own program, on padding; fixed figures on a CPU."""
        return self.planner.expected_ms(key)

    def close(self) -> None:
        """Free the device. Graphs are freed before the transports of their gathers."""
        if self.team is not None:
            self.team.begin_closing()
        self.planner.close()
        for feature in self.request_features:
            feature.close()
        self.worker.close()
        del self.request_features
        self._build.close()
        if self.team is not None:
            self.team.close()
