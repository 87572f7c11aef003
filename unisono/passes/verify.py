"""Verification: the target's pass over drafts, sampling, acceptance, commit, and the drafter's catch-up."""

from __future__ import annotations

import torch

from unisono.attention.base import AttentionInputs
from unisono.drafters.base import PausableDrafter, RaggedDrafter, Verified
from unisono.graphs import Buffers
from unisono.kernels.speculation.rounds import round_inputs
from unisono.kernels.speculation.shared_rows import SharedInputs, share_drafts, shared_inputs
from unisono.kernels.speculation.tree_paths import Fork
from unisono.kv.specs import PAGE_SIZE
from unisono.passes.context import PassContext
from unisono.passes.features.base import Outputs
from unisono.passes.slot_tensors import SlotTensors, rotary_positions
from unisono.passes.tree import Tree


def verify_chain(context: PassContext, b: Buffers, drafts: torch.Tensor, early: bool = False) -> None:
    """Verify and commit ``drafts [R, k]``, and let the drafter catch up.

    early: the host waits for the outputs, so publish them before the drafter catches up.
    """
    sampled, seen = _target_pass(context, b, b.slots, b.slots, drafts, Outputs(b))
    _commit_chain(context, b, drafts, sampled, seen, early)


def share(
    context: PassContext, b: Buffers, drafts: torch.Tensor, rates: torch.Tensor, tokens: int
) -> tuple[torch.Tensor, SharedInputs]:
    """Keep the drafts [R, k] most likely to be reached, as many as ``tokens`` tokens hold; the others become -1.

    rates [R, k] fp32: probability of each draft if those before it are accepted. Returns the tokens of each row [R] and
    the inputs of a pass over all rows, each of its own width.
    """
    s = context.slots
    widths = share_drafts(drafts, rates, b.slots, s.length, s.max_length, s.status, tokens, b.drafted, b.found)
    return widths, compact_inputs(context, b, drafts, widths, tokens)


def compact_inputs(
    context: PassContext, b: Buffers, drafts: torch.Tensor, widths: torch.Tensor, tokens: int
) -> SharedInputs:
    """Inputs of a pass over rows of ``widths`` [R] tokens, the last committed one and its drafts [R, k]."""
    s = context.slots
    return shared_inputs(b.slots, drafts, widths, s.length, s.last_token, s.page_table, PAGE_SIZE, tokens)


def verify_shared(
    context: PassContext, b: Buffers, drafts: torch.Tensor, packed: SharedInputs, drafter: RaggedDrafter | None
) -> None:
    """Verify drafts [R, k] that share a pass, and commit. packed: see :func:`share`.

    Each request has a row of its own width in the target's pass, so its tokens have the bits of any other round.
    drafter: the drafter, if it observes rows of any widths.
    """
    s = context.slots
    placed = b.slots, packed.positions, packed.slot_mapping, packed.kv_len, s.page_table
    inputs = AttentionInputs(*placed, None, packed.query_start, widest=b.shape.width)
    rotary = None
    if s.rotary_delta is not None:
        rotary = packed.positions + s.rotary_delta.index_select(0, b.slots).index_select(0, packed.owners)
    last, seen = context.forward(b, b.slots, packed.token_ids, inputs, rotary=rotary)
    hidden = last.index_select(0, packed.places)
    sampled = context.sample(b, hidden, last, b.slots, drafts, Outputs(b), packed.sampled)
    if drafter is not None and seen is not None:
        _commit(context, b, drafts, sampled, shared=True)
        drafter.observe_ragged(seen, packed)
    else:
        seen = None if seen is None else seen.index_select(0, packed.places)
        _commit_chain(context, b, drafts, sampled, seen, shared=True)


