"""KV offload to a directory: what waits in host memory is also written to files, which outlive the engine.

One file holds one part of a prefix. It is written beside its place and moved there, so no reader sees half a file; it
carries the engine's identity and a digest of its bytes, and is removed where these do not match. Files of other engines
lie in other folders and are left alone. Threads write and read; the engine asks what they have done between its steps.
A part stays pinned in host memory while it is written, and a host slot that is read into belongs to nobody meanwhile.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import queue
import time
from collections import OrderedDict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import torch

from unisono.state.host_index import Held, HostIndex, Part
from unisono.state.host_pages import HostPages

MAGIC = b"UNISONO-KV-1\n"
READERS = 4
"""Threads that read files."""
MOST_WRITES = 64
"""Parts that wait to be written; more are not written."""


class PageFiles:
    """directory: made where it is missing. identity: of the engine, 16 bytes. budget: bytes of its files, at most.

    Only one engine at a time should use a directory; two with the same identity would each keep to the budget alone.
    """

    def __init__(self, directory: Path, identity: bytes, budget: int, index: HostIndex, host: HostPages) -> None:
        self.folder, self._identity, self._budget = directory / identity.hex(), identity, budget
        self._index, self._host = index, host
        self.folder.mkdir(parents=True, exist_ok=True)
        self._sizes: OrderedDict[Part, int] = OrderedDict()  # of each file, least recently used first
        self.bytes = self.written = self.read = self.bad = self.skipped = 0
        self.seconds = {"out": 0.0, "in": 0.0}
        self._writing: dict[Part, Held] = {}
        self._reading: dict[Part, list[Read]] = {}
        self._done: queue.SimpleQueue[tuple[str, Part, int, bool | None, float]] = queue.SimpleQueue()
        self._writer = ThreadPoolExecutor(1, "kv-write")
        self._readers = ThreadPoolExecutor(READERS, "kv-read")
        self._scan()

    def __contains__(self, part: Part) -> bool:
        return part in self._sizes

    def _scan(self) -> None:
        found = []
        for path in self.folder.iterdir():
            kind, _, digest = path.stem.rpartition("-")
            with contextlib.suppress(ValueError, OSError):
                status = path.stat()
                if path.suffix != ".kv":
                    path.unlink()  # what a writer that was killed left
                    continue
                found.append((status.st_mtime, (int(kind), bytes.fromhex(digest)), status.st_size))
        for _, part, size in sorted(found):
            self._sizes[part] = size
            self.bytes += size
        self._shrink()

    # ---- writing ------------------------------------------------------------------------------

    def keep(self, part: Part, held: Held) -> None:
        """A part has come to host memory: write it to a file, unless there is one. Returns at once."""
        if part in self._sizes:
            self._sizes.move_to_end(part)
        elif part in self._writing or len(self._writing) >= MOST_WRITES:
            self.skipped += 1
        else:
            held.pins += 1
            self._writing[part] = held
            self._writer.submit(self._write, part, held.slot, held.complete)

    def _write(self, part: Part, slot: int, complete: bool) -> None:
        began, size = time.perf_counter(), -1
        try:
            self._host.settled(part[0], slot)
            body = b"".join(tensor.view(torch.uint8).numpy().tobytes() for tensor in self._tensors(part[0], slot))
            head = MAGIC + self._identity + bytes([complete]) + hashlib.blake2b(body, digest_size=16).digest()
            path = self._path(part)
            beside = path.with_suffix(f".{os.getpid()}")
            beside.write_bytes(head + body)
            beside.replace(path)
            size = len(head) + len(body)
        except OSError:
            pass  # a full disk, or a directory that went away: the part is not kept
        self._done.put(("out", part, size, None, time.perf_counter() - began))

    # ---- reading ------------------------------------------------------------------------------

    def fetch(self, part: Part, waiting: Read) -> bool:
        """Read a file into a host slot. Returns at once; whether ``waiting`` has to wait for it."""
        if part in self._reading:
            self._reading[part].append(waiting)
            return True
        if part not in self._sizes or (slot := self._index.take(part[0])) < 0:
            return False
        self._sizes.move_to_end(part)
        self._reading[part] = [waiting]
        self._readers.submit(self._read, part, slot)
        return True

    def _read(self, part: Part, slot: int) -> None:
        began, complete = time.perf_counter(), None
        with contextlib.suppress(OSError, ValueError, IndexError):
            data = self._path(part).read_bytes()
            at = len(MAGIC)
            identity, flag, digest, body = data[at : at + 16], data[at + 16], data[at + 17 : at + 33], data[at + 33 :]
            tensors = list(self._tensors(part[0], slot))
            sound = data.startswith(MAGIC) and identity == self._identity
            sound = sound and len(body) == sum(t.numel() * t.element_size() for t in tensors)
            if sound and hashlib.blake2b(body, digest_size=16).digest() == digest:
                self._host.settled(part[0], slot)
                first = 0
                for tensor in tensors:
                    raw = tensor.view(torch.uint8).view(-1)
                    raw.copy_(torch.frombuffer(bytearray(body[first : first + raw.numel()]), dtype=torch.uint8))
                    first += raw.numel()
                os.utime(self._path(part))  # it was used: what is scanned at the next start goes by this time
                complete = bool(flag)
        self._done.put(("in", part, slot, complete, time.perf_counter() - began))

    # ---- between steps ------------------------------------------------------------------------

    def poll(self) -> None:
        """Note what the threads have done."""
        with contextlib.suppress(queue.Empty):
            while True:
                way, part, value, complete, seconds = self._done.get_nowait()
                self.seconds[way] += seconds
                if way == "out":
                    self._written(part, value)
                else:
                    self._was_read(part, value, complete)

    def _written(self, part: Part, size: int) -> None:
        self._writing.pop(part).pins -= 1
        if size >= 0:
            self.written += 1
            self.bytes += size - self._sizes.pop(part, 0)
            self._sizes[part] = size
            self._shrink()

    def _was_read(self, part: Part, slot: int, complete: bool | None) -> None:
        if complete is None:
            self.bad += 1
            self._index.give_back(part[0], slot)
            self._remove(part)
        elif part in self._index:  # it has come from the device meanwhile
            self._index.give_back(part[0], slot)
        else:
            self.read += 1
            self._index.put(part, slot, complete)
        for waiting in self._reading.pop(part):
            waiting.parts.discard(part)

    @property
    def busy(self) -> bool:
        """Whether somebody waits for a file."""
        return bool(self._reading)

    def clear(self) -> None:
        """Remove every file."""
        for part in list(self._sizes):
            self._remove(part)

    def close(self) -> None:
        """Finish what is being written."""
        self._readers.shutdown(cancel_futures=True)
        self._writer.shutdown()

    def _shrink(self) -> None:
        while self.bytes > self._budget and self._sizes:
            self._remove(next(iter(self._sizes)))

    def _remove(self, part: Part) -> None:
        self.bytes -= self._sizes.pop(part, 0)
        with contextlib.suppress(OSError):
            self._path(part).unlink()

    def _path(self, part: Part) -> Path:
        return self.folder / f"{part[0]}-{part[1].hex()}.kv"

    def _tensors(self, kind: int, slot: int) -> Iterator[torch.Tensor]:
        return (tensor[slot] for tensor in self._host.host[kind])


@dataclass(eq=False)
class Read:
    """What somebody waits for."""

    parts: set[Part] = field(default_factory=set)

    @property
    def open(self) -> bool:
        """Whether everything has been read, or could not be."""
        return not self.parts
