"""The caller's side of the processes that decode: hands them bytes, gets items, replaces those that die."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from typing import Any

from unisono.media.memory import memory_file
from unisono.sandbox.channel import Channel, Gone
from unisono.sandbox.forks import Template

SECONDS = 15.0
"""Processor time of one item. A picture of 64 million pixels takes some 2 s."""
PATIENCE = 60.0
"""Seconds that an item may take by the clock, whatever the machine is busy with."""
MEMORY = 4 << 30
"""Bytes that decoding an item may take. The largest picture of Qwen3-VL (16,777,216 pixels) takes some 2 GiB."""


class Workers:
    """Up to ``places`` processes, started when they are first needed; threads may share it.

    setup: the first message of the template (``worker.Decoder``).
    """

    def __init__(self, setup: dict[str, Any], places: int, seconds: float = SECONDS) -> None:
        self._setup = {**setup, "memory": MEMORY}
        self._seconds = seconds
        self._place = threading.BoundedSemaphore(places)
        self._lock = threading.Lock()
        self._template: Template | None = None
        self._idle: list[Channel] = []

    def start(self) -> None:
        """Begin to start the template, which takes a second or two; the first item waits for it."""
        with self._lock:
            self._start()

    def ask(self, message: dict[str, Any], payloads: Sequence[bytes | memoryview]) -> tuple[str, Any, bytes]:
        """Have one item decoded: what became of it ("item", "bad" or "broken"), facts or a sentence, and its pixels."""
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
        channel: Channel | None = None
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
        """End the processes. A later item starts others."""
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

    def _connected(self) -> Channel:
        """A channel to a process that waits for an item."""
        with self._lock:
            while self._idle:
                channel = self._idle.pop()
                if not channel.ended():
                    return channel
                channel.close()  # killed while it was idle
            channel, _ = self._start().fork()
        channel.socket.settimeout(PATIENCE)
        return channel

    def _end(self, channel: Channel | None) -> None:
        """Leave a process; it ends with its channel, or after its processor time."""
        if channel is not None:
            channel.close()

    def _forget(self) -> None:
        with self._lock:
            if self._template is not None:
                self._template.close()
                self._template = None


def _content(descriptor: int) -> bytes:
    """All of a file in memory."""
    size, parts, start = os.fstat(descriptor).st_size, [], 0
    while start < size:
        part = os.pread(descriptor, min(size - start, 1 << 30), start)
        if not part:
            break
        parts.append(part)
        start += len(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)
