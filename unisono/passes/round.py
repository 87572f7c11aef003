"""A round as programs: every request goes from n committed tokens to n + 1 + a, with a accepted drafts.

With k = 0 this is plain decoding. ``round`` is one pass. If a feature needs the drafts on the host before they are
verified (``Feature.reads_drafts``), the round is split into two passes: ``draft`` proposes and copies the drafts to the
host; ``verify`` takes drafts from the host and does the rest. A request commits the same tokens either way.
"""

from __future__ import annotations

import torch

from unisono.drafters.base import ConfidentDrafter, PausableDrafter, RaggedDrafter
from unisono.graphs import Buffers, BufferSchema, Field, Program
from unisono.kernels.cache.pages import grow_pages
from unisono.kernels.speculation.rounds import limit_drafts
from unisono.kernels.speculation.shared_rows import SharedInputs
from unisono.kernels.speculation.tree_paths import Fork
from unisono.kv.pages import pages_for
from unisono.kv.specs import ALL
from unisono.passes.context import PassContext
from unisono.passes.features.base import PassKind
from unisono.passes.slot_tensors import SlotTensors
from unisono.passes.tree import Tree
from unisono.passes.verify import compact_inputs, share, verify_chain, verify_shared, verify_tree

SHARED_ROUND = "shared_round_"
"""Prefix of the names of programs of rounds with a shared budget; the number of drafts per row follows."""


def growth_columns(width: int) -> int:
    """Maximum pages that one round adds to a request's table: two rounds' worst case, unaligned."""
    return pages_for(2 * width + 1) + 1


def _growth_fields(context: PassContext) -> tuple[Field, ...]:
    """Slots of the requests, and the pages added to their page tables."""
    return (Field("slots", torch.int32, ("rows",), pad=context.slots.padding), *page_fields(context, "rows"))


def page_fields(context: PassContext, rows: str) -> tuple[Field, ...]:
    """Pages added to the page tables of each window group. rows: the dimension of the requests."""
    shape, fields = (rows, growth_columns(context.store.width)), list[Field]()
    for window_group in context.store.window_groups:
        columns, pages = growth_names(window_group)
        fields += [Field(columns, torch.int32, shape, pad=-1), Field(pages, torch.int32, shape)]
    return tuple(fields)


def growth_names(window_group: int) -> tuple[str, str]:
    """Names of the fields with the columns and ids of pages added to a window group's page tables."""
    return ("columns", "pages") if window_group == ALL else (f"columns_{window_group}", f"pages_{window_group}")


def grow(context: PassContext, b: Buffers, slots: torch.Tensor) -> None:
    """Write the batch's new pages into the page tables of slots [R]."""
    for window_group in context.store.window_groups:
        columns, pages = growth_names(window_group)
        grow_pages(context.store.page_tables[window_group], slots, getattr(b, columns), getattr(b, pages))


def _outcome_fields(context: PassContext, kind: PassKind) -> tuple[Field, ...]:
    """Output fields of a round, including those of features."""
    return (
        Field("result", torch.int32, ("rows", "result"), output=True),
        Field("drafted", torch.int32, ("rows",), output=True),
        *(field for feature in context.features for field in feature.fields(kind)),
    )


def round_program(context: PassContext) -> Program:
    """Draft, verify, sample, accept and commit for ``rows`` requests, ``width`` tokens each: 1 … 1 + k."""
    schema = BufferSchema((*_growth_fields(context), *_outcome_fields(context, "round")))

    def run(b: Buffers) -> None:
        grow(context, b, b.slots)
        rows, drafts = b.shape.rows, b.shape.width - 1
        if context.tree is None or not drafts:
            chain = torch.full((rows, drafts), -1, dtype=torch.int32, device=b.device)
            _draft_chain(context, b.slots, chain, b.drafted)
            verify_chain(context, b, chain)
        else:
            fork = context.tree.fork(b.slots)
            paths = torch.full((len(fork.slots), drafts), -1, dtype=torch.int32, device=b.device)
            _draft_tree(context, context.tree, fork, paths)
            verify_tree(context, context.tree, b, fork, paths)

    return context.program("round", schema, run)


def shared_round(drafts: int) -> str:
    """Name of the program of rounds whose requests share a budget of this number of drafts per row."""
    return f"{SHARED_ROUND}{drafts}"


def shared_round_program(context: PassContext, drafts: int) -> Program:
    """As :func:`round_program`, but each request has its own number of drafts, 0 … k of ``width`` 1 + k.

    The target computes rows · (1 + ``drafts``) tokens, of which padding rows take none. Input ``rates [rows, k]``: see
    :func:`unisono.passes.verify.share`. Output ``found [rows]``: drafts of each request before the choice. A drafter
    that takes rows of any width drafts after the choice, so that its pass is as small as the target's.
    """
    rates = Field("rates", torch.float32, ("rows", "drafts"))
    found = Field("found", torch.int32, ("rows",), output=True)
    schema = BufferSchema((*_growth_fields(context), rates, found, *_outcome_fields(context, "round")))

    def run(b: Buffers) -> None:
        grow(context, b, b.slots)
        rows, most = b.shape.rows, b.shape.width - 1
        tokens, drafter = rows * (1 + drafts), context.drafter
        ragged = drafter if isinstance(drafter, RaggedDrafter) and drafter.drafts_ragged else None
        if ragged is not None:
            chain, packed = _draft_shared(context, ragged, b, most, tokens)
        else:
            chain = torch.full((rows, most), -1, dtype=torch.int32, device=b.device)
            chances = _draft_rated(context, b.slots, chain, b.rates)
            _, packed = share(context, b, chain, chances, tokens)
        verify_shared(context, b, chain, packed, ragged)

    return context.program(shared_round(drafts), schema, run)


