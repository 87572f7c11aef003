"""Results of a request: token deltas of each round, complete answers, vectors as bytes, and finish reasons.

All rooms import these names from ``types``.
"""

from __future__ import annotations

import dataclasses
import enum
import reprlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from unisono.types.acceptance import RequestAcceptance
from unisono.types.expert_ids import ExpertIds


class _Shortened(reprlib.Repr):
    """``repr`` with long texts, lists and tensors cut."""

    def __init__(self) -> None:
        super().__init__()
        self.maxstring = self.maxother = 200
        self.maxlist = self.maxtuple = self.maxdict = 8

    def repr1(self, x: Any, level: int) -> str:
        if dataclasses.is_dataclass(x):
            return repr(x)  # dataclasses of this package cut their own parts
        if hasattr(x, "shape") and hasattr(x, "dtype"):
            return f"<tensor {list(x.shape)} {str(x.dtype).removeprefix('torch.')}>"
        return super().repr1(x, level)

    def repr_str(self, x: str, level: int) -> str:
        return repr(x) if len(x) <= self.maxstring else f"{x[: self.maxstring]!r}… ({len(x)} characters)"

    def repr_list(self, x: list[Any], level: int) -> str:
        if len(x) <= self.maxlist:
            return super().repr_list(x, level)
        first = ", ".join(self.repr1(each, level - 1) for each in x[: self.maxlist])
        return f"[{first}, … ({len(x)} in all)]"


_shortened = _Shortened()


class Concise:
    """Base of dataclasses with a short ``repr``: fields that differ from their default, long values cut."""

    __slots__ = ()

    def __repr__(self) -> str:
        shown = []
        for each in dataclasses.fields(self):  # type: ignore[arg-type]
            value = getattr(self, each.name)
            made = each.default_factory() if each.default_factory is not dataclasses.MISSING else each.default
            if made is dataclasses.MISSING or hasattr(value, "shape") or value != made:
                shown.append(f"{each.name}={_shortened.repr(value)}")
        return f"{type(self).__name__}({', '.join(shown)})"


def part_id(request_id: str, part: object) -> str:
    """The id of a part of a request: a sequence, a prompt or a beam.

    Ids that clients choose have no ``#`` (``http/request_ids.py``), so no client's id equals that of another's part.
    """
    return f"{request_id}#{part}"


class FinishReason(enum.IntEnum):
    """Reasons for the end of a request. The device writes these numbers to ``Slots.status``."""

    RUNNING = 0
    STOP = 1
    LENGTH = 2
    ABORT = 3
    FREE = 4  # the slot holds no request; rounds skip it

    @property
    def text(self) -> str:
        """OpenAI's spelling: ``stop``, ``length`` or ``abort``."""
        return self.name.lower()


@dataclass(frozen=True, slots=True)
class Vectors:
    """Rows of numbers on their way between rooms and processes; ``vectors.py`` makes tensors of them.

    dtype: float32, float16 or bfloat16. size: numbers per row. data: the rows in order, in native byte order.
    """

    dtype: str
    size: int
    data: bytes

    def head(self, rows: int) -> Vectors:
        """The first ``rows`` rows, or all if there are fewer."""
        itemsize = 4 if self.dtype == "float32" else 2
        return Vectors(self.dtype, self.size, self.data[: rows * self.size * itemsize])

    def joined(self, later: Vectors) -> Vectors:
        """These rows followed by those of ``later``."""
        return Vectors(self.dtype, self.size, self.data + later.data)


@dataclass(slots=True, repr=False)
class Logprob(Concise):
    """One token's log-probability at a position, its rank there (1 is the likeliest) and its text."""

    logprob: float
    rank: int
    decoded_token: str | None = None


