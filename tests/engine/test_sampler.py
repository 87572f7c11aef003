"""The sampler's parameters through the engine: what they mean, and that they change no promise about bytes."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.drafters.ledger import acceptance
from tests.engine.helpers import counted, lazy_engine, prompts, tokens
from tests.engine.matrix import DRAFTERS, drafting
from unisono.entrypoints.llm import LLM
from unisono.types import LOGPROBS_MODES, BadRequest, EngineRequest, SamplingParams, SpeculativeConfig

VOCAB = 263
KINDS: list[dict[str, Any]] = [
    {"repetition_penalty": 1.4},
    {"presence_penalty": 1.5, "frequency_penalty": 0.8, "top_p": 0.9},
    {"logit_bias": {t: 3.0 for t in range(40, 60)}, "temperature": 0.0, "frequency_penalty": 1.0},
    {"allowed_token_ids": tuple(range(0, VOCAB, 2)), "min_p": 0.02},
    {"bad_words": ("th", "Q!", *"abcdefghijklmnopqrstuvwxyz0123456789!?")},
    {"min_tokens": 9, "stop_token_ids": (5, 6, 7), "logit_bias": {5: 5.0, 6: 5.0, 7: 5.0}},
    {},
    {"repetition_penalty": 0.7, "presence_penalty": -1.0, "logit_bias": {7: -100.0}, "top_k": 30},
]
PROMPTS = prompts(8, 250)


def params(max_tokens: int = 24) -> list[SamplingParams]:
    kinds = [{"temperature": 1.0, "ignore_eos": True, **KINDS[i % len(KINDS)]} for i in range(len(PROMPTS))]
    for i, kind in enumerate(kinds):
        kind["logprobs"] = (None, 0, 3, 20, 1)[i % 5]
        kind["prompt_logprobs"] = (None, None, 2, 0)[i % 4]
    return [SamplingParams(**kind, seed=50 + i, max_tokens=max_tokens + i % 5) for i, kind in enumerate(kinds)]


def alone(path: Path, given: list[SamplingParams]) -> list[Any]:
    """Each request by itself, eager, with an empty prefix cache."""
    with lazy_engine(path, max_num_seqs=1, enforce_eager=True) as llm:
        return [answers(llm, [p], [q])[0] for p, q in zip(PROMPTS, given, strict=False)]


def answers(llm: LLM, batch: list[list[int]], given: list[SamplingParams]) -> list[Any]:
    """All that must be the same to the bit."""
    return [(o.outputs[0].token_ids, o.outputs[0].logprobs, o.prompt_logprobs) for o in llm.generate(batch, given)]


@pytest.fixture(scope="module")
def expected(qwen3: Path) -> list[Any]:
    return alone(qwen3, params())


@pytest.mark.parametrize(
    "flags",
    [{}, {"max_num_seqs": 3, "max_num_batched_tokens": 37}, {"enforce_eager": True}],
    ids=["batched", "three at once, chunked", "eager"],
)
def test_batching_chunking_and_graphs_change_nothing(qwen3: Path, expected: list[Any], flags: dict) -> None:
    """Nor a bit of any log-probability."""
    with lazy_engine(qwen3, **flags) as llm:
        assert answers(llm, PROMPTS, params()) == expected
        assert answers(llm, PROMPTS, params()) == expected, "after prefix hits"
        assert llm.engine.scheduler.prefix_hits > 0
        kinds = {kind for program, kind, _ in counted(llm) if program == "round"}
        graph = "full" if llm.engine.config.device.type == "cuda" else "tape"
        assert kinds == ({"eager"} if flags.get("enforce_eager") else {graph})


def test_preemption_changes_nothing(qwen3: Path) -> None:
    """A request that resumes has part of its output in the pass that computes its prompt."""
    given = params(max_tokens=40)
    wanted = alone(qwen3, given)
    with lazy_engine(qwen3, max_model_len=128, num_pages=1 + 8) as llm:
        assert answers(llm, PROMPTS, given) == wanted
        assert llm.engine.scheduler.preemptions >= 3


FEW = tuple(range(3, 10))
"""So few tokens that any drafter is right now and then; among them the stop ids."""


def few_words() -> list[SamplingParams]:
    """Every kind of edit, where drafts are accepted: what a penalty or a ban does shows within a round."""
    bans = ("".join(pair) for pair in itertools.product("$%&'", repeat=2))  # tokens 3 to 6, two in a row
    given = [replace(p, allowed_token_ids=FEW, logprobs=2) for p in params()]
    return [replace(p, bad_words=tuple(bans)) if p.bad_words else p for p in given]


@pytest.fixture(scope="module")
def undrafted() -> Callable[[Path], tuple[list[Any], list[Any]]]:
    """What a target answers without a drafter, to both lists of parameters."""

    @functools.cache
    def run(target: Path) -> tuple[list[Any], list[Any]]:
        with lazy_engine(target) as llm:
            return answers(llm, PROMPTS, params()), answers(llm, PROMPTS, few_words())

    return run


USUAL = ("ngram", "eagle3")


@pytest.mark.parametrize("method", [m if m in USUAL else pytest.param(m, marks=pytest.mark.full) for m in DRAFTERS])
def test_drafting_changes_nothing(checkpoints: dict[str, Path], undrafted: Any, method: str, tmp_path: Path) -> None:
    """Penalties, bias, bans, bad words, min_tokens and log-probabilities, with every drafter."""
    made = DRAFTERS[method](checkpoints, tmp_path)
    free, few = undrafted(made[0])
    with drafting(method, made, 3) as llm:
        assert answers(llm, PROMPTS, params()) == free
        assert answers(llm, PROMPTS, few_words()) == few
        assert 0 < acceptance(llm) < 1


def test_comparison_fails_without_logit_edits_of_few_words(qwen3: Path, undrafted: Any) -> None:
    """The comparison above can fail: without its edits each kind has another answer."""
    edits = ("repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias", "bad_words", "min_tokens")
    without = [replace(p, **{name: getattr(SamplingParams(), name) for name in edits}) for p in few_words()]
    with lazy_engine(qwen3) as llm:
        changed = [a != b for a, b in zip(undrafted(qwen3)[1], answers(llm, PROMPTS, without), strict=True)]
    edited = [any(getattr(p, name) != getattr(SamplingParams(), name) for name in edits) for p in few_words()]
    kinds = len(KINDS)
    assert [any(changed[kind::kinds]) for kind in range(kinds)] == edited[:kinds]


def test_drafts_see_penalties_and_the_drafts_before_them(qwen3: Path) -> None:
    """A draft model that is the target itself is always right, however much each token moves the next one's logits."""
    spec = SpeculativeConfig("standalone", str(qwen3), num_speculative_tokens=3)
    given = SamplingParams(temperature=0.1, seed=3, max_tokens=1 + 4 * 6, ignore_eos=True, frequency_penalty=2.0)
    with lazy_engine(qwen3, speculative=spec) as llm:
        got = tokens(llm, PROMPTS, given)
        assert llm.engine.counters.accepted_tokens == llm.engine.counters.drafted_tokens == len(PROMPTS) * 3 * 6
        assert got != tokens(llm, PROMPTS, replace(given, frequency_penalty=0.0))


