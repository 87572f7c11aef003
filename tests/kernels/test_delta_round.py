"""A round of Gated DeltaNet in two kernels: the bits of the four that it replaces, outputs and all that is kept."""

from __future__ import annotations

import pytest
import torch

from unisono.kernels import delta_round as module
from unisono.kernels.delta_round import (
    Convolution,
    Kept,
    Norm,
    _same_bits,
    delta_round,
    launch_delta_round,
    launch_one_by_one,
    prove_delta_round,
    suits,
)

SIZES = [(1, 2, 16, 64, 2), (2, 2, 16, 16, 1), (1, 3, 32, 16, 1)]
"""Key and value heads, their sizes, tokens of a row in the widest round."""


def layer(keys: int, values: int, k: int, v: int, width: int, dtype: torch.dtype, device: torch.device):
    """A layer's convolution and what a row keeps, uninitialised but for the weights."""
    channels, generator = 2 * keys * k + values * v, torch.Generator().manual_seed(3)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    def kept(*shape: int, like: torch.dtype = dtype) -> torch.Tensor:
        return torch.zeros(1, *shape, dtype=like, device=device)

    weights = random(channels, 1, 4).div(2).to(device, dtype), random(values).to(device), random(values).to(device)
    ring, fp32 = 15 + 2 * width, torch.float32
    state = kept(values, v, k, like=fp32), kept(ring, channels - keys * k), kept(ring, 2, values, like=fp32)
    return Convolution(*weights, kept(3, channels), kept(2 + width, channels)), Kept(*state)


@pytest.mark.parametrize("sizes", SIZES)
def test_two_kernels_have_the_bits_of_four(sizes, dtype, device):
    conv, kept = layer(*sizes, dtype, device)
    assert _same_bits(conv, kept, 1e-6, sizes[-1])


@pytest.mark.parametrize("wrong", ["what is remembered", "the norm", "the decay"])
def test_the_comparison_sees_what_is_left_out(wrong, device, monkeypatch):
    """The launches as they would be with a fault: nothing remembered, another norm's inputs, another decay."""
    conv, kept = layer(*SIZES[1], torch.float32, device)
    right = launch_delta_round

    def faulty(u, ba, conv, kept, norm, *where):
        if wrong == "what is remembered":
            conv = conv._replace(snapshot=conv.snapshot.clone(), ring=conv.ring.clone())
        elif wrong == "the norm":
            norm = norm._replace(z=norm.z * 1.0001)
        else:
            conv = conv._replace(a_log=conv.a_log + 1e-6)
        return right(u, ba, conv, kept, norm, *where)

    monkeypatch.setattr(module, "launch_delta_round", faulty)
    assert not _same_bits(conv, kept, 1e-6, 1)


@pytest.mark.parametrize("group", [None, 128])
def test_the_op_is_the_chain(group):
    conv, kept = layer(2, 4, 16, 32, 2, torch.float32, torch.device("cpu"))
    where = [torch.tensor(each, dtype=torch.int32) for each in ([0], [0], [0], [0], [2])]
    u, z, ba = (torch.randn(2, n) for n in (conv.weight.shape[0], 128, 8))
    given = u, ba, conv, kept, Norm(z, torch.randn(32), 1e-6, group)
    copies = [t.clone() for t in (*conv[3:], *kept)]
    got = delta_round(*given, *where)
    assert prove_delta_round(conv, kept, 1e-6), "nothing to compare on a CPU"
    assert not all(map(torch.equal, copies, (*conv[3:], *kept))), "rows remember"
    meta = Norm(z.to("meta"), torch.randn(32), 1e-6, group)
    shapes = delta_round(u.to("meta"), ba.to("meta"), *given[2:4], meta, *where)
    assert [t.shape for t in shapes] == [t.shape for t in got]
    again = Convolution(*conv[:3], *copies[:2]), Kept(*copies[2:])
    want = launch_one_by_one(u, ba, *again, given[-1], *where)
    for a, b in zip((*got, *conv[3:], *kept), (*want, *again[0][3:], *again[1]), strict=True):
        assert a.shape == b.shape
        assert (a.double() - b.double()).norm() <= (2e-2 if group else 1e-5) * max(1, b.double().norm())


def test_which_rounds_suit():
    conv, kept = layer(*SIZES[0], torch.float32, torch.device("cpu"))
    u = torch.empty(32, conv.weight.shape[0])
    assert suits(u[:4], kept, 4)
    assert not suits(u[:5], kept, 5), "many rows"
    assert not suits(u[:0], kept, 1), "no tokens"
    assert not suits(u, kept, 1), "three chunks in a row"
