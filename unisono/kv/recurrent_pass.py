"""Start and end positions of the recurrences in a pass.

A recurrence is computed from its snapshot, taken after a multiple of PAGE_SIZE tokens: first over the raw inputs kept
for the row, then over the pass's own tokens. Its arithmetic is thus tied to absolute positions, and a token's bits do
not depend on how the text was cut into passes. Only committed tokens advance the snapshot: rejected drafts leave
nothing behind but inputs that the next pass overwrites.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from unisono.kv.specs import PAGE_SIZE


@dataclass(frozen=True)
class RecurrentPass:
    """Recurrent state positions of one pass over R rows; all fields int32 [R].

    rows: index of each row in :class:`unisono.kv.store.RecurrentView`.
    since: tokens covered by the row's snapshot before the pass.
    first: position of the row's first token in the pass. Inputs of positions since … first - 1 are buffered.
    until: tokens covered by the snapshot after the pass.
    end: position after the row's last valid token.

    Rows without a request have first -1 and end 0 and keep their state. A token is valid if its position follows that
    of the token before it in its row; other tokens are padding.
    """

    rows: torch.Tensor
    since: torch.Tensor
    first: torch.Tensor
    until: torch.Tensor
    end: torch.Tensor

    @property
    def fields(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """rows, since, first, until, end: the arguments of the kernels."""
        return self.rows, self.since, self.first, self.until, self.end

    @staticmethod
    def of(
        rows: torch.Tensor, positions: torch.Tensor, kv_len: torch.Tensor, query_start: torch.Tensor | None,
        seen: torch.Tensor, singles: int = 0,
    ) -> RecurrentPass:  # fmt: skip
        """Build from attention inputs: positions [T], kv_len [R], query_start [R + 1] or None for a round.

        In a round, the tokens before each row's first one are committed and the rest are drafts. In a prompt pass all
        tokens are committed. The first ``singles`` rows of a prompt pass advance their snapshots as rows of a round do;
        in a round whose rows differ in width these are all rows.
        seen [NR]: tokens covered by the snapshots of all rows.
        """
        since = seen.index_select(0, rows)
        if query_start is None:
            committed = first = positions.view(rows.shape[0], -1)[:, 0].contiguous()
        else:
            first, committed = (kv_len - query_start.diff()).masked_fill(kv_len == 0, -1), kv_len
            if singles:
                committed = torch.cat((first[:singles], kv_len[singles:]))
        until = torch.where(first >= 0, committed - committed % PAGE_SIZE, since)
        return RecurrentPass(rows, since, first, until, kv_len)

    def advance(self, seen: torch.Tensor) -> None:
        """Write ``until`` into seen [NR], after the pass."""
        seen.index_copy_(0, self.rows.long(), self.until)
