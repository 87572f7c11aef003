"""The mappings that ``LLM.generate`` takes as prompts, as types: vLLM's names. Each call makes a plain dict."""

from __future__ import annotations

from typing import Any, NotRequired, TypedDict


class TextPrompt(TypedDict):
    """``TextPrompt(prompt="…")``. embedding_overrides: embeddings in place of those of some tokens.
    cache_salt: the prefix cache shares the prompt only with prompts of the same one. multi_modal_data: pictures and
    videos; multi_modal_uuids: names of them; mm_processor_kwargs: settings for them.
    """

    prompt: str
    cache_salt: NotRequired[str]
    multi_modal_data: NotRequired[dict[str, Any]]
    multi_modal_uuids: NotRequired[dict[str, Any]]
    mm_processor_kwargs: NotRequired[dict[str, Any]]
    embedding_overrides: NotRequired[Any]


class TokensPrompt(TypedDict):
    """``TokensPrompt(prompt_token_ids=[…])``. prompt: the text that they spell, for the output to carry."""

    prompt_token_ids: list[int]
    prompt: NotRequired[str]
    cache_salt: NotRequired[str]
    multi_modal_data: NotRequired[dict[str, Any]]
    multi_modal_uuids: NotRequired[dict[str, Any]]
    mm_processor_kwargs: NotRequired[dict[str, Any]]
    embedding_overrides: NotRequired[Any]
