"""Mamba2's recurrence with its convolution: right against float64, and the same bits however a text is cut."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
import torch

from tests.kernels.delta_cases import (
    ON_GPU,
    TAPS,
    Layer,
    Passes,
    Sizes,
    assert_bits_in_any_cuts,
    assert_outputs_and_states,
    both_walks,
    cuts,
    differing,
    dots_in_a_chain,  # noqa: F401  a fixture
    relative,
    rounds,
)
from unisono.kernels.recurrent.gated_delta import launch_gated_delta
from unisono.kernels.recurrent.mamba2 import launch_mamba2, mamba2
from unisono.kernels.recurrent.mamba_conv import launch_mamba_conv, mamba_conv

LOW, HIGH = 0.02, 1.5
"""Limits of a step that some steps exceed."""

SIZES = {
    "one group": Sizes(1, 3, 32, 16),
    "two groups": Sizes(2, 4, 16, 32),
    "a group a head": Sizes(2, 2, 16, 16),
}


def passes(layer: Layer, conv: Any, rule: Any, device: str = "cpu", biased: bool = True) -> Passes:
    """Passes of a layer by these ops, with a bias, limits and factors of x."""
    bias, skip = (each.to(device) for each in (bias_of(layer), skip_of(layer)))
    heads = layer.sizes.value_heads

    def convolved(u: Any, weight: Any, ba: Any, a_log: Any, dt_bias: Any, *rest: Any) -> Any:
        return conv(u, weight, bias if biased else None, ba[:, :heads], a_log, dt_bias, LOW, HIGH, *rest)

    return Passes(layer, convolved, lambda cbx, gates, *rest: rule(cbx, gates, skip, *rest), device)


def plain_walk(cbx: Any, gates: Any, skip: Any, *rest: Any) -> Any:
    """The op with Triton's walk over prompts."""
    return launch_gated_delta(cbx, gates, *rest, fast_walk=False, skip=skip)


def twins(layer: Layer) -> Passes:
    return passes(layer, mamba_conv, mamba2)


def kernels(layer: Layer, biased: bool = True) -> Passes:
    return passes(layer, launch_mamba_conv, launch_mamba2, "cuda" if ON_GPU else "cpu", biased)


def bias_of(layer: Layer) -> torch.Tensor:
    return torch.randn(layer.sizes.channels, generator=torch.Generator().manual_seed(7)).to(layer.dtype)


def skip_of(layer: Layer) -> torch.Tensor:
    return torch.randn(layer.sizes.value_heads, generator=torch.Generator().manual_seed(8))


def oracle(layer: Layer, text: int, biased: bool = True) -> tuple[torch.Tensor, torch.Tensor]:
    """The formulas in float64, token by token: outputs [T, H P] and the state after all tokens [H, P, N]."""
    s, (u, ba) = layer.sizes, layer.texts[text]
    padded = torch.cat((torch.zeros(TAPS - 1, s.channels), u)).double()
    conv = sum(padded[j : j + len(u)] * layer.weight[:, 0, j].double() for j in range(TAPS))
    conv = conv + bias_of(layer).double() if biased else conv
    conv = (conv * torch.sigmoid(conv)).to(layer.dtype).double()
    c, b, x = conv.split((s.keys, s.keys, s.value_heads * s.value_dim), dim=1)
    c, b = (
        each.unflatten(1, (s.key_heads, s.key_dim)).repeat_interleave(s.value_heads // s.key_heads, 1)
        for each in (c, b)
    )
    x = x.unflatten(1, (s.value_heads, s.value_dim))
    step = torch.nn.functional.softplus(ba[:, : s.value_heads].double() + layer.dt_bias.double()).clamp(LOW, HIGH)
    decay = (-layer.a_log.double().exp() * step).exp()
    state, out = torch.zeros(s.value_heads, s.value_dim, s.key_dim, dtype=torch.float64), []
    for t in range(len(u)):
        state = state * decay[t, :, None, None] + step[t, :, None, None] * x[t, :, :, None] * b[t, :, None, :]
        out.append(torch.einsum("hpn,hn->hp", state, c[t]) + skip_of(layer).double()[:, None] * x[t])
    return torch.stack(out).flatten(1), state


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_twin_is_the_recurrence(sizes: Sizes, dtype: torch.dtype) -> None:
    assert_outputs_and_states(twins(Layer(sizes, dtype, [50, 64, 5])), oracle)


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_twin_bits_do_not_depend_on_the_cuts(sizes: Sizes) -> None:
    assert_bits_in_any_cuts(twins, sizes)


SMALL = {
    "fp32": (Sizes(2, 2, 16, 16, width=2), torch.float32, 2e-6, True),
    "three heads a group, fp16": (Sizes(1, 3, 16, 32, width=2), torch.float16, 1e-3, False),
    "state in slices, fp16": (Sizes(1, 1, 128, 16, width=2), torch.float16, 1e-3, True),
}


@pytest.mark.parametrize(("sizes", "dtype", "bound", "biased"), SMALL.values(), ids=SMALL)
def test_the_kernels_are_the_recurrence(sizes: Sizes, dtype: torch.dtype, bound: float, biased: bool) -> None:
    layer = Layer(sizes, dtype, [37, 32])
    made = kernels(layer, biased)
    made.prompt(layer.lengths, pad=3, pad_rows=1)
    for r in range(2):
        out, state = oracle(layer, r, biased)
        assert relative(made.out[r], out) < bound
    assert relative(made.state[made.order[1]], state) < (2e-6 if dtype == torch.float32 else 1e-4)


@pytest.mark.parametrize(("heads", "width"), [((1, 2), 2), ((2, 2), 12)], ids=["two chunks", "three chunks"])
def test_kernel_bits_do_not_depend_on_the_cuts(heads: tuple[int, int], width: int) -> None:
    layer = Layer(Sizes(*heads, 16, 16, width=width), torch.float16, [49, 50])
    whole = kernels(layer)
    whole.prompt(layer.lengths)
    other = kernels(layer)
    cuts(other, random.Random(1), 30)
    assert differing(whole, other) == 0
    other = kernels(layer)
    rounds(other, random.Random(width), itertools.repeat(width), first=20)
    assert differing(whole, other) == 0


def test_a_pass_without_tokens_moves_the_state_on() -> None:
    layer = Layer(Sizes(1, 2, 16, 16, width=4), torch.float32, [33, 48])
    for made in (twins, kernels):
        whole, other = made(layer), made(layer)
        whole.prompt(layer.lengths)
        other.prompt([30, 44])
        other.round(4, [3, 4])
        other.settle()
        assert [int(other.since[row]) for row in other.order[:2]] == [32, 48]
        assert differing(whole, other) == 0


@pytest.mark.parametrize("sizes", [Sizes(1, 2, 32, 32, width=2), Sizes(2, 2, 64, 16, width=1)])
def test_both_walks_over_a_prompt_have_the_same_bits(monkeypatch: pytest.MonkeyPatch, sizes: Sizes) -> None:
    layer = Layer(sizes, torch.float16, [135, 70, 16])
    plain = passes(layer, launch_mamba_conv, plain_walk, "cuda" if ON_GPU else "cpu")
    both_walks(monkeypatch, lambda: kernels(layer), plain.rule)
