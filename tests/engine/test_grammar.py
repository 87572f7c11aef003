"""Structured outputs in the engine: the form holds; speculation, batching, chunks, preemption, graphs change no byte.

The random checkpoints' tokens are bytes, so a form that the model would never find by itself is seen at once.
"""

from __future__ import annotations

import functools
import json
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import xgrammar
from transformers import AutoModelForCausalLM

from tests.drafters.ledger import acceptance, play
from tests.engine.helpers import counted, draw_drafts, engine, prompts, tokens
from tests.engine.matrix import DRAFTERS, GRAPH, SCARCE, Checkpoints, Way, with_modules
from tests.models.make import END, make_checkpoint, make_tokenizer
from unisono.drafters.base import PausableDrafter
from unisono.engine.scheduler import Scheduler
from unisono.graphs.graph_set import GraphSet
from unisono.graphs.planner import Planner
from unisono.llm import LLM
from unisono.types import BadRequest, EngineRequest, SamplingParams, SpeculativeConfig, StructuredOutputs

SCHEMA = {
    "type": "object",
    "properties": {
        "id": {"type": "integer", "minimum": 0, "maximum": 99},
        "kind": {"enum": ["cat", "dog"]},
        "tags": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2},
    },
    "required": ["id", "kind", "tags"],
    "additionalProperties": False,
}


def is_the_object(text: str) -> bool:
    value = json.loads(text)
    return (
        list(value) == ["id", "kind", "tags"]
        and type(value["id"]) is int
        and 0 <= value["id"] <= 99
        and value["kind"] in ("cat", "dog")
        and len(value["tags"]) <= 2
        and all(type(tag) is bool for tag in value["tags"])
    )


def is_a_list(text: str) -> bool:
    return json.loads(text.replace("x", '"x"')) is not None


Form = tuple[StructuredOutputs, Callable[[str], Any]]

CHOICES = ("yes", "yesterday", 'no "\n', "ünïcödé")
PATTERN = r"((ab|ba|cc){2,5}-){1,3}[0-9]{2}"
EBNF = 'root ::= "[" (item ("," item){0,3})? "]"\nitem ::= "x" | "[" "x"? "]"'
FORMS: dict[str, Form] = {
    "json": (StructuredOutputs(json=SCHEMA, disable_any_whitespace=True), is_the_object),
    "regex": (StructuredOutputs(regex=PATTERN), re.compile(PATTERN).fullmatch),
    "choice": (StructuredOutputs(choice=CHOICES), CHOICES.__contains__),
    "grammar": (StructuredOutputs(grammar=EBNF), is_a_list),
}

LETTERS = tuple(make_tokenizer().encode("abc-0123456789", add_special_tokens=False))
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "edited": {"repetition_penalty": 1.3, "frequency_penalty": 0.2, "top_p": 0.95, "logprobs": 2},
    "eager to end": {"logit_bias": {END: 6.0}, "logprobs": 0},  # drafters propose the end in vain, and in the end not
    "narrow": {"allowed_token_ids": (*LETTERS, END)},  # drafters are right now and then
}
FREE = SamplingParams(temperature=0.7, max_tokens=16, ignore_eos=True, logprobs=1)


def mix() -> tuple[list[list[int]], list[SamplingParams]]:
    """Each form under several kinds of parameters, greedy and sampled; every fifth request is free."""
    params = []
    for i, (form, _) in enumerate(list(FORMS.values()) * 3):
        kind = "narrow" if form.regex and i > 4 else ("plain", "edited", "eager to end")[i % 3]
        params.append(
            SamplingParams(
                temperature=(0.0, 1.0, 0.8)[i % 3], seed=i, max_tokens=60, structured_outputs=form,
                max_drafts=(None, None, None, 1, 0)[i % 5], **KINDS[kind],
            )
        )  # fmt: skip
    params[4::5] = [replace(FREE, seed=50 + i) for i in range(len(params[4::5]))]
    return prompts(len(params), 250, low=3, high=32, seed=5), params


PROMPTS, PARAMS = mix()

Said = list[tuple[list[int], str | None, Any]]


