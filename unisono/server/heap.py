"""The Python heap of a process that serves."""

from __future__ import annotations

import gc


def settle_heap() -> None:
    """Collect garbage, and have later collections pass over what is left: a model's and its libraries' objects.

    Looking through all of these takes 0.2 s, in which nobody gets a token. For processes of the project's own: whatever
    is there now is never looked at again.
    """
    gc.collect()
    gc.freeze()
