"""Number of kernels that a round launches per layer; fused ones have the bits of those they replace."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.models.count_launches import DENSE, HYBRID, PROMPT, of_round, without_wishes
from tests.models.harness import Session, load, whole
from tests.models.make import make_checkpoint
from tests.models.quantised import LAYOUTS, quantise
from unisono.layers import activations

EXPERTS = {"moe_intermediate_size": 128, "num_experts": 5, "num_experts_per_tok": 2}


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Small checkpoints by kind, two layers each but for the hybrid's four."""
    base = tmp_path_factory.mktemp("models")
    made = {
        "dense": make_checkpoint(base / "dense", "qwen3", num_hidden_layers=2, **DENSE),
        "heads of 128": make_checkpoint(base / "wide", "qwen3", num_hidden_layers=2, **DENSE | {"head_dim": 128}),
        "experts": make_checkpoint(base / "experts", "qwen3_moe", num_hidden_layers=2, **DENSE, **EXPERTS),
        "hybrid": make_checkpoint(base / "hybrid", "qwen3_5_moe_text", **HYBRID),
    }
    for name in ("fp8-blocks", "compressed-fp8-channel"):
        made[name] = base / name
        quantise(made["dense"], made[name], LAYOUTS[name])
    return made


CASES = [
    ("dense", "fp8"), ("fp8-blocks", None), ("compressed-fp8-channel", None), ("experts", "fp8"), ("hybrid", "fp8"),
    ("heads of 128", "fp8"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "quantization"), CASES)
def test_fused_quantisation_equals_a_separate_launch_bitwise(kind, quantization, paths, monkeypatch) -> None:
    """Prompts, chunks and rounds; in fp32 and bf16."""
    for dtype in (torch.float32, torch.bfloat16):
        results = []
        for fused in (True, False):
            with monkeypatch.context() as patch:
                if not fused:
                    without_wishes(patch.setattr)
                decoder = load(paths[kind], quantization=quantization, dtype=dtype)
                session = Session(decoder, 2, 64)
                parts = [*whole(decoder, [PROMPT]), *session.extend({0: PROMPT[:17], 1: PROMPT[:5]}).values()]
                results.append([*parts, *session.round(3, {0: PROMPT[17:20], 1: PROMPT[5:6]}).values()])
        assert all(map(torch.equal, *results))


@pytest.mark.parametrize(
    ("kind", "quantization", "quantisations", "saved"),
    [
        # of a layer: qkv, gate+up, down asked and were given; o quantises attention's output itself
        ("dense", "fp8", 2, 6),
        # a head is a group of columns that share a scale: attention quantises its output
        ("heads of 128", "fp8", 0, 8),
        # in this layout some projections are plain
        ("compressed-fp8-channel", None, 2, 4),
        # qkv and experts' gate+up; down's inputs are made pair by pair
        ("experts", "fp8", 4, 4),
        # of 4 layers: in_proj or qkv, o after a gate or a gated norm, experts; the shared expert rides along
        ("hybrid", "fp8", 4, 12),
    ],
)
def test_quantising_takes_no_launches_of_its_own(kind, quantization, quantisations, saved, paths, monkeypatch) -> None:
    found = of_round(load(paths[kind], quantization=quantization))
    assert found["_quantize_kernel"] == quantisations
    without_wishes(monkeypatch.setattr)
    before = of_round(load(paths[kind], quantization=quantization))
    assert before.total() - found.total() == saved
    assert before["_quantize_kernel"] == quantisations + saved


def test_the_final_norm_and_plain_readers_get_plain_rows(paths) -> None:
    decoder = load(paths["hybrid"], quantization="fp8")
    assert decoder.norm.input_format is None
    for layer in decoder.layers:
        assert layer.feed_forward_norm.input_format.keep, "the router reads plain rows"
        assert layer.mixer_norm.input_format.keep == (getattr(layer.mixer, "gates", None) is not None)
    quantised = activations.Quantised(torch.empty(4, 8), torch.empty(1, 4), 128, 3, torch.float32)
    with pytest.raises(ValueError, match="read plain rows"):
        activations.plain(quantised)
