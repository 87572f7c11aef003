"""A causal convolution inside the blocks of a block drafter, by groups of channels, with coefficients of each token.

Owns the op ``block_conv``. One program computes one token, in fp32; its bits depend on the tokens of its own block
alone. Called by draft heads.

Shapes: T tokens, B tokens of a block, H channels, G groups of H / G channels, N taps.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from unisono.kernels.library import AotCase, op


@triton.jit
def _block_conv_kernel(
    x, deltas, base, out, stride, first, width, H: tl.constexpr, GROUP: tl.constexpr, TAPS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0)
    h = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = h < H
    total = tl.zeros([BLOCK], tl.float32)
    for tap in tl.static_range(TAPS):
        there = inside & (token % width >= tap)
        value = tl.load(x + (token - tap).to(tl.int64) * H + h, mask=there, other=0.0).to(tl.float32)
        delta = tl.load(deltas + token.to(tl.int64) * stride + first + tap * (H // GROUP) + h // GROUP, mask=inside)
        factor = tl.load(base + tap * H + h, mask=inside, other=0.0).to(tl.float32) + delta.to(tl.float32)
        total = tl.fma(factor, value, total)
    tl.store(out + token.to(tl.int64) * H + h, total.to(out.dtype.element_ty), mask=inside)


def launch_block_conv(
    x: torch.Tensor, deltas: torch.Tensor, base: torch.Tensor, width: int, group: int, first: int
) -> torch.Tensor:
    """Triton implementation of :func:`block_conv`."""
    x, out = x.contiguous(), torch.empty_like(x, memory_format=torch.contiguous_format)
    tokens, size = x.shape
    grid = tokens, triton.cdiv(size, BLOCK)
    _block_conv_kernel[grid](
        x, deltas, base, out, deltas.stride(0), first, width, H=size, GROUP=group, TAPS=base.shape[0], BLOCK=BLOCK
    )
    return out


BLOCK = 1024


@op(cuda=launch_block_conv)
def block_conv(
    x: torch.Tensor, deltas: torch.Tensor, base: torch.Tensor, width: int, group: int, first: int
) -> torch.Tensor:
    """Compute ``out[t, h] = Σ_n (base[n, h] + deltas[t, first + n · G + h // group]) · x[t - n, h]`` inside blocks.

    x [T, H]: rows t … of blocks of ``width`` tokens; terms from before a token's block are left out. deltas [T, ≥ first
    + N · G]; base [N, H] contiguous; all of one dtype. Sums are fp32, rounded once.
    """
    tokens, size = x.shape
    taps, groups = base.shape[0], size // group
    own = deltas[:, first : first + taps * groups].float().view(tokens, taps, groups)
    factors = base.float() + own.repeat_interleave(group, 2)
    at, total = torch.arange(tokens) % width, torch.zeros(tokens, size)
    for tap in range(taps):
        rows = torch.roll(x.float(), tap, 0).masked_fill((at < tap)[:, None], 0.0)
        total = total + factors[:, tap] * rows
    return total.to(x.dtype)


AOT: list[AotCase] = [
    AotCase(
        _block_conv_kernel,
        {
            **{name: "*bf16" for name in ("x", "deltas", "base", "out")},
            **{name: "i32" for name in ("stride", "first", "width")},
        },
        {"H": 4096, "GROUP": 16, "TAPS": 2, "BLOCK": BLOCK},
    )
]
