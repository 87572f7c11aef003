"""Ops of vision towers: right against float64, alike in kernel and twin, exact in any company."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from unisono.kernels.vision.activation import gelu, launch_gelu
from unisono.kernels.vision.attention import KEYS, QueryTile, launch_segment_attention, segment_attention
from unisono.kernels.vision.norm import launch_layer_norm, layer_norm
from unisono.kernels.vision.positions import add_positions, launch_add_positions
from unisono.kernels.vision.rotary import axial_rotary, launch_axial_rotary

HEADS = 2
SEGMENTS = (70, 4, 1, 129, 16)
"""Rows: more than a block of keys, fewer than a tile, one alone, two blocks and a row."""


def on(run, device):
    """Twins run on the CPU, launchers where kernels do."""
    return "cpu" if run.__name__.endswith("_cpu") else device


# ---- attention of segments --------------------------------------------------------------------------


def bounds_of(lengths, padding=0):
    """[P, 2] i32 of segments side by side, and of padding after them."""
    ends = torch.tensor(lengths).cumsum(0)
    rows = torch.stack((ends - torch.tensor(lengths), ends), dim=1).repeat_interleave(torch.tensor(lengths), dim=0)
    return F.pad(rows, (0, 0, 0, padding)).int()


def attended(qkv, lengths):
    """float64: every segment on its own."""
    outs = []
    for part in qkv.double().split(list(lengths)):
        q, k, v = part.view(len(part), 3, HEADS, -1).permute(1, 2, 0, 3)
        outs.append(F.scaled_dot_product_attention(q, k, v).transpose(0, 1).flatten(1))
    return torch.cat(outs)


def attend(run, qkv, bounds, **options):
    dim = qkv.shape[1] // (3 * HEADS)
    return run(qkv, bounds.to(qkv.device), HEADS, dim**-0.5, **options)


@pytest.mark.parametrize("run", [launch_segment_attention, segment_attention.cpu])
@pytest.mark.parametrize("dim", [6, 20, 64, 72, 80, 88])
def test_attention_matches_float64(run, dim, dtype, device, assert_close):
    qkv = (1.5 * torch.randn(sum(SEGMENTS), 3 * HEADS * dim)).to(on(run, device), dtype)
    assert_close(attend(run, qkv, bounds_of(SEGMENTS)), attended(qkv, SEGMENTS))


@pytest.mark.parametrize("run", [launch_segment_attention, segment_attention.cpu])
@pytest.mark.parametrize("dim", [24, 72])
def test_attention_depends_on_its_segment_alone(run, dim, dtype, device):
    """Alone, in any order, after other segments, before padding, beside NaN: the same bits."""
    parts = [(1.5 * torch.randn(n, 3 * HEADS * dim)).to(on(run, device), dtype) for n in SEGMENTS]
    alone = [attend(run, part, bounds_of([len(part)])) for part in parts]
    for order in ([0, 1, 2, 3, 4], [3, 2, 4, 0]):
        lengths = [SEGMENTS[i] for i in order]
        nothing = torch.full_like(parts[0][:9], torch.nan)
        qkv = torch.cat([*(parts[i] for i in order), nothing])
        out = attend(run, qkv, bounds_of(lengths, padding=9))
        for i, got in zip(order, out.split([*lengths, 9]), strict=False):
            assert torch.equal(got, alone[i]), f"segment {i} of {order}"
        assert not out[-9:].any(), "padding attends to nothing"


@pytest.mark.parametrize("rows", [16, 32, 128])
def test_attention_has_the_same_bits_at_any_tile(rows, dtype, device):
    qkv = torch.randn(sum(SEGMENTS), 3 * HEADS * 20).to(device, dtype)
    expected = attend(launch_segment_attention, qkv, bounds_of(SEGMENTS))
    tile = QueryTile(rows, 4, 2)
    assert torch.equal(attend(launch_segment_attention, qkv, bounds_of(SEGMENTS), tile=tile), expected)


@pytest.mark.parametrize("run", [launch_segment_attention, segment_attention.cpu])
def test_attention_of_large_scores(run, device):
    """The largest score, wherever it is among the blocks of keys, takes all; nothing overflows."""
    rows = 2 * KEYS + 3
    qkv = torch.zeros(rows, 3 * HEADS * 16)
    qkv[:, 0], qkv[:, 32] = 100.0, torch.randperm(rows).float() * 10  # q and k of the first head
    qkv[:, 64:] = torch.randn(rows, 32)
    out = attend(run, qkv.to(on(run, device)), bounds_of([rows])).cpu()
    best = qkv[:, 32].argmax()
    assert torch.allclose(out[:, :16], qkv[best, 64:80].expand(rows, 16), atol=1e-5)
    assert torch.allclose(out[:, 16:], qkv[:, 80:].mean(0).expand(rows, 16), atol=1e-5)


def test_attention_dispatches_and_knows_its_shape():
    qkv = torch.randn(20, 3 * HEADS * 8)
    out = segment_attention(qkv, bounds_of([12, 8]), HEADS, 0.5)
    assert torch.equal(out, segment_attention.cpu(qkv, bounds_of([12, 8]), HEADS, 0.5))
    assert segment_attention(qkv.to("meta"), bounds_of([20]).to("meta"), HEADS, 0.5).shape == (20, 16)


# ---- rotary -----------------------------------------------------------------------------------------


def rotary_case(dim, dtype, device, rows=9):
    angles = torch.rand(40, dim // 4) * 6
    table = torch.cat((angles.cos(), angles.sin()), dim=1).to(device)
    positions = torch.randint(0, 40, (rows, 2), dtype=torch.int32).to(device)
    return torch.randn(rows, 3 * 3 * dim).to(device, dtype), table, positions


def turned(run, qkv, table, positions):
    """Three heads."""
    qkv = qkv.clone()
    run(qkv, table, positions, 3)
    return qkv


@pytest.mark.parametrize("run", [launch_axial_rotary, axial_rotary.cpu])
@pytest.mark.parametrize("dim", [4, 20, 72, 80, 88])
def test_rotary_matches_float64(run, dim, dtype, device, assert_close):
    qkv, table, positions = rotary_case(dim, dtype, on(run, device))
    cos, sin = (
        torch.cat([table[positions[:, axis].long(), half : half + dim // 4] for axis in (0, 1)], dim=1).double()
        for half in (0, dim // 4)
    )
    expected = qkv.double().view(-1, 9, dim).clone()
    first, second = expected[:, :6].chunk(2, dim=-1)
    cos, sin = cos[:, None], sin[:, None]
    expected[:, :6] = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    out = turned(run, qkv, table, positions)
    assert_close(out, expected.flatten(1))
    assert torch.equal(out[:, 6 * dim :], qkv[:, 6 * dim :]), "values do not turn"


@pytest.mark.parametrize("run", [launch_axial_rotary, axial_rotary.cpu])
def test_rotary_rows_are_exact(run, dtype, device, assert_rows_exact):
    qkv, table, positions = rotary_case(20, dtype, on(run, device))
    assert_rows_exact(lambda q, p: turned(run, q, table, p), qkv, positions)


def test_rotary_dispatches():
    qkv, table, positions = rotary_case(20, torch.float32, "cpu")
    assert torch.equal(turned(axial_rotary, qkv, table, positions), turned(axial_rotary.cpu, qkv, table, positions))
    assert not torch.equal(turned(axial_rotary, qkv, table, positions), qkv)


# ---- LayerNorm, GELU, learned positions -------------------------------------------------------------


@pytest.mark.parametrize("run", [launch_layer_norm, layer_norm.cpu])
@pytest.mark.parametrize("size", [1, 24, 257, 4608])
def test_layer_norm_matches_float64(run, size, dtype, device, assert_close):
    x, weight, bias = (torch.randn(shape).to(on(run, device), dtype) for shape in ((5, size), (size,), (size,)))
    x = x + 3
    expected = F.layer_norm(x.double(), (size,), weight.double(), bias.double(), 1e-6)
    assert_close(run(x, weight, bias, 1e-6), expected)


@pytest.mark.parametrize("run", [launch_layer_norm, layer_norm.cpu])
@pytest.mark.parametrize("size", [24, 257])
def test_layer_norm_rows_are_exact(run, size, dtype, device, assert_rows_exact):
    x, weight, bias = (torch.randn(shape).to(on(run, device), dtype) for shape in ((19, size), (size,), (size,)))
    assert_rows_exact(lambda x: run(x, weight, bias, 1e-6), x)


@pytest.mark.parametrize("run", [launch_gelu, gelu.cpu])
@pytest.mark.parametrize("exact", [True, False])
def test_gelu_matches_float64(run, exact, dtype, device, assert_close):
    x = (3 * torch.randn(5, 333)).to(on(run, device), dtype)
    assert_close(run(x, exact), F.gelu(x.double(), approximate="none" if exact else "tanh"))


@pytest.mark.parametrize("run", [launch_gelu, gelu.cpu])
@pytest.mark.parametrize("exact", [True, False])
def test_gelu_rows_are_exact_and_saturate(run, exact, dtype, device, assert_rows_exact):
    assert_rows_exact(lambda x: run(x, exact), (3 * torch.randn(40, 13)).to(on(run, device), dtype))
    ends = run(torch.tensor([[-1e4, -60.0, 0.0, 60.0, 1e4]], device=on(run, device)), exact).cpu()
    assert torch.allclose(ends, torch.tensor([[0.0, 0.0, 0.0, 60.0, 1e4]]))


@pytest.mark.parametrize("run", [launch_add_positions, add_positions.cpu])
@pytest.mark.parametrize("width", [24, 1030])
def test_positions_match_float64_and_rows_are_exact(run, width, dtype, device, assert_close, assert_rows_exact):
    where = on(run, device)
    x, table = (torch.randn(rows, width).to(where, dtype) for rows in (9, 25))
    sources = torch.randint(0, 25, (9, 4), dtype=torch.int32).to(where)
    weights = torch.rand(9, 4).to(where)
    expected = x.double() + (table.double()[sources.long()] * weights.double()[:, :, None]).sum(1)
    assert_close(run(x, table, sources, weights), expected)
    assert_rows_exact(lambda *rows: run(rows[0], table, *rows[1:]), x, sources, weights)


def test_ops_dispatch_and_know_their_shapes():
    x, weight = torch.randn(3, 20), torch.randn(20)
    sources, shares = torch.zeros(3, 4, dtype=torch.int32), torch.full((3, 4), 0.25)
    assert torch.equal(layer_norm(x, weight, weight, 1e-6), layer_norm.cpu(x, weight, weight, 1e-6))
    assert torch.equal(gelu(x, True), gelu.cpu(x, True))
    assert torch.allclose(add_positions(x, x, sources, shares), x + x[0])
    meta = x.to("meta")
    assert layer_norm(meta, meta[0], meta[0], 1e-6).shape == gelu(meta, False).shape == meta.shape
    assert math.prod(add_positions(meta, meta, sources.to("meta"), shares.to("meta")).shape) == 60
