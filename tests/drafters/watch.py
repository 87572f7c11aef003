"""Watches a drafter at work in an engine that runs eagerly: every round's drafts, and what led to them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import torch

from unisono.drafters.base import PromptPass, Verified
from unisono.entrypoints.llm import LLM
from unisono.kernels.speculation.shared_rows import SharedInputs
from unisono.types import FinishReason


@dataclass
class Seen:
    """One request in one round: the committed tokens, its drafts, and (hidden state, logits) of each draft step."""

    ids: list[int]
    greedy: bool
    drafts: list[int]
    steps: list[tuple[torch.Tensor, torch.Tensor]]


class Watch:
    """Records what a drafter of ``drafters/hidden.py`` does, in ``rounds``.

    Random heads are hardly ever right. So after they were recorded some of the drafts, by the number of tokens that are
    committed, are made right: ``texts`` are the requests' tokens from first to last.
    """

    def __init__(self, llm: LLM, texts: Sequence[list[int]] = ()) -> None:
        drafter, self._slots = llm.engine.worker.drafter, llm.engine.worker.slots
        self.rounds: list[Seen] = []
        self._texts, self._steps = texts, []
        self._kept: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # by slot: what led to draft 0
        self._finish, self._propose = drafter.module.finish, drafter.propose
        self._observe, self._observe_prompt = drafter.observe, drafter.observe_prompt
        drafter.module.finish, drafter.propose = self.finish, self.propose
        drafter.observe, drafter.observe_prompt = self.observe, self.observe_prompt

    def finish(self, out: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden, logits = self._finish(out)
        self._steps.append((hidden.cpu(), logits.cpu()))
        return hidden, logits

    def observe(self, verified: Verified) -> None:
        self._observe(verified)
        self._keep(verified.slots, verified.result[:, 0] > 0)

    def observe_prompt(self, prompt: PromptPass) -> None:
        self._observe_prompt(prompt)
        self._keep(prompt.slots, prompt.query_start.diff() > 0)

    def _keep(self, slots: torch.Tensor, moved: torch.Tensor) -> None:
        hidden, logits = self._steps.pop()
        for row in moved.nonzero()[:, 0].tolist():
            self._kept[int(slots[row])] = hidden[row], logits[row]

    def propose(self, rows: torch.Tensor, drafts: torch.Tensor) -> None:
        self._steps = []
        self._propose(rows, drafts)
        s = self._slots
        for row, slot in enumerate(rows.tolist()):
            if s.status[slot] != FinishReason.RUNNING:
                continue
            length, most = int(s.length[slot]), int(s.max_length[slot] - s.length[slot])
            ids = s.history[slot, :length].tolist()
            steps = [self._kept[slot], *((hidden[row], logits[row]) for hidden, logits in self._steps)]
            self.rounds.append(Seen(ids, bool(s.temperature[slot] == 0), drafts[row, :most].tolist(), steps[:most]))
            text = next((t for t in self._texts if t[:length] == ids), [])
            truth = text[length:][: length % (drafts.shape[1] + 1)]
            drafts[row, : len(truth)] = torch.tensor(truth, dtype=drafts.dtype)
        self._steps = []


@dataclass
class BlockWatch:
    """Records what a block drafter does, in ``rounds``: (committed tokens, greedy, drafts, logits [k, V']).

    Random heads are hardly ever right, so afterwards some drafts are made right: ``texts`` are the requests' tokens
    from first to last.
    """

    llm: LLM
    texts: Sequence[list[int]] = ()
    rounds: list[tuple[list[int], bool, list[int], torch.Tensor]] = field(default_factory=list)

    def __post_init__(self) -> None:
        drafter = self.llm.engine.worker.drafter
        self._logits, self._propose = drafter.module.logits, drafter.propose
        drafter.module.logits, drafter.propose = self.logits, self.propose
        if drafter.drafts_ragged:
            self._propose_ragged, drafter.propose_ragged = drafter.propose_ragged, self.propose_ragged

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        self._last = self._logits(hidden)
        return self._last

    def propose(self, rows: torch.Tensor, drafts: torch.Tensor) -> None:
        self._propose(rows, drafts)
        k = drafts.shape[1]
        self._note(rows, drafts, [k] * len(rows), self._last.view(len(rows), k, -1).cpu())

    def propose_ragged(self, rows: torch.Tensor, drafts: torch.Tensor, given: SharedInputs) -> None:
        """Note rows of their own widths; the first token of each is no mask."""
        self._propose_ragged(rows, drafts, given)
        each = [self._last[a + 1 : b].cpu() for a, b in pairwise(given.query_start.tolist())]
        self._note(rows, drafts, [len(logits) for logits in each], each)

    def _note(
        self, rows: torch.Tensor, drafts: torch.Tensor, widths: Sequence[int], logits: Sequence[torch.Tensor]
    ) -> None:
        s, k = self.llm.engine.worker.slots, drafts.shape[1]
        for row, (slot, width) in enumerate(zip(rows.tolist(), widths, strict=True)):
            if s.status[slot] != FinishReason.RUNNING or not width:
                continue
            length, most = int(s.length[slot]), int(s.max_length[slot] - s.length[slot])
            ids = s.history[slot, :length].tolist()
            if most >= width:  # a block that ends before its last mask is not the paper's
                self.rounds.append((ids, bool(s.temperature[slot] == 0), drafts[row, :width].tolist(), logits[row]))
            text = next((t for t in self.texts if t[:length] == ids), [])
            truth = text[length:][: min(length % (k + 1), width)]
            drafts[row, : len(truth)] = torch.tensor(truth, dtype=drafts.dtype)
