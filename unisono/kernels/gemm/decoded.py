"""Products of decoded weights: the shared part of ``int4.py``, ``int8_weights.py`` and ``nvfp4.py``.

Up to FEW_ROWS rows a kernel decodes the weight in registers, at :func:`decoding_tile`, or on Hopper that of
``packed_gluon.py``, if :class:`FewRowsProduct` found the same bits on the present GPU. Above, the weight is decoded
into a buffer for the plain product, if :class:`DecodedProduct` found them.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch
import triton
import triton.language as tl

from unisono.kernels.gemm.linear import exact_blas, launch_linear
from unisono.kernels.gemm.tile import Tile
from unisono.kernels.library import AotCase
from unisono.kernels.overlap import overlapped
from unisono.kernels.proofs import ExactKernel

FEW_ROWS = 64
"""Maximum rows for which weights are decoded in registers."""

PROOF_ROWS = (1, 16, 17, 33, 64)
"""Numbers of rows at which the product of packed weights is compared with the plain one of decoded weights."""

DECODING_TILES = {16: Tile(16, 64, 0, 4, 4), 32: Tile(32, 64, 0, 4, 3), 64: Tile(64, 64, 0, 4, 3)}
"""Tiles by their largest number of rows."""


def decoding_tile(rows: int, dtype: torch.dtype, large: Tile) -> Tile:
    """The tile of a kernel that decodes in registers. large: for more rows than DECODING_TILES have."""
    if dtype is torch.float32:
        return Tile(16, 32, 0, 4, 2)
    return next((tile for most, tile in DECODING_TILES.items() if rows <= most), large)


def integer_steps(group: int) -> tuple[int, int]:
    """(inputs of a step, which share a scale; steps per iteration) of :func:`integer_product`."""
    width = 128 if group % 128 == 0 else 64 if group % 64 == 0 else 32
    return width, 256 // width


@triton.jit
def integers_decoded(stored, zero, scale, EACH: tl.constexpr, BLOCK_N: tl.constexpr, WIDTH: tl.constexpr):
    """Decode bytes [BLOCK_N, WIDTH / EACH] with zeros and scales [BLOCK_N] to ``(q - zero) * scale``, fp32.

    A number in the mantissa of 2 ** 23 is added to it, one in bits 4 to 7 of the mantissa of 2 ** 19 too. That takes
    one operation for each number, while a conversion runs at an eighth of the rate. The difference is exact.
    """
    byte = stored.to(tl.int32)
    if EACH == 2:
        low = ((byte & 0x0F) | 0x4B000000).to(tl.float32, bitcast=True) - (8388608.0 + zero)[:, None]
        high = ((byte & 0xF0) | 0x49000000).to(tl.float32, bitcast=True) - (524288.0 + zero)[:, None]
        values = tl.reshape(tl.join(low, high), (BLOCK_N, WIDTH))
    else:
        values = (byte | 0x4B000000).to(tl.float32, bitcast=True) - (8388608.0 + zero)[:, None]
    return values * scale[:, None]


@triton.jit
def _zero_and_scale(z_ptrs, s_ptrs, start, group, last, HAS_ZEROS: tl.constexpr, middle: tl.constexpr):
    """Load the zeros and scales of the group of input ``start``; beyond the last group those of the last."""
    at = tl.minimum(start // group, last)
    scale = tl.load(s_ptrs + at)
    zero = tl.load(z_ptrs + at).to(tl.float32) if HAS_ZEROS else tl.full(scale.shape, middle, tl.float32)
    return zero, scale


@triton.jit
def integer_product(x_ptrs, x_ok, w_ptrs, s_ptrs, z_ptrs, K, group,
                    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, WIDTH: tl.constexpr, STEPS: tl.constexpr,
                    EVEN_K: tl.constexpr, HAS_ZEROS: tl.constexpr, EACH: tl.constexpr):  # fmt: skip
    """Compute the product over K of x and a weight of integers, decoded in registers: fp32 [rows, outputs].

    EACH: numbers in a byte of the weight: 2 of 4 bits, the first in the low bits, or 1 of 8 bits.
    x_ptrs [BLOCK_M, WIDTH], w_ptrs [BLOCK_N, WIDTH / EACH]: the first step's; rows of x that are not ``x_ok`` count as
    0. s_ptrs, z_ptrs [BLOCK_N]: of the first group, followed by the next ones; without zeros, the middle is subtracted.
    The compiler does not load bytes ahead of their step, so zeros and scales are loaded one step ahead here.
    """
    middle: tl.constexpr = 8.0 if EACH == 2 else 128.0
    ks, bytes_ = tl.arange(0, WIDTH), tl.arange(0, WIDTH // EACH)
    last = tl.cdiv(K, group) - 1
    acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    zero, scale = _zero_and_scale(z_ptrs, s_ptrs, 0, group, last, HAS_ZEROS, middle)
    for first in range(0, K, WIDTH * STEPS):
        for j in tl.static_range(STEPS):
            start = first + j * WIDTH
            if EVEN_K:
                x_tile = tl.load(x_ptrs + start, mask=x_ok[:, None], other=0.0)
                stored = tl.load(w_ptrs + start // EACH)
            else:
                x_tile = tl.load(x_ptrs + start, mask=x_ok[:, None] & (ks < K - start)[None, :], other=0.0)
                stored = tl.load(w_ptrs + start // EACH, mask=(bytes_ < (K - start) // EACH)[None, :], other=0)
            next_zero, next_scale = _zero_and_scale(z_ptrs, s_ptrs, start + WIDTH, group, last, HAS_ZEROS, middle)
            w_tile = integers_decoded(stored, zero, scale, EACH, BLOCK_N, WIDTH).to(x_tile.dtype)
            acc = tl.dot(w_tile, tl.trans(x_tile), acc, input_precision="ieee")
            zero, scale = next_zero, next_scale
    return tl.trans(acc)


def launch_integer_linear(
    kernel: Any, x: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None, group: int,
    bias: torch.Tensor | None, residual: torch.Tensor | None, tile: Tile,
) -> torch.Tensor:  # fmt: skip
    """Launch a kernel of :func:`integer_product` for x [M, K] and a weight of N outputs: [M, N]."""
    x = x.contiguous()
    residual = None if residual is None else residual.contiguous()
    (rows, k), n, (width, steps) = x.shape, weight.shape[0], integer_steps(group)
    out = x.new_empty(rows, n)
    kernel[(triton.cdiv(rows, tile.m), triton.cdiv(n, tile.n))](
        x, weight, scales, zeros, bias, residual, out, rows, n, k, group,
        BLOCK_M=tile.m, BLOCK_N=tile.n, WIDTH=width, STEPS=steps, EVEN_K=k % (width * steps) == 0,
        HAS_ZEROS=zeros is not None, HAS_BIAS=bias is not None, HAS_RESIDUAL=residual is not None,
        num_warps=tile.warps, num_stages=tile.stages, **overlapped(x.device),
    )  # fmt: skip
    return out


def integer_case(
    kernel: Any, dtype: str, zero_dtype: str, tile: Tile, group: int, zeros: bool, even_k: bool, bias: bool
) -> AotCase:
    """AotCase of :func:`launch_integer_linear`. dtype, zero_dtype: of activations and of zeros, by Triton's names."""
    width, steps = integer_steps(group)
    tensors = {name: f"*{dtype}" for name in ("x", "bias", "residual", "out")}
    packed = {"weight": "*u8", "scales": "*fp32", "zeros": f"*{zero_dtype}"}
    return AotCase(
        kernel,
        {**tensors, **packed, **dict.fromkeys(("M", "N", "K", "group"), "i32")},
        {
            "BLOCK_M": tile.m, "BLOCK_N": tile.n, "WIDTH": width, "STEPS": steps, "EVEN_K": even_k,
            "HAS_ZEROS": zeros, "HAS_BIAS": bias, "HAS_RESIDUAL": True, "OVERLAP": True,
        },
        num_warps=tile.warps,
        num_stages=tile.stages,
    )  # fmt: skip


