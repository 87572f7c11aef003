"""The merge of cut tiles by a kernel of its own has the bits of the merge by the last program."""

import pytest
import torch

from tests.kernels.paged_requests import Requests
from unisono.kernels.attention import merge, paged

LENGTHS = [700, 300, 37]
ENDS = [(0, 700), None, (2, 37), (1, 290)]


def rounds(case: Requests, width: int, monkeypatch, most: int) -> tuple[list[torch.Tensor], list[object]]:
    """Rounds with every tile cut, with few of them and with none, and the launches of the merge."""
    launched: list[object] = []
    launch = merge.launch_merge
    with monkeypatch.context() as patch:
        patch.setattr(merge, "MOST_TILES", most)
        patch.setattr(paged, "launch_merge", lambda *args: launched.append(launch(*args)))
        torch.manual_seed(1)
        plans = (10**6, 64), (20, 64), (10**6, 3), (1, 64)  # programs, places of the workspace
        return [case.round(ENDS, width, *plan) for plan in plans], launched


@pytest.mark.parametrize(("width", "window", "planned"), [(1, 0, False), (3, 300, True), (2, 40, True), (1, 40, False)])
def test_a_separate_merge_has_the_same_bits(width, window, planned, monkeypatch):
    torch.manual_seed(0)
    sizes = {"heads": 4, "kv_heads": 2, "dim": 256, "window": window, "planned_window": planned}
    case = Requests(LENGTHS, True, torch.float16, **sizes, to_e4m3=True)
    want, without = rounds(case, width, monkeypatch, 0)
    got, launched = rounds(case, width, monkeypatch, 132)
    assert launched
    assert not without
    for ours, theirs in zip(got, want, strict=True):
        assert torch.equal(ours, theirs)
        assert (ours[1] == 0).all(), "padding"


def test_splits_merge_separately_where_that_is_served():
    wide = (16, 2, 512)
    assert merge.merges_separately(wide, 16, 0, 0, True)
    assert merge.merges_separately((16, 8, 256), 8, 1024, 0, True)
    assert not merge.merges_separately((16, 8, 256), 9, 1024, 0, True), "tiles enough for all processors"
    assert not merge.merges_separately((32, 8, 128), 1, 0, 0, True)
    assert not merge.merges_separately(wide, 1, -64, 0, True)
    assert not merge.merges_separately(wide, 1, 0, 1, True)
    assert not merge.merges_separately(wide, 1, 0, 0, False)