@torch.inference_mode()
def test_greedy_penalties_equal_a_float64_reference(qwen3: Path) -> None:
    """Each step of the engine's answer is the argmax of transformers' logits, penalised as vLLM defines it."""
    p = SamplingParams(
        temperature=0,
        max_tokens=30,
        ignore_eos=True,
        repetition_penalty=1.3,
        presence_penalty=0.4,
        frequency_penalty=0.3,
        logit_bias={9: 1.5},
    )
    with lazy_engine(qwen3, dtype="float32") as llm:
        got = tokens(llm, PROMPTS[:4], p)
    model = AutoModelForCausalLM.from_pretrained(qwen3, dtype=torch.float64).eval()
    for prompt, output in zip(PROMPTS, got, strict=False):
        logits = model(torch.tensor([prompt + output])).logits[0].double()
        assert len(output) == 30
        for i, token in enumerate(output):
            row = logits[len(prompt) - 1 + i].clone()
            row[9] += 1.5
            seen = list({*prompt, *output[:i]})
            row[seen] = torch.where(row[seen] > 0, row[seen] / 1.3, row[seen] * 1.3)
            for old in output[:i]:
                row[old] -= 0.3
            row[list(set(output[:i]))] -= 0.4
            assert int(row.argmax()) == token


@torch.inference_mode()
@pytest.mark.parametrize("mode", LOGPROBS_MODES)
def test_logprobs_equal_a_float64_reference(qwen3: Path, mode: str) -> None:
    """Raw: of the model's logits. Processed: of what was drawn from, biased, divided by T, cut to the top 8."""
    p = SamplingParams(
        temperature=0.6, seed=1, max_tokens=20, ignore_eos=True, logprobs=5, logit_bias={9: 4.0}, top_k=8
    )  # fmt: skip
    with lazy_engine(qwen3, dtype="float32", logprobs_mode=mode) as llm:
        got = [o.outputs[0] for o in llm.generate(PROMPTS[:3], p)]
    model = AutoModelForCausalLM.from_pretrained(qwen3, dtype=torch.float64).eval()
    for prompt, output in zip(PROMPTS, got, strict=False):
        logits = model(torch.tensor([prompt + output.token_ids])).logits[0].double()
        assert output.logprobs is not None
        for i, (token, entry) in enumerate(zip(output.token_ids, output.logprobs, strict=True)):
            row = logits[len(prompt) - 1 + i].clone()
            if mode.startswith("processed"):
                row[9] += 4.0
                row = torch.where(row >= row.topk(8).values[-1], row / 0.6, -torch.inf)
            row = row.log_softmax(-1) if mode.endswith("logprobs") else row
            order = row.argsort(descending=True).tolist()
            assert {*entry} == {token, *order[:5]}
            assert entry[token].rank == order.index(token) + 1
            for alternative, value in entry.items():
                assert value.logprob == pytest.approx(float(row[alternative]), abs=2e-4)
                assert value.rank == order.index(alternative) + 1
        assert output.cumulative_logprob == sum(
            e[t].logprob for t, e in zip(output.token_ids, output.logprobs, strict=True)
        )


