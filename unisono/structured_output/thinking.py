"""Outputs that begin with reasoning: grammars begin after it, and a token budget ends it.

:class:`ThinkingMatcher` is a :class:`~unisono.structured_output.matcher.Follower` like Matcher, and wraps one if the
request has a grammar. Reasoning ends with its closing mark, in one token or in several; the reasoning parser
(``text/reasoning.py``) finds the same mark in the text. The mask of a position follows from the committed tokens alone,
so that drafts, batches and preemption change nothing.

begin      reasoning may be opened, or the grammar begins at once
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

from unisono.structured_output.matcher import ALL, GrammarError, Matcher, restricting
from unisono.structured_output.vocabulary import spellings
from unisono.structured_output.workers.grammars import Compiled
from unisono.structured_output.workers.walk import allow, allows, forbid
from unisono.text.tokenizer import Tokenizer
from unisono.types import BadRequest, SamplingParams, Thinking

LINE_ENDS = 2
"""Most line ends between reasoning and the text after it."""


class Spelling:
    """The bytes of each token of a vocabulary. Special tokens spell their names."""

    def __init__(self, directory: str | Path, vocab_size: int) -> None:
        tokenizer = Tokenizer.load(directory)
        if tokenizer is None:
            raise BadRequest(
                "reasoning marks are text, and this checkpoint has no tokenizer: serve one with tokenizer files, or "
                "leave out thinking_token_budget and structured outputs of answers with reasoning.",
                "thinking_token_budget",
            )
        self.tokenizer, self.vocab_size = tokenizer, vocab_size
        self.texts = spellings(tokenizer, vocab_size)

    @cached_property
    def line_ends(self) -> dict[int, int]:
        """The tokens that consist of line ends -> number of line ends."""
        found = {i: len(text) for i, text in enumerate(self.texts) if text and not text.strip(b"\n")}
        return {i: count for i, count in found.items() if count <= LINE_ENDS}

    def ids(self, mark: str) -> tuple[int, ...]:
        """The tokens that spell ``mark``. Raises BadRequest if the model's tokens do not."""
        ids = [i for i in self.tokenizer.encode(mark, add_special_tokens=False) if i < self.vocab_size]
        while ids and not self.texts[ids[0]].strip(b" "):
            del ids[0]  # some tokenizers begin every text with a space
        if b"".join(self.texts[i] for i in ids).lstrip(b" ") != mark.encode():
            raise BadRequest(f"the tokenizer cannot spell the reasoning mark {mark!r}.", "thinking_token_budget")
        return tuple(ids)


@dataclass
class Marks:
    """The marks of reasoning in one vocabulary. start, end: their tokens."""

    spelling: Spelling
    opening: bytes
    closing: bytes
    start: tuple[int, ...]
    end: tuple[int, ...]
    _overrun: dict[int, np.ndarray] = field(default_factory=dict)

    @cached_property
    def _fall_back(self) -> list[int]:
        """Failure function of the closing mark (Knuth-Morris-Pratt): for each prefix, its longest proper suffix that is
        a prefix.
        """
        table, length = [0] * len(self.closing), 0
        for place in range(1, len(self.closing)):
            while length and self.closing[place] != self.closing[length]:
                length = table[length - 1]
            length += self.closing[place] == self.closing[length]
            table[place] = length
        return table

    def advance(self, matched: int, text: bytes) -> tuple[int, int | None]:
        """(matched bytes, end of the mark in ``text`` or None) after ``matched`` bytes of the closing mark and
        ``text``.
        """
        for place, byte in enumerate(text):
            while matched and byte != self.closing[matched]:
                matched = self._fall_back[matched - 1]
            matched += byte == self.closing[matched]
            if matched == len(self.closing):
                return 0, place + 1
        return matched, None

    @cached_property
    def _may_overrun(self) -> list[int]:
        """The tokens that may contain the mark's last byte before their end."""
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


class MarksCache:
    """The reasoning marks of one model, found in a thread: reading a vocabulary takes up to seconds."""

    def __init__(self, directory: str | Path, vocab_size: int) -> None:
        self._directory, self._vocab_size = directory, vocab_size
        self._thread = ThreadPoolExecutor(1, "reasoning-marks")
        self._found: dict[tuple[str, str], Future[Marks]] = {}
        self._spelling: Spelling | None = None
        self._lock = threading.Lock()

    def prepare(self, thinking: Thinking) -> Future[Marks]:
        """Start to find the marks, once. The future's exception is a BadRequest; after any other the next call tries
        again."""
        with self._lock:
            key = thinking.start, thinking.end
            found = self._found.get(key)
            if found is None or (found.done() and not isinstance(found.exception(), BadRequest | None)):
                self._found[key] = found = self._thread.submit(self._find, *key)
            return found

    def _find(self, start: str, end: str) -> Marks:
        if self._spelling is None:
            self._spelling = Spelling(self._directory, self._vocab_size)
        spelling = self._spelling
        return Marks(spelling, start.encode(), end.encode(), spelling.ids(start), spelling.ids(end))

    def close(self) -> None:
        """Refuse further work."""
        self._thread.shutdown(wait=False, cancel_futures=True)


