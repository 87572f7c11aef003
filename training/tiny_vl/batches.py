"""Batches of scenes with questions and answers, made by worker processes. Batch n depends on the seed and n only.

All pictures of a batch have one size. A row has one picture and as many questions as fit, in one of two layouts:

* *branches*: the picture, and questions that each see the picture and themselves only, at the same positions: several
  conversations of one turn that share their picture;
* *a conversation*: questions and answers one after another, the picture before or after the first question's text.

Shapes: B rows, L tokens, N tokens of a picture.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from random import Random

import numpy as np
from tokenizers import Tokenizer

from training.tiny_vl.questions import ask
from training.tiny_vl.scenes import SIZE_WEIGHTS, SIZES, random_scene
from training.tiny_vl.text import Format
from unisono.tools.eval.scenes import COLOURS, DIGITS, SHAPES, Scene, bar_area, covered, draw

READY = 4
"""Batches in flight per worker."""
TOKEN_PIXELS = 16
"""Pixels along the side of what becomes one token: two patches."""
KINDS = (*SHAPES, *DIGITS)
LABELS = 1 + (len(KINDS) + 1) * len(COLOURS)
"""Values of a label: nothing, or a kind (bars are one more) and a colour."""
LEAST_SHOWN = 12
"""Pixels of a token that a thing covers, at least, to be what the token shows."""
SEEN = 4.0
"""Loss weight of the final answer's tokens; the rest of an answer has 1."""
EASY_BATCHES = 1500
"""Scenes grow fuller until this batch."""


@dataclass(frozen=True)
class Batch:
    """pictures [B, H, W, 3] uint8; ids [B, L]; weights [B, L] (loss of predicting the token); positions [B, 3, L];
    segments [B, L]: 0 is seen by all later tokens, another number by tokens of the same number; places [B, N]: of the
    picture's tokens. labels [B, N]: what each of them shows, see :func:`labels_of`."""

    pictures: np.ndarray
    ids: np.ndarray
    weights: np.ndarray
    positions: np.ndarray
    segments: np.ndarray
    places: np.ndarray
    labels: np.ndarray


@dataclass(frozen=True)
class Packing:
    """rows, length: B and L. chats: share of batches that are conversations."""

    rows: int
    length: int
    chats: float


@contextmanager
def stream(tokenizer: Tokenizer, packing: Packing, seed: int, workers: int) -> Iterator[Iterator[Batch]]:
    """An endless iterator of batches, which ``workers`` processes make in advance; with 0 this process makes them.

    Enter it before CUDA is initialised, because it forks.
    """
    if workers == 0:
        _start(tokenizer.to_str())
        yield (make_batch(seed, number, packing) for number in itertools.count())
        return
    context = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(workers, context, _start, (tokenizer.to_str(),)) as pool:
        waiting: deque[Future[Batch]] = deque()

        def batches() -> Iterator[Batch]:
            for number in itertools.count():
                waiting.append(pool.submit(make_batch, seed, number, packing))
                if len(waiting) > READY * workers:
                    yield waiting.popleft().result()

        yield batches()
        pool.shutdown(wait=False, cancel_futures=True)


_format: Format


def _start(tokenizer: str) -> None:
    global _format
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _format = Format(Tokenizer.from_str(tokenizer))


def make_batch(seed: int, number: int, packing: Packing) -> Batch:
    """Batch ``number``. Runs in a process that ``_start`` has prepared."""
    rng = Random(f"{seed} {number}")
    size = rng.choices(SIZES, SIZE_WEIGHTS)[0]
    chat = rng.random() < packing.chats
    level = min(1.0, 0.15 + number / EASY_BATCHES)
    scenes = [random_scene(rng, size, level, held_out=False) for _ in range(packing.rows)]
    return collate([Row.of(rng, scene, packing.length, chat) for scene in scenes], packing.length)


def picture_tokens(scene: Scene) -> tuple[int, int]:
    """(rows, columns) of a picture's tokens."""
    return scene.height // TOKEN_PIXELS, scene.width // TOKEN_PIXELS


