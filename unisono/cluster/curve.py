"""Encrypted connections between an API process and engines on other machines: CurveZMQ (RFC 26).

The API process makes a key pair for each engine that it starts. The public key travels to the engine with its start,
never over the connection itself, and is required to connect: it is the shared secret.
"""

from __future__ import annotations

from typing import Any

import zmq


def keys() -> tuple[bytes, bytes]:
    """Make a (public key, secret key) pair."""
    return zmq.curve_keypair()


def guard(socket: zmq.Socket[Any], secret: bytes) -> None:
    """Restrict ``socket``, before it is bound, to peers that know the public key. No secret: no restriction."""
    if secret:
        socket.curve_server = True
        socket.curve_secretkey = secret


def join(socket: zmq.Socket[Any], key: bytes) -> None:
    """Encrypt ``socket``, before it connects, for the owner of this public key. No key: plain."""
    if key:
        socket.curve_serverkey = key
        socket.curve_publickey, socket.curve_secretkey = zmq.curve_keypair()
