"""The caller's side of the decoding processes: sends bytes, receives items, replaces processes that died."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from typing import Any

from unisono.media.memory import memory_file
from unisono.sandbox.channel import ForkChannel, Gone
from unisono.sandbox.forks import Template

SECONDS = 15.0
"""Processor time of one item, seconds. An image of 64 million pixels takes about 2 s."""
PATIENCE = 60.0
"""Wall-clock limit of one item, seconds."""
MEMORY = 4 << 30
"""Memory to decode an item, bytes. The largest image of Qwen3-VL (16,777,216 pixels) takes about 2 GiB."""


class Workers:
    """A pool of up to ``places`` processes, started on demand; threads may share it.

    setup: the first message of the template process (``worker.Decoder``).
    """

    def __init__(self, setup: dict[str, Any], places: int, seconds: float = SECONDS) -> None:
        self._setup = {**setup, "memory": MEMORY}
        self._seconds = seconds
        self._place = threading.BoundedSemaphore(places)
        self._lock = threading.Lock()
        self._template: Template | None = None
        self._idle: list[ForkChannel] = []

    def start(self) -> None:
        """Start the template process in the background; it takes a second or two, and the first item waits for it."""
        with self._lock:
            self._start()

    def ask(self, message: dict[str, Any], payloads: Sequence[bytes | memoryview]) -> tuple[str, Any, bytes]:
        """Decode one item: ("item", "bad" or "broken"; properties or a sentence; its pixels)."""
        descriptor = memory_file()
        try:
            with open(os.dup(descriptor), "wb") as file:
                for payload in payloads:
                    file.write(payload)
            with self._place:
                return self._ask({**message, "seconds": self._seconds}, descriptor)
        finally:
            os.close(descriptor)

    def _ask(self, message: dict[str, Any], descriptor: int) -> tuple[str, Any, bytes]:
        channel: ForkChannel | None = None
        try:
            channel = self._connected()
            channel.send(message, [descriptor])
            (kind, facts), descriptors = channel.receive()
        except TimeoutError:
            self._end(channel)
            return "bad", f"takes more than {PATIENCE:g} s to decode; send a smaller one.", b""
        except Gone:
            self._end(channel)
            if channel is None:
                self._forget()
                return "broken", "the process that decodes does not start", b""
            return "bad", f"takes more than {self._seconds:g} s of processor time to decode; send a smaller one.", b""
        except BaseException:
            self._end(channel)
            raise
        try:
            data = b"".join(_content(one) for one in descriptors)
        finally:
            for one in descriptors:
                os.close(one)
        with self._lock:
            self._idle.append(channel)
        return kind, facts, data

    def close(self) -> None:
        """End the processes. A later item starts new ones."""
        with self._lock:
            for channel in self._idle:
                channel.close()
            self._idle.clear()
        self._forget()

    def __del__(self) -> None:
        try:  # noqa: SIM105  at the interpreter's end this module's names are gone
            self.close()
        except Exception:
            pass

    def _start(self) -> Template:
        if self._template is None:
            self._template = Template("unisono.media.worker", [self._setup])
        return self._template

    def _connected(self) -> ForkChannel:
        """A channel to an idle process."""
        with self._lock:
            while self._idle:
                channel = self._idle.pop()
                if not channel.ended():
                    return channel
                channel.close()  # it was killed while idle
            channel, _ = self._start().fork()
        channel.socket.settimeout(PATIENCE)
        return channel

    def _end(self, channel: ForkChannel | None) -> None:
        """Close the channel of a process, which ends then, or after its processor time."""
        if channel is not None:
            channel.close()

    def _forget(self) -> None:
        with self._lock:
            if self._template is not None:
                self._template.close()
                self._template = None


def _content(descriptor: int) -> bytes:
    """The content of a file in memory."""
    size, parts, start = os.fstat(descriptor).st_size, [], 0
    while start < size:
        part = os.pread(descriptor, min(size - start, 1 << 30), start)
        if not part:
            break
        parts.append(part)
        start += len(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)
