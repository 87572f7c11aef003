"""Outputs that begin with a thought: grammars begin after it, and a budget of tokens ends it.

:class:`ThinkingMatcher` has :class:`~unisono.grammar.matcher.Matcher`'s interface, and contains one where the request
has a grammar. A thought is over where its closing mark is spelt, in one token or in several; the reader of the answer
(``server/reasoning.py``) sees the same in the text. What a position may take follows from the committed tokens alone,
so that drafts, batches and preemption change nothing.

    begin      a thought may be opened, or the grammar begins at once
    opening    the opening mark has begun; the rest of it follows
    thinking   anything but the end of the output (with a grammar), up to the budget
    closing    the budget is spent: the closing mark follows
    blank      after the mark, at most two line ends, as chat templates write them
    content    the grammar, or anything
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

import numpy as np

from unisono.grammar.matcher import GrammarError, Matcher
from unisono.tokenizer import Tokenizer
from unisono.types import BadRequest, SamplingParams, Thinking

LINE_ENDS = 2
"""Line ends that may part a thought from what follows."""


class Spelling:
    """What the tokens of a vocabulary spell, in bytes. Special tokens spell their names."""

    def __init__(self, directory: str | Path, vocab_size: int) -> None:
        tokenizer = Tokenizer.load(directory)
        if tokenizer is None:
            raise BadRequest(
                "a thought's marks are text, and this checkpoint has no tokenizer: serve one with tokenizer files, or "
                "leave out thinking_token_budget and structured outputs of answers that think.",
                "thinking_token_budget",
            )
        import xgrammar  # which knows how each kind of tokenizer spells bytes

        self.tokenizer, self.vocab_size = tokenizer, vocab_size
        told = xgrammar.TokenizerInfo.from_huggingface(tokenizer.backend, vocab_size=vocab_size)
        self.texts: list[bytes] = list(told.decoded_vocab)

    @cached_property
    def line_ends(self) -> dict[int, int]:
        """The tokens that are nothing but line ends, and how many."""
        found = {i: len(text) for i, text in enumerate(self.texts) if text and not text.strip(b"\n")}
        return {i: count for i, count in found.items() if count <= LINE_ENDS}

    def ids(self, mark: str) -> tuple[int, ...]:
        """The tokens that spell ``mark``. Raises BadRequest where none of the model's do."""
        ids = [i for i in self.tokenizer.encode(mark, add_special_tokens=False) if i < self.vocab_size]
        while ids and not self.texts[ids[0]].strip(b" "):
            del ids[0]  # some tokenizers begin every text with a space
        if b"".join(self.texts[i] for i in ids).lstrip(b" ") != mark.encode():
            raise BadRequest(f"the tokenizer cannot spell the mark {mark!r} of a thought.", "thinking_token_budget")
        return tuple(ids)