def _commit_chain(
    context: PassContext,
    b: Buffers,
    drafts: torch.Tensor,
    sampled: torch.Tensor,
    seen: torch.Tensor | None,
    early: bool = False,
    shared: bool = False,
) -> None:
    """Commit drafts [R, k] by the target's tokens [R, W], and let the drafter catch up. seen [R · W, H]."""
    _commit(context, b, drafts, sampled, shared)
    if early and context.width > 1:
        b.outputs_ready()
    catch_up(context, Verified(b.slots, b.result, sampled, seen))


def _commit(context: PassContext, b: Buffers, drafts: torch.Tensor, sampled: torch.Tensor, shared: bool) -> None:
    """Commit drafts [R, k] by the target's tokens [R, W]. shared: see :class:`CandidateRule`."""
    candidates = context.acceptance.candidates(drafts, sampled, b.slots, 1, shared)
    if not shared:
        context.acceptance.count(b.drafted, b.shape.width - 1)
    b.result.copy_(context.commit(sampled, candidates, b.slots))


def catch_up(context: PassContext, verified: Verified) -> None:
    """Let the drafter observe a chain's round, or record it for later if nothing was drafted."""
    if verified.sampled.shape[1] == 1 and isinstance(context.drafter, PausableDrafter):
        context.drafter.remember(verified)
    elif context.width > 1:
        context.drafter.observe(verified)


def verify_tree(
    context: PassContext, tree: Tree, b: Buffers, fork: Fork, drafts: torch.Tensor, early: bool = False
) -> None:
    """Verify every path of ``drafts [R · P, k]``, commit the best one, and let the drafter catch up."""
    outputs = Outputs(b, context.paths)
    sampled, seen = _target_pass(context, b, fork.slots, fork.tables, drafts, outputs)
    drafts = context.acceptance.candidates(drafts, sampled, fork.slots, context.paths)
    best = tree.best(fork, sampled, drafts)
    outputs.choose(best.rows)
    b.drafted.copy_(best.drafted)
    context.acceptance.count(b.drafted, b.shape.width - 1)
    b.result.copy_(context.commit(best.sampled, best.drafts, b.slots))
    tree.adopt(b.slots, best, b.result)
    if early:
        b.outputs_ready()
    seen = None if seen is None else _rows_of(seen, len(fork.slots), best.rows)
    context.drafter.observe(Verified(b.slots, b.result, best.sampled, seen))


def _target_pass(
    context: PassContext,
    b: Buffers,
    rows: torch.Tensor,
    tables: torch.Tensor,
    drafts: torch.Tensor,
    outputs: Outputs,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The target's tokens [N, W] after drafts [N, k], and the hidden states read by the drafter.

    rows [N]: slot of each row; tables [N]: its page-table row.
    """
    token_ids, inputs = target_inputs(context.slots, rows, tables, drafts)
    rotary = rotary_positions(context.slots, rows, inputs.positions)
    hidden, seen = context.forward(b, rows, token_ids, inputs, rotary=rotary)
    return context.sample(b, hidden, hidden, rows, drafts, outputs), seen


def target_inputs(
    slots: SlotTensors, rows: torch.Tensor, tables: torch.Tensor, drafts: torch.Tensor
) -> tuple[torch.Tensor, AttentionInputs]:
    """Token ids [N · W] of the target after drafts [N, k], and attention inputs. rows, tables: as in
    :func:`_target_pass`."""
    token_ids, positions, slot_mapping, kv_len = round_inputs(
        rows,
        drafts,
        slots.length,
        slots.max_length,
        slots.status,
        slots.last_token,
        slots.page_table,
        PAGE_SIZE,
        tables,
    )
    inputs = AttentionInputs(tables, positions, slot_mapping, kv_len, slots.page_table, 1 + drafts.shape[1])
    return token_ids, inputs


def _rows_of(states: torch.Tensor, rows: int, chosen: torch.Tensor) -> torch.Tensor:
    """Select the chosen rows [R] of states [rows · W, H]: [R · W, H]."""
    return states.view(rows, -1).index_select(0, chosen).view(-1, states.shape[1])
