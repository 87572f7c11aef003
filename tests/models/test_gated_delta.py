"""A hybrid with Gated DeltaNet layers: the reference's tokens, and the same bytes in every way and with drafts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.engine.helpers import draw_drafts, lazy_engine, mixed_params, prompts, tokens
from tests.engine.matrix import TREES
from tests.models.gated_model import ARCHITECTURE, VOCAB, make_gated, next_token, weights_of
from unisono.config import catalog
from unisono.models.blocks.gated_delta import GatedDeltaSpec
from unisono.types import CheckpointError, SamplingParams, SpeculativeConfig

PROMPTS = [p if i % 2 else p[: 3 + i] * 8 for i, p in enumerate(prompts(8, VOCAB, low=3, high=70, seed=8))]
PARAMS = mixed_params(8, max_tokens=36)
FLAGS: dict[str, Any] = {"max_model_len": 256, "max_num_seqs": 6, "dtype": "float32"}
WAYS = {
    "batched": {},
    "chunks of 16": {"max_num_batched_tokens": 16},
    "chunks of 23, eager": {"max_num_batched_tokens": 23, "enforce_eager": True},
    "scarce pages": {"num_pages": 20},
}


@pytest.fixture(scope="module", autouse=True)
def listed() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(catalog.models.entries, ARCHITECTURE, "tests.models.gated_model:GATED")  # type: ignore[arg-type]
        yield


@pytest.fixture(scope="module")
def gated(tmp_path_factory: pytest.TempPathFactory, listed: Any) -> Path:
    return make_gated(tmp_path_factory.mktemp("gated"))


@pytest.fixture(scope="module")
def plain(gated: Path) -> list[list[int]]:
    """Each request by itself, eagerly, its prompt in one pass."""
    with lazy_engine(gated, **{**FLAGS, "max_num_seqs": 1}, enforce_eager=True) as llm:
        return [tokens(llm, [p], [q])[0] for p, q in zip(PROMPTS, PARAMS, strict=True)]


def test_tokens_are_the_references(gated: Path) -> None:
    weights, params = weights_of(gated), SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    with lazy_engine(gated, **FLAGS) as llm:
        for prompt, answer in zip(PROMPTS[:3], tokens(llm, PROMPTS[:3], params), strict=True):
            ids = list(prompt)
            for token in answer:
                assert token == next_token(weights, ids)
                ids.append(token)


@pytest.mark.parametrize("way", WAYS)
def test_same_bytes(way: str, gated: Path, plain: list[list[int]]) -> None:
    with lazy_engine(gated, **{**FLAGS, **WAYS[way]}) as llm:
        assert tokens(llm, PROMPTS, PARAMS) == plain
        assert tokens(llm, PROMPTS, PARAMS) == plain, "after prefix hits"
        assert way == "scarce pages" or llm.engine.scheduler.prefix_hits > 0
        llm.engine.check_integrity()


def test_same_bytes_with_drafts(gated: Path, plain: list[list[int]], monkeypatch: pytest.MonkeyPatch) -> None:
    """The number of drafts changes at random, none included."""
    draw_drafts(monkeypatch)
    spec = SpeculativeConfig("ngram", num_speculative_tokens=4)
    with lazy_engine(gated, **FLAGS, speculative=spec, adaptive=True) as llm:
        assert tokens(llm, PROMPTS, PARAMS) == plain
        assert tokens(llm, PROMPTS, PARAMS) == plain, "after prefix hits"
        llm.engine.check_integrity()


def test_same_bytes_with_trees(gated: Path, plain: list[list[int]]) -> None:
    spec = SpeculativeConfig.parse({"method": "ngram", **TREES["binary"]})
    with lazy_engine(gated, **FLAGS, speculative=spec) as llm:
        assert tokens(llm, PROMPTS, PARAMS) == plain
        assert tokens(llm, PROMPTS, PARAMS) == plain, "after prefix hits"


def test_accepted_drafts_cross_chunks(gated: Path) -> None:
    """A text that repeats itself, so that drafts are accepted across many chunk ends."""
    params = SamplingParams(temperature=0, max_tokens=120, ignore_eos=True, allowed_token_ids=(7, 8))
    with lazy_engine(gated, **FLAGS) as llm:
        expected = tokens(llm, [[7, 8] * 6], params)
    for k in (1, 3, 7):
        with lazy_engine(gated, **FLAGS, speculative=SpeculativeConfig("ngram", num_speculative_tokens=k)) as llm:
            assert tokens(llm, [[7, 8] * 6], params) == expected
            assert llm.engine.counters.accepted_tokens > 20


def test_conversation_resumes_from_its_snapshot(gated: Path) -> None:
    """Drafts move the snapshot of a request's last round on, so both hits and text are those without drafts."""
    found = {}
    for k in (0, 4):
        spec = SpeculativeConfig("ngram", num_speculative_tokens=k) if k else None
        with lazy_engine(gated, **FLAGS, speculative=spec) as llm:
            found[k] = []
            for i, prompt in enumerate(prompts(8, VOCAB, low=20, high=60, seed=3)):
                params = SamplingParams(temperature=0, max_tokens=20 + i, ignore_eos=True, allowed_token_ids=(7, 8))
                (first,) = llm.generate([prompt], params)
                said = [*prompt, *first.outputs[0].token_ids]
                (second,) = llm.generate([[*said, 5, 6]], SamplingParams(temperature=0, max_tokens=20, ignore_eos=True))
                assert second.num_cached_tokens == (len(said) - 1) // 16 * 16
                found[k].append((said, second.outputs[0].token_ids))
    assert found[0] == found[4]


@pytest.mark.parametrize(
    ("sizes", "name"),
    [
        ((0, 4, 16, 16), "linear_num_key_heads=0"),
        ((3, 4, 16, 16), "linear_num_value_heads=4"),
        ((2, 4, 96, 16), "linear_key_head_dim=96"),
        ((2, 4, 16, 256), "linear_value_head_dim=256"),
        ((2, 4, 16, 16, 1), "linear_conv_kernel_dim=1"),
    ],
)
def test_unsupported_gated_delta_sizes_raise(sizes: tuple[int, ...], name: str) -> None:
    with pytest.raises(CheckpointError, match=name):
        GatedDeltaSpec(*sizes)


def test_drafts_need_little_memory() -> None:
    """Qwen3.5-9B's layer: three drafts cost 6 % more state than none."""
    import torch

    from unisono.models.load.build import Builder, no_attention

    builder = Builder(4096, 1e-6, torch.bfloat16, "meta", no_attention, 16)
    tail = GatedDeltaSpec(16, 32, 128, 128).build(builder).state_specs()
    assert tail.row_bytes(4) < 1.06 * tail.row_bytes(1)
    assert tail.row_bytes(4) < 1.19 * tail.snapshot_bytes
