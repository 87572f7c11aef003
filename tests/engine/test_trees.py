"""The promise under trees: whatever the tree, the drafter and the way, tokens and log-probabilities do not change.

And that a tree is worth its rows: it accepts what its paths hold, by construction known beforehand.
"""

from __future__ import annotations

import functools
import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.drafters.ledger import acceptance, assert_every_draft_accepted, play
from tests.drafters.noisy import noisy
from tests.engine.helpers import counted, lazy_engine, mixed_params, prompts, tokens
from tests.engine.matrix import (
    DRAFTERS,
    GRAPH,
    PARAMS,
    PROMPTS,
    SCARCE,
    TREE_DRAFTERS,
    TREES,
    Checkpoints,
    Way,
    drafting_tree,
)  # fmt: skip
from tests.models.make import make_checkpoint
from unisono.entrypoints.llm import LLM
from unisono.kernels.speculation.tree_paths import Best
from unisono.passes import tree as tree_module
from unisono.types import ConfigError, SamplingParams

ASKED = [replace(p, logprobs=(None, 3, 0, 20)[i % 4]) for i, p in enumerate(PARAMS)]
"""The requests of the chains' matrix, three of four with log-probabilities."""

WAYS = (
    Way(0),
    Way(0, {"max_num_seqs": 3, "enforce_eager": True}),
    Way(0, {"max_num_batched_tokens": 16}, again=True),
    Way(0, SCARCE),
)
QUICK = [
    (method, list(TREES)[(i + j) % len(TREES)], way)
    for i, method in enumerate(TREE_DRAFTERS)
    for j, way in enumerate(WAYS)
    if (i + 2 * j) % 3 == 0
]
MANY = (
    {},
    {"max_num_seqs": 3, "max_num_batched_tokens": 16, "enforce_eager": True},
    {**SCARCE, "max_num_batched_tokens": 16},
    {**SCARCE, "enforce_eager": True},
)
MODES = ("raw_logprobs", "processed_logprobs")
EVERY = [
    (method, tree, Way(0, flags, again=True), MODES[(i + j) % 2])
    for method in TREE_DRAFTERS
    for j, tree in enumerate(TREES)
    for i, flags in enumerate(MANY)
]

Said = list[tuple[list[int], Any]]


def said(llm: LLM, batch: Sequence[list[int]], params: Sequence[SamplingParams]) -> Said:
    """Each answer's tokens and log-probabilities, to the bit."""
    outputs = [o.outputs[0] for o in llm.generate(list(batch), list(params))]
    return [
        (o.token_ids, o.logprobs and [{t: (p.logprob, p.rank) for t, p in row.items()} for row in o.logprobs])
        for o in outputs
    ]


@pytest.fixture(scope="module")
def checkpoints_of(
    checkpoints: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Checkpoints]:
    return functools.cache(lambda method: TREE_DRAFTERS[method](checkpoints, tmp_path_factory.mktemp(method)))


@pytest.fixture(scope="module")
def plain() -> Callable[..., Said]:
    @functools.cache
    def run(target: Path, mode: str, count: int = len(PROMPTS)) -> Said:
        with lazy_engine(target, logprobs_mode=mode) as llm:
            return said(llm, PROMPTS[:count], ASKED[:count])

    return run


def check(method: str, tree: str, way: Way, checkpoints: Checkpoints, expected: Said, **flags: Any) -> None:
    batch, params = PROMPTS[: len(expected)], ASKED[: len(expected)]
    with drafting_tree(method, checkpoints, TREES[tree], graph_capture="lazy", **way.flags, **flags) as llm:
        assert said(llm, batch, params) == expected
        if way.again:
            before, newest = llm.engine.scheduler.prefix_hits, slice(None, -13, -1)
            assert said(llm, batch[newest], params[newest]) == expected[newest], "after a prefix hit"
            assert llm.engine.scheduler.prefix_hits > before
        if "num_pages" in way.flags and "max_num_seqs" not in way.flags:
            assert llm.engine.scheduler.preemptions > 0
        assert 0 < acceptance(llm) < 1, "a run that accepts nothing, or rejects nothing, proves nothing"
        kinds = {kind for program, kind, _ in counted(llm) if program == "round"}
        assert kinds == {"eager" if way.flags.get("enforce_eager") else GRAPH}
        llm.engine.check_integrity()
        assert llm.engine.pool.usage == 0


@pytest.mark.parametrize(("method", "tree", "way"), QUICK, ids=lambda v: getattr(v, "name", v))
def test_same_bytes(method: str, tree: str, way: Way, checkpoints_of: Any, plain: Any) -> None:
    checkpoints = checkpoints_of(method)
    check(method, tree, way, checkpoints, plain(checkpoints[0], "raw_logprobs", 12))


@pytest.mark.full
@pytest.mark.parametrize(("method", "tree", "way", "mode"), EVERY, ids=lambda v: getattr(v, "name", v))
def test_same_bytes_in_every_way(method: str, tree: str, way: Way, mode: str, checkpoints_of: Any, plain: Any) -> None:
    checkpoints = checkpoints_of(method)
    check(method, tree, way, checkpoints, plain(checkpoints[0], mode), logprobs_mode=mode)


