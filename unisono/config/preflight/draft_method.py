"""The speculative method of a draft head's directory, from its config.json alone."""

from __future__ import annotations

from collections.abc import Mapping

ASSISTANTS = ("Gemma4Assistant", "Gemma4UnifiedAssistant")
"""Beginnings of the architectures of drafters that read their target's keys."""

_BY_KIND = {"eagle3": "eagle3", "dflash": "dflash", "dflash2": "dflash", "dspark": "dspark"}
_BY_NAME = {"DFlash": "dflash", "DSpark": "dspark", "Eagle3": "eagle3"}
"""Part of an architecture's name -> method."""


def draft_method(raw: object) -> str | None:
    """The method that loads a head with this config.json; None if it does not determine one, or is no JSON object."""
    if not isinstance(raw, Mapping):
        return None
    names = raw.get("architectures")
    first = str(names[0]) if isinstance(names, list) and names else ""
    if first.startswith(ASSISTANTS):
        return "mtp_frozen"
    kind = raw.get("speculators_model_type")
    if kind is not None:
        return _BY_KIND.get(str(kind))
    return next((method for part, method in _BY_NAME.items() if part in first), None)
