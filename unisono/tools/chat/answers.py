"""The interface of a source of answers: pieces of text as they are generated, and figures of the whole answer."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

Message = dict[str, Any]


@dataclass(frozen=True)
class DraftedToken:
    """The origin of a token.

    position: its index among its round's accepted drafts; None: sampled by the model itself.

    drafted, accepted: numbers of the round.
    """

    position: int | None
    drafted: int
    accepted: int


@dataclass(frozen=True)
class ChatPiece:
    """New text: reasoning and content. draft: origin of the text's last token, if known."""

    reasoning: str = ""
    content: str = ""
    draft: DraftedToken | None = None


@dataclass
class AnswerFigures:
    """Counts and times (seconds of ``time.perf_counter``) of an answer.

    rounds: None if the source does not report them. exact: ``tokens`` counts tokens instead of chunks.
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
        """Record ``tokens`` new tokens."""
        self.last = time.perf_counter()
        self.first = self.last if self.first is None else self.first
        self.tokens += tokens

    @property
    def tokens_per_second(self) -> float | None:
        """Rate after the first token; None for an answer of one token."""
        if self.first is None or self.last is None or self.tokens < 2 or self.last <= self.first:
            return None
        return (self.tokens - 1) / (self.last - self.first)

    @property
    def accept_length(self) -> float | None:
        """Mean tokens committed by a round with drafts, bonus token included; None without drafts."""
        return 1 + self.accepted / self.rounds if self.rounds and self.drafted else None

    def line(self) -> str:
        """The figures on one line."""
        unit = "tokens" if self.exact else "chunks"
        parts = [f"{self.tokens} {unit}"]
        if self.tokens_per_second is not None:
            parts.append(f"{self.tokens_per_second:.1f} {unit}/s")
        if self.first is not None:
            parts.append(f"first after {(self.first - self.begun) * 1000:.0f} ms")
        if self.accept_length is not None:
            parts.append(f"accept length {self.accept_length:.2f} ({self.accepted} of {self.drafted} drafts)")
        if self.seed is not None:
            parts.append(f"seed {self.seed}")
        if self.finish not in ("", "stop"):
            parts.append({"length": "cut at the token limit", "abort": "stopped"}.get(self.finish, self.finish))
        return " · ".join(parts)


class AnswerSource(Protocol):
    """A source of answers to conversations.

    prompt_interrupts: Ctrl-C may be raised inside :meth:`answer`; otherwise it is checked between tokens.
    """

    name: str
    prompt_interrupts: bool

    def banner(self) -> Sequence[str]:
        """Lines that describe the source."""

    def check(self, params: Mapping[str, Any]) -> None:
        """Raise BadRequest for parameters that this source knows to be wrong."""

    def defaults(self) -> Mapping[str, Any]:
        """The default parameters, as far as they are known."""

    def answer(
        self, messages: Sequence[Message], params: Mapping[str, Any], figures: AnswerFigures, stop: Callable[[], object]
    ) -> Iterator[ChatPiece]:
        """The answer in pieces, to its end or until ``stop()``. Raises UnisonoError."""