@dataclass(slots=True)
class TokenLogprobs:
    """Log-probabilities at one position.

    logprob, rank: of the token there; rank 1 is the likeliest, ties count. top: the likeliest tokens, ``(token id,
    logprob)`` in order.
    """

    logprob: float
    rank: int
    top: list[tuple[int, float]] = field(default_factory=list)

    def named(self, token_id: int, text_of: Callable[[int], str | None], most: int) -> dict[int, Logprob]:
        """The position in vLLM's form: the token's own entry first, then the ``most`` likeliest."""
        entries = {token_id: Logprob(self.logprob, self.rank, text_of(token_id))}
        for place, (alternative, logprob) in enumerate(self.top[:most], 1):
            entries[alternative] = Logprob(logprob, place, text_of(alternative))
        return entries


class TokenDelta(msgspec.Struct, omit_defaults=True):
    """New tokens of one request, of one round or more; ``finish`` is RUNNING until the last delta.

    A msgspec struct, because it takes half the time of a dataclass to build and send.
    cached_tokens: prompt tokens served by the prefix cache. queued_seconds: time from the queue to the first pass. Both
    are set on a request's first delta.
    logprobs: one entry per token, if requested. prompt_logprobs: on the first delta, one entry per prompt token but the
    first. drafted_tokens: drafts proposed for these tokens; accepted_tokens: the accepted ones.
    hidden_states: of generated tokens, if requested: the state before each of these tokens except the very first.
    prompt_hidden_states: those of the prompt, on the first delta. routed_experts, prompt_routed_experts: the experts
    chosen for the same tokens.
    extra: reports of features of other packages, a list by name; lists of successive deltas are concatenated.
    error: the request failed inside the engine; ``finish`` is then ABORT. error_param: the request's field
        that caused it; None if the engine did.
    joined: rounds of a delta that combines several; see :attr:`rounds`. fewer: why a round had fewer drafts than k, a
        value of FewerDrafts; joined_fewer: those of ``joined``; see :attr:`fewer_drafts`.
    """

    request_id: str
    token_ids: list[int] = msgspec.field(default_factory=list)
    finish: FinishReason = FinishReason.RUNNING
    cached_tokens: int = 0
    error: str | None = None
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    hidden_states: Vectors | None = None
    prompt_hidden_states: Vectors | None = None
    extra: dict[str, list[Any]] | None = None
    queued_seconds: float | None = None
    joined: list[tuple[int, int, int]] | None = None
    error_param: str | None = None
    routed_experts: ExpertIds | None = None
    prompt_routed_experts: ExpertIds | None = None
    fewer: int = 0
    joined_fewer: list[int] | None = None

    @property
    def rounds(self) -> list[tuple[int, int, int]]:
        """(tokens, drafted, accepted) of each round in this delta. A round's accepted drafts are its first tokens."""
        if self.joined is not None:
            return self.joined
        return [(len(self.token_ids), self.drafted_tokens, self.accepted_tokens)] if self.token_ids else []

    @property
    def fewer_drafts(self) -> list[int]:
        """Why each of :attr:`rounds` had fewer drafts than k; 0 for one that had k."""
        if self.joined is None:
            return [self.fewer] if self.token_ids else []
        return self.joined_fewer or [0] * len(self.joined)

    def absorb(self, later: TokenDelta) -> None:
        """Append the delta that follows this one."""
        why = [*self.fewer_drafts, *later.fewer_drafts]
        self.joined_fewer = why if any(why) else None
        if self.joined is None:
            self.joined = self.rounds
        self.joined += later.rounds
        self.token_ids.extend(later.token_ids)
        self.drafted_tokens += later.drafted_tokens
        self.accepted_tokens += later.accepted_tokens
        self.finish, self.error, self.error_param = later.finish, later.error, later.error_param
        if later.logprobs is not None:
            self.logprobs = self.logprobs or []
            self.logprobs.extend(later.logprobs)
        for name, values in (later.extra or {}).items():
            self.extra = {**(self.extra or {}), name: [*(self.extra or {}).get(name, ()), *values]}
        if later.hidden_states is not None:
            own = self.hidden_states
            self.hidden_states = later.hidden_states if own is None else own.joined(later.hidden_states)
        if later.routed_experts is not None:
            known = self.routed_experts
            self.routed_experts = later.routed_experts if known is None else known.joined(later.routed_experts)


