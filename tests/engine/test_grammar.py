"""Structured outputs in the engine: the form holds; speculation, batching, chunks, preemption, graphs change no byte.

The random checkpoints' tokens are bytes, so a form that the model would never find by itself is seen at once.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from llguidance import LLMatcher
from transformers import AutoModelForCausalLM

from tests.drafters.ledger import acceptance
from tests.engine.helpers import counted, draw_drafts, engine, note_launches, tokens
from tests.engine.matrix import DRAFTERS, GRAPH, SCARCE, Checkpoints, Way, with_modules
from tests.engine.structured import CHUNKS, FORMS, METHODS, PARAMS, PROMPTS, QUICK, WAYS, Said, drafting, said
from tests.models.fields import END
from tests.models.make import make_tokenizer
from unisono.drafters.base import PausableDrafter
from unisono.engine.scheduling.scheduler import Scheduler
from unisono.graphs.graph_set import GraphSet
from unisono.structured_output.syntax.parse import parse
from unisono.structured_output.syntax.structural_tag import Vocabulary
from unisono.structured_output.vocabulary import build, describe
from unisono.text.tokenizer import Tokenizer
from unisono.types import SamplingParams, StructuredOutputs


@pytest.fixture(scope="module")
def checkpoints_of(
    checkpoints: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Checkpoints]:
    def make(method: str) -> Checkpoints:
        folder = tmp_path_factory.mktemp(method)
        if method == "mtp":
            return with_modules(checkpoints["qwen3"], folder / "target", 1), None
        return DRAFTERS[method](checkpoints, folder)

    return functools.cache(make)


@pytest.fixture(scope="module")
def plain() -> Callable[[Path], Said]:
    """What a target says without speculation and without forced drafts."""

    @functools.cache
    def run(target: Path) -> Said:
        with engine(target, logprobs_mode="processed_logprobs", max_forced_tokens=0) as llm:
            return said(llm, PROMPTS, PARAMS)

    return run


def check_way(name: str, way: Way, checkpoints: Checkpoints, expected: Said) -> None:
    method, spec = METHODS[name]
    flags = {"logprobs_mode": "processed_logprobs", **way.flags}
    with drafting(checkpoints, method, spec, graph_capture="lazy", **flags) as llm:
        assert said(llm, PROMPTS, PARAMS) == expected
        if way.again:
            before, newest = llm.engine.scheduler.prefix_hits, slice(None, -8, -1)
            assert said(llm, PROMPTS[newest], PARAMS[newest]) == expected[newest], "after a prefix hit"
            assert llm.engine.scheduler.prefix_hits > before
        if "num_pages" in way.flags:
            assert llm.engine.scheduler.preemptions > 0
        assert 0 < acceptance(llm) < 1, "a run that accepts nothing, or rejects nothing, proves nothing"
        kinds = {(program, kind) for program, kind, _ in counted(llm) if program in ("round", "draft", "verify")}
        kind = "eager" if way.flags.get("enforce_eager") else GRAPH
        assert {("draft", kind), ("verify", kind)} <= kinds <= {("draft", kind), ("verify", kind), ("round", kind)}
        llm.engine.check_integrity()
        assert llm.engine.pool.usage == 0


@pytest.mark.parametrize(("name", "way"), QUICK, ids=lambda v: getattr(v, "name", v))
def test_same_bytes(name: str, way: Way, checkpoints_of: Any, plain: Any) -> None:
    checkpoints = checkpoints_of(METHODS[name][0])
    check_way(name, way, checkpoints, plain(checkpoints[0]))


@pytest.mark.full
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.name)
@pytest.mark.parametrize("name", METHODS)
def test_same_bytes_in_every_way(name: str, way: Way, checkpoints_of: Any, plain: Any) -> None:
    checkpoints = checkpoints_of(METHODS[name][0])
    check_way(name, way, checkpoints, plain(checkpoints[0]))


ALTERNATING = [("standalone", CHUNKS), ("tree of ngram", {})]
MORE = [(name, flags) for name in METHODS for flags in ({}, CHUNKS, SCARCE) if (name, flags) not in ALTERNATING]


@pytest.mark.parametrize(
    ("name", "flags"),
    ALTERNATING + [pytest.param(*each, marks=pytest.mark.full) for each in MORE],
    ids=str,
)
def test_same_bytes_with_random_draft_lengths(
    name: str, flags: dict[str, Any], checkpoints_of: Any, plain: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rounds with drafts and without by turns, under masks and not; a paused drafter catches up before either."""
    draw_drafts(monkeypatch)
    passes: list[tuple[str, int]] = []
    note_launches(monkeypatch, lambda key, batch: passes.append((key.program, key.shape.width)))
    method, spec = METHODS[name]
    checkpoints = checkpoints_of(method)
    with drafting(checkpoints, method, spec, adaptive=True, logprobs_mode="processed_logprobs", **flags) as llm:
        assert said(llm, PROMPTS, PARAMS) == plain(checkpoints[0])
        before, newest = llm.engine.scheduler.prefix_hits, slice(None, -8, -1)
        assert said(llm, PROMPTS[newest], PARAMS[newest]) == plain(checkpoints[0])[newest], "after a prefix hit"
        assert llm.engine.scheduler.prefix_hits > before
        assert ("num_pages" in flags) <= (llm.engine.scheduler.preemptions > 0)
        assert llm.engine.counters.accepted_tokens > 0
        width = llm.engine.runner.width
        assert {("verify", 1), ("draft", width), ("verify", width)} <= set(passes)
        caught_up = [after for at, after in pairwise(passes) if at[0] == "catch_up"]
        assert (("draft", width) in caught_up) == isinstance(llm.engine.worker.drafter, PausableDrafter)
        # On a GPU prompts, and passes of catching up, may be quicker without a graph, by measured costs.
        measured = ("extend", "score", "catch_up")
        assert {kind for program, kind, _ in counted(llm) if program not in measured} == {GRAPH}
        llm.engine.check_integrity()
        assert llm.engine.pool.usage == 0


