"""The grammar state of one request: masks for the positions to be sampled, advanced by the sampled tokens.

The engine keeps a matcher with each request that has a grammar, from arrival to end; preemption does not affect it.
The grammar state itself lives in another process (a lane of ``worker.py``), which contains hard grammars: a mask that
takes too much time or memory ends that process and this request.

A round costs one message each way: committed tokens are sent with the drafts, and masks come back in memory that both
processes map. The masks tell here if a token continues the grammar.

Shapes: P paths of drafts (1 for a chain), k drafts each, W = 1 + k positions, words = ceil(vocabulary / 32).
"""

from __future__ import annotations

import mmap
import os
import tempfile
import time
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import numpy as np

from unisono.sandbox.channel import ForkChannel, Gone
from unisono.structured_output.workers.grammars import MEMORY, Compiled
from unisono.structured_output.workers.walk import allow, allows
from unisono.types import SamplingParams, UnisonoError

ALL = -1
"""A word of a mask that allows every token."""

LONGEST_CALL = 0.5
"""Processor time of one message to a lane, seconds.

It takes about 10 µs, for a large schema some milliseconds; but an expression with very many parses takes longer and
longer, and all requests of the round wait.
"""

LONGEST_WAIT = 5.0
"""Seconds that the engine waits for a lane's answer."""


NOTHING = "no token of the vocabulary that the request allows continues its structured output after {} tokens"


AMBIGUOUS = "its structured output is too ambiguous after {} tokens: {}. Avoid repetitions within repetitions"


LATE = f"its structured output got no mask within {LONGEST_WAIT:g} s after {{}} tokens: the machine is busy"


class GrammarError(UnisonoError):
    """A request cannot continue: no token continues its grammar, or advancing it takes too long.

    param: the field of the request that causes it; None if the engine does.
    """

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


def restricting(params: SamplingParams) -> str | None:
    """The field of a request that restricts the tokens beside its grammar; None if no field does."""
    if params.allowed_token_ids is not None:
        return "allowed_token_ids"
    return "bad_words" if params.bad_words else None


class Follower(Protocol):
    """The engine's interface to a request's matcher: :class:`Matcher`, or a wrapper of one.

    ``ask`` starts the computation of masks and ``collect`` waits for it, so that the masks of all requests are computed
    at once. If ``collect`` returns False, ``ask`` must be called once more. ``forced`` returns the tokens that the
    grammar forces after the committed ones, in the checkpoint's tokenization and allowed by the masks; empty if none or
    unknown.
    It is called after ``accept`` and before ``ask``.
    """

    def accept(self, tokens: Sequence[int]) -> None: ...
    def forced(self) -> list[int]: ...
    def ask(self, drafts: np.ndarray, out: np.ndarray) -> None: ...
    def collect(self) -> bool: ...


