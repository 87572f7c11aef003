"""The runner: rank 0's host side of a pass. Owns the planner, and the build of rank 0's worker.

It turns a scheduled pass into a batch, has the planner send it, and returns the outputs on their way to the host. It
does not decide which requests run.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from unisono.config import ResolvedConfig
from unisono.engine.buckets import check_full
from unisono.engine.build import Build
from unisono.engine.commands import Command, ResetSlots
from unisono.engine.feature_fields import logits_feature, mask_words
from unisono.engine.masked import extend_masks, round_masks
from unisono.engine.overrides import override_fields
from unisono.engine.scheduler import Chunk, Extend, Round
from unisono.graphs.planner import Buckets, Planner
from unisono.models.checkpoint import Checkpoint
from unisono.program import Key, PendingOutputs, Shape


@dataclass(frozen=True)
class Launched:
    """A launched pass: the scheduled work, row by row, and the outputs on their way to the host."""

    work: Extend | Round
    outputs: PendingOutputs

    def wait(self) -> dict[str, np.ndarray]:
        """Block until the outputs are on the host; the drafter's part of the pass may still run.

        int32 arrays: ``result [rows, width + 2]``: count, status, tokens; ``drafted [rows]``, of a round: drafts
        verified; ``logprobs [rows, width, words]``: what ``kernels/logprobs.py`` reports, of rows that asked;
        ``prompt_logprobs [tokens, words]`` the same of prompt tokens, where the pass scores.
        """
        return self.outputs.wait()


class Runner:
    """Builds rank 0's worker, has its graphs captured, then launches passes.

    progress: called with a stage's name and the share of it that is done, 0 … 1, while loading and capturing.
    Raises ConfigError when the device's memory does not hold the model and one request.
    """

    def __init__(self, config: ResolvedConfig, checkpoint: Checkpoint, progress: Callable[[str, float], None]) -> None:
        self._build = build = Build(config, checkpoint, progress)
        self.worker, self.seconds, self.decide = build.worker, build.seconds, build.decide
        self.choices, self.width, self.paths = build.choices, build.width, build.paths
        self.max_unobserved, self.max_extend_rows = build.max_unobserved, build.max_extend_rows
        self.features = self.worker.drafter.features
        self.masked = replace(self.features, masks=True)
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
        """Have every rank execute a command: there is one."""
        return self.worker.execute(command)

    def forget(self) -> None:
        """Reset slots and counts. No request may hold a slot."""
        self.send(ResetSlots())
        self.planner.forget()

    def launch(self, work: Extend | Round) -> Launched:
        """Put a pass on the device and return at once."""
        pending = self._launch_extend(work) if isinstance(work, Extend) else self._launch_round(work)
        return Launched(work, pending)

    def _launch_round(self, work: Round) -> PendingOutputs:
        if work.behind:
            slots = [s.slot for s in work.behind]
            self.planner.launch(self.catch_up_key(len(slots)), {"slots": slots})
        columns, pages = _growth_arrays(work)
        rows = len(work.sequences)
        batch: dict[str, object] = {"slots": [s.slot for s in work.sequences], "columns": columns, "pages": pages}
        if not work.masked:
            key = self.round_key(rows, work.drafts)
            return self.planner.launch(replace(key, features=replace(key.features, returned=work.returns)), batch)
        shape, drafts = Shape(rows, 1 + work.drafts), np.empty((rows, self.paths, 0), dtype=np.int32)
        if work.drafts:
            drafts = self.planner.launch(Key("draft", shape, self.features), batch).wait()["drafts"][:rows]
        batch["mask"] = round_masks(work, drafts, mask_words(self.worker.model.config.vocab_size))
        return self.planner.launch(Key("verify", shape, replace(self.masked, returned=work.returns)), batch)

    def round_key(self, rows: int, drafts: int) -> Key:
        """Of a round of so many requests with so many drafts each."""
        return Key("round", Shape(rows, 1 + drafts), self.features)

    def catch_up_key(self, rows: int) -> Key:
        """Of a pass in which the drafter catches up with so many requests."""
        return Key("catch_up", Shape(rows, self.max_unobserved))

    def _launch_extend(self, work: Extend) -> PendingOutputs:
        chunks = work.chunks
        lengths = [c.end - c.start for c in chunks]
        edges = np.cumsum([0, *lengths])
        total = int(edges[-1])
        # The rows that no request uses are empty: they begin where the tokens end.
        query_start = np.full(self.max_extend_rows + 1, total)
        query_start[: len(edges)] = edges
        batch: dict[str, object] = {  # where an embedding stands, an id in range is as good as any
            "token_ids": np.concatenate([c.sequence.tokens[c.start : c.end] for c in chunks]).clip(0),
            "next_ids": np.concatenate([_following(c) for c in chunks]).clip(0),
            "slots": [c.sequence.slot for c in chunks],
            "query_start": query_start,
            "start": [c.start for c in chunks],
            "sample_slots": [c.sequence.slot if c.last else self.worker.slots.padding for c in chunks],
            "last": edges[1:] - 1,
        }
        embeddings = override_fields(chunks)
        features = replace(self.features, embeddings=bool(embeddings), returned=work.returns, masks=work.masked)
        if features.masks:
            batch["mask"] = extend_masks(work, mask_words(self.worker.model.config.vocab_size))
        if work.scores:
            batch["score_rows"] = rows = _score_rows(chunks, edges)
            features = replace(features, logits=logits_feature(len(rows), total))
        return self.planner.launch(
            Key("score" if work.scores else "extend", Shape(total), features), batch | embeddings
        )

    def close(self) -> None:
        """Free the device."""
        self.planner.close()
        self.worker.close()


def _following(chunk: Chunk) -> list[int]:
    """The token after each of a chunk's; 0 where it is not sampled yet."""
    following = chunk.sequence.tokens[chunk.start + 1 : chunk.end + 1]
    return following + [0] * (chunk.end - chunk.start - len(following))


def _score_rows(chunks: list[Chunk], edges: np.ndarray) -> np.ndarray:
    """The tokens of a pass whose logits score the prompt token behind them; chunk i's begin at edges[i]."""
    return np.concatenate(
        [
            np.arange(edge, edge + len(c.scored)) + (c.scored.start - c.start)
            for c, edge in zip(chunks, edges, strict=False)
        ]
    )


def _growth_arrays(work: Round) -> tuple[np.ndarray, np.ndarray]:
    """``columns`` and ``pages`` [rows, most pages added]; column -1 where a row adds fewer."""
    most = max(len(pages) for _, pages in work.growth)
    columns = np.full((len(work.growth), most), -1, dtype=np.int32)
    pages = np.zeros_like(columns)
    for row, (first, added) in enumerate(work.growth):
        columns[row, : len(added)] = range(first, first + len(added))
        pages[row, : len(added)] = added
    return columns, pages
