"""The processes that compile grammars and track outputs, so that no grammar can end, stop or fill the engine's process.

Three kinds, each forked by the one before it:

* the *template* has llguidance and the vocabulary in memory, and forks. It runs no code on behalf of a request.
* a *compiler* compiles one grammar, within limits of processor time and memory, measures the cost of the first masks,
  and keeps the grammar. Its *lanes* are forked from it, so they inherit the grammar.
* a *lane* tracks outputs: it accepts tokens and makes masks, each message within a limit of processor time.

All limits are the kernel's (``setitimer``, ``setrlimit``), so that they also hold for code that never returns. A
process beyond a limit dies, or answers with an error. Each ends when the other side of its channel does.
``grammars.py`` starts :func:`main`. Imports nothing that imports torch.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import random
import selectors
import signal
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from unisono.sandbox.channel import ForkChannel, Gone, pair
from unisono.sandbox.forks import in_child, limit_memory, limit_time, serve
from unisono.structured_output.syntax.parse import NOTHING, RefusedError, parse, reason
from unisono.structured_output.vocabulary import build, nameable
from unisono.structured_output.workers.processes import LANES
from unisono.structured_output.workers.walk import EndRules, Unfollowable, Walk

TRIAL_STEPS, TRIAL_SECONDS = 16, 0.05
"""Tokens, and seconds, of the trial of a compiled grammar, which measures the cost of masks before requests wait for
them.
"""
SLOW_MASK = 0.25
"""Processor time of one mask of the trial, seconds. A few microseconds are usual, milliseconds for a large schema."""
STOCK, EACH = 1.0, 0.03
"""Processor time of an output, seconds: an initial budget, and an addition per token.

All requests of a round wait for it.
"""
PR_SET_PDEATHSIG = 1


# ---- the template -----------------------------------------------------------------------------------


def main(descriptor: int) -> None:
    """Fork a compiler for each message."""
    serve(descriptor, _begin)


def _begin(first: list[Any]) -> Callable[[ForkChannel, int], None]:
    (described,) = first
    tools, own = _Tools(described), os.getpid()
    return lambda channel, memory: _Compiler(channel, tools).run(own, memory)


class _Tools:
    """llguidance with one vocabulary."""

    def __init__(self, described: Mapping[str, Any]) -> None:
        import llguidance

        self.matcher: Any = llguidance.LLMatcher
        self.tokenizer, self.canonical = build(described)
        self.vocabulary = nameable(described)
        self.limits = llguidance.LLParserLimits(verbose_errors=False)

    def compile(self, grammar: str) -> Any:
        """A matcher at the start of a grammar. Raises RefusedError."""
        made = self.matcher(self.tokenizer, grammar, log_level=0, limits=self.limits)
        if made.is_error():
            raise RefusedError(reason(Exception(made.get_error())))
        return made


def _dies_with(parent: int) -> None:
    """Let the kernel kill this process with its parent, even while it is stopped.

    Linux only; elsewhere a computing process ends at its limits, and a waiting one with its channel.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)


# ---- a compiler -------------------------------------------------------------------------------------