def said(llm: LLM, batch: Sequence[list[int]], params: Sequence[SamplingParams]) -> Said:
    """Each answer's tokens, its end and its log-probabilities, to the bit."""
    outputs = [o.outputs[0] for o in llm.generate(list(batch), list(params))]
    return [
        (o.token_ids, o.finish_reason, o.logprobs and [{t: p.logprob for t, p in row.items()} for row in o.logprobs])
        for o in outputs
    ]


# ---- the same bytes ---------------------------------------------------------------------------------

TREE = {"speculative_token_tree": "[(0,), (1,), (2,), (3,), (0, 0), (1, 0), (1, 1)]"}
METHODS: dict[str, tuple[str, dict[str, Any]]] = {
    **{method: (method, {"num_speculative_tokens": 3}) for method in ("ngram", "standalone", "eagle3", "mtp")},
    "tree of standalone": ("standalone", TREE),
    "tree of eagle3": ("eagle3", TREE),
    "tree of ngram": ("ngram", TREE),
}
CHUNKS = {"max_num_batched_tokens": 16}
WAYS = (Way(0), Way(0, {"max_num_seqs": 3, "enforce_eager": True}), Way(0, CHUNKS, again=True), Way(0, SCARCE))
QUICK = [("ngram", WAYS[3]), ("standalone", WAYS[2]), ("eagle3", WAYS[0]), ("tree of standalone", WAYS[1])]


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
    """What a target says without speculation."""

    @functools.cache
    def run(target: Path) -> Said:
        with engine(target, logprobs_mode="processed_logprobs") as llm:
            return said(llm, PROMPTS, PARAMS)

    return run


def drafting(checkpoints: Checkpoints, method: str, spec: dict[str, Any], **flags: Any) -> LLM:
    target, model = checkpoints
    given = {"method": method, **spec} | ({} if model is None else {"model": str(model)})
    return engine(target, speculative=SpeculativeConfig.parse(given), **flags)


