"""The best few tokens against repeated picks: each candidate is what is picked once those before it are forbidden."""

import pytest
import torch

from tests.sampling.arena import DEFAULTS, ROWS, fields_of
from unisono.kernels.sampling import candidates as ops
from unisono.kernels.sampling import sampler as sampling

COUNT = 5


@pytest.fixture(params=["kernel", "twin"])
def best(request, device):
    """``best(logits, rows, count, offset=0, ids=None, edited={})``: candidates with one slot for each of ``rows``."""
    launch = ops.launch_candidates if request.param == "kernel" else ops.candidates.cpu
    device = device if request.param == "kernel" else torch.device("cpu")

    def run(logits, rows, count, offset=0, ids=None, edited=None):
        fields = fields_of(rows, device)
        edits = torch.zeros(len(rows), fields[1].stride(0), dtype=torch.int32, device=device)[:, 0]
        if edited is not None:
            edits[1::2] = 1
        rubbish = torch.full(logits.shape, torch.nan) if edited is None else edited
        slots = torch.arange(len(rows), dtype=torch.int32, device=device)
        return launch(
            logits.to(device), slots, count, *fields, offset, None if ids is None else ids.to(device), edits,
            rubbish.to(device),
        ).cpu()  # fmt: skip

    return run


def by_repeated_picks(logits, rows, count, offset=0, ids=None):
    """The oracle: pick, forbid, pick again. Only for rows whose filters do not move with what is forbidden."""
    slots, columns = torch.arange(len(rows), dtype=torch.int32), []
    left = logits.float().clone()
    for place in range(count):
        token = sampling.sample.cpu(left, slots, 1, *fields_of(rows), offset, ids)
        column = token.long() if ids is None else torch.searchsorted(ids, token).long()
        gone = left.gather(1, column[:, None])[:, 0] == -torch.inf
        columns.append(token.masked_fill(gone, -1) if place else token)
        left.scatter_(1, column[:, None], -torch.inf)
    return torch.stack(columns, 1)


UNFILTERED = [row for row in ROWS if not {"top_k", "top_p", "min_p"} & row.keys() and "status" not in row]


@pytest.mark.parametrize("vocab", [3, 700, 4100, 9000])
def test_candidates_are_repeated_picks(best, vocab, dtype):
    """A block of columns and several; a vocabulary with fewer tokens than candidates."""
    logits = (torch.randn(len(UNFILTERED), vocab) * 2).to(dtype)
    got = best(logits, UNFILTERED, COUNT, offset=3)
    assert torch.equal(got, by_repeated_picks(logits, UNFILTERED, COUNT, 3))
    assert (got[:, 3:] == -1).all() == (vocab == 3)


def test_ids_name_the_tokens(best):
    ids = (torch.randperm(5000)[:900].sort().values).int()
    logits = torch.randn(len(UNFILTERED), 900)
    got = best(logits, UNFILTERED, COUNT, ids=ids)
    assert torch.equal(got, by_repeated_picks(logits, UNFILTERED, COUNT, ids=ids))
    assert set(got.flatten().tolist()) <= set(ids.tolist())


def test_first_candidate_equals_the_sampled_token(best):
    logits = torch.randn(len(ROWS), 600) * 3
    slots = torch.arange(len(ROWS), dtype=torch.int32)
    got = best(logits, ROWS, 4)
    assert torch.equal(got[:, 0], sampling.sample.cpu(logits, slots, 1, *fields_of(ROWS)))


def test_filtered_tokens_are_not_candidates(best):
    rows = [{"top_k": 2}, {"top_k": 1, "temperature": 0.7}, {"min_p": 1.0}, {"top_k": 2, "temperature": 0.0}]
    logits = torch.tensor([[0.0, 3.0, 1.0, 2.0]] * 4)
    got = best(logits, rows, 3)
    assert sorted(got[0].tolist()) == [-1, 1, 3]
    assert got[0, 2] == -1
    assert got[1:3].tolist() == [[1, -1, -1]] * 2
    assert got[3].tolist() == [1, 3, 2], "greedy is not filtered"


def test_ties_go_to_the_lowest_id_and_nan_is_nothing(best):
    logits = torch.tensor([[1.0, -0.0, 0.0, 1.0, torch.nan, -torch.inf]])
    assert best(logits, [{"temperature": 0.0}], 6).tolist() == [[0, 3, 1, 2, -1, -1]]


def test_edited_rows_read_their_edits(best):
    rows = [{"temperature": 0.0}] * 4
    logits, edited = torch.randn(2, 4, 80)
    got = best(logits, rows, 3, edited=edited)
    expected = torch.where((torch.arange(4) % 2 == 0)[:, None], logits, edited).topk(3).indices
    assert torch.equal(got, expected.int())


def test_inactive_rows_are_zeros(best):
    rows = [{}, {"status": 1}, {"status": 4}]
    assert best(torch.randn(3, 50), rows, 3)[1:].tolist() == [[0] * 3] * 2
    assert DEFAULTS["status"] == 0


def test_the_op_is_pure():
    fields = fields_of(ROWS)
    edits = torch.zeros(len(ROWS), fields[1].stride(0), dtype=torch.int32)[:, 0]
    logits, slots = torch.randn(len(ROWS), 9), torch.arange(len(ROWS), dtype=torch.int32)
    given = (logits, slots, 2, *fields, 0, None, edits, logits)
    torch.library.opcheck(torch.ops.unisono.candidates.default, given)
