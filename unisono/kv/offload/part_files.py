"""One rank's files of KV offload: threads write host slots to files and read files into host slots.

One file holds a rank's share of one part of a prefix. It is written under a temporary name and renamed, so no reader
sees a partial file; it carries an identity and a digest of its bytes. Rank 0 decides which parts are written, read and
removed (``page_files.py``), and leaves a slot alone until every rank is done with it.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import queue
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path

import torch

from unisono.kv.offload.host_index import Part
from unisono.kv.offload.host_pages import HostPages

MAGIC = b"UNISONO-KV-1\n"
READERS = 4
"""Threads that read files."""

BAD, PENDING = -1, -2
"""Outcomes of a read: the file is truncated, changed or gone; not read yet."""

WAIT_SECONDS = 0.02
"""Time :meth:`PartFiles.outcomes` waits for unfinished work."""


@dataclass(frozen=True)
class PartResult:
    """Result of a write or read of a part. outcome: bytes of the written file; for a read, 1 if the part was complete,
    else 0; BAD on failure."""

    part: Part
    written: bool
    outcome: int
    seconds: float


class PartFiles:
    """One rank's files of parts.

    folder: created if missing; raises OSError if that fails.
    identity: 16 bytes that identify the engine's rank.
    polled: True if :meth:`poll` is called, as on rank 0.
    """

    def __init__(self, folder: Path, identity: bytes, host: HostPages, polled: bool = True) -> None:
        self.folder, self._identity, self._host, self._polled = folder, identity, host, polled
        folder.mkdir(parents=True, exist_ok=True)
        self._done: queue.SimpleQueue[PartResult] = queue.SimpleQueue()
        self._begun: dict[tuple[Part, bool], Future[PartResult]] = {}  # by (part, True for a write)
        self._reported: set[tuple[Part, bool]] = set()  # entries of _begun included in the last answer
        self._writer = ThreadPoolExecutor(1, "kv-write")
        self._readers = ThreadPoolExecutor(READERS, "kv-read")

    def sizes(self) -> dict[Part, int]:
        """Bytes of each existing file, least recently used first. Removes leftovers of a killed writer."""
        found = []
        for path in self.folder.iterdir():
            kind, _, digest = path.stem.rpartition("-")
            with contextlib.suppress(ValueError, OSError):
                status = path.stat()
                if path.suffix != ".kv":
                    path.unlink()
                    continue
                found.append((status.st_mtime, (int(kind), bytes.fromhex(digest)), status.st_size))
        return {part: size for _, part, size in sorted(found)}

    def write(self, part: Part, slot: int, complete: bool) -> None:
        """Start writing a host slot to the part's file."""
        self._begin((part, True), self._writer.submit(self._write, part, slot, complete))

    def read(self, part: Part, slot: int) -> None:
        """Start reading the part's file into a host slot."""
        self._begin((part, False), self._readers.submit(self._read, part, slot))

    def _begin(self, what: tuple[Part, bool], begun: Future[PartResult]) -> None:
        self._begun[what] = begun
        self._reported.discard(what)

    def remove(self, parts: Iterable[Part]) -> None:
        """Remove files, after pending writes."""
        self._writer.submit(self._remove, list(parts))

    def poll(self) -> Iterator[PartResult]:
        """Results of the threads since the last call."""
        with contextlib.suppress(queue.Empty):
            while True:
                yield self._done.get_nowait()

    def outcomes(self, requests: Sequence[tuple[Part, bool]]) -> list[int]:
        """Outcome of each (part, True for a write); PENDING while a thread works on it.

        Rank 0 repeats requests that another rank has not finished. Entries it no longer requests are forgotten.
        """
        for heard in self._reported.difference(requests):
            del self._begun[heard]
        begun = [self._begun[each] for each in requests]
        wait(begun, WAIT_SECONDS)
        found = [each.result().outcome if each.done() else PENDING for each in begun]
        self._reported = {each for each, outcome in zip(requests, found, strict=True) if outcome != PENDING}
        return found

    def close(self) -> None:
        """Finish pending writes."""
        self._readers.shutdown(cancel_futures=True)
        self._writer.shutdown()

    # ---- in threads ---------------------------------------------------------------------------

    def _write(self, part: Part, slot: int, complete: bool) -> PartResult:
        began, size = time.perf_counter(), BAD
        try:
            self._host.wait_for_copies(part[0], slot)
            body = b"".join(tensor.view(torch.uint8).numpy().tobytes() for tensor in self._tensors(part[0], slot))
            head = MAGIC + self._identity + bytes([complete]) + hashlib.blake2b(body, digest_size=16).digest()
            path = self._path(part)
            beside = path.with_suffix(f".{os.getpid()}")
            beside.write_bytes(head + body)
            beside.replace(path)
            size = len(head) + len(body)
        except OSError:
            pass  # a full disk or a removed directory: the part is dropped
        return self._tell(PartResult(part, True, size, time.perf_counter() - began))

    def _read(self, part: Part, slot: int) -> PartResult:
        began, complete = time.perf_counter(), BAD
        with contextlib.suppress(OSError, ValueError, IndexError):
            data = self._path(part).read_bytes()
            at = len(MAGIC)
            identity, flag, digest, body = data[at : at + 16], data[at + 16], data[at + 17 : at + 33], data[at + 33 :]
            tensors = list(self._tensors(part[0], slot))
            sound = data.startswith(MAGIC) and identity == self._identity
            sound = sound and len(body) == sum(t.numel() * t.element_size() for t in tensors)
            if sound and hashlib.blake2b(body, digest_size=16).digest() == digest:
                self._host.wait_for_copies(part[0], slot)
                first = 0
                for tensor in tensors:
                    raw = tensor.view(torch.uint8).view(-1)
                    raw.copy_(torch.frombuffer(bytearray(body[first : first + raw.numel()]), dtype=torch.uint8))
                    first += raw.numel()
                os.utime(self._path(part))  # the scan at the next start orders files by this time
                complete = int(bool(flag))
        return self._tell(PartResult(part, False, complete, time.perf_counter() - began))

    def _tell(self, done: PartResult) -> PartResult:
        if self._polled:
            self._done.put(done)
        return done

    def _remove(self, parts: list[Part]) -> None:
        for part in parts:
            with contextlib.suppress(OSError):
                self._path(part).unlink()

    def _path(self, part: Part) -> Path:
        return self.folder / f"{part[0]}-{part[1].hex()}.kv"

    def _tensors(self, kind: int, slot: int) -> Iterator[torch.Tensor]:
        return (tensor[slot] for tensor in self._host.host[kind])
