"""``python -m benchmarks.plot_adaptive RESULTS IMAGE``: a plot of the results of ``benchmarks.adaptive``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from benchmarks.adaptive import ADAPTIVE, NONE, Curve
from benchmarks.command import run
from unisono.console.values import writable
from unisono.types import ConfigError


def plot(
    results: Annotated[Path, typer.Argument(help="JSON that `python -m benchmarks.adaptive --out` wrote.")],
    image: Annotated[Path, typer.Argument(help="PNG, SVG or PDF file to write.")],
) -> None:
    """Plot tokens per second over concurrency, relative to no speculation. Needs the extra "plot" (matplotlib)."""
    writable("IMAGE", image)
    try:
        curve = Curve.read(results)
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ConfigError(f"{results} is not what `python -m benchmarks.adaptive --out` wrote: {error}.") from None
    try:
        import matplotlib
    except ImportError:
        raise ConfigError('plotting needs matplotlib: pip install "unisono[plot]".') from None
    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.5), dpi=150)
    sizes = [point.concurrency for point in curve.points]
    for name in curve.points[0].tokens_per_second:
        relative = [p.tokens_per_second[name] / p.tokens_per_second[NONE] for p in curve.points]
        bold = name == ADAPTIVE
        axes.plot(sizes, relative, marker="o", linewidth=3 if bold else 1, zorder=3 if bold else 2, label=name)
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, [str(size) for size in sizes])
    axes.set_xlabel("concurrency")
    axes.set_ylabel("tokens/s relative to no speculation")
    axes.set_title(f"{Path(curve.model).name} on {curve.versions.get('on', '')}\n{curve.acceptance}", fontsize=9)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.tight_layout()
    figure.savefig(image)
    print(f"{results} plotted in {image}")


if __name__ == "__main__":
    run(plot)
