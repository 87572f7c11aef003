"""Rounds whose positions are sampled under masks: two passes, and the host between them.

A mask says which tokens a position may take. It depends on the tokens before it, drafts included, and only the host can
tell, so a round with such a request is cut where the drafts are known: ``draft`` proposes and leaves the drafts on the
device, the host reads a copy and makes masks of it, ``verify`` is the rest of the round under the masks. Without a
drafter ``verify`` is all. What a request commits is what a round would commit, for both halves are the round's own.

Masks come from ``Sequence.matcher``; this module knows of it what :class:`unisono.grammar.matcher.Matcher` documents.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch

from unisono.engine.feature_fields import mask_field
from unisono.engine.programs import (
    Parts,
    draft_chain,
    draft_tree,
    growth_fields,
    outcome_fields,
    verify_chain,
    verify_tree,
)
from unisono.engine.scheduler import Extend, Round
from unisono.grammar.matcher import ALL, Matcher
from unisono.kernels.pages import grow_pages
from unisono.kernels.rounds import limit_drafts
from unisono.program import Buffers, Field, Program, Schema


def held_drafts(max_rows: int, paths: int, width: int, device: torch.device) -> torch.Tensor:
    """Where drafts lie between the two passes of a round; one place, since rounds follow each other."""
    return torch.empty(max_rows * paths * (width - 1), dtype=torch.int32, device=device)


def _held(parts: Parts, b: Buffers) -> torch.Tensor:
    """The drafts [R · P, k] of this pass's rows. Row by row, so that the two passes may be padded to different R."""
    drafts, rows = b.shape.width - 1, b.shape.rows * parts.paths
    if drafts == 0:  # all paths are one
        return torch.empty((b.shape.rows, 0), dtype=torch.int32, device=b.device)
    assert parts.held is not None
    return parts.held[: rows * drafts].view(rows, drafts)


def draft_program(parts: Parts) -> Program:
    """The beginning of a round, up to its drafts; shows them to the host as ``drafts [rows, P, k]``."""
    drafts = Field("drafts", torch.int32, ("rows", parts.paths, "drafts"), output=True)

    def run(b: Buffers) -> None:
        slots, held = parts.slots, _held(parts, b).fill_(-1)
        grow_pages(slots.page_table, b.slots, b.columns, b.pages)
        if parts.tree is None:
            draft_chain(parts, b.slots, held, torch.empty_like(b.slots))
        else:
            draft_tree(parts, parts.tree, parts.tree.fork(b.slots), held)
        b.drafts.copy_(held.view(b.drafts.shape))

    return Program("draft", Schema((*growth_fields(parts), drafts)), run)


def verify_program(parts: Parts) -> Program:
    """The rest of a round behind :func:`draft_program`, under ``mask [rows, P, width, words]``."""
    schema = Schema(
        (
            *growth_fields(parts),
            mask_field(parts.model.config.vocab_size, "rows", "width", parts.paths),
            *outcome_fields(parts),
        )
    )

    def run(b: Buffers) -> None:
        slots, held = parts.slots, _held(parts, b)
        grow_pages(slots.page_table, b.slots, b.columns, b.pages)
        if b.shape.width == 1:
            verify_chain(parts, b, held)
        elif parts.tree is None:
            limit_drafts(held, b.slots, slots.max_drafts, b.drafted)  # they are limited: it counts them
            verify_chain(parts, b, held)
        else:
            verify_tree(parts, parts.tree, b, parts.tree.rows(b.slots), held)

    return Program("verify", schema, run)


def extend_masks(work: Extend, words: int) -> np.ndarray:
    """[requests, 1, 1, words] int32 for the first positions behind the prompts that end here."""
    masks = np.full((len(work.chunks), 1, 1, words), ALL, dtype=np.int32)
    nothing = np.empty((1, 0), dtype=np.int32)
    matchers = [chunk.sequence.matcher if chunk.last else None for chunk in work.chunks]
    _fill(matchers, [nothing] * len(matchers), masks)
    return masks


def round_masks(work: Round, drafts: np.ndarray, words: int) -> np.ndarray:
    """[requests, P, 1 + k, words] int32 for the positions behind ``drafts [requests, P, k]``."""
    rows, paths, count = drafts.shape
    masks = np.full((rows, paths, 1 + count, words), ALL, dtype=np.int32)
    _fill([sequence.matcher for sequence in work.sequences], drafts, masks)
    return masks


def _fill(matchers: list[Matcher | None], drafts: Iterable[np.ndarray], masks: np.ndarray) -> None:
    """Have each row's matcher make its masks: of several rows in threads, for matchers work outside Python's lock."""
    rows = zip(matchers, drafts, masks, strict=True)
    jobs = [functools.partial(matcher.masks, *row) for matcher, *row in rows if matcher is not None]
    if len(jobs) < 2:
        for job in jobs:
            job()
        return
    for done in [_threads().submit(job) for job in jobs]:
        done.result()


@functools.cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(max(1, len(os.sched_getaffinity(0)) - 1), "masks")
