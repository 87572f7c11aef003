"""Packs documents into training batches in worker processes.

``train`` reads them from ``stream``. Batch n depends on the seed and n only, not on the number of workers.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from random import Random

import numpy as np
from tokenizers import Tokenizer

from training.tiny.documents import Document, document, standard_library

READY = 6
"""Batches in flight per worker."""

Source = Callable[[Random, list[str]], Document]
"""Makes a random document; its second argument is the standard library's text."""


@dataclass(frozen=True)
class Batch:
    """``ids`` [rows, length + 1] u16; ``weights`` (tenths) [rows, length + 1] u8; ``positions`` [rows, length] i16."""

    ids: np.ndarray
    weights: np.ndarray
    positions: np.ndarray


@dataclass(frozen=True)
class Packing:
    """Shape of a batch: ``rows`` rows of ``length`` tokens, with positions below ``max_position``."""

    rows: int
    length: int
    max_position: int


@contextmanager
def stream(
    tokenizer: Tokenizer, packing: Packing, seed: int, workers: int, source: Source = document, repeat: int = 0
) -> Iterator[Iterator[Batch]]:
    """An endless iterator of batches of ``source``'s documents, which ``workers`` processes make in advance.

    Enter it before CUDA is initialised, because it forks.

    repeat: once so many batches are given, give one of the last so many again while the next is not ready; 0: wait.
    """
    context = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(workers, context, _start, (tokenizer.to_str(), source)) as pool:
        seeds = (f"{seed} {number}" for number in itertools.count())
        waiting: deque[Future[Batch]] = deque()
        earlier: deque[Batch] = deque(maxlen=repeat)
        rng = Random(seed)

        def batches() -> Iterator[Batch]:
            while True:
                while len(waiting) <= READY * workers:
                    waiting.append(pool.submit(make_batch, next(seeds), packing))
                if len(earlier) == repeat > 0 and not waiting[0].done():
                    yield rng.choice(earlier)
                    continue
                batch = waiting.popleft().result()
                earlier.append(batch)
                yield batch

        yield batches()
        pool.shutdown(wait=False, cancel_futures=True)


def make_batch(seed: str, packing: Packing) -> Batch:
    """The batch of one seed. Runs in a worker process that ``_start`` has initialised."""
    rng = Random(seed)
    shape = (packing.rows, packing.length + 1)
    batch = Batch(
        np.zeros(shape, np.uint16), np.zeros(shape, np.uint8), np.zeros((packing.rows, packing.length), np.int16)
    )
    for row in range(packing.rows):
        starts = _fill_row(batch.ids[row], batch.weights[row], rng)
        batch.positions[row] = _positions(starts, packing, rng)
    return batch


@dataclass
class _Worker:
    """The state of a worker process."""

    tokenizer: Tokenizer
    library: list[str]
    source: Source


_worker: _Worker


def _start(tokenizer: str, source: Source) -> None:
    global _worker
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _worker = _Worker(Tokenizer.from_str(tokenizer), standard_library(), source)


def _fill_row(ids: np.ndarray, weights: np.ndarray, rng: Random) -> list[int]:
    """Fill a row with documents, truncating the last; returns their start indices."""
    at, starts = 0, []
    while at < len(ids):
        texts, parts_weights = zip(*_worker.source(rng, _worker.library), strict=True)
        starts.append(at)
        for encoded, weight in zip(_worker.tokenizer.encode_batch_fast(list(texts)), parts_weights, strict=True):
            part = encoded.ids[: len(ids) - at]
            ids[at : at + len(part)] = part
            weights[at : at + len(part)] = round(weight * 10)
            at += len(part)
    return starts


def _positions(starts: list[int], packing: Packing, rng: Random) -> np.ndarray:
    """Positions of a row's tokens. About half of the rows have gaps between documents, to train all positions."""
    steps = np.ones(packing.length, np.int64)
    steps[0] = 0
    inner = [start for start in starts[1:] if start < packing.length]
    if inner and rng.random() < 0.5:
        gaps = rng.randint(0, packing.max_position - packing.length)
        cuts = sorted(rng.randint(0, gaps) for _ in inner)
        for start, gap in zip(inner, np.diff([0, *cuts]), strict=True):
            steps[start] += gap
    return np.cumsum(steps)
