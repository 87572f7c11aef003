"""A plot of a load: the distribution of each metric, and tokens per second over time. Needs the extra "plot"."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from unisono.tools.load.figures import METRICS, LoadFigures
from unisono.types import ConfigError


def pyplot() -> Any:
    """matplotlib's pyplot. Raises ConfigError if it is not installed."""
    try:
        import matplotlib
    except ImportError:
        raise ConfigError('--plot needs matplotlib: pip install "unisono[plot]".') from None
    matplotlib.use("agg")
    from matplotlib import pyplot

    return pyplot


def draw(figures: LoadFigures, title: str, path: Path) -> None:
    """Write the plot; ``path`` ends in .png, .svg or .pdf."""
    figure, panels = pyplot().subplots(2, 2, figsize=(10, 7), dpi=130)
    fine = [a for a in figures.answers if a.failure is None]
    values = {
        "ttft": [a.ttft for a in fine],
        "tpot": [t for a in fine if (t := a.tpot) is not None],
        "itl": [gap for a in fine for gap in a.gaps],
    }
    for (name, seconds), axes in zip(values.items(), panels.flat, strict=False):
        ms = np.sort(1e3 * np.asarray(seconds or [0.0]))
        axes.plot(ms, np.linspace(0, 100, len(ms)))
        if limit := figures.goodput.get(name):
            axes.axvline(limit, color="tab:red", linestyle="--", label=f"goal {limit:g} ms")
            axes.legend()
        axes.set_xlabel("ms")
        axes.set_ylabel("% of requests" if name != "itl" else "% of gaps")
        axes.set_title(METRICS[name], fontsize=9)
        axes.grid(alpha=0.3)
    axes = panels[1][1]
    times = np.asarray([at for a in fine for at in a.times] or [0.0])
    begun = figures.answers[0].sent if figures.answers else 0.0
    bins = min(200, 10 * max(1, round(float(times.max()) - begun)))
    counts, edges = np.histogram(times - begun, bins=bins)
    axes.plot(edges[:-1], counts / np.diff(edges))
    axes.set_xlabel("seconds")
    axes.set_ylabel("streamed events/s")
    axes.set_title("Over time", fontsize=9)
    axes.grid(alpha=0.3)
    figure.suptitle(title, fontsize=10)
    figure.tight_layout()
    figure.savefig(path)
