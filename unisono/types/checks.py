"""Checks of a prepared request against the model's sizes.

This is the only copy of each check.

``frontend`` checks every request before it submits it. The engine checks every request that it receives.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from unisono.types.engine_request import EngineRequest
from unisono.types.errors import BadRequest, FieldPath
from unisono.types.limits import (
    MAX_BAD_WORD_TOKENS,
    MAX_BAD_WORDS,
    MAX_COPIED_BYTES,
    MAX_REPEATED_IDS,
    MAX_STOP_IDS,
    weight,
)
from unisono.types.sampling_params import SamplingParams


def check_request(
    request: EngineRequest, max_model_len: int, vocab_size: int, hidden_size: int, param: str = "prompt"
) -> None:
    """Raise BadRequest with the value and the limit for a request that a model of these sizes cannot run.

    param: the name of the prompt's field in errors.
    """
    prompt, params, overrides = request.prompt_token_ids, request.params, request.overrides
    if not prompt:
        raise BadRequest(f"{param} has no tokens; give at least 1.", param)
    if request.prompt_only and len(prompt) > max_model_len:
        raise BadRequest(
            f"the prompt has {len(prompt)} tokens; the model's context is {max_model_len} tokens. Shorten it, or raise "
            "--max-model-len.",
            param,
            "context_length_exceeded",
        )
    if len(prompt) >= max_model_len and not request.prompt_only:
        raise BadRequest(
            f"the prompt has {len(prompt)} tokens; the context of {max_model_len} leaves room for {max_model_len - 1} "
            "and one new token. Shorten it, or raise --max-model-len.",
            param,
            "context_length_exceeded",
        )
    if overrides is not None and overrides.vectors.size != hidden_size:
        raise BadRequest(
            f"the embeddings have {overrides.vectors.size} numbers each; the model's hidden size is {hidden_size}.",
            "prompt_embeds" if len(overrides.positions) == len(prompt) else "embedding_overrides",
        )
    embedded = set() if overrides is None else set(overrides.positions)
    _check_token_ids(prompt, vocab_size, param, embedded)
    _check_token_ids(params.stop_token_ids, vocab_size, "stop_token_ids")
    _check_token_ids(tuple(params.logit_bias), vocab_size, "logit_bias")
    _check_token_ids(params.allowed_token_ids or (), vocab_size, "allowed_token_ids")
    _check_token_ids(params.logprob_token_ids or (), vocab_size, "logprob_token_ids")
    _check_token_ids([token for word in request.bad_words for token in word], vocab_size, "bad_words")
    _check_bad_words(request.bad_words)
    if len(request.stop_ids) > MAX_STOP_IDS:
        raise BadRequest(
            f"the request has {len(request.stop_ids)} stop token ids, EOS ids included; at most {MAX_STOP_IDS} are "
            "supported. Give fewer stop_token_ids.",
            "stop_token_ids",
        )
    if params.prompt_logprobs is not None:
        _check_prompt_logprobs(request, embedded)


def check_repeated(params: SamplingParams, sequences: int) -> None:
    """Raise BadRequest for parameters that are too large for so many sequences, each of which has a copy."""
    allowed = len(params.allowed_token_ids or ())
    if allowed * sequences > MAX_REPEATED_IDS:
        raise BadRequest(
            f"allowed_token_ids has {allowed} ids, and the request {sequences} sequences, each with the list; at most "
            f"{MAX_REPEATED_IDS} ids are taken together. Send fewer sequences at a time, or use logit_bias.",
            "allowed_token_ids",
        )
    check_copied((sequences - 1) * _parameter_bytes(params), sequences)


def copied_bytes(request: EngineRequest) -> int:
    """Bytes that the sequences of a request after its first one repeat."""
    overrides = 0 if request.overrides is None else len(request.overrides.vectors.data)
    pixels = sum(len(item.pixels.data) for item in request.media)
    own = 8 * len(request.prompt_token_ids) + overrides + pixels + _parameter_bytes(request.params)
    return (request.params.n - 1) * own


def check_copied(total: int, sequences: int) -> None:
    """Raise BadRequest for more repeated bytes than MAX_COPIED_BYTES. sequences: of the request."""
    if total > MAX_COPIED_BYTES:
        raise BadRequest(
            f"n: {sequences} sequences repeat {total >> 20} MiB of prompts, images, embeddings and parameters; at most "
            f"{MAX_COPIED_BYTES >> 20} MiB are taken. Send fewer sequences at a time.",
            "n",
        )


def _parameter_bytes(params: SamplingParams) -> int:
    """Bytes of a request's largest parameters."""
    form = params.structured_outputs
    grammar = None if form is None else getattr(form, form.kind)
    return 8 * len(params.allowed_token_ids or ()) + weight((grammar, params.extra_args), MAX_COPIED_BYTES)


def _check_token_ids(token_ids: Sequence[int], vocab_size: int, param: str, embedded: Collection[int] = ()) -> None:
    """Raise BadRequest for an id outside the vocabulary. embedded: positions without a token."""
    if not token_ids or (min(token_ids) >= 0 and max(token_ids) < vocab_size):
        return
    wrong = next((t for i, t in enumerate(token_ids) if not 0 <= t < vocab_size and i not in embedded), None)
    if wrong is not None:
        raise BadRequest(f"{param} has token id {wrong}; the vocabulary's ids are 0 to {vocab_size - 1}.", param)


def _check_bad_words(bad_words: Sequence[Sequence[int]]) -> None:
    if len(bad_words) > MAX_BAD_WORDS:
        raise BadRequest(
            f"bad_words make {len(bad_words)} token sequences; at most {MAX_BAD_WORDS} are supported.", "bad_words"
        )
    wrong = next((len(word) for word in bad_words if not 1 <= len(word) <= MAX_BAD_WORD_TOKENS), None)
    if wrong is not None:
        raise BadRequest(f"one of bad_words has {wrong} tokens; 1 to {MAX_BAD_WORD_TOKENS} are supported.", "bad_words")


def _check_prompt_logprobs(request: EngineRequest, embedded: Collection[int]) -> None:
    """Raise BadRequest if the log-probability of an embedded position is requested: it has no token."""
    first, name = request.first_scored, FieldPath("prompt_logprobs")
    wrong = next((p for p in range(first, len(request.prompt_token_ids)) if p in embedded), None)
    if wrong is not None:
        raise BadRequest(
            (
                name,
                f" start at position {first}, but position {wrong} is an embedding, which has none. Set "
                f"logprob_start_len to {max(embedded) + 1} or more, or leave out ",
                name,
                ".",
            ),
            name,
        )
