"""Attention by its spec: the output gate in float64, what the backend is told, state, and tables that layers share."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.models.make_mtp import rotate
from tests.models.one_block import HIDDEN, SPEC, THETA, TOKENS, builder, filled, one_pass, rotary, state_of
from unisono.attention.base import AttentionInputs, AttentionOptions
from unisono.attention.context import ForwardContext
from unisono.attention.triton import TritonAttention
from unisono.kv.specs import ALL, Paged, leaves
from unisono.layers.rotary import RotarySpec
from unisono.models.blocks.decoder import Decoder
from unisono.models.blocks.layers import Attention, LayerSpec, MLPSpec
from unisono.models.blocks.query_attention import QuerySpec
from unisono.models.config import DecoderConfig


def reference(attention: Attention, x: torch.Tensor) -> torch.Tensor:
    """Input of ``o`` in float64: each head's q_proj rows are its query, then its gate (Qwen3.5)."""
    s, w = attention.spec, attention.qkv.weight.double()
    x, queries = x.double(), s.num_heads * s.head_dim
    both = (x @ w[: 2 * queries].T).view(TOKENS, s.num_heads, 2 * s.head_dim)
    q, gate = both[..., : s.head_dim], both[..., s.head_dim :].flatten(1)
    k, v = ((x @ part.T).view(TOKENS, s.num_kv_heads, s.head_dim) for part in w[2 * queries :].chunk(2))
    turned = int(s.head_dim * 0.4)
    q, k = (
        torch.cat((rotate(t[..., :turned], THETA, torch.arange(TOKENS)), t[..., turned:]), -1).transpose(0, 1)
        for t in (q, k)
    )
    k, v = (t.repeat_interleave(s.num_heads // s.num_kv_heads, 0) for t in (k, v.transpose(0, 1)))
    causal = torch.ones(TOKENS, TOKENS, dtype=torch.float64).tril().log()
    out = (q @ k.mT / s.head_dim**0.5 + causal).softmax(-1) @ v
    return out.transpose(0, 1).flatten(1) * gate.sigmoid()


@torch.no_grad()
def test_output_gate_and_partial_rotary() -> None:
    attention = filled(replace(SPEC, output_gate=True, rotary=rotary(20, 0.4)).build(builder()))
    x = torch.randn(TOKENS, HIDDEN, generator=torch.Generator().manual_seed(1))
    expected, inputs = reference(attention, x), one_pass()
    got = attention(x, ForwardContext.of(inputs), state_of(attention))
    torch.testing.assert_close(got.double(), expected, atol=1e-5, rtol=0)
    last = inputs.last_tokens(torch.tensor([TOKENS - 1], dtype=torch.int32))
    assert torch.equal(attention(x, ForwardContext.of(inputs, last), state_of(attention)), got[-1:])


@torch.no_grad()
@pytest.mark.parametrize(
    ("interleaved", "axes"),
    [(True, [0, 1, 2, 0, 1, 0, 0, 0, 0, 0]), (False, [0, 0, 0, 0, 0, 0, 1, 1, 2, 2])],
    ids=["interleaved", "blocks"],
)
def test_rotary_positions_on_three_axes(interleaved: bool, axes: list[int]) -> None:
    """Text has the bits that it has without axes; elsewhere each plane turns by its own axis's position."""
    section = [7, 2, 1] if interleaved else [6, 2, 2]
    parameters = {"rope_type": "default", "rope_theta": THETA, "mrope_section": section}
    spec = replace(SPEC, rotary=RotarySpec.of(None, 20, parameters | {"mrope_interleaved": interleaved}))
    attention, x = filled(spec.build(builder())), torch.randn(TOKENS, HIDDEN)
    inputs, text = one_pass(), torch.arange(TOKENS, dtype=torch.int32)
    plain, kept = state_of(attention), state_of(attention)
    want = attention(x, ForwardContext.of(inputs), plain)
    context = ForwardContext.of(inputs, None, text[:, None].expand(-1, 3).contiguous())
    assert torch.equal(attention(x, context, kept), want)
    assert all(torch.equal(a, b) for a, b in zip(plain, kept, strict=True))
    positions = torch.randint(0, 60, (TOKENS, 3), dtype=torch.int32)
    attention(x, ForwardContext.of(inputs, None, positions), kept)
    keys = kept[0][1:3].transpose(1, 2).flatten(0, 1)[:TOKENS]
    unturned = attention.qkv(x)[:, 120:160].unflatten(1, (2, 20))
    torch.testing.assert_close(keys, rotate(unturned, THETA, positions[:, axes]), atol=1e-5, rtol=0)


class Recorder:
    """A backend that notes what it is asked."""

    name, capturable = "recorder", True

    def __init__(self) -> None:
        self.plans = 0
        self.calls: list[AttentionOptions] = []

    def plan(self, inputs: AttentionInputs, window: int = 0) -> None:
        self.plans += 1

    def forward(self, q: torch.Tensor, kv: Any, inputs: Any, options: AttentionOptions) -> Any:
        self.calls.append(options)
        return q.flatten(1)


def test_attention_options_come_from_the_spec() -> None:
    made = Recorder()
    b = builder(lambda q, kv: made)
    plain, rich = SPEC.build(b), replace(SPEC, scale=1.0, window=9, soft_cap=30.0, sink=True).build(b)
    context = ForwardContext.of(one_pass())
    for attention in (plain, rich):
        attention(torch.zeros(TOKENS, HIDDEN), context, state_of(attention))
    assert made.calls[0] == AttentionOptions(20**-0.5)
    assert replace(made.calls[1], sinks=None) == AttentionOptions(1.0, window=9, soft_cap=30.0)
    assert made.calls[1].sinks is rich.sinks
    assert made.plans == 2  # one for each window


def test_plans_are_made_once_for_each_group_and_backend() -> None:
    one, two = Recorder(), Recorder()
    context = ForwardContext({ALL: one_pass(), 9: one_pass()})
    first = context.plan(one, 9)
    assert context.plan(one, 9) is first is context.all_tokens.plan(one, 9)
    assert context.plan(one) is not first
    assert context.plan(two, 9) is not first
    assert context.plan(one, 5) is context.plan(one, ALL)  # a window group without a group of its own
    assert (one.plans, two.plans) == (2, 1)


def test_each_layer_has_its_own_sizes_state_and_table() -> None:
    """Two head sizes, a window, tables shared by equal specs, a backend for each pair of head counts."""
    wide = replace(SPEC, num_heads=4, num_kv_heads=4, head_dim=32, rotary=rotary(32, 0.5), window=7)
    specs = [SPEC, wide, replace(SPEC, rotary=rotary(20, theta=9.0)), SPEC]
    layers = tuple(LayerSpec(mixer, MLPSpec(30)) for mixer in specs)
    asked: list[tuple[int, int]] = []

    def attention(heads: int, kv_heads: int) -> TritonAttention:
        asked.append((heads, kv_heads))
        return TritonAttention(heads, kv_heads, "cpu")

    config = DecoderConfig("Mixed", 50, HIDDEN, layers, 1e-5, 64)
    decoder = filled(Decoder(config, builder(attention)))
    assert asked == [(6, 2), (4, 4)]
    mixers = [layer.mixer for layer in decoder.layers]
    assert mixers[0].cos_sin is mixers[3].cos_sin
    assert [m.cos_sin.shape[1] for m in mixers] == [20, 16, 20, 20]
    assert not torch.equal(mixers[0].cos_sin, mixers[2].cos_sin)
    small, large = Paged((2, 16, 20), torch.float32), Paged((4, 16, 32), torch.float32, 7)
    assert decoder.state_specs() == [(small,) * 2, (large,) * 2, (small,) * 2, (small,) * 2]
    hidden, _ = decoder(torch.arange(TOKENS, dtype=torch.int32), ForwardContext.of(one_pass()), state_of(decoder))
    assert hidden.isfinite().all()


def test_layers_with_shared_kv_own_no_state() -> None:
    """And read the pages of the layer that wrote them."""
    attention = QuerySpec(6, 2, 20, rotary(20), window=8, pages=9).build(builder())
    assert list(leaves(attention.state_specs())) == []
    assert list(attention.qkv.projections) == ["q"]
    assert attention.spec.window_group == 9


@pytest.mark.parametrize("change", [{"num_heads": 0}, {"num_kv_heads": 4}, {"head_dim": 3}])
def test_invalid_attention_sizes_raise(change: dict[str, int]) -> None:
    from unisono.types import CheckpointError

    with pytest.raises(CheckpointError, match=next(iter(change))):
        replace(SPEC, **change)


def test_other_modules_fit_the_layer() -> None:
    """A mixer and a feed-forward that no bundled family has: the layer asks for nothing beyond the protocols."""

    class Average(torch.nn.Module):
        def forward(self, x: torch.Tensor, context: ForwardContext, state: Any) -> torch.Tensor:
            return x.cumsum(0) / torch.arange(1, len(x) + 1)[:, None]

        def project(self, y: torch.Tensor, residual: torch.Tensor, norm: Any) -> tuple[torch.Tensor, torch.Tensor]:
            return residual + y, residual + y if norm is None else norm(residual + y)

        def state_specs(self) -> Any:
            return ()

    spec = SimpleNamespace(build=lambda builder: Average())
    layer = filled(LayerSpec(spec, MLPSpec(30)).build(builder()))
    x = torch.randn(TOKENS, HIDDEN)
    stream = layer(layer.begin(x), ForwardContext.of(one_pass()), ())
    mixed = x + layer.mixer_norm(x).cumsum(0) / torch.arange(1, TOKENS + 1)[:, None]
    expected = mixed + layer.feed_forward.down(layer.feed_forward(layer.feed_forward_norm(mixed)))
    torch.testing.assert_close(stream.x, expected, atol=1e-5, rtol=0)
