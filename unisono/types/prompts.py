"""Types of the mappings that ``LLM.generate`` takes as prompts, with vLLM's names. Each call makes a plain dict."""

from __future__ import annotations

from typing import Any, NotRequired, TypedDict


class TextPrompt(TypedDict):
    """``TextPrompt(prompt="…")``.

    embedding_overrides: embeddings in place of those of some tokens. cache_salt: share cached prefixes only with
    prompts of the same salt. multi_modal_data: images and videos; multi_modal_uuids: their names; mm_processor_kwargs:
    their preprocessing settings.
    """

    prompt: str
    cache_salt: NotRequired[str]
    multi_modal_data: NotRequired[dict[str, Any]]
    multi_modal_uuids: NotRequired[dict[str, Any]]
    mm_processor_kwargs: NotRequired[dict[str, Any]]
    embedding_overrides: NotRequired[Any]


class TokensPrompt(TypedDict):
    """``TokensPrompt(prompt_token_ids=[…])``. prompt: the text of these tokens, copied to the output."""

    prompt_token_ids: list[int]
    prompt: NotRequired[str]
    cache_salt: NotRequired[str]
    multi_modal_data: NotRequired[dict[str, Any]]
    multi_modal_uuids: NotRequired[dict[str, Any]]
    mm_processor_kwargs: NotRequired[dict[str, Any]]
    embedding_overrides: NotRequired[Any]
