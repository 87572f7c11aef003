"""Structured outputs in rounds: where they end, their two replays, turns with other requests, aborts, bad input."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.drafters.ledger import play
from tests.engine.helpers import counted, engine, note_launches, tokens
from tests.engine.matrix import GRAPH
from tests.engine.structured import PROMPTS, drafting
from tests.models.fields import END
from tests.models.make import make_checkpoint, make_tokenizer
from unisono.entrypoints.llm import LLM
from unisono.types import BadRequest, EngineRequest, SamplingParams, StructuredOutputs, Thinking


@pytest.fixture(scope="module")
def certain(qwen3: Path) -> Any:
    """An engine whose drafts are what the target would say freely."""
    with drafting((qwen3, qwen3), "standalone", {"num_speculative_tokens": 3}) as llm:
        yield llm


def answer(llm: LLM, regex: str, **params: Any) -> tuple[str, str | None]:
    asked = StructuredOutputs(regex=regex)
    given = {"temperature": 1, "seed": 3, "max_tokens": 20, "logit_bias": {END: 9.0}} | params
    output = llm.generate([PROMPTS[0]], SamplingParams(structured_outputs=asked, **given))[0].outputs[0]
    assert END not in output.token_ids[:-1]
    return output.text, output.finish_reason


def test_output_ends_exactly_when_the_grammar_is_complete(certain: LLM) -> None:
    """The bias makes every position want to end, the drafter's too."""
    assert answer(certain, "(ab){3}") == ("ababab", "stop")
    text, finish = answer(certain, "(ab){3,9}")
    assert (text, finish) == ("ababab", "stop")
    assert answer(certain, "(ab){3,9}", max_tokens=3) == ("aba", "length")


def test_min_tokens_and_ignore_eos_apply_while_the_grammar_continues(certain: LLM) -> None:
    assert answer(certain, "(ab){1,9}", min_tokens=7) == ("abababab", "stop")
    assert answer(certain, "(ab){2}", min_tokens=7) == ("abab", "stop")
    assert answer(certain, "(ab){1,5}", ignore_eos=True) == ("ababababab", "stop")
    assert answer(certain, "(ab)*", ignore_eos=True) == ("ab" * 10, "length")


def test_stop_ids_and_strings_end_it_as_any_text(certain: LLM) -> None:
    (b,) = make_tokenizer().encode("b", add_special_tokens=False)
    output = certain.generate(
        [PROMPTS[0]],
        SamplingParams(structured_outputs=StructuredOutputs(regex="(ab){3}"), stop_token_ids=(b,), max_tokens=9),
    )[0].outputs[0]
    assert (output.text, output.finish_reason) == ("a", "stop")
    assert answer(certain, "abcabc", stop=("ca",)) == ("ab", "stop")


def test_a_request_without_stop_ids_ends_all_the_same(certain: LLM) -> None:
    """The engine knows what ends a text."""
    params = SamplingParams(seed=1, max_tokens=30, structured_outputs=StructuredOutputs(regex="a{5}"))
    certain.engine.add(EngineRequest("alone", PROMPTS[1], params))
    deltas = []
    while certain.engine.has_work():
        deltas += certain.engine.step()
    assert [t for d in deltas for t in d.token_ids][-1] == END
    assert sum(len(d.token_ids) for d in deltas) == 6
    assert deltas[-1].finish.text == "stop"


def test_request_without_allowed_tokens_fails_alone(certain: LLM) -> None:
    """Its other parameters forbid all that its grammar allows."""
    letters = tuple(make_tokenizer().encode("xyz", add_special_tokens=False))
    stuck = SamplingParams(seed=1, structured_outputs=StructuredOutputs(regex="xab"), allowed_token_ids=letters)
    free = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    (alone,) = tokens(certain, [PROMPTS[2]], free)
    for name, params in (("stuck", stuck), ("free", free)):
        certain.engine.add(certain._request(PROMPTS[2], params) if name == "free" else EngineRequest(name, [1], stuck))
    deltas = []
    while certain.engine.has_work():
        deltas += certain.engine.step()
    (failed,) = [d for d in deltas if d.error is not None]
    assert failed.request_id == "stuck"
    assert "no token of the vocabulary" in str(failed.error)
    assert failed.error_param == "allowed_token_ids"
    assert [t for d in deltas if d.request_id != "stuck" for t in d.token_ids] == alone
    certain.engine.check_integrity()
    assert certain.engine.pool.usage == 0
    failed_output, other = certain.generate([[1], PROMPTS[2]], [stuck, free])
    assert failed_output.outputs[0].finish_reason == "abort"
    assert failed_output.outputs[0].error == failed.error
    assert (other.outputs[0].token_ids, other.outputs[0].error) == (alone, None)


