"""Opens MTP modules for a decoder and runs one pass of a module."""

from __future__ import annotations

from pathlib import Path

import torch

from tests.models.harness import PAGE
from unisono.attention.base import AttentionBackend, AttentionInputs
from unisono.attention.context import ForwardContext
from unisono.config import catalog
from unisono.drafters.mtp.checkpoint import MTPCheckpoint
from unisono.drafters.mtp.model import MTPModule
from unisono.kv.specs import map_tree
from unisono.models.blocks.decoder import Decoder


def attention(heads: int, kv_heads: int) -> AttentionBackend:
    return catalog.attention.load("triton")(heads, kv_heads, "cpu")


def open_modules(path: Path, target: Decoder) -> tuple[MTPCheckpoint, list[MTPModule]]:
    checkpoint = MTPCheckpoint.open(path, target.config)
    return checkpoint, [checkpoint.load(target, i, attention, torch.float32) for i in range(checkpoint.depth)]


@torch.no_grad()
def run(module: MTPModule, tokens: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
    """One pass over all tokens, from position 0."""
    count = len(tokens)
    pages = -(-count // PAGE)
    positions = torch.arange(count, dtype=torch.int32)
    inputs = AttentionInputs(
        slots=torch.zeros(1, dtype=torch.int32),
        positions=positions,
        slot_mapping=PAGE + positions,
        kv_len=torch.tensor([count], dtype=torch.int32),
        page_table=torch.arange(1, pages + 1, dtype=torch.int32)[None],
        width=None,
        query_start=torch.tensor([0, count], dtype=torch.int32),
    )
    state = map_tree(module.state_specs(), lambda spec: torch.zeros(pages + 1, *spec.shape))
    return module(tokens, hidden, ForwardContext.of(inputs), state)
