"""The fused forward of each block, over paged and recurrent state, against its plain ``reference`` in float64."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.models.harness import Session
from tests.models.one_block import HIDDEN, SPEC, TOKENS, builder, filled, one_pass, rotary, state_of
from unisono.attention.context import ForwardContext
from unisono.kernels.moe.scored_router import RouterScores
from unisono.kernels.norm.activation import ExpertGate
from unisono.kv.recurrent_pass import RecurrentPass
from unisono.kv.specs import Recurrent
from unisono.kv.store import RecurrentView
from unisono.layers.expert_stacks import RELU2_EXPERTS, ExpertKind
from unisono.models.blocks.beside import BesideSpec
from unisono.models.blocks.decoder import Decoder
from unisono.models.blocks.experts import ExpertsSpec
from unisono.models.blocks.gated_delta import GatedDeltaSpec
from unisono.models.blocks.kimi_delta import KimiDeltaSpec
from unisono.models.blocks.latent_attention import LatentSpec
from unisono.models.blocks.latent_experts import LatentExpertsSpec
from unisono.models.blocks.layers import POST, SANDWICH, LayerSpec, MLPSpec, NormOrder
from unisono.models.blocks.mamba2 import Mamba2Spec
from unisono.models.blocks.one_block import OneBlockSpec
from unisono.models.blocks.plain_mlp import PlainMLPSpec
from unisono.models.blocks.short_conv import ShortConvSpec
from unisono.models.config import DecoderConfig

GELU = "gelu_pytorch_tanh"
CLAMPED = ExpertKind(ExpertGate(1.7, 1.0), bias=True)
GELU_EXPERTS = ExpertsSpec(7, 3, 24, activation=GELU, router_factors=True)
EXPERTS = ExpertsSpec(num_experts=7, top_k=3, intermediate_size=24, shared_intermediate_size=24, shared_gate=True)
CLAMPED = ExpertKind(ExpertGate(1.7, 1.0), bias=True)
DELTA = GatedDeltaSpec(2, 4, 16, 16)
LATENT = LatentSpec(5, 36, 14, 8, 18, rotary(8), scale=0.3, query_rank=28, bias=True)
GROUPED = RouterScores(correction=True, groups=3, top_groups=2, scale=2.5)
MIXERS: dict[str, Any] = {
    "attention": SPEC,
    "attention, partial rotary": replace(SPEC, rotary=rotary(20, 0.4)),
    "attention, output gate": replace(SPEC, output_gate=True),
    "attention, head norms": replace(SPEC, qk_norm=True),
    "attention, biases": replace(SPEC, qkv_bias=True),
    "attention, window, sinks, soft cap": replace(SPEC, window=9, sink=True, soft_cap=2.0, scale=0.5),
    "attention, values normed": replace(SPEC, v_norm=True),
    "attention, values from keys": replace(SPEC, qk_norm=True, v_norm=True, k_is_v=True),
    "attention, norms over all heads": replace(SPEC, joint_qk_norm=True, num_kv_heads=2),
    "gated delta": DELTA,
    "kimi delta": KimiDeltaSpec(3, 16, 3),
    "mamba2": Mamba2Spec(2, 6, 32, 16, step_limits=(0.3, 1.0)),
    "mamba2, biases of products": Mamba2Spec(1, 2, 16, 16, 2, conv_bias=False, proj_bias=True),
    "short convolution": ShortConvSpec(HIDDEN, 3),
    "latent attention": LATENT,
    "latent attention, plain queries in halves": replace(LATENT, query_rank=0, bias=False, interleaved=False),
}
FEED_FORWARDS: dict[str, Any] = {
    "mlp": MLPSpec(30, bias=True),
    "mlp, GELU": MLPSpec(30, activation=GELU),
    "experts, shared rides": EXPERTS,
    "experts, shared of another size": replace(EXPERTS, shared_intermediate_size=33),
    "experts, shared without gate": replace(EXPERTS, shared_gate=False),
    "experts, none shared": replace(EXPERTS, shared_intermediate_size=0, shared_gate=False, normalize=False),
    "experts, clamped with biases": ExpertsSpec(7, 3, 24, router_bias=True, kind=CLAMPED),
    "experts, GELU with factors": GELU_EXPERTS,
    "experts, scored in groups": ExpertsSpec(9, 3, 24, shared_intermediate_size=24, scores=GROUPED),
    "experts, corrected softmax": ExpertsSpec(7, 3, 24, normalize=False, scores=RouterScores(False, True, scale=1.5)),
    "experts, no gate": ExpertsSpec(7, 3, 24, 33, activation="relu2", kind=RELU2_EXPERTS, shared_bias=True),
    "experts in a latent space": LatentExpertsSpec(
        ExpertsSpec(7, 3, 24, activation="relu2", kind=RELU2_EXPERTS), PlainMLPSpec(33), 16, bias=True
    ),
    "mlp beside experts": BesideSpec(MLPSpec(30, activation=GELU), GELU_EXPERTS),
}


def inputs(seed: int = 1) -> torch.Tensor:
    return torch.randn(TOKENS, HIDDEN, generator=torch.Generator().manual_seed(seed))


def context_of(state: Any) -> ForwardContext:
    """One prompt pass, and the start of a recurrence if the state is one."""
    i = one_pass()
    context = ForwardContext.of(i)
    if isinstance(state, RecurrentView):
        seen = torch.zeros(1, dtype=torch.int32)
        context.recurrent = RecurrentPass.of(i.slots, i.positions, i.kv_len, i.query_start, seen)
    return context


def fresh_state(block: Any) -> Any:
    specs = block.state_specs()
    if not isinstance(specs, Recurrent):
        return state_of(block)
    return RecurrentView(
        {name: torch.zeros(1, *shape, dtype=dtype) for name, (shape, dtype) in specs.snapshot.items()},
        {name: torch.zeros(1, each.ring(1), *each.shape, dtype=each.dtype) for name, each in specs.inputs.items()},
    )


def assert_equal(got: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(got.double(), expected, atol=3e-5, rtol=1e-4)


@torch.no_grad()
@pytest.mark.parametrize("name", MIXERS)
def test_a_mixer_is_its_reference(name: str) -> None:
    block, x, residual = filled(MIXERS[name].build(builder())), inputs(), inputs(2)
    state = fresh_state(block)
    got, _ = block.project(block(x, context_of(state), state), residual, None)
    assert_equal(got, block.reference(x.double()) + residual.double())


@torch.no_grad()
@pytest.mark.parametrize("name", FEED_FORWARDS)
def test_a_feed_forward_is_its_reference(name: str) -> None:
    block, x, residual = filled(FEED_FORWARDS[name].build(builder())), inputs(), inputs(2)
    norms = getattr(block, "norms", lambda rows: rows)  # of a block that takes the residual sum
    got, _ = block.project(block(norms(x)), residual, None)
    assert_equal(got, block.reference(x.double()) + residual.double())


@torch.no_grad()
@pytest.mark.parametrize("mixer", ["attention, head norms", "gated delta"])
@pytest.mark.parametrize("feed_forward", ["mlp", "experts, shared rides"])
def test_a_layer_is_its_reference(mixer: str, feed_forward: str) -> None:
    layer, x = filled(LayerSpec(MIXERS[mixer], FEED_FORWARDS[feed_forward]).build(builder())), inputs()
    state = fresh_state(layer)
    assert_equal(layer(layer.begin(x), context_of(state), state).x, layer.reference(x.double()))


@torch.no_grad()
@pytest.mark.parametrize("parts", [{"mixer": MIXERS["mamba2"]}, {"feed_forward": FEED_FORWARDS["experts, no gate"]}])
def test_a_layer_of_one_block_is_its_reference(parts: dict[str, Any]) -> None:
    layer, x = filled(OneBlockSpec.of(**parts).build(builder())), inputs()
    state = fresh_state(layer) if "mixer" in parts else ()
    assert_equal(layer(layer.begin(x), context_of(state), state).x, layer.reference(x.double()))


@torch.no_grad()
@pytest.mark.parametrize(("feed_forward", "order"), [("mlp, GELU", SANDWICH), ("mlp beside experts", POST)])
def test_a_scaled_layer_with_norms_after_its_blocks_is_its_reference(feed_forward: str, order: NormOrder) -> None:
    spec = LayerSpec(MIXERS["attention, values normed"], FEED_FORWARDS[feed_forward], SANDWICH, order, scaled=True)
    layer, x = filled(spec.build(builder())), inputs()
    state = fresh_state(layer)
    assert_equal(layer(layer.begin(x), context_of(state), state).x, layer.reference(x.double()))


@torch.no_grad()
def test_a_decoder_is_its_reference() -> None:
    """Two texts in prompt passes, then in rounds: the logits of each are those of its plain forward."""
    layers = [LayerSpec(SPEC, FEED_FORWARDS["mlp"]), LayerSpec(DELTA, EXPERTS), LayerSpec(SPEC, FEED_FORWARDS["mlp"])]
    decoder = filled(Decoder(DecoderConfig("Mixed", 50, HIDDEN, tuple(layers), 1e-5, 64, logit_cap=3.0), builder()))
    texts = [torch.randint(0, 50, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in (23, 37)]
    session = Session(decoder, len(texts), 64)
    pieces: list[list[torch.Tensor]] = [[], []]
    for start, width in ((0, 11), (11, 8), *((at, 4) for at in range(19, 37, 4))):
        chunks = {i: text[start : start + width] for i, text in enumerate(texts) if text[start:]}
        for i, logits in (session.round(4, chunks) if width == 4 else session.extend(chunks)).items():
            pieces[i].append(logits)
    for text, found in zip(texts, pieces, strict=True):
        assert_equal(torch.cat(found), decoder.reference(torch.tensor(text)))
