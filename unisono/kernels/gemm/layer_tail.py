"""Fused layer tail: all products of a decoder layer after its mixer, for few rows, in one launch on Hopper.

Owns the ``layer_tail`` op. It computes the output projection, the gated MLP's two products and, if the next layer
begins with one, its input projection, with the sums with the residual, both norms and SiLU. For few rows reading the
weights bounds the time, and between two launches the memory would be idle for about 4 µs, four times a layer. The
kernel (``kernels/gemm/layer_tail_gluon.py``) has one persistent program per multiprocessor, which never stops loading
weights.

Bits are those of the separate ops (``linear_norm``, ``linear``, ``silu_mul``): every product sums K in one sequence,
and a norm's row is summed by as many warps in the same order. :data:`exact_layer_tail` compares them on the present
GPU. Called by ``models``; elsewhere the separate ops serve.

Shapes: M rows, H features, I intermediate features, Q inputs of the output projection, F outputs of the input
projection that follows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from unisono.kernels.gemm.cpu import LEAST_ROWS
from unisono.kernels.gemm.layer_tail_gluon import EACH, MOST_ROWS, REGISTERS, STEP, WARPS, WIDE, layer_tail_kernel
from unisono.kernels.gemm.linear import launch_linear, linear
from unisono.kernels.gemm.persistent import LINE, box_of, counters, processors, tile_of
from unisono.kernels.hopper import box_type, boxes
from unisono.kernels.library import AotCase, empty_like, ints, op
from unisono.kernels.norm.activation import launch_silu_mul, silu_mul
from unisono.kernels.norm.rms_norm import launch_rms_norm, rms_norm, row_warps
from unisono.kernels.overlap import overlapped
from unisono.kernels.proofs import ExactKernel

_SHARED_BYTES = 216 * 1024
"""Shared memory of a multiprocessor for weights and rows, in bytes."""

PROOF_ROWS = (1, 3, 8, 13, 16, MOST_ROWS)


@dataclass(frozen=True)
class LayerTailWeights:
    """The weights of a layer after its mixer, all of one 16-bit dtype; norms [H] of that dtype or fp32.

    o [H, Q], gate_up [2 I, H], down [H, I]. o_norm: norm of the sum after o. next_norm: norm of the sum after down;
    None: no norm. following [F, H] and its bias [F]: the next layer's input projection; None: there is none.
    """

    o: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor
    o_norm: torch.Tensor
    eps: float
    next_norm: torch.Tensor | None = None
    next_eps: float = 0.0
    following: torch.Tensor | None = None
    bias: torch.Tensor | None = None

    @property
    def products(self) -> list[torch.Tensor]:
        """Weights of the products, in order."""
        return [w for w in (self.o, self.gate_up, self.down, self.following) if w is not None]

    @property
    def norms(self) -> list[torch.Tensor]:
        return [w for w in (self.o_norm, self.next_norm) if w is not None]

    @classmethod
    def of(
        cls, products: list[torch.Tensor], norms: list[torch.Tensor], eps: list[float], bias: torch.Tensor | None
    ) -> LayerTailWeights:
        """Build the weights from the op's arguments."""
        o, gate_up, down, *after = products
        next_norm, following = (each[0] if each else None for each in (norms[1:], after))
        return cls(o, gate_up, down, norms[0], eps[0], next_norm, eps[1], following, bias)

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """(H, Q, I, F); F is 0 if no projection follows."""
        return *self.o.shape, self.down.shape[1], 0 if self.following is None else self.following.shape[0]

    @property
    def shape(self) -> tuple[object, ...]:
        """Shapes and dtypes that the kernel's bits may depend on."""
        return (*(tuple(w.shape) for w in self.products), *(w.dtype for w in self.norms), self.o.dtype)


