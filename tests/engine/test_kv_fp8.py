"""An e4m3 KV cache: the same bytes in every way of running, half the memory or less, and pages that move.

Every reference is an engine with the same cache that runs each request alone, without speculation and graphs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.drafters.ledger import acceptance
from tests.engine.bundled import SETUPS
from tests.engine.helpers import lazy_engine, mixed_params, prompts, tokens
from tests.engine.late_pages import arrive_late
from tests.engine.matrix import DRAFTERS, PARAMS, PROMPTS, SCARCE, TREES, Way, drafting, drafting_tree
from tests.engine.two_engines import decode_engine, prefill_engine, results, stepping
from tests.kv.mixed_model import ARCHITECTURE, VOCAB, WINDOW, make_mixed
from unisono.config import EngineConfig, Hardware, catalog, resolve
from unisono.config.env import TRANSFER_KEY
from unisono.engine.disaggregation.identity import engine_identity
from unisono.engine.startup.memory import PageDemand
from unisono.kv.specs import ALL, PAGE_SIZE, leaves
from unisono.kv.store import StateStore
from unisono.models.load.build import Builder, no_attention
from unisono.models.load.checkpoint import Checkpoint
from unisono.types import ConfigError, SpeculativeConfig

FP8: dict[str, Any] = {"kv_cache_dtype": "fp8"}


@pytest.fixture(scope="module")
def alone() -> Callable[[Path], list[list[int]]]:
    """Target -> the token ids of the matrix's first requests, each by itself."""

    @functools.cache
    def run(target: Path) -> list[list[int]]:
        with lazy_engine(target, **FP8, max_num_seqs=1, enforce_eager=True, enable_prefix_caching=False) as llm:
            return [tokens(llm, [p], [q])[0] for p, q in zip(PROMPTS[:12], PARAMS[:12], strict=True)]

    return run


# ---- the same bytes ----------------------------------------------------------------------------------

WAYS = {
    "batched": {},
    "chunks of 16, eager": {"max_num_batched_tokens": 16, "enforce_eager": True},
    "preempted": SCARCE,
    "mixed passes": {"enable_mixed_chunk": True, "max_num_batched_tokens": 32},
}


@pytest.mark.parametrize("way", WAYS)
def test_same_bytes_without_drafts(way: str, qwen3: Path, alone: Any) -> None:
    with lazy_engine(qwen3, **FP8, **WAYS[way]) as llm:
        assert tokens(llm, PROMPTS[:12], PARAMS[:12]) == alone(qwen3)
        assert tokens(llm, PROMPTS[:12], PARAMS[:12]) == alone(qwen3), "after prefix hits"
        assert way == "preempted" or llm.engine.scheduler.prefix_hits > 0
        assert (llm.engine.scheduler.preemptions > 0) == (way == "preempted")
        llm.engine.check_integrity()
        assert {spec.dtype for spec in leaves(llm.engine.runner.worker.model.state_specs())} == {
            torch.float8_e4m3fn,
            torch.uint8,
        }


def test_fp8_cache_changes_the_text(qwen3: Path, alone: Any) -> None:
    """The comparisons can fail: the plain cache says something else."""
    with lazy_engine(qwen3) as llm:
        assert tokens(llm, PROMPTS[:12], PARAMS[:12]) != alone(qwen3)


DRAFTING = [
    pytest.param(method, way, marks=() if (i + j) % 2 == 0 else pytest.mark.full, id=f"{method}, {way.name}")
    for i, method in enumerate(DRAFTERS)
    for j, way in enumerate((Way(3, {"max_num_batched_tokens": 16}, again=True), Way(5, SCARCE)))
]