@pytest.mark.parametrize("flags", [{"max_num_seqs": 1}, {"enforce_eager": True}, SCARCE], ids=str)
def test_same_bytes_without_speculation(qwen3: Path, plain: Any, flags: dict[str, Any]) -> None:
    with engine(qwen3, logprobs_mode="processed_logprobs", **flags) as llm:
        assert said(llm, PROMPTS, PARAMS) == plain(qwen3)
        assert not any(key[0] == "draft" for key in counted(llm))
        assert ("num_pages" in flags) == (llm.engine.scheduler.preemptions > 0)


# ---- the form ---------------------------------------------------------------------------------------


def test_answers_have_their_form(qwen3: Path, plain: Any) -> None:
    """With :func:`test_same_bytes` this holds of every drafter."""
    decode = make_tokenizer().decode
    forms = {form: holds for form, holds in FORMS.values()}
    ended = 0
    for (ids, finish, logprobs), params in zip(plain(qwen3), PARAMS, strict=True):
        if params.structured_outputs is None:
            continue
        assert finish == "stop"
        assert ids[-1] == END
        assert END not in ids[:-1]
        assert forms[params.structured_outputs](decode(ids[:-1]))
        ended += 1
        for row in logprobs or []:  # of what was drawn from: under the mask
            assert all(value == -math.inf or math.exp(value) <= 1 + 1e-6 for value in row.values())
    assert ended >= 9


@torch.inference_mode()
def test_a_greedy_token_is_the_likeliest_that_the_grammar_allows(qwen3: Path) -> None:
    """By transformers' logits and a fresh matcher of this test's own, position by position."""
    made, _ = build(describe(Tokenizer(make_tokenizer()), 263, [END]))
    vocabulary = Vocabulary(263, {}, frozenset(), frozenset({END}))
    grammars = [
        (form, LLMatcher(made, parse(kind, getattr(form, kind), True, vocabulary)))
        for kind, (form, _) in FORMS.items()
        if kind in ("regex", "grammar", "json")
    ]
    model = AutoModelForCausalLM.from_pretrained(qwen3, dtype=torch.float64).eval()
    with drafting((qwen3, None), "ngram", {"num_speculative_tokens": 3}) as llm:
        for prompt, (form, matcher) in zip(PROMPTS, grammars, strict=False):
            params = SamplingParams(temperature=0, max_tokens=50, structured_outputs=form)
            (output,) = tokens(llm, [prompt], params)
            logits = model(torch.tensor([prompt + output])).logits[0, len(prompt) - 1 :]
            for token, row in zip(output, logits, strict=False):
                bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")[:263]
                assert token == row.masked_fill(~torch.from_numpy(bits.astype(bool)), -math.inf).argmax()
                assert token == END or matcher.consume_token(token)
            assert matcher.is_accepting()


def test_logprobs_mode_under_a_grammar(qwen3: Path) -> None:
    asked = StructuredOutputs(choice=("yes", "no"))
    params = SamplingParams(temperature=1, seed=1, max_tokens=9, structured_outputs=asked, logprobs=3)
    first = {}
    for mode in ("processed_logprobs", "raw_logprobs"):
        with engine(qwen3, logprobs_mode=mode) as llm:
            (row, *_) = llm.generate([PROMPTS[0]], params)[0].outputs[0].logprobs
        first[mode] = sorted((p.logprob for p in row.values()), reverse=True)
    assert sum(map(math.exp, first["processed_logprobs"])) == pytest.approx(1)
    assert first["processed_logprobs"][2] == -math.inf
    assert -math.inf < first["raw_logprobs"][2]


# ---- how it ends ------------------------------------------------------------------------------------


def test_the_two_passes_of_a_round_may_be_padded_differently(
    qwen3: Path, plain: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Drafts lie where both find them, however many rows either has: none is lost."""
    real, accepted = GraphSet._capture, []

    def capture(self: GraphSet, key: Any, splits: bool) -> Any:
        if key.program == "draft":
            raise torch.OutOfMemoryError("no room")
        return real(self, key, splits)

    for kind in (GRAPH, "eager"):
        flags = {"max_num_seqs": 3, "logprobs_mode": "processed_logprobs"}
        with drafting((qwen3, None), "ngram", {"num_speculative_tokens": 3}, **flags) as llm:
            assert said(llm, PROMPTS, PARAMS) == plain(qwen3)
            accepted.append(llm.engine.counters.accepted_tokens)
            kinds = {key[:2] for key in counted(llm) if key[0] in ("draft", "verify")}
            assert kinds == {("draft", kind), ("verify", GRAPH)}
        monkeypatch.setattr(GraphSet, "_capture", capture)
    assert accepted[0] == accepted[1] > 0


def test_comparison_fails_for_masks_sent_too_early(qwen3: Path, plain: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: rounds launched before the tokens are known get the masks of the position before."""
    expected = plain(qwen3)  # before anything is broken
    monkeypatch.setattr(Scheduler, "_unread", lambda self, sequences: False)
    with engine(qwen3, logprobs_mode="processed_logprobs") as llm:
        assert said(llm, PROMPTS, PARAMS) != expected
