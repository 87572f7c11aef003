"""Fused layer tail of a divided layer: everything after its mixer on this rank, with the gathers between.

Owns the ``divided_tail`` op. On Hopper GPUs that map each other's memory it is one launch
(``kernels/gemm/divided_tail.py``); on a CPU, and as the reference of its bits, it is the separate products and gathers.

Shapes: M rows, H features, Q inputs of the output projection, F outputs of the next input projection on this rank,
N ranks.
"""

from __future__ import annotations

import torch

from unisono.distributed.gather import Ranks, all_gather, gather_add_rms_norm, gather_silu, regions_of
from unisono.kernels.gemm.divided_tail import DividedTailWeights, divides, launch_divided_tail
from unisono.kernels.gemm.layer_tail import PROOF_ROWS, LayerTailWeights, Made, empty
from unisono.kernels.gemm.linear import linear
from unisono.kernels.library import op
from unisono.kernels.proofs import ExactKernel


def apart(x: torch.Tensor, residual: torch.Tensor, t: DividedTailWeights, transport: int) -> Made:
    """Compute :func:`divided_tail` with separate products and gathers."""
    tail, ranks = t.parts, t.ranks
    assert tail.next_norm is not None
    y = linear(all_gather(x, transport, ranks), tail.o)
    total, normed, *_ = gather_add_rms_norm(y, residual, tail.o_norm, tail.eps, None, True, False, transport, ranks)
    act = gather_silu(linear(normed, tail.gate_up), transport, ranks)
    y = linear(act, tail.down)
    out, normed, *_ = gather_add_rms_norm(y, total, tail.next_norm, tail.next_eps, None, True, False, transport, ranks)
    product = residual.new_empty(0) if tail.following is None else linear(normed, tail.following, tail.bias)
    return out, normed, product


def _meta(x: torch.Tensor, residual: torch.Tensor, *weights: object) -> Made:
    return empty(residual, LayerTailWeights.of(*weights[:4]))  # type: ignore[arg-type]


@op(meta=_meta)
def divided_tail_op(
    x: torch.Tensor, residual: torch.Tensor, products: list[torch.Tensor], norms: list[torch.Tensor], eps: list[float],
    bias: torch.Tensor | None, transport: int, ranks: int,
) -> Made:  # fmt: skip
    t = DividedTailWeights(LayerTailWeights.of(products, norms, eps, bias), ranks)
    regions = regions_of(transport)
    return apart(x, residual, t, transport) if regions is None else launch_divided_tail(x, residual, t, regions)


def divided_tail(x: torch.Tensor, residual: torch.Tensor, t: DividedTailWeights, transport: int) -> Made:
    """Compute a divided layer after its mixer: x [M, Q / N] of this rank and residual [M, H] -> (sum [M, H], its norm
    [M, H], next input projection [M, F]).

    Up to ``MOST_ROWS`` rows on a GPU, and only if :data:`exact_divided_tail` is proven. All ranks call it together.
    """
    tail = t.parts
    return divided_tail_op(
        x, residual, tail.products, tail.norms, [tail.eps, tail.next_eps], tail.bias, transport, t.ranks
    )


def suits(t: DividedTailWeights, ranks: Ranks) -> bool:
    """True if the kernel takes these weights and this transport has regions; on a CPU always."""
    return divides(t) and (t.parts.o.device.type == "cpu" or regions_of(ranks.transport) is not None)


def _same_bits(t: DividedTailWeights, ranks: Ranks) -> bool:
    """Compare the kernel with separate products and gathers, on random inputs of each number of rows."""
    regions = regions_of(ranks.transport)
    if regions is None or not suits(t, ranks):
        return False
    device, (h, q, *_) = t.parts.o.device, t.sizes
    same = True
    for rows in PROOF_ROWS:
        generator = torch.Generator(device).manual_seed(rows)
        x, residual = (torch.randn(rows, n, device=device, generator=generator).to(t.parts.o.dtype) for n in (q, h))
        start, stop = ranks.part(q)
        inputs = x[:, start:stop].contiguous()
        got = launch_divided_tail(inputs, residual, t, regions)
        same &= all(map(torch.equal, got, apart(inputs, residual, t, ranks.transport)))
    return same


exact_divided_tail = ExactKernel(
    "layer tails of ranks", lambda t, ranks: (t.shape,) if t.parts.o.device.type == "cuda" else (), _same_bits
)
"""The fused kernel, against separate products and gathers; every rank compares all numbers of rows."""
