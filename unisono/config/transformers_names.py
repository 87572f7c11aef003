"""Names of transformers, for imports from several threads."""

from __future__ import annotations

import importlib
import sys
from typing import Any


def from_transformers(name: str) -> Any:
    """Import transformers, which takes seconds, and return its ``name``.

    transformers replaces itself in ``sys.modules`` at the end of its import. A thread whose ``from`` import waited for
    another thread's has the module before that, which lacks the name (ImportError).
    """
    importlib.import_module("transformers")
    return getattr(sys.modules["transformers"], name)
