"""KV offload of an engine: size of the host memory, the commands that move pages, and reports."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from unisono.config import ResolvedConfig
from unisono.distributed.group import Group
from unisono.engine.disaggregation.identity import engine_identity
from unisono.engine.worker.commands import Arrived, FileOutcomes, MoveIn, MoveOut, ReadFile, RemoveFiles, WriteFile
from unisono.engine.worker.worker import Worker
from unisono.kv.offload.host_index import HostIndex, Part
from unisono.kv.offload.host_pages import STAGING_BYTES, HostPages, Move, kind_bytes, make_host_pages
from unisono.kv.offload.offloader import PAUSE_SECONDS, Offload
from unisono.kv.offload.page_files import PageFiles
from unisono.kv.offload.part_files import PartFiles, PartResult
from unisono.kv.specs import ALL, SNAPSHOTS
from unisono.passes.features.base import Metric
from unisono.types import ConfigError

Send = Callable[..., object]
Ask = Callable[[FileOutcomes], list[list[int]]]


class CommandMover:
    """Move pages on every rank by commands; ask this rank's memory for progress."""

    def __init__(self, send: Send, host_pages: HostPages) -> None:
        self._send, self._host = send, host_pages

    def move_out(self, moves: Sequence[Move]) -> None:
        self._send(MoveOut(list(moves)))

    def move_in(self, ticket: int, moves: Sequence[Move]) -> None:
        self._send(MoveIn(ticket, list(moves)))

    def poll(self) -> int:
        return self._host.poll()

    def arrived(self, ticket: int) -> None:
        self._send(Arrived(ticket))


class CommandFiles:
    """The files of all ranks, by commands."""

    def __init__(self, own: PartFiles, ranks: int, send: Send, ask: Ask) -> None:
        self._own, self._send, self._ask = own, send, ask
        self.folder, self.ranks = own.folder, ranks

    def write(self, part: Part, slot: int, complete: bool) -> None:
        self._send(WriteFile(part, slot, complete))

    def read(self, part: Part, slot: int) -> None:
        self._send(ReadFile(part, slot))

    def remove(self, parts: Sequence[Part]) -> None:
        self._send(RemoveFiles(list(parts)))

    def poll(self) -> Iterator[PartResult]:
        return self._own.poll()

    def outcomes(self, requests: Sequence[tuple[Part, bool]]) -> list[list[int]]:
        return self._ask(FileOutcomes(list(requests)))


def hold_host_pages(config: ResolvedConfig, worker: Worker, group: Group) -> ResolvedConfig:
    """Give a worker the configured host memory and files; return the configuration with the decision.

    All ranks call it together. Host memory holds the same multiple of the device's capacity for each kind of state.
    Raises ConfigError if it holds nothing, or if the memory cannot be allocated.
    """
    requested = config.requested
    if not requested.offloads:
        return config
    on_device = {kind: (count, kind_bytes(worker.store, kind)) for kind, count in _counts(worker).items()}
    total = config.requested.tensor_parallel_size * sum(count * size for count, size in on_device.values())
    ratio = requested.cpu_offload_gb * (1 << 30) / total if requested.cpu_offload_gb else requested.cpu_offload_ratio
    counts = {kind: int(ratio * count) for kind, (count, _) in on_device.items()}
    if not all(counts.values()):
        least = max(total / count for count, _ in on_device.values()) / (1 << 30)
        raise ConfigError(
            f"--cpu-offload-gb {requested.cpu_offload_gb:g} holds no page of every kind of state: give at least "
            f"{least:.3g}, or 0 for none."
        )
    size = sum(counts[kind] * each for kind, (_, each) in on_device.items())
    try:
        worker.host_pages = make_host_pages(worker.store, counts)
    except (RuntimeError, MemoryError) as error:
        raise ConfigError(f"--cpu-offload-gb: {size >> 20} MiB of host memory cannot be had: {error}.") from None
    _hold_files(config, worker, group)
    reason = f"{ratio:.3g} times what the device holds: evicted pages wait there, and come back when a prompt has them"
    return config.decide("KV offload", f"{size >> 20} MiB, {counts[ALL]} pages", reason)


def _hold_files(config: ResolvedConfig, worker: Worker, group: Group) -> None:
    """Give a worker the files of its rank for its host memory. Raises ConfigError if they cannot be opened."""
    if (directory := config.requested.kv_offload_dir) is None:
        return
    assert worker.host_pages is not None
    identity, rank = engine_identity(config, worker), group.ranks.index
    if rank:  # which may hold the same weights as another one
        identity = hashlib.blake2b(identity + rank.to_bytes(4, "little"), digest_size=16).digest()
    try:
        worker.files = files = PartFiles(Path(directory) / identity.hex(), identity, worker.host_pages, polled=not rank)
        own = files.sizes()
    except OSError as error:
        raise ConfigError(f"--kv-offload-dir {directory}: {error.strerror}; name a directory to write to.") from None
    everywhere = set.intersection(*map(set, group.exchange(list(own))))
    files.remove(part for part in own if part not in everywhere)
    worker.file_sizes = {part: size for part, size in own.items() if part in everywhere}


