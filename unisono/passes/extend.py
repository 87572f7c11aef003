"""Prompt passes as programs: they compute prompt tokens, and sample a token for each prompt that ends in them.

A *mixed* pass is a prompt pass in which running requests decode too, a token each: a round without drafts that shares
the prompts' pass of the target.
"""

from __future__ import annotations

import torch

from unisono.attention.base import AttentionInputs
from unisono.attention.context import Rotary
from unisono.drafters.base import PromptPass, Verified
from unisono.graphs import Buffers, Features, Field, Hidden, Logits, Program, Schema
from unisono.kernels.speculation.rounds import extend_inputs
from unisono.kv.specs import PAGE_SIZE
from unisono.models.blocks.embedding_overrides import Overriding
from unisono.passes.context import Modules
from unisono.passes.features.base import Outputs
from unisono.passes.round import grow, page_fields
from unisono.passes.verify import catch_up, target_inputs


def prompt_program(features: Features) -> str:
    """The program whose graphs serve a prompt pass with these features: more logits have graphs of their own."""
    return "extend" if features.logits is Logits.LAST else "score"


def _prompt_fields(modules: Modules, max_rows: int) -> tuple[Field, ...]:
    """Of the ``tokens`` of prompts in a pass.

    ``sample_slots`` names the slot of each row that ends its prompt here, else the padding slot;
    ``last`` is the index of that row's last token; ``next_ids`` the token after each, as far as it is known.
    """
    padding = modules.slots.padding
    return (
        Field("token_ids", torch.int32, ("tokens",)),
        Field("next_ids", torch.int32, ("tokens",)),
        Field("slots", torch.int32, (max_rows,), pad=padding),
        Field("query_start", torch.int32, (max_rows + 1,)),
        Field("start", torch.int32, (max_rows,)),
        Field("sample_slots", torch.int32, (max_rows,), pad=padding),
        Field("last", torch.int32, (max_rows,)),
    )


def extend_program(modules: Modules, max_rows: int, name: str = "extend") -> Program:
    """Compute ``rows`` prompt tokens of at most ``max_rows`` requests; sample where a prompt ends.

    name: one that :func:`prompt_program` gives.
    """
    more = (field for feature in modules.features for field in feature.fields("extend"))
    result = Field("result", torch.int32, (max_rows, 3), output=True)
    schema = Schema((*_prompt_fields(modules, max_rows), result, *more))

    def run(b: Buffers) -> None:
        inputs = _prompt_inputs(modules, b)
        last_tokens = inputs.last_tokens(b.last)
        only = last_tokens if b.shape.rows > max_rows and _reads_last_tokens_only(modules, b) else None
        given, rotary = _given(modules, b, inputs.positions)
        turned = None if rotary is None else rotary.positions
        hidden, seen = modules.forward(b, b.slots, b.token_ids, inputs, given, only, turned)
        last = hidden if only else last_tokens.select(hidden)
        drafts = torch.empty((max_rows, 0), dtype=torch.int32, device=b.device)
        sampled = modules.sample(b, hidden, last, b.sample_slots, drafts, Outputs(b))
        b.result.copy_(modules.commit(sampled, drafts, b.sample_slots))
        if modules.width > 1:
            b.outputs_ready()  # the first token need not wait for the drafter
            seen = last if modules.drafter.features.hidden is Hidden.LAST else seen
            _observe_prompts(modules, b, inputs.positions, sampled, seen, given, rotary)

    return modules.program(name, schema, run)


def mixed_program(modules: Modules, max_rows: int) -> Program:
    """Compute prompt tokens as :func:`extend_program` does, and one token more of each of ``decodes`` requests.

    The requests' tokens and rows come first, and are attended as those of a round. Requests may ask for features that
    mix (``Feature.mixes``).
    """
    padding = modules.slots.padding
    schema = Schema(
        (
            *_prompt_fields(modules, max_rows),
            Field("decode_slots", torch.int32, ("decodes",), pad=padding),
            *page_fields(modules, "decodes"),
            Field("result", torch.int32, (("decodes", max_rows), 3), output=True),
            *(field for feature in modules.features if feature.mixes for field in feature.fields("mixed")),
        )
    )

    def run(b: Buffers) -> None:
        decodes = b.decode_slots.shape[0]
        grow(modules, b, b.decode_slots)
        drafts = torch.empty((decodes + max_rows, 0), dtype=torch.int32, device=b.device)
        token_ids, decoding = target_inputs(modules.slots, b.decode_slots, b.decode_slots, drafts[:decodes])
        prompts = _prompt_inputs(modules, b)
        inputs = AttentionInputs.joined(decoding, prompts)
        first = torch.arange(decodes, dtype=torch.int32, device=b.device)
        last_tokens = inputs.last_tokens(torch.cat((first, b.last + decodes)))
        only = last_tokens if b.token_ids.shape[0] > max_rows and _reads_last_tokens_only(modules, b) else None
        hidden, seen = modules.forward(b, inputs.slots, torch.cat((token_ids, b.token_ids)), inputs, (), only)
        last = hidden if only else last_tokens.select(hidden)
        rows = torch.cat((b.decode_slots, b.sample_slots))
        sampled = modules.sample(b, hidden, last, rows, drafts, Outputs(b))
        b.result.copy_(modules.commit(sampled, drafts, rows))
        if modules.width > 1:
            b.outputs_ready()
            seen = last if modules.drafter.features.hidden is Hidden.LAST else seen
            of_decodes, of_prompts = (None, None) if seen is None else (seen[:decodes], seen[decodes:])
            catch_up(modules, Verified(b.decode_slots, b.result[:decodes], sampled[:decodes], of_decodes))
            _observe_prompts(modules, b, prompts.positions, sampled[decodes:], of_prompts)

    return modules.program("mixed", schema, run)


def _prompt_inputs(modules: Modules, b: Buffers) -> AttentionInputs:
    """Where the tokens of prompts stand."""
    table = modules.slots.page_table
    placed = extend_inputs(b.slots, b.query_start, b.start, table, PAGE_SIZE, b.token_ids.shape[0])
    return AttentionInputs(b.slots, *placed, table, None, b.query_start)


def _observe_prompts(
    modules: Modules,
    b: Buffers,
    positions: torch.Tensor,
    sampled: torch.Tensor,
    seen: torch.Tensor | None,
    given: tuple[Overriding, ...] = (),
    rotary: Rotary | None = None,
) -> None:
    """Let the drafter catch up with the prompts' tokens. sampled [E, 1]; seen: the hidden states that it asked for."""
    next_ids = _with_sampled(b.next_ids, b.last, sampled[:, 0], b.sample_slots != modules.slots.padding)
    modules.drafter.observe_prompt(
        PromptPass(b.slots, b.query_start, b.start, b.token_ids, next_ids, positions, b.last, seen, given, rotary)
    )


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
