"""The gated delta rule with its convolution: right against float64, and the same bits however a text is cut."""

from __future__ import annotations

import random
from functools import partial
from typing import Any

import pytest
import torch

from tests.kernels.delta_cases import (
    ON_GPU,
    Layer,
    Passes,
    Sizes,
    assert_bits_in_any_cuts,
    assert_outputs_and_states,
    both_walks,
    cuts,
    differing,
    dots_in_a_chain,  # noqa: F401  a fixture
    oracle,
    ragged_rounds,
    relative,
    rounds,
)
from unisono.kernels.recurrent.causal_conv import causal_conv, launch_causal_conv
from unisono.kernels.recurrent.gated_delta import gated_delta, launch_gated_delta

SIZES = {
    "ratio 1": Sizes(3, 3, 32, 32),
    "ratio 2": Sizes(2, 4, 32, 16),
    "ratio 3": Sizes(1, 3, 16, 64),
    "one head": Sizes(1, 1, 16, 16),
}


def twins(layer: Layer) -> Passes:
    return Passes(layer, causal_conv, gated_delta)


def kernels(layer: Layer) -> Passes:
    return Passes(layer, launch_causal_conv, launch_gated_delta, "cuda" if ON_GPU else "cpu")


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_twin_is_the_recurrence(sizes: Sizes, dtype: torch.dtype) -> None:
    assert_outputs_and_states(twins(Layer(sizes, dtype, [50, 64, 5])), oracle)


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_twin_bits_do_not_depend_on_the_cuts(sizes: Sizes) -> None:
    assert_bits_in_any_cuts(twins, sizes)


@pytest.mark.parametrize("run", [twins, kernels])
def test_rounds_of_rows_of_any_width_have_the_same_bits(run: Any) -> None:
    """Rows of a round may differ in width: their drafts leave nothing in the state."""
    layer = Layer(Sizes(1, 2, 16, 16, width=8), torch.float32, [60, 75, 66])
    whole, other = run(layer), run(layer)
    whole.prompt(layer.lengths)
    ragged_rounds(other, random.Random(5), 8)
    assert differing(whole, other) == 0
    assert max(other.length) > 45


SMALL = {
    "ratio 1, fp32": (Sizes(2, 2, 16, 16, width=2), torch.float32, 2e-6),
    "ratio 2, fp16": (Sizes(1, 2, 32, 16, width=2), torch.float16, 1e-3),
    "ratio 3, fp16": (Sizes(1, 3, 16, 32, width=2), torch.float16, 1e-3),
    "slices, fp16": (Sizes(1, 1, 128, 16, width=2), torch.float16, 1e-3),
}


@pytest.mark.parametrize(("sizes", "dtype", "bound"), SMALL.values(), ids=SMALL)
def test_the_kernels_are_the_recurrence(sizes: Sizes, dtype: torch.dtype, bound: float) -> None:
    layer = Layer(sizes, dtype, [37, 32])
    passes = kernels(layer)
    passes.prompt(layer.lengths, pad=3, pad_rows=1)
    for r in range(2):
        out, state = oracle(layer, r)
        assert relative(passes.out[r], out.flatten(1)) < bound
    assert relative(passes.state[passes.order[1]], state) < (2e-6 if dtype == torch.float32 else 1e-4)


CUT = [
    pytest.param(*each, id=name, marks=pytest.mark.full if name in ("ratio 2, fp16", "ratio 3, fp16") else ())
    for name, each in SMALL.items()
]
"""Two value heads for each key head are in test_wide_rounds_have_the_same_bits."""