@pytest.fixture(scope="module")
def llm(qwen3: Path):
    with lazy_engine(qwen3) as llm:
        yield llm


def hot(**options: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 1.5, "max_tokens": 60, "seed": 5, "ignore_eos": True, **options})


def test_allowed_token_ids(llm: LLM) -> None:
    assert set(tokens(llm, [[1, 2]], hot(allowed_token_ids=(3, 77, 9)))[0]) == {3, 77, 9}


def test_logit_bias_forces_and_forbids(llm: LLM) -> None:
    assert set(tokens(llm, [[1, 2]], hot(logit_bias={44: 100.0}))[0]) == {44}
    free = set(tokens(llm, [[1, 2]], hot())[0])
    kept = tokens(llm, [[1, 2]], hot(logit_bias=dict.fromkeys(free, -100.0)))[0]
    assert len(kept) == 60
    assert not free & set(kept)


def test_bad_words_are_not_generated(llm: LLM) -> None:
    """Forbidding what comes, again and again, leaves a text without any of it."""
    assert llm.tokenizer is not None
    letters = tuple(llm.tokenizer.encode(letter, add_special_tokens=False)[0] for letter in "abcdefgh")
    words: list[str] = []
    for length in (1, 2, 3, 2, 3, 2, 4):
        text = llm.generate(["hello"], hot(bad_words=tuple(words), allowed_token_ids=letters))[0].outputs[0].text
        assert len(text) == 60
        assert not any(word in text for word in words), (words, text)
        words.append(text[:length])


