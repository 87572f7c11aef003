"""Ops have gradients where they are wanted, and are themselves where they are not.

The oracle is the same maths in float64 with torch's own gradients, written here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch

from tests.models.make_mtp import norm, rotate
from tests.ops import Ops
from unisono.kernels import linear, linear_norm, rms_norm, rope_and_cache, silu_mul
from unisono.kernels.norm.concat_norm import concat_norm

EPS = 1e-3
GENERATOR = torch.Generator().manual_seed(0)


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=GENERATOR)


def compare(
    op: Callable[..., torch.Tensor], oracle: Callable[..., torch.Tensor], inputs: Sequence[torch.Tensor | None]
) -> None:
    """Values and gradients of ``op`` and of ``oracle``, for a random direction of the output."""
    ours = [None if t is None else t.clone().requires_grad_(True) for t in inputs]
    theirs = [None if t is None else t.double().requires_grad_(True) for t in inputs]
    out, wanted = op(*ours), oracle(*theirs)
    torch.testing.assert_close(out.double(), wanted, rtol=1e-5, atol=1e-5)
    direction = draw(*out.shape)
    out.backward(direction)
    wanted.backward(direction.double())
    for got, right in zip(ours, theirs, strict=True):
        if got is not None:
            torch.testing.assert_close(got.grad.double(), right.grad, rtol=1e-4, atol=1e-4)
    plain = op(*inputs)
    torch.testing.assert_close(out.detach(), plain, rtol=1e-5, atol=1e-5)  # a formula owes the op's values


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("residual", [True, False])
def test_linear(bias: bool, residual: bool) -> None:
    inputs = draw(21, 30), draw(17, 30), draw(17) if bias else None, draw(21, 17) if residual else None

    def oracle(x, weight, bias, residual):
        y = x @ weight.T
        y = y if bias is None else y + bias
        return y if residual is None else y + residual

    compare(linear, oracle, inputs)


def test_linear_norm() -> None:
    def oracle(x, weight, residual, norm_weight):
        total = x @ weight.T + residual
        return torch.cat((total, norm(total, norm_weight, EPS)), 1)

    def op(x, weight, residual, norm_weight):
        return torch.cat(linear_norm(x, weight, None, residual, norm_weight, EPS), 1)

    compare(op, oracle, (draw(21, 30), draw(17, 30), draw(21, 17), draw(17)))


def test_rms_norm() -> None:
    compare(lambda x, w: rms_norm(x, w, EPS), lambda x, w: norm(x, w, EPS), (draw(9, 40), draw(40)))


def test_silu_mul() -> None:
    def oracle(x: torch.Tensor) -> torch.Tensor:
        gate, up = x.chunk(2, 1)
        return gate * torch.sigmoid(gate) * up

    compare(silu_mul, oracle, (draw(9, 40),))


def test_join_norms() -> None:
    ids = torch.tensor([3, 0, 3, 6], dtype=torch.int32)

    def oracle(table, hidden, table_weight, hidden_weight):
        return torch.cat((norm(table[ids.long()], table_weight, EPS), norm(hidden, hidden_weight, EPS)), 1)

    compare(lambda *t: concat_norm(ids, *t, EPS), oracle, (draw(7, 30), draw(4, 30), draw(30), draw(30)))


@pytest.mark.parametrize("norms", [True, False])
def test_rope_and_cache(norms: bool) -> None:
    """The keys and values in the cache carry their gradients too."""
    heads, kv_heads, dim, tokens, page = 4, 2, 8, 5, 4
    positions = torch.arange(3, 3 + tokens, dtype=torch.int32)
    slots = torch.tensor([9, 2, 4, 11, 0], dtype=torch.int32)
    angles = torch.arange(32)[:, None] / 100.0 ** (torch.arange(dim // 2) / (dim // 2))
    cos_sin = torch.cat((angles.cos(), angles.sin()), 1)
    weights = (1 + draw(dim), 1 + draw(dim)) if norms else (None, None)

    def op(qkv, q_norm, k_norm):
        keys, values = (torch.zeros(3, kv_heads, page, dim) for _ in range(2))
        q = rope_and_cache(qkv, q_norm, k_norm, EPS, cos_sin, positions, slots, keys, values, heads, kv_heads)
        written = [c[(slots // page).long(), :, (slots % page).long()] for c in (keys, values)]
        return torch.cat([t.flatten(1) for t in (q, *written)], 1)

    def oracle(qkv, q_norm, k_norm):
        q, k, v = qkv.view(tokens, -1, dim).split((heads, kv_heads, kv_heads), 1)
        if norms:
            q, k = norm(q, q_norm, EPS), norm(k, k_norm, EPS)
        q, k = rotate(q, 100.0, positions), rotate(k, 100.0, positions)
        return torch.cat([t.flatten(1) for t in (q, k, v)], 1)

    compare(op, oracle, (draw(tokens, (heads + 2 * kv_heads) * dim), *weights))


def test_without_a_gradient_the_op_runs() -> None:
    x, weight = draw(5, 8), draw(3, 8)
    trained = weight.clone().requires_grad_(True)
    with Ops() as seen:
        linear(x, weight)
        with torch.no_grad():
            linear(x, trained)
        with torch.inference_mode():
            linear(x, trained)
    assert seen.found["unisono.linear.default"] == 3
    with Ops() as seen:
        linear(x, trained)
    assert "unisono.linear.default" not in seen.found