def test_the_comparison_can_fail(checkpoints_of: Any, plain: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the accepted drafts' keys and values brought home, what comes next is another text."""
    monkeypatch.setattr(tree_module.Tree, "adopt", lambda self, *given: None)
    checkpoints = checkpoints_of("standalone")
    with drafting_tree("standalone", checkpoints, TREES["binary"]) as llm:
        changed = said(llm, PROMPTS[:12], ASKED[:12])
    expected = plain(checkpoints[0], "raw_logprobs", 12)
    without = [ours == theirs for ours, theirs, p in zip(changed, expected, ASKED, strict=False) if p.max_drafts == 0]
    assert all(without)
    assert changed != expected


def test_a_round_is_one_replay(checkpoints_of: Any) -> None:
    with drafting_tree("standalone", checkpoints_of("standalone"), TREES["uneven"]) as llm:
        tokens(llm, PROMPTS[:3], PARAMS[:3])
        assert {key for key in counted(llm) if key[0] == "round"} == {("round", GRAPH, "")}
        info = llm.engine.info()
        assert info["speculation"]["paths"] == 3
        assert info["speculation"]["tree_nodes"] == 6
        assert info["kv_cache"]["path_pages"] == 2 * 2 * 8
        (pages,) = [d for d in info["decisions"] if d["name"] == "path_pages"]
        assert pages["value"] == "32"


# ---- what a tree accepts ------------------------------------------------------------------------------


FULL = pytest.mark.full
BATCH = prompts(8, 250)
SECOND = "[(0,), (1,), (1, 0), (1, 1), (1, 1, 0), (1, 1, 1)]"
"""Its last path, of three, takes the second candidate everywhere."""


def rewritten(source: Path, directory: Path, change: Callable[[torch.Tensor], None]) -> Path:
    """A copy of a checkpoint with an LM head of its own, changed."""
    shutil.copytree(source, directory)
    (file,) = directory.glob("*.safetensors")
    weights = load_file(file)
    head = weights.get("lm_head.weight", weights["model.embed_tokens.weight"]).clone()
    change(head)
    save_file({**weights, "lm_head.weight": head}, file, metadata={"format": "pt"})
    config = directory / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"tie_word_embeddings": False}))
    return directory