def test_min_tokens_holds_back_stop_ids_and_stop_strings(llm: LLM) -> None:
    stops = (5, 6, 7, 8)
    likely = hot(stop_token_ids=stops, logit_bias=dict.fromkeys(stops, 5.0))
    short = tokens(llm, [[1, 2]], likely)[0]
    assert len(short) < 20
    longer = tokens(llm, [[1, 2]], replace(likely, min_tokens=30))[0]
    assert 30 < len(longer) < 50
    assert not set(longer[:30]) & set(stops)
    letters = tuple("abcdefghijklmnopqrstuvwxyz0123456789")
    assert len(tokens(llm, ["hello"], hot(stop=letters))[0]) < 20
    assert len(tokens(llm, ["hello"], hot(stop=letters, min_tokens=30))[0]) > 30


def test_logprobs_end_with_the_tokens(llm: LLM) -> None:
    """What is generated behind a stop string has no entries; a request that wants none gets none."""
    full = llm.generate(["hello"], hot())[0].outputs[0]
    assert full.logprobs is None
    cut = llm.generate(["hello"], hot(stop=full.text[4:6], logprobs=2))[0].outputs[0]
    assert cut.logprobs is not None
    assert len(cut.logprobs) == len(cut.token_ids) < 60
    assert llm.tokenizer is not None
    for token, entry in zip(cut.token_ids, cut.logprobs, strict=True):
        assert entry[token].decoded_token == llm.tokenizer.decode([token], skip_special_tokens=False)


@torch.inference_mode()
def test_prompt_logprobs_equal_a_float64_reference(qwen3: Path) -> None:
    """In chunks, next to a request that wants none, and again when the prefix cache has the prompt."""
    given = [replace(hot(), prompt_logprobs=3), hot(), replace(hot(n=2), prompt_logprobs=0)]
    with lazy_engine(qwen3, dtype="float32", max_num_batched_tokens=16) as llm:
        first, second = (llm.generate(PROMPTS[:3], given) for _ in range(2))
        assert [o.prompt_logprobs for o in first] == [o.prompt_logprobs for o in second]
        assert [len(o.outputs) for o in second] == [1, 1, 2]
        assert second[0].num_cached_tokens == second[2].num_cached_tokens == 0 < second[1].num_cached_tokens
        passes = counted(llm)
        assert passes["score", "full" if torch.cuda.is_available() else "tape", ""] > 0
    model = AutoModelForCausalLM.from_pretrained(qwen3, dtype=torch.float64).eval()
    assert first[1].prompt_logprobs is None
    for output, wanted in ((first[0], 3), (first[2], 0)):
        prompt, scores = output.prompt_token_ids, output.prompt_logprobs
        rows = model(torch.tensor([prompt])).logits[0].double().log_softmax(-1)
        assert len(scores) == len(prompt)
        assert scores[0] is None
        for row, token, entry in zip(rows, prompt[1:], scores[1:], strict=False):
            order = row.argsort(descending=True).tolist()
            assert {*entry} == {token, *order[:wanted]}
            for alternative, value in entry.items():
                assert value.logprob == pytest.approx(float(row[alternative]), abs=2e-4)


def test_n_sequences_are_n_seeds_and_one_prompt(qwen3: Path) -> None:
    prompt, short = prompts(1, 250, low=50, high=51)[0], {"max_tokens": 20}
    with lazy_engine(qwen3) as llm:
        several = llm.generate([prompt, [1, 2]], hot(n=5, **short))
        assert [o.index for o in several[0].outputs] == [0, 1, 2, 3, 4]
        assert llm.engine.scheduler.prefix_hits == 4 * 48  # all but the first found the prompt's three full pages
        assert several[0].seed == 5
        for o in several:
            single = [tokens(llm, [o.prompt_token_ids], hot(seed=5 + i, **short))[0] for i in range(5)]
            assert [c.token_ids for c in o.outputs] == single
        assert len({tuple(t) for t in single}) == 5
        top = 2**63 - 1
        wrapped = llm.generate([[1, 2]], hot(n=2, seed=top, **short))[0]
        assert wrapped.outputs[1].token_ids == tokens(llm, [[1, 2]], hot(seed=0, **short))[0]


