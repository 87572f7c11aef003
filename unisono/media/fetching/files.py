"""Images and videos from files of this machine, in the allowed directory."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from urllib.parse import unquote, urlsplit

from unisono.types import BadRequest


def read_file(url: str, allowed: Path | None, max_bytes: int, param: str) -> bytes:
    """The content of a ``file:`` URL. Links are followed, and must stay inside ``allowed``. Raises BadRequest."""
    if allowed is None:
        raise BadRequest(
            f"{param} names a file, and this server reads none: start it with --allowed-local-media-path DIRECTORY, or "
            "send a data URL.",
            param,
        )
    inside = allowed.resolve()
    path = _path(url, param)
    try:
        resolved = path.resolve(strict=True)
    except (OSError, RuntimeError, ValueError):
        resolved = Path(os.path.normpath(path))
        missing = True
    else:
        missing = False
    if not resolved.is_relative_to(inside):
        raise BadRequest(
            f"{param} names a file outside of the directory that is allowed (--allowed-local-media-path).", param
        )
    if missing:
        raise BadRequest(f"{param} names a file that does not exist.", param)
    return _content(resolved, inside, max_bytes, param)


def _path(url: str, param: str) -> Path:
    parts = urlsplit(url)
    if parts.netloc not in ("", "localhost"):
        raise BadRequest(f"{param} names a file of the host {parts.netloc[:80]!r}; give file:///path.", param)
    text = unquote(parts.path)
    if "\0" in text or not text.startswith("/"):
        raise BadRequest(f"{param} is not a file URL; give file:///path.", param)
    return Path(text)


def _content(path: Path, inside: Path, max_bytes: int, param: str) -> bytes:
    """Open the file first and check it afterwards: the path may change in between."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError as error:
        raise BadRequest(f"{param} names a file that cannot be opened: {error.strerror}.", param) from None
    try:
        opened = Path(f"/proc/self/fd/{descriptor}")
        moved = opened.exists() and not opened.resolve().is_relative_to(inside)
        if moved or not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise BadRequest(f"{param} does not name a regular file in the allowed directory.", param)
        with open(descriptor, "rb", closefd=False) as file:
            data = file.read(max_bytes + 1)
    except OSError as error:
        raise BadRequest(f"{param} names a file that cannot be read: {error.strerror}.", param) from None
    finally:
        os.close(descriptor)
    if len(data) > max_bytes:
        raise BadRequest(f"{param} is larger than {max_bytes >> 20} MiB (--media-max-mb); send less.", param)
    return data
