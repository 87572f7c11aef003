"""Output of the command line: errors, notes, stages of a start, and tables without truncation."""

from __future__ import annotations

import contextlib
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.measure import Measurement
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from typer.core import TyperGroup

from unisono.console.help import Page
from unisono.entrypoints.progress_bar import STAGES
from unisono.types import ConfigError, EngineDead, UnisonoError

stdout = Console()
stderr = Console(stderr=True)


UsageError: Any = next(kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "UsageError")
"""click's class, or that of the copy of click inside newer versions of typer."""


class CommandGroup(TyperGroup):
    """A group of commands that end with one red line and the right status after an error or a wrong flag."""

    def main(self, *arguments: Any, **extra: Any) -> Any:
        """Run a command. If the reader of its output has gone, end silently with status 1."""
        try:
            return super().main(*arguments, **extra)
        finally:
            _flush_output()

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except UnisonoError as error:
            if isinstance(error, EngineDead) and error.__cause__ is not None:
                sys.stderr.write("".join(traceback.format_exception(error.__cause__)))
            complain(error)
            ctx.exit(2 if isinstance(error, ConfigError) else 1)
        except UsageError as error:
            if type(error).__name__ == "NoArgsIsHelpError":
                raise
            here = " ".join(filter(None, (ctx.command_path, ctx.invoked_subcommand)))
            where = error.ctx.command_path if error.ctx is not None else here
            complain(_wrong_value(error) or f"{sentence(error.format_message())} See {where} --help.")
            ctx.exit(error.exit_code)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        Page(self, ctx).commands()


def _flush_output() -> None:
    """Write buffered output; the interpreter would complain at its exit if nobody reads it. Raises SystemExit."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)


_RULES = {
    "greater_than_equal": "give at least {ge}",
    "less_than_equal": "give at most {le}",
    "int_parsing": "give a whole number",
    "int_from_float": "give a whole number",
    "float_parsing": "give a number",
}
"""Rule by the type of pydantic's error, which typer raises for a value."""


def _wrong_value(error: Any) -> str | None:
    """The error for a value of a flag, with the limit; None for other errors, and with older versions of typer."""
    cause, param = error.__cause__, getattr(error, "param", None)
    if param is None or not param.opts or not callable(details := getattr(cause, "errors", None)):
        return None
    first = details()[0]
    if (rule := _RULES.get(first["type"])) is None:
        return None
    return f"{param.opts[0]} {first['input']}: {rule.format(**first.get('ctx', {}))}."


def sentence(text: str) -> str:
    """The text with exactly one mark at its end."""
    text = text.rstrip().rstrip(".")
    return text if text.endswith(("?", "!")) else text + "."


def complain(error: UnisonoError | str) -> None:
    """Print an error on one line."""
    stderr.print(f"[bold red]Error:[/] {escape(' '.join(str(error).split()))}", soft_wrap=True, highlight=False)


def note(text: str) -> None:
    """Print a message for the user on one line."""
    stderr.print(f"[dim]{escape(text)}[/]", soft_wrap=True, highlight=False)


class _Stages:
    """Progress of a start: a bar per stage on a terminal, elsewhere a line when a stage begins.

    A stage ends when it is done or when the next one begins.
    """

    def __init__(self) -> None:
        self._begun: dict[str, float] = {}
        self._bars: dict[str, Progress] = {}

    def report(self, stage: str, share: float) -> None:
        if stage not in self._begun:
            if share >= 1:
                return
            self._stop()
            self._begun[stage] = time.monotonic()
            self._begin(stage)
        bar = self._bars.get(stage)
        if bar is not None:
            bar.update(bar.task_ids[0], completed=share)
        if share >= 1:
            self._end(stage)

    def _begin(self, stage: str) -> None:
        if not stderr.is_terminal:
            stderr.print(f"{STAGES.get(stage, stage.capitalize())} …", soft_wrap=True, highlight=False, markup=False)
            return
        columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
        bar = self._bars[stage] = Progress(*columns, console=stderr, transient=True)
        bar.add_task(STAGES.get(stage, stage.capitalize()), total=1.0)
        bar.start()

    def _end(self, stage: str) -> None:
        if (bar := self._bars.pop(stage, None)) is not None:
            bar.stop()

    def _stop(self) -> None:
        for stage in list(self._bars):
            self._end(stage)


