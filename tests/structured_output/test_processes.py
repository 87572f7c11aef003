"""Hostile grammars: each ends by itself, and nobody else's. Others go on being compiled, and followed."""

from __future__ import annotations

import gc
import os
import signal
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.models.fields import END
from tests.models.make import make_tokenizer
from tests.structured_output.endless_worker import ENDLESS
from tests.structured_output.lane_processes import children, lanes, lanes_now
from unisono.sandbox.forks import Template
from unisono.structured_output.matcher import GrammarError, Matcher, fill
from unisono.structured_output.workers import grammars as grammars_module
from unisono.structured_output.workers.grammars import Grammars
from unisono.types import BadRequest, SamplingParams, StructuredOutputs

VOCAB = 263
WORDS = -(-VOCAB // 32)
TOKENIZER = make_tokenizer()


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tokenizer")
    TOKENIZER.save_pretrained(directory)
    return directory


@pytest.fixture
def grammars(directory: Path) -> Iterator[Grammars]:
    grammars = Grammars(directory, VOCAB, [END])
    grammars.get(StructuredOutputs(choice=("warm",)))
    yield grammars
    grammars.close()


@pytest.fixture
def some_endless(grammars: Grammars, monkeypatch: pytest.MonkeyPatch) -> Iterator[Grammars]:
    """Grammars of a worker that takes for ever over expressions that begin with ENDLESS."""
    monkeypatch.setattr(
        grammars_module, "Template", lambda module, *rest: Template("tests.structured_output.endless_worker", *rest)
    )
    made = Grammars(grammars._directory, VOCAB, [END])
    made.get(StructuredOutputs(choice=("warm",)))
    yield made
    made.close()


def regex(pattern: str) -> StructuredOutputs:
    return StructuredOutputs(regex=pattern)


NEVER_ENDING = {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}
IMPOSSIBLE: list[dict[str, Any]] = [
    *({"grammar": text} for text in ("root ::= root", 'root ::= "a" root', "start: start")),
    {"grammar": r"root ::= [^\u0000-\U0010ffff]"},
    *({"regex": text} for text in (r"[^\s\S]", r"a[^\s\S]")),
    *({"json": value} for value in ({"$ref": "#"}, {"enum": []}, False, NEVER_ENDING)),
    {"json": {"type": "string", "minLength": 5, "maxLength": 2}},
]


@pytest.mark.parametrize("form", IMPOSSIBLE, ids=str)
def test_a_form_that_no_text_matches_is_refused(grammars: Grammars, form: dict[str, Any]) -> None:
    """By the process that compiles it, before the request takes a slot: it would end with an error of the engine."""
    with pytest.raises(BadRequest, match="cannot be compiled") as refused:
        grammars.get(StructuredOutputs(**form))
    assert refused.value.param == "structured_outputs"


@pytest.mark.parametrize("depth", [20, 60])
def test_a_form_whose_text_is_too_long_for_the_grammar_engine_is_refused(grammars: Grammars, depth: int) -> None:
    """Rules that double a text: its first token was allowed and then refused, an error of the server."""
    rules = "".join(f"a{i}: a{i + 1} a{i + 1}\n" for i in range(depth))
    with pytest.raises(BadRequest, match="a limit of the grammar engine") as refused:
        grammars.get(StructuredOutputs(grammar=f'start: a0\n{rules}a{depth}: "x"'))
    assert refused.value.param == "structured_outputs"


def test_a_failed_output_is_freed_at_once(grammars: Grammars) -> None:
    """Its channel with it: an error that it kept would keep it, by its frames, until a full garbage collection."""
    matcher = follower(grammars, regex("ab"))
    gc.disable()
    try:
        for _ in range(2):
            with pytest.raises(GrammarError, match="no token") as failed:
                matcher.accept(TOKENIZER.encode("x", add_special_tokens=False))
            assert failed.value.param is None
            del failed
        gone = weakref.ref(matcher)
        del matcher
        assert gone() is None
    finally:
        gc.enable()


def follower(grammars: Grammars, asked: StructuredOutputs) -> Matcher:
    return Matcher(grammars.get(asked), SamplingParams(structured_outputs=asked))


def mask(matcher: Matcher) -> set[int]:
    out = np.empty((1, 1, WORDS), np.int32)
    matcher.masks(np.empty((1, 0), np.int32), out)
    return set(np.flatnonzero(np.unpackbits(out.view(np.uint8), bitorder="little")).tolist())


def until(condition: Callable[[], object], limit: float) -> None:
    end = time.monotonic() + limit
    while not condition():
        assert time.monotonic() < end, "it does not come"
        time.sleep(0.01)


HOSTILE: dict[str, Any] = {
    "45,000 nested parentheses": StructuredOutputs(
        json={"type": "string", "pattern": "(" * 45_000 + "a" + ")" * 45_000}
    ),
    "hundreds of repetitions of what may be empty": StructuredOutputs(
        grammar="root ::= " + " ".join(['("a"?){0,500}'] * 300)
    ),
    "nested repetitions": StructuredOutputs(grammar="root ::= " + '("a"|"b"){0,9} ' * 6_000),
    "one more": StructuredOutputs(regex="(" * 30_000 + "a" + ")?" * 30_000),
}


@pytest.mark.parametrize("asked", HOSTILE.values(), ids=list(HOSTILE))
def test_hostile_grammar_kills_only_its_own_process(
    grammars: Grammars, asked: StructuredOutputs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammars_module, "SECONDS", 2.0)
    before = time.monotonic()
    future = grammars.prepare(asked)
    assert grammars.get(regex("[a-c]{3}")).eos == (END,)
    assert time.monotonic() - before < 60, "others wait for none of it"
    try:
        compiled = future.result(60)
    except BadRequest as error:
        assert "cannot be compiled" in str(error)  # noqa: PT017
        assert len(str(error)) < 600  # noqa: PT017
        assert error.param == "structured_outputs"  # noqa: PT017
    else:  # then it can be followed, or fails by itself
        matcher = Matcher(compiled, SamplingParams(structured_outputs=asked))
        try:
            for _ in range(100):
                before = time.monotonic()
                (token,) = sorted(mask(matcher))[:1]
                matcher.accept([token])
                assert time.monotonic() - before < 60
        except GrammarError:
            pass
    assert mask(follower(grammars, regex("[a-c]{3}"))) == set(ids("abc"))


def test_hard_grammars_do_not_block_others_and_end_on_cancellation(some_endless: Grammars) -> None:
    """More of them than there are slots and processes."""
    before = len(children(os.getpid()))
    hard = [some_endless.prepare(regex(ENDLESS + "b" * i)) for i in range(grammars_module.PROCESSES + 4)]
    until(lambda: len(children(os.getpid())) >= before + grammars_module.SLOTS, 60)
    for i in range(5):
        some_endless.get(regex(f"[a-c]{{{i + 1}}}x"))
    assert not any(future.done() for future in hard)
    assert len(children(os.getpid())) > before + 10 + grammars_module.SLOTS
    for future in hard:
        assert future.cancel()
    until(lambda: len(children(os.getpid())) == before + 10, 5)  # five grammars, with a lane each
    with pytest.raises(CancelledError):
        hard[0].result(0)


def test_cancelled_request_does_not_cancel_a_shared_compilation(
    some_endless: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammars_module, "SECONDS", 0.05)
    first, second = some_endless.prepare(regex(ENDLESS)), some_endless.prepare(regex(ENDLESS))
    assert first.cancel()
    with pytest.raises(BadRequest, match=r"compiling it takes more than 0\.05 s"):
        second.result(60)


def test_process_stopped_after_its_answer_gives_masks(grammars: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    """The scheduler may stop a compilation that has ended but whose answer it has not read."""
    hear = Grammars._hear

    def stop_and_hear(self: Grammars, job: Any) -> None:
        job.process.pause()
        hear(self, job)

    monkeypatch.setattr(Grammars, "_hear", stop_and_hear)
    mask = Matcher(grammars.get(StructuredOutputs(regex="[ab]{3}")), SamplingParams()).first_mask()
    assert mask.any()


def test_memory_is_limited(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammars_module, "MEMORY", 64 << 20)
    grammars = Grammars(directory, VOCAB, [END])
    with pytest.raises(BadRequest, match="it takes more than 64 MiB, or"):
        grammars.get(regex("a?" * 20_000))
    grammars.close()


def test_matchers_survive_the_death_of_their_process(grammars: Grammars) -> None:
    """Its outputs go on in other processes, from where they were."""
    asked = regex("abc[d-f]{3}")
    matchers = [follower(grammars, asked) for _ in range(6)]
    drafts, out = np.empty((6, 1, 0), np.int32), np.empty((6, 1, 1, WORDS), np.int32)
    for token in ids("abcd"):
        fill(matchers, drafts, out, range(6))
        for matcher in matchers:
            matcher.accept([token])
    for lane in lanes(grammars, asked):
        os.kill(lane, signal.SIGKILL)
    fill(matchers, drafts, out, range(6))
    allowed = np.unpackbits(out.view(np.uint8), axis=-1, bitorder="little")
    assert all(set(np.flatnonzero(row).tolist()) == set(ids("def")) for row in allowed.reshape(6, -1))


def test_lanes_of_single_outputs_end_with_them(grammars: Grammars) -> None:
    """Outputs of lanes that died go on in a lane each, which no other output joins."""
    asked = regex("abc[d-f]{4}")
    count = len(children(os.getpid()))
    for _ in range(3):
        matchers = [follower(grammars, asked) for _ in range(3)]
        drafts, out = np.empty((3, 1, 0), np.int32), np.empty((3, 1, 1, WORDS), np.int32)
        fill(matchers, drafts, out, range(3))
        for lane in lanes(grammars, asked):
            os.kill(lane, signal.SIGKILL)
        fill(matchers, drafts, out, range(3))
        assert len(lanes(grammars, asked)) == 3
        for matcher in matchers:
            matcher.close()
        until(lambda: not lanes_now(grammars, asked), 10)
    assert mask(follower(grammars, asked)) == set(ids("a"))
    assert len(children(os.getpid())) == count + 2, "the compiler, and a lane"


def ids(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False)


def test_processes_that_die_are_replaced(grammars: Grammars) -> None:
    asked = regex("x[yz]")
    for pid in reversed(children(os.getpid())):
        os.kill(pid, signal.SIGKILL)
    with suppress(BadRequest):  # it finds out that the template has died
        grammars.get(asked)
    assert mask(follower(grammars, asked)) == set(ids("x"))
    assert mask(follower(grammars, StructuredOutputs(choice=("warm",)))) == set(ids("w")), "kept, and died since"


def test_mask_time_limit_counts_processor_time(grammars: Grammars) -> None:
    """A machine that is busy elsewhere fails nobody: the limit is of processor time."""
    asked = regex("[ab]{4}")
    matcher = follower(grammars, asked)
    mask(matcher)
    stopped = lanes(grammars, asked)
    for lane in stopped:
        os.kill(lane, signal.SIGSTOP)
    matcher.ask(np.empty((1, 0), np.int32), out := np.empty((1, 1, WORDS), np.int32))
    time.sleep(0.8)
    for lane in stopped:
        os.kill(lane, signal.SIGCONT)
    assert matcher.collect()
    assert out.any()
    matcher.accept(ids("a"))


def test_close_ends_all_processes(directory: Path) -> None:
    before = set(children(os.getpid()))
    grammars = Grammars(directory, VOCAB, [END])
    matcher = follower(grammars, regex("ab"))
    mask(matcher)
    grammars.prepare(regex(ENDLESS))
    until(lambda: len(set(children(os.getpid())) - before) >= 3, 60)
    started = set(children(os.getpid())) - before
    grammars.close()
    del matcher
    until(lambda: not started & set(children(os.getpid())), 60)
