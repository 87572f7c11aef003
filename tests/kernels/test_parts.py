"""A rank's part of an op's work has the bits of the whole op: fewer outputs, fewer heads, other tiles.

On a GPU in the sizes of Qwen3-8B, else in the interpreter, which sums in one order whatever a compiler would do:
what compilers do is read in ``test_aot.py``.
"""

from __future__ import annotations

import pytest
import torch

from tests.kernels.rope_cases import make_case
from unisono.kernels import rope_and_cache, silu_mul
from unisono.kernels.cache.rotary import launch_rope_and_cache
from unisono.kernels.gemm.linear import exact_blas, launch_linear
from unisono.kernels.gemm.linear_norm import linear_norm
from unisono.kernels.norm.add_norm import add_rms_norm
from unisono.kernels.norm.gated_norm import launch_gated_norm

ON_GPU = torch.cuda.is_available()
PARTS = (2, 4, 8)
DTYPE = torch.bfloat16 if ON_GPU else torch.float32
SHAPES = {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (24576, 4096), "down": (4096, 12288)}
NAMES = tuple(SHAPES) if ON_GPU else ("small",)
"""Products that are tested. The interpreter has one shape for all."""
ROWS = (1, 3, 16, 17, 32, 33, 64, 65, 100, 200, 513, 1000) if ON_GPU else (1, 17, 70)


@pytest.mark.parametrize("parts", PARTS)
@pytest.mark.parametrize("name", NAMES)
def test_outputs_of_a_product(name: str, parts: int, device: torch.device) -> None:
    """By the kernel that serves, of which there are several by rows and outputs."""
    outputs, inputs = SHAPES[name] if ON_GPU else (parts * 24, 40)
    weight = torch.randn(outputs, inputs, device=device).mul(0.02).to(DTYPE)
    each = weight.chunk(parts)
    op = torch.ops.unisono.linear if ON_GPU else launch_linear
    if ON_GPU:
        assert exact_blas.prove(weight) in (True, False)
        assert exact_blas.prove(each[0]) in (True, False)
    for rows in ROWS:
        x = torch.randn(rows, inputs, device=device).to(DTYPE)
        whole = op(x, weight, None, None)
        assert torch.equal(torch.cat([op(x, part, None, None) for part in each], 1), whole), rows


@pytest.mark.parametrize("rows", ROWS)
def test_the_norm_of_a_gathered_sum(rows: int, device: torch.device) -> None:
    """A rank adds the residual after the gather; one process adds it where the product is stored."""
    hidden = 4096 if ON_GPU else 48
    x, residual = (torch.randn(rows, hidden, device=device).to(DTYPE) for _ in range(2))
    weight, norm = torch.randn(hidden, hidden, device=device).mul(0.02).to(DTYPE), torch.ones(hidden, device=device)
    gathered = torch.cat([torch.ops.unisono.linear(x, part, None, None) for part in weight.chunk(2)], 1)
    one, other = linear_norm(x, weight, None, residual, norm, 1e-6), add_rms_norm(gathered, residual, norm, 1e-6)
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("parts", PARTS)
@pytest.mark.parametrize("dims", [(128, 128), (256, 64), (64, 64)])
def test_rotary_of_divided_heads(dims: tuple[int, int], parts: int, device: torch.device) -> None:
    """Also those of which a program has fewer than it has room for. Several ranks hold the same KV head."""
    op = rope_and_cache if ON_GPU else launch_rope_and_cache
    case = make_case(*dims, True, DTYPE, device, tokens=64 if ON_GPU else 3, heads=32, kv_heads=8)
    q, *caches = case.run(op)
    queries, keys, values = case.qkv.unflatten(1, (-1, dims[0])).split((32, 8, 8), 1)
    for rank in range(parts):
        part = [each.chunk(parts, 1)[rank].flatten(1) for each in (queries, keys, values)]
        mine = case.replaced(torch.cat(part, 1), 32 // parts, 8 // parts).run(op)
        whole = [q.chunk(parts, 1)[rank], *(cache.chunk(parts, 1)[rank] for cache in caches)]
        for one, other in zip(mine, whole, strict=True):
            assert torch.equal(one.nan_to_num(9), other.nan_to_num(9))


@pytest.mark.parametrize("parts", PARTS)
def test_gates(parts: int, device: torch.device) -> None:
    """Of an MLP, and of the heads of a recurrent layer."""
    size, heads = (12288, 32) if ON_GPU else (64, 8)
    gate, up = (torch.randn(5, size, device=device).to(DTYPE) for _ in range(2))
    whole = silu_mul(torch.cat((gate, up), 1))
    each = [silu_mul(torch.cat(pair, 1)) for pair in zip(gate.chunk(parts, 1), up.chunk(parts, 1), strict=True)]
    assert torch.equal(torch.cat(each, 1), whole)
    o, z = (torch.randn(5, heads * 128, device=device).to(DTYPE) for _ in range(2))
    weight = torch.rand(128, device=device)
    pairs = zip(o.chunk(parts, 1), z.chunk(parts, 1), strict=True)
    of_heads = [launch_gated_norm(*pair, weight, 1e-6) for pair in pairs]
    assert torch.equal(torch.cat(of_heads, 1), launch_gated_norm(o, z, weight, 1e-6))