def check_way(name: str, way: Way, checkpoints: Checkpoints, expected: Said) -> None:
    method, spec = METHODS[name]
    flags = {"logprobs_mode": "processed_logprobs", **way.flags}
    with drafting(checkpoints, method, spec, **flags) as llm:
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
def test_same_bytes_however_many_drafts(
    name: str, flags: dict[str, Any], checkpoints_of: Any, plain: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rounds with drafts and without by turns, under masks and not; a paused drafter catches up before either."""
    draw_drafts(monkeypatch)
    passes: list[tuple[str, int]] = []
    real = Planner.launch
    monkeypatch.setattr(
        Planner, "launch", lambda self, key, b: (passes.append((key.program, key.shape.width)), real(self, key, b))[1]
    )
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
    tokenizer = make_tokenizer()
    info = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=263, stop_token_ids=[END])
    compiler = xgrammar.GrammarCompiler(info)
    grammars = [
        (FORMS["regex"][0], compiler.compile_regex(FORMS["regex"][0].regex)),
        (FORMS["grammar"][0], compiler.compile_grammar(FORMS["grammar"][0].grammar)),
        (FORMS["json"][0], compiler.compile_json_schema(json.dumps(SCHEMA), any_whitespace=False)),
    ]
    model = AutoModelForCausalLM.from_pretrained(qwen3, dtype=torch.float64).eval()
    with drafting((qwen3, None), "ngram", {"num_speculative_tokens": 3}) as llm:
        for prompt, (form, grammar) in zip(PROMPTS, grammars, strict=False):
            params = SamplingParams(temperature=0, max_tokens=50, structured_outputs=form)
            (output,) = tokens(llm, [prompt], params)
            logits = model(torch.tensor([prompt + output])).logits[0, len(prompt) - 1 :]
            matcher, bits = xgrammar.GrammarMatcher(grammar), xgrammar.allocate_token_bitmask(1, 263)
            for token, row in zip(output, logits, strict=False):
                xgrammar.reset_token_bitmask(bits)
                matcher.fill_next_token_bitmask(bits)
                allowed = torch.tensor([bool(bits[0, i // 32] >> (i % 32) & 1) for i in range(263)])
                assert token == row.masked_fill(~allowed, -math.inf).argmax()
                assert matcher.accept_token(token)
            assert matcher.is_terminated()


def test_log_probabilities_are_raw_or_those_of_what_is_allowed(qwen3: Path) -> None:
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


def test_an_end_comes_where_the_form_is_complete_and_only_there(certain: LLM) -> None:
    """The bias makes every position want to end, the drafter's too."""
    assert answer(certain, "(ab){3}") == ("ababab", "stop")
    text, finish = answer(certain, "(ab){3,9}")
    assert (text, finish) == ("ababab", "stop")
    assert answer(certain, "(ab){3,9}", max_tokens=3) == ("aba", "length")


def test_min_tokens_and_ignore_eos_hold_as_long_as_the_form_can_go_on(certain: LLM) -> None:
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


def test_a_request_that_cannot_go_on_fails_alone(certain: LLM) -> None:
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
    assert [t for d in deltas if d.request_id != "stuck" for t in d.token_ids] == alone
    certain.engine.check_integrity()
    assert certain.engine.pool.usage == 0
    failed_output, other = certain.generate([[1], PROMPTS[2]], [stuck, free])
    assert failed_output.outputs[0].finish_reason == "abort"
    assert failed_output.outputs[0].error == failed.error
    assert (other.outputs[0].token_ids, other.outputs[0].error) == (alone, None)


# ---- passes -----------------------------------------------------------------------------------------


def rounds(llm: LLM) -> dict[str, int]:
    return {program: n for (program, kind, _), n in counted(llm).items() if kind == GRAPH and program != "extend"}


FREE_RUN = SamplingParams(temperature=1, seed=5, max_tokens=1 + 4 * 12, ignore_eos=True)
FORM = SamplingParams(seed=1, max_tokens=30, structured_outputs=StructuredOutputs(regex="[a-f]{9}-"))


def test_a_round_with_a_grammar_is_two_replays_and_others_have_their_own(certain: LLM) -> None:
    """Each kind commits what it would alone, in as many rounds; without a grammar there is nothing but rounds."""
    alone = []
    for prompt, params in (([1, 2, 3], FREE_RUN), ([4, 5], FORM)):
        certain.engine.runner.planner.forget()
        alone += play(certain, [prompt], [params])
        programs = rounds(certain).keys()
        assert programs == ({"round"} if params is FREE_RUN else {"draft", "verify"})
    certain.engine.runner.planner.forget()
    together = play(certain, [[1, 2, 3], [4, 5]], [FREE_RUN, FORM])
    assert [(e.tokens, e.rounds) for e in together] == [(e.tokens, e.rounds) for e in alone]
    counts, (free, form) = rounds(certain), together
    assert counts["draft"] == counts["verify"] == len(form.rounds), "and none in vain"
    assert len(free.rounds) <= counts["round"] <= len(free.rounds) + 1
    assert {kind for _, kind, _ in counted(certain)} == {GRAPH}


def test_the_two_kinds_take_turns(certain: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """A round of the others runs while the host reads drafts, and one while it reads tokens."""
    launched: list[str] = []
    real = Planner.launch
    monkeypatch.setattr(Planner, "launch", lambda self, key, b: (launched.append(key.program), real(self, key, b))[1])
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
    real = Planner.launch
    monkeypatch.setattr(Planner, "launch", lambda self, key, b: (named.extend(b["slots"]), real(self, key, b))[1])
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


def test_a_round_waits_for_tokens_only_where_masks_depend_on_them(
    certain: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    unread: list[int] = []
    real = Planner.launch

    def launch(self: Planner, key: Any, batch: Any) -> Any:
        if key.program in ("round", "draft"):
            unread.append(max(s.in_flight for s in certain.engine.scheduler.running))
        return real(self, key, batch)

    monkeypatch.setattr(Planner, "launch", launch)
    free = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    tokens(certain, [PROMPTS[0]], free)
    assert set(unread) == {2}, "this round, and the pass before it"
    unread.clear()
    tokens(certain, [PROMPTS[0]], replace(free, structured_outputs=StructuredOutputs(regex="[a-z]{20}")))
    assert set(unread) == {1}


def test_masks_that_wait_for_nothing_would_be_seen(qwen3: Path, plain: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: rounds launched before the tokens are known get the masks of the position before."""
    expected = plain(qwen3)  # before anything is broken
    monkeypatch.setattr(Scheduler, "_unread", lambda self, sequences: False)
    with engine(qwen3, logprobs_mode="processed_logprobs") as llm:
        assert said(llm, PROMPTS, PARAMS) != expected


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
