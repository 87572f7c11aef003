"""One rank's files, as rank 0 asks for them."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from unisono.kv.offload.host_index import Part
from unisono.kv.offload.part_files import BAD, PENDING, PartFiles

ONE, TWO = (0, b"one"), (0, b"two")


class Host(SimpleNamespace):
    """Two host slots; a copy into the second one goes on until ``copied`` is set."""

    def wait_for_copies(self, kind: int, slot: int) -> None:
        if slot == 1:
            self.copied.wait(10)


@pytest.fixture
def host() -> Host:
    return Host(host={0: [torch.arange(8.0).view(2, 4)]}, copied=threading.Event())


def test_outcomes_are_repeated_until_rank_0_stops_asking(host: Any, tmp_path: Path) -> None:
    """Another rank may be later than this one."""
    files = PartFiles(tmp_path, bytes(16), host)
    asked: list[tuple[Part, bool]] = [(ONE, True), (TWO, True)]
    files.write(ONE, 0, True)
    files.write(TWO, 1, True)
    first, second = files.outcomes(asked)
    assert (first > 16, second) == (True, PENDING)
    host.copied.set()
    while (told := files.outcomes(asked))[1] == PENDING:
        pass
    assert told == files.outcomes(asked) == [first, first]
    files.write(ONE, 0, True)  # once more: it is not forgotten with the one before
    files.read(TWO, 0)
    while PENDING in (told := files.outcomes([(ONE, True), (TWO, False)])):
        pass
    assert told == [first, 1]
    assert not files.outcomes([])
    assert not files._begun
    assert len(list(files.poll())) == 4
    files.close()


def test_only_rank_0_polls_finished_files(host: Any, tmp_path: Path) -> None:
    files = PartFiles(tmp_path, bytes(16), host, polled=False)
    files.read(ONE, 0)
    while (told := files.outcomes([(ONE, False)])) == [PENDING]:
        pass
    assert told == [BAD], "there is no file"
    assert not list(files.poll())
    files.close()
