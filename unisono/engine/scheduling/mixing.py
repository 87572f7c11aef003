"""Whether running requests decode in the prompt passes of others (*mixed* passes), or in rounds between them.

A mixed pass replaces a round that drafts nothing: the weights are read once for both, and a stream waits for a prompt
pass only, not for the round after it. Where rounds draft, a round brings several tokens, so they stay apart.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection
from collections.abc import Sequence as Sequences
from typing import TYPE_CHECKING

from unisono.engine.scheduling.draft_controller import DraftController
from unisono.engine.sequence import Sequence, tokens_left
from unisono.engine.startup.buckets import LEAST_TOKENS
from unisono.graphs import Key, Shape

if TYPE_CHECKING:
    from unisono.engine.worker.runner import Runner


class Mixing:
    """Decides for one engine. controller: says what rounds draft and take.

    ``apart`` counts prompt passes without the running requests, by reason; ``expected_ms``: what the last decision
    expected of the mixed pass, the prompt pass and the round.
    """

    def __init__(self, runner: Runner, controller: DraftController) -> None:
        self._runner, self._controller = runner, controller
        self.apart: Counter[str] = Counter()
        self.expected_ms = (0.0, 0.0, 0.0)
        self._most = runner.config.max_num_batched_tokens
        self._fixed = runner.config.device.type == "cpu"  # nothing is measured there, so that runs repeat

    def prompt_tokens(
        self, running: Collection[Sequence], prompts: Sequences[Sequence], fitting: Callable[[float], int]
    ) -> int:
        """How many prompt tokens the running requests may share a pass with; 0 where they have a round of their own,
        for a reason that is counted.

        prompts: those that may be in the pass. fitting: the tokens that may run now in a pass that is a round of this
        many milliseconds too; 0 milliseconds on a CPU.
        """
        sizes = self._runner.decode_sizes
        if not running or not sizes:
            return 0
        room = self.room(len(running)) if len(running) <= sizes[-1] else self._most
        if LEAST_TOKENS + room > self._most:
            return self._no("too many requests")
        if not all(feature.mixes for s in (*running, *prompts) for feature in s.states):
            return self._no("a feature")
        if not self._controller.drafts_nothing(running):
            return self._no("drafts")
        tokens = fitting(0.0 if self._fixed else self._controller.round_ms(running))
        mixed = min(max(LEAST_TOKENS, tokens - room), self._most - room)
        if tokens_left(prompts) > mixed:
            mixed = self._runner.filling(mixed, room)
        return mixed if self._fixed or self.pays(running, mixed, room) else self._no("slower")

    def info(self) -> dict[str, object]:
        """``apart`` and ``expected_ms``, for reports."""
        names = ("mixed", "extend", "round")
        expected = {name: round(ms, 3) for name, ms in zip(names, self.expected_ms, strict=True)}
        return {"apart": dict(self.apart), "expected_ms": expected}

    def _no(self, why: str) -> int:
        self.apart[why] += 1
        return 0

    def room(self, decodes: int) -> int:
        """Rows that a mixed pass has for this number of requests that decode."""
        return next(size for size in self._runner.decode_sizes if size >= decodes)

    def pays(self, running: Collection[Sequence], tokens: int, room: int) -> bool:
        """Whether one pass is expected to take less time than two."""
        runner, planner = self._runner, self._runner.planner
        together = planner.launched_ms(runner.mixed_key(tokens, room))
        prompts = planner.launched_ms(Key("extend", Shape(tokens), runner.features))
        self.expected_ms = together, prompts, self._controller.round_ms(running)
        return together <= prompts + self.expected_ms[-1]
