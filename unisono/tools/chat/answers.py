"""What a source of answers gives the chat: pieces of text as they come, and figures of the whole answer."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

Message = dict[str, Any]


@dataclass(frozen=True)
class Draft:
    """Where a token comes from. position: its place among its round's accepted drafts; None: the model's own pick.

    drafted, accepted: of the round.
    """

    position: int | None
    drafted: int
    accepted: int


@dataclass(frozen=True)
class Piece:
    """New text: what the model thinks, and what it says. draft: where the text's last token comes from, if known."""

    reasoning: str = ""
    content: str = ""
    draft: Draft | None = None


@dataclass
class Figures:
    """Counts and times (seconds of ``time.perf_counter``) of an answer.

    rounds: None where the source does not tell. exact: whether ``tokens`` is a count of tokens, not of chunks.
    """

    begun: float = field(default_factory=time.perf_counter)
    first: float | None = None
    last: float | None = None
    tokens: int = 0
    prompt_tokens: int | None = None
    rounds: int | None = None
    drafted: int = 0
    accepted: int = 0
    seed: int | None = None
    finish: str = ""
    exact: bool = True

    def tick(self, tokens: int) -> None:
        """Some tokens have come."""
        self.last = time.perf_counter()
        self.first = self.last if self.first is None else self.first
        self.tokens += tokens

    @property
    def tokens_per_second(self) -> float | None:
        """From the first token on; None for an answer of one token."""
        if self.first is None or self.last is None or self.tokens < 2 or self.last <= self.first:
            return None
        return (self.tokens - 1) / (self.last - self.first)

    @property
    def accept_length(self) -> float | None:
        """Mean tokens that a round with drafts committed, its own token counted; None without drafts."""
        return 1 + self.accepted / self.rounds if self.rounds and self.drafted else None

    def line(self) -> str:
        """The figures on one line."""
        unit = "tokens" if self.exact else "chunks"
        told = [f"{self.tokens} {unit}"]
        if self.tokens_per_second is not None:
            told.append(f"{self.tokens_per_second:.1f} {unit}/s")
        if self.first is not None:
            told.append(f"first after {(self.first - self.begun) * 1000:.0f} ms")
        if self.accept_length is not None:
            told.append(f"accept length {self.accept_length:.2f} ({self.accepted} of {self.drafted} drafts)")
        if self.seed is not None:
            told.append(f"seed {self.seed}")
        if self.finish not in ("", "stop"):
            told.append({"length": "cut at the token limit", "abort": "stopped"}.get(self.finish, self.finish))
        return " · ".join(told)


class Source(Protocol):
    """Answers conversations.

    prompt_interrupts: whether Ctrl-C may be raised inside :meth:`answer`; otherwise it is looked at between tokens.
    """

    name: str
    prompt_interrupts: bool

    def banner(self) -> Sequence[str]:
        """Lines that say what is talked to."""

    def check(self, params: Mapping[str, Any]) -> None:
        """Raises BadRequest for parameters that this source knows to be wrong."""

    def defaults(self) -> Mapping[str, Any]:
        """The parameters where none are given, as far as they are known."""

    def answer(
        self, messages: Sequence[Message], params: Mapping[str, Any], figures: Figures, stop: Callable[[], object]
    ) -> Iterator[Piece]:
        """The answer as it comes, to its end or until ``stop()``. Raises UnisonoError."""
