"""Each path of a tree is drafted as a chain would be that was made to draft its tokens, to the bit.

Chains are held to plain PyTorch elsewhere. Here every round of a tree is gone through again, path by path, by the same
drafter as a chain whose picks are forced, and all logits must be those that the tree's path was drafted from.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.helpers import lazy_engine, mixed_params, prompts
from tests.engine.matrix import TREE_DRAFTERS, TREES, drafting_tree
from tests.kernels.lookup_oracle import paths_of
from unisono import SamplingParams
from unisono.entrypoints.llm import LLM
from unisono.kernels.sampling.edits import edit_logits
from unisono.passes import tree
from unisono.types import FinishReason

DEEP = {"speculative_token_tree": "[(0,), (1,), (0, 0), (1, 0), (1, 1), (0, 0, 0), (1, 0, 0), (1, 1, 0)]"}
"""All paths but the first are so long that they read what they have drafted themselves."""

NEURAL = sorted(TREE_DRAFTERS.keys() - {"ngram"})


class Retrace:
    """Wraps ``propose`` of an engine that runs eagerly; counts what it compared."""

    def __init__(self, llm: LLM) -> None:
        worker, config = llm.engine.worker, llm.engine.config
        self.drafter, self.slots, self.paths = worker.drafter, worker.slots, config.requested.speculative.paths
        self._context, self._state = self.drafter._context, worker.store.view("drafter")
        self._pick, self._propose = self._context.sample, self.drafter.propose
        self.drafter.propose = self.propose
        self.compared, self.pages, self._given = 0, set(), {}

    def propose(self, slots: torch.Tensor, drafts: torch.Tensor, tables: torch.Tensor) -> None:
        recorded = self._recorded(None)
        self._propose(slots, drafts, tables)
        asked, drafted = drafts.clone(), dict(recorded)
        for row, slot in reversed(list(enumerate(slots.tolist()))):  # path 0 last: it leaves its KV where it was
            path = self.paths[row % len(self.paths)]
            if self.slots.status[slot] == FinishReason.RUNNING:
                self._check(slot, path, asked[row : row + 1], {step: logits[row] for step, logits in drafted.items()})
        self._recorded(None)
        object.__setattr__(self._context, "sample", self._pick)

    def _recorded(self, forced: torch.Tensor | None) -> dict[int, torch.Tensor]:
        """Have picks recorded by step, and where ``forced [1, k]`` are given taken from there."""
        given: dict[int, torch.Tensor] = {}

        def pick(logits: torch.Tensor, slots: torch.Tensor, offset: int, ids: torch.Tensor | None) -> torch.Tensor:
            given[offset] = logits.clone()
            return self._pick(logits, slots, offset, ids) if forced is None else forced[:, offset]

        object.__setattr__(self._context, "sample", pick)
        return given

    def _check(self, slot: int, path: tuple[int, ...], forced: torch.Tensor, drafted: dict[int, torch.Tensor]) -> None:
        room = int(self.slots.max_length[slot] - self.slots.length[slot])  # beyond, positions are not what they seem
        rows, kept = forced.new_tensor([slot]), self._state.tree.get("draft")
        before = None if kept is None else kept[slot].clone()
        if kept is not None:
            assert forced[0, 0] == kept[slot, path[0]]
            kept[slot, 0] = forced[0, 0]
        chain = self._recorded(forced)
        self._propose(rows, torch.full_like(forced, -1))
        if kept is not None:
            kept[slot] = before
        assert chain.keys() == drafted.keys()
        greedy = self.slots.temperature[slot] == 0 and self.slots.edits[slot] == 0
        module = getattr(self.drafter, "module", None)
        for step in sorted(chain.keys() & set(range(min(len(path), room)))):
            assert torch.equal(chain[step][0], drafted[step]), (path, step)
            if greedy:
                best = int(drafted[step].float().sort(descending=True, stable=True).indices[path[step]])
                ids = None if module is None else module.ids
                assert int(forced[0, step]) == (best if ids is None else int(ids[best]))
            self.compared += 1
            self.pages.add((int(self.slots.length[slot]) - 2) // 16)


@pytest.mark.parametrize("method", NEURAL)
def test_a_path_is_drafted_as_a_chain_of_its_tokens(method: str, checkpoints: dict[str, Path], tmp_path: Path) -> None:
    params = [*mixed_params(5), SamplingParams(temperature=0, repetition_penalty=1.4, max_tokens=24, ignore_eos=True)]
    with drafting_tree(method, TREE_DRAFTERS[method](checkpoints, tmp_path), DEEP, enforce_eager=True) as llm:
        retrace = Retrace(llm)
        llm.generate(prompts(6, 250, low=3, high=30), params)
    assert retrace.compared > 300
    assert len(retrace.pages) > 2, "the tail has crossed pages"


@pytest.mark.parametrize("method", ["eagle", "eagle3", "mtp"])
@torch.inference_mode()
def test_drafter_state_after_tree_rounds_equals_sequential_state(
    method: str, checkpoints: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a round whose third path was the best, the state is that of an engine that committed token by token."""
    made = TREE_DRAFTERS[method](checkpoints, tmp_path)
    params = SamplingParams(temperature=1, seed=3, max_tokens=40, ignore_eos=True)
    kept: list[dict[int, tuple[torch.Tensor, torch.Tensor]]] = []
    others = 0
    for most in (0, None):
        with drafting_tree(method, made, {"topk": 3, "num_draft_tokens": 12}, enforce_eager=True) as llm:
            drafter, slots = llm.engine.worker.drafter, llm.engine.worker.slots
            observe, states, kept_state = drafter.observe, {}, llm.engine.worker.store.view("drafter")

            def watched(verified: Any, state=kept_state, slots=slots, observe=observe, states=states) -> None:
                observe(verified)
                slot = int(verified.slots[0])
                states[int(slots.length[slot])] = state["hidden"][slot].clone(), state["draft"][slot].clone()

            def counted(*given: Any, best: Any = tree.best_path) -> Any:
                nonlocal others
                chosen = best(*given)
                others += int(chosen.rows[0] > 0)
                return chosen

            drafter.observe = watched
            monkeypatch.setattr(tree, "best_path", counted)
            ids = drafter.module.ids  # a reduced draft vocabulary
            few = (40, 41, 42) if ids is None else tuple(ids[:3].tolist())
            llm.generate([[40, 41, 42, 40]], replace(params, max_drafts=most, allowed_token_ids=few))
            monkeypatch.undo()
            kept.append(states)
    assert others > 3
    stepwise, planted_states = kept
    assert len(planted_states) < len(stepwise)
    for length, (hidden, draft) in planted_states.items():
        assert torch.equal(hidden, stepwise[length][0])
        assert torch.equal(draft, stepwise[length][1])


