"""Pages through NIXL: the same bytes, bounded memory, and nothing touched that was not registered for the peer."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np
import pytest

from tests.transport.nixl_library import LIBRARIES, NEEDS_NIXL, Imitation, use_library, without_library
from unisono.transport import backends, nixl_channel
from unisono.transport.addresses import Address
from unisono.transport.backends import agree_to_connect, agree_to_listen, usable_backends
from unisono.transport.channel import PEERS, Channel, ChannelError, channel_of, connect
from unisono.transport.channel import listen as open_listener
from unisono.transport.handshake import PeerRefused
from unisono.transport.nixl_channel import RECORD, TAKEN, LandingChannel, StagingChannel
from unisono.types import ConfigError

SMALL = 4096


@pytest.fixture(params=LIBRARIES)
def library(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> type[Imitation]:
    monkeypatch.setattr(nixl_channel, "SEGMENT", SMALL)
    return use_library(request.param, monkeypatch)


@pytest.fixture
def ends() -> Iterator[tuple[Channel, Channel]]:
    """The connecting and the listening end, past their handshake."""
    with open_listener(Address("tcp", "127.0.0.1", 0)) as listener:
        one = connect(Address("tcp", "127.0.0.1", listener.getsockname()[1]), 5.0)
        other = channel_of(listener.accept()[0], 5.0)
    one.most = other.most = PEERS
    yield one, other
    one.close()
    other.close()


def in_thread(act: Callable[[], Any]) -> Callable[[], Any]:
    """Begin something; the result waits for its end, and returns or raises what it did."""
    results: list[Any] = []

    def run() -> None:
        try:
            results.append(act())
        except Exception as error:
            results.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()

    def end() -> Any:
        thread.join(60)
        assert not thread.is_alive()
        if isinstance(results[0], Exception):
            raise results[0]
        return results[0]

    return end


def agree(ends: tuple[Channel, Channel], connects: str = "nixl", listens: str = "nixl") -> tuple[Channel, Channel]:
    one, other = ends
    listening = in_thread(lambda: agree_to_listen(other, backends.BACKENDS[listens]))
    try:
        landing = agree_to_connect(one, backends.BACKENDS[connects], "there")
    except ChannelError:
        one.close()
        with suppress(ChannelError):
            listening()
        raise
    return landing, listening()


def drive(staging: StagingChannel, until: threading.Event) -> None:
    """Do what a sender does while its peer reads."""
    while not until.wait(0.001):
        staging.agent.progress()


def release(*channels: Channel) -> None:
    for channel in channels:
        channel.close()
        channel.release()


def test_many_payloads(library: type[Imitation], ends: tuple[Channel, Channel]) -> None:
    """Parts of every size, larger than what is staged together, between messages of both ends."""
    landing, staging = agree(ends)
    assert isinstance(landing, LandingChannel)
    assert isinstance(staging, StagingChannel)
    assert landing.transport == staging.transport == "nixl"
    rng = random.Random(1)
    area = staging.agent.memory.nbytes
    payloads = [[rng.randbytes(rng.choice((1, 16, SMALL - 1, SMALL, 3 * SMALL))) for _ in range(20)] for _ in range(8)]
    assert sum(len(part) for part in payloads[0]) > area // 2
    payloads += [[rng.randbytes(3 * area + 5)], []]
    asks = in_thread(lambda: [staging.receive() for _ in range(4)])
    sends = in_thread(lambda: [staging.send(b"%d" % i, parts) for i, parts in enumerate(payloads)])
    for i, parts in enumerate(payloads):
        if i % 3 == 0:
            landing.send(b"ask %d" % i, [b"inline"])
        assert landing.receive() == (b"%d" % i, b"".join(parts))
    sends()
    assert asks() == [(b"ask %d" % i, b"inline") for i in (0, 3, 6, 9)]
    release(landing, staging)
    assert not Imitation.agents


def test_staged_memory_is_bounded(library: type[Imitation], ends: tuple[Channel, Channel]) -> None:
    """A peer that takes nothing has as many segments staged as there are places, then the sender gives up."""
    _, staging = agree(ends)
    assert isinstance(staging, StagingChannel)
    staging._timeout = 0.2
    before = bytes(staging.agent.memory)
    assert len(before) == SMALL * nixl_channel.SEGMENTS
    sends = in_thread(lambda: staging.send(b"pages", [b"\1" * len(before), b"\2" * len(before)]))
    with pytest.raises(ChannelError, match="silent"):
        sends()
    assert bytes(staging.agent.memory) == b"\1" * len(before), "nothing was staged over what was not taken"
    release(staging)


def test_a_place_is_free_when_its_segment_was_taken(library: type[Imitation], ends: tuple[Channel, Channel]) -> None:
    landing, staging = agree(ends)
    assert isinstance(staging, StagingChannel)
    sends = in_thread(lambda: staging.send(b"pages", [b"x" * SMALL]))
    reads = in_thread(staging.receive)
    assert landing.receive() == (b"pages", b"x" * SMALL)
    sends()
    landing.send(TAKEN)
    with pytest.raises(ChannelError, match="not there"):
        reads()
    release(landing, staging)


def forged(area: int) -> list[tuple[str, bytes]]:
    return [
        ("past the end", RECORD.pack(area - 8, 16)),
        ("far away", RECORD.pack((1 << 64) - 8, 16)),
        ("nothing", RECORD.pack(0, 0)),
        ("longer than a segment", RECORD.pack(0, SMALL + 1)),
        ("longer than the payload", RECORD.pack(0, 65)),
    ]


@pytest.mark.parametrize("which", range(5))
def test_bad_segments_are_refused(which: int, library: type[Imitation], ends: tuple[Channel, Channel]) -> None:
    """Before NIXL is asked."""
    landing, staging = agree(ends)
    assert isinstance(landing, LandingChannel)
    assert isinstance(staging, StagingChannel)
    _, record = forged(staging.agent.memory.nbytes)[which]
    landing.agent.read = lambda *_: pytest.fail("NIXL was asked")  # type: ignore[method-assign]
    staging._socket.sendall(nixl_channel.struct.pack("<IQ", 1, 64) + b"m" + record)
    with pytest.raises(ChannelError, match="segment"):
        landing.receive()
    release(landing, staging)


@pytest.mark.parametrize(("shift", "size"), [(0, 0), (0, 1 << 50), ((1 << 64) - 8, None), (-1 << 63, None)])
def test_bad_areas_are_refused(
    shift: int, size: int | None, library: type[Imitation], ends: tuple[Channel, Channel]
) -> None:
    one, other = ends
    staging = StagingChannel(other)
    area = staging.area()
    area.address, area.size = max(-1, shift), area.size if size is None else size
    with pytest.raises(ChannelError, match="no memory"):
        LandingChannel(one, area)
    release(staging)


def test_a_peer_reads_its_own_memory_only(library: type[Imitation], ends: tuple[Channel, Channel]) -> None:
    """An area that names other memory of the peer, registered for somebody else or not at all, gives nothing."""
    one, other = ends
    staging, for_another = StagingChannel(other), StagingChannel(other)
    zeros = bytes(32)  # what both begin with
    unregistered = np.zeros(1 << 20, np.uint8)
    for address in (for_another.area().address, unregistered.ctypes.data, staging.area().address):
        area = staging.area()
        area.address = address
        landing = LandingChannel(one, area)
        connected = threading.Event()
        progress = in_thread(partial(drive, staging, connected))
        if address == staging.area().address:
            landing.connect(60, zeros)
        else:
            with pytest.raises(ChannelError, match="NIXL_ERR"):
                landing.connect(60, zeros)
        connected.set()
        progress()
        landing.release()
    area = staging.area()
    area.metadata = b"no metadata"
    landing = LandingChannel(one, area)
    with pytest.raises(ChannelError, match="NIXL_ERR"):
        landing.connect(60, zeros)
    release(landing, staging, for_another)


def test_memory_that_does_not_answer(
    library: type[Imitation], ends: tuple[Channel, Channel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reading thread gives up after the channel's timeout."""
    landing, staging = agree(ends)
    assert isinstance(landing, LandingChannel)
    monkeypatch.setattr("unisono.transport.nixl_agent.Reading.done", lambda self: False)
    sends = in_thread(lambda: staging.send(b"pages", [b"x" * 100]))
    landing._timeout = 0.1
    reads = in_thread(landing.receive)
    with pytest.raises(ChannelError, match="does not answer"):
        reads()
    landing.close()
    staging.close()
    with pytest.raises(ChannelError):
        sends()
    release(landing, staging)


