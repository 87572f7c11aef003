"""The promise under speculation: drafter, k, batch, chunks, prefix hits, preemption and graphs never change a token.

The drafters and the requests are those of ``matrix.py``. On a GPU this runs in bfloat16, on a CPU in float32.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.drafters.ledger import Entry, acceptance, assert_every_draft_accepted, play
from tests.drafters.noisy import noisy
from tests.engine.helpers import counted, tokens
from tests.engine.matrix import DRAFTERS, GRAPH, MAX_DRAFTS, PARAMS, PROMPTS, SCARCE, Checkpoints, Way, drafting
from tests.models.make import make_checkpoint
from unisono.config import catalog
from unisono.entrypoints.llm import LLM
from unisono.graphs.cuda import CudaGraph
from unisono.graphs.tape import Tape
from unisono.passes import context as modules
from unisono.types import SamplingParams

QUICK = (
    Way(1, {"max_num_seqs": 3, "enforce_eager": True}),
    Way(3, {"max_num_batched_tokens": 16}, again=True),
    Way(5, SCARCE),
)
CELLS = [(method, way) for i, method in enumerate(DRAFTERS) for j, way in enumerate(QUICK) if (i + j) % 3 < 2]
"""Two ways for each drafter; the long matrix has them all."""
EVERY = tuple(
    Way(k, {**batch, **chunks, **pages, "enforce_eager": eager}, again=True)
    for k, batch, chunks, pages, eager in itertools.product(
        (1, 3, 5), ({}, {"max_num_seqs": 3}), ({}, {"max_num_batched_tokens": 16}), ({}, SCARCE), (False, True)
    )
)


def test_the_matrix_is_complete() -> None:
    assert set(DRAFTERS) == set(catalog.drafters.entries) - {"none"}


def check_way(method: str, way: Way, checkpoints: Checkpoints, expected: list[list[int]]) -> None:
    batch, params = PROMPTS[: len(expected)], PARAMS[: len(expected)]
    with drafting(method, checkpoints, way.k, graph_capture="lazy", **way.flags) as llm:
        assert tokens(llm, batch, params) == expected
        if way.again:
            before, newest = llm.engine.scheduler.prefix_hits, slice(None, -13, -1)  # the last are cached for sure
            assert tokens(llm, batch[newest], params[newest]) == expected[newest], "after a prefix hit"
            assert llm.engine.scheduler.prefix_hits > before
        if "num_pages" in way.flags and "max_num_seqs" not in way.flags:
            assert llm.engine.scheduler.preemptions > 0
        assert 0 < acceptance(llm) < 1, "a run that accepts nothing, or rejects nothing, proves nothing"
        kinds = {kind for program, kind, _ in counted(llm) if program == "round"}
        assert kinds == {"eager" if way.flags.get("enforce_eager") else GRAPH}
        llm.engine.check_integrity()
        assert llm.engine.pool.usage == 0


@pytest.mark.parametrize(("method", "way"), CELLS, ids=lambda v: getattr(v, "name", v))
def test_same_bytes(method: str, way: Way, checkpoints_of: Any, plain: Any) -> None:
    checkpoints = checkpoints_of(method)
    check_way(method, way, checkpoints, plain(checkpoints[0], 12))


@pytest.mark.full
@pytest.mark.parametrize("way", EVERY, ids=lambda way: way.name)
@pytest.mark.parametrize("method", DRAFTERS)
def test_same_bytes_in_every_way(method: str, way: Way, checkpoints_of: Any, plain: Any) -> None:
    checkpoints = checkpoints_of(method)
    check_way(method, way, checkpoints, plain(checkpoints[0]))


def test_the_comparison_can_fail(checkpoints_of: Any, plain: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts accepted without asking the target change the text, of the requests that draft."""
    monkeypatch.setattr(modules, "commit", accept_everything)
    checkpoints = checkpoints_of("standalone")
    with drafting("standalone", checkpoints, 3) as llm:
        changed = tokens(llm, PROMPTS[:18], PARAMS[:18])
    same: dict[int | None, list[bool]] = {most: [] for most in MAX_DRAFTS}
    for params, ours, theirs in zip(PARAMS, changed, plain(checkpoints[0], 18), strict=False):
        same[params.max_drafts].append(ours == theirs)
    assert all(same[0])
    assert not all(same[None])


