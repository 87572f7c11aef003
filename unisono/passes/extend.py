"""Prompt passes as programs: they compute prompt tokens, and sample a token for each prompt that ends in them.

A *mixed* pass is a prompt pass in which running requests also decode one token each: a round without drafts that shares
the target's forward with the prompts.
"""

from __future__ import annotations

import torch

from unisono.attention.base import AttentionInputs
from unisono.attention.context import Rotary
from unisono.drafters.base import PromptPass, Verified
from unisono.graphs import Buffers, BufferSchema, Features, Field, Hidden, Logits, Program
from unisono.kernels.speculation.rounds import extend_inputs
from unisono.kv.specs import PAGE_SIZE
from unisono.models.blocks.embedding_overrides import Overriding
from unisono.passes.context import PassContext
from unisono.passes.features.base import Outputs
from unisono.passes.round import grow, page_fields
from unisono.passes.verify import catch_up, target_inputs


def prompt_program(features: Features) -> str:
    """Name of the program that serves a prompt pass with these features: passes with more logits have graphs of their
    own."""
    return "extend" if features.logits is Logits.LAST else "score"


def _prompt_fields(context: PassContext, max_rows: int) -> tuple[Field, ...]:
    """Input fields for the prompt ``tokens`` of a pass.

    ``sample_slots``: slot of each row whose prompt ends here, else the padding slot. ``last``: index of each row's last
    token. ``next_ids``: the token after each token, as far as known.
    """
    padding = context.slots.padding
    return (
        Field("token_ids", torch.int32, ("tokens",)),
        Field("next_ids", torch.int32, ("tokens",)),
        Field("slots", torch.int32, (max_rows,), pad=padding),
        Field("query_start", torch.int32, (max_rows + 1,)),
        Field("start", torch.int32, (max_rows,)),
        Field("sample_slots", torch.int32, (max_rows,), pad=padding),
        Field("last", torch.int32, (max_rows,)),
    )


def extend_program(context: PassContext, max_rows: int, name: str = "extend") -> Program:
    """Compute ``rows`` prompt tokens of at most ``max_rows`` requests; sample at the end of each prompt.

    name: a result of :func:`prompt_program`.
    """
    more = (field for feature in context.features for field in feature.fields("extend"))
    result = Field("result", torch.int32, (max_rows, 3), output=True)
    schema = BufferSchema((*_prompt_fields(context, max_rows), result, *more))

    def run(b: Buffers) -> None:
        inputs = _prompt_inputs(context, b)
        last_tokens = inputs.last_tokens(b.last)
        only = last_tokens if b.shape.rows > max_rows and _reads_last_tokens_only(context, b) else None
        replaced, rotary = _feature_inputs(context, b, inputs.positions)
        inputs.until = _seen_until(context, b, inputs.positions)
        rotary_positions = None if rotary is None else rotary.positions
        hidden, seen = context.forward(b, b.slots, b.token_ids, inputs, replaced, only, rotary_positions)
        last = hidden if only else last_tokens.select(hidden)
        drafts = torch.empty((max_rows, 0), dtype=torch.int32, device=b.device)
        sampled = context.sample(b, hidden, last, b.sample_slots, drafts, Outputs(b))
        b.result.copy_(context.commit(sampled, drafts, b.sample_slots))
        if context.width > 1:
            b.outputs_ready()  # the first token does not wait for the drafter
            seen = last if context.drafter.features.hidden is Hidden.LAST else seen
            _observe_prompts(context, b, inputs.positions, sampled, seen, replaced, rotary)

    return context.program(name, schema, run)