@pytest.mark.parametrize(("method", "way"), DRAFTING)
def test_same_bytes_with_chains(method: str, way: Way, checkpoints_of: Any, alone: Any) -> None:
    """Each drafter, whose own pages are e4m3, too."""
    checkpoints = checkpoints_of(method)
    with drafting(method, checkpoints, way.k, **way.flags, **FP8) as llm:
        for _ in range(1 + way.again):
            assert tokens(llm, PROMPTS[:12], PARAMS[:12]) == alone(checkpoints[0])
        assert 0 < acceptance(llm) < 1, "a run that accepts nothing, or rejects nothing, proves nothing"
        specs = list(leaves(llm.engine.runner.worker.drafter.state_specs()))
        rows = [spec for spec in specs if len(spec.shape) == 3 and spec.shape[1] == PAGE_SIZE]  # type: ignore[union-attr]
        assert {spec.dtype for spec in rows} <= {torch.float8_e4m3fn, torch.uint8}  # type: ignore[union-attr]
        llm.engine.check_integrity()


@pytest.mark.parametrize(
    ("method", "tree"),
    [("eagle3", "binary"), pytest.param("standalone", "uneven", marks=pytest.mark.full)],
)
def test_same_bytes_with_trees(method: str, tree: str, checkpoints_of: Any, alone: Any) -> None:
    checkpoints = checkpoints_of(method)
    with drafting_tree(method, checkpoints, TREES[tree], **FP8) as llm:
        assert tokens(llm, PROMPTS[:12], PARAMS[:12]) == alone(checkpoints[0])


