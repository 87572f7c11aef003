"""Batches: the graph key of a scheduled pass, the arrays of its input fields, and its launch.

Owns nothing on the device. Features add their own fields (``passes/features/``).
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

import numpy as np

from unisono.engine.failures import RequestErrors, culprits, is_engine_error, kept
from unisono.engine.sequence import Chunk, Extend, FeaturePass, Pass, Round, RowGrowth, Rows, Verify
from unisono.engine.worker.progress import Progress
from unisono.graphs import NO_FEATURES, Features, GraphKey, PassShape, PendingOutputs
from unisono.passes.extend import prompt_program
from unisono.passes.features.base import Feature, HostPass, PassKind, Row
from unisono.passes.round import growth_names

if TYPE_CHECKING:
    from unisono.engine.worker.runner import Runner

Batch = dict[str, object]

LaunchedKind = PassKind | Literal["draft", "preparation"]


@dataclass(frozen=True)
class Launched:
    """A pass in flight: its requests, row by row, and its outputs on their way to the host."""

    work: Extend | FeaturePass | Round
    kind: LaunchedKind
    outputs: PendingOutputs
    dropped: frozenset[int] = frozenset()
    """Ids of the states of requests that failed while the batch was built. Their rows hold padding."""

    def wait(self) -> dict[str, np.ndarray]:
        """Wait for the outputs and return them as int32 arrays.

        ``result [rows, width + 2]``: count, status, tokens; ``drafted [rows]``, of a round: verified drafts; and the
        outputs of features. A "draft" pass has ``drafts [rows, P, k]`` only. The drafter may still be catching up.
        """
        return self.outputs.wait()


class BatchBuilder:
    """Build the batch of each pass and have the runner launch it."""

    def __init__(self, runner: Runner, progress: Progress) -> None:
        self._runner, self._progress = runner, progress
        self._dropped: frozenset[int] = frozenset()

    def launch(self, work: Pass, dropped: frozenset[int] = frozenset()) -> Launched:
        """Launch a pass and return at once.

        Raises RequestErrors, before the launch, for requests that cannot be part of it. Once these have released their
        slots the pass can be launched without them: ``dropped`` has the ids of all their states.
        """
        self._dropped = dropped
        return replace(self._launched(work), dropped=dropped)

    def _launched(self, work: Pass) -> Launched:
        if isinstance(work, Extend):
            return Launched(work, "mixed" if work.decodes else "extend", self._extend(work))
        if isinstance(work, FeaturePass):
            return Launched(work, "preparation", self._launch(work.pre_pass.key, dict(work.pre_pass.batch)))
        if isinstance(work, Verify):
            return Launched(work.round, "verify", self._verify(work.round, work.drafts))
        if work.catching_up and not self._dropped:  # otherwise it has
            slots = work.catching_up.slots
            self._launch(self._runner.catch_up_key(len(slots)), {"slots": slots})
        if not work.reads_drafts:
            return Launched(work, "round", self._round(work))
        rows, paths = len(work.rows), self._runner.paths
        if not work.drafts:
            return Launched(work, "verify", self._verify(work, np.empty((rows, paths, 0), dtype=np.int32)))
        if work.forced is not None and not work.proposes:
            return Launched(work, "verify", self._verify(work, work.forced[:, None]))
        key = GraphKey("draft", PassShape(rows, 1 + work.drafts), self._runner.features)
        return Launched(work, "draft", self._launch(key, self._round_batch(work)))

    def _launch(self, key: GraphKey, batch: Batch, waited: bool = False, timed: bool = False) -> PendingOutputs:
        return self._runner.launch(key, batch, waited=waited, timed=timed)

    def _round(self, work: Round) -> PendingOutputs:
        rows = len(work.rows)
        features, fields = self._feature_fields(work.rows.feature_rows, "round", rows)
        key = self._runner.round_key(rows, work.drafts)
        if work.rates is not None:
            fields["rates"] = work.rates
        return self._launch(replace(key, features=key.features | features), self._round_batch(work) | fields)

    def _verify(self, work: Round, drafts: np.ndarray) -> PendingOutputs:
        rows, features = len(work.rows), self._runner.features
        more, fields = self._feature_fields(work.rows.feature_rows, "verify", rows, drafts=drafts)
        key = GraphKey("verify", PassShape(rows, 1 + work.drafts), features | more)
        return self._launch(key, self._round_batch(work) | {"drafts": drafts} | fields)

    def _round_batch(self, work: Round) -> Batch:
        """Return ``slots``, and new page-table entries per window group: column index and page id, [rows, max_new],
        padded with column -1.

        Requests that were aborted after drafting get the padding slot: another request may have their slots.
        """
        rows, slots, growth = len(work.rows), work.rows.slots, work.growth
        live = self._progress.owned(slots, work.rows.owners)
        if not live.all():
            slots = self._live(work.rows)
            growth = {window_group: [each for each in grown if live[each[0]]] for window_group, grown in growth.items()}
        return {"slots": slots, **_growth_batch(growth, rows)}

    def _live(self, rows: Rows) -> np.ndarray:
        """[R]: slot of each request; the padding slot for an ended one."""
        return np.where(self._progress.owned(rows.slots, rows.owners), rows.slots, self._runner.worker.slots.padding)

    def _extend(self, work: Extend) -> PendingOutputs:
        runner, chunks = self._runner, work.chunks
        padding = runner.worker.slots.padding
        slots = [c.sequence.slot if c.sequence.pages is not None else padding for c in chunks]
        edges = [0, *itertools.accumulate(c.end - c.start for c in chunks)]
        total = edges[-1]
        token_ids, next_ids = _token_ids(chunks)
        batch: Batch = {
            "token_ids": token_ids,
            "next_ids": next_ids,
            "slots": slots,
            # Unused rows are empty: they begin where the tokens end.
            "query_start": edges + [total] * (runner.max_extend_rows - len(chunks)),
            "start": [c.start for c in chunks],
            "sample_slots": [slot if c.last else padding for slot, c in zip(slots, chunks, strict=True)],
            "last": [edge - 1 for edge in edges[1:]],
        }
        if work.decodes:
            live = self._progress.owned(work.decodes.slots, work.decodes.owners)
            growth = {
                window_group: [each for each in grown if live[each[0]]] for window_group, grown in work.growth.items()
            }
            batch |= {"decode_slots": self._live(work.decodes), **_growth_batch(growth, len(work.decodes))}
            features, fields = self._feature_fields(work.feature_rows, "mixed", len(work.decodes) + len(chunks), total)
            mixed = runner.mixed_key(total, work.decode_rows)
            key = replace(mixed, features=mixed.features | features)
        else:
            features, fields = self._feature_fields(work.feature_rows, "extend", len(chunks), total)
            features = features | runner.features if work.feature_rows else runner.features
            key = GraphKey(prompt_program(features), PassShape(total), features)
        # The prompt budget learns from the times of full passes.
        return self._launch(key, batch | fields, work.waited, timed=work.full)

    def _feature_fields(
        self,
        feature_rows: Mapping[Feature, Sequence[Row]],
        kind: PassKind,
        count: int,
        tokens: int = 0,
        drafts: np.ndarray | None = None,
    ) -> tuple[Features, Batch]:
        """Return the features that the requests of a pass use, and their batch fields. Raises RequestErrors."""
        features, fields = NO_FEATURES, Batch()
        for feature, every in feature_rows.items():
            if not (rows := kept(every, self._dropped)):
                continue
            more, values = _filled(feature, HostPass(kind, rows, count, tokens, drafts))
            features |= more
            fields |= values
        return features, fields


def _filled(feature: Feature, host: HostPass) -> tuple[Features, Mapping[str, object]]:
    """Return ``feature.fill(host)``. Raises RequestErrors for the requests that it fails for."""
    try:
        return feature.fill(host)
    except Exception as error:
        if is_engine_error(error):
            raise
        found = culprits(host.rows, lambda row: feature.fill(replace(host, rows=[row])))
        raise RequestErrors([row.state for row in found], error) from error


def _growth_batch(growth: Mapping[int, list[RowGrowth]], rows: int) -> Batch:
    """Return new page-table entries per window group: column index and page id, [rows, max_new], padded with column
    -1.
    """
    batch = Batch()
    for window_group, grown in growth.items():
        most = max((len(added) for _, _, added in grown), default=0)
        columns = np.full((rows, most), -1, dtype=np.int32)
        pages = np.zeros_like(columns)
        for row, first, added in grown:
            columns[row, : len(added)] = range(first, first + len(added))
            pages[row, : len(added)] = added
        batch |= zip(growth_names(window_group), (columns, pages), strict=True)
    return batch


def _token_ids(chunks: Sequence[Chunk]) -> tuple[np.ndarray, np.ndarray]:
    """Return the chunks' tokens and the token after each of them, int32 [total]; 0 if it is not sampled yet.

    A token without an id is 0; its value is not used.
    """
    ids = []
    for chunk in chunks:
        if chunk.sequence.pages is None:  # it failed while the batch was built
            ids.append(np.zeros(chunk.end - chunk.start + 1, dtype=np.int32))
            continue
        tokens = chunk.sequence.tokens[chunk.start : chunk.end + 1]
        if len(tokens) == chunk.end - chunk.start:
            tokens.append(0)
        ids.append(np.maximum(np.array(tokens, dtype=np.int32), 0))
    if len(ids) == 1:
        return ids[0][:-1], ids[0][1:]
    return np.concatenate([one[:-1] for one in ids]), np.concatenate([one[1:] for one in ids])
