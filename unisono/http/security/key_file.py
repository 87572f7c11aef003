"""The file of ``--api-key-file``: names, digests, limits and roles of keys.

A line is ``NAME sha256:DIGEST`` and optional settings: ``concurrent_requests=4``, ``requests_per_minute=60``,
``role=operator`` or ``role=user``. Once a line has a role, keys without one are users'. Empty lines and lines that
begin with ``#`` are skipped. A name may have several keys, for rotation; its limits and role are in its first line.
Messages never quote a line: it might be a key.
"""

from __future__ import annotations

import asyncio
import logging
import re
from dataclasses import fields
from pathlib import Path

from unisono.http.security.auth import FLAG_NAME, OPERATOR, USER, ApiKey, ClientLimits, Keys
from unisono.types import ConfigError

logger = logging.getLogger(__name__)

FLAG = "--api-key-file"
MAX_BYTES = 16 * 2**20
SECONDS = 2.0
"""Interval of checks of the file, seconds."""
NAME = re.compile(r"[A-Za-z0-9._@-]{1,64}")
DIGEST = re.compile(r"sha256:([0-9a-fA-F]{64})")
LIMIT = re.compile(r"([a-z_]+)=([0-9]{1,9})")
ROLE = re.compile(r"role=([a-z_]+)")
KNOWN = tuple(one.name for one in fields(ClientLimits))
FORM = "it must be NAME sha256:DIGEST, with the digest that `printf %s KEY | sha256sum` prints"


def keys_of(flag: str | None, path: Path | None) -> list[str | ApiKey]:
    """The keys of ``--api-key`` and of the file; empty if the server is open. Raises ConfigError."""
    keys: list[str | ApiKey] = [] if flag is None else [flag]
    return keys if path is None else [*keys, *read_keys(path)]


async def reread(keys: Keys, flag: str | None, path: Path) -> None:
    """Reload the keys soon after the file has changed. A file with an error changes nothing."""
    seen = None  # it may have changed while the model was loaded
    while True:
        await asyncio.sleep(SECONDS)
        if (now := _stamp(path)) == seen:
            continue
        seen = now
        try:
            if keys.replace(await asyncio.to_thread(keys_of, flag, path)):
                logger.info("Read %s again: keys of %s", path, ", ".join(keys.names))
        except ConfigError as error:
            logger.error("%s The keys stay what they were.", error)


def _stamp(path: Path) -> tuple[int, int, int] | None:
    """A stamp that changes with the file."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino


def read_keys(path: Path) -> list[ApiKey]:
    """The keys of a file. Raises ConfigError with the line, and if there is no key at all."""
    try:
        if not path.is_file():
            raise ConfigError(f"{FLAG} {path}: there is no such file.")
        if path.stat().st_size > MAX_BYTES:
            raise ConfigError(f"{FLAG} {path} is larger than {MAX_BYTES // 2**20} MiB.")
        lines = path.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8"
        raise ConfigError(f"{FLAG} {path} cannot be read: {reason}.") from None
    keys: list[ApiKey] = []
    first: dict[str, tuple[ClientLimits | None, str | None]] = {}
    for number, line in enumerate(lines, 1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        where = f"{FLAG} {path}, line {number}"
        match = DIGEST.fullmatch(words[1]) if len(words) > 1 else None
        if match is None or NAME.fullmatch(words[0]) is None:
            raise ConfigError(f"{where}: {FORM}.")
        name, role = words[0], _role(words[2:], where)
        own = _limits([word for word in words[2:] if not word.startswith("role=")], where)
        if name == FLAG_NAME:
            raise ConfigError(f"{where}: the name {FLAG_NAME} is that of --api-key; choose another.")
        if name in first and (own is not None or role is not None):
            settings = "role" if own is None else "limits"
            raise ConfigError(f"{where}: the {settings} of {name} are in its first line; leave them out here.")
        first.setdefault(name, (own, role))
        keys.append(ApiKey.named(name, bytes.fromhex(match[1]), *first[name]))
    if not keys:
        raise ConfigError(f"{FLAG} {path} has no key, so nobody could use the server: {FORM} on each line.")
    return keys


def _role(words: list[str], where: str) -> str | None:
    found = [word for word in words if word.startswith("role=")]
    if not found:
        return None
    match = ROLE.fullmatch(found[0])
    if len(found) > 1 or match is None or match[1] not in (OPERATOR, USER):
        raise ConfigError(f"{where}: the role is role={OPERATOR} or role={USER}, once.")
    return match[1]


def _limits(words: list[str], where: str) -> ClientLimits | None:
    found: dict[str, int] = {}
    for word in words:
        match = LIMIT.fullmatch(word)
        if match is None or match[1] not in KNOWN or match[1] in found or int(match[2]) == 0:
            known = ", ".join(f"{name}=N" for name in KNOWN)
            raise ConfigError(f"{where}: the digest may be followed by {known}, with whole numbers from 1 on.")
        found[match[1]] = int(match[2])
    return ClientLimits(**found) if found else None
