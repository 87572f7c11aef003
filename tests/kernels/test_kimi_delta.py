"""Kimi Delta Attention with its convolution: right against float64, and the same bits however a text is cut."""

from __future__ import annotations

import itertools
import random
from functools import partial
from typing import Any

import pytest
import torch

from tests.kernels.delta_cases import (
    ON_GPU,
    TAPS,
    GluonKernel,
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
    split,
)
from unisono.kernels import overlap
from unisono.kernels.recurrent import kimi_delta as kimi_module
from unisono.kernels.recurrent import kimi_delta_prepare
from unisono.kernels.recurrent.kimi_conv import kimi_conv, launch_kimi_conv
from unisono.kernels.recurrent.kimi_delta import kimi_delta, launch_kimi_delta


@pytest.fixture(autouse=True)
def chunks_prepared_as_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    if not ON_GPU:
        monkeypatch.setattr(kimi_delta_prepare, "_split", split)
        prepare = GluonKernel(kimi_delta_prepare.kimi_prepare_kernel, [kimi_delta_prepare, overlap])
        monkeypatch.setattr(kimi_module, "kimi_prepare_kernel", prepare)


def sizes(heads: int, key_dim: int, value_dim: int, width: int = 8) -> Sizes:
    return Sizes(heads, heads, key_dim, value_dim, width, by_channel=True)


SIZES = {"three heads": sizes(3, 32, 32), "narrow values": sizes(2, 32, 16), "narrow keys": sizes(1, 16, 64)}


def passes(layer: Layer, conv: Any, rule: Any, device: str = "cpu") -> Passes:
    def convolved(u: Any, weight: Any, gates: Any, *rest: Any) -> Any:
        return conv(u, weight, *gates.split((layer.sizes.decays, layer.sizes.value_heads), 1), *rest)

    return Passes(layer, convolved, rule, device)


def twins(layer: Layer) -> Passes:
    return passes(layer, kimi_conv, kimi_delta)


def kernels(layer: Layer) -> Passes:
    return passes(layer, launch_kimi_conv, launch_kimi_delta, "cuda" if ON_GPU else "cpu")


def oracle(layer: Layer, text: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The formulas in float64, token by token: outputs [T, H V] and the state after all tokens [H, V, K]."""
    s, (u, gates) = layer.sizes, layer.texts[text]
    padded = torch.cat((torch.zeros(TAPS - 1, s.channels), u)).double()
    conv = sum(padded[j : j + len(u)] * layer.weight[:, 0, j].double() for j in range(TAPS))
    x = (conv * torch.sigmoid(conv)).to(layer.dtype).double()
    q, k, v = (part.unflatten(1, (s.value_heads, -1)) for part in x.split((s.keys, s.keys, s.channels - 2 * s.keys), 1))
    q, k = (each * torch.rsqrt(each.square().sum(-1, keepdim=True) + 1e-6) for each in (q, k))
    f, b = gates.double().split((s.decays, s.value_heads), 1)
    step = torch.nn.functional.softplus(f + layer.dt_bias.double()).unflatten(1, (s.value_heads, -1))
    decay = (-layer.a_log.double().exp()[:, None] * step).exp()
    state, out = torch.zeros(s.value_heads, s.value_dim, s.key_dim, dtype=torch.float64), []
    for t in range(len(u)):
        state = state * decay[t, :, None]
        error = (v[t] - torch.einsum("hvk,hk->hv", state, k[t])) * b[t].sigmoid()[:, None]
        state = state + error[:, :, None] * k[t, :, None, :]
        out.append(torch.einsum("hvk,hk->hv", state, q[t] * s.key_dim**-0.5))
    return torch.stack(out).flatten(1), state


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_twin_is_the_recurrence(sizes: Sizes, dtype: torch.dtype) -> None:
    assert_outputs_and_states(twins(Layer(sizes, dtype, [50, 64, 5])), oracle)


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_twin_bits_do_not_depend_on_the_cuts(sizes: Sizes) -> None:
    assert_bits_in_any_cuts(twins, sizes)


SMALL = {
    "fp32": (sizes(2, 16, 16, width=2), torch.float32, 2e-6),
    "wide values, fp16": (sizes(1, 16, 32, width=2), torch.float16, 1e-3),
    "wide keys, fp16": (sizes(1, 64, 16, width=2), torch.float16, 1e-3),
}


@pytest.mark.parametrize(("sizes", "dtype", "bound"), SMALL.values(), ids=SMALL)
def test_the_kernels_are_the_recurrence(sizes: Sizes, dtype: torch.dtype, bound: float) -> None:
    layer = Layer(sizes, dtype, [37, 32])
    made = kernels(layer)
    made.prompt(layer.lengths, pad=3, pad_rows=1)
    for r in range(2):
        out, state = oracle(layer, r)
        assert relative(made.out[r], out) < bound
    assert relative(made.state[made.order[1]], state) < (2e-6 if dtype == torch.float32 else 1e-4)


@pytest.mark.parametrize(("heads", "width"), [(1, 2), (2, 12)], ids=["two chunks", "three chunks"])
def test_kernel_bits_do_not_depend_on_the_cuts(heads: int, width: int) -> None:
    layer = Layer(sizes(heads, 16, 16, width), torch.float16, [49, 50])
    whole = kernels(layer)
    whole.prompt(layer.lengths)
    other = kernels(layer)
    cuts(other, random.Random(1), 30)
    assert differing(whole, other) == 0
    other = kernels(layer)
    rounds(other, random.Random(width), itertools.repeat(width), first=20)
    assert differing(whole, other) == 0


@pytest.mark.parametrize("sizes", [sizes(2, 32, 32, 2), sizes(1, 64, 16, 1)], ids=["two heads", "wide keys"])
def test_both_walks_over_a_prompt_have_the_same_bits(monkeypatch: pytest.MonkeyPatch, sizes: Sizes) -> None:
    layer = Layer(sizes, torch.float16, [135, 70, 16])

    both_walks(monkeypatch, partial(kernels, layer), partial(launch_kimi_delta, fast_walk=False), kimi=True)


@pytest.mark.parametrize("made", [twins, kernels])
def test_decays_that_underflow_are_zero(made: Any) -> None:
    """No exponent overflows where a chunk's decays have no finite reciprocal."""
    layer = Layer(sizes(1, 16, 16, 2), torch.float32, [32])
    layer.a_log += 8
    found = made(layer)
    found.prompt(layer.lengths)
    out, state = oracle(layer, 0)
    assert relative(found.out[0], out) < 3e-6
    assert relative(found.state[found.order[0]], state) < 3e-6


@pytest.mark.parametrize("made", [twins, kernels])
def test_a_pass_without_tokens_moves_the_state_on(made: Any) -> None:
    layer = Layer(sizes(1, 16, 16, 4), torch.float32, [33, 48])
    whole, other = made(layer), made(layer)
    whole.prompt(layer.lengths)
    other.prompt([30, 44])
    other.round(4, [3, 4])
    other.settle()
    assert [int(other.since[row]) for row in other.order[:2]] == [32, 48]
    assert differing(whole, other) == 0