def accept_everything(sampled: torch.Tensor, drafts: torch.Tensor, *rest: Any, commit: Any = modules.commit) -> Any:
    """A broken accept rule: the target is asked only where nothing was drafted."""
    width = drafts.shape[1]
    believed = torch.cat((torch.where(drafts >= 0, drafts, sampled[:, :width]), sampled[:, width:]), 1)
    return commit(believed, drafts, *rest)


# ---- rounds -----------------------------------------------------------------------------------------

# The target drafts for itself, so what a round commits is known beforehand.
K = 3
FREE = SamplingParams(temperature=1, seed=5, max_tokens=1 + 6 * (K + 1), ignore_eos=True)


@pytest.fixture(scope="module")
def certain(qwen3: Path) -> Iterator[LLM]:
    """An engine whose drafts are all accepted."""
    with drafting("standalone", (qwen3, qwen3), K) as llm:
        yield llm


def test_a_round_is_one_replay(qwen3: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafting, verification and catch-up together: k drafts cost no pass of their own."""
    replays = []
    for graph in (Tape, CudaGraph):
        monkeypatch.setattr(graph, "replay", lambda self, real=graph.replay: (replays.append(self.key), real(self)))
    with drafting("standalone", (qwen3, qwen3), K) as llm:
        replays.clear()  # of the start
        (entry,) = play(llm, [[1, 2, 3]], [FREE])
        rounds = counted(llm)["round", GRAPH, ""]
    assert entry.rounds == [K + 1] * 6
    assert 6 <= rounds <= 7, "the host reads one round late, so one may have been launched in vain"
    assert [key.program for key in replays].count("round") == rounds


def test_requests_that_do_not_draft_share_rounds_with_others(certain: LLM) -> None:
    params = [replace(FREE, max_drafts=most, max_tokens=13) for most in (None, 0, 1, 2, 99)]
    before = counted(certain).get(("round", GRAPH, ""), 0)
    entries = play(certain, [[1, 2, 3]] * 5, params)
    assert [e.rounds for e in entries] == [[4] * 3, [1] * 12, [2] * 6, [3] * 4, [4] * 3]
    assert len({tuple(e.tokens) for e in entries}) == 1
    assert counted(certain)["round", GRAPH, ""] - before <= 13, "as many as the slowest alone"


@pytest.mark.parametrize("place", range(1, 10))
def test_a_stop_id_among_accepted_drafts(certain: LLM, place: int) -> None:
    """Wherever in a round the stop id falls: what was accepted behind it is not committed."""
    (free,) = tokens(certain, [[1, 2, 3]], FREE)
    stopping = replace(FREE, stop_token_ids=(free[place],))
    place = free.index(free[place])
    (entry,) = play(certain, [[1, 2, 3]], [stopping])
    assert entry.tokens == free[: place + 1]
    assert entry.rounds == in_rounds(place)
    assert certain.generate([[1, 2, 3]], stopping)[0].outputs[0].finish_reason == "stop"


@pytest.mark.parametrize("count", range(1, 11))
def test_a_limit_among_accepted_drafts(certain: LLM, count: int) -> None:
    (free,) = tokens(certain, [[1, 2, 3]], FREE)
    limited = replace(FREE, max_tokens=count)
    (entry,) = play(certain, [[1, 2, 3]], [limited])
    assert entry.tokens == free[:count]
    assert entry.rounds == in_rounds(count - 1)
    assert certain.generate([[1, 2, 3]], limited)[0].outputs[0].finish_reason == "length"


def in_rounds(count: int) -> list[int]:
    """``count`` tokens behind the prompt pass's own, as rounds of 1 + K commit them."""
    return [K + 1] * (count // (K + 1)) + [count % (K + 1)] * (count % (K + 1) > 0)


def test_counters_count_drafts(certain: LLM) -> None:
    before = replace(certain.engine.counters)
    entries = play(certain, [[4, 5], [6, 7]], [FREE, replace(FREE, max_drafts=0)])
    assert_every_draft_accepted(certain, entries)
    after = certain.engine.counters
    assert after.drafts - before.drafts == 6
    assert after.drafted_tokens - before.drafted_tokens == 6 * K
    assert after.accepted_tokens - before.accepted_tokens == 6 * K


# ---- the distribution -------------------------------------------------------------------------------

VOCAB, DRAWN, REQUESTS, REJECT = 6, 3, 1500, 1e-4
PROMPT = [1, 5, 2]


@pytest.fixture(scope="module")
def few_words(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    """A target of six token ids and a draft model that is often wrong."""
    folder = tmp_path_factory.mktemp("few words")
    special = dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"))
    target = make_checkpoint(
        folder / "target", "qwen2", tokenizer=False, vocab_size=VOCAB, num_hidden_layers=1, **special
    )
    (target / "generation_config.json").unlink(missing_ok=True)  # its end is beyond the six
    return target, noisy(target, folder / "draft", 0.4)


@torch.inference_mode()
def softmax_of_texts(target: Path) -> torch.Tensor:
    """Probability of each text of DRAWN tokens behind PROMPT, [VOCAB] * DRAWN, by transformers in float64."""
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float64).eval()
    texts = torch.tensor(list(itertools.product(range(VOCAB), repeat=DRAWN)))
    given = torch.cat((torch.tensor(PROMPT).expand(len(texts), -1), texts), 1)
    logp = model(given[:, :-1]).logits[:, len(PROMPT) - 1 :].log_softmax(-1)
    return logp.gather(2, texts[:, :, None]).sum((1, 2)).exp().view([VOCAB] * DRAWN)


def p_value(entries: list[Entry], p: torch.Tensor) -> float:
    """Pearson's chi-square of the texts; those expected fewer than five times are counted together."""
    index = torch.tensor([e.tokens for e in entries]).T
    counts = torch.zeros_like(p).index_put_(tuple(index), torch.ones(len(entries)).double(), accumulate=True)
    expected = p * len(entries)
    rare = expected < 5
    counts = torch.cat((counts[~rare], counts[rare].sum()[None]))
    expected = torch.cat((expected[~rare], expected[rare].sum()[None]))
    statistic = ((counts - expected) ** 2 / expected).sum()
    return float(torch.special.gammaincc(torch.tensor((len(expected) - 1) / 2).double(), statistic / 2))


@pytest.mark.parametrize("broken", [False, True], ids=["the rule", "a broken rule"])
def test_texts_follow_the_targets_softmax(
    few_words: Checkpoints, monkeypatch: pytest.MonkeyPatch, broken: bool
) -> None:
    """Control: a rule that believes the draft model gives the draft model's distribution, and fails."""
    if broken:
        monkeypatch.setattr(modules, "commit", accept_everything)
    params = [SamplingParams(temperature=1, seed=i, max_tokens=DRAWN, ignore_eos=True) for i in range(REQUESTS)]
    with drafting("standalone", few_words, 2, max_num_seqs=100, max_model_len=16, max_num_batched_tokens=300) as llm:
        entries = play(llm, [PROMPT] * REQUESTS, params)
        if not broken:
            assert 0.1 < acceptance(llm) < 0.9
    p = p_value(entries, softmax_of_texts(few_words[0]))
    assert (p < REJECT) is broken
    assert math.isfinite(p)
