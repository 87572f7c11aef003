"""vLLM's dotted flags: ``--speculative-config.method ngram`` is ``--speculative-config '{"method": "ngram"}'``.

Only ``cli/aliases.py`` calls it.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Sequence
from typing import Any

from unisono.config.flag_aliases import SHORT
from unisono.types import ConfigError


def join_dotted(arguments: Sequence[str]) -> list[str]:
    """Replace the dotted flags of each JSON flag by one flag, at the place of the first.

    A value is JSON, or a string if it is not valid JSON. Raises ConfigError for a missing value, a key below a plain
    value, and a flag that is set as a whole, too.
    """
    result, objects = list[str](), dict[str, dict[str, Any]]()
    rest = deque(arguments)
    while rest:
        argument = rest.popleft()
        if argument == "--":
            return [*_filled(result, objects), argument, *rest]
        name, equals, value = argument.partition("=")
        flag, dot, keys = name.partition(".")
        if not (dot and flag.startswith("-") and keys):
            result.append(argument)
            continue
        flag = SHORT.get(flag, flag.replace("_", "-"))
        if not equals:
            if not rest:
                raise ConfigError(f"{name} needs a value.")
            value = rest.popleft()
        if flag not in objects:
            objects[flag] = {}
            result.append(flag)
        _set(objects[flag], keys.split("."), value, name)
    return _filled(result, objects)


def _set(into: dict[str, Any], keys: Sequence[str], value: str, name: str) -> None:
    """Store a value under nested keys. name: the flag, for the error."""
    for key in keys[:-1]:
        into = into.setdefault(key.replace("-", "_"), {})
        if not isinstance(into, dict):
            raise ConfigError(f"{name}: {key} already has a value that is not an object; leave one of them out.")
    try:
        parsed = json.loads(value)
    except ValueError:
        parsed = value
    into[keys[-1].replace("-", "_")] = parsed


def _filled(result: Sequence[str], objects: dict[str, dict[str, Any]]) -> list[str]:
    """The arguments with the JSON of each object after its flag."""
    filled = list[str]()
    for argument in result:
        flag = argument.partition("=")[0].replace("_", "-")
        if flag in objects and filled.count(flag):
            raise ConfigError(f"{flag} is set as JSON and by keys; use one form.")
        filled += [argument, json.dumps(objects[flag])] if argument in objects else [argument]
    return filled