class Matcher:
    """The grammar state of one output of ``compiled``.

    While the output has fewer than ``params.min_tokens`` tokens, and always with ``params.ignore_eos``, masks forbid
    the ids that would end it, if that leaves another token.
    """

    def __init__(self, compiled: Compiled, params: SamplingParams) -> None:
        self._compiled, self._eos = compiled, compiled.eos
        self._ends = compiled.eos, (*compiled.eos, *params.stop_token_ids), params.min_tokens, params.ignore_eos
        self._tokens: list[int] = []  # committed
        self._told = 0  # number of committed tokens that the lane has
        self._channel: ForkChannel | None = None
        self._lane = 0
        self._alone = False
        self._map = np.empty(0, np.int32)
        self._asked: tuple[np.ndarray, np.ndarray] | None = None
        self._dead: set[int] = set()
        self._restricting = restricting(params)
        self._failure: tuple[str, str | None] | None = None  # arguments of the GrammarError: an error holds frames
        self._late = False  # the last answer did not come in time
        self._forced: list[int] | None = None  # after the committed tokens; None: unknown
        self._tells = False  # each accept requests forced tokens from the lane at once
        self._peeked = False  # the answer to that request is not read yet

    def accept(self, tokens: Sequence[int]) -> None:
        """Advance by committed tokens.

        Raises GrammarError for a token that does not continue the grammar, and if masks could not be computed.
        """
        self._read_peek()
        if self._failure is not None:
            raise GrammarError(*self._failure)
        if not self._known(list(tokens)):
            self._send(None, list(tokens), None)
            if not self._heard(None, len(tokens)):
                self._send(None, list(tokens), None)
                self._heard(None, len(tokens))
            if self._failure is not None:
                raise GrammarError(*self._failure)
        elif self._forced is not None:
            known = self._forced[len(tokens) :] if self._forced[: len(tokens)] == list(tokens) else []
            self._forced = known or None
        self._tokens += tokens
        if self._tells and self._forced is None and not (tokens and tokens[-1] in self._eos):
            self._peek()

    def forced(self) -> list[int]:
        """The tokens that the grammar forces after the committed ones: at most about 32, [] if none or unknown.

        They are the checkpoint's tokenization of the text, and masks allow them. From the first call on, each
        ``accept`` requests the next ones from the lane, which computes them while the engine does other work.
        """
        if self._failure:
            return []
        if self._forced is None and not self._peeked:
            self._peek()
        self._tells = True
        self._read_peek()
        return list(self._forced or ())

    def _peek(self) -> None:
        """Send the committed tokens to the lane, and request the forced ones."""
        self._peeked = True
        self._send(None, [], None)

    def _read_peek(self) -> None:
        """Wait for the answer to :meth:`_peek`. The next masks notice a dead lane."""
        if self._peeked:
            self._peeked = False
            answer = self._receive()
            if answer is not None:
                self._take_in(answer, len(self._tokens))

    def masks(self, drafts: np.ndarray, out: np.ndarray) -> None:
        """Fill ``out [P, W, words]`` int32, contiguous, for the positions after ``drafts [P, k]`` (-1: none).

        out[p, j] is for the position after drafts[p, :j]. After a draft that the grammar refuses, or that ends the
        text, it is all ones: the mask before it forbids the former, and nothing follows the latter. If masks cannot be
        computed they allow EOS only, and :meth:`accept` raises the reason.
        """
        self.ask(drafts, out)
        if not self.collect():
            self.ask(drafts, out)
            self.collect()

    def ask(self, drafts: np.ndarray, out: np.ndarray) -> None:
        """Start the computation of :meth:`masks`; :meth:`collect` waits for it."""
        self._read_peek()
        self._asked = drafts, out
        if not self._failure:
            self._send(drafts.tolist(), [], out)

    def collect(self) -> bool:
        """Wait for the requested masks, and write them.

        Returns False if :meth:`ask` must be called again.

        That happens after the lane has died, possibly because of another output's mask. The second lane serves this
        output alone, so a second death is this output's fault.
        """
        assert self._asked is not None
        out = self._asked[1]
        if not self._failure and not self._heard(out, 0):
            return False
        if self._failure:
            out.fill(0)
            for row in out.reshape(-1, out.shape[-1]):
                allow(row, self._eos)
        return True

    def first_mask(self) -> np.ndarray:
        """The mask of an output's first token, int32 ``[words]``. Raises GrammarError where none can be made."""
        out = np.empty((1, 1, self._compiled.words), np.int32)
        self.masks(np.empty((1, 0), np.int32), out)
        if self._failure is not None:
            raise GrammarError(*self._failure)
        return np.asarray(out[0, 0])

    def close(self) -> None:
        """Leave the lane; the next masks or tokens join one anew."""
        self._leave()

    # ---- tokens ---------------------------------------------------------------------------------

    def _known(self, tokens: list[int]) -> bool:
        """True if the last masks show that the grammar accepts these tokens; False if they do not reach that far.

        Raises GrammarError for tokens that it refuses.
        """
        if self._asked is None:
            return False
        (drafts, out), self._asked = self._asked, None
        paths = [p for p, path in enumerate(drafts.tolist()) if path[: len(tokens) - 1] == tokens[:-1]]
        if not paths or len(tokens) > out.shape[1]:
            return False
        for place, token in enumerate(tokens):
            row = paths[0] * out.shape[1] + place
            if row in self._dead or not allows(out[paths[0], place], token):
                raise self._refused(out[paths[0], place], row in self._dead, len(self._tokens) + place)
        return True

    def _refused(self, mask: np.ndarray, dead: bool, length: int) -> GrammarError:
        """The error after ``length`` tokens, whose next one the mask forbids. dead: the grammar has no next token."""
        why = NOTHING.format(length)
        if dead:
            return GrammarError(why, "structured_outputs")
        ends = np.zeros_like(mask)
        allow(ends, self._eos)
        if self._restricting == "allowed_token_ids" and not (mask & ~ends).any():
            why += f": allowed_token_ids needs the end-of-sequence id, {', '.join(map(str, self._eos))}"
        return GrammarError(why, self._restricting)

    # ---- the lane -------------------------------------------------------------------------------

    def _send(self, drafts: list[list[int]] | None, more: list[int], out: np.ndarray | None) -> None:
        """Send the lane the tokens that it lacks and ``more``, and request masks. Errors are raised later."""
        descriptors = []
        try:
            if self._channel is None:
                self._channel, self._lane = self._compiled.process.join(self._alone)
                self._told, self._map = 0, np.empty(0, np.int32)
            if out is not None and out.size > self._map.size:
                descriptors = [_shared(out.nbytes)]
                self._map = np.frombuffer(mmap.mmap(descriptors[0], out.nbytes), np.int32)
            shape = out.shape if out is not None else ()
            tokens = [*self._tokens[self._told :], *more]
            self._channel.socket.settimeout(LONGEST_WAIT)
            self._deadline = time.monotonic() + LONGEST_WAIT
            self._channel.send([LONGEST_CALL, self._ends, tokens, drafts, shape], descriptors)
        except (Gone, TimeoutError) as error:
            self._late = isinstance(error, TimeoutError)
            self._leave()
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    def _heard(self, out: np.ndarray | None, more: int) -> bool:
        """Wait for the lane's answer and write the masks to ``out``; False if it must be asked again.

        more: number of tokens in the message that are not committed yet.
        """
        answer = self._receive()
        length = len(self._tokens)
        if answer is None and not self._alone:
            self._alone = True
            return False
        if answer is None:
            why = f"a mask took more than {LONGEST_CALL} s or {MEMORY >> 20} MiB"
            self._failure = AMBIGUOUS.format(length, why), "structured_outputs"
            if self._late:
                self._failure = LATE.format(length), None
        elif self._take_in(answer, length + more) and out is not None:
            self._dead = set(answer[2])
            out[...] = self._map[: out.size].reshape(out.shape)
        return True

    def _take_in(self, answer: list[Any], known: int) -> bool:
        """Read the lane's answer, after which it has ``known`` tokens. Returns False if the output cannot continue."""
        length = len(self._tokens)
        if answer[0] == "slow":
            self._failure = AMBIGUOUS.format(length, answer[1]), "structured_outputs"
        elif answer[0] != "ok":
            why = f"its structured output cannot be followed after {length} tokens: {answer[1]}"
            self._failure = why, None
        elif self._told + answer[1] < known:
            self._failure = NOTHING.format(self._told + answer[1]), self._restricting
        else:
            self._told, self._forced = known, answer[3]
        return not self._failure

    def _receive(self) -> list[Any] | None:
        if self._channel is None:
            return None
        try:
            self._channel.socket.settimeout(max(0.01, self._deadline - time.monotonic()))
            return self._channel.receive()[0]
        except (Gone, TimeoutError) as error:
            self._late = isinstance(error, TimeoutError)
            self._leave()
            return None

    def _leave(self) -> None:
        if self._channel is not None:
            self._channel.close()
            self._channel = None
            self._compiled.process.leave(self._lane)

    def __del__(self) -> None:
        self._leave()


def fill(matchers: Sequence[Follower], drafts: np.ndarray, masks: np.ndarray, rows: Iterable[int]) -> None:
    """Have each matcher fill its row of ``masks``, all at once: they compute in separate processes."""
    pairs = list(zip(matchers, rows, strict=True))
    for _ in range(2):  # the second time only those whose process has died
        for matcher, row in pairs:
            matcher.ask(drafts[row], masks[row])
        pairs = [(matcher, row) for matcher, row in pairs if not matcher.collect()]


def _shared(size: int) -> int:
    """A descriptor of memory that two processes can map."""
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("masks", os.MFD_CLOEXEC)
    else:
        descriptor, name = tempfile.mkstemp()
        os.unlink(name)
    os.ftruncate(descriptor, size)
    return descriptor
