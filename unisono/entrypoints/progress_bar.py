"""Progress bars of the offline interface: the start of an engine, and the prompts of a call.

They are shown on a terminal and in a notebook, on standard error. ``TQDM_DISABLE=1`` turns all of them off.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import Any

Bar = bool | Callable[..., Any]
"""``use_tqdm``: True for a bar on a terminal and in a notebook, False for none, or a class to use as ``tqdm``."""

STAGES = {
    "start": "Starting the engine",
    "load": "Loading the model",
    "load draft": "Loading the drafter",
    "load tower": "Loading the vision tower",
    "compile": "Compiling kernels",
    "capture": "Capturing graphs",
}
"""Description of each stage of an engine's start."""


def in_notebook() -> bool:
    """True in a Jupyter or Colab notebook, whose output is not a terminal."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return shell is not None and hasattr(shell, "kernel")


def _tqdm() -> Any:
    """Return the tqdm class for this standard error; None if a bar would only fill a log."""
    notebook = in_notebook()
    if not notebook and not sys.stderr.isatty():
        return None
    if notebook and find_spec("ipywidgets") is not None:
        from tqdm.notebook import tqdm as of_notebooks

        return of_notebooks
    from tqdm import tqdm

    return tqdm


@contextlib.contextmanager
def start_bars(use_tqdm: bool) -> Iterator[Callable[[str, float], None]]:
    """Return a callback for the stages of a start: called with a stage and its completed fraction, 0 … 1. One bar,
    removed at the end.
    """
    make = _tqdm() if use_tqdm else None
    if make is None:
        yield lambda stage, share: None
        return
    layout = "{desc}: {percentage:3.0f}%|{bar}| {elapsed}"
    bar = make(total=1.0, desc=STAGES["start"], bar_format=layout, leave=False, dynamic_ncols=True)

    def report(stage: str, share: float) -> None:
        bar.set_description(STAGES.get(stage, stage.capitalize()), refresh=False)
        bar.n = min(max(share, 0.0), 1.0)
        bar.refresh()

    try:
        yield report
    finally:
        bar.close()


@contextlib.contextmanager
def prompts_bar(use_tqdm: Bar, total: int) -> Iterator[Callable[[int, int], None]]:
    """Show a bar over ``total`` prompts. The callback takes the number of prompts that ended, and of their tokens."""
    make = _tqdm() if use_tqdm is True else use_tqdm or None
    if make is None:
        yield lambda prompts, tokens: None
        return
    bar, started, done = make(total=total, desc="Prompts", dynamic_ncols=True), time.monotonic(), 0

    def advance(prompts: int, tokens: int) -> None:
        nonlocal done
        done += tokens
        if hasattr(bar, "set_postfix_str"):
            speed = done / max(time.monotonic() - started, 1e-9)
            bar.set_postfix_str(f"output {speed:.1f} tokens/s", refresh=False)
        bar.update(prompts)

    try:
        yield advance
    finally:
        bar.close()