Made = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""(sum [M, H], its norm [M, H], next input projection [M, F]); outputs without a weight are empty."""


@dataclass(frozen=True)
class Blocks:
    """Blocking of the kernel. It affects speed only.

    rows: rows of a tile. each: steps loaded together. stages: groups of steps in shared memory at once.
    """

    rows: int
    each: int
    stages: int

    @classmethod
    def of(cls, rows: int, each: int = EACH) -> Blocks:
        """Choose the blocking for this number of rows, up to :data:`MOST_ROWS`."""
        tile = max(8, triton.next_power_of_2(rows))
        return cls(tile, each, _SHARED_BYTES // (each * (WIDE + tile) * STEP * 2))


@dataclass(frozen=True)
class LayerTailTiles:
    """Outputs per tile of the products with H, I and F outputs."""

    h: int
    i: int
    f: int

    @classmethod
    def of(cls, h: int, i: int, f: int, programs: int) -> LayerTailTiles:
        return cls(tile_of(h, programs, WIDE), tile_of(i, programs, WIDE // 2), tile_of(f or h, programs, WIDE))

    @property
    def of_products(self) -> tuple[int, int, int, int]:
        """Tile widths of o, gate_up, down and following."""
        return self.h, self.i, self.h, self.f

    def boxes(self, tail: LayerTailWeights) -> list[TensorDescriptor]:
        """TMA descriptors of the products' weights; without a following projection, down takes its place."""
        weights = tail.o, tail.gate_up, tail.down, tail.down if tail.following is None else tail.following
        return [boxes(w, box_of(n)) for w, n in zip(weights, self.of_products, strict=True)]

    def box_types(self, kind: str, rows: int) -> dict[str, str]:
        """Types of :meth:`boxes` in an AotCase's signature, and of operands of ``rows`` rows. kind: Triton's name of
        the dtype.
        """
        names = "o_desc", "gate_up_desc", "down_desc", "next_desc"
        weights = {name: box_type(kind, box_of(n)) for name, n in zip(names, self.of_products, strict=True)}
        return dict.fromkeys(("x_desc", "n1_desc", "act_desc", "n2_desc"), box_type(kind, rows)) | weights


def launch_layer_tail(
    x: torch.Tensor, residual: torch.Tensor, tail: LayerTailWeights, blocks: Blocks | None = None
) -> Made:
    """Launch :func:`layer_tail`. :func:`suits` must hold. blocks: speed only."""
    x, residual = x.contiguous(), residual.contiguous()
    rows, (h, q, i, f) = x.shape[0], tail.sizes
    blocks, programs = blocks or Blocks.of(rows), processors(x.device)
    total, n1, act = (x.new_empty(rows, width) for width in (h, h, i))
    out, n2, product = empty(residual, tail)
    tiles = LayerTailTiles.of(h, i, f, programs)
    layer_tail_kernel[(programs,)](
        *(boxes(each, blocks.rows) for each in (x, n1, act, n2 if f else n1)), *tiles.boxes(tail), residual,
        tail.o_norm, tail.o_norm if tail.next_norm is None else tail.next_norm,
        total if tail.bias is None else tail.bias, total, n1, act, out, n2, product, counters(x.device), tail.eps,
        tail.next_eps, rows, q, h, i, f, HAS_BIAS=tail.bias is not None, NORMED=tail.next_norm is not None,
        FOLLOWED=f > 0, **_constants(blocks, tiles, h), num_warps=WARPS, maxnreg=REGISTERS, **overlapped(x.device),
    )  # fmt: skip
    return out, n2, product


def _constants(blocks: Blocks, tiles: LayerTailTiles, h: int) -> dict[str, Any]:
    """Compile-time sizes of the kernel."""
    of_tiles = {"TILE_H": tiles.h, "TILE_I": tiles.i, "TILE_F": tiles.f}
    of_blocks = {"ROWS": blocks.rows, "STAGES": blocks.stages, "EACH": blocks.each, "STEP": STEP, "WIDE": WIDE}
    return of_tiles | of_blocks | {"LINE": LINE, "BLOCK_H": triton.next_power_of_2(h)}


def layer_tail_cpu(x: torch.Tensor, residual: torch.Tensor, t: LayerTailWeights) -> Made:
    rows = x.shape[0]
    if 0 < rows < LEAST_ROWS:  # each product would add rows
        x, residual = (torch.nn.functional.pad(each, (0, 0, 0, LEAST_ROWS - rows)) for each in (x, residual))
        out, normed, product = layer_tail_cpu(x, residual, t)
        return out[:rows], normed[:rows], product[:rows]
    total, nothing = linear.cpu(x, t.o, None, residual), x.new_empty(0)
    act = silu_mul.cpu(linear.cpu(rms_norm.cpu(total, t.o_norm, t.eps), t.gate_up, None, None))
    out = linear.cpu(act, t.down, None, total)
    normed = nothing if t.next_norm is None else rms_norm.cpu(out, t.next_norm, t.next_eps)
    return out, normed, nothing if t.following is None else linear.cpu(normed, t.following, t.bias, None)


def _apart(x: torch.Tensor, residual: torch.Tensor, t: LayerTailWeights) -> Made:
    """Compute :func:`layer_tail` with the separate kernels."""
    total, nothing = launch_linear(x, t.o, None, residual), x.new_empty(0)
    act = launch_silu_mul(launch_linear(launch_rms_norm(total, t.o_norm, t.eps), t.gate_up, None, None))
    out = launch_linear(act, t.down, None, total)
    normed = nothing if t.next_norm is None else launch_rms_norm(out, t.next_norm, t.next_eps)
    return out, normed, nothing if t.following is None else launch_linear(normed, t.following, t.bias, None)