@pytest.mark.parametrize("thinking", [None, Thinking("<think>", "</think>", "thinking", 3)])
@pytest.mark.parametrize(
    ("regex", "restriction", "param"),
    [
        ("ab+", {"allowed": "xyz"}, "allowed_token_ids"),
        ("ab+", {"bad_words": ("a",)}, "bad_words"),
        ("ab+", {"allowed": "axyz"}, None),
        ("[ab]+", {"bad_words": ("a",)}, None),
        ("ab+", {"bad_words": ("ab",)}, None),  # of two tokens
    ],
)
def test_grammar_without_an_allowed_first_token_is_refused(
    certain: LLM, regex: str, restriction: dict[str, Any], param: str | None, thinking: Thinking | None
) -> None:
    """Before the request is queued: its other parameters leave no first token of the form."""
    ids = tuple(make_tokenizer().encode(restriction.get("allowed", ""), add_special_tokens=False)) or None
    words = restriction.get("bad_words", ())
    params = SamplingParams(
        seed=1,
        max_tokens=2,
        structured_outputs=StructuredOutputs(regex=regex),
        allowed_token_ids=ids,
        bad_words=words,
        thinking=thinking,
    )
    bad = tuple(tuple(make_tokenizer().encode(word, add_special_tokens=False)) for word in words)
    request = EngineRequest("form", [1], params, bad_words=bad)
    if param is None:
        certain.engine.check(request)
        return
    with pytest.raises(BadRequest, match="can begin the structured output") as refused:
        certain.engine.add(request)
    assert refused.value.param == param
    assert not certain.engine.has_work()


def test_a_complete_form_needs_the_end_of_sequence_id(certain: LLM) -> None:
    ids = tuple(make_tokenizer().encode("ab", add_special_tokens=False))
    params = SamplingParams(seed=1, structured_outputs=StructuredOutputs(regex="ab"), allowed_token_ids=ids)
    (stuck,) = certain.generate([PROMPTS[0]], params)
    assert f"end-of-sequence id, {END}" in str(stuck.outputs[0].error)
    (whole,) = certain.generate([PROMPTS[0]], replace(params, allowed_token_ids=(*ids, END)))
    assert (whole.outputs[0].text, whole.outputs[0].finish_reason) == ("ab", "stop")


# ---- passes -----------------------------------------------------------------------------------------


def rounds(llm: LLM) -> dict[str, int]:
    return {program: n for (program, kind, _), n in counted(llm).items() if kind == GRAPH and program != "extend"}


FREE_RUN = SamplingParams(temperature=1, seed=5, max_tokens=1 + 4 * 12, ignore_eos=True)
FORM = SamplingParams(seed=1, max_tokens=30, structured_outputs=StructuredOutputs(regex="[a-f]{9}-"))


def test_a_round_with_a_grammar_is_two_replays_and_others_have_their_own(certain: LLM) -> None:
    """Each kind commits what it would alone, in as many rounds; without a grammar there is nothing but rounds."""
    alone = []
    for prompt, params in (([1, 2, 3], FREE_RUN), ([4, 5], FORM)):
        certain.engine.runner.planner.reset_counts()
        alone += play(certain, [prompt], [params])
        programs = rounds(certain).keys()
        assert programs == ({"round"} if params is FREE_RUN else {"draft", "verify"})
    certain.engine.runner.planner.reset_counts()
    together = play(certain, [[1, 2, 3], [4, 5]], [FREE_RUN, FORM])
    assert [(e.tokens, e.rounds) for e in together] == [(e.tokens, e.rounds) for e in alone]
    counts, (free, form) = rounds(certain), together
    assert counts["draft"] == counts["verify"] == len(form.rounds), "and none in vain"
    assert len(free.rounds) <= counts["round"] <= len(free.rounds) + 1
    assert {kind for _, kind, _ in counted(certain)} == {GRAPH}


