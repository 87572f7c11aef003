"""One rank's files of KV offload: threads write its host slots to files, and read files into host slots.

One file holds a rank's share of one part of a prefix. It is written beside its place and moved there, so no reader sees
half a file; it carries an identity and a digest of its bytes. Which parts are written, read and removed rank 0 decides
(``page_files.py``), which also leaves a slot alone until every rank is done with it.
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
"""Of a file that was read: it is cut off, changed or gone; it has not been read yet."""

WAIT_SECONDS = 0.02
"""How long :meth:`PartFiles.outcomes` waits for what is not done."""


@dataclass(frozen=True)
class Done:
    """What a thread has done with a part. outcome: of a write the file's bytes, of a read 1 or 0 as the part was
    complete; BAD where it failed."""

    part: Part
    written: bool
    outcome: int
    seconds: float


class PartFiles:
    """folder: made where it is missing; raises OSError where it cannot be. identity: of the engine's rank, 16 bytes.
    polled: whether :meth:`poll` is called, as on rank 0."""

    def __init__(self, folder: Path, identity: bytes, host: HostPages, polled: bool = True) -> None:
        self.folder, self._identity, self._host, self._polled = folder, identity, host, polled
        folder.mkdir(parents=True, exist_ok=True)
        self._done: queue.SimpleQueue[Done] = queue.SimpleQueue()
        self._begun: dict[tuple[Part, bool], Future[Done]] = {}  # by part and whether it is written
        self._told: set[tuple[Part, bool]] = set()  # of these, whose outcomes the last answer had
        self._writer = ThreadPoolExecutor(1, "kv-write")
        self._readers = ThreadPoolExecutor(READERS, "kv-read")

    def sizes(self) -> dict[Part, int]:
        """Bytes of each file that is there, least recently used first. What a killed writer left is removed."""
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
        """Begin to write a host slot to the part's file."""
        self._begin((part, True), self._writer.submit(self._write, part, slot, complete))

    def read(self, part: Part, slot: int) -> None:
        """Begin to read the part's file into a host slot."""
        self._begin((part, False), self._readers.submit(self._read, part, slot))

    def _begin(self, what: tuple[Part, bool], begun: Future[Done]) -> None:
        self._begun[what] = begun
        self._told.discard(what)

    def remove(self, parts: Iterable[Part]) -> None:
        """Remove files, after what is being written."""
        self._writer.submit(self._remove, list(parts))

    def poll(self) -> Iterator[Done]:
        """What threads have done since the last call."""
        with contextlib.suppress(queue.Empty):
            while True:
                yield self._done.get_nowait()

    def outcomes(self, asked: Sequence[tuple[Part, bool]]) -> list[int]:
        """Of each part and whether it was written, what came of it; PENDING where a thread still works on it.

        Rank 0 asks again for what another rank has not done. What it asks for no more is forgotten.
        """
        for heard in self._told.difference(asked):
            del self._begun[heard]
        begun = [self._begun[each] for each in asked]
        wait(begun, WAIT_SECONDS)
        found = [each.result().outcome if each.done() else PENDING for each in begun]
        self._told = {each for each, outcome in zip(asked, found, strict=True) if outcome != PENDING}
        return found

    def close(self) -> None:
        """Finish what is being written."""
        self._readers.shutdown(cancel_futures=True)
        self._writer.shutdown()

    # ---- in threads ---------------------------------------------------------------------------

    def _write(self, part: Part, slot: int, complete: bool) -> Done:
        began, size = time.perf_counter(), BAD
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
        return self._tell(Done(part, True, size, time.perf_counter() - began))

    def _read(self, part: Part, slot: int) -> Done:
        began, complete = time.perf_counter(), BAD
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
                complete = int(bool(flag))
        return self._tell(Done(part, False, complete, time.perf_counter() - began))

    def _tell(self, done: Done) -> Done:
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
