"""The short convolution against float64, and texts cut into chunks and rounds with the bits of one pass."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from unisono.kernels.recurrent.short_conv import launch_short_conv, short_conv

CHANNELS, WIDTH = 40, 4
OPS = pytest.mark.parametrize("op", [launch_short_conv, short_conv], ids=["triton", "op"])


class Text:
    """One request: its snapshot, remembered inputs and the tokens seen."""

    def __init__(self, op: Any, weight: torch.Tensor) -> None:
        self.op, self.weight, self.length, self.seen = op, weight, 0, 0
        taps = weight.shape[-1]
        self.snapshot = torch.zeros(2, taps - 1, CHANNELS, dtype=weight.dtype, device=weight.device)
        shape = (2, taps - 1 + WIDTH, CHANNELS)
        self.ring = torch.full(shape, torch.nan, dtype=weight.dtype, device=weight.device)

    def extend(self, u: torch.Tensor, width: int | None = None, drafts: int = 0) -> torch.Tensor:
        """A pass over u [n, C]; of a round all but ``drafts`` tokens stay, and shorter rows are padded."""
        count, committed = len(u), len(u) - drafts
        until = self.length if width else self.length + count
        fields = [1, self.seen, self.length, until - until % 16, self.length + count]
        ints = [torch.tensor([n], dtype=torch.int32, device=u.device) for n in fields]
        starts = None if width else torch.tensor([0, count], dtype=torch.int32, device=u.device)
        padded = torch.cat((u, u.new_full(((width or count) - count, CHANNELS), 7.0)))
        out = self.op(padded, self.weight, self.snapshot, self.ring, *ints, starts)
        assert not out[count:].any()
        self.seen, self.length = fields[3], self.length + committed
        return out[:committed]


@OPS
@pytest.mark.parametrize("taps", [2, 3, 4])
def test_matches_float64(op: Any, taps: int, dtype: torch.dtype, device: torch.device, assert_close: Any) -> None:
    u, weight = torch.randn(37, CHANNELS).to(device, dtype), torch.randn(CHANNELS, 1, taps).to(device, dtype)
    text = Text(op, weight)
    out = text.extend(u)
    padded = torch.cat((torch.zeros(taps - 1, CHANNELS, device=device), u)).double().T[None]
    assert_close(out, torch.nn.functional.conv1d(padded, weight.double(), groups=CHANNELS)[0].T)
    assert torch.equal(text.snapshot[1], u[33 - taps : 32])


@OPS
@pytest.mark.parametrize("taps", [3, 4])
def test_cuts_and_rejected_drafts_change_no_bit(op: Any, taps: int, device: torch.device) -> None:
    u, weight = torch.randn(61, CHANNELS, device=device), torch.randn(CHANNELS, 1, taps, device=device)
    whole = Text(op, weight).extend(u)
    text, outs = Text(op, weight), []
    outs += [text.extend(u[:5]), text.extend(u[5:31])]
    while text.length < 61:
        at = text.length
        rest = u[at : at + 2]
        rejected = torch.randn(min(WIDTH - len(rest), 2), CHANNELS, device=device)
        outs.append(text.extend(torch.cat((rest, rejected)), WIDTH, drafts=len(rejected)))
    assert torch.equal(torch.cat(outs), whole)
