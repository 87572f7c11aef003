"""Verification: the target's pass over drafts, sampling, acceptance, commit, and the drafter's catching up."""

from __future__ import annotations

import torch

from unisono.attention.base import AttentionInputs
from unisono.drafters.base import PausableDrafter, Verified
from unisono.graphs import Buffers
from unisono.kernels.speculation.rounds import round_inputs
from unisono.kernels.speculation.tree_paths import Fork
from unisono.kv.specs import PAGE_SIZE
from unisono.passes.context import Modules
from unisono.passes.features.base import Outputs
from unisono.passes.slot_tensors import SlotTensors, rotary_positions
from unisono.passes.tree import Tree


def verify_chain(modules: Modules, b: Buffers, drafts: torch.Tensor, early: bool = False) -> None:
    """Verify and commit ``drafts [R, k]``, and let the drafter catch up.

    early: the host waits for the outputs, so let it have them before the drafter catches up.
    """
    width = b.shape.width
    sampled, seen = _target_pass(modules, b, b.slots, b.slots, drafts, Outputs(b))
    accepted = modules.acceptance.accepted(drafts, sampled, b.slots, 1)
    modules.acceptance.count(b.drafted, width - 1)
    b.result.copy_(modules.commit(sampled, accepted, b.slots))
    if early and modules.width > 1:
        b.outputs_ready()
    catch_up(modules, Verified(b.slots, b.result, sampled, seen))


def catch_up(modules: Modules, verified: Verified) -> None:
    """Let the drafter observe a chain's round; one that drafted nothing it may observe later."""
    if verified.sampled.shape[1] == 1 and isinstance(modules.drafter, PausableDrafter):
        modules.drafter.remember(verified)
    elif modules.width > 1:
        modules.drafter.observe(verified)


def verify_tree(
    modules: Modules, tree: Tree, b: Buffers, fork: Fork, drafts: torch.Tensor, early: bool = False
) -> None:
    """Verify every path of ``drafts [R · P, k]``, commit the best one, and let the drafter catch up."""
    outputs = Outputs(b, modules.paths)
    sampled, seen = _target_pass(modules, b, fork.slots, fork.tables, drafts, outputs)
    drafts = modules.acceptance.accepted(drafts, sampled, fork.slots, modules.paths)
    best = tree.best(fork, sampled, drafts)
    outputs.choose(best.rows)
    b.drafted.copy_(best.drafted)
    modules.acceptance.count(b.drafted, b.shape.width - 1)
    b.result.copy_(modules.commit(best.sampled, best.drafts, b.slots))
    tree.adopt(b.slots, best, b.result)
    if early:
        b.outputs_ready()
    seen = None if seen is None else _rows_of(seen, len(fork.slots), best.rows)
    modules.drafter.observe(Verified(b.slots, b.result, best.sampled, seen))


def _target_pass(
    modules: Modules,
    b: Buffers,
    rows: torch.Tensor,
    tables: torch.Tensor,
    drafts: torch.Tensor,
    outputs: Outputs,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The target's tokens [N, W] after drafts [N, k], and the hidden states that the drafter asked for.

    rows [N]: each row's slot; tables [N]: its row of the page table.
    """
    token_ids, inputs = target_inputs(modules.slots, rows, tables, drafts)
    rotary = rotary_positions(modules.slots, rows, inputs.positions)
    hidden, seen = modules.forward(b, rows, token_ids, inputs, rotary=rotary)
    return modules.sample(b, hidden, hidden, rows, drafts, outputs), seen


def target_inputs(
    slots: SlotTensors, rows: torch.Tensor, tables: torch.Tensor, drafts: torch.Tensor
) -> tuple[torch.Tensor, AttentionInputs]:
    """The target's token ids [N · W] after drafts [N, k], and where they stand; rows and tables as above."""
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
    """Of states [rows · W, H] those of the chosen rows [R]: [R · W, H]."""
    return states.view(rows, -1).index_select(0, chosen).view(-1, states.shape[1])