@pytest.mark.parametrize(
    "flags",
    [pytest.param({}, id="triton"), pytest.param({"attention_backend": "torch"}, id="torch", marks=pytest.mark.full)],
)
def test_same_bytes_of_a_model_with_windows_and_a_recurrence(
    flags: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two window groups and two head sizes. The recurrence's state has its own dtypes."""
    monkeypatch.setitem(catalog.models.entries, ARCHITECTURE, "tests.kv.mixed_model:MIXED")  # type: ignore[arg-type]
    model = make_mixed(tmp_path / "model")
    batch, params = prompts(6, VOCAB, low=20, high=70, seed=2), mixed_params(6, max_tokens=8)
    with lazy_engine(model, **FP8, **flags, max_num_seqs=1, enforce_eager=True, enable_prefix_caching=False) as llm:
        expected = tokens(llm, batch, params)
        store = llm.engine.runner.worker.store
        assert set(store.window_groups) == {ALL, WINDOW}
    spec = SpeculativeConfig("ngram", num_speculative_tokens=2)
    for more in ({"max_num_batched_tokens": 16}, {"speculative": spec}):
        with lazy_engine(model, **FP8, **flags, **more) as llm:
            assert tokens(llm, batch, params) == expected
            assert tokens(llm, batch, params) == expected, "after prefix hits"


# ---- pages that move ---------------------------------------------------------------------------------

MOVING = [pytest.param(name, marks=() if name == "tiny, eagle3" else pytest.mark.full) for name in SETUPS]


@pytest.mark.full
@pytest.mark.parametrize("setup", SETUPS)
def test_offloaded_pages_come_back(setup: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From host memory, and from files to another engine; files of another cache are not read."""
    model, spec = SETUPS[setup]
    batch, params = prompts(6, 250, low=100, high=140, seed=5) * 2, mixed_params(12, max_tokens=4)
    with lazy_engine(model, **FP8, enforce_eager=True, enable_prefix_caching=False) as llm:
        expected = tokens(llm, batch, params)
    arrive_late(monkeypatch)
    host = {"num_pages": 36, "cpu_offload_ratio": 6, "snapshot_share": 0.02, "kv_offload_dir": str(tmp_path)}
    for _ in range(2):
        with lazy_engine(model, **FP8, speculative=spec, **host) as llm:
            assert tokens(llm, batch, params) == expected
            assert tokens(llm, batch, params) == expected
            assert llm.engine.pool.offload.counters.hits > 0  # type: ignore[union-attr]
            llm.engine.check_integrity()
    folders = {path.parent for path in tmp_path.rglob("*") if path.is_file()}
    with lazy_engine(model, speculative=spec, **host) as llm:
        tokens(llm, batch, params)
    assert {path.parent for path in tmp_path.rglob("*") if path.is_file()} > folders


@pytest.mark.parametrize("setup", MOVING)
def test_pages_go_to_another_engine(setup: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TRANSFER_KEY.name, "secret")
    model, spec = SETUPS[setup]
    batch, params = prompts(8, 250, low=20, high=170, seed=2), mixed_params(8, max_tokens=5)
    with lazy_engine(model, **FP8, enforce_eager=True) as llm:
        expected = tokens(llm, batch, params)
    with (
        prefill_engine(model, f"unix://{tmp_path}/prefill", speculative=spec, **FP8) as one,
        stepping(one),
        decode_engine(model, one, speculative=spec, num_pages=300, **FP8) as other,
    ):
        outputs = other.generate(batch, params)
        assert results(other) == {"done": sum(len(p) > PAGE_SIZE for p in batch)}
    assert [o.outputs[0].token_ids for o in outputs] == expected
    assert [o.num_cached_tokens for o in outputs] == [(len(p) - 1) // PAGE_SIZE * PAGE_SIZE for p in batch]


# ---- what is told, and memory ------------------------------------------------------------------------


def test_fp8_cache_takes_half_the_memory_of_16_bits(qwen3: Path) -> None:
    """Of a token: D + 1 bytes in place of 2 D, for keys and values of each KV head. Identities differ."""
    seen = {}
    for dtype in ("auto", "fp8", "fp8_e4m3", "bfloat16"):
        with lazy_engine(qwen3, dtype="bfloat16", kv_cache_dtype=dtype) as llm:
            info = llm.engine.info()
            seen[dtype] = info["kv_cache"], engine_identity(llm.engine.config, llm.engine.runner.worker)
            told = "float8_e4m3fn" if dtype.startswith("fp8") else "bfloat16"
            assert info["kv_cache"]["dtype"] == info["settings"]["kv_cache_dtype"] == told  # type: ignore[index, call-overload]
            model = llm.engine.runner.worker.model
    heads = model.config.attention
    assert seen["auto"][0]["token_bytes"] == 4 * heads.num_kv_heads * heads.head_dim * len(model.layers)
    assert seen["fp8"][0]["token_bytes"] == 2 * heads.num_kv_heads * (heads.head_dim + 1) * len(model.layers)
    assert seen["fp8"] == seen["fp8_e4m3"]
    assert seen["auto"] == seen["bfloat16"]
    assert seen["auto"][1] != seen["fp8"][1]


def test_about_twice_as_many_pages_fit() -> None:
    """In the same budget, by the specs of layers of 8 KV heads of 128, as Qwen3-8B's."""
    spec = replace(Checkpoint.open("tiny").config.attention, num_heads=32, num_kv_heads=8, head_dim=128)

    def pages(kv_dtype: torch.dtype | None) -> int:
        builder = Builder(4096, 1e-6, torch.bfloat16, "meta", no_attention, 16, kv_dtype=kv_dtype)
        store = StateStore(2, 1, 1024, 1, torch.device("cpu"))
        store.declare("target", [spec.build(builder).state_specs() for _ in range(2)])
        return PageDemand({ALL: store.page_bytes(ALL)}).fit(1 << 30, 1 << 20)

    assert pages(None) == (1 << 30) // (2 * 2 * PAGE_SIZE * 8 * 128 * 2)
    assert 1.98 < pages(torch.float8_e4m3fn) / pages(None) < 2


def test_fp8_cache_on_gpu_without_e4m3_raises() -> None:
    checkpoint, asked = Checkpoint.open("tiny"), EngineConfig("tiny", kv_cache_dtype="fp8")
    gpu = Hardware(torch.device("cuda", 0), "a GPU", 1 << 34, 1, (8, 0))
    with pytest.raises(ConfigError, match=r"fp8: this GPU has compute capability 8\.0, and e4m3 needs 8\.9"):
        resolve(asked, gpu, checkpoint)
    assert resolve(EngineConfig("tiny"), gpu, checkpoint).kv_dtype is torch.bfloat16
    new = Hardware(torch.device("cuda", 0), "a GPU", 1 << 34, 1, (9, 0))
    assert resolve(asked, new, checkpoint).kv_dtype is torch.float8_e4m3fn
