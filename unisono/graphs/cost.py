"""Which sizes of a pass to capture: padding waste against memory and capture time.

A graph of ``c`` rows serves passes of at most ``c`` rows and costs what a pass of ``c`` rows costs. More graphs waste
less on padding; each takes memory and start-up time. :func:`choose` finds the cheapest set exactly, by dynamic
programming, from measured costs. Times are milliseconds of the device.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

GIB_MS = 120_000.0
"""What a GiB of graphs is worth: so many milliseconds over the horizon. It is memory that the KV cache lacks."""


@dataclass(frozen=True)
class PassCost:
    """What a pass of n rows takes.

    points: (rows, ms) that the device needs, ascending, two at least: between them and behind them along a line.
    eager_ms: the least that an eager pass takes, for the host launches its kernels one by one; inf where an eager pass
        is never wanted. capture_ms: what capturing a graph takes beside running its pass; graph_bytes: what it holds.
    """

    points: tuple[tuple[int, float], ...]
    eager_ms: float = math.inf
    capture_ms: float = 50.0
    graph_bytes: int = 0

    def replay(self, rows: int) -> float:
        """Milliseconds of a replay of a graph of so many rows."""
        at = min(max(bisect_left(self.points, rows, key=lambda point: point[0]), 1), len(self.points) - 1)
        (n, low), (m, high) = self.points[at - 1], self.points[at]
        return max(0.0, low + (high - low) * (rows - n) / (m - n))

    def eager(self, rows: int) -> float:
        """Milliseconds of an eager pass: the device's work or the host's launches, whichever takes longer."""
        return max(self.eager_ms, self.replay(rows))

    def capture(self, rows: int) -> float:
        """Milliseconds that having a graph of so many rows costs: two passes, the capture, and its memory's worth."""
        return 2 * self.replay(rows) + self.capture_ms + GIB_MS * self.graph_bytes / (1 << 30)

    @staticmethod
    def linear(fixed_ms: float, row_ms: float, *rest: float, **named: float) -> PassCost:
        """The cost fixed + row · n."""
        return PassCost(((0, fixed_ms), (1, fixed_ms + row_ms)), *rest, **named)  # type: ignore[arg-type]

    @staticmethod
    def measured(points: Mapping[int, float], flat: int = 0, **rest: float) -> PassCost:
        """The cost through measured rows -> ms, made to grow with rows; of one point alone, the same for all.

        Up to ``flat`` rows it is a staircase behind the second point: one row behind a point takes the next one's tile.
        """
        (first, least), *others = sorted(points.items())
        steps = [(first, least)]
        for rows, ms in others:
            before, least = steps[-1][0], max(steps[-1][1], ms)
            if rows <= flat and len(steps) > 1 and before + 1 < rows:
                steps.append((before + 1, least))
            steps.append((rows, least))
        if len(steps) == 1:
            steps.append((first + 1, least))
        return PassCost(tuple(steps), **rest)  # type: ignore[arg-type]


def candidates(limit: int, least: int = 1) -> tuple[int, ...]:
    """Sizes that may be captured, up to ``limit`` and with it: ``least``, doubled thrice, then steps of an eighth."""
    sizes, size = [], least
    while size < limit:
        sizes.append(size)
        size += max(size if size < 8 * least else 0, 2 ** (size.bit_length() - 1) // 8)
    return (*sizes, limit)


def choose(sizes: Sequence[int], cost: PassCost, passes: float, there: Collection[int] = ()) -> tuple[int, ...]:
    """The sizes worth capturing, ascending, of ascending ``sizes``; maybe none. Of those ``there`` graphs are captured.

    ``passes`` is the horizon: so many passes are expected, their sizes 1 … sizes[-1] log-uniform, as nobody knows
    better. A pass that its smallest graph would serve slower than none runs eagerly (see ``Planner.plan``).
    """
    rows = np.arange(1, sizes[-1] + 1)
    weight = passes / (1 / rows).sum()
    eager = np.array([cost.eager(int(n)) for n in rows])
    # Sums over the first n sizes: of their weights, and of what they cost eagerly.
    weights = np.concatenate(([0.0], np.cumsum(weight / rows)))
    eagerly = np.concatenate(([0.0], np.cumsum(weight / rows * eager)))

    def served(low: int, high: int, size: int) -> float:
        """Expected milliseconds of all passes of low + 1 … high rows, with the graph of ``size`` rows."""
        first = min(max(int(np.searchsorted(eager, cost.replay(size))), low), high)  # below, eager is quicker
        quicker = eagerly[first] - eagerly[low] if first > low else 0.0
        return float(quicker + (weights[high] - weights[first]) * cost.replay(size))

    best: list[tuple[float, tuple[int, ...]]] = []  # up to sizes[i], which is captured
    for i, size in enumerate(sizes):
        options: list[tuple[float, tuple[int, ...]]] = [(served(0, size, size), ())]
        options += [(best[j][0] + served(sizes[j], size, size), best[j][1]) for j in range(i)]
        total, chosen = min(options)
        best.append((total + (0.0 if size in there else cost.capture(size)), (*chosen, size)))
    last = sizes[-1]
    options = [(float(eagerly[last]), ())]
    for total, chosen in best:
        above = (
            0.0
            if chosen[-1] == last
            else math.inf
            if math.isinf(cost.eager_ms)
            else eagerly[last] - eagerly[chosen[-1]]
        )
        options.append((total + float(above), chosen))
    return min(options)[1]