@dataclass
class Marks:
    """The marks of a thought in one vocabulary. start, end: their tokens."""

    spelling: Spelling
    opening: bytes
    closing: bytes
    start: tuple[int, ...]
    end: tuple[int, ...]
    _overrun: dict[int, np.ndarray] = field(default_factory=dict)

    @cached_property
    def _fall_back(self) -> list[int]:
        """For each length of the closing mark's beginnings, the longest end that begins it too (Knuth-Morris-Pratt)."""
        table, length = [0] * len(self.closing), 0
        for place in range(1, len(self.closing)):
            while length and self.closing[place] != self.closing[length]:
                length = table[length - 1]
            length += self.closing[place] == self.closing[length]
            table[place] = length
        return table

    def advance(self, matched: int, text: bytes) -> tuple[int, int | None]:
        """After ``matched`` bytes of the closing mark and ``text``: (bytes matched now, where in ``text`` it ended)."""
        for place, byte in enumerate(text):
            while matched and byte != self.closing[matched]:
                matched = self._fall_back[matched - 1]
            matched += byte == self.closing[matched]
            if matched == len(self.closing):
                return 0, place + 1
        return matched, None

    @cached_property
    def _may_overrun(self) -> list[int]:
        """The tokens in which the closing mark may end before they do."""
        last = self.closing[-1:]
        return [i for i, text in enumerate(self.spelling.texts) if last in text[:-1]]

    def overrun(self, matched: int) -> np.ndarray:
        """A mask of the tokens that, after ``matched`` bytes of the mark, spell its end and more. int32 words."""
        if matched not in self._overrun:
            mask = np.zeros(-(-self.spelling.vocab_size // 32), np.uint32)
            for i in self._may_overrun:
                text = self.spelling.texts[i]
                end = self.advance(matched, text)[1]
                if end is not None and end < len(text):
                    mask[i // 32] |= np.uint32(1 << (i % 32))
            self._overrun[matched] = mask.view(np.int32)
        return self._overrun[matched]


class Thoughts:
    """The marks of one model's thoughts, found in a thread: reading a vocabulary takes up to seconds."""

    def __init__(self, directory: str | Path, vocab_size: int) -> None:
        self._directory, self._vocab_size = directory, vocab_size
        self._thread = ThreadPoolExecutor(1, "thoughts")
        self._found: dict[tuple[str, str], Future[Marks]] = {}
        self._spelling: Spelling | None = None
        self._lock = threading.Lock()

    def prepare(self, thinking: Thinking) -> Future[Marks]:
        """Begin to find the marks, unless that was done. The future's exception is a BadRequest."""
        with self._lock:
            key = thinking.start, thinking.end
            if key not in self._found:
                self._found[key] = self._thread.submit(self._find, *key)
            return self._found[key]

    def _find(self, start: str, end: str) -> Marks:
        if self._spelling is None:
            self._spelling = Spelling(self._directory, self._vocab_size)
        spelling = self._spelling
        return Marks(spelling, start.encode(), end.encode(), spelling.ids(start), spelling.ids(end))

    def close(self) -> None:
        """Begin nothing more."""
        self._thread.shutdown(wait=False, cancel_futures=True)


@dataclass(frozen=True, slots=True)
class _Place:
    """Where an output stands. matched: bytes of the closing mark. step: of a mark's tokens, or line ends.

    thought: tokens of the thought so far. text: of an output that may yet open a thought. length: all tokens so far.
    """

    phase: str
    matched: int = 0
    step: int = 0
    thought: int = 0
    text: bytes = b""
    length: int = 0


class ThinkingMatcher:
    """Follows an output that begins as ``thinking`` says. inner: of the grammar that follows; None where none does.

    eos: the ids that end an output; a thought that a grammar follows may not have them. params: the request's.
    """

    def __init__(
        self, thinking: Thinking, marks: Marks, inner: Matcher | None, eos: Sequence[int], params: SamplingParams
    ) -> None:
        self._budget, self._marks, self._inner, self._eos = thinking.budget, marks, inner, eos
        self._params = params
        self._silent = marks.spelling.tokenizer.special_ids if params.skip_special_tokens else frozenset()
        self._place = self._closing(_Place(thinking.state))

    # ---- Matcher's interface --------------------------------------------------------------------

    def accept(self, tokens: Sequence[int]) -> None:
        """Take in committed tokens. Raises GrammarError for one that may not come here."""
        for token in tokens:
            place = self._place
            following = self._next(place, token)
            if following is None:
                raise GrammarError(
                    "no token of the vocabulary that the request allows continues its thought after "
                    f"{place.length} tokens"
                )
            self._place = following
            if self._inner is not None and following.phase == "content" and self._is_inner(place, token):
                self._inner.before = place.length if place.phase != "content" else self._inner.before
                self._inner.accept([token])

    def masks(self, drafts: np.ndarray, out: np.ndarray) -> None:
        """Fill ``out [P, W, words]`` int32, contiguous, all ones, for the positions after ``drafts [P, k]``."""
        for path in range(len(drafts)):
            self._walk(drafts[path : path + 1], out[path : path + 1])

    # ---- one path -------------------------------------------------------------------------------

    def _walk(self, drafts: np.ndarray, out: np.ndarray) -> None:
        """The masks of one path: drafts [1, k], out [1, W, words]."""
        place = self._place
        for index, draft in enumerate([*drafts[0].tolist(), -1]):
            row = out[0, index]
            if self._inner is not None and self._is_inner(place, draft):
                if place.phase != "content":
                    self._inner.before = place.length
                self._inner.masks(drafts[:, index:], out[:, index:])
                self._add_own(place, row)
                return
            self._fill(place, drafts, out, index)
            if draft < 0 or draft in self._eos or not _has(row, draft):
                return
            following = self._next(place, draft)
            if following is None or (following.phase == "content" and self._inner is None):
                return
            place = following

    def _fill(self, place: _Place, drafts: np.ndarray, out: np.ndarray, index: int) -> None:
        """The mask of a position where this matcher, not the grammar, says what its draft means."""
        row = out[0, index]
        if place.phase in ("begin", "blank", "content"):
            if self._inner is not None:
                self._inner.before = place.length if place.phase != "content" else self._inner.before
                self._inner.masks(drafts[:, index:index], out[:, index : index + 1])
                self._add_own(place, row)
        elif place.phase == "thinking":
            if self._inner is not None:
                row &= ~self._marks.overrun(place.matched)
                _clear(row, self._eos)
                if place.length < self._params.min_tokens:
                    _clear(row, self._params.stop_token_ids)
        else:
            row[:] = 0
            _set(row, [self._forced(place)])

    def _add_own(self, place: _Place, row: np.ndarray) -> None:
        """Where the grammar may begin: also what a thought or the line ends before the grammar may go on with."""
        if place.phase == "begin":
            _set(row, self._marks.start[:1])
        elif place.phase == "blank":
            left = LINE_ENDS - place.step
            _set(row, [i for i, count in self._marks.spelling.line_ends.items() if count <= left])

    def _forced(self, place: _Place) -> int:
        return (self._marks.start if place.phase == "opening" else self._marks.end)[place.step]

    def _is_inner(self, place: _Place, token: int) -> bool:
        """Whether a token here is the grammar's. Where both may take it the thought does, and line ends are blank."""
        if place.phase == "begin":
            return token >= 0 and token != self._marks.start[0]
        if place.phase == "blank":
            count = self._marks.spelling.line_ends.get(token)
            return token >= 0 and (count is None or count > LINE_ENDS - place.step)
        return place.phase == "content"

    def _next(self, place: _Place, token: int) -> _Place | None:
        """Where the output stands after ``token``; None where that may not come."""
        after = replace(place, length=place.length + 1)
        if place.phase == "content" or (self._inner is not None and self._is_inner(place, token)):
            return replace(after, phase="content")
        match place.phase:
            case "begin":
                return self._closing(self._opened(after, token))
            case "opening":
                if token != self._forced(place):
                    return None
                done = place.step + 1 == len(self._marks.start)
                return self._closing(replace(after, phase="thinking" if done else "opening", step=place.step + 1))
            case "thinking":
                following = self._thought(after, token)
                return None if following is None else self._closing(following)
            case "closing":
                if token != self._forced(place):
                    return None
                return self._thought(replace(after, step=place.step + 1), token)
        return replace(after, step=place.step + self._marks.spelling.line_ends[token])  # blank

    def _opened(self, place: _Place, token: int) -> _Place:
        """A token at the output's beginning: it may begin the opening mark."""
        marks = self._marks
        if self._inner is not None:
            return replace(place, phase="opening" if len(marks.start) > 1 else "thinking", step=1)
        text = (place.text + self._text(token)).lstrip()
        if text.startswith(marks.opening):
            matched, end = marks.advance(0, text[len(marks.opening) :])
            return replace(place, phase="thinking" if end is None else "content", matched=matched, text=b"")
        return replace(place, phase="begin" if marks.opening.startswith(text) else "content", text=text)

    def _thought(self, place: _Place, token: int) -> _Place | None:
        """A token of a thought, or of the closing mark."""
        text = self._text(token)
        matched, end = self._marks.advance(place.matched, text)
        if end is None:
            return replace(place, matched=matched, thought=place.thought + 1)
        if self._inner is None:
            return replace(place, phase="content")
        return None if end < len(text) else replace(place, phase="blank", step=0)

    def _closing(self, place: _Place) -> _Place:
        """The same, closing where a thought has spent its budget."""
        if place.phase != "thinking" or self._budget is None or place.thought < self._budget:
            return place
        return replace(place, phase="closing", step=0)

    def _text(self, token: int) -> bytes:
        texts = self._marks.spelling.texts
        return texts[token] if token < len(texts) and token not in self._silent else b""


def _has(row: np.ndarray, token: int) -> bool:
    return token < 32 * len(row) and bool(row[token // 32] >> (token % 32) & 1)


def _set(row: np.ndarray, tokens: Sequence[int]) -> None:
    words = row.view(np.uint32)
    for token in tokens:
        words[token // 32] |= np.uint32(1 << (token % 32))


def _clear(row: np.ndarray, tokens: Sequence[int]) -> None:
    words = row.view(np.uint32)
    for token in tokens:
        if token < 32 * len(words):
            words[token // 32] &= ~np.uint32(1 << (token % 32))
