"""Rank 0's index of the files of several ranks: a part counts as written or read when all ranks report it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest

from unisono.kv.offload import page_files
from unisono.kv.offload.host_index import HostIndex, Part
from unisono.kv.offload.page_files import PageFiles, Read
from unisono.kv.offload.part_files import BAD, PENDING, PartResult

SIZE = 100


class Ranks:
    """Files of two ranks; ``other`` has what the second one says, until then it is not done."""

    folder, ranks = Path("nowhere"), 2

    def __init__(self) -> None:
        self.done: list[PartResult] = []
        self.other: dict[tuple[Part, bool], int] = {}
        self.removed: list[Part] = []
        self.asked = 0

    def write(self, part: Part, slot: int, complete: bool) -> None:
        self.done.append(PartResult(part, True, SIZE, 0.0))

    def read(self, part: Part, slot: int) -> None:
        self.done.append(PartResult(part, False, 1, 0.0))

    def remove(self, parts: Sequence[Part]) -> None:
        self.removed += parts

    def poll(self) -> Iterable[PartResult]:
        done, self.done = self.done, []
        return done

    def outcomes(self, asked: Sequence[tuple[Part, bool]]) -> list[list[int]]:
        self.asked += 1
        own = [SIZE if written else 1 for _, written in asked]
        return [own, [self.other.get(each, PENDING) for each in asked]]


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Ranks:
    monkeypatch.setattr(page_files, "ASK_SECONDS", 0.0)
    return Ranks()


def part(number: int) -> Part:
    return 0, bytes([number])


def test_a_slot_is_pinned_until_all_ranks_have_written_it(ranks: Ranks) -> None:
    index = HostIndex({0: 2})
    files = PageFiles(ranks, {}, 10 * SIZE, index)
    held = index.put(part(1), index.take(0), True)
    files.keep(part(1), held)
    files.poll()
    assert (held.pins, files.written, part(1) in files) == (1, 0, False)
    ranks.other[part(1), True] = SIZE
    files.poll()
    assert (held.pins, files.written, files.bytes) == (0, 1, 2 * SIZE)
    assert part(1) in files


def test_failed_write_on_one_rank_removes_the_file_on_all(ranks: Ranks) -> None:
    index = HostIndex({0: 2})
    files = PageFiles(ranks, {}, 10 * SIZE, index)
    files.keep(part(1), index.put(part(1), index.take(0), True))
    ranks.other[part(1), True] = BAD
    files.poll()
    assert (files.written, files.bytes, ranks.removed) == (0, 0, [part(1)])
    assert part(1) not in files


@pytest.mark.parametrize("outcome", [1, BAD])
def test_a_prompt_waits_until_all_ranks_have_read(outcome: int, ranks: Ranks) -> None:
    index = HostIndex({0: 2})
    files = PageFiles(ranks, {part(1): SIZE}, 10 * SIZE, index)
    waiting = Read({part(1)})
    assert files.fetch(part(1), waiting)
    files.poll()
    assert files.busy
    assert not waiting.open
    ranks.other[part(1), False] = outcome
    files.poll()
    assert waiting.open
    assert (part(1) in index, files.read, files.bad) == ((True, 1, 0) if outcome == 1 else (False, 0, 1))
    assert ranks.removed == ([part(1)] if outcome == BAD else [])
    assert index.take(0) >= 0, "the slot is free again, or gives way"


def test_rank_outcomes_are_requested_in_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each time rank 0 waits for them."""
    monkeypatch.setattr(page_files, "ASK_SECONDS", 60.0)
    ranks, index = Ranks(), HostIndex({0: 60})
    files = PageFiles(ranks, {}, 100 * SIZE, index)
    for number in range(50):
        ranks.other[part(number), True] = SIZE
        files.keep(part(number), index.put(part(number), index.take(0), True))
        files.poll()
    assert (ranks.asked, files.written) == (1, 1)
    files._ask_from = 0.0
    files.poll()
    assert (ranks.asked, files.written) == (2, 50)


def test_the_budget_is_of_all_ranks(ranks: Ranks) -> None:
    files = PageFiles(ranks, {part(n): SIZE for n in range(10)}, 9 * SIZE, HostIndex({0: 2}))
    assert files.bytes == 8 * SIZE
    assert ranks.removed == [part(n) for n in range(6)], "least recently used first"
