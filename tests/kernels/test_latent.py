"""Latent attention: the walk, the cache's rows and the heads' products against float64; rounds, chunks and batches."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.latent_requests import LATENT, PAGE, ROPE, Rows
from unisono.kernels.attention.latent import head_blocks
from unisono.kernels.attention.latent_rows import (
    head_product,
    latent_queries,
    launch_head_product,
    launch_latent_queries,
    launch_rotate_latent,
    rotate_latent,
)
from unisono.kernels.cache.kv_e4m3 import quantised

WAYS = pytest.mark.parametrize("triton", [True, False], ids=["triton", "twin"])


PAGES = pytest.mark.parametrize("e4m3", [False, True], ids=["plain", "e4m3"])


@WAYS
@PAGES
@pytest.mark.parametrize(("heads", "first"), [(5, 0), (40, 0), (6, 1)])
def test_matches_float64(triton, e4m3, heads, first, device):
    rows = Rows([300, 17, 33], heads, device if triton else torch.device("cpu"), e4m3=e4m3)
    spans = [(290, 300), (first, 17), (30, 33)]
    for cut in (1, 10**6):
        for row, out in enumerate(rows.attend(triton, spans, programs=cut, first=first)):
            want = rows.expected(row, spans[row], first).float()
            torch.testing.assert_close(out.cpu(), want, atol=2e-6, rtol=1e-5)


@WAYS
@PAGES
@pytest.mark.parametrize("latent", [LATENT, 64])
def test_rounds_have_the_bits_of_chunks(triton, e4m3, latent, device):
    """Latents of 64 in pieces of 16, where few tiles are cut."""
    rows = Rows([300, 280], 5, device if triton else torch.device("cpu"), latent, e4m3=e4m3)
    whole = rows.attend(triton, [(280, 300), (272, 280)])
    for width in (1, 4):
        for cut in (1, 10**6):
            outs = rows.attend(triton, [(300 - width, 300), (280 - width, 280)], width=width, programs=cut)
            for out, want in zip(outs, whole, strict=True):
                assert torch.equal(out, want[-width:])


@PAGES
def test_work_items_of_several_splits(e4m3, device):
    """800 keys are four splits. A program that walks two of them keeps each for the merge."""
    rows = Rows([800], 5, device, e4m3=e4m3)
    (want,) = rows.attend(True, [(799, 800)], width=1)
    for programs in (2, 3):
        (out,) = rows.attend(True, [(799, 800)], width=1, programs=programs)
        assert torch.equal(out, want)


@WAYS
@pytest.mark.parametrize("interleaved", [True, False])
def test_rows_and_queries_are_rotated(triton, interleaved, device, dtype):
    on = device if triton else torch.device("cpu")
    heads, nope = 11, 12
    rows, q = torch.randn(7, LATENT + ROPE).to(dtype), torch.randn(7, heads * (nope + ROPE)).to(dtype)
    norm, table = 1 + 0.2 * torch.randn(LATENT).to(dtype), torch.randn(50, ROPE)
    positions = torch.tensor([3, 4, 5, 0, 49, -1, 9], dtype=torch.int32)
    slots = torch.tensor([18, 19, 20, 33, 40, 2, 47], dtype=torch.int32)
    cache = torch.zeros(3, 1, PAGE, LATENT + ROPE, dtype=dtype, device=on)
    run = launch_rotate_latent if triton else rotate_latent.cpu
    moved = [each.to(on) for each in (rows, q, norm)]
    out = run(*moved, 1e-3, table.to(on), positions.to(on), slots.to(on), cache, heads, interleaved)

    def turned(x, t):
        x = x.double()
        a, b = (x[..., ::2], x[..., 1::2]) if interleaved else x.chunk(2, -1)
        cos, sin = table[max(int(positions[t]), 0)].double().chunk(2)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)

    tolerance = {"atol": 1e-5, "rtol": 0} if dtype is torch.float32 else {"atol": 0.02, "rtol": 0.02}
    for t in range(7):
        latent = rows[t, :LATENT].double()
        latent = latent * torch.rsqrt(latent.square().mean() + 1e-3) * norm.double()
        want = torch.cat((latent, turned(rows[t, LATENT:], t)))
        got = cache.flatten(0, 2)[int(slots[t])].double().cpu()
        torch.testing.assert_close(got, want, **tolerance)
        of_heads = turned(q[t].view(heads, -1)[:, nope:], t)
        torch.testing.assert_close(out[t, :, LATENT:].double().cpu(), of_heads, **tolerance)


@WAYS
def test_head_products_and_their_rows_alone(triton, device, assert_rows_exact):
    on = device if triton else torch.device("cpu")
    x, weight = torch.randn(20, 3, 50).to(on), torch.randn(3, 70, 40).to(on)
    run = launch_head_product if triton else head_product.cpu

    def product(x):
        out = x.new_full((len(x), 3, 80), 7.0)
        run(x, weight, out)
        return out

    out = product(x)
    want = torch.einsum("thk,hnk->thn", x[..., :40].double(), weight.double())
    torch.testing.assert_close(out[..., :70].double(), want, atol=2e-5, rtol=1e-5)
    assert (out[..., 70:] == 7).all()
    assert_rows_exact(product, x)


@WAYS
@pytest.mark.parametrize("tokens", [3, 20])
def test_queries_of_one_launch_have_the_bits_of_two(triton, tokens, device, dtype):
    on = device if triton else torch.device("cpu")
    heads, nope = 11, 32
    rows, q = torch.randn(tokens, LATENT + ROPE), torch.randn(tokens, heads * (nope + ROPE))
    norm, table, weight = torch.randn(LATENT), torch.randn(50, ROPE), torch.randn(heads, LATENT, nope)
    rows, q, norm, weight = (each.to(on, dtype) for each in (rows, q, norm, weight))
    positions = torch.arange(tokens, dtype=torch.int32, device=on)
    where = table.to(on), positions, positions + 9
    caches = torch.zeros(2, 2, 1, PAGE, LATENT + ROPE, dtype=dtype, device=on)
    rotate, product, both = (
        (launch_rotate_latent, launch_head_product, launch_latent_queries)
        if triton
        else (rotate_latent.cpu, head_product.cpu, latent_queries.cpu)
    )
    want = rotate(rows, q, norm, 1e-3, *where, caches[0], heads, True)
    product(q.view(tokens, heads, -1), weight, want)
    got = both(rows, q, norm, 1e-3, *where, caches[1], heads, True, weight)
    assert torch.equal(got, want)
    assert torch.equal(*caches)
    assert caches[1].any()


@WAYS
@pytest.mark.parametrize("tokens", [3, 20])
def test_e4m3_rows_are_plain_rows_quantised(triton, tokens, device, dtype):
    on = device if triton else torch.device("cpu")
    heads, nope = 3, 8
    rows, q = torch.randn(tokens, LATENT + ROPE), torch.randn(tokens, heads * (nope + ROPE))
    rows[1] = 0.0
    norm, table, weight = torch.randn(LATENT), torch.randn(50, ROPE), torch.randn(heads, LATENT, nope)
    rows, q, norm, weight = (each.to(on, dtype) for each in (rows, q, norm, weight))
    positions = torch.arange(tokens, dtype=torch.int32, device=on)
    before = rows, q, norm, 1e-3, table.to(on), positions, positions + 9
    plain = torch.zeros(2, 1, PAGE, LATENT + ROPE, dtype=dtype, device=on)
    cache = torch.zeros(2, 1, PAGE, LATENT, dtype=torch.float8_e4m3fn, device=on)
    turned = torch.zeros(2, 1, PAGE, ROPE, dtype=dtype, device=on)
    scales = torch.zeros(2, 1, PAGE, 1, dtype=torch.uint8, device=on)
    both = launch_latent_queries if triton else latent_queries.cpu
    want = both(*before, plain, heads, True, weight)
    got = both(*before, cache, heads, True, weight, turned, scales)
    assert torch.equal(got, want)
    at = slice(9, 9 + tokens)
    values, exponents = quantised(plain[..., :LATENT].flatten(0, 2)[at])
    assert torch.equal(cache.flatten(0, 2)[at].float(), values.float())
    assert torch.equal(scales.flatten()[at], exponents.flatten())
    assert torch.equal(turned.flatten(0, 2)[at], plain[..., LATENT:].flatten(0, 2)[at])
    assert cache.float().any()


def test_blocks_hold_at_most_a_tile():
    assert [head_blocks(n) for n in (1, 20, 32, 40, 64, 128)] == [1, 1, 1, 2, 2, 4]
