"""The file of ``--api-key-file``: names and digests of keys, and what each may do.

A line is ``NAME sha256:DIGEST``, and the limits of this key, if it has its own: ``concurrent_requests=4``,
``requests_per_minute=60``. Empty lines and lines that begin with ``#`` are skipped. A name may have several keys, so
that one can follow another; its limits stand in its first line. Messages never show a line: it might be a key.
"""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

from unisono.server.auth import FLAG_NAME, ClientLimits, Key
from unisono.types import ConfigError

FLAG = "--api-key-file"
MAX_BYTES = 16 * 2**20
NAME = re.compile(r"[A-Za-z0-9._@-]{1,64}")
DIGEST = re.compile(r"sha256:([0-9a-fA-F]{64})")
LIMIT = re.compile(r"([a-z_]+)=([0-9]{1,9})")
KNOWN = tuple(one.name for one in fields(ClientLimits))
FORM = "it must be NAME sha256:DIGEST, with the digest that `printf %s KEY | sha256sum` prints"


def stamp(path: Path) -> tuple[int, int, int] | None:
    """Changes when the file does."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino


def read_keys(path: Path) -> list[Key]:
    """The keys of a file. Raises ConfigError naming the line, and where there is no key at all."""
    try:
        if not path.is_file():
            raise ConfigError(f"{FLAG} {path}: there is no such file.")
        if path.stat().st_size > MAX_BYTES:
            raise ConfigError(f"{FLAG} {path} is larger than {MAX_BYTES // 2**20} MiB.")
        lines = path.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8"
        raise ConfigError(f"{FLAG} {path} cannot be read: {reason}.") from None
    keys: list[Key] = []
    limits: dict[str, ClientLimits | None] = {}
    for number, line in enumerate(lines, 1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        where = f"{FLAG} {path}, line {number}"
        match = DIGEST.fullmatch(words[1]) if len(words) > 1 else None
        if match is None or NAME.fullmatch(words[0]) is None:
            raise ConfigError(f"{where}: {FORM}.")
        name, own = words[0], _limits(words[2:], where)
        if name == FLAG_NAME:
            raise ConfigError(f"{where}: the name {FLAG_NAME} is that of --api-key; choose another.")
        if name in limits and own is not None:
            raise ConfigError(f"{where}: the limits of {name} stand in its first line; leave them out here.")
        limits.setdefault(name, own)
        keys.append(Key.named(name, bytes.fromhex(match[1]), limits[name]))
    if not keys:
        raise ConfigError(f"{FLAG} {path} has no key, so nobody could use the server: {FORM} on each line.")
    return keys


def _limits(words: list[str], where: str) -> ClientLimits | None:
    found: dict[str, int] = {}
    for word in words:
        match = LIMIT.fullmatch(word)
        if match is None or match[1] not in KNOWN or match[1] in found or int(match[2]) == 0:
            known = ", ".join(f"{name}=N" for name in KNOWN)
            raise ConfigError(f"{where}: after the digest may stand {known}, with whole numbers from 1 on.")
        found[match[1]] = int(match[2])
    return ClientLimits(**found) if found else None
