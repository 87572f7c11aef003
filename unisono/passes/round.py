"""A round as programs: every request goes from n committed tokens to n + 1 + a, where a drafts were accepted.

With k = 0 that is plain decoding. ``round`` is one pass. Where a feature needs the drafts on the host before they are
verified (``Feature.reads_drafts``), the round is two passes: ``draft`` proposes, leaves the drafts on the device and
shows the host a copy; ``verify`` is the rest. A request commits the same tokens either way.
"""

from __future__ import annotations

import torch

from unisono.drafters.base import PausableDrafter
from unisono.kernels.pages import grow_pages
from unisono.kernels.rounds import limit_drafts
from unisono.kernels.tree_paths import Fork
from unisono.passes.features.base import PassKind
from unisono.passes.modules import Modules
from unisono.passes.slot_tensors import SlotTensors
from unisono.passes.tree import Tree
from unisono.passes.verify import verify_chain, verify_tree
from unisono.program import Buffers, Field, Program, Schema
from unisono.state.pages import pages_for
from unisono.state.specs import ALL


def growth_columns(width: int) -> int:
    """Pages by which a request's table may grow with one round: two rounds' worst case, not aligned."""
    return pages_for(2 * width + 1) + 1


def _growth_fields(modules: Modules) -> tuple[Field, ...]:
    """The requests' slots, and the pages by which their page tables grow."""
    return (Field("slots", torch.int32, ("rows",), pad=modules.slots.padding), *page_fields(modules, "rows"))


def page_fields(modules: Modules, rows: str) -> tuple[Field, ...]:
    """The pages by which page tables grow, of each page lifetime. rows: the dimension of the requests."""
    shape, fields = (rows, growth_columns(modules.width)), list[Field]()
    for lifetime in modules.store.lifetimes:
        columns, pages = growth_names(lifetime)
        fields += [Field(columns, torch.int32, shape, pad=-1), Field(pages, torch.int32, shape)]
    return tuple(fields)


def growth_names(lifetime: int) -> tuple[str, str]:
    """The names of the fields with the columns and pages by which page tables of a lifetime grow."""
    return ("columns", "pages") if lifetime == ALL else (f"columns_{lifetime}", f"pages_{lifetime}")


def grow(modules: Modules, b: Buffers, slots: torch.Tensor) -> None:
    """Write the batch's new pages into the page tables of slots [R]."""
    for lifetime in modules.store.lifetimes:
        columns, pages = growth_names(lifetime)
        grow_pages(modules.store.page_tables[lifetime], slots, getattr(b, columns), getattr(b, pages))


def _outcome_fields(modules: Modules, kind: PassKind) -> tuple[Field, ...]:
    """What a round hands the host, and what features add."""
    return (
        Field("result", torch.int32, ("rows", "result"), output=True),
        Field("drafted", torch.int32, ("rows",), output=True),
        *(field for feature in modules.features for field in feature.fields(kind)),
    )


def round_program(modules: Modules) -> Program:
    """Draft, verify, sample, accept and commit for ``rows`` requests, ``width`` tokens each: 1 … 1 + k."""
    schema = Schema((*_growth_fields(modules), *_outcome_fields(modules, "round")))

    def run(b: Buffers) -> None:
        grow(modules, b, b.slots)
        rows, drafts = b.shape.rows, b.shape.width - 1
        if modules.tree is None or not drafts:
            chain = torch.full((rows, drafts), -1, dtype=torch.int32, device=b.device)
            _draft_chain(modules, b.slots, chain, b.drafted)
            verify_chain(modules, b, chain)
        else:
            fork = modules.tree.fork(b.slots)
            paths = torch.full((len(fork.slots), drafts), -1, dtype=torch.int32, device=b.device)
            _draft_tree(modules, modules.tree, fork, paths)
            verify_tree(modules, modules.tree, b, fork, paths)

    return modules.program("round", schema, run)


def held_drafts(max_rows: int, paths: int, width: int, device: torch.device) -> torch.Tensor:
    """Where drafts lie between the two passes of a round; one place, for such rounds do not overlap."""
    return torch.empty(max_rows * paths * (width - 1), dtype=torch.int32, device=device)


def draft_program(modules: Modules) -> Program:
    """The first pass of a round, up to its drafts; shows them to the host as ``drafts [rows, P, k]``."""
    drafts = Field("drafts", torch.int32, ("rows", modules.paths, "drafts"), output=True)

    def run(b: Buffers) -> None:
        held = _held(modules, b).fill_(-1)
        grow(modules, b, b.slots)
        if modules.tree is None:
            _draft_chain(modules, b.slots, held, torch.empty_like(b.slots))
        else:
            _draft_tree(modules, modules.tree, modules.tree.fork(b.slots), held)
        b.drafts.copy_(held.view(b.drafts.shape))

    return Program("draft", Schema((*_growth_fields(modules), drafts)), run)


def verify_program(modules: Modules) -> Program:
    """The second pass of a round, after :func:`draft_program`. The host waits for it, so it has its outputs early.

    Other rounds are read one late, so there is nothing to win; and from the outputs of one to those of the next the
    draft controller measures what a round takes, the drafter's catching up included.
    """
    schema = Schema((*_growth_fields(modules), *_outcome_fields(modules, "verify")))

    def run(b: Buffers) -> None:
        slots, held = modules.slots, _held(modules, b)
        grow(modules, b, b.slots)
        if modules.tree is None or b.shape.width == 1:
            if b.shape.width > 1:
                limit_drafts(held, b.slots, slots.max_drafts, b.drafted)  # they are limited: it counts them
            verify_chain(modules, b, held, early=True)
        else:
            verify_tree(modules, modules.tree, b, modules.tree.rows(b.slots), held, early=True)

    return modules.program("verify", schema, run)


def catch_up_program(drafter: PausableDrafter, slots: SlotTensors) -> Program:
    """Have the drafter catch up with up to ``width`` unobserved tokens of ``rows`` requests."""
    schema = Schema((Field("slots", torch.int32, ("rows",), pad=slots.padding),))
    return Program("catch_up", schema, lambda b: drafter.resume(b.slots))


def _held(modules: Modules, b: Buffers) -> torch.Tensor:
    """The drafts [R · P, k] of this pass's rows. Row by row, so that the two passes may be padded to different R."""
    drafts, rows = b.shape.width - 1, b.shape.rows * modules.paths
    if drafts == 0:  # all paths are one
        return torch.empty((b.shape.rows, 0), dtype=torch.int32, device=b.device)
    assert modules.held_drafts is not None
    return modules.held_drafts[: rows * drafts].view(rows, drafts)


def _draft_chain(modules: Modules, slots: torch.Tensor, drafts: torch.Tensor, drafted: torch.Tensor) -> None:
    """Fill ``drafts [R, k]``, all -1 before, and ``drafted [R]`` with how many there are."""
    if drafts.shape[1]:
        with modules.sampler.seeing(drafts):
            modules.drafter.propose(slots, drafts)
        limit_drafts(drafts, slots, modules.slots.max_drafts, drafted)


def _draft_tree(modules: Modules, tree: Tree, fork: Fork, drafts: torch.Tensor) -> None:
    """Fill ``drafts [R · P, k]``, all -1 before."""
    with modules.sampler.seeing(drafts):
        tree.propose(fork, drafts)
    limit_drafts(drafts, fork.slots, modules.slots.max_drafts, torch.empty_like(fork.slots))
