"""``--config FILE.yaml``: flags in a file, in vLLM's form. The command line wins."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from unisono.config.flag_aliases import RENAMED
from unisono.types import ConfigError


def with_config(arguments: Sequence[str], switches: Collection[str]) -> list[str]:
    """The command line, preceded by the flags of its ``--config`` file.

    Keys are flags without the leading dashes; "model" is PATH. A list gives a flag several values; true and false turn
    a switch on and off. A key whose flag is on the command line is left out. switches: the flags without a value.
    Raises ConfigError.
    """
    own, file = _split(arguments)
    if file is None:
        return list(arguments)
    stems = {_stem(argument.partition("=")[0]) for argument in own if argument.startswith("--")}
    path: list[str] = []
    flags: list[str] = []
    for key, value in _read(file).items():
        flag = "--" + key.replace("_", "-")
        if flag in ("--model", "--model-path"):
            path = [] if _names_model(own, switches) else ["--model", str(value)]
        elif _stem(flag) not in stems:
            flags += _arguments(flag, value, switches, file)
    return [*path, *flags, *own]


def _split(arguments: Sequence[str]) -> tuple[list[str], str | None]:
    """(the arguments without --config, its value)."""
    own, file = [], None
    rest = iter(arguments)
    for argument in rest:
        if argument == "--config" or argument.startswith("--config="):
            file = argument.partition("=")[2] if "=" in argument else next(rest, "")
        else:
            own.append(argument)
    return own, file


def _read(file: str) -> dict[str, Any]:
    import yaml

    try:
        found = yaml.safe_load(Path(file).read_text())
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--config {file}: cannot be read: {getattr(error, 'strerror', None) or error}.") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"--config {file} is not valid YAML: {error}.") from None
    if found is None:
        return {}
    if not isinstance(found, dict) or not all(isinstance(key, str) for key in found):
        raise ConfigError(f"--config {file}: give a mapping of flags to values, for example max-num-seqs: 8.")
    if "config" in found:
        raise ConfigError(f"--config {file} names another --config; put all flags into one file.")
    return found


def _arguments(flag: str, value: Any, switches: Collection[str], file: str) -> list[str]:
    if value is None:
        return []
    if isinstance(value, bool):
        off = "--no-" + flag[2:]
        if value:
            return [flag]
        return [off] if off in switches else []
    if isinstance(value, dict):
        return [flag, json.dumps(value)]
    if isinstance(value, list):
        if not all(isinstance(one, (str, int, float)) for one in value):
            raise ConfigError(f"--config {file}: {flag[2:]}: give a list of plain values.")
        return [part for one in value for part in (flag, str(one))]
    return [f"{flag}={value}"]


def _stem(flag: str) -> str:
    """A flag's name in Unisono's spelling, equal for a flag and its negation."""
    return RENAMED.get(flag, flag).removeprefix("--").removeprefix("no-")


def _names_model(own: Sequence[str], switches: Collection[str]) -> bool:
    """True if the command line has PATH or --model."""
    rest = iter(own)
    for argument in rest:
        flag = argument.partition("=")[0]
        if flag in ("--model", "--model-path") or not argument.startswith("-"):
            return True
        if "=" not in argument and flag not in switches:
            next(rest, None)
    return False