class RequestOutputKind(enum.Enum):
    """Contents of each output of ``AsyncLLM.generate``: everything so far, the new part, or only the final result."""

    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


@dataclass(slots=True)
class RequestMetrics:
    """Times of a request.

    Names are vLLM's.

    arrival_time: seconds since 1970. queued_ts, first_token_ts, last_token_ts: seconds of ``time.monotonic`` when the
    request was ready for the engine, and when its first and latest tokens left the engine; 0 before that.
    first_token_latency: seconds from queued_ts to first_token_ts. num_generation_tokens: of all the request's
    sequences.
    """

    arrival_time: float = 0.0
    queued_ts: float = 0.0
    first_token_ts: float = 0.0
    last_token_ts: float = 0.0
    first_token_latency: float = 0.0
    num_generation_tokens: int = 0


@dataclass(frozen=True, slots=True)
class ParsedToolCall:
    """A tool call in an answer. arguments: JSON, as the model wrote it."""

    id: str
    name: str
    arguments: str


@dataclass(slots=True, repr=False)
class CompletionOutput(Concise):
    """One generated sequence.

    token_ids: EOS included. text: without the stop string, unless requested. stop_reason: the stop string, or the id of
    ``stop_token_ids``, that ended it; None for EOS and everything else.
    logprobs: for each token a map from id to log-probability: the token's own and the likeliest ones.
    hidden_states: a tensor [tokens - 1, hidden] in the model's dtype, of each token but the last.
    routed_experts: ids [tokens - 1, MoE layers, top_k] of the experts of each token but the last, a NumPy array.
    extra: reports of features of other packages, a list by name.
    error: the failure that ended it; then ``finish_reason`` is "abort" though no caller aborted it.
    acceptance: of drafts, once it has ended; None without a drafter.
    reasoning, content, tool_calls: the parts of ``text``, with the parsers of ``LLM.chat``; None and empty without.
    """

    index: int
    token_ids: list[int]
    text: str
    finish_reason: str | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    cumulative_logprob: float | None = None
    hidden_states: Any = None
    error: str | None = None
    extra: dict[str, list[Any]] = field(default_factory=dict)
    stop_reason: int | str | None = None
    reasoning: str | None = None
    content: str | None = None
    tool_calls: list[ParsedToolCall] = field(default_factory=list)
    acceptance: RequestAcceptance | None = None
    routed_experts: Any = None

    def finished(self) -> bool:
        """True once the sequence has ended."""
        return self.finish_reason is not None


@dataclass(slots=True, repr=False)
class RequestOutput(Concise):
    """The result of ``LLM.generate`` for one prompt.

    ``seed`` reproduces it: output i has seed + i.

    prompt_logprobs: one entry per prompt token, None for the first and those before ``logprob_start_len``.
    prompt_hidden_states: a tensor [prompt tokens, hidden] in the model's dtype. prompt_routed_experts: ids [tokens, MoE
    layers, top_k] of prompt tokens from ``routed_experts_prompt_start`` on, a NumPy array. prompt_token_ids: -1 at the
    positions of embeddings. metrics: times of the request and its tokens.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    seed: int
    num_cached_tokens: int = 0
    finished: bool = True
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    prompt_hidden_states: Any = None
    metrics: RequestMetrics | None = None
    prompt_routed_experts: Any = None


@dataclass
class EmbeddingOutput:
    """An embedding: the model's hidden size, or the requested number of dimensions. Names are vLLM's."""

    embedding: list[float]


@dataclass
class EmbeddingRequestOutput:
    """The result of ``LLM.embed`` for one prompt. Names are vLLM's."""

    request_id: str
    outputs: EmbeddingOutput
    prompt_token_ids: list[int]
    finished: bool = True