@pytest.mark.parametrize(("sizes", "dtype", "bound"), CUT)
def test_kernel_bits_do_not_depend_on_the_cuts(sizes: Sizes, dtype: torch.dtype, bound: float) -> None:
    layer = Layer(sizes, dtype, [35, 40])
    whole, other = kernels(layer), kernels(layer)
    whole.prompt(layer.lengths)
    cuts(other, random.Random(3), 20)
    assert differing(whole, other) == 0
    rnd, other = random.Random(1), kernels(layer)
    rounds(other, rnd, iter(lambda: rnd.randrange(1, 3), 0), first=20)
    assert differing(whole, other) == 0
    assert max(other.length) > 30


def test_wide_rounds_have_the_same_bits() -> None:
    """Rounds of up to three chunks, of widths up to 8 and more: two kernels take turns."""
    layer = Layer(Sizes(1, 2, 16, 16, width=12), torch.float32, [60, 70])
    whole, other = kernels(layer), kernels(layer)
    whole.prompt(layer.lengths)
    rnd = random.Random(5)
    rounds(other, rnd, iter(lambda: rnd.choice([1, 4, 8, 12]), 0), first=20)
    assert differing(whole, other) == 0
    assert max(other.length) > 45


@pytest.mark.parametrize("sizes", [Sizes(1, 2, 32, 32, width=2), Sizes(1, 1, 64, 16, width=1)])
def test_both_walks_over_a_prompt_have_the_same_bits(monkeypatch: pytest.MonkeyPatch, sizes: Sizes) -> None:
    """Whole, cut anywhere, and after rounds; with rows and tokens of padding."""
    layer = Layer(sizes, torch.float16, [135, 70, 16])
    both_walks(monkeypatch, lambda: kernels(layer), partial(launch_gated_delta, fast_walk=False))


@pytest.mark.parametrize("made", [twins, kernels])
def test_a_text_that_ends_within_a_round(made: Any) -> None:
    """Tokens after a request's last position do not count: nothing of them is remembered."""
    layer = Layer(Sizes(1, 2, 16, 16, width=4), torch.float32, [40, 33])
    whole, other = made(layer), made(layer)
    whole.prompt(layer.lengths)
    other.prompt([37, 31])
    other.round(4, [3, 2], room=[3, 2])
    assert differing(whole, other) == 0
    kept = other.rings["kv"][other.order[0]].cpu()
    live = {p % kept.shape[0] for p in range(32, 40)}
    assert all(kept[p].isfinite().all() == (p in live or p <= 40 - 32) for p in live)


@pytest.mark.parametrize("made", [twins, kernels])
def test_a_pass_without_tokens_moves_the_state_on(made: Any) -> None:
    """To where a prompt pass over the same tokens would have moved it."""
    layer = Layer(Sizes(1, 2, 16, 16, width=4), torch.float32, [33, 48])
    whole, other = made(layer), made(layer)
    whole.prompt(layer.lengths)
    other.prompt([30, 44])
    other.round(4, [3, 4])
    since = [int(other.since[row]) for row in other.order[:2]]
    other.settle()
    assert since == [16, 32]
    assert [int(other.since[row]) for row in other.order[:2]] == [32, 48]
    assert differing(whole, other) == 0


def test_shapes_and_no_tokens() -> None:
    layer = Layer(Sizes(), torch.bfloat16, [3])
    passes = twins(layer)
    assert gated_delta(
        torch.empty(5, layer.sizes.channels, device="meta"), torch.empty(5, 2, 4, device="meta"),
        passes.state.to("meta"), *(passes.rings[n].to("meta") for n in ("kv", "gates")),
        *[torch.empty(1, dtype=torch.int32, device="meta")] * 5, None,
    ).shape == (5, 128)  # fmt: skip
    none = [torch.empty(0, dtype=torch.int32)] * 5
    u = torch.empty(0, layer.sizes.channels, dtype=torch.bfloat16)
    qkv, gates = causal_conv(
        u, layer.weight, torch.empty(0, 8), layer.a_log, layer.dt_bias, passes.taps, passes.rings["conv"], *none, None
    )
    assert qkv.shape == u.shape
    assert gates.shape == (0, 2, 4)
