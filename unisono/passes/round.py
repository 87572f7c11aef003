"""A round as programs: every request goes from n committed tokens to n + 1 + a, where a drafts were accepted.

With k = 0 that is plain decoding. ``round`` is one pass. Where a feature needs the drafts on the host before they are
verified (``Feature.reads_drafts``), the round is two passes: ``draft`` proposes and hands the drafts to the host;
``verify`` takes drafts from the host and is the rest. A request commits the same tokens either way.
"""

from __future__ import annotations

import torch

from unisono.drafters.base import PausableDrafter
from unisono.graphs import Buffers, Field, Program, Schema
from unisono.kernels.cache.pages import grow_pages
from unisono.kernels.speculation.rounds import limit_drafts
from unisono.kernels.speculation.tree_paths import Fork
from unisono.kv.pages import pages_for
from unisono.kv.specs import ALL
from unisono.passes.context import Modules
from unisono.passes.features.base import PassKind
from unisono.passes.slot_tensors import SlotTensors
from unisono.passes.tree import Tree
from unisono.passes.verify import verify_chain, verify_tree


def growth_columns(width: int) -> int:
    """Pages by which a request's table may grow with one round: two rounds' worst case, not aligned."""
    return pages_for(2 * width + 1) + 1


def _growth_fields(modules: Modules) -> tuple[Field, ...]:
    """The requests' slots, and the pages by which their page tables grow."""
    return (Field("slots", torch.int32, ("rows",), pad=modules.slots.padding), *page_fields(modules, "rows"))


def page_fields(modules: Modules, rows: str) -> tuple[Field, ...]:
    """The pages by which page tables grow, of each page lifetime. rows: the dimension of the requests."""
    shape, fields = (rows, growth_columns(modules.store.width)), list[Field]()
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


def draft_program(modules: Modules) -> Program:
    """First pass of a round: propose. Output: ``drafts [rows, P, k]`` int32, -1 for none."""
    drafts = Field("drafts", torch.int32, ("rows", modules.paths, "drafts"), output=True)

    def run(b: Buffers) -> None:
        drafts = b.drafts.flatten(0, 1).fill_(-1)
        grow(modules, b, b.slots)
        if modules.tree is None:
            _draft_chain(modules, b.slots, drafts, torch.empty_like(b.slots))
        else:
            _draft_tree(modules, modules.tree, modules.tree.fork(b.slots), drafts)

    return Program("draft", Schema((*_growth_fields(modules), drafts)), run)


def verify_program(modules: Modules) -> Program:
    """Second pass of a round: verify ``drafts [rows, P, k]`` int32, -1 for none, that the host provides.

    They come from :func:`draft_program`, or from a feature that knows the next tokens (``RequestState.forced``). The
    host waits for this pass, so its outputs are published before the drafter catches up. Other rounds are read one
    round late, and the draft controller measures a round from the outputs of one to those of the next, the drafter's
    catching up included.
    """
    drafts = Field("drafts", torch.int32, ("rows", modules.paths, "drafts"), pad=-1)
    schema = Schema((*_growth_fields(modules), drafts, *_outcome_fields(modules, "verify")))

    def run(b: Buffers) -> None:
        grow(modules, b, b.slots)
        if b.shape.width == 1:  # without drafts all paths are one
            verify_chain(modules, b, b.drafts[:, 0], early=True)
        elif modules.tree is None:
            drafts = b.drafts[:, 0]
            limit_drafts(drafts, b.slots, modules.slots.max_drafts, b.drafted)
            verify_chain(modules, b, drafts, early=True)
        else:
            verify_tree(modules, modules.tree, b, modules.tree.rows(b.slots), b.drafts.flatten(0, 1), early=True)

    return modules.program("verify", schema, run)


def catch_up_program(drafter: PausableDrafter, slots: SlotTensors) -> Program:
    """Have the drafter catch up with up to ``width`` unobserved tokens of ``rows`` requests."""
    schema = Schema((Field("slots", torch.int32, ("rows",), pad=slots.padding),))
    return Program("catch_up", schema, lambda b: drafter.resume(b.slots))


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
