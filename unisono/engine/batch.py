"""From scheduled passes to batches: the graph key of a pass and the arrays of its input fields, and its launch.

Owns nothing on the device. What features add to a batch they say themselves (``passes/features/``).
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

import numpy as np

from unisono.engine.progress import Progress
from unisono.engine.sequence import Chunk, Extend, Pass, Preparation, Round, RowGrowth, Verify
from unisono.passes.extend import prompt_program
from unisono.passes.features.base import Feature, HostPass, PassKind, Row
from unisono.passes.round import growth_names
from unisono.program import NO_FEATURES, Features, Key, PendingOutputs, Shape

if TYPE_CHECKING:
    from unisono.engine.runner import Runner

Batch = dict[str, object]

LaunchedKind = PassKind | Literal["draft", "preparation"]


@dataclass(frozen=True)
class Launched:
    """A pass on the device: whose it is, row by row, and its outputs on their way to the host."""

    work: Extend | Preparation | Round
    kind: LaunchedKind
    outputs: PendingOutputs

    def wait(self) -> dict[str, np.ndarray]:
        """int32 arrays: ``result [rows, width + 2]``: count, status, tokens; ``drafted [rows]``, of a round: drafts
        verified; and what features report; of a "draft" pass only ``drafts [rows, P, k]``. Blocks until they are here;
        a drafter may be catching up still."""
        return self.outputs.wait()


class Launcher:
    """Builds the batch of each pass and has the planner launch it."""

    def __init__(self, runner: Runner, progress: Progress) -> None:
        self._runner, self._progress = runner, progress

    def launch(self, work: Pass) -> Launched:
        """Put a pass on the device and return at once."""
        if isinstance(work, Extend):
            return Launched(work, "mixed" if work.decodes else "extend", self._extend(work))
        if isinstance(work, Preparation):
            return Launched(work, "preparation", self._launch(work.ahead.key, dict(work.ahead.batch)))
        if isinstance(work, Verify):
            return Launched(work.round, "verify", self._verify(work.round, work.drafts))
        if work.catching_up:
            slots = work.catching_up.slots
            self._launch(self._runner.catch_up_key(len(slots)), {"slots": slots})
        if not work.reads_drafts:
            return Launched(work, "round", self._round(work))
        rows, paths = len(work.rows), self._runner.paths
        if not work.drafts:
            return Launched(work, "verify", self._verify(work, np.empty((rows, paths, 0), dtype=np.int32)))
        if work.forced is not None and not work.proposes:
            return Launched(work, "verify", self._verify(work, work.forced[:, None]))
        key = Key("draft", Shape(rows, 1 + work.drafts), self._runner.features)
        return Launched(work, "draft", self._launch(key, self._round_batch(work)))

    def _launch(self, key: Key, batch: Batch, waited: bool = False, timed: bool = False) -> PendingOutputs:
        return self._runner.planner.launch(key, batch, waited=waited, timed=timed)

    def _round(self, work: Round) -> PendingOutputs:
        rows = len(work.rows)
        features, fields = _asked(work.rows.asked, "round", rows)
        key = self._runner.round_key(rows, work.drafts)
        return self._launch(replace(key, features=key.features | features), self._round_batch(work) | fields)

    def _verify(self, work: Round, drafts: np.ndarray) -> PendingOutputs:
        rows, features = len(work.rows), self._runner.features
        more, fields = _asked(work.rows.asked, "verify", rows, drafts=drafts)
        key = Key("verify", Shape(rows, 1 + work.drafts), features | more)
        return self._launch(key, self._round_batch(work) | {"drafts": drafts} | fields)

    def _round_batch(self, work: Round) -> Batch:
        """``slots``, and for each page lifetime columns and pages [rows, most pages added]; column -1 where fewer.

        Requests that were aborted after their drafts were made have the padding slot: theirs may be another's by now.
        """
        rows, slots, growth = len(work.rows), work.rows.slots, work.growth
        live = self._progress.owned(slots, work.rows.owners)
        if not live.all():
            slots = np.where(live, slots, self._runner.worker.slots.padding)
            growth = {lifetime: [each for each in grown if live[each[0]]] for lifetime, grown in growth.items()}
        return {"slots": slots, **_growth_batch(growth, rows)}

    def _extend(self, work: Extend) -> PendingOutputs:
        runner, chunks = self._runner, work.chunks
        edges = [0, *itertools.accumulate(c.end - c.start for c in chunks)]
        total = edges[-1]
        token_ids, next_ids = _token_ids(chunks)
        batch: Batch = {
            "token_ids": token_ids,
            "next_ids": next_ids,
            "slots": [c.sequence.slot for c in chunks],
            # The rows that no request uses are empty: they begin where the tokens end.
            "query_start": edges + [total] * (runner.max_extend_rows - len(chunks)),
            "start": [c.start for c in chunks],
            "sample_slots": [c.sequence.slot if c.last else runner.worker.slots.padding for c in chunks],
            "last": [edge - 1 for edge in edges[1:]],
        }
        if work.decodes:
            batch |= {"decode_slots": work.decodes.slots, **_growth_batch(work.growth, len(work.decodes))}
            features, fields = _asked(work.asked, "mixed", len(work.decodes) + len(chunks), total)
            mixed = runner.mixed_key(total, work.room)
            key = replace(mixed, features=mixed.features | features)
        else:
            features, fields = _asked(work.asked, "extend", len(chunks), total)
            features = features | runner.features if work.asked else runner.features
            key = Key(prompt_program(features), Shape(total), features)
        # The budget of prompt passes learns from the times of full ones.
        return self._launch(key, batch | fields, work.waited, timed=work.full)


def _growth_batch(growth: Mapping[int, list[RowGrowth]], rows: int) -> Batch:
    """For each page lifetime columns and pages [rows, most pages added]; column -1 where fewer."""
    batch = Batch()
    for lifetime, grown in growth.items():
        most = max((len(added) for _, _, added in grown), default=0)
        columns = np.full((rows, most), -1, dtype=np.int32)
        pages = np.zeros_like(columns)
        for row, first, added in grown:
            columns[row, : len(added)] = range(first, first + len(added))
            pages[row, : len(added)] = added
        batch |= zip(growth_names(lifetime), (columns, pages), strict=True)
    return batch


def _asked(
    asked: dict[Feature, list[Row]],
    kind: PassKind,
    count: int,
    tokens: int = 0,
    drafts: np.ndarray | None = None,
) -> tuple[Features, Batch]:
    """What a pass needs for the features that its requests ask for, and the fields of its batch."""
    features, fields = NO_FEATURES, Batch()
    for feature, rows in asked.items():
        more, values = feature.fill(HostPass(kind, rows, count, tokens, drafts))
        features |= more
        fields |= values
    return features, fields


def _token_ids(chunks: Sequence[Chunk]) -> tuple[np.ndarray, np.ndarray]:
    """The chunks' tokens and the token after each of them, int32 [total]; 0 where it is not sampled yet.

    Where a token has no id, an id in range is as good as any: 0.
    """
    ids = []
    for chunk in chunks:
        tokens = chunk.sequence.tokens[chunk.start : chunk.end + 1]
        if len(tokens) == chunk.end - chunk.start:
            tokens.append(0)
        ids.append(np.maximum(np.array(tokens, dtype=np.int32), 0))
    if len(ids) == 1:
        return ids[0][:-1], ids[0][1:]
    return np.concatenate([one[:-1] for one in ids]), np.concatenate([one[1:] for one in ids])