def mixed_program(context: PassContext, max_rows: int) -> Program:
    """Compute prompt tokens as :func:`extend_program` does, and one more token for each of ``decodes`` requests.

    The decoding requests' tokens and rows come first, and use the attention kernels of a round. Requests may use
    features that mix (``Feature.mixes``).
    """
    padding = context.slots.padding
    schema = BufferSchema(
        (
            *_prompt_fields(context, max_rows),
            Field("decode_slots", torch.int32, ("decodes",), pad=padding),
            *page_fields(context, "decodes"),
            Field("result", torch.int32, (("decodes", max_rows), 3), output=True),
            *(field for feature in context.features if feature.mixes for field in feature.fields("mixed")),
        )
    )

    def run(b: Buffers) -> None:
        decodes = b.decode_slots.shape[0]
        grow(context, b, b.decode_slots)
        drafts = torch.empty((decodes + max_rows, 0), dtype=torch.int32, device=b.device)
        token_ids, decoding = target_inputs(context.slots, b.decode_slots, b.decode_slots, drafts[:decodes])
        prompts = _prompt_inputs(context, b)
        inputs = AttentionInputs.joined(decoding, prompts)
        first = torch.arange(decodes, dtype=torch.int32, device=b.device)
        last_tokens = inputs.last_tokens(torch.cat((first, b.last + decodes)))
        only = last_tokens if b.token_ids.shape[0] > max_rows and _reads_last_tokens_only(context, b) else None
        hidden, seen = context.forward(b, inputs.slots, torch.cat((token_ids, b.token_ids)), inputs, (), only)
        last = hidden if only else last_tokens.select(hidden)
        rows = torch.cat((b.decode_slots, b.sample_slots))
        sampled = context.sample(b, hidden, last, rows, drafts, Outputs(b))
        b.result.copy_(context.commit(sampled, drafts, rows))
        if context.width > 1:
            b.outputs_ready()
            seen = last if context.drafter.features.hidden is Hidden.LAST else seen
            of_decodes, of_prompts = (None, None) if seen is None else (seen[:decodes], seen[decodes:])
            catch_up(context, Verified(b.decode_slots, b.result[:decodes], sampled[:decodes], of_decodes))
            _observe_prompts(context, b, prompts.positions, sampled[decodes:], of_prompts)

    return context.program("mixed", schema, run)


def _prompt_inputs(context: PassContext, b: Buffers) -> AttentionInputs:
    """Attention inputs of the prompt tokens."""
    table = context.slots.page_table
    placed = extend_inputs(b.slots, b.query_start, b.start, table, PAGE_SIZE, b.token_ids.shape[0])
    return AttentionInputs(b.slots, *placed, table, None, b.query_start)


def _observe_prompts(
    context: PassContext,
    b: Buffers,
    positions: torch.Tensor,
    sampled: torch.Tensor,
    seen: torch.Tensor | None,
    replaced: tuple[Overriding, ...] = (),
    rotary: Rotary | None = None,
) -> None:
    """Let the drafter catch up with the prompt tokens. sampled [E, 1]; seen: the hidden states read by the drafter."""
    next_ids = _with_sampled(b.next_ids, b.last, sampled[:, 0], b.sample_slots != context.slots.padding)
    context.drafter.observe_prompt(
        PromptPass(b.slots, b.query_start, b.start, b.token_ids, next_ids, positions, b.last, seen, replaced, rotary)
    )


def _feature_inputs(
    context: PassContext, b: Buffers, positions: torch.Tensor
) -> tuple[tuple[Overriding, ...], Rotary | None]:
    """Vectors that replace those of token ids, and rotary positions, as contributed by the features."""
    replaced = (feature.override_embeddings(b) for feature in context.features)
    rotary = (feature.rotary(b, positions) for feature in context.features)
    return tuple(g for g in replaced if g is not None), next((r for r in rotary if r is not None), None)


def _seen_until(context: PassContext, b: Buffers, positions: torch.Tensor) -> torch.Tensor | None:
    """Last position that each token sees in layers that attend both ways, as contributed by the features."""
    found = (feature.seen_until(b, positions) for feature in context.features)
    return next((until for until in found if until is not None), None)


def _reads_last_tokens_only(context: PassContext, b: Buffers) -> bool:
    """Return True if only the target output of each row's last token is read in a prompt pass."""
    features = context.drafter.features
    if features.hidden is Hidden.FULL or context.model.config.num_layers in features.aux_layers:
        return False
    fields = (f for feature in context.features if feature.reads_all_tokens for f in feature.fields("extend"))
    return all(b.find(field.name) is None for field in fields)


def _with_sampled(
    next_ids: torch.Tensor, last: torch.Tensor, sampled: torch.Tensor, samples: torch.Tensor
) -> torch.Tensor:
    """``next_ids [T]`` with ``sampled [E]`` at ``last [E]``, for rows with ``samples [E]``."""
    spare = next_ids.shape[0]  # rows that sample nothing write past the end
    padded = torch.cat((next_ids, next_ids[:1]))
    return padded.index_copy(0, last.masked_fill(~samples, spare).long(), sampled)[:spare]
