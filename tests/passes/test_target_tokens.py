"""Values of rows are repeated for the tokens of a pass as kernels read them: contiguous, also for one row."""

from __future__ import annotations

import pytest
import torch

from unisono.passes.features.base import TargetTokens


@pytest.mark.parametrize("rows", [1, 3])
def test_values_of_rows_are_contiguous_in_rounds(rows: int) -> None:
    slots = torch.arange(rows, dtype=torch.int32)
    spread = TargetTokens(slots, rows * 4, 4).spread(10 + slots, -1)
    assert spread.tolist() == [10 + row for row in range(rows) for _ in range(4)]
    assert spread.is_contiguous()


def test_tokens_of_no_row_get_the_padding() -> None:
    slots = torch.arange(2, dtype=torch.int32)
    tokens = TargetTokens(slots, 6, None, torch.tensor([0, 1, 4], dtype=torch.int32))
    assert tokens.spread(7 + slots, -1).tolist() == [7, 8, 8, 8, -1, -1]
