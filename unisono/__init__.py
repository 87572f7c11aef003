"""Unisono: an LLM inference engine in which speculative decoding and CUDA graphs always compose.

docs/design/architecture.md has the table of rooms and the way of a request.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from unisono.entrypoints.async_llm import AsyncEngineArgs, AsyncLLM, AsyncLLMEngine
    from unisono.entrypoints.llm import LLM
    from unisono.frontend.beam_search import BeamSearchParams
    from unisono.types import (
        CompletionOutput,
        RequestOutput,
        RequestOutputKind,
        SamplingParams,
        StructuredOutputs,
        StructuredOutputsParams,
    )
    from unisono.types.lora import LoRARequest
    from unisono.types.prompts import TextPrompt, TokensPrompt

__version__ = "0.2.0"
__all__ = [
    "LLM",
    "AsyncEngineArgs",
    "AsyncLLM",
    "AsyncLLMEngine",
    "BeamSearchParams",
    "CompletionOutput",
    "LoRARequest",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
    "StructuredOutputs",
    "StructuredOutputsParams",
    "TextPrompt",
    "TokensPrompt",
    "__version__",
]

_HOMES = {
    "LLM": "unisono.entrypoints.llm",
    "LoRARequest": "unisono.types.lora",
    "BeamSearchParams": "unisono.frontend.beam_search",
    "AsyncLLM": "unisono.entrypoints.async_llm",
    "AsyncLLMEngine": "unisono.entrypoints.async_llm",
    "AsyncEngineArgs": "unisono.entrypoints.async_llm",
    "TextPrompt": "unisono.types.prompts",
    "TokensPrompt": "unisono.types.prompts",
    "CompletionOutput": "unisono.types",
    "RequestOutput": "unisono.types",
    "RequestOutputKind": "unisono.types",
    "SamplingParams": "unisono.types",
    "StructuredOutputs": "unisono.types",
    "StructuredOutputsParams": "unisono.types",
}


def __dir__() -> list[str]:
    """The public names, those that are imported on first use included."""
    return sorted({*globals(), *__all__} - {"Any", "TYPE_CHECKING", "annotations"})


def __getattr__(name: str) -> Any:
    """Import on first use: ``import unisono`` stays quick, and the command line with it."""
    if name not in _HOMES:
        raise AttributeError(f"module 'unisono' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_HOMES[name]), name)
