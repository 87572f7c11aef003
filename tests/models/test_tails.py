"""Layers whose part after the mixer is one op: which they are, that nothing is computed twice, and the same bits."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.helpers import engine
from tests.models.count_launches import DENSE
from tests.models.harness import Session, load
from tests.models.make import make_checkpoint
from tests.ops import Ops
from unisono.models.blocks import layer_tails as tails
from unisono.models.blocks.decoder import Decoder
from unisono.models.blocks.layer_tails import fuse_tails

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},  # the next projection has a bias
    "qwen3_5_text": {},  # recurrent layers, norms with fp32 weights
    "qwen3_moe": {},
    "qwen3, fp8": DENSE,  # quantised layers have separate ops
}


@pytest.fixture(scope="module", params=FAMILIES)
def decoder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    family, _, quantization = request.param.partition(", ")
    path = make_checkpoint(tmp_path_factory.mktemp(family), family, tokenizer=False, **FAMILIES[request.param])
    return load(path, quantization=quantization or None)


def passes(decoder: Decoder) -> tuple[list[torch.Tensor], Counter[str], Counter[str]]:
    """Logits of a long prompt, a short one and a round; the ops of the first and of the last."""
    session, prompt = Session(decoder, 2, 64), [7 * i % 251 for i in range(40)]
    with Ops() as long:
        logits = [session.extend({0: prompt[:37]})[0]]
    logits.append(session.extend({1: prompt[:9]})[1])
    with Ops() as round_:
        logits += session.round(2, {0: prompt[:2], 1: prompt[:1]}, padding=1).values()
    return logits, long.ours, round_.ours


def of_gates(decoder: Decoder) -> int:
    """Layers that project their gates apart."""
    return sum(getattr(layer.mixer, "gates", None) is not None for layer in decoder.layers)


def test_bits_are_those_of_separate_ops(decoder: Decoder) -> None:
    layers, fused, possible = fuse_tails([])
    assert (layers, fused, possible) == (0, 0, 0)
    for layer in decoder.layers:
        layer.tail = None
    apart, long, round_ = passes(decoder)
    assert "layer_tail" not in round_
    layers, fused, possible = fuse_tails(decoder.modules())
    assert layers == len(decoder.layers)
    separate = any(op == "route" or op.startswith("fp8_") for op in round_)
    assert fused == possible == (0 if separate else layers)
    together, long_after, round_after = passes(decoder)
    assert all(map(torch.equal, apart, together))
    assert long_after == long, "long passes have products of their own"
    if fused:
        assert round_after["layer_tail"] == layers
        assert not {"linear_norm", "silu_mul"} & set(round_after)
        assert round_after["linear"] == 2 + of_gates(decoder), (
            "the first layer's input projection, the LM head and plain gates"
        )


def test_the_environment_turns_them_off(decoder: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNISONO_STAYING_LAUNCHES", "0")
    assert fuse_tails(decoder.modules())[1:] == (0, 0)


def test_passes_with_adapters_go_on_without(decoder: Decoder) -> None:
    class Adapter:
        def plan(self, rows: int) -> object:
            return rows

    fuse_tails(decoder.modules())
    tail = decoder.layers[0].tail
    if tail is not None:
        rows = torch.zeros(2, decoder.config.hidden_size)
        assert replace(tail, adapters=(Adapter(),))(rows, rows) is None


def test_the_last_layer_of_a_prompt_has_few_rows(decoder: Decoder) -> None:
    fused = fuse_tails(decoder.modules())[1]
    with Ops() as ops:
        Session(decoder, 1, 64).extend({0: range(40)}, last_tokens=True)
    assert ops.ours["layer_tail"] == min(fused, 1)


def test_the_last_of_many_layers_has_none(decoder: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would be the only one of its kernels; the bits are the same."""
    _, fused, _ = fuse_tails(decoder.modules())
    before, *_ = passes(decoder)
    monkeypatch.setattr(tails, "MANY", len(decoder.layers) - 1)
    layers, without_last, possible = fuse_tails(decoder.modules())
    assert without_last == possible == max(fused - 1, 0)
    assert layers == len(decoder.layers)
    assert decoder.layers[-1].tail is None
    after, _, round_ = passes(decoder)
    assert all(map(torch.equal, before, after))
    assert round_["layer_tail"] == without_last


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ({}, "2 of 2 layers"),
        ({"enable_lora": True}, "2 of 2 layers"),
        ({"quantization": "fp8"}, "0 of 2 layers"),
    ],
    ids=["plain", "adapters", "fp8"],
)
def test_engine_reports_fused_layer_tails(flags: dict[str, Any], says: str, tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, "qwen3", num_hidden_layers=2, **DENSE)
    with engine(path, enforce_eager=True, **flags) as llm:
        [decision] = [d for d in llm.engine.config.decisions if d.name == "what follows a mixer"]
    assert decision.value.startswith(says)
