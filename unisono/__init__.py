"""Unisono: an LLM inference engine in which speculative decoding and CUDA graphs always compose."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from unisono.llm import LLM
    from unisono.types import RequestOutput, SamplingParams, StructuredOutputs

__version__ = "0.1.0"
__all__ = ["LLM", "RequestOutput", "SamplingParams", "StructuredOutputs", "__version__"]

_HOMES = {"LLM": "unisono.llm"} | dict.fromkeys(
    ("SamplingParams", "RequestOutput", "StructuredOutputs"), "unisono.types"
)


def __getattr__(name: str) -> Any:
    """Import on first use: ``import unisono`` stays quick, and the command line with it."""
    if name not in _HOMES:
        raise AttributeError(f"module 'unisono' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_HOMES[name]), name)
