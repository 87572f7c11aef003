"""Host memory on a CPU whose copies back to the device arrive late, as on a GPU, and leave rubbish until then."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import pytest
import torch

from unisono.engine import offload
from unisono.kv.offload.host_pages import HostPages, Move


class LatePages(HostPages):
    """Pages arrive when they have been asked for ``polls`` times. The worst is in the pages meanwhile."""

    polls = 3

    def __init__(self, *arguments: object) -> None:
        super().__init__(*arguments)  # type: ignore[arg-type]
        self.waiting: deque[list] = deque()

    def move_in(self, ticket: int, moves: Sequence[Move]) -> None:
        snapshot = []
        for kind, pages, slots in moves:
            index = torch.from_numpy(slots.astype("int64"))
            bytes_ = [host.index_select(0, index) for host in self.host[kind]]
            snapshot.append((kind, torch.from_numpy(pages.astype("int64")), bytes_))
            for part in self._parts[kind]:
                part[snapshot[-1][1]] = 0x3F
        self.waiting.append([ticket, self.polls, snapshot])

    def poll(self) -> int:
        if self.waiting:
            self.waiting[0][1] -= 1
        while self.waiting and self.waiting[0][1] <= 0:
            ticket, _, parts = self.waiting.popleft()
            for kind, pages, tensors in parts:
                for part, tensor in zip(self._parts[kind], tensors, strict=True):
                    part.index_copy_(0, pages, tensor)
            self._last = ticket
        return self._last


def arrive_late(monkeypatch: pytest.MonkeyPatch, polls: int = 3) -> None:
    """Engines that are made from now on have late pages."""
    monkeypatch.setattr(LatePages, "polls", polls)
    monkeypatch.setattr(offload, "make_host_pages", LatePages)
