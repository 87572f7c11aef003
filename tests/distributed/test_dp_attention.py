"""DP attention: ranks that hold the latents of their own requests write the bytes of one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.distributed.requests_ import ROOMY, SCARCE, differing, run, spec
from tests.engine.helpers import engine
from tests.models.make import make_checkpoint
from tests.models.make_layer_mtp import make_layer_mtp
from unisono.kv.specs import PAGE_SIZE
from unisono.types import ConfigError, SamplingParams

COUNT = 7
HEADS = {"num_attention_heads": 6, "num_key_value_heads": 6}
APART = {"enable_dp_attention": True}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("latent"), "glm4_moe_lite", **HEADS)


@pytest.fixture(scope="module")
def alone(plain: Path) -> dict[str, Any]:
    return run(plain, 1, COUNT, captures=1)


@pytest.mark.parametrize(
    ("ranks", "more"),
    [
        (2, SCARCE | {"num_pages": 12, "max_num_seqs": 7}),
        (2, ROOMY | {"max_num_batched_tokens": 16, "enable_expert_parallel": True}),
        pytest.param(4, ROOMY, marks=pytest.mark.full),  # not a divisor of the heads
    ],
    ids=["preempted", "chunks and whole experts", "four"],
)
def test_ranks_with_requests_of_their_own_change_nothing(
    ranks: int, more: dict[str, Any], plain: Path, alone: dict[str, Any]
) -> None:
    found = run(plain, ranks, COUNT, captures=1, **APART, **more)
    assert differing(alone, found) == 0
    assert found["replays"] > 0
    assert found["preemptions" if more["num_pages"] else "hits"] > 0


def test_latents_in_e4m3_change_nothing_more(plain: Path) -> None:
    """Drafts, chunks and ranks of their own requests, with an fp8 cache."""
    alone = run(plain, 1, COUNT, captures=1, kv_cache_dtype="fp8", **ROOMY)
    ngram = spec("ngram", num_speculative_tokens=3)
    more = ROOMY | {"max_num_batched_tokens": 16, "speculative": ngram, "kv_cache_dtype": "fp8"}
    found = run(plain, 2, COUNT, captures=1, **APART, **more)
    assert differing(alone, found) == 0
    assert found["accepted"] > 0


def test_drafts_of_a_module_change_nothing(tmp_path: Path) -> None:
    made = make_layer_mtp(tmp_path, "glm4_moe_lite", **HEADS, num_hidden_layers=3)
    alone = run(made.path, 1, COUNT, captures=1, speculative=spec("none"))
    found = run(made.path, 2, COUNT, captures=1, speculative=spec("mtp", num_speculative_tokens=3), **APART, **ROOMY)
    assert differing(alone, found) == 0
    assert found["replays"] > 0
    assert found["hits"] > 0


def test_pages_are_divided_and_requests_balanced(plain: Path) -> None:
    flags = ROOMY | {"num_pages": 24, "max_num_seqs": 4}
    with engine(plain, tensor_parallel_size=2, **APART, **flags) as llm:
        latents = [each for each in llm.engine.worker.store.parts(0) if len(each) == 12]
        assert latents, "half of the pages on each rank"
        pools = llm.engine.pool.pools
        llm.generate([[i] * 20 for i in range(1, 5)], SamplingParams(max_tokens=1))
        assert [pool.cached_pages for pool in pools] == [2, 2]


def test_a_full_rank_preempts_its_own_requests(plain: Path) -> None:
    """Two requests fill rank 0, and the last in the queue runs on rank 1, where preempting it would free nothing."""
    flags = ROOMY | {"num_pages": 12, "max_num_batched_tokens": 128}
    with engine(plain, tensor_parallel_size=2, **APART, **flags) as llm:
        sizes = ((28, 8), (40, 3), (28, 8), (3, 12))  # prompt and answer; requests 0 and 2 share rank 0
        prompts = [[number + 1] * size for number, (size, _) in enumerate(sizes)]
        llm.generate(prompts, [SamplingParams(max_tokens=count, ignore_eos=True) for _, count in sizes])
        assert llm.engine.scheduler.preemptions == 1


REFUSED: dict[str, dict[str, Any]] = {
    r"--cpu-offload-gb": {"cpu_offload_gb": 0.01},
    r"--role decode": {"role": "decode", "prefill_urls": "tcp://localhost:9"},
    r"--enable-lora": {"enable_lora": True},
    r"draft trees": {"speculative": spec("ngram", topk=2, num_draft_tokens=4)},
}


@pytest.mark.parametrize("what", REFUSED)
def test_pairs_that_are_refused(what: str, plain: Path) -> None:
    with pytest.raises(ConfigError, match=f"--enable-dp-attention cannot be combined with {what} yet"):
        engine(plain, tensor_parallel_size=2, **APART, **ROOMY, **REFUSED[what])


def test_pages_that_do_not_divide_are_refused(plain: Path) -> None:
    with pytest.raises(ConfigError, match="--num-pages 13 cannot be divided among 2 ranks"):
        engine(plain, tensor_parallel_size=2, **APART, **ROOMY | {"num_pages": 13})


def test_a_context_that_no_rank_holds_is_refused(plain: Path) -> None:
    """8 pages are 4 on each rank, one of them padding."""
    with pytest.raises(ConfigError, match=f"--max-model-len 80 needs 5 KV pages, 3 fit .*lower it to {3 * PAGE_SIZE}"):
        engine(plain, tensor_parallel_size=2, **APART, **ROOMY | {"num_pages": 8})


def test_heads_that_are_not_latent_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"--enable-dp-attention: .* has layers without latent attention"):
        engine("tiny", tensor_parallel_size=2, **APART, **ROOMY)
