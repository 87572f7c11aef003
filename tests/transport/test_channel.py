"""Channels and the handshake: what goes in comes out, and strangers are turned away."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from unisono.transport.addresses import Address
from unisono.transport.channel import HEADER, PEERS, Channel, ChannelError, SharedMemoryChannel, channel_of, connect
from unisono.transport.channel import listen as open_listener
from unisono.transport.handshake import VERSION, Challenge, PeerRefused, accept, introduce
from unisono.types import ConfigError

KEY, MODEL = b"secret", b"m" * 16


@pytest.fixture(params=["tcp", "unix"])
def ends(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Channel, Channel]]:
    address = Address("tcp", "127.0.0.1", 0) if request.param == "tcp" else Address("unix", path=str(tmp_path / "s"))
    with open_listener(address) as listener:
        if request.param == "tcp":
            address = Address("tcp", "127.0.0.1", listener.getsockname()[1])
        one = connect(address, 5.0)
        other = channel_of(listener.accept()[0], 5.0)
    assert isinstance(one, SharedMemoryChannel) == (request.param == "unix")
    yield one, other
    one.close()
    other.close()


def both(listens: Callable[[], None], connects: Callable[[], None]) -> list[Exception]:
    """Run both ends; returns what they raised."""
    raised: list[Exception] = []

    def run(end: Callable[[], None]) -> None:
        try:
            end()
        except Exception as error:
            raised.append(error)

    thread = threading.Thread(target=run, args=(listens,))
    thread.start()
    run(connects)
    thread.join(10)
    assert not thread.is_alive()
    return raised


def test_messages_and_payloads(ends: tuple[Channel, Channel]) -> None:
    one, other = ends
    one.most = other.most = PEERS
    big = bytes(range(256)) * 9000
    sender = threading.Thread(target=lambda: [one.send(b"a", [big, b"end"]), one.send(b"b"), one.send(b"c", [b"x"])])
    sender.start()
    assert other.receive() == (b"a", big + b"end")
    assert other.receive() == (b"b", b"")
    assert other.receive() == (b"c", b"x")
    sender.join()
    one.close()
    with pytest.raises(ChannelError):
        other.receive()


def test_a_shared_key_and_a_shared_model(ends: tuple[Channel, Channel]) -> None:
    one, other = ends
    assert both(lambda: accept(other, KEY, MODEL), lambda: introduce(one, KEY, MODEL)) == []
    assert one.most == other.most == PEERS


@pytest.mark.parametrize(("key", "model", "words"), [(b"guess", MODEL, "keys differ"), (KEY, b"n" * 16, "models")])
def test_strangers_are_refused(ends: tuple[Channel, Channel], key: bytes, model: bytes, words: str) -> None:
    one, other = ends
    raised = both(lambda: accept(other, KEY, MODEL), lambda: introduce(one, key, model))
    assert len(raised) == 2
    assert all(isinstance(error, PeerRefused) and words in str(error) for error in raised)
    assert other.most != PEERS


def test_reflected_proof_is_refused(ends: tuple[Channel, Channel]) -> None:
    """A listener that does not know the key repeats the proof that it gets."""
    one, other = ends

    def reflect() -> None:
        other.send(msgspec.msgpack.encode(Challenge(VERSION, b"n" * 32)))
        other.send(other.receive(5)[0])

    (error,) = both(reflect, lambda: introduce(one, KEY, MODEL))
    assert isinstance(error, PeerRefused)
    assert "keys differ" in str(error)


def test_strangers_cannot_have_memory_allocated(ends: tuple[Channel, Channel]) -> None:
    one, other = ends
    one._socket.sendall(HEADER.pack(1 << 30, 0))
    with pytest.raises(ChannelError, match="above the limit"):
        other.receive(5)


def test_silence_ends_a_message_that_has_begun() -> None:
    left, right = socket.socketpair()
    channel = Channel(left, 0.05)
    right.sendall(b"xy")
    with pytest.raises(ChannelError, match="silent"):
        channel.receive()
    right.close()
    channel.close()


def test_use_after_close_raises_channel_error(ends: tuple[Channel, Channel]) -> None:
    """Not what the system makes of a descriptor that is gone, whichever thread closed it."""
    ours, _ = ends
    ours.close()
    for use in (lambda: ours.send(b"pages", [b"x"]), ours.receive, ours.ended):
        with pytest.raises(ChannelError, match="the connection is closed"):
            use()


def test_addresses() -> None:
    assert str(Address.parse("tcp://h:5", "--x")) == str(Address.parse("h:5", "--x")) == "tcp://h:5"
    assert Address.parse("tcp://[::1]:5", "--x").host == "::1"
    assert Address.parse("unix:///run/a", "--x").path == "/run/a"
    for text in ("tcp://h", "udp://h:5", "unix://a", "h:70000", ""):
        with pytest.raises(ConfigError, match="--x"):
            Address.parse(text, "--x")
    with pytest.raises(ConfigError, match="--transfer-backend nixl"):
        Address.parse("nixl://h:5", "--x")