def staging_bytes(config: ResolvedConfig, largest: int) -> int:
    """Bytes of the device's buffer for moving pages. largest: bytes of the largest page or snapshot."""
    return 3 * max(STAGING_BYTES, largest) if config.requested.offloads and config.device.type == "cuda" else 0


def make_offload(
    config: ResolvedConfig, worker: Worker, send: Send, ask: Ask, before: Offload | None
) -> Offload | None:
    """Return the bookkeeping of a worker's host memory; None if it has none.

    before: the predecessor; its transfers end first.
    """
    host = worker.host_pages
    if host is None:
        return None
    counts = {kind: len(tensors[0]) for kind, tensors in host.host.items()}
    sizes = {kind: kind_bytes(worker.store, kind) for kind in counts}
    while before is not None and host.poll() < before.sent:
        time.sleep(PAUSE_SECONDS)
    if before is not None:
        before.close()
    index, files = HostIndex(counts), None
    if worker.files is not None:
        budget, ranks = int(config.requested.kv_offload_dir_gb * (1 << 30)), config.requested.tensor_parallel_size
        known = worker.file_sizes if before is None or before.files is None else before.files.sizes
        files = PageFiles(CommandFiles(worker.files, ranks, send, ask), known, budget, index)
    offload = Offload(index, sizes, CommandMover(send, host), files)
    if before is not None:
        offload.sent = offload.arrived = before.sent
        send(Arrived(before.sent))
    return offload


def info(offload: Offload | None, host: HostPages | None) -> dict[str, object]:
    """Return occupancy and traffic for ``explain`` and ``/server_info``."""
    if offload is None or host is None:
        return {}
    index, counters = offload.index, offload.counters
    kinds = [
        {
            "kind": _name(kind),
            "slots": count,
            "used": index.used(kind),
            "bytes each": offload.part_bytes[kind],
            "MiB": round(count * offload.part_bytes[kind] / (1 << 20), 1),
        }
        for kind, count in index.counts.items()
    ]
    return {
        "host": kinds,
        "moved_out": counters.parts_out,
        "moved_in": counters.parts_in,
        "bytes_out": counters.bytes_out,
        "bytes_in": counters.bytes_in,
        "hit_tokens": counters.hits,
        "requests": counters.requests,
        "dropped": index.dropped,
        "refused": counters.refused,
        **_files(offload.files),
        "seconds": {way: round(seconds, 4) for way, seconds in host.seconds.items()},
    }


def metrics(offload: Offload | None, host: HostPages | None) -> list[Metric]:
    """Return samples for ``/metrics``."""
    if offload is None or host is None:
        return []
    index, counters = offload.index, offload.counters
    samples: list[Metric] = []
    for kind, count in index.counts.items():
        labels, used = {"kind": _name(kind)}, index.used(kind)
        samples += [
            ("kv_offload_slots", "gauge", labels, count, "Capacity of host memory, in pages or snapshots."),
            ("kv_offload_parts", "gauge", labels, used, "Pages or snapshots in host memory."),
            (
                "kv_offload_bytes",
                "gauge",
                labels,
                used * offload.part_bytes[kind],
                "Bytes of pages or snapshots in host memory.",
            ),
        ]
    ways: Mapping[str, tuple[int, int]] = {
        "out": (counters.parts_out, counters.bytes_out),
        "in": (counters.parts_in, counters.bytes_in),
    }
    for way, (parts, size) in ways.items():
        labels = {"direction": way}
        samples += [
            ("kv_offload_moved_parts", "counter", labels, parts, "Pages and snapshots moved to host memory or back."),
            ("kv_offload_moved_bytes", "counter", labels, size, "Bytes moved to host memory or back."),
            ("kv_offload_seconds", "counter", labels, host.seconds[way], "Seconds of copies to host memory or back."),
        ]
    samples += [
        ("kv_offload_hits", "counter", {}, counters.hits, "Prompt tokens loaded from host memory."),
        ("kv_offload_requests", "counter", {}, counters.requests, "Requests that waited for pages from host memory."),
        ("kv_offload_dropped", "counter", {}, index.dropped, "Pages and snapshots evicted from host memory."),
    ]
    if (files := offload.files) is not None:
        samples += [
            ("kv_offload_file_bytes", "gauge", {}, files.bytes, "Bytes of --kv-offload-dir."),
            ("kv_offload_files_written", "counter", {}, files.written, "Pages and snapshots written to files."),
            ("kv_offload_files_read", "counter", {}, files.read, "Pages and snapshots read from files."),
            (
                "kv_offload_files_bad",
                "counter",
                {},
                files.bad,
                "Files that were removed: cut off or changed.",
            ),
        ]
    return samples


def _files(files: PageFiles | None) -> dict[str, object]:
    if files is None:
        return {}
    return {
        "directory": str(files.folder),
        "file_bytes": files.bytes,
        "files_written": files.written,
        "files_read": files.read,
        "files_bad": files.bad,
        "files_skipped": files.skipped,
    }


def _counts(worker: Worker) -> dict[int, int]:
    """Return the device's capacity by kind of state."""
    snapshots = {SNAPSHOTS: worker.snapshots} if worker.store.recurrent else {}
    return {**worker.num_pages, **snapshots}


def _name(kind: int) -> str:
    return {ALL: "pages", SNAPSHOTS: "snapshots"}.get(kind, f"window {kind}")
