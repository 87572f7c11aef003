"""What all ranks have of a page becomes bytes, and these become pages of other ranks."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch

from tests.kv.helpers import made
from unisono.engine.disaggregation.page_bytes import PageBytes, RankPages, SharedPages
from unisono.engine.worker.commands import PackPages, UnpackPages, decode, encode
from unisono.kv.specs import ALL, SNAPSHOTS
from unisono.kv.store import StateStore
from unisono.kv.transfer import Named
from unisono.transport.channel import ChannelError
from unisono.types import EngineDead


class Ranks:
    """Stores as those of ranks, which execute what rank 0's pages have them execute."""

    def __init__(self, count: int) -> None:
        self.stores: list[StateStore] = [made() for _ in range(count)]
        for store in self.stores:
            for tensor in (*store._pages.values(), *store._snapshots):
                tensor.copy_(torch.randn(tensor.shape))
        pairs = [socket.socketpair() for _ in range(count - 1)]
        own = PageBytes(self.stores[0])
        self.others = [RankPages(store, theirs) for store, (_, theirs) in zip(self.stores[1:], pairs, strict=True)]
        self.executes = [own, *self.others]
        self.pages = SharedPages(self.stores[0], own, self.send, [ours for ours, _ in pairs])

    def send(self, command: PackPages | UnpackPages) -> None:
        self.executes[0].execute(command)
        for other in self.others:
            other.execute(decode(encode(command)))  # type: ignore[arg-type]

    def state(self, rank: int, kind: int, number: int) -> bytes:
        return b"".join(part[number].contiguous().numpy().tobytes() for part in self.stores[rank].parts(kind))


@contextmanager
def ranks(*counts: int) -> Iterator[list[Ranks]]:
    every = [Ranks(count) for count in counts]
    yield every
    for each in every:
        each.pages.close()


def named(*parts: tuple[int, list[int]]) -> Named:
    return [(kind, np.asarray(ids, np.int32)) for kind, ids in parts]


@pytest.mark.parametrize("count", [1, 2, 4])
def test_pages_move_between_ranks_of_the_same_index(count: int) -> None:
    with ranks(count, count) as (here, there):
        read, written = (
            named((ALL, [3, 1, 5]), (32, [2]), (SNAPSHOTS, [1])),
            named((ALL, [4, -1, 2]), (32, [6]), (SNAPSHOTS, [0])),
        )
        kept = [here.state(rank, ALL, 1) for rank in range(count)], [there.state(rank, ALL, 1) for rank in range(count)]
        packing = here.pages.pack(read)
        payload = b"".join(packing.payload())
        assert len(payload) == here.pages.nbytes(read) == there.pages.nbytes(written)
        there.pages.unpack(written, payload)
        for rank in range(count):
            for (kind, old), (_, new) in zip(read, written, strict=True):
                for mine, theirs in zip(old.tolist(), new.tolist(), strict=True):
                    if theirs >= 0:
                        assert here.state(rank, kind, mine) == there.state(rank, kind, theirs)
            assert (here.state(rank, ALL, 1), there.state(rank, ALL, 1)) == (kept[0][rank], kept[1][rank]), "-1"


def test_page_payloads_can_be_read_in_any_order() -> None:
    with ranks(3) as (here,):
        packings = [here.pages.pack(named((ALL, [number]))) for number in range(4)]
        for number in (2, 0, 3, 1):
            payload = b"".join(packings[number].payload())
            assert payload == b"".join(here.state(rank, ALL, number) for rank in range(3))


def test_packed_pages_exclude_later_writes() -> None:
    """What a later pass writes is not in them."""
    with ranks(2) as (here,):
        before = [here.state(rank, ALL, 2) for rank in range(2)]
        packing = here.pages.pack(named((ALL, [2])))
        for store in here.stores:
            for part in store.parts(ALL):
                part.zero_()
        assert b"".join(packing.payload()) == b"".join(before)


def test_other_sizes_are_refused() -> None:
    with ranks(2) as (here,):
        wanted = named((ALL, [1, 2]))
        with pytest.raises(ValueError, match="bytes are not the state of these pages"):
            here.pages.unpack(wanted, bytes(here.pages.nbytes(wanted) - 1))


def test_bytes_of_a_rank_that_is_gone_are_an_error() -> None:
    with ranks(2) as (here,):
        here.others[0]._channel.close()
        here.others.clear()  # it executes nothing any more
        wanted = named((ALL, [1]))
        with pytest.raises(EngineDead, match="rank 1 of the model takes no pages"):
            here.pages.unpack(wanted, bytes(here.pages.nbytes(wanted)))
        for _ in range(2):
            with pytest.raises(ChannelError):
                here.pages.pack(wanted).payload()