@contextlib.contextmanager
def show_progress() -> Iterator[Callable[[str, float], None]]:
    """A progress callback for the stages of a start. It is called with a stage and its completed fraction, 0 … 1."""
    stages = _Stages()
    try:
        yield stages.report
    finally:
        stages._stop()


# ---- tables -----------------------------------------------------------------------------------


def print_tables(info: Mapping[str, Any]) -> None:
    """Print the tables of ``explain`` from an engine's ``info()``."""
    _print("Settings", ("setting", "value"), list(info["settings"].items()))
    _print("Graph memory", ("figure", "value"), list(info["graph_memory"].items()))
    if costs := info["speculation"]["round_ms"]:
        columns = list(costs[0])
        _print("Rounds: ms on padding, by drafts", columns, [[row[c] for c in columns] for row in costs])
    if moved := dict(info.get("kv_offload", {})):
        held = moved.pop("host")
        _print("KV offload", list(held[0]), [list(row.values()) for row in held])
        _print("KV offload: moved", ("figure", "value"), list(moved.items()))
    tables = {"Decisions": info["decisions"], "Experts": info["experts"]}
    tables["Passes"] = [_readable(row) for row in info["graphs"]]
    for title, rows in tables.items():
        if rows:
            # Columns that are empty in every row are left out: most runs have no eager pass, so no reason and no
            # advice.
            columns = list(dict.fromkeys(key for row in rows for key in row if row[key] != ""))
            _print(title, columns, [[row.get(c, "") for c in columns] for row in rows])


def print_dry_run(tables: Mapping[str, Sequence[tuple[str, str]]], decisions: Sequence[Mapping[str, Any]]) -> None:
    """Print the result of ``explain --dry-run``: tables of (name, value), and the decisions."""
    for title, found in tables.items():
        _print(title, ("", ""), found)
    _print("Decisions", ("name", "value", "reason"), [list(each.values()) for each in decisions])


MOST_FIXED, LEAST_WRAPPED = 20, 24
"""Columns with cells of at most MOST_FIXED characters never wrap; others wrap, down to LEAST_WRAPPED."""


def _print(title: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """Print a table within the terminal's width, or that of COLUMNS; in a pipe without COLUMNS, at its full width.

    One column may wrap. If that is not enough, each row is printed as a record.
    """
    cells = [[str(cell) for cell in row] for row in rows]
    table = Table(title=title, title_justify="left")
    narrowest, wrapping = 1, 0
    for place, column in enumerate(columns):
        longest = max((len(row[place]) for row in cells), default=0)
        wraps = longest > MOST_FIXED and any(" " in row[place] for row in cells)
        table.add_column(column, no_wrap=not wraps, overflow="fold")
        wrapping += wraps
        narrowest += 3 + (LEAST_WRAPPED if wraps else max(longest, len(column)))
    for row in cells:
        table.add_row(*map(escape, row))
    width = Measurement.get(stdout, stdout.options.update(width=100_000), table).maximum
    limit = stdout.width if stdout.is_terminal or "COLUMNS" in os.environ else max(width, 80)
    if width > limit:
        table.box = SIMPLE_HEAD  # without lines between columns, a wrapped cell can be copied
    if width <= limit or (wrapping == 1 and narrowest <= limit):
        Console(width=limit, file=stdout.file, color_system=_colours()).print(table)
    else:
        _print_records(title, columns, rows)


def _colours() -> Any:
    return "auto" if stdout.is_terminal else None


def _print_records(title: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """Print rows of two cells as "a: b", longer rows as a block each. Long lines wrap."""
    stdout.print(f"[italic]{escape(title)}[/]")
    for row in rows:
        if len(columns) == 2:
            stdout.print(f"  [bold]{escape(str(row[0]))}[/]: {escape(str(row[1]))}", highlight=False)
            continue
        cells = [(name, str(cell)) for name, cell in zip(columns, row, strict=True) if str(cell) != ""]
        for place, (name, cell) in enumerate(cells):
            mark = "-" if place == 0 else " "
            stdout.print(f"  {mark} [bold]{escape(name)}[/]: {escape(cell)}", highlight=False)
    stdout.print()


def _readable(row: dict[str, Any]) -> dict[str, Any]:
    """A row of the passes' table, with bytes as MiB and times to a tenth."""
    names = {"bytes": ("MiB", 1 << 20), "ms": ("ms", 1), "capture_ms": ("capture", 1)}
    shown = {}
    for key, value in row.items():
        name, unit = names.get(key, (key, None))
        shown[name] = value if unit is None else f"{value / unit:.1f}"
    return shown