@pytest.fixture(scope="module")
def always_second(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    """A target that says odd tokens only, greedily, and a draft model to which the even one before is as good.

    Of equals the lowest id comes first, so the right one is always the second.
    """
    folder = tmp_path_factory.mktemp("always second")
    source = make_checkpoint(folder / "source", "qwen3")

    def only_odd(head: torch.Tensor) -> None:
        head[0::2] = 0

    def in_pairs(head: torch.Tensor) -> None:
        only_odd(head)
        head[0 : len(head) // 2 * 2 : 2] = head[1::2]

    return rewritten(source, folder / "target", only_odd), rewritten(source, folder / "draft", in_pairs)


def test_tree_accepts_second_candidates(always_second: Checkpoints) -> None:
    """A chain of best candidates is never right here; the path of second ones always is, over many pages."""
    params = [SamplingParams(temperature=0, max_tokens=1 + 4 * n, ignore_eos=True) for n in range(9, 13)]
    with lazy_engine(always_second[0]) as llm:
        expected = tokens(llm, BATCH[:4], params)
        assert all(t % 2 for answer in expected for t in answer)
    with drafting_tree("standalone", always_second, {"num_speculative_tokens": 3}) as llm:
        assert tokens(llm, BATCH[:4], params) == expected
        assert acceptance(llm) == 0
    with drafting_tree("standalone", always_second, {"speculative_token_tree": SECOND}) as llm:
        entries = play(llm, BATCH[:4], params)
        assert [e.tokens for e in entries] == expected
        assert [e.rounds for e in entries] == [[4] * n for n in range(9, 13)]
        again = play(llm, BATCH[:4], params)
        assert [e.rounds for e in again] == [[4] * n for n in range(9, 13)], "after prefix hits too"
        assert llm.engine.scheduler.prefix_hits > 0
        counters = llm.engine.counters
        assert counters.drafted_tokens == 6 * counters.drafts


def test_fewer_drafts_are_shallower_paths(always_second: Checkpoints) -> None:
    params = [
        SamplingParams(temperature=0, max_tokens=13, max_drafts=most, ignore_eos=True) for most in (None, 0, 1, 2)
    ]
    with drafting_tree("standalone", always_second, {"speculative_token_tree": SECOND}) as llm:
        entries = play(llm, [BATCH[0]] * 4, params)
        assert [e.rounds for e in entries] == [[4] * 3, [1] * 12, [2] * 6, [3] * 4]
        assert llm.engine.counters.drafted_tokens == 3 * 6 + 6 * 2 + 4 * 4


@pytest.mark.parametrize("tree", [pytest.param("binary", marks=FULL), pytest.param("wide", marks=FULL), "uneven"])
def test_a_perfect_draft_is_accepted(qwen3: Path, tree: str) -> None:
    """The target drafts for itself: its best path is right in every round, whatever the parameters, twice over."""
    params = mixed_params(6)
    with lazy_engine(qwen3) as llm:
        expected = tokens(llm, BATCH[:6], params)
    with drafting_tree("standalone", (qwen3, qwen3), TREES[tree], max_num_batched_tokens=64) as llm:
        for _ in range(2):
            entries = play(llm, BATCH[:6], params)
            assert [e.tokens for e in entries] == expected
            assert_every_draft_accepted(llm, entries)


def test_round_commits_no_more_than_its_best_path(qwen3: Path) -> None:
    """The best path of a perfect draft is one step long here, so no round commits more than two tokens."""
    params = SamplingParams(temperature=0.8, seed=1, max_tokens=1 + 2 * 6, ignore_eos=True)
    with drafting_tree("standalone", (qwen3, qwen3), {"speculative_token_tree": "[(0,), (1,), (1, 0)]"}) as llm:
        (entry,) = play(llm, [[1, 2, 3]], [params])
        assert entry.rounds == [2] * 6


@pytest.mark.full
def test_more_paths_accept_more(qwen3: Path, tmp_path: Path) -> None:
    """A draft model with noise, drawing with the target's noise: what a chain misses, a second path often has."""
    draft = noisy(qwen3, tmp_path / "draft", 0.08)
    params = [SamplingParams(temperature=1, seed=i, max_tokens=32, ignore_eos=True) for i in range(6)]
    lengths = []
    for tree in ({"num_speculative_tokens": 3}, *({"topk": b, "num_draft_tokens": n} for b, n in ((2, 4), (4, 10)))):
        with drafting_tree("standalone", (qwen3, draft), tree) as llm:
            tokens(llm, BATCH[:6], params)
            lengths.append(llm.engine.counters.accept_length)
    assert lengths[0] + 0.1 < lengths[1] < lengths[2] - 0.1, lengths


def test_the_best_path_is_chosen(always_second: Checkpoints, monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: committing the first path whatever it holds accepts nothing, and changes no text."""

    def first(sampled: torch.Tensor, drafts: torch.Tensor, tables: torch.Tensor, paths: int) -> Best:
        rows = torch.arange(0, len(sampled), paths, dtype=torch.int32, device=sampled.device)
        best = (t.index_select(0, rows) for t in (tables, sampled, drafts))
        return Best(rows, *best, torch.ones_like(rows))

    params = SamplingParams(temperature=0, max_tokens=13, ignore_eos=True)
    with lazy_engine(always_second[0]) as llm:
        expected = tokens(llm, BATCH[:3], params)
    monkeypatch.setattr(tree_module, "best_path", first)
    with drafting_tree("standalone", always_second, {"speculative_token_tree": SECOND}) as llm:
        assert tokens(llm, BATCH[:3], params) == expected
        assert acceptance(llm) == 0


def test_forced_acceptance_takes_every_path_in_turn(qwen3: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Benchmarks only: as many tokens a round as asked, and copied back from paths as real ones are."""
    chosen = set()

    def watched(*given: Any, best: Any = tree_module.best_path) -> Best:
        found = best(*given)
        chosen.update((found.rows % given[-1]).tolist())
        return found

    monkeypatch.setattr(tree_module, "best_path", watched)
    flags = {"synthetic_acceptance_length": 2.5, "enforce_eager": True}
    with drafting_tree("ngram", (qwen3, None), TREES["binary"], **flags) as llm:
        llm.generate(BATCH[:4], SamplingParams(temperature=0, max_tokens=60, ignore_eos=True))
        assert 2.2 < llm.engine.counters.accept_length < 2.8
    assert chosen == {0, 1, 2}


# ---- what is refused ----------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["suffix", "mtp_frozen", "mtp"])
def test_drafters_without_trees_refuse_one(method: str, checkpoints: dict[str, Path], tmp_path: Path) -> None:
    """An MTP checkpoint with several modules among them."""
    made = DRAFTERS[method](checkpoints, tmp_path)
    with pytest.raises(ConfigError, match=rf"'{method}'.*drafts chains only; a tree of 3 paths.*leave out"):
        drafting_tree(method, made, TREES["binary"])


def test_a_tree_of_one_path_is_a_chain(checkpoints_of: Any) -> None:
    with drafting_tree("suffix", (checkpoints_of("ngram")[0], None), {"topk": 1, "num_draft_tokens": 2}) as llm:
        assert llm.engine.runner.width == 3
        assert llm.engine.runner.paths == 1
        assert llm.engine.worker.path_pages == 0
        assert llm.engine.worker.slots.page_table.shape[0] == 9


def test_pages_of_paths_need_room(checkpoints_of: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from unisono.engine.startup import memory

    monkeypatch.setattr(memory, "CPU_KV_BYTES", 40 * 16 * 1024)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match=r"112 more are for 8 paths.*fewer paths or a lower --max-num-seqs"):
        drafting_tree("ngram", checkpoints_of("ngram"), {"topk": 8, "num_draft_tokens": 8, "num_speculative_tokens": 1})