def test_ngram_tree_paths_match_the_oracle(qwen3: Path) -> None:
    """Prompt lookup: path l follows the l-th different continuation, in every round of every request."""
    params = [SamplingParams(temperature=t, seed=i, max_tokens=40, ignore_eos=True,
                             allowed_token_ids=tuple(range(40, 43))) for i, t in enumerate((0, 1, 1))]  # fmt: skip
    given = {"speculative_token_tree": "[(0,), (0, 0), (0, 0, 0), (1,), (1, 0), (2,)]"}
    compared = 0
    with drafting_tree("ngram", (qwen3, None), given, enforce_eager=True) as llm:
        drafter, slots = llm.engine.worker.drafter, llm.engine.worker.slots
        propose = drafter.propose

        def watched(rows: torch.Tensor, drafts: torch.Tensor, tables: torch.Tensor) -> None:
            nonlocal compared
            propose(rows, drafts, tables)
            for row, slot in enumerate(rows[::3].tolist()):
                own = slots.history[slot, : int(slots.length[slot])].tolist()
                assert drafts[3 * row : 3 * row + 3].tolist() == paths_of(own, [3, 2, 1], 3, 4, 1)
                compared += int(drafts[3 * row + 1, 0]) >= 0

        drafter.propose = watched
        llm.generate([[40, 41, 42] * 4, [40, 42, 41, 41], [42]], params)
        assert compared > 20
        assert llm.engine.counters.accept_length > 1.2


def test_paths_see_their_own_drafts(qwen3: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: penalties that see another path's drafts cost acceptance, though the target drafts for itself."""
    from unisono.sampling import pipeline

    def others(logits: torch.Tensor, slots: torch.Tensor, width: int, drafts: torch.Tensor, *rest: Any) -> Any:
        return edit_logits(logits, slots, width, drafts.roll(1, 0) if width == 1 else drafts, *rest)

    params = SamplingParams(temperature=0, frequency_penalty=2.0, max_tokens=64, ignore_eos=True)
    lengths = []
    for patched in (False, True):
        if patched:
            monkeypatch.setattr(pipeline, "edit_logits", others)
        with drafting_tree("standalone", (qwen3, qwen3), TREES["binary"]) as llm:
            llm.generate(prompts(8, 250), params)
            lengths.append(llm.engine.counters.accept_length)
    assert lengths[0] > 3.8
    assert lengths[1] < lengths[0]


def test_engines_without_trees_have_no_pages_for_paths(qwen3: Path) -> None:
    with lazy_engine(qwen3) as llm:
        assert llm.engine.worker.path_pages == 0
        assert llm.engine.worker.slots.page_table.shape[0] == 9
