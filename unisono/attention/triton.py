"""The in-tree backend: the project's own paged-attention kernel (its CPU twin where there is no GPU)."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from unisono.attention.base import KV, AttentionInputs, AttentionOptions
from unisono.kernels.attention import hopper as attention_hopper
from unisono.kernels.attention import hopper_latent
from unisono.kernels.attention import hopper_rounds as attention_hopper_rounds
from unisono.kernels.attention.latent import latent_attention
from unisono.kernels.attention.paged import attention, attention_fp8, attention_plan, quantises
from unisono.kernels.proofs import ExactKernel

WORKSPACE_TOKENS = 4096
"""Capacity of the workspace, in tokens × KV splits of 4 · Hq · (D + 2) bytes: 68 MB at 32 heads of 128."""

PROGRAMS_PER_PROCESSOR = 2
"""Attention programs per multiprocessor at a time; for wide heads there is one."""


class TritonAttention:
    """Exact attention: a token's bits are the same in every pass, batch, width and chunk.

    One instance serves all layers of a model, whose head counts are equal.
    """

    name = "triton"
    capturable = True

    def __init__(self, num_heads: int, num_kv_heads: int, device: torch.device | str) -> None:
        self.num_heads, self.num_kv_heads = num_heads, num_kv_heads
        self.device = torch.empty(0, device=device).device  # with its index
        self.programs_per_processor = PROGRAMS_PER_PROCESSOR
        self.processors = 1
        if self.device.type == "cuda":
            self.processors = torch.cuda.get_device_properties(self.device).multi_processor_count

    def rehearse(self, head_dim: int, dtype: torch.dtype) -> None:
        """See :class:`unisono.attention.base.ProvingAttention`."""
        heads = self.num_heads, self.num_kv_heads, head_dim, dtype, self.device
        self._plan_for(*heads)
        attention_hopper.exact_prompt_attention.rehearse(self._attend, *heads)
        attention_hopper_rounds.exact_round_attention.rehearse(self._attend_round, *heads)
        hopper_latent.exact_latent_attention.rehearse(self._attend_latent, *heads)
        hopper_latent.exact_latent_rounds.rehearse(self._attend_latent_round, *heads)

    def prove(self, head_dim: int, dtype: torch.dtype) -> dict[str, tuple[str, str]]:
        """See :class:`unisono.attention.base.ProvingAttention`."""
        heads = self.num_heads, self.num_kv_heads, head_dim, dtype, self.device
        self._plan_for(*heads)
        if head_dim == hopper_latent.WIDTH:
            return self._prove_latent(*heads)
        return {
            "attention of long prompts": _choose_kernel(
                attention_hopper.suits(*heads),
                lambda: attention_hopper.exact_prompt_attention.prove(self._attend, *heads),
                "the kernels for Hopper have 16-bit heads of 128 and 256 only",
            ),
            "attention of rounds": _choose_kernel(
                attention_hopper_rounds.suits(*heads),
                lambda: attention_hopper_rounds.exact_round_attention.prove(self._attend_round, *heads),
                "the kernels for Hopper have 16-bit heads of 128, 256 and 512 only",
            ),
        }

    def _prove_latent(self, *heads: Any) -> dict[str, tuple[str, str]]:
        kinds: dict[str, tuple[ExactKernel[Any], Callable[..., torch.Tensor]]] = {
            "attention of long prompts": (hopper_latent.exact_latent_attention, self._attend_latent),
            "attention of rounds": (hopper_latent.exact_latent_rounds, self._attend_latent_round),
        }
        suits, otherwise = hopper_latent.suits(*heads), "the kernels for Hopper read 16-bit rows only"
        return {
            kind: _choose_kernel(suits, functools.partial(exact.prove, attend, *heads), otherwise)
            for kind, (exact, attend) in kinds.items()
        }

    def _plan_for(self, heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device) -> None:
        """Plan for the kernel for Hopper: the keys of wide heads leave room for one program on a multiprocessor."""
        wide = head_dim in attention_hopper_rounds.WIDE_ROWS
        if wide and attention_hopper_rounds.suits(heads, kv_heads, head_dim, dtype, device):
            self.programs_per_processor = 1

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
        window: int = 0,
    ) -> torch.Tensor:
        """Run one extend pass, or a round of this width, as the engine does."""
        rows = torch.arange(len(kv_len), dtype=torch.int32, device=q.device)
        inputs = AttentionInputs(rows, positions, positions, kv_len, page_table, width, query_start)
        self.plan(inputs, window)
        return self.forward(q, KV(k_cache, v_cache), inputs, AttentionOptions(q.shape[2] ** -0.5, window))

    def _attend_latent(
        self, q: torch.Tensor, cache: torch.Tensor, page_table: torch.Tensor, kv_len: torch.Tensor,
        query_start: torch.Tensor | None, positions: torch.Tensor, width: int | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """Run one extend pass over latents, or a round of this width, as the engine does."""
        rows = torch.arange(len(kv_len), dtype=torch.int32, device=q.device)
        inputs = AttentionInputs(rows, positions, positions, kv_len, page_table, width, query_start)
        self.plan(inputs)
        options = AttentionOptions(q.shape[2] ** -0.5, values=hopper_latent.LATENT)
        return self.forward(q, KV(cache, cache), inputs, options)

    def _attend_latent_round(
        self, q: torch.Tensor, cache: torch.Tensor, page_table: torch.Tensor, kv_len: torch.Tensor, width: int
    ) -> torch.Tensor:
        positions = (kv_len[:, None] - width + torch.arange(width, device=q.device)).flatten().int()
        return self._attend_latent(q, cache, page_table, kv_len, None, positions, width)

    def _attend_round(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, page_table: torch.Tensor, kv_len: torch.Tensor,
        width: int, window: int = 0,
    ) -> torch.Tensor:  # fmt: skip
        positions = (kv_len[:, None] - width + torch.arange(width, device=q.device)).flatten().int()
        return self._attend(q, k, v, page_table, kv_len, None, positions, width, window)

    def plan(self, inputs: AttentionInputs, window: int = 0) -> None:
        """Fill ``inputs.plan`` with the work list. One launch, no host sync."""
        if (inputs.width is None) == (inputs.query_start is None):
            raise ValueError(f"Set width or query_start, not both: got {inputs.width} and {inputs.query_start}.")
        for name in ("slots", "positions", "slot_mapping", "kv_len", "until"):
            if (values := getattr(inputs, name)) is not None and not values.is_contiguous():
                raise ValueError(f"{name} has stride {values.stride()}: kernels read contiguous tensors.")
        tokens = inputs.positions.shape[0]
        tile_tokens = inputs.width or inputs.widest or self._tile_tokens(tokens)
        partials = min(tokens * inputs.page_table.shape[1], WORKSPACE_TOKENS) // tile_tokens
        if inputs.width is None and not inputs.widest and tokens * self.num_heads >= 64 * self.processors:
            partials = 0  # tiles enough for all processors
        inputs.plan = attention_plan(
            inputs.slots,
            inputs.kv_len,
            inputs.query_start,
            tokens,
            tile_tokens,
            self.num_kv_heads,
            partials,
            self.processors * self.programs_per_processor,
            window,
        )

    def _tile_tokens(self, tokens: int) -> int:
        """Choose the largest query tile (16 … 128 rows) that still gives each multiprocessor one."""
        rows = 128
        while rows > 16 and tokens * self.num_heads < rows * self.processors:
            rows //= 2
        return max(rows * self.num_kv_heads // self.num_heads, 1)

    def forward(self, q: torch.Tensor, kv: KV, inputs: AttentionInputs, options: AttentionOptions) -> torch.Tensor:
        """See :class:`unisono.attention.base.AttentionBackend`."""
        if options.values:
            where = kv.k, inputs.page_table, inputs.positions, inputs.plan
            e4m3 = (None, None) if kv.k_scales is None else (kv.v, kv.k_scales)
            return latent_attention(q, *where, options.scale, options.values, options.first, *e4m3)
        return attention(q, *_arguments(kv, inputs, options))

    def quantises(self, head_dim: int, group: int) -> bool:
        """See :class:`unisono.attention.base.QuantisingAttention`."""
        return quantises(head_dim, group)

    def forward_fp8(
        self, q: torch.Tensor, kv: KV, inputs: AttentionInputs, options: AttentionOptions
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See :class:`unisono.attention.base.QuantisingAttention`."""
        return attention_fp8(q, *_arguments(kv, inputs, options))


def _choose_kernel(suits: bool, proves: Callable[[], bool], otherwise: str) -> tuple[str, str]:
    """Choose a kernel: (kernel, reason). otherwise: the reason if no kernel for Hopper applies."""
    if not suits:
        return "triton", otherwise
    if proves():
        return "gluon-sm90", "its bits are those of the Triton kernel, compared on this GPU"
    return "triton", "the bits of the kernel for Hopper differ on this GPU"


def _arguments(kv: KV, inputs: AttentionInputs, o: AttentionOptions) -> tuple[Any, ...]:
    """Arguments of the ops after the queries."""
    where = kv.k, kv.v, inputs.page_table, inputs.positions, inputs.plan
    until = inputs.until if o.both_ways else None
    return *where, o.scale, o.window, o.first, o.soft_cap, o.sinks, kv.k_scales, kv.v_scales, until
