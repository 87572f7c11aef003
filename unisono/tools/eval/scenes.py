"""Small images rendered from a description: coloured shapes, digits, bar charts.

The same description gives the same bytes: all arithmetic is on integers, so that no version of a library moves a pixel.
``picture_problems`` renders the held-out problems with it, ``training/tiny_vl`` the training data of the bundled vision
model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

COLOURS = {
    "red": (214, 40, 40),
    "green": (40, 160, 60),
    "blue": (50, 90, 220),
    "yellow": (235, 205, 40),
    "purple": (150, 60, 180),
    "orange": (240, 130, 30),
}
BACKGROUNDS = {"black": (12, 12, 16), "grey": (112, 112, 112), "cream": (238, 232, 216)}
SHAPES = ("circle", "square", "triangle", "cross", "ring")
DIGITS = tuple("0123456789")
CELL = 32
"""Smallest height of a row and width of a column, pixels."""
MOST_BARS, HIGHEST = 5, 8
"""Most bars of a chart, and the largest height of a bar in units."""
LINES = (150, 150, 150)

_GLYPHS = """
01110 00100 01110 11110 00010 11111 00110 11111 01110 01110
10001 01100 10001 00001 00110 10000 01000 00001 10001 10001
10011 00100 00001 00001 01010 11110 10000 00010 10001 10001
10101 00100 00010 01110 10010 00001 11110 00100 01110 01111
11001 00100 00100 00001 11111 00001 10001 01000 10001 00001
10001 00100 01000 00001 00010 10001 10001 01000 10001 00010
01110 01110 11111 11110 00010 01110 01110 01000 01110 01100
"""
GLYPHS = {
    digit: np.array([[int(dot) for dot in row.split()[int(digit)]] for row in _GLYPHS.strip().splitlines()], bool)
    for digit in DIGITS
}
"""Digit -> its dots [7, 5]."""


@dataclass(frozen=True)
class Thing:
    """A shape or a digit.

    kind: one of SHAPES or DIGITS. x, y: its centre in pixels.

    size: a shape's radius in pixels, or the side of a digit's dot in pixels.
    """

    kind: str
    colour: str
    x: int
    y: int
    size: int

    @property
    def is_digit(self) -> bool:
        return self.kind in DIGITS


@dataclass(frozen=True)
class Bar:
    """A bar of a chart. height: in units, 1 to HIGHEST."""

    colour: str
    height: int


@dataclass(frozen=True)
class Scene:
    """An image with things, or with bars from left to right. width, height: pixels, at least 2 * CELL."""

    width: int
    height: int
    background: str
    things: tuple[Thing, ...] = ()
    bars: tuple[Bar, ...] = ()

    @property
    def columns(self) -> int:
        """Number of columns of things: 2 or 3."""
        return min(3, self.width // CELL)

    @property
    def rows(self) -> int:
        """Number of rows of things: 2 or 3."""
        return min(3, self.height // CELL)

    def cell(self, thing: Thing) -> tuple[int, int]:
        """(row, column) of a thing."""
        return thing.y * self.rows // self.height, thing.x * self.columns // self.width

    def place(self, thing: Thing) -> str:
        """The position of a thing in words: "top-left"."""
        row, column = self.cell(thing)
        return f"{ROWS[self.rows][row]}-{COLUMNS[self.columns][column]}"

    def in_order(self) -> list[Thing]:
        """Things in reading order: row by row, from left to right."""
        return sorted(self.things, key=self.cell)

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def of(cls, data: Mapping[str, Any]) -> Scene:
        """The scene of :meth:`as_json`."""
        things = tuple(Thing(**one) for one in data.get("things", ()))
        bars = tuple(Bar(**one) for one in data.get("bars", ()))
        return cls(data["width"], data["height"], data["background"], things, bars)


ROWS = {2: ("top", "bottom"), 3: ("top", "middle", "bottom")}
COLUMNS = {2: ("left", "right"), 3: ("left", "centre", "right")}


def draw(scene: Scene) -> np.ndarray:
    """The image [height, width, 3] uint8."""
    picture = np.empty((scene.height, scene.width, 3), np.uint8)
    picture[:] = BACKGROUNDS[scene.background]
    if scene.bars:
        _draw_bars(picture, scene)
    for thing in scene.things:
        at, mask = covered(thing)
        picture[at][mask] = COLOURS[thing.colour]
    return picture


def covered(thing: Thing) -> tuple[tuple[slice, slice], np.ndarray]:
    """(the rectangle around a thing, mask of its pixels)."""
    mask = _digit(thing) if thing.is_digit else _shape(thing.kind, thing.size)
    rows, columns = mask.shape
    top, left = thing.y - rows // 2, thing.x - columns // 2
    return (slice(top, top + rows), slice(left, left + columns)), mask


def _shape(kind: str, r: int) -> np.ndarray:
    """The pixels of a shape of radius r, [2 r + 1, 2 r + 1] bool."""
    y, x = np.ogrid[-r : r + 1, -r : r + 1]
    if kind == "circle":
        return x * x + y * y <= r * r
    if kind == "ring":
        return (x * x + y * y <= r * r) & (4 * (x * x + y * y) >= r * r)
    if kind == "square":
        return (8 * abs(x) <= 7 * r) & (8 * abs(y) <= 7 * r)
    if kind == "triangle":
        return 2 * abs(x) <= y + r
    return (3 * abs(x) <= r) | (3 * abs(y) <= r)


def _digit(thing: Thing) -> np.ndarray:
    return np.repeat(np.repeat(GLYPHS[thing.kind], thing.size, 0), thing.size, 1)


def unit(scene: Scene) -> int:
    """Height of a chart's unit in pixels."""
    return (scene.height - 8) // HIGHEST


def _draw_bars(picture: np.ndarray, scene: Scene) -> None:
    """Draw bars on a base line, and a thin line at each unit of height."""
    for height in range(HIGHEST + 1):
        picture[scene.height - 4 - height * unit(scene), 2 : scene.width - 2] = LINES
    for number, bar in enumerate(scene.bars):
        picture[bar_area(scene, number)] = COLOURS[bar.colour]


def bar_area(scene: Scene, number: int) -> tuple[slice, slice]:
    """The rectangle of a bar."""
    base, slot = scene.height - 4, (scene.width - 4) // len(scene.bars)
    left = 2 + number * slot + slot // 6
    return slice(base - scene.bars[number].height * unit(scene), base), slice(left, left + slot - slot // 3)
