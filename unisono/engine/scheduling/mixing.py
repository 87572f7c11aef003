"""Mixed passes: choose if running requests decode inside a prompt pass or in a round of their own.

A mixed pass replaces a round without drafts: it reads the weights once for both, and a running request waits for the
prompt pass only. Rounds with drafts bring several tokens each, so they stay separate.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection
from collections.abc import Sequence as Sequences
from typing import TYPE_CHECKING

from unisono.engine.scheduling.draft_controller import DraftController
from unisono.engine.sequence import Sequence, tokens_left
from unisono.engine.startup.capture_candidates import LEAST_TOKENS
from unisono.graphs import GraphKey, PassShape

if TYPE_CHECKING:
    from unisono.engine.worker.runner import Runner


class Mixing:
    """Decide for one engine. controller: gives the drafts and the times of rounds.

    ``apart`` counts prompt passes without running requests, by reason. ``expected_ms``: the times that the last
    decision expected of the mixed pass, the prompt pass and the round, in milliseconds.
    """

    def __init__(self, runner: Runner, controller: DraftController) -> None:
        self._runner, self._controller = runner, controller
        self.apart: Counter[str] = Counter()
        self.expected_ms = (0.0, 0.0, 0.0)
        self._most = runner.config.max_num_batched_tokens
        self._fixed = runner.config.device.type == "cpu"  # the CPU measures nothing, so that runs repeat

    def prompt_tokens(
        self, running: Collection[Sequence], prompts: Sequences[Sequence], fitting: Callable[[float], int]
    ) -> int:
        """Return the most prompt tokens of a pass in which the running requests decode; 0 for a separate round. Count
        the reason for 0.

        prompts: candidates for the pass. fitting: maps the round's time in milliseconds (0 on a CPU) to the prompt
        tokens that may run now in a mixed pass.
        """
        sizes = self._runner.decode_sizes
        if not running or not sizes:
            return 0
        room = self.decode_capacity(len(running)) if len(running) <= sizes[-1] else self._most
        if LEAST_TOKENS + room > self._most:
            return self._no("too many requests")
        if not all(feature.mixes for s in (*running, *prompts) for feature in s.states):
            return self._no("a feature")
        if not self._controller.drafts_nothing(running):
            return self._no("drafts")
        tokens = fitting(0.0 if self._fixed else self._controller.round_ms(running))
        mixed = min(max(LEAST_TOKENS, tokens - room), self._most - room)
        if tokens_left(prompts) > mixed:
            mixed = self._runner.tokens_filling_graph(mixed, room)
        return mixed if self._fixed or self.pays(running, mixed, room) else self._no("slower")

    def info(self) -> dict[str, object]:
        """Return ``apart`` and ``expected_ms`` for reports."""
        names = ("mixed", "extend", "round")
        expected = {name: round(ms, 3) for name, ms in zip(names, self.expected_ms, strict=True)}
        return {"apart": dict(self.apart), "expected_ms": expected}

    def _no(self, why: str) -> int:
        self.apart[why] += 1
        return 0

    def decode_capacity(self, decodes: int) -> int:
        """Return the rows that a mixed pass reserves for this number of decoding requests."""
        return next(size for size in self._runner.decode_sizes if size >= decodes)

    def pays(self, running: Collection[Sequence], tokens: int, room: int) -> bool:
        """True if one mixed pass is expected to take less time than a prompt pass and a round."""
        runner, planner = self._runner, self._runner.planner
        together = planner.launched_ms(runner.mixed_key(tokens, room))
        prompts = planner.launched_ms(GraphKey("extend", PassShape(tokens), runner.features))
        self.expected_ms = together, prompts, self._controller.round_ms(running)
        return together <= prompts + self.expected_ms[-1]
