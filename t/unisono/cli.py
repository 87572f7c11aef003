"""The command line: ``unisono serve | generate | chat | explain | bench``.

Flags carry vLLM's and SGLang's names. This file parses and prints; the work is done by ``llm``, ``server`` and
``tools``, imported inside the command that needs them so that ``unisono --help`` is quick.
"""

from __future__ import annotations

import enum
import json
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from unisono import __version__, catalog
from unisono.types import BadRequest, ConfigError, SamplingParams, UnisonoError

if TYPE_CHECKING:
    from unisono.llm import LLM

USAGE_ERROR = 2

app = typer.Typer(
    help="Unisono serves language models: speculative decoding and CUDA graphs, always together.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
out = Console()
err = Console(stderr=True)


class Dtype(str, enum.Enum):
    auto = "auto"
    bfloat16 = "bfloat16"
    float16 = "float16"
    half = "half"
    float32 = "float32"


class LoadFormat(str, enum.Enum):
    auto = "auto"
    dummy = "dummy"


PathArgument = Annotated[str, typer.Argument(metavar="[PATH]", help="A Hugging Face checkpoint directory, or a bundled name.")]
DtypeOption = Annotated[Dtype, typer.Option("--dtype", help="Of weights and KV cache.")]
MaxModelLen = Annotated[int | None, typer.Option("--max-model-len", min=2, help="Context: prompt and output tokens together.")]
MemoryUtilization = Annotated[
    float, typer.Option("--gpu-memory-utilization", min=0.01, max=1.0, help="Share of the GPU's memory to use.")
]
MaxNumSeqs = Annotated[int | None, typer.Option("--max-num-seqs", min=1, help="Requests that run at once.")]
MaxBatchedTokens = Annotated[
    int | None, typer.Option("--max-num-batched-tokens", min=16, help="Prompt tokens in one pass; longer prompts are chunked.")
]
LoadFormatOption = Annotated[LoadFormat, typer.Option("--load-format", help="dummy: random weights, needs config.json only.")]
EngineSeed = Annotated[int, typer.Option("--seed", min=0, help="Of dummy weights.")]
AttentionBackend = Annotated[str, typer.Option("--attention-backend", help=f"auto, {', '.join(catalog.attention.names)}.")]
EnforceEager = Annotated[bool, typer.Option("--enforce-eager", help="Capture no graphs (for debugging).")]


class EngineFlags(dict[str, Any]):
    """The engine's flags, by the names of ``unisono.config.EngineConfig``'s fields."""