def test_follower_sequence_runs_after_its_leader_is_aborted(qwen3: Path) -> None:
    with lazy_engine(qwen3, max_num_seqs=1) as llm:
        first, second = EngineRequest("r", [1] * 40, hot(n=2)).sequences()
        for request in (first, second):
            llm.engine.add(request)
        llm.engine.step()
        llm.engine.abort(first.request_id)
        got = [t for _ in range(200) if llm.engine.has_work() for d in llm.engine.step() for t in d.token_ids]
        assert got == tokens(llm, [[1] * 40], hot(seed=6))[0]


def test_the_stop_string_is_kept_on_request(llm: LLM) -> None:
    full = llm.generate(["hello"], hot())[0].outputs[0].text
    stop = full[4:6]
    plain, kept = (
        llm.generate(["hello"], hot(stop=stop, include_stop_str_in_output=keep))[0].outputs[0] for keep in (False, True)
    )
    assert kept.text == plain.text + stop
    assert kept.token_ids == plain.token_ids


@pytest.mark.parametrize(
    ("options", "param", "says"),
    [
        ({"repetition_penalty": 0}, "repetition_penalty", "above 0"),
        ({"presence_penalty": 2.1}, "presence_penalty", "between -2 and 2"),
        ({"frequency_penalty": float("nan")}, "frequency_penalty", "between -2 and 2"),
        ({"logit_bias": {1: 101}}, "logit_bias", "101.*between -100 and 100"),
        ({"logit_bias": {-1: 1}}, "logit_bias", "token ids"),
        ({"logit_bias": {VOCAB: 1}}, "logit_bias", "token id 263.*0 to 262"),
        ({"logit_bias": {i: 1 for i in range(301)}}, "logit_bias", "301 entries; at most 300"),
        ({"allowed_token_ids": ()}, "allowed_token_ids", "at least one"),
        ({"allowed_token_ids": (5, VOCAB)}, "allowed_token_ids", "token id 263"),
        ({"stop_token_ids": (VOCAB,)}, "stop_token_ids", "token id 263.*0 to 262"),
        ({"stop_token_ids": tuple(range(17))}, "stop_token_ids", "17 entries; at most 16"),
        ({"bad_words": ("",)}, "bad_words", "non-empty"),
        ({"bad_words": ("x" * 17,)}, "bad_words", "17 tokens; 1 to 16"),
        ({"bad_words": tuple(f"w{i}" for i in range(65))}, "bad_words", "at most 64"),
        ({"min_tokens": 61}, "min_tokens", "from 0 to max_tokens=60"),
        ({"min_tokens": -1}, "min_tokens", "from 0"),
        ({"logprobs": 21}, "logprobs", "21.*from 0 to 20"),
        ({"logprobs": -1}, "logprobs", "from 0 to 20"),
        ({"prompt_logprobs": 21}, "prompt_logprobs", "21.*from 0 to 20"),
        ({"n": 0}, "n", "from 1 to 128"),
        ({"n": 129}, "n", "129.*from 1 to 128"),
    ],
)
def test_out_of_range(llm: LLM, options: dict, param: str, says: str) -> None:
    with pytest.raises(BadRequest, match=says) as caught:
        llm.generate([[1, 2]], hot(**options))
    assert caught.value.param == param
    assert not llm.engine.scheduler.has_work


def test_comparison_fails_without_logit_edits(qwen3: Path, expected: list[Any], llm: LLM) -> None:
    """The comparisons above can fail: without its edits, a request of every kind has another answer."""
    plain = SamplingParams()
    edits = ("repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias", "allowed_token_ids",
             "bad_words", "min_tokens")  # fmt: skip
    without = [replace(p, **{name: getattr(plain, name) for name in edits}) for p in params()]
    changed = [before != after for before, after in zip(expected, answers(llm, PROMPTS, without), strict=True)]
    kinds = len(KINDS)
    assert [any(changed[kind::kinds]) for kind in range(kinds)] == [bool(kind) for kind in KINDS]
