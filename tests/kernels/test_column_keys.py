"""Sampling from parts of rows against sampling from whole rows: the same tokens, however the columns are divided."""

import pytest
import torch

from tests.sampling.arena import ROWS, fields_of
from unisono.kernels.sampling import candidates, column_keys
from unisono.kernels.sampling import sampler as sampling

UNFILTERED = [row for row in ROWS if not {"top_k", "top_p", "min_p"} & row.keys()]
"""Greedy and drawn rows, and one that does not run."""


@pytest.fixture(params=["kernel", "twin"])
def best(request, device):
    """``best(logits, rows, ranks, count=1, width=1, offset=0, edited=None)``: [N, count], from equal parts of columns.

    A slot for each of ``rows``; with ``edited`` every other one edits.
    """
    kernel = request.param == "kernel"
    keys_of = column_keys.launch_column_keys if kernel else column_keys.column_keys.cpu
    tokens_of = column_keys.launch_best_tokens if kernel else column_keys.best_tokens.cpu
    device = device if kernel else torch.device("cpu")

    def run(logits, rows, ranks, count=1, width=1, offset=0, edited=None):
        length, status, temperature, *_, seed_lo, seed_hi = fields_of(rows, device)
        edits = edits_of(rows, status, edited is not None)
        slots = torch.arange(len(rows), dtype=torch.int32, device=device)
        edited = torch.full_like(logits, torch.nan) if edited is None else edited
        parts = zip(*(x.to(device).chunk(ranks, 1) for x in (logits, edited.float())), strict=True)
        keys, first = [], 0
        for own, changed in parts:
            given = length, status, temperature, seed_lo, seed_hi, offset, first, edits, changed.contiguous()
            keys.append(keys_of(own.contiguous(), slots, width, count, *given))
            first += own.shape[1]
        return tokens_of(torch.cat(keys, 1), slots, width, count, status).cpu()

    return run


def edits_of(rows, status, some):
    """Which slots edit, with the fields' stride."""
    edits = torch.zeros(len(rows), status.stride(0), dtype=torch.int32, device=status.device)[:, 0]
    edits[1::2] = int(some)
    return edits


def picked(logits, rows, width=1, offset=0, edited=None):
    """The oracle: one rank's tokens, from whole rows."""
    fields, slots = fields_of(rows), torch.arange(len(rows), dtype=torch.int32)
    edits = edits_of(rows, fields[1], edited is not None)
    return sampling.sample.cpu(logits, slots, width, *fields, offset, None, edits, edited)[:, None]


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("width", [1, 3, 9])
def test_best_key_over_all_ranks_is_the_sampled_token(best, ranks, width, dtype):
    """Several blocks of columns in a part, with blocks of either size."""
    logits = (torch.randn(len(UNFILTERED) * width, 9000) * 2).to(dtype)
    got = best(logits, UNFILTERED, ranks, width=width, offset=2)
    assert torch.equal(got, picked(logits, UNFILTERED, width, 2))
    assert len(got.unique()) > 1


@pytest.mark.parametrize("vocab", [4, 700, 9000])
def test_the_best_few_are_candidates(best, vocab):
    """A vocabulary with fewer tokens than candidates, and parts of one block and of several."""
    logits, slots = torch.randn(len(UNFILTERED), vocab) * 2, torch.arange(len(UNFILTERED), dtype=torch.int32)
    fields = fields_of(UNFILTERED)
    edits = edits_of(UNFILTERED, fields[1], some=False)
    expected = candidates.candidates.cpu(logits, slots, 6, *fields, 1, None, edits, logits)
    assert torch.equal(best(logits, UNFILTERED, 2, 6, offset=1), expected)


def test_ties_go_to_the_lowest_id_of_all_ranks(best):
    logits = torch.zeros(1, 8)
    logits[0, [2, 3, 6]] = 1.0
    assert best(logits, [{"temperature": 0.0}], 2, 4).tolist() == [[2, 3, 6, 0]]
    assert best(logits, [{"temperature": 0.0}], 4, 4).tolist() == [[2, 3, 6, 0]]
    signed = torch.tensor([[-1.0, -0.0, 0.0, -1.0]])
    assert best(signed, [{"temperature": 0.0}], 2, 4).tolist() == [[1, 2, 0, 3]]


@pytest.mark.parametrize("nothing", [torch.nan, -torch.inf])
@pytest.mark.parametrize("rows", [[{"temperature": 0.0}], [{}]], ids=["greedy", "drawn"])
def test_nan_and_minus_infinity_are_never_picked(best, rows, nothing):
    """Where there is nothing else, token 0 is, as from whole rows; columns after a part's end are no tokens."""
    logits = torch.full((1, 10), nothing)
    assert best(logits, rows, 2, 3).tolist() == [[0, -1, -1]]
    assert picked(logits, rows).tolist() == [[0]]
    logits[0, 7] = -5.0
    assert best(logits, rows, 2, 3).tolist() == [[7, -1, -1]]
    logits[0, 1] = torch.inf
    assert best(logits, rows, 2, 3).tolist() == [[1, 7, -1]]


def test_edited_rows_read_their_edits(best):
    rows = [{"temperature": 0.0}, {"temperature": 0.0}, {}, {}]
    logits, edited = torch.randn(2, 8, 60)
    got = best(logits, rows, 2, width=2, edited=edited)
    assert torch.equal(got, picked(logits, rows, 2, edited=edited))
    assert not torch.equal(got, picked(logits, rows, 2))


def test_inactive_rows_are_zeros(best):
    assert best(torch.randn(3, 50), [{}, {"status": 1}, {"status": 4}], 2, 3)[1:].tolist() == [[0] * 3] * 2


def test_a_part_has_few_keys(device):
    length, status, temperature, *_, seed_lo, seed_hi = fields_of([{}] * 17)
    edits, logits = edits_of([{}] * 17, status, some=False), torch.randn(17, 9000)
    given = length, status, temperature, seed_lo, seed_hi, 0, 0, edits, logits
    keys = column_keys.column_keys(logits, torch.arange(17, dtype=torch.int32), 1, 1, *given)
    assert keys.nbytes == 17 * column_keys.key_bytes(9000) == 17 * 3 * 8


def test_the_ops_are_pure():
    length, status, temperature, *_, seed_lo, seed_hi = fields_of(UNFILTERED)
    edits = edits_of(UNFILTERED, status, some=False)
    logits, slots = torch.randn(len(UNFILTERED), 9), torch.arange(len(UNFILTERED), dtype=torch.int32)
    given = (logits, slots, 1, 2, length, status, temperature, seed_lo, seed_hi, 0, 9, edits, logits)
    torch.library.opcheck(torch.ops.unisono.column_keys.default, given)
    keys = column_keys.column_keys(*given)
    torch.library.opcheck(torch.ops.unisono.best_tokens.default, (keys, slots, 1, 2, status))