def test_masked_and_free_rounds_alternate(certain: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """A round of the others runs while the host reads drafts, and one while it reads tokens."""
    launched: list[str] = []
    note_launches(monkeypatch, lambda key, batch: launched.append(key.program))
    play(certain, [[1, 2, 3], [4, 5]], [FREE_RUN, FORM])
    both = launched[launched.index("draft") : len(launched) - launched[::-1].index("round")]
    assert len(both) > 12
    assert both == (["draft", "round", "verify", "round"] * len(both))[: len(both)]


def test_aborted_between_the_two_passes(certain: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its slot may be another request's by the time the drafts are verified: nothing is committed there."""
    (alone,) = play(certain, [PROMPTS[3]], [FREE_RUN])
    engine = certain.engine
    for name in ("stays", "goes"):
        engine.add(replace(certain._request([4, 5], FORM), request_id=name))
    got: dict[str, list[int]] = {"stays": [], "goes": [], "later": []}

    def step() -> None:
        for delta in engine.step():
            got[delta.request_id] += delta.token_ids

    while engine.scheduler._drafting is None:
        step()
    slot = engine._sequences["goes"].slot
    engine.abort("goes")
    named: list[int] = []
    note_launches(monkeypatch, lambda key, batch: named.extend(batch["slots"]))
    later = replace(certain._request(PROMPTS[3], FREE_RUN), request_id="later")
    engine.add(later)
    slots = set()
    while engine.has_work():
        step()
        slots |= {s.slot for s in engine.scheduler.active if s.request.request_id == "later"}
    assert slot in slots, "the slot went to another request"
    assert min(named) >= 0
    assert engine.worker.slots.padding in named
    assert got["later"] == alone.tokens
    assert got["stays"] == play(certain, [[4, 5]], [FORM])[0].tokens
    engine.check_integrity()
    assert engine.pool.usage == 0


def test_all_aborted_between_the_two_passes(certain: LLM) -> None:
    engine = certain.engine
    engine.add(replace(certain._request([4, 5], FORM), request_id="goes"))
    while engine.scheduler._drafting is None:
        engine.step()
    engine.abort("goes")
    (alone,) = play(certain, [[4, 5]], [FORM])
    assert play(certain, [[4, 5]], [FORM]) == [alone]
    assert engine.pool.usage == 0


def test_only_masked_rounds_wait_for_unread_tokens(certain: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    unread: list[int] = []

    def note(key: Any, batch: Any) -> None:
        if key.program in ("round", "draft"):
            scheduler = certain.engine.scheduler
            unread.append(scheduler.progress.in_flight[scheduler.running.rows.slots].max())

    note_launches(monkeypatch, note)
    free = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    tokens(certain, [PROMPTS[0]], free)
    assert set(unread) == {2}, "this round, and the pass before it"
    unread.clear()
    tokens(certain, [PROMPTS[0]], replace(free, structured_outputs=StructuredOutputs(regex="[a-z]{20}")))
    assert set(unread) == {1}


def test_explain_shows_the_passes(certain: LLM) -> None:
    told: Any = certain.engine.info()
    features = {(row["program"], row["features"]) for row in told["graphs"]}
    assert {("draft", "NULL"), ("verify", "NULL+masks"), ("extend", "NULL+masks"), ("extend", "NULL")} <= features


# ---- bad input --------------------------------------------------------------------------------------


def test_bad_input_is_refused_before_anything_runs(certain: LLM) -> None:
    good, bad = SamplingParams(max_tokens=2), SamplingParams(structured_outputs=StructuredOutputs(regex="(ab"))
    before = certain.engine.counters.requests
    with pytest.raises(BadRequest, match="not closed"):
        certain.generate([[1], [2]], [good, bad])
    assert certain.engine.counters.requests == before
    with pytest.raises(BadRequest, match="must be StructuredOutputs"):
        SamplingParams(structured_outputs={"regex": "a"})  # type: ignore[arg-type]


def test_a_checkpoint_without_a_tokenizer(tmp_path: Path) -> None:
    target = make_checkpoint(tmp_path, "qwen2", tokenizer=False)
    with engine(target, max_num_seqs=1, enforce_eager=True) as llm, pytest.raises(BadRequest, match="no tokenizer"):
        llm.generate([[1]], SamplingParams(structured_outputs=StructuredOutputs(regex="a")))


def test_drafts_that_are_not_verified(qwen3: Path) -> None:
    flags = {"synthetic_acceptance_length": 2.0, "enforce_eager": True}
    with (
        drafting((qwen3, None), "ngram", {"num_speculative_tokens": 3}, **flags) as llm,
        pytest.raises(BadRequest, match="synthetic acceptance"),
    ):
        llm.generate([[1]], SamplingParams(structured_outputs=StructuredOutputs(regex="a")))
