"""Prompt passes as programs: they compute prompt tokens, and sample a token for each prompt that ends in them."""

from __future__ import annotations

import torch

from unisono.attention.base import AttentionInputs
from unisono.attention.context import Rotary
from unisono.drafters.base import PromptPass
from unisono.kernels.rounds import extend_inputs
from unisono.models.overriding import Overriding
from unisono.passes.features.base import Outputs
from unisono.passes.modules import Modules
from unisono.program import Buffers, Features, Field, Hidden, Logits, Program, Schema
from unisono.state.specs import PAGE_SIZE


def prompt_program(features: Features) -> str:
    """The program whose graphs serve a prompt pass with these features: more logits have graphs of their own."""
    return "extend" if features.logits is Logits.LAST else "score"


def extend_program(modules: Modules, max_rows: int, name: str = "extend") -> Program:
    """Compute ``rows`` prompt tokens of at most ``max_rows`` requests; sample where a prompt ends.

    name: one that :func:`prompt_program` gives.

    ``sample_slots`` names the slot of each row that ends its prompt here, else the padding slot;
    ``last`` is the index of that row's last token; ``next_ids`` the token after each, as far as it is known.
    """
    slots = modules.slots
    schema = Schema(
        (
            Field("token_ids", torch.int32, ("rows",)),
            Field("next_ids", torch.int32, ("rows",)),
            Field("slots", torch.int32, (max_rows,), pad=slots.padding),
            Field("query_start", torch.int32, (max_rows + 1,)),
            Field("start", torch.int32, (max_rows,)),
            Field("sample_slots", torch.int32, (max_rows,), pad=slots.padding),
            Field("last", torch.int32, (max_rows,)),
            Field("result", torch.int32, (max_rows, 3), output=True),
            *(field for feature in modules.features for field in feature.fields("extend")),
        )
    )

    def run(b: Buffers) -> None:
        positions, slot_mapping, kv_len = extend_inputs(
            b.slots, b.query_start, b.start, slots.page_table, PAGE_SIZE, b.shape.rows
        )
        inputs = AttentionInputs(b.slots, positions, slot_mapping, kv_len, slots.page_table, None, b.query_start)
        last_tokens = inputs.last_tokens(b.last)
        only = last_tokens if b.shape.rows > max_rows and _reads_last_tokens_only(modules, b) else None
        given, rotary = _given(modules, b, positions)
        turned = None if rotary is None else rotary.positions
        hidden, seen = modules.forward(b.token_ids, inputs, given, only, turned)
        last = hidden if only else last_tokens.select(hidden)
        drafts = torch.empty((max_rows, 0), dtype=torch.int32, device=b.device)
        sampled = modules.sample(b, hidden, last, b.sample_slots, drafts, Outputs(b))
        b.result.copy_(modules.commit(sampled, drafts, b.sample_slots))
        if modules.width > 1:
            b.outputs_ready()  # the first token need not wait for the drafter
            seen = last if modules.drafter.features.hidden is Hidden.LAST else seen
            next_ids = _with_sampled(b.next_ids, b.last, sampled[:, 0], b.sample_slots != slots.padding)
            modules.drafter.observe_prompt(
                PromptPass(
                    b.slots, b.query_start, b.start, b.token_ids, next_ids, positions, b.last, seen, given, rotary
                )
            )

    return Program(name, schema, run)


def _given(modules: Modules, b: Buffers, positions: torch.Tensor) -> tuple[tuple[Overriding, ...], Rotary | None]:
    """What features give a prompt pass: vectors in place of those of token ids, and the positions to turn by."""
    given = (feature.override_embeddings(b) for feature in modules.features)
    rotary = (feature.rotary(b, positions) for feature in modules.features)
    return tuple(g for g in given if g is not None), next((r for r in rotary if r is not None), None)


def _reads_last_tokens_only(modules: Modules, b: Buffers) -> bool:
    """Whether only each row's last token of a prompt pass has its target output read."""
    features = modules.drafter.features
    if features.hidden is Hidden.FULL or modules.model.config.num_layers in features.aux_layers:
        return False
    fields = (f for feature in modules.features if feature.reads_all_tokens for f in feature.fields("extend"))
    return all(b.find(field.name) is None for field in fields)


def _with_sampled(
    next_ids: torch.Tensor, last: torch.Tensor, sampled: torch.Tensor, samples: torch.Tensor
) -> torch.Tensor:
    """``next_ids [T]`` with ``sampled [E]`` put at ``last [E]`` where ``samples [E]``."""
    spare = next_ids.shape[0]  # rows that sample nothing write after the end
    padded = torch.cat((next_ids, next_ids[:1]))
    return padded.index_copy(0, last.masked_fill(~samples, spare).long(), sampled)[:spare]
