"""The in-tree backend: the project's own paged-attention kernel (its CPU twin where there is no GPU)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from unisono.attention.base import KV, AttentionInputs, AttentionOptions
from unisono.kernels.attention import hopper as attention_hopper
from unisono.kernels.attention import hopper_rounds as attention_hopper_rounds
from unisono.kernels.attention.paged import attention, attention_fp8, attention_plan, quantises

WORKSPACE_TOKENS = 4096
"""Tokens × KV splits that the workspace holds, at 4 · Hq · (D + 2) bytes each: 68 MB at 32 heads of 128."""

PROGRAMS_PER_PROCESSOR = 2
"""Attention programs that a multiprocessor runs at a time."""


class TritonAttention:
    """Exact attention: a token's bits are the same in every pass, batch, width and chunk.

    One instance serves all layers of a model, whose head counts are equal.
    """

    name = "triton"
    capturable = True

    def __init__(self, num_heads: int, num_kv_heads: int, device: torch.device | str) -> None:
        self.num_heads, self.num_kv_heads = num_heads, num_kv_heads
        self.device = torch.empty(0, device=device).device  # with its index
        self.processors = 1
        if self.device.type == "cuda":
            self.processors = torch.cuda.get_device_properties(self.device).multi_processor_count

    def rehearse(self, head_dim: int, dtype: torch.dtype) -> None:
        """See :class:`unisono.attention.base.ProvingAttention`."""
        heads = self.num_heads, self.num_kv_heads, head_dim, dtype, self.device
        attention_hopper.rehearse(self._attend, *heads)
        attention_hopper_rounds.rehearse(self._attend_round, *heads)

    def prove(self, head_dim: int, dtype: torch.dtype) -> dict[str, tuple[str, str]]:
        """See :class:`unisono.attention.base.ProvingAttention`."""
        heads = self.num_heads, self.num_kv_heads, head_dim, dtype, self.device
        return {
            "attention of long prompts": _settled(
                attention_hopper.suits(*heads),
                lambda: attention_hopper.prove(self._attend, *heads),
                "the kernels for Hopper have 16-bit heads of 128 and 256 only",
            ),
            "attention of rounds": _settled(
                attention_hopper_rounds.suits(*heads),
                lambda: attention_hopper_rounds.prove(self._attend_round, *heads),
                "the kernel for Hopper has 16-bit heads of 128 only; UNISONO_HOPPER_ROUNDS=0 turns it off",
            ),
        }

    def _attend(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        page_table: torch.Tensor,
        kv_len: torch.Tensor,
        query_start: torch.Tensor | None,
        positions: torch.Tensor,
        width: int | None = None,
    ) -> torch.Tensor:
        """One extend pass, or a round of this width, as the engine would run it."""
        rows = torch.arange(len(kv_len), dtype=torch.int32, device=q.device)
        inputs = AttentionInputs(rows, positions, positions, kv_len, page_table, width, query_start)
        self.plan(inputs)
        return self.forward(q, KV(k_cache, v_cache), inputs, AttentionOptions(q.shape[2] ** -0.5))

    def _attend_round(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, page_table: torch.Tensor, kv_len: torch.Tensor,
        width: int,
    ) -> torch.Tensor:  # fmt: skip
        positions = (kv_len[:, None] - width + torch.arange(width, device=q.device)).flatten().int()
        return self._attend(q, k, v, page_table, kv_len, None, positions, width)

    def plan(self, inputs: AttentionInputs, window: int = 0) -> None:
        """Fill ``inputs.plan``: which program walks what. One launch, no host sync."""
        if (inputs.width is None) == (inputs.query_start is None):
            raise ValueError(f"Set width or query_start, not both: got {inputs.width} and {inputs.query_start}.")
        tokens = inputs.positions.shape[0]
        tile_tokens = inputs.width or self._tile_tokens(tokens)
        partials = min(tokens * inputs.page_table.shape[1], WORKSPACE_TOKENS) // tile_tokens
        if inputs.width is None and tokens * self.num_heads >= 64 * self.processors:
            partials = 0  # tiles enough for all processors
        inputs.plan = attention_plan(
            inputs.slots,
            inputs.kv_len,
            inputs.query_start,
            tokens,
            tile_tokens,
            self.num_kv_heads,
            partials,
            self.processors * PROGRAMS_PER_PROCESSOR,
            window,
        )

    def _tile_tokens(self, tokens: int) -> int:
        """The largest query tile (16 … 128 rows) that still gives each multiprocessor one."""
        rows = 128
        while rows > 16 and tokens * self.num_heads < rows * self.processors:
            rows //= 2
        return max(rows * self.num_kv_heads // self.num_heads, 1)

    def forward(self, q: torch.Tensor, kv: KV, inputs: AttentionInputs, options: AttentionOptions) -> torch.Tensor:
        """See :class:`unisono.attention.base.AttentionBackend`."""
        return attention(q, *_given(kv, inputs, options))

    def quantises(self, head_dim: int, group: int) -> bool:
        """See :class:`unisono.attention.base.QuantisingAttention`."""
        return quantises(head_dim, group)

    def forward_fp8(
        self, q: torch.Tensor, kv: KV, inputs: AttentionInputs, options: AttentionOptions
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See :class:`unisono.attention.base.QuantisingAttention`."""
        return attention_fp8(q, *_given(kv, inputs, options))


def _settled(suits: bool, proves: Callable[[], bool], otherwise: str) -> tuple[str, str]:
    """Which kernel serves, and why; otherwise: why none for Hopper can."""
    if not suits:
        return "as all attention", otherwise
    if proves():
        return "the kernel for Hopper", "its bits are those of all attention, compared here"
    return "as all attention", "the bits of the kernel for Hopper differ here"


def _given(kv: KV, inputs: AttentionInputs, o: AttentionOptions) -> tuple[Any, ...]:
    """What the ops take beside the queries."""
    where = kv.k, kv.v, inputs.page_table, inputs.positions, inputs.plan
    return *where, o.scale, o.window, o.first, o.soft_cap, o.sinks, kv.k_scales, kv.v_scales
