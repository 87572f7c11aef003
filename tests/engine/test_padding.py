"""Passes on padding rows, as captures and warm-ups run them, change nothing that a request can see."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.engine.helpers import tensors_of
from tests.engine.matrix import DRAFTERS, TREE_DRAFTERS, TREES, Checkpoints, drafting, drafting_tree
from unisono.engine.startup.warmup import warmup_passes
from unisono.entrypoints.llm import LLM
from unisono.graphs import Buffers
from unisono.kv.specs import PADDING_PAGE


@pytest.mark.parametrize("method", list(DRAFTERS))
def test_padding_changes_nothing(method: str, checkpoints: dict[str, Path], tmp_path: Path) -> None:
    made: Callable[..., Checkpoints] = DRAFTERS[method]
    check(drafting(method, made(checkpoints, tmp_path), 3, enforce_eager=True))


@pytest.mark.parametrize("method", ["ngram", "standalone", "eagle3"])
def test_padding_changes_nothing_in_trees(method: str, checkpoints: dict[str, Path], tmp_path: Path) -> None:
    check(drafting_tree(method, TREE_DRAFTERS[method](checkpoints, tmp_path), TREES["uneven"], enforce_eager=True))


@torch.inference_mode()
def check(made: LLM) -> None:
    with made as llm:
        runner, worker = llm.engine.runner, llm.engine.worker
        llm.generate([[1, 2, 3] * 8, [4, 5] * 9])  # so that state is not all zeros
        state = tensors_of(worker.drafter) | {f"slots.{n}": t for n, t in tensors_of(worker.slots).items()}
        pages = [t for layer in worker.store.view("target").tree for t in layer]
        before = {name: tensor.clone() for name, tensor in state.items()}
        kv = [tensor.clone() for tensor in pages]
        for program, shape in warmup_passes(runner.buckets(), (runner.features,)):
            program.run(Buffers(program.schema, shape, runner.config.device))
        for tensor, old in zip(pages, kv, strict=True):
            assert PADDING_PAGE == 0
            assert torch.equal(tensor[1:], old[1:]), "a page that requests own was written"
        slots = worker.slots.padding + 1
        for name, tensor in state.items():
            # All but the padding slot, or the padding page, which is the second dimension of KV over all layers.
            rows = (slice(0, -1),) if tensor.shape[:1] == (slots,) else (slice(1, None),)
            rows = (slice(None), slice(1, None)) if tensor.dim() >= 5 else rows
            assert torch.equal(tensor[rows], before[name][rows]), name
