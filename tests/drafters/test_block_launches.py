"""Launches of a block drafter with e4m3 weights."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.drafters.make_blocks import make_dflash
from tests.drafters.watch import BlockWatch
from tests.engine.helpers import engine, prompts, tokens
from tests.engine.matrix import config_of
from tests.kernels.launches import launches
from tests.models.count_launches import DENSE
from tests.models.make import make_checkpoint
from unisono.attention.base import AttentionInputs
from unisono.attention.context import ForwardContext
from unisono.drafters.block.model import WholeBlock
from unisono.types import SamplingParams, SpeculativeConfig

K, LAYERS = 5, 2
SIZES = DENSE | {"head_dim": 128}
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


def launches_of_block(llm: Any) -> Counter[str]:
    """Launches of the layers over one request's block."""
    drafter, worker = llm.engine.worker.drafter, llm.engine.worker
    each = torch.arange(1 + K, dtype=torch.int32, device=worker.slots.length.device)
    inputs = AttentionInputs(each[:1], each, each, each[-1:] + 1, worker.slots.page_table, 1 + K)
    return launches(lambda: drafter.module(each, ForwardContext.of(inputs), worker.store.view("drafter")["kv"]))


def test_attention_quantises_a_blocks_outputs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No launch of its own, and the logits of a separate one."""
    target = make_checkpoint(tmp_path / "target", "qwen3", tokenizer=False, **SIZES)
    head = make_dflash(tmp_path / "head", config_of(target), (0, 1), **SIZES)
    spec = SpeculativeConfig("dflash", str(head.path), K, {"draft_quantization": "fp8"})
    drafted: list[list[Any]] = []
    found = []
    for fused in (True, False):
        if not fused:
            monkeypatch.setattr(WholeBlock, "quantises", lambda *args: False)
        with engine(target, speculative=spec, enforce_eager=True) as llm:
            found.append(launches_of_block(llm))
            watch = BlockWatch(llm)
            tokens(llm, prompts(3, 250), GREEDY)
            drafted.append(watch.rounds)
    separate, own = "_quantize_kernel", found[0]
    assert (own[separate], found[1][separate]) == (0, LAYERS)
    assert own.total() == found[1].total() - LAYERS
    for one, other in zip(*drafted, strict=True):
        assert one[:3] == other[:3]
        assert torch.equal(one[3], other[3])