def empty(residual: torch.Tensor, t: LayerTailWeights) -> Made:
    """Allocate the outputs."""
    nothing, rows = residual.new_empty(0), residual.shape[0]
    product = nothing if t.following is None else residual.new_empty(rows, t.following.shape[0])
    return empty_like(residual), nothing if t.next_norm is None else empty_like(residual), product


@op(
    cuda=lambda x, residual, *weights: launch_layer_tail(x, residual, LayerTailWeights.of(*weights)),
    meta=lambda residual, products, norms, eps, bias: empty(residual, LayerTailWeights.of(products, norms, eps, bias)),
)
def layer_tail_op(
    x: torch.Tensor, residual: torch.Tensor, products: list[torch.Tensor], norms: list[torch.Tensor], eps: list[float],
    bias: torch.Tensor | None,
) -> Made:  # fmt: skip
    return layer_tail_cpu(x, residual, LayerTailWeights.of(products, norms, eps, bias))


def layer_tail(x: torch.Tensor, residual: torch.Tensor, tail: LayerTailWeights) -> Made:
    """Compute a layer after its mixer from the mixer's outputs x [M, Q] and the residual [M, H]. Returns ``Made``.

    Up to :data:`MOST_ROWS` rows on a GPU, and only if :data:`exact_layer_tail` is proven. The bits are those of
    ``linear_norm(x, o, None, residual, o_norm)``, ``linear(…, gate_up)``, ``silu_mul``, ``linear_norm(…, down, …,
    next_norm)`` and ``linear(…, following, bias)``.
    """
    eps = [tail.eps, tail.next_eps]
    return layer_tail_op(x, residual, tail.products, tail.norms, eps, tail.bias)


def suits(tail: LayerTailWeights) -> bool:
    """True if the kernel takes these weights: a Hopper GPU, 16 bits, shapes and rows that TMA can load.

    Always True on a CPU, where the op runs the separate ops' formulas.
    """
    if tail.o.device.type == "cpu":
        return True
    if {w.dtype for w in tail.products} not in ({torch.bfloat16}, {torch.float16}):
        return False
    contiguous = all(w.is_contiguous() and w.data_ptr() % 16 == 0 for w in tail.products)
    aligned = contiguous and all(w.shape[1] * w.element_size() % 16 == 0 for w in tail.products)
    warps = row_warps(triton.next_power_of_2(tail.o.shape[0]))
    return aligned and warps == WARPS and processors(tail.o.device) >= MOST_ROWS


def _same_bits(tail: LayerTailWeights) -> bool:
    """Compare the kernel's outputs with the separate kernels', on random inputs of each number of rows."""
    if not suits(tail):
        return False
    device, (h, q) = tail.o.device, tail.o.shape
    for rows in PROOF_ROWS:
        generator = torch.Generator(device).manual_seed(rows)
        x, residual = (torch.randn(rows, n, device=device, generator=generator).to(tail.o.dtype) for n in (q, h))
        if not all(map(torch.equal, launch_layer_tail(x, residual, tail), _apart(x, residual, tail))):
            return False
    return True


exact_layer_tail = ExactKernel(
    "layer tails", lambda tail: (tail.shape,) if tail.o.device.type == "cuda" else (), _same_bits
)
"""The fused kernel, against the separate ones."""


def _case(dtype: str, norm: str, rows: int, h: int, q: int, i: int, f: int, normed: bool = True) -> AotCase:
    """Make the AotCase, with a bias for fp16."""
    blocks, tiles = Blocks.of(rows), LayerTailTiles.of(h, i, f, 132)
    signature = {
        **tiles.box_types(dtype, blocks.rows),
        **dict.fromkeys(("residual", "next_bias", "total", "n1", "act", "out", "n2", "product"), f"*{dtype}"),
        **dict.fromkeys(("o_norm", "next_norm"), f"*{norm}"), "counters": "*i64", "eps": "fp32", "next_eps": "fp32",
        **ints("", "M Q H I F"),
    }  # fmt: skip
    options = {"HAS_BIAS": dtype == "fp16", "NORMED": normed, "FOLLOWED": f > 0, "OVERLAP": True}
    return AotCase(
        layer_tail_kernel, signature, _constants(blocks, tiles, h) | options, num_warps=WARPS, maxnreg=REGISTERS
    )


AOT: list[AotCase] = [
    *(_case("bf16", "bf16", rows, 4096, 4096, 12288, 6144) for rows in (8, 32)),
    _case("bf16", "fp32", 8, 4096, 4096, 12288, 0),
    _case("bf16", "bf16", 8, 4096, 4096, 12288, 0, normed=False),
    _case("fp16", "fp16", 16, 2560, 4096, 9728, 6144),
]