class _Compiler:
    def __init__(self, channel: ForkChannel, tools: _Tools) -> None:
        self._channel, self._tools = channel, tools
        self._lanes: dict[int, ForkChannel] = {}

    def run(self, parent: int, memory: int) -> None:
        _dies_with(parent)
        limit_memory(memory)
        job, _ = self._channel.receive()
        limit_time(job["seconds"])
        try:
            grammar = parse(job["kind"], job["given"], job["compact"], self._tools.vocabulary)
            self.grammar = self._tools.compile(grammar)
            slow = self._tried(job["eos"], job["words"])
            problem = "" if slow < SLOW_MASK else (
                f"it is too ambiguous: a mask takes {slow:.2f} s, the limit is {SLOW_MASK} s. Avoid repetitions within "
                "repetitions"
            )  # fmt: skip
        except MemoryError:
            problem = f"it takes more than {memory >> 20} MiB"
        except Exception as error:  # refusals are ValueErrors of several classes
            problem = reason(error)
        if problem:
            self._channel.send(["bad", problem])
            return
        self._lane(0)
        limit_time(0)
        self._channel.send(["ok", ""])
        while True:
            number, (end,) = self._channel.receive()
            try:
                self._lane(number).send("member", [end])
            except Gone:  # it has died meanwhile
                del self._lanes[number]
                self._lane(number).send("member", [end])
            os.close(end)
            if number >= LANES:  # of one output: it ends with this output
                self._lanes.pop(number).close()

    def _tried(self, eos: list[int], words: int) -> float:
        """Accept a few random tokens; returns the longest time of a mask or a token, in seconds.

        Raises RefusedError if not even a first token exists.
        """
        begun, longest, chance = time.process_time(), 0.0, random.Random(0)
        walk = Walk(self.grammar.deep_copy, EndRules(eos, never=True), self._tools.canonical)
        mask = np.empty((1, 1, words), np.int32)
        for step in range(TRIAL_STEPS):
            before = time.process_time()
            if walk.masks([[]], mask) and not step:
                raise RefusedError(NOTHING)
            bits = np.unpackbits(mask.view(np.uint8), bitorder="little")
            (allowed,) = np.nonzero(bits)
            token = int(allowed[chance.randrange(len(allowed))])
            taken = walk.accept([token])
            now = time.process_time()
            longest = max(longest, now - before)
            if not taken or token in eos or now - begun > TRIAL_SECONDS:
                break
        return longest

    def _lane(self, number: int) -> ForkChannel:
        """The channel to lane ``number``, forked if it does not exist."""
        if number not in self._lanes:
            ours, theirs = pair()
            if not os.fork():
                self._channel.close()
                for other in (ours, *self._lanes.values()):
                    other.close()
                in_child(_Lane(ForkChannel(theirs), self.grammar, self._tools.canonical).run)
            theirs.close()
            self._lanes[number] = ours
        return self._lanes[number]


# ---- a lane -----------------------------------------------------------------------------------------


class _Member:
    """One output of a lane."""

    def __init__(self, channel: ForkChannel, begin: Callable[[], Any], canonical: bool) -> None:
        self.channel, self._begin, self._canonical = channel, begin, canonical
        self._walk: Walk | None = None
        self._map: np.ndarray = np.empty(0, np.int32)
        self._spent = 0.0

    def answer(self) -> None:
        """Handle one message: tokens to accept, drafts to make masks for. The answer has forced tokens, too."""
        (limit, ends, tokens, drafts, shape), descriptors = self.channel.receive()
        if descriptors:
            size = os.fstat(descriptors[0]).st_size
            self._map = np.frombuffer(mmap.mmap(descriptors[0], size), np.int32)
            os.close(descriptors[0])
        limit_time(limit)
        begun = time.process_time()
        try:
            if self._walk is None:
                self._walk = Walk(self._begin, EndRules(*ends), self._canonical)
            taken, dead, forced = self._walk.accept(tokens), [], []
            if taken == len(tokens) and drafts is not None:
                dead = self._walk.masks(drafts, self._map[: np.prod(shape)].reshape(shape))
            if taken == len(tokens):
                forced = self._walk.forced()
            self._spent += time.process_time() - begun
            reply = ["ok", taken, dead, forced]
            if self._spent > STOCK + EACH * self._walk.length:
                why = (
                    f"its masks have taken {self._spent:.1f} s, the limit is {STOCK:g} s and {EACH:g} s for each token"
                )
                reply = ["slow", why, [], []]
        except MemoryError:
            reply = ["failed", "it takes too much memory", [], []]
        except Unfollowable as error:
            reply = ["slow", str(error), [], []]
        except Exception as error:
            reply = ["failed", reason(error), [], []]
        limit_time(0)
        self.channel.send(reply)


class _Lane:
    """Event loop for the messages of members, and for new ones."""

    def __init__(self, control: ForkChannel, grammar: Any, canonical: bool) -> None:
        self._control, self._grammar, self._canonical = control, grammar, canonical
        self._selector = selectors.DefaultSelector()
        self._selector.register(control, selectors.EVENT_READ, None)

    def run(self) -> None:
        limit_time(0)  # timers are not inherited, but this makes sure
        while True:
            for key, _ in self._selector.select():
                if key.data is None:
                    self._take_in()
                else:
                    self._answer(key.data)

    def _take_in(self) -> None:
        try:
            _, (end,) = self._control.receive()
        except Gone:
            if len(self._selector.get_map()) == 1:
                raise  # no member is left
            self._selector.unregister(self._control)  # the grammar was evicted; its outputs continue
            return
        member = _Member(ForkChannel.of(end), self._grammar.deep_copy, self._canonical)
        self._selector.register(member.channel, selectors.EVENT_READ, member)

    def _answer(self, member: _Member) -> None:
        try:
            member.answer()
        except Gone:
            self._selector.unregister(member.channel)
            member.channel.close()
            if not self._selector.get_map():
                raise
