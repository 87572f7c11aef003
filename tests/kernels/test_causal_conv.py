"""The causal convolution and the gates against float64; how texts are cut: tests/kernels/test_gated_delta.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from unisono.kernels.recurrent.causal_conv import causal_conv, launch_causal_conv

CHANNELS, HEADS, TOKENS = 40, 3, 21


def run(op: Callable[..., Any], u: torch.Tensor, ba: torch.Tensor, weight: torch.Tensor, **gates: torch.Tensor) -> Any:
    """One text of all tokens."""
    device, taps, tokens = ba.device, weight.shape[-1], len(u)
    snapshot = torch.zeros(1, taps - 1, u.shape[1], dtype=u.dtype, device=device)
    ring = torch.full((1, taps + 1, u.shape[1]), torch.nan, dtype=u.dtype, device=device)
    ints = [torch.tensor(n, dtype=torch.int32, device=device) for n in ([0], [0], [0], [16], [tokens], [0, tokens])]
    return op(u, weight, ba, gates["a_log"], gates["dt_bias"], snapshot, ring, *ints), snapshot


@pytest.mark.parametrize("op", [launch_causal_conv, causal_conv])
@pytest.mark.parametrize(("taps", "tokens"), [(2, TOKENS), (3, TOKENS), (4, TOKENS), (4, 53), (3, 53)])
def test_matches_float64(
    op: Any, taps: int, tokens: int, dtype: torch.dtype, device: torch.device, assert_close: Any
) -> None:
    """Of 53 tokens a tile has all its earlier inputs in the pass."""
    u, ba = torch.randn(tokens, CHANNELS).to(device, dtype), torch.randn(tokens, 2 * HEADS).to(device, dtype)
    weight = torch.randn(CHANNELS, 1, taps).to(device, dtype)
    gates = {"a_log": torch.rand(HEADS, device=device) * 2, "dt_bias": torch.randn(HEADS, device=device) - 3}
    (out, both), snapshot = run(op, u, ba, weight, **gates)
    padded = torch.cat((torch.zeros(taps - 1, CHANNELS, device=device), u)).double().T[None]
    conv = torch.nn.functional.conv1d(padded, weight.double(), groups=CHANNELS)[0].T
    assert_close(out, conv * conv.sigmoid())
    b, a = ba.double().chunk(2, dim=1)
    g = -gates["a_log"].double().exp() * torch.nn.functional.softplus(a + gates["dt_bias"].double())
    assert_close(both, torch.stack((g, b.sigmoid()), 1))
    assert torch.equal(snapshot[0], u[17 - taps : 16])


@pytest.mark.parametrize("op", [launch_causal_conv, causal_conv])
def test_gates_at_their_ends(op: Any, device: torch.device) -> None:
    """The decay is right where its softplus is tiny, and nothing overflows."""
    ends = torch.tensor([-100.0, -20.0, -9.0, 0.0, 30.0, 1e4], device=device)
    ba = torch.cat((ends, ends)).repeat(TOKENS, 1)
    gates = {"a_log": torch.zeros(6, device=device), "dt_bias": torch.zeros(6, device=device)}
    (_, both), _ = run(op, torch.zeros(TOKENS, 16, device=device), ba, torch.zeros(16, 1, 4, device=device), **gates)
    expected = torch.stack((-torch.nn.functional.softplus(ends.double(), threshold=1000), ends.double().sigmoid()))
    assert torch.allclose(both[5].double(), expected, rtol=1e-6, atol=1e-37)
