"""What a rank loads: its part of every tensor, and no more bytes than that; numbers of ranks that do not fit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed.parts_ import loaded
from tests.models.make import make_checkpoint
from tests.models.reads import counted_reads
from unisono.config import EngineConfig
from unisono.distributed.gather import Ranks
from unisono.engine.engine import Engine
from unisono.kernels.comm.gather_fused import ordered_sum
from unisono.layers.formats.base import part_of
from unisono.types import ConfigError

FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3": {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2},
    "qwen3_moe": {"num_experts": 12, "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 64},
    "qwen3_next": {},
    "qwen3_5_moe_text": {},
    "gpt_oss": {"num_local_experts": 4, "num_attention_heads": 8},
}


@pytest.mark.parametrize("experts", [False, True])
@pytest.mark.parametrize("format", ["auto", "dummy"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_rank_holds_its_part(family: str, format: Any, experts: bool, tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, family, **FAMILIES[family])
    whole = dict(loaded(path, Ranks(), load_format=format).named_parameters())
    for index, count in ((0, 2), (1, 2)) if experts else ((0, 2), (1, 2), (0, 4), (3, 4)):
        model = loaded(path, Ranks(index, count, whole_experts=experts), load_format=format)
        divided = 0
        for name, parameter in model.named_parameters():
            cut = part_of(parameter)
            divided += cut is not None
            expected = whole[name] if cut is None else cut.of(whole[name])
            assert torch.equal(parameter, expected), name
        assert divided > 10
        assert set(model.builder.undivided) <= {"lm_head"}  # of an odd vocabulary


@pytest.mark.parametrize("format", ["auto", "dummy"])
@pytest.mark.parametrize(("family", "quantised"), [("qwen3", None), ("qwen3", "fp8"), ("qwen3_next", None)])
def test_ordered_sums_divide_inputs(family: str, format: Any, quantised: str | None, tmp_path: Path) -> None:
    """Products after attention, recurrences and of the MLP hold columns, and their terms add up to the product."""
    sizes = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 128} if quantised else {}
    path = make_checkpoint(tmp_path, family, **{**FAMILIES[family], **sizes})
    options = {"load_format": format, "quantised": quantised}
    whole = dict(loaded(path, Ranks(), **options).named_modules())
    parts = [dict(loaded(path, Ranks(i, 2, ordered=True), **options).named_modules()) for i in range(2)]
    summed = [name for name, module in parts[0].items() if getattr(module, "sums", False)]
    assert {name.rpartition(".")[2] for name in summed} == ({"o", "down"} if family == "qwen3" else {"o"})
    for name in summed:
        layer = whole[name]
        x = torch.randn(3, layer.inputs)
        expected, terms = layer(x), [part[name]._part(x.chunk(2, 1)[i]) for i, part in enumerate(parts)]
        found = ordered_sum(torch.cat(terms, 1), 2)
        assert torch.allclose(found, expected, atol=0.05 if quantised else 1e-5, rtol=0.05 if quantised else 1e-5)
        assert sum(part[name].weight.numel() for part in parts) == layer.weight.numel()


@pytest.mark.parametrize("format", ["auto", "dummy"])
def test_a_tied_head_is_a_part_of_the_embedding(format: Any, tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, "qwen3", tie_word_embeddings=True, vocab_size=270, **FAMILIES["qwen3"])
    whole = loaded(path, Ranks(), load_format=format).embed.weight
    for index in range(2):
        model = loaded(path, Ranks(index, 2), load_format=format)
        assert torch.equal(model.embed.weight, whole)
        assert torch.equal(model.lm_head.weight, whole.chunk(2)[index])


@pytest.mark.parametrize("family", ["qwen3", "qwen3_next"])
def test_each_rank_reads_only_its_share_of_the_weights(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = make_checkpoint(tmp_path, family, **FAMILIES[family])
    bytes_read = counted_reads(monkeypatch)
    model = loaded(path, Ranks(1, 2))
    assert bytes_read[0] == sum(p.nbytes for p in model.parameters())


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ({"tensor_parallel_size": 2, "tp_reduce": "ring"}, "--tp-reduce 'ring' is unknown; choose one of gather, o"),
        ({"tensor_parallel_size": 2, "tp_reduce": "ordered", "enable_lora": True}, "with --enable-lora: adapters read"),
        (
            {"tensor_parallel_size": 3},
            "8 query heads over 2 KV heads.*divided among 3 ranks: give 1, 2, 4 or 8",
        ),
        ({"tensor_parallel_size": 2, "enable_expert_parallel": True}, "a .* has no experts; leave it out"),
        (
            {"model": "tiny-hybrid", "tensor_parallel_size": 8},
            "4 value heads over 2 key heads, which cannot be divided among 8 ranks: give 1, 2 or 4",
        ),
        (
            {"model": "tiny-hybrid", "tensor_parallel_size": 3, "enable_expert_parallel": True},
            "cannot be divided among 3 ranks",
        ),
    ],
)
def test_indivisible_sizes_raise_before_processes_start(
    flags: dict[str, Any], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("unisono.distributed.processes.RankProcess", None)
    with pytest.raises(ConfigError, match=says):
        Engine(EngineConfig(**flags))


def test_a_recurrent_layer_is_divided_by_heads(tmp_path: Path) -> None:
    """Queries, keys and values of one tensor are divided each by itself; so are the convolution's channels."""
    path = make_checkpoint(tmp_path, "qwen3_5_moe_text")
    whole, mine = (loaded(path, ranks).layers[0].mixer for ranks in (Ranks(), Ranks(1, 2)))
    keys, values, heads = 2 * 16, 4 * 32, 4
    qkv = [(keys // 2, keys), (keys + keys // 2, 2 * keys), (2 * keys + values // 2, 2 * keys + values)]
    z = 2 * keys + values
    after = [
        (z + values // 2, z + values),
        *((z + values + n - heads // 2, z + values + n) for n in (heads, 2 * heads)),
    ]
    rows = torch.cat([torch.arange(*run) for run in (*qkv, *after)])
    assert torch.equal(mine.in_proj.weight, whole.in_proj.weight[rows])
    assert torch.equal(mine.conv.weight, whole.conv.weight[rows[: keys + values // 2]])
    assert torch.equal(mine.A_log, whole.A_log[heads // 2 :])


def test_ranks_share_key_heads_if_there_are_more_ranks(tmp_path: Path) -> None:
    """Four ranks over two key heads: each has a value head, and the key head that it reads."""
    path = make_checkpoint(tmp_path, "qwen3_5_moe_text")
    whole = loaded(path, Ranks()).layers[0].mixer
    for index in range(4):
        mine = loaded(path, Ranks(index, 4)).layers[0].mixer
        assert (mine.spec.num_key_heads, mine.spec.num_value_heads) == (1, 1)
        key, keys, value = index // 2 * 16, 2 * 16, 4 * 16 + index * 32
        rows = torch.cat([torch.arange(at, at + n) for at, n in ((key, 16), (keys + key, 16), (value, 32))])
        assert torch.equal(mine.conv.weight, whole.conv.weight[rows])
