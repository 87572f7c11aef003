"""Encrypted connections between an API process and engines on other machines: CurveZMQ (RFC 26).

The API process makes a pair of keys for each engine that it starts. The public one travels to the engine with its
start, never over the connection itself, and without it nobody can connect: it is the secret that both share.
"""

from __future__ import annotations

import zmq


def keys() -> tuple[bytes, bytes]:
    """A new (public key, secret key)."""
    return zmq.curve_keypair()


def guard(socket: zmq.Socket, secret: bytes) -> None:
    """Let only those connect to ``socket``, before it is bound, who know the public key. No secret: everybody."""
    if secret:
        socket.curve_server = True
        socket.curve_secretkey = secret


def join(socket: zmq.Socket, key: bytes) -> None:
    """Let ``socket``, before it connects, talk to who has the secret of this public key. No key: in plain."""
    if key:
        socket.curve_serverkey = key
        socket.curve_publickey, socket.curve_secretkey = zmq.curve_keypair()
