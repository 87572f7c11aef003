"""The runner: rank 0's host side of a worker. Owns the planner, and the build of rank 0's worker.

``batch.py`` launches passes through it. It does not decide which requests run.
"""

from __future__ import annotations

from collections.abc import Callable

from unisono.config import ResolvedConfig
from unisono.engine.disaggregation.page_bytes import PageBytes, SharedPages
from unisono.engine.sequence import Extend
from unisono.engine.startup.buckets import CPU_COST, check_full
from unisono.engine.worker.build import Build
from unisono.engine.worker.commands import Command, FileOutcomes, ResetSlots
from unisono.engine.worker.ranks import Team, ranks_of
from unisono.graphs import Key, PendingOutputs, Shape
from unisono.graphs.buckets import Buckets
from unisono.graphs.planner import Planner
from unisono.layers.experts import products_per_token
from unisono.models.config import attention_of
from unisono.models.load.checkpoint import Checkpoint
from unisono.passes.features.base import plain_requests

ATTENTION_RATE = 1.45
"""How much longer an operation of attention takes than one of a product: 532 against 768 TFLOP/s on an H200."""

FILLED_SHARE = 0.75
"""A prompt pass that running requests wait for is cut short to fill a graph, but not by more than the rest of this."""


class Runner:
    """Builds rank 0's worker, has its graphs captured, then launches passes.

    progress: called with a stage's name and the share of it that is done, 0 … 1, while loading and capturing.
    Raises ConfigError when the device's memory does not hold the model and one request.
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
        self._build = build = Build(config, checkpoint, progress, self.team)
        if self.team is not None:
            self.team.exchange("ready")
        self.worker, self.seconds, self.decide = build.worker, build.seconds, build.decide
        self.choices, self.width, self.paths = build.choices, build.widths.plain, build.paths
        self.widths = build.widths
        self.max_unobserved, self.max_extend_rows = build.max_unobserved, build.max_extend_rows
        self.decode_sizes = build.decode_sizes
        self.features = self.worker.drafter.features
        self.request_features = build.request_features
        self.is_plain = plain_requests(self.request_features)
        for feature in self.request_features:
            feature.start(self.send)
        self.planner = Planner(self.worker.graphs, self.send, budget=self.config.graph_bytes)
        with build.stage("capture"):
            self.planner.capture(self.buckets(), lambda share: progress("capture", share))
        check_full(self.config, self.planner.graphs())

    @property
    def config(self) -> ResolvedConfig:
        """The resolved configuration, with every decision so far."""
        return self._build.config

    def buckets(self) -> list[Buckets]:
        """What may be captured of the worker's programs."""
        return self._build.buckets(self.worker.graphs.programs)

    def send(self, command: Command) -> PendingOutputs | None:
        """Have every rank execute a command; returns the outputs that rank 0's worker gives.

        Raises EngineDead where another rank has failed.
        """
        if self.team is None:
            return self.worker.execute(command)
        return self.team.send(command, self.worker)

    def ask(self, command: FileOutcomes) -> list[list[int]]:
        """Every rank's answer to a command. Raises EngineDead where another rank has failed."""
        return [self.worker.answer(command)] if self.team is None else self.team.ask(command, self.worker)

    def share_pages(self) -> SharedPages:
        """Pages as bytes on all ranks, for an engine that exchanges them."""
        own = self.worker.page_bytes = PageBytes(self.worker.store)
        return SharedPages(self.worker.store, own, self.send, self.team.pages if self.team is not None else ())

    def forget(self) -> None:
        """Reset slots and counts. No request may hold a slot."""
        self.send(ResetSlots())
        self.planner.forget()

    def round_key(self, rows: int, drafts: int) -> Key:
        """Of a round with this number of requests and of drafts for each."""
        return Key("round", Shape(rows, 1 + drafts), self.features)

    def mixed_key(self, tokens: int, decodes: int) -> Key:
        """Of a mixed pass with this number of prompt tokens and this room for requests that decode."""
        return Key("mixed", Shape(tokens + decodes, 1 + decodes), self.features)

    def filling(self, tokens: int, decodes: int) -> int:
        """Prompt tokens, at most this number, that fill a graph with this room for requests that decode (0: of prompt
        passes); the number itself where that would leave out many."""
        key = self.mixed_key(tokens, decodes) if decodes else Key("extend", Shape(tokens), self.features)
        filled = self.planner.filled(key) - decodes
        return filled if filled >= FILLED_SHARE * tokens else tokens

    @property
    def attention_share(self) -> float:
        """By what share of a prompt pass's products each key that its tokens see makes it longer."""
        model = self.worker.model
        heads = sum(spec.num_heads * spec.head_dim for spec in map(attention_of, model.config.layers) if spec)
        heads //= model.builder.ranks.count
        return ATTENTION_RATE * 2 * heads / max(1, products_per_token(model.layers))

    def catch_up_key(self, rows: int) -> Key:
        """Of a pass in which the drafter catches up with this number of requests."""
        return Key("catch_up", Shape(rows, self.max_unobserved))

    def extend_ms(self, tokens: int) -> float:
        """Milliseconds of a prompt pass of this size, on padding; on a CPU a fixed figure, so that runs repeat."""
        if self.config.device.type == "cpu":
            return CPU_COST.replay(tokens)
        return self.planner.expected_ms(Key("extend", Shape(tokens), self.features))

    def launched_ms(self, work: Extend) -> float:
        """Milliseconds of this prompt pass on padding, with the rows of the graph that it replays; see extend_ms."""
        if self.config.device.type == "cpu":
            return CPU_COST.replay(work.tokens)
        prompts = work.tokens - len(work.decodes)
        mixed = self.mixed_key(prompts, work.room) if work.decodes else None
        return self.planner.launched_ms(mixed or Key("extend", Shape(prompts), self.features))

    def pass_ms(self, key: Key) -> float:
        """Milliseconds of a pass of a feature's own program, on padding; on a CPU by fixed figures."""
        return self.planner.expected_ms(key)

    def close(self) -> None:
        """Free the device. Graphs go before what carries their gathers."""
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
