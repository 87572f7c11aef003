"""Handshake: two engines prove that they share a key and serve the same model.

Each end sends a nonce, and the HMAC-SHA256 of a label, its identity and both nonces under the key. The labels differ,
so an answer cannot be sent back to its author. Later messages are neither encrypted nor signed: use a trusted network.
"""

from __future__ import annotations

import hashlib
import hmac
import os
from typing import TypeVar

import msgspec

from unisono.transport.channel import PEERS, Channel, ChannelError

VERSION = 2
NONCE_BYTES = 32
HANDSHAKE_SECONDS = 5.0


class PeerRefused(ChannelError):
    """The peer has another key, another model, or another version."""


class Challenge(msgspec.Struct, tag=True):
    """The listening end's first message."""

    version: int
    nonce: bytes


class Proof(msgspec.Struct, tag=True):
    """The connecting end's answer, and then the listening end's."""

    nonce: bytes
    identity: bytes
    code: bytes


class Refusal(msgspec.Struct, tag=True):
    """The reason why the listening end hangs up."""

    reason: str


M = TypeVar("M", Challenge, Proof)

_decoder = msgspec.msgpack.Decoder(Challenge | Proof | Refusal)
_encode = msgspec.msgpack.encode


def accept(channel: Channel, key: bytes, identity: bytes) -> None:
    """Shake hands as the listening end. Raises PeerRefused and ChannelError."""
    nonce = os.urandom(NONCE_BYTES)
    channel.send(_encode(Challenge(VERSION, nonce)))
    proof = _receive(channel, Proof)
    if not _matches(proof.code, key, b"connects", proof.identity, nonce, proof.nonce):
        _refuse(channel, "the keys differ (UNISONO_TRANSFER_KEY)")
    if proof.identity != identity:
        _refuse(channel, "the engines serve different models, drafters, dtypes, devices, numbers of ranks or versions")
    channel.send(_encode(Proof(nonce, identity, _code(key, b"listens", identity, nonce, proof.nonce))))
    channel.most = PEERS


def introduce(channel: Channel, key: bytes, identity: bytes) -> None:
    """Shake hands as the connecting end. Raises PeerRefused and ChannelError."""
    challenge = _receive(channel, Challenge)
    if challenge.version != VERSION:
        raise PeerRefused(f"the peer speaks version {challenge.version}, this engine {VERSION}")
    nonce = os.urandom(NONCE_BYTES)
    code = _code(key, b"connects", identity, challenge.nonce, nonce)
    channel.send(_encode(Proof(nonce, identity, code)))
    proof = _receive(channel, Proof)
    if not _matches(proof.code, key, b"listens", proof.identity, challenge.nonce, nonce):
        raise PeerRefused("the keys differ (UNISONO_TRANSFER_KEY)")
    if proof.identity != identity:
        raise PeerRefused("the engines serve different models, drafters, dtypes, devices, numbers of ranks or versions")
    channel.most = PEERS


def _receive(channel: Channel, kind: type[M]) -> M:
    try:
        message = _decoder.decode(channel.receive(HANDSHAKE_SECONDS)[0])
    except msgspec.MsgspecError:
        raise ChannelError("the peer is no engine of this kind") from None
    if isinstance(message, Refusal):
        raise PeerRefused(message.reason)
    if not isinstance(message, kind):
        raise ChannelError("the peer broke off the handshake")
    return message


def _refuse(channel: Channel, reason: str) -> None:
    channel.send(_encode(Refusal(reason)))
    raise PeerRefused(reason)


def _code(key: bytes, label: bytes, identity: bytes, first: bytes, second: bytes) -> bytes:
    parts = (label, identity, first, second)
    return hmac.digest(key, b"".join(len(part).to_bytes(4, "little") + part for part in parts), hashlib.sha256)


def _matches(code: bytes, key: bytes, label: bytes, identity: bytes, first: bytes, second: bytes) -> bool:
    return hmac.compare_digest(code, _code(key, label, identity, first, second))
