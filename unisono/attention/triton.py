"""The in-tree backend: the project's own paged-attention kernels (CPU twins where there is no GPU)."""

from __future__ import annotations

import torch

from unisono.attention.base import AttentionInputs
from unisono.kernels.attention import (
    attention_extend,
    attention_extend_plan,
    attention_plan,
    attention_round,
)

WORKSPACE_TOKENS = 2048
"""Tokens × KV splits that a round's workspace holds, at 4 · Hq · (D + 2) bytes each: 34 MB at 32 heads of 128."""

PROGRAMS_PER_PROCESSOR = 2
"""Attention programs that a multiprocessor runs at a time."""


class TritonAttention:
    """Exact attention: a token's bits are the same in every pass, batch, width and chunk.

    One instance serves all layers of a model whose head counts are equal.
    """

    name = "triton"

    def __init__(self, num_heads: int, num_kv_heads: int, device: torch.device | str) -> None:
        self.group = num_heads // num_kv_heads
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        device = torch.device(device)
        processors = 1
        if device.type == "cuda":
            processors = torch.cuda.get_device_properties(device).multi_processor_count
        self.processors = processors

    def plan(self, inputs: AttentionInputs) -> None:
        """Fill ``inputs.plan``: which program walks what. One launch, no host sync."""
        if inputs.width is not None:
            rows, max_pages = inputs.slots.shape[0], inputs.page_table.shape[1]
            programs = self.processors * PROGRAMS_PER_PROCESSOR
            partials = min(rows * max_pages, WORKSPACE_TOKENS // inputs.width)
            inputs.plan = attention_plan(
                inputs.slots, inputs.kv_len, inputs.width, self.num_kv_heads, partials, programs
            )
        elif inputs.query_start is not None:
            tokens = inputs.positions.shape[0]
            inputs.plan = attention_extend_plan(inputs.slots, inputs.query_start, tokens, self._tile_tokens(tokens))
        else:
            raise ValueError("AttentionInputs has neither width nor query_start; set one of them.")

    def _tile_tokens(self, tokens: int) -> int:
        """The largest query tile (16 … 128 rows) that still gives each multiprocessor one."""
        rows = 128
        while rows > 16 and tokens * self.num_heads < rows * self.processors:
            rows //= 2
        return max(rows // self.group, 1)

    def forward(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        inputs: AttentionInputs,
        scale: float,
        window: int,
    ) -> torch.Tensor:
        """See :class:`unisono.attention.base.AttentionBackend`."""
        attend = attention_extend if inputs.width is None else attention_round
        return attend(q, k_cache, v_cache, inputs.page_table, inputs.positions, inputs.plan, scale, window)