def decoding_cases(kernel: Any, zero_dtype: str, inputs: int) -> list[AotCase]:
    """AotCases of a kernel that decodes ``inputs`` inputs of one output per program, without and with zeros."""
    types = {"weight": "*u8", "scales": "*fp32", "zeros": f"*{zero_dtype}", "out": "*bf16", "K": "i32", "group": "i32"}
    return [AotCase(kernel, types, {"WIDTH": inputs, "HAS_ZEROS": zeros, "OVERLAP": True}) for zeros in (False, True)]


class DecodedProduct(ExactKernel[...]):
    """The plain product of a decoded weight, above FEW_ROWS rows.

    Arguments of a comparison: the operands of one weight, and last the dtype of activations.
    decode(*operands, dtype): the weight [N, K]. packed(x, *operands, None, None): the product that decodes in
    registers, without bias and residual. keys: as in ``ExactKernel``.
    """

    def __init__(
        self,
        name: str,
        keys: Callable[..., tuple[Hashable, ...]],
        decode: Callable[..., torch.Tensor],
        packed: Callable[..., torch.Tensor],
    ) -> None:
        super().__init__(name, keys, self._same_bits)
        self._decode, self._packed = decode, packed

    def _same_bits(self, *args: Any) -> bool:
        """Compare the products of the packed and the decoded weight with random inputs of each number of rows."""
        *operands, dtype = args
        plain = self._decode(*args)
        for rows in PROOF_ROWS:
            generator = torch.Generator(plain.device).manual_seed(rows)
            x = torch.randn(rows, plain.shape[1], device=plain.device, generator=generator).to(dtype)
            if not torch.equal(self._packed(x, *operands, None, None), launch_linear(x, plain, None, None)):
                return False
        return True

    def prove(self, *args: Any) -> bool:
        """Prove the product of the decoded weight, and that of its shape on cuBLASLt.

        Returns the first result: where cuBLASLt's bits differ, the plain product is Triton's at every M.
        """
        if args[0].is_cuda:
            exact_blas.prove(self._decode(*args))
        return super().prove(*args)

    def rehearse(self, *args: Any) -> None:
        """Launch the kernels of :meth:`prove` and ignore the results: this compiles them ahead of time."""
        if args[0].is_cuda:
            exact_blas.rehearse(self._decode(*args))
        super().rehearse(*args)


class FewRowsProduct(ExactKernel[...]):
    """Another product of packed weights, up to FEW_ROWS rows.

    Arguments of a comparison and keys: as in :class:`DecodedProduct`. packed(x, *operands, None, None): the product of
    the Triton kernel, and of the other one, where ``suits(rows, *operands, dtype)``.
    """

    def __init__(
        self,
        name: str,
        keys: Callable[..., tuple[Hashable, ...]],
        packed: Callable[..., torch.Tensor],
        other: Callable[..., torch.Tensor],
        suits: Callable[..., bool],
    ) -> None:
        super().__init__(name, keys, self._same_bits)
        self._packed, self._other, self._suits = packed, other, suits

    def _same_bits(self, *args: Any) -> bool:
        """Compare both products with random inputs of each number of rows."""
        *operands, dtype = args
        weight = operands[0]
        for rows in PROOF_ROWS:
            if not self._suits(rows, *args):
                return False
            generator = torch.Generator(weight.device).manual_seed(rows)
            x = torch.randn(rows, 2 * weight.shape[1], device=weight.device, generator=generator).to(dtype)
            arguments = (x, *operands, None, None)
            if not torch.equal(self._other(*arguments), self._packed(*arguments)):
                return False
        return True
