"""Positions inside a prompt at which other prompts may leave it: its first reading takes snapshots there.

Pages of a cached prefix serve any prompt that shares them; a recurrence also needs a snapshot. Without one near the
branch, the second prompt of a shared beginning computes all of it again. A snapshot costs a prompt pass of its own,
because the recurrent state is at hand only where a chunk ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from unisono.kv.specs import PAGE_SIZE

LEAST_GAIN = 128
"""Tokens that a snapshot must save, beyond the snapshot before it, to be worth a pass."""
TAIL_SHARE = 16
"""A prompt's last pages that later prompts may replace: one of so many, at least one page."""


@dataclass(frozen=True)
class BranchPoints:
    """Chooses page ends of a prompt.

    most: positions per prompt; 0 for none.
    message_ends: token ids that end a message of a chat, the model's end-of-sequence ids.
    """

    most: int = 0
    message_ends: frozenset[int] = frozenset()

    def of(self, tokens: Sequence[int], cached: int) -> tuple[int, ...]:
        """Return at most ``most`` page ends, ascending, beyond the first ``cached`` tokens.

        The first is the end of the first message, a system prompt that many conversations share. The other lies before
        the last TAIL_SHARE-th of the prompt, for a document with a question after it.
        """
        if self.most == 0 or len(tokens) - cached < LEAST_GAIN:
            return ()
        first = next((i + 1 for i, token in enumerate(tokens) if token in self.message_ends), 0)
        pages = len(tokens) // PAGE_SIZE
        tail = (pages - max(1, pages // TAIL_SHARE)) * PAGE_SIZE
        found: list[int] = []
        for at in (first - first % PAGE_SIZE, tail):
            if at - max(cached, *found, 0) >= LEAST_GAIN and len(found) < self.most:
                found.append(at)
        return tuple(found)


NO_POINTS = BranchPoints()
