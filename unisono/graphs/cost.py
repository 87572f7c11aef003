"""Choice of the pass sizes to capture: padding waste against memory and capture time.

A graph of ``c`` rows serves passes of at most ``c`` rows and takes as long as a pass of ``c`` rows. More graphs waste
less on padding, but each takes memory and start-up time. :func:`choose` finds the cheapest set exactly, by dynamic
programming over measured costs. Times are device milliseconds.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

GIB_MS = 120_000.0
"""Price of a GiB of graph memory in milliseconds over the horizon, since the KV cache could use that memory."""


@dataclass(frozen=True)
class PassCost:
    """Cost of a pass as a function of its rows.

    points: (rows, ms) of device time, ascending in rows, at least two; interpolated and extrapolated linearly.
    eager_ms: time the host needs to launch an eager pass's kernels, a lower bound of its duration; inf if passes must
        never run eagerly.
    capture_ms: time of a capture, without its passes.
    graph_bytes: memory of one graph.
    """

    points: tuple[tuple[int, float], ...]
    eager_ms: float = math.inf
    capture_ms: float = 50.0
    graph_bytes: int = 0

    def replay(self, rows: int) -> float:
        """Milliseconds to replay a graph with this number of rows."""
        at = min(max(bisect_left(self.points, rows, key=lambda point: point[0]), 1), len(self.points) - 1)
        (n, low), (m, high) = self.points[at - 1], self.points[at]
        return max(0.0, low + (high - low) * (rows - n) / (m - n))

    def eager(self, rows: int, delay: float = 0.0) -> float:
        """Milliseconds of an eager pass: device time or host launch time, whichever is longer.

        delay: fraction of the launch time that is added to this.
        """
        late = delay * self.eager_ms if delay else 0.0
        return max(self.eager_ms, self.replay(rows)) + late

    def capture(self, rows: int) -> float:
        """Price of a graph in milliseconds: two passes, the capture, and the value of its memory."""
        return 2 * self.replay(rows) + self.capture_ms + GIB_MS * self.graph_bytes / (1 << 30)

    @staticmethod
    def linear(fixed_ms: float, row_ms: float, *rest: float, **named: float) -> PassCost:
        """Cost fixed_ms + row_ms · n for n rows."""
        return PassCost(((0, fixed_ms), (1, fixed_ms + row_ms)), *rest, **named)  # type: ignore[arg-type]

    @staticmethod
    def measured(points: Mapping[int, float], flat: int = 0, **rest: float) -> PassCost:
        """Cost from measured rows -> ms, made monotonic; constant if there is one point.

        Up to ``flat`` rows, after the second point, it is a staircase: one row more than a point fills the next tile.
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
    """Sizes that may be captured, up to and including ``limit``: ``least``, doubled three times, then in steps of
    1/8."""
    sizes, size = [], least
    while size < limit:
        sizes.append(size)
        size += max(size if size < 8 * least else 0, 2 ** (size.bit_length() - 1) // 8)
    return (*sizes, limit)


def choose(sizes: Sequence[int], cost: PassCost, passes: float, there: Collection[int] = ()) -> tuple[int, ...]:
    """Sizes worth capturing among ``sizes``, both ascending; may be empty.

    there: sizes already captured.
    passes: expected number of passes; their sizes are assumed log-uniform in 1 … sizes[-1].

    A pass runs eagerly if the smallest graph that holds it is slower than that (see ``Planner.plan``).
    """
    rows = np.arange(1, sizes[-1] + 1)
    weight = passes / (1 / rows).sum()
    eager = np.array([cost.eager(int(n)) for n in rows])
    # Prefix sums over the first n sizes: weights, and eager costs.
    weights = np.concatenate(([0.0], np.cumsum(weight / rows)))
    eagerly = np.concatenate(([0.0], np.cumsum(weight / rows * eager)))

    def served(low: int, high: int, size: int) -> float:
        """Expected milliseconds of all passes of low + 1 … high rows that a graph of ``size`` rows may serve."""
        first = min(max(int(np.searchsorted(eager, cost.replay(size))), low), high)  # smaller passes are faster eagerly
        quicker = eagerly[first] - eagerly[low] if first > low else 0.0
        return float(quicker + (weights[high] - weights[first]) * cost.replay(size))

    best: list[tuple[float, tuple[int, ...]]] = []  # best choice up to sizes[i], which is captured
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
