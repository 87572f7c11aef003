"""The command line of a benchmark: flags by Typer, ``--help`` and errors as those of ``unisono``."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import typer

from unisono.console.help import HelpfulCommand
from unisono.console.output import UsageError, complain, sentence
from unisono.types import ConfigError, UnisonoError


def run(command: Callable[..., None], arguments: Sequence[str] | None = None, **settings: Any) -> NoReturn:
    """Run ``command`` and exit: 0, 1 for an error, 2 for a wrong flag.

    arguments: default: those of this process. settings: of the command's context (``context_settings``).
    """
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command(cls=HelpfulCommand, context_settings=settings)(command)
    try:
        status = typer.main.get_command(app).main(
            arguments, prog_name=f"python -m {command.__module__}", standalone_mode=False
        )
    except UnisonoError as error:
        complain(error)
        sys.exit(2 if isinstance(error, ConfigError) else 1)
    except UsageError as error:
        complain(sentence(error.format_message()))
        sys.exit(error.exit_code)
    sys.exit(status or 0)