def draft_program(context: PassContext) -> Program:
    """First pass of a draft-verify round: propose. Output: ``drafts [rows, P, k]`` int32, -1 for none."""
    drafts = Field("drafts", torch.int32, ("rows", context.paths, "drafts"), output=True)

    def run(b: Buffers) -> None:
        drafts = b.drafts.flatten(0, 1).fill_(-1)
        grow(context, b, b.slots)
        if context.tree is None:
            _draft_chain(context, b.slots, drafts, torch.empty_like(b.slots))
        else:
            _draft_tree(context, context.tree, context.tree.fork(b.slots), drafts)

    return Program("draft", BufferSchema((*_growth_fields(context), drafts)), run)


def verify_program(context: PassContext) -> Program:
    """Second pass of a draft-verify round: verify ``drafts [rows, P, k]`` int32 from the host, -1 for none.

    The drafts come from :func:`draft_program`, or from a feature that knows the next tokens (``RequestState.forced``).
    The host waits for this pass, so its outputs are published before the drafter catches up. Other rounds are read one
    round late, and the draft controller measures a round from its outputs to the next round's, including the drafter's
    catch-up.
    """
    drafts = Field("drafts", torch.int32, ("rows", context.paths, "drafts"), pad=-1)
    schema = BufferSchema((*_growth_fields(context), drafts, *_outcome_fields(context, "verify")))

    def run(b: Buffers) -> None:
        grow(context, b, b.slots)
        if b.shape.width == 1:  # without drafts all paths are equal
            verify_chain(context, b, b.drafts[:, 0], early=True)
        elif context.tree is None:
            drafts = b.drafts[:, 0]
            limit_drafts(drafts, b.slots, context.slots.max_drafts, b.drafted)
            verify_chain(context, b, drafts, early=True)
        else:
            verify_tree(context, context.tree, b, context.tree.rows(b.slots), b.drafts.flatten(0, 1), early=True)

    return context.program("verify", schema, run)


def catch_up_program(drafter: PausableDrafter, slots: SlotTensors) -> Program:
    """Let the drafter catch up with up to ``width`` unobserved tokens of ``rows`` requests."""
    schema = BufferSchema((Field("slots", torch.int32, ("rows",), pad=slots.padding),))
    return Program("catch_up", schema, lambda b: drafter.resume(b.slots))


def _draft_chain(context: PassContext, slots: torch.Tensor, drafts: torch.Tensor, drafted: torch.Tensor) -> None:
    """Fill ``drafts [R, k]``, initially -1, and ``drafted [R]`` with the number of drafts."""
    if drafts.shape[1]:
        with context.sampler.seeing(drafts):
            context.drafter.propose(slots, drafts)
        limit_drafts(drafts, slots, context.slots.max_drafts, drafted)


def _draft_rated(context: PassContext, slots: torch.Tensor, drafts: torch.Tensor, rates: torch.Tensor) -> torch.Tensor:
    """Fill ``drafts [R, k]``, initially -1. Return each draft's rate [R, k]: ``rates``, or the geometric mean of them
    and the drafter's confidence.
    """
    drafter = context.drafter
    with context.sampler.seeing(drafts):
        if isinstance(drafter, ConfidentDrafter) and drafter.confident:
            rates = (rates * drafter.propose_rated(slots, drafts)).sqrt()
        else:
            drafter.propose(slots, drafts)
    limit_drafts(drafts, slots, context.slots.max_drafts, torch.empty_like(slots))
    return rates


def _draft_shared(
    context: PassContext, drafter: RaggedDrafter, b: Buffers, most: int, tokens: int
) -> tuple[torch.Tensor, SharedInputs]:
    """Draft what is verified: share the places of drafts first, then fill them. Returns drafts [R, most], -1 where
    nothing is verified, and the target's inputs.
    """
    shape = b.slots.shape[0], most
    chain = torch.full(shape, drafter.placeholder, dtype=torch.int32, device=b.device)
    limit_drafts(chain, b.slots, context.slots.max_drafts, torch.empty_like(b.slots))
    widths, packed = share(context, b, chain, b.rates, tokens)
    drafter.propose_ragged(b.slots, chain, packed)
    return chain, compact_inputs(context, b, chain, widths, tokens)


def _draft_tree(context: PassContext, tree: Tree, fork: Fork, drafts: torch.Tensor) -> None:
    """Fill ``drafts [R · P, k]``, initially -1."""
    with context.sampler.seeing(drafts):
        tree.propose(fork, drafts)
    limit_drafts(drafts, fork.slots, context.slots.max_drafts, torch.empty_like(fork.slots))
