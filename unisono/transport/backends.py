"""Negotiation of the backend that carries the pages of a connection, after the handshake.

Over a Unix socket it is shared memory. Over TCP the connecting end offers its backends and the listening end chooses:
NIXL if both have it, else TCP if both take that. Before NIXL is used the connecting end reads a few bytes through it,
since the network that NIXL needs may be closed where TCP is open.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Sequence
from typing import TypeVar

import msgspec
import numpy as np

from unisono.transport.channel import Channel, ChannelError, SharedMemoryChannel
from unisono.transport.handshake import HANDSHAKE_SECONDS, PeerRefused
from unisono.transport.nixl_agent import NixlError, why_not
from unisono.transport.nixl_channel import POLL_SECONDS, Area, LandingChannel, StagingChannel
from unisono.types import ConfigError

logger = logging.getLogger(__name__)

BACKENDS = {"tcp": ("tcp",), "nixl": ("nixl",), "auto": ("nixl", "tcp")}
"""Values of --transfer-backend, and the backends each allows, the best first."""
PROBE_SECONDS = 10.0
PROBE_BYTES = 32


class Offer(msgspec.Struct, tag=True):
    """Backends that the connecting end supports."""

    backends: list[str]


class Choice(msgspec.Struct, tag=True):
    """Backend that the listening end chose; empty: none, for this reason. area: of nixl; it begins with ``probe``."""

    backend: str
    reason: str = ""
    area: Area | None = None
    probe: bytes = b""


class BackendAnswer(msgspec.Struct, tag=True):
    """The connecting end's decision about the choice of nixl. reason: why not nixl."""

    backend: str
    reason: str = ""


M = TypeVar("M", Offer, Choice, BackendAnswer)

_decoder = msgspec.msgpack.Decoder(Offer | Choice | BackendAnswer)
_encode = msgspec.msgpack.encode


def usable_backends(setting: str) -> tuple[str, ...]:
    """Resolve --transfer-backend on this machine. Raises ConfigError for nixl if that is not usable."""
    backends = BACKENDS[setting]
    if "nixl" in backends and (reason := why_not()):
        if "tcp" not in backends:
            raise ConfigError(f"--transfer-backend {setting}: {reason}.")
        logger.warning("Pages go over TCP: %s.", reason)
        return ("tcp",)
    return backends


def agree_to_listen(channel: Channel, backends: Sequence[str]) -> Channel:
    """Negotiate as the listening end, which sends pages. Return the channel to use. Raises ChannelError and
    PeerRefused.
    """
    if isinstance(channel, SharedMemoryChannel):
        return channel
    offered = _receive(channel, Offer).backends
    tcp = "tcp" if "tcp" in backends and "tcp" in offered else ""
    reason = f"one end takes {' or '.join(backends)}, the other {' or '.join(offered)} (--transfer-backend)"
    if "nixl" in backends and "nixl" in offered:
        try:
            staging = StagingChannel(channel)
        except NixlError as error:
            reason = str(error)
        else:
            answer = _offer(staging)
            if answer.backend == "nixl":
                return staging
            staging.release()
            if not tcp or answer.backend != tcp:
                raise PeerRefused(answer.reason)
            logger.warning("Pages of a peer go over TCP: %s.", answer.reason)
            return channel
    channel.send(_encode(Choice(tcp, reason)))
    if not tcp:
        raise PeerRefused(reason)
    return channel


def _offer(staging: StagingChannel) -> BackendAnswer:
    """Let the peer read through NIXL; return its decision. Raises ChannelError."""
    try:
        probe = os.urandom(PROBE_BYTES)
        staging.agent.memory[:PROBE_BYTES] = np.frombuffer(probe, np.uint8)
        staging.send(_encode(Choice("nixl", area=staging.area(), probe=probe)))
        limit = time.monotonic() + PROBE_SECONDS + HANDSHAKE_SECONDS
        while not staging.arrives(POLL_SECONDS):
            staging.agent.progress()
            if time.monotonic() > limit:
                raise ChannelError("the peer is silent")
        return _receive(staging, BackendAnswer)
    except ChannelError:
        staging.release()
        raise


def agree_to_connect(channel: Channel, backends: Sequence[str], peer: str) -> Channel:
    """Negotiate as the connecting end, which receives pages. peer: its address, for the log. See
    :func:`agree_to_listen`.
    """
    if isinstance(channel, SharedMemoryChannel):
        return channel
    channel.send(_encode(Offer(list(backends))))
    choice = _receive(channel, Choice)
    if choice.backend == "nixl" and choice.area is not None and "nixl" in backends:
        landing, reason = _connect(channel, choice.area, choice.probe)
        fallback = "" if landing is not None or "tcp" not in backends else "tcp"
        channel.send(_encode(BackendAnswer("nixl" if landing is not None else fallback, reason)))
        if landing is not None:
            return landing
        choice = Choice(fallback, reason)
    if not choice.backend or choice.backend not in backends:
        raise PeerRefused(choice.reason or f"the peer chose {choice.backend!r}")
    if "nixl" in backends:
        logger.warning("Pages of %s come over TCP: %s.", peer, choice.reason)
    return channel


def _connect(channel: Channel, area: Area, probe: bytes) -> tuple[LandingChannel | None, str]:
    """Return the channel to a sender's memory, or the reason why there is none."""
    try:
        landing = LandingChannel(channel, area)
    except ChannelError as error:
        return None, str(error)
    try:
        landing.connect(PROBE_SECONDS, probe)
    except ChannelError as error:
        landing.release()
        return None, str(error)
    return landing, ""


def _receive(channel: Channel, kind: type[M]) -> M:
    try:
        message = _decoder.decode(channel.receive(PROBE_SECONDS + HANDSHAKE_SECONDS)[0])
    except msgspec.MsgspecError:
        raise ChannelError("the peer is no engine of this kind") from None
    if not isinstance(message, kind):
        raise ChannelError("the peer broke off the agreement")
    return message
