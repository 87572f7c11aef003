"""Random scenes. A share of all compositions is held out: no training scene has one.

A composition is what can be said of a scene without pixels: its things with their places, or its bars.
"""

from __future__ import annotations

import hashlib
from random import Random

from unisono.tools.eval.scenes import (
    BACKGROUNDS,
    CELL,
    COLOURS,
    DIGITS,
    HIGHEST,
    MOST_BARS,
    SHAPES,
    Bar,
    Scene,
    Thing,
)

SIZES = ((64, 64), (96, 64), (64, 96), (96, 96), (128, 96), (128, 128))
"""(width, height) of pictures in pixels."""
SIZE_WEIGHTS = (15, 20, 15, 25, 15, 10)
HELD_OUT = 16
"""One composition of this many is held out."""


def random_scene(rng: Random, size: tuple[int, int], level: float, held_out: bool) -> Scene:
    """A scene of a size. level: 0 … 1, how full it may be. held_out: of the held-out compositions, or of the others."""
    while True:
        scene = _chart(rng, size, level) if rng.random() < 0.25 else _things(rng, size, level)
        if is_held_out(scene) == held_out:
            return scene


def is_held_out(scene: Scene) -> bool:
    """Whether the scene's composition is one of those that training never sees."""
    told = [f"{thing.colour} {thing.kind} {scene.place(thing)}" for thing in scene.in_order()]
    told += [f"{bar.colour} {bar.height}" for bar in scene.bars]
    text = f"{scene.columns} {scene.rows} {'; '.join(told)}"
    return hashlib.blake2b(text.encode(), digest_size=2).digest()[0] % HELD_OUT == 0


def _things(rng: Random, size: tuple[int, int], level: float) -> Scene:
    """Shapes, digits, or some of both, in different cells."""
    width, height = size
    columns, rows = min(3, width // CELL), min(3, height // CELL)
    most = max(2, round(level * min(columns * rows, 7)))
    count = rng.randint(1, most)
    share = rng.choice((0.0, 0.0, 0.0, 1.0, 0.35))  # of digits
    palette = rng.sample(list(COLOURS), rng.choice((2, 3, 4, 6)))  # few colours: more things of the same one
    shapes = rng.sample(SHAPES, rng.choice((2, 3, 5)))
    things = []
    for cell in sorted(rng.sample(range(columns * rows), count)):
        row, column = divmod(cell, columns)
        digit = rng.random() < share
        pixels = rng.randint(2, 3) if digit else rng.randint(6, 12)
        half = (5 * pixels // 2 + 1, 7 * pixels // 2 + 1) if digit else (pixels + 1, pixels + 1)
        x, y = (
            rng.randint(low * full // parts + margin, (low + 1) * full // parts - 1 - margin)
            for low, full, parts, margin in ((column, width, columns, half[0]), (row, height, rows, half[1]))
        )
        things.append(Thing(rng.choice(DIGITS if digit else shapes), rng.choice(palette), x, y, pixels))
    return Scene(width, height, rng.choice(list(BACKGROUNDS)), tuple(things))


def _chart(rng: Random, size: tuple[int, int], level: float) -> Scene:
    count = rng.randint(2, max(2, round(level * MOST_BARS)))
    colours = rng.sample(list(COLOURS), count)
    bars = tuple(Bar(colour, rng.randint(1, HIGHEST)) for colour in colours)
    return Scene(*size, rng.choice(list(BACKGROUNDS)), bars=bars)
