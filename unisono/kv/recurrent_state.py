"""Where the recurrences of a pass's rows begin, and how far their snapshots move.

A recurrence is computed from its snapshot, which was taken after a multiple of PAGE_SIZE tokens: first the raw inputs
that the row remembers, then the pass's own. So its arithmetic is tied to absolute positions, and a token's bits do not
depend on how the text was cut into passes. Only committed tokens move the snapshot: rejected drafts leave nothing
behind but inputs that the next pass overwrites.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from unisono.kv.specs import PAGE_SIZE


@dataclass(frozen=True)
class TailPass:
    """One pass over R rows, all int32 [R].

    rows: each row's row of :class:`unisono.kv.store.TailView`. since: tokens that its snapshot has seen before the
    pass. first: position of the row's first token of the pass. Inputs of positions since … first - 1 are remembered.
    until: tokens that the snapshot has to have seen after the pass. end: the position after the row's last token that
    counts. Rows without a request have first -1 and end 0, and keep their state. A token counts if it stands at the
    position that follows the token before it in its row; others are padding.
    """

    rows: torch.Tensor
    since: torch.Tensor
    first: torch.Tensor
    until: torch.Tensor
    end: torch.Tensor

    @property
    def fields(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """rows, since, first, until, end: what kernels take."""
        return self.rows, self.since, self.first, self.until, self.end

    @staticmethod
    def of(
        rows: torch.Tensor, positions: torch.Tensor, kv_len: torch.Tensor, query_start: torch.Tensor | None,
        seen: torch.Tensor, singles: int = 0,
    ) -> TailPass:  # fmt: skip
        """A pass as attention is told of it: positions [T], kv_len [R], query_start [R + 1], None for a round.

        In a round the tokens before each row's first one are committed and the others are drafts; in a prompt pass all
        tokens are committed. The first ``singles`` rows of a prompt pass move their snapshots as those of a round do.
        seen [NR]: tokens that the snapshots of all rows have seen.
        """
        since = seen.index_select(0, rows)
        if query_start is None:
            committed = first = positions.view(rows.shape[0], -1)[:, 0].contiguous()
        else:
            first, committed = (kv_len - query_start.diff()).masked_fill(kv_len == 0, -1), kv_len
            if singles:
                committed = torch.cat((first[:singles], kv_len[singles:]))
        until = torch.where(first >= 0, committed - committed % PAGE_SIZE, since)
        return TailPass(rows, since, first, until, kv_len)

    def advance(self, seen: torch.Tensor) -> None:
        """After the pass: write ``until`` into seen [NR]."""
        seen.index_copy_(0, self.rows.long(), self.until)