def test_a_connection_that_ends_while_bytes_are_read(
    library: type[Imitation], ends: tuple[Channel, Channel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both ends notice: nobody waits for the timeout, which is an hour."""
    landing, staging = agree(ends)
    assert isinstance(landing, LandingChannel)
    landing._timeout = staging._timeout = 3600.0
    monkeypatch.setattr("unisono.transport.nixl_agent.Reading.done", lambda self: False)
    sends = in_thread(lambda: staging.send(b"pages", [b"x" * 100]))
    reads = in_thread(landing.receive)
    while not staging._staged:  # type: ignore[attr-defined]
        time.sleep(0.001)
    staging.close()
    with pytest.raises(ChannelError, match="closed"):
        sends()
    with pytest.raises(ChannelError, match="closed"):
        reads()
    release(landing, staging)


@pytest.mark.parametrize(
    ("connects", "listens", "agreed"),
    [
        ("nixl", "nixl", "nixl"),
        ("auto", "nixl", "nixl"),
        ("nixl", "auto", "nixl"),
        ("auto", "auto", "nixl"),
        ("auto", "tcp", "tcp"),
        ("tcp", "auto", "tcp"),
        ("tcp", "tcp", "tcp"),
        ("nixl", "tcp", ""),
        ("tcp", "nixl", ""),
    ],
)
def test_transfer_backend_negotiation(
    connects: str, listens: str, agreed: str, ends: tuple[Channel, Channel], monkeypatch: pytest.MonkeyPatch
) -> None:
    use_library("imitated", monkeypatch)
    if not agreed:
        with pytest.raises(PeerRefused, match="--transfer-backend"):
            agree(ends, connects, listens)
        return
    landing, staging = agree(ends, connects, listens)
    assert landing.transport == staging.transport == agreed
    sends = in_thread(lambda: staging.send(b"a", [b"pages"]))
    asks = in_thread(staging.receive) if agreed == "nixl" else None
    assert landing.receive() == (b"a", b"pages")
    sends()
    landing.send(b"b")
    assert (asks() if asks is not None else staging.receive()) == (b"b", b"")
    release(landing, staging)


@pytest.mark.parametrize("connects", ["auto", "nixl"])
def test_a_network_that_nixl_cannot_pass(
    connects: str, ends: tuple[Channel, Channel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first read is never answered: TCP where both take it, else the reason."""
    monkeypatch.setattr(use_library("imitated", monkeypatch), "reaches", False)
    monkeypatch.setattr(backends, "PROBE_SECONDS", 0.1)
    if connects == "nixl":
        with pytest.raises(PeerRefused, match="does not answer"):
            agree(ends, connects, "auto")
    else:
        landing, staging = agree(ends, connects, "auto")
        assert landing.transport == staging.transport == "tcp"
    assert not Imitation.agents, "nothing stays registered"


def test_without_the_package(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    without_library(monkeypatch)
    with pytest.raises(ConfigError, match=r"unisono\[nixl\]"):
        usable_backends("nixl")
    assert usable_backends("auto") == ("tcp",)
    assert "unisono[nixl]" in caplog.text
    assert usable_backends("tcp") == ("tcp",)


def test_a_silent_reader_ends_a_send_while_messages_are_waited_for(ends: tuple[Channel, Channel]) -> None:
    """Over TCP: one thread waits for messages for ever, another sends to a peer that reads nothing."""
    _, other = ends
    other._timeout = 0.2
    other._socket.settimeout(0.2)
    entered, arrives = threading.Event(), other.arrives
    other.arrives = lambda wait: entered.set() or arrives(wait)  # type: ignore[method-assign, func-returns-value]
    waits = in_thread(other.receive)
    assert entered.wait(60)
    sends = in_thread(lambda: other.send(b"pages", [bytes(64 << 20)]))
    with pytest.raises(ChannelError, match="silent"):
        sends()
    other.close()
    with pytest.raises(ChannelError):
        waits()


PEER = """
import sys
from unisono.transport.addresses import Address
from unisono.transport.backends import agree_to_listen
from unisono.transport.channel import PEERS, channel_of, listen
import threading
listener = listen(Address("tcp", "127.0.0.1", 0))
print("port", listener.getsockname()[1], flush=True)
channel = channel_of(listener.accept()[0], 30.0)
channel.most = PEERS
channel = agree_to_listen(channel, ("nixl",))
threading.Thread(target=channel.receive, daemon=True).start()
while True:
    channel.send(b"pages", [bytes(range(256)) * 65536])
"""


def receive_for_ever(channel: Channel) -> None:
    while True:
        assert channel.receive(wait=2.0)[1] == bytes(range(256)) * 65536


@pytest.mark.full
@NEEDS_NIXL
@pytest.mark.parametrize("tls", ["", "tcp"])
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_process_that_dies_or_stops_in_the_middle(
    how: signal.Signals, tls: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two processes. The reader gets whole payloads or an error, and goes on to the next peer."""
    if tls:
        monkeypatch.setenv("UCX_TLS", tls)
    for _ in range(2):
        with subprocess.Popen([sys.executable, "-c", PEER], stdout=subprocess.PIPE, text=True) as peer:
            assert peer.stdout is not None
            port = next(line.split()[1] for line in peer.stdout if line.startswith("port "))
            one = connect(Address("tcp", "127.0.0.1", int(port)), 2.0)
            one.most = PEERS
            landing = agree_to_connect(one, ("nixl",), "there")
            assert landing.transport == "nixl"
            for _ in range(3):
                assert landing.receive() == (b"pages", bytes(range(256)) * 65536)
            os.kill(peer.pid, how)
            with pytest.raises(ChannelError):
                receive_for_ever(landing)
            release(landing)
            peer.kill()