@dataclass(frozen=True, slots=True)
class _Place:
    """State of an output.

    matched: bytes of the closing mark. step: tokens of a mark, or line ends.

    reasoning_tokens, length: of reasoning and in all, so far. text: of an output that may still open reasoning.
    """

    phase: str
    matched: int = 0
    step: int = 0
    reasoning_tokens: int = 0
    text: bytes = b""
    length: int = 0


@dataclass(frozen=True, slots=True)
class _Row:
    """A position with the grammar's mask: path ``path``, after ``index`` drafts, ``step`` of them in the grammar."""

    path: int
    index: int
    step: int
    place: _Place


class ThinkingMatcher:
    """Matcher of an output that begins as ``thinking`` states.

    compiled: the grammar after it; None without one.

    Reasoning before a grammar must not contain the ids that end an output. params: the request's.
    """

    def __init__(self, thinking: Thinking, marks: Marks, compiled: Compiled | None, params: SamplingParams) -> None:
        self._budget, self._marks, self._params = thinking.budget, marks, params
        self._inner = None if compiled is None else Matcher(compiled, replace(params, min_tokens=0))
        self._eos: tuple[int, ...] = () if compiled is None else compiled.eos
        self._silent = marks.spelling.tokenizer.special_ids if params.skip_special_tokens else frozenset()
        self._place = self._closing(_Place(thinking.state))
        self._asked: tuple[list[_Row], np.ndarray, np.ndarray] | None = None

    # ---- Follower's interface -------------------------------------------------------------------

    def accept(self, tokens: Sequence[int]) -> None:
        """Advance by committed tokens. Raises GrammarError for a token that is not allowed."""
        inner: list[int] = []
        for token in tokens:
            place, following = self._place, self._next(self._place, token)
            if following is None:
                raise GrammarError(
                    "no token of the vocabulary that the request allows continues its reasoning after "
                    f"{place.length} tokens",
                    restricting(self._params),
                )
            self._place = following
            if self._inner is not None and self._is_inner(place, token):
                inner.append(token)
        if self._inner is not None and inner:
            self._inner.accept(inner)

    def forced(self) -> list[int]:
        """The tokens that must follow: the rest of a mark, or those that the grammar forces."""
        place = self._place
        if place.phase in ("opening", "closing"):
            return list((self._marks.start if place.phase == "opening" else self._marks.end)[place.step :])
        if place.phase == "content" and self._inner is not None and place.length >= self._params.min_tokens:
            return self._inner.forced()
        return []

    def masks(self, drafts: np.ndarray, out: np.ndarray) -> None:
        """Fill ``out [P, W, words]`` int32, contiguous, for the positions after ``drafts [P, k]`` (-1: none)."""
        self.ask(drafts, out)
        if not self.collect():
            self.ask(drafts, out)
            self.collect()

    def ask(self, drafts: np.ndarray, out: np.ndarray) -> None:
        """Start the computation of :meth:`masks`: fill those that need no grammar, and request the rest."""
        out.fill(ALL)
        rows: list[_Row] = []
        later = np.full_like(drafts, -1)  # per path, the drafts inside the grammar
        for path in range(len(drafts)):
            rows += self._walk(path, drafts[path].tolist(), out, later)
        self._asked = None
        if self._inner is not None and rows:
            found = np.empty_like(out)
            self._asked = rows, found, out
            self._inner.ask(later, found)

    def collect(self) -> bool:
        """Wait for the grammar's masks. Returns False if :meth:`ask` must be called again."""
        if self._inner is None or self._asked is None:
            return True
        if not self._inner.collect():
            return False
        rows, found, out = self._asked
        for row in rows:
            mask = out[row.path, row.index]
            mask[:] = found[row.path, row.step]
            if not (mask == ALL).all():
                self._add_own(row.place, mask)
                self._hold_back(row.place.length, mask)
        return True

    # ---- one path -------------------------------------------------------------------------------

    def _walk(self, path: int, drafts: list[int], out: np.ndarray, later: np.ndarray) -> list[_Row]:
        """Fill one path's masks that are not the grammar's; returns the others. Writes its drafts to ``later``."""
        place, rows, begun = self._place, [], None
        for index, draft in enumerate([*drafts, -1]):
            if place.phase in ("begin", "blank", "content"):
                if self._inner is None:
                    if place.phase == "content":
                        break
                else:
                    rows.append(_Row(path, index, 0 if begun is None else index - begun, place))
                    if begun is None and self._is_inner(place, draft):
                        begun = index
                        later[path, : len(drafts) - index] = drafts[index:]
            else:
                self._fill(place, out[path, index])
            if draft < 0 or not (begun is not None or allows(out[path, index], draft)) or draft in self._eos:
                break
            following = self._next(place, draft)
            if following is None:
                break
            place = following
        return rows

    def _fill(self, place: _Place, row: np.ndarray) -> None:
        """Fill the mask of a position in reasoning, or in one of its marks."""
        if place.phase != "thinking":
            row[:] = 0
            allow(row, [self._forced(place)])
        elif self._inner is not None:
            row &= ~self._marks.overrun(place.matched)
            late = self._params.stop_token_ids if place.length < self._params.min_tokens else ()
            forbid(row, (*self._eos, *late))

    def _add_own(self, place: _Place, row: np.ndarray) -> None:
        """Allow, where the grammar may begin, also tokens that open reasoning or separate it from the grammar."""
        if place.phase == "begin":
            allow(row, self._marks.start[:1])
        elif place.phase == "blank":
            left = LINE_ENDS - place.step
            allow(row, [i for i, count in self._marks.spelling.line_ends.items() if count <= left])

    def _hold_back(self, length: int, row: np.ndarray) -> None:
        """Forbid the end of an output with fewer than ``min_tokens``, if that leaves another token."""
        if length < self._params.min_tokens:
            before = row.copy()
            forbid(row, (*self._eos, *self._params.stop_token_ids))
            if not row.any():
                row[:] = before

    def _forced(self, place: _Place) -> int:
        return (self._marks.start if place.phase == "opening" else self._marks.end)[place.step]

    def _is_inner(self, place: _Place, token: int) -> bool:
        """True if the grammar takes this token. Reasoning has precedence, and line ends are blank."""
        if place.phase == "begin":
            return token >= 0 and token != self._marks.start[0]
        if place.phase == "blank":
            count = self._marks.spelling.line_ends.get(token)
            return token >= 0 and (count is None or count > LINE_ENDS - place.step)
        return place.phase == "content"

    def _next(self, place: _Place, token: int) -> _Place | None:
        """The state after ``token``; None if it is not allowed."""
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
                following = self._next_reasoning(after, token)
                return None if following is None else self._closing(following)
            case "closing":
                if token != self._forced(place):
                    return None
                return self._next_reasoning(replace(after, step=place.step + 1), token)
        return replace(after, step=place.step + self._marks.spelling.line_ends[token])  # blank

    def _opened(self, place: _Place, token: int) -> _Place:
        """The state after a token at the output's beginning, which may begin the opening mark."""
        marks = self._marks
        if self._inner is not None:
            return replace(place, phase="opening" if len(marks.start) > 1 else "thinking", step=1)
        text = (place.text + self._text(token)).lstrip()
        if text.startswith(marks.opening):
            matched, end = marks.advance(0, text[len(marks.opening) :])
            return replace(place, phase="thinking" if end is None else "content", matched=matched, text=b"")
        return replace(place, phase="begin" if marks.opening.startswith(text) else "content", text=text)

    def _next_reasoning(self, place: _Place, token: int) -> _Place | None:
        """The state after a token of reasoning or of the closing mark."""
        text = self._text(token)
        matched, end = self._marks.advance(place.matched, text)
        if end is None:
            return replace(place, matched=matched, reasoning_tokens=place.reasoning_tokens + 1)
        if self._inner is None:
            return replace(place, phase="content")
        return None if end < len(text) else replace(place, phase="blank", step=0)

    def _closing(self, place: _Place) -> _Place:
        """``place``, in phase "closing" if the budget is spent."""
        if place.phase != "thinking" or self._budget is None or place.reasoning_tokens < self._budget:
            return place
        return replace(place, phase="closing", step=0)

    def _text(self, token: int) -> bytes:
        texts = self._marks.spelling.texts
        return texts[token] if token < len(texts) and token not in self._silent else b""
