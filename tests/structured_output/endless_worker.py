"""The worker that compiles grammars, with an expression that never ends: real ones of llguidance take milliseconds."""

from __future__ import annotations

from typing import Any

from unisono.structured_output.workers import worker

ENDLESS = "a?" * 2000
"""Compiling an expression that begins so never ends."""

_parse = worker.parse


def _parse_or_never(kind: str, given: Any, *rest: Any) -> str:
    while kind == "regex" and given.startswith(ENDLESS):
        pass
    return _parse(kind, given, *rest)


def main(descriptor: int) -> None:
    worker.parse = _parse_or_never
    worker.main(descriptor)
