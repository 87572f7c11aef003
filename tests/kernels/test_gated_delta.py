"""The gated delta rule: right against float64, and the same bits however a text is cut into passes."""

from __future__ import annotations

import itertools
import random

import pytest
import torch

from tests.kernels.delta_cases import Layer, Passes, Sizes, cuts, differing, oracle, rounds
from unisono.kernels.causal_conv import causal_conv
from unisono.kernels.gated_delta import gated_delta

SIZES = {
    "ratio 1": Sizes(3, 3, 32, 32),
    "ratio 2": Sizes(2, 4, 32, 16),
    "ratio 3": Sizes(1, 3, 16, 64),
    "one head": Sizes(1, 1, 16, 16),
}


def twins(layer: Layer) -> Passes:
    return Passes(layer, causal_conv, gated_delta)


def relative(x: torch.Tensor, y: torch.Tensor) -> float:
    return float((x.double() - y.double()).norm() / y.double().norm())


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_twin_is_the_recurrence(sizes: Sizes, dtype: torch.dtype) -> None:
    layer = Layer(sizes, dtype, [50, 64, 5])
    passes = twins(layer)
    passes.prompt(layer.lengths)
    for r, length in enumerate(layer.lengths):
        out, state = oracle(layer, r)
        assert relative(passes.out[r], out.flatten(1)) < (3e-6 if dtype == torch.float32 else 5e-3)
        if length % 16 == 0:
            assert relative(passes.state[passes.order[r]], state) < (3e-6 if dtype == torch.float32 else 2e-3)


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_twin_bits_do_not_depend_on_the_cuts(sizes: Sizes) -> None:
    layer = Layer(sizes, torch.float32, [70, 100, 33, 16, 130])
    whole = twins(layer)
    whole.prompt(layer.lengths)
    for seed in range(4):
        other = twins(layer)
        cuts(other, random.Random(seed), 40)
        assert differing(whole, other) == 0
    for width in (1, 2, 4, 6, 8):
        layer = Layer(sizes, torch.float32, [110, 117, 125])
        whole, other = twins(layer), twins(layer)
        whole.prompt(layer.lengths)
        rounds(other, random.Random(width), itertools.repeat(width))
        assert differing(whole, other) == 0
        assert max(other.length) > 90
    rnd, other = random.Random(0), twins(layer)
    rounds(other, rnd, iter(lambda: rnd.randrange(1, 9), 0))
    assert differing(whole, other) == 0