@dataclass
class Row:
    """A row as it is put together."""

    scene: Scene
    ids: list[int]
    weights: list[float]
    segments: list[int]
    positions: list[tuple[int, int, int]]
    places: list[int]

    @classmethod
    def of(cls, rng: Random, scene: Scene, length: int, chat: bool) -> Row:
        """A row of random questions."""
        row = cls(scene, [], [], [], [], [])
        (row.conversation if chat else row.branches)(rng, length)
        return row

    def branches(self, rng: Random, length: int) -> None:
        """The picture, then questions that see only it."""
        self.text(_format.asked, 0)
        self.picture()
        begin = self.next
        for number in itertools.count(1):
            asked = ask(rng, self.scene)
            question = [*_format.ids(asked.question), *_format.answered]
            answer, weights = answered(asked.answer)
            if number > 1 and len(self.ids) + len(question) + len(answer) > length:
                return
            self.text(question, number, begin)
            self.text(answer, number, begin + len(question), weights)

    def conversation(self, rng: Random, length: int) -> None:
        """Questions one after another."""
        first = rng.random() < 0.6
        for number in itertools.count():
            asked = ask(rng, self.scene)
            question = _format.ids(asked.question)
            answer, weights = answered(asked.answer)
            if number and len(self.ids) + len(question) + len(answer) + 12 > length:
                return
            self.text(_format.asked, 0)
            if number == 0 and first:
                self.picture()
            self.text(question, 0)
            if number == 0 and not first:
                self.picture()
            self.text(_format.answered, 0)
            self.text(answer, 0, None, weights)
            self.text(_format.newline, 0)

    @property
    def next(self) -> int:
        """The rotary position after what is there."""
        return max((max(axes) for axes in self.positions), default=-1) + 1

    def text(self, ids: list[int], segment: int, at: int | None = None, weights: list[float] | None = None) -> None:
        """Add tokens at rotary position ``at`` and after."""
        begin = self.next if at is None else at
        self.ids += ids
        self.weights += [0.0] * len(ids) if weights is None else weights
        self.segments += [segment] * len(ids)
        self.positions += [(begin + i,) * 3 for i in range(len(ids))]

    def picture(self) -> None:
        """Add the picture: time stands still over it, height and width count its tokens."""
        rows, columns = picture_tokens(self.scene)
        self.text([_format.start], 0)
        begin = self.next
        self.places += range(len(self.ids), len(self.ids) + rows * columns)
        self.ids += [_format.image] * (rows * columns)
        self.weights += [0.0] * (rows * columns)
        self.segments += [0] * (rows * columns)
        self.positions += [(begin, begin + r, begin + c) for r in range(rows) for c in range(columns)]
        self.text([_format.end], 0)


def answered(text: str) -> tuple[list[int], list[float]]:
    """(ids of an answer with its end, their loss weights)."""
    worked, mark, final = text.rpartition("#### ")
    before, after = _format.ids(worked + mark.rstrip()), _format.ids(" " + final)
    return [*before, *after, _format.stop], [1.0] * len(before) + [SEEN] * len(after) + [1.0]


def collate(rows: list[Row], length: int) -> Batch:
    """Rows padded or cut to ``length``. Padding sees itself only."""
    shape = (len(rows), length)
    ids, weights = np.full(shape, _format.pad, np.int32), np.zeros(shape, np.float32)
    segments, positions = np.full(shape, -1, np.int32), np.zeros((len(rows), 3, length), np.int32)
    for number, row in enumerate(rows):
        n = min(length, len(row.ids))
        ids[number, :n], weights[number, :n] = row.ids[:n], row.weights[:n]
        segments[number, :n] = row.segments[:n]
        positions[number, :, :n] = np.array(row.positions[:n]).T
    places = np.array([row.places for row in rows], np.int64)
    labels = np.stack([labels_of(row.scene) for row in rows])
    return Batch(np.stack([draw(row.scene) for row in rows]), ids, weights, positions, segments, places, labels)


def labels_of(scene: Scene) -> np.ndarray:
    """What each token of a picture shows, [N] int64: 0 nothing, else the kind and colour that cover most of it.

    Less than LEAST_SHOWN of its pixels count as nothing.
    """
    rows, columns = picture_tokens(scene)
    most, labels = np.full((rows, columns), LEAST_SHOWN - 1), np.zeros((rows, columns), np.int64)

    def show(area: tuple[slice, slice], mask: np.ndarray | bool, kind: int, colour: str) -> None:
        nonlocal most
        pixels = np.zeros((scene.height, scene.width), bool)
        pixels[area] = mask
        counts = pixels.reshape(rows, TOKEN_PIXELS, columns, TOKEN_PIXELS).sum((1, 3))
        labels[counts > most] = 1 + kind * len(COLOURS) + list(COLOURS).index(colour)
        most = np.maximum(most, counts)

    for thing in scene.things:
        show(*covered(thing), KINDS.index(thing.kind), thing.colour)
    for number, bar in enumerate(scene.bars):
        show(bar_area(scene, number), True, len(KINDS), bar.colour)
    return labels.ravel()
