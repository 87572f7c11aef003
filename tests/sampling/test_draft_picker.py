"""A drafter's pick sees the drafts of the round that it drafts, and no other thread's."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from unisono.sampling import pipeline
from unisono.sampling.pipeline import DraftPicker, EditFields

SLOTS = torch.zeros(2, dtype=torch.int32)


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> dict[int, torch.Tensor]:
    """By thread: the drafts that the sampling rule was last given."""
    found: dict[int, torch.Tensor] = {}

    def given(logits: Any, slots: Any, width: int, drafts: torch.Tensor, *rest: Any) -> Any:
        found[threading.get_ident()] = drafts
        return SimpleNamespace(tokens=None)

    monkeypatch.setattr(pipeline, "edit_and_pick", given)
    return found


def test_threads_that_draft_at_once_see_their_own(seen: dict[int, torch.Tensor]) -> None:
    """As when kernels are compiled at start: each thread runs a round of its own."""
    picker, entered = DraftPicker(cast(EditFields, None)), threading.Barrier(3)

    def draft(number: int) -> bool:
        drafts = torch.full((2, 3), number, dtype=torch.int32)
        with picker.seeing(drafts):
            entered.wait(10)
            picker(SLOTS, SLOTS, 2, None)
            mine = seen[threading.get_ident()] is drafts
            entered.wait(10)
        return mine

    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(draft, range(3))) == [True] * 3


def test_outside_of_drafting_nothing_is_drafted(seen: dict[int, torch.Tensor]) -> None:
    picker = DraftPicker(cast(EditFields, None))
    with picker.seeing(torch.zeros(2, 3, dtype=torch.int32)):
        pass
    picker(SLOTS, SLOTS, 1, None)
    assert seen[threading.get_ident()].tolist() == [[-1], [-1]]
