"""Parsers of flag values that need more than a type. Each raises ConfigError with the flag and the way out."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from typing import Any

from unisono.config import catalog, env
from unisono.types import ConfigError, SpeculativeConfig

LOG_LEVELS = ("debug", "info", "warning", "error", "critical")


def checked_key(value: str | None) -> str | None:
    """The API key; None for no key. An empty one is refused: it would look protected and serve everybody."""
    named = env.api_key()
    if value is None and named is not None:  # the parser treats an empty variable as unset
        value = named
    if value is not None and not value.strip():
        source = f"The environment variable {env.API_KEY.name}" if value == named else "--api-key"
        raise ConfigError(f"{source} is empty, which protects nothing: give a key, or leave it out to serve openly.")
    return value


def log_level_named(name: str) -> int:
    """A level of ``logging``. uvicorn's ``trace`` is debug."""
    known = logging.getLevelNamesMapping() | {"TRACE": logging.DEBUG}
    if name.lower() not in (*LOG_LEVELS, "trace"):
        raise ConfigError(f"--log-level {name!r} is unknown; choose one of {', '.join(LOG_LEVELS)}.")
    return known[name.upper()]


def read_template(value: str | None) -> str | None:
    """The text of a chat template: a file's, or the value itself if it has braces."""
    if value is None:
        return None
    text = value
    if "{" not in value or Path(value).is_file():
        try:
            text = Path(value).read_text()
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or error
            raise ConfigError(f"--chat-template {value}: cannot be read: {reason}.") from None
    import jinja2
    from jinja2.ext import loopcontrols

    try:
        if "generation" not in text:  # transformers has a tag of this name, which plain Jinja does not know
            jinja2.Environment(extensions=[loopcontrols]).parse(text)
    except jinja2.TemplateSyntaxError as error:
        raise ConfigError(f"--chat-template, line {error.lineno}: {error.message}.") from None
    return text


def template_variables(text: str | None) -> dict[str, Any]:
    """The variables of ``--default-chat-template-kwargs``. Raises ConfigError unless it is a JSON object."""
    flag = "--default-chat-template-kwargs"
    try:
        found = json.loads(text) if text is not None else {}
    except ValueError as error:
        raise ConfigError(f"{flag} is not valid JSON: {error}.") from None
    if not isinstance(found, dict):
        raise ConfigError(f'{flag} {text}: give a JSON object, for example {{"enable_thinking": false}}.')
    return found


def strings(flag: str, text: str) -> tuple[str, ...]:
    """A JSON list of strings, as in vLLM's flags; a plain word is a list of one."""
    if not text.lstrip().startswith("["):
        return tuple(part.strip() for part in text.split(",") if part.strip())
    try:
        found = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{flag} {text}: is not valid JSON: {error}.") from None
    if not all(isinstance(one, str) for one in found):
        raise ConfigError(f'{flag} {text}: give a list of strings, for example ["*"].')
    return tuple(found)


def speculative_dict(text: str) -> dict[str, Any]:
    """Parse the JSON object of ``--speculative-config``."""
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"--speculative-config is not valid JSON: {error}.") from None
    if not isinstance(value, dict):
        raise ConfigError(f"--speculative-config {text!r}: give a JSON object.")
    return value


def speculative(text: str) -> SpeculativeConfig:
    """Parse ``--speculative-config``; its method must be in the catalog."""
    config = SpeculativeConfig.parse(speculative_dict(text))
    if config.method not in catalog.drafters:
        known = ", ".join(catalog.drafters.names)
        raise ConfigError(f'--speculative-config: "method": {config.method!r}: unknown drafter. Supported: {known}.')
    return config


def whole_numbers(flag: str, text: str, some: bool = False) -> list[int]:
    """Parse whole numbers from 1 on, separated by commas. some: at least one is required."""
    parts = [part.strip() for part in text.split(",") if part.strip()]
    ok = all(part.isascii() and part.isdecimal() and 1 <= int(part[:12]) < 2**31 for part in parts)
    if not ok or (some and not parts):
        raise ConfigError(f"{flag} {text!r}: give whole numbers from 1 on, separated by commas.")
    return [int(part) for part in parts]


def shares(flag: str, text: str) -> tuple[float, ...]:
    """Parse numbers from 0 to 1, separated by commas; an empty text is an empty tuple."""
    try:
        return tuple(float(part) for part in text.split(",") if part.strip())
    except ValueError:
        raise ConfigError(f"{flag} {text!r}: give shares from 0 to 1, separated by commas.") from None


def writable(flag: str, file: Path | None) -> None:
    """Check that ``file`` can be written, before anything that takes long runs."""
    if file is None:
        return
    folder = file.parent
    if file.is_dir() or not folder.is_dir():
        reason = "is a directory; give a file" if file.is_dir() else f"the directory {folder} does not exist"
        raise ConfigError(f"{flag} {file}: {reason}.")
    if not os.access(file if file.exists() else folder, os.W_OK):
        raise ConfigError(f"{flag} {file}: it cannot be written here.")
