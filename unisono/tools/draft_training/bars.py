"""Progress bars, one per stage, with log lines above them. Without a terminal only log lines are printed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn


@contextmanager
def progress_bars() -> Iterator[tuple[Callable[[str, float], None], Callable[[str], None]]]:
    """Yields two functions: report(stage, share done) and log(line)."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        tasks: dict[str, TaskID] = {}

        def report(stage: str, share: float) -> None:
            if stage not in tasks:
                tasks[stage] = progress.add_task(stage.capitalize(), total=1.0)
            progress.update(tasks[stage], completed=share)

        yield report, lambda line: console.print(line, highlight=False, soft_wrap=True, markup=False)
